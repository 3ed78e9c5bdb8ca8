"""In which precision a cell's model computes, as it is asked for: checked, in the words of cells and scripts.

Knows words; does not know torch, nor what a device can do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from openclaw_nb.core.errors import UsageError, unknown_name

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Precision:
    """What computes in which precision; parameters, gradients and optimizers stay float32.

    Parameters
    ----------
    name : {"fp32", "bf16", "fp16"}
        What the model's operations compute in, where torch's autocast knows them to bear it.
    layers : sequence of str, optional
        Only these layers: names of submodules, words for types (``conv``, ``linear``, ``attention``, ...), or regular
        expressions for names. The whole model when not given.
    scaler : {"dynamic", "none"} or number
        How the loss is scaled with ``fp16``, whose smallest values are lost otherwise: by a scale that follows
        overflows, not at all, or by this factor.

    Raises
    ------
    UsageError
        When a value cannot be.
    """

    name: str = "fp32"
    layers: Sequence[str] | None = None
    scaler: str | float | None = "dynamic"

    def __post_init__(self) -> None:
        if self.name not in PRECISIONS:
            raise unknown_name("precision", self.name, PRECISIONS)
        object.__setattr__(self, "layers", _checked_layers(self.layers))
        object.__setattr__(self, "scaler", _checked_scaler(self.scaler))
        if self.layers is not None and self.name == "fp32":
            raise UsageError("Layers in fp32 are what they are without naming them: ask for fp16 or bf16.")

    def options(self) -> dict[str, Any]:
        """Return what the workers are told; nothing for float32."""
        if self.name == "fp32":
            return {}
        layers = None if self.layers is None else list(self.layers)
        return {"precision": {"name": self.name, "layers": layers, "scaler": self.scaler}}

    @classmethod
    def told(cls, options: Mapping[str, Any]) -> Precision:
        """Return what a worker was told by `options`."""
        return cls(**options.get("precision", {}))


class HasPrecision(Protocol):
    """What stands for a precision, such as `openclaw_nb.optimization.MixedPrecisionCoordinator`."""

    @property
    def precision(self) -> Precision:
        """What it asks for."""


def read_precision(given: str | Precision | HasPrecision) -> Precision:
    """Return the precision that a word or a description says.

    Raises
    ------
    UsageError
        For anything else.
    """
    found = Precision(given) if isinstance(given, str) else getattr(given, "precision", given)
    if not isinstance(found, Precision):
        raise UsageError(
            f"precision is one of {', '.join(PRECISIONS)}, or a MixedPrecisionCoordinator, not {given!r}."
        )
    return found


def _checked_layers(layers: Any) -> tuple[str, ...] | None:
    if layers is None:
        return None
    words = [layers] if isinstance(layers, str) else list(layers)
    if not words or not all(isinstance(word, str) and word.strip() for word in words):
        raise UsageError(
            f"Layers are named by words, such as ['conv', 'attention'] or ['encoder.0'], not {layers!r}."
        )
    return tuple(word.strip() for word in words)


def _checked_scaler(scaler: Any) -> str | float:
    if scaler is None:
        return "none"
    if scaler in ("dynamic", "none"):
        return str(scaler)
    is_number = isinstance(scaler, int | float) and not isinstance(scaler, bool)
    if not is_number or not 0 < scaler < math.inf:
        raise UsageError(f"scaler is 'dynamic', 'none' or a factor above 0, not {scaler!r}.")
    return float(scaler)
