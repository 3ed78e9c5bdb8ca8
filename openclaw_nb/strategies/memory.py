"""What may be asked of a worker's memory, checked, in the words of cells and scripts.

Knows words and numbers; does not know torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_nb.core.errors import UsageError


@dataclass(frozen=True)
class Memory:
    """How a strategy cell saves memory.

    Parameters
    ----------
    activation_checkpointing : bool, str or sequence of str
        Keep only the inputs of the model's blocks for the backward pass, and compute the rest again there. ``True``
        takes the elements of lists of blocks; words name others, as in `strategies.precision.Precision`.
    pooling : bool
        On a GPU, let torch's pool of memory grow in place, so that freed pieces of any size are used again.
    gpu_fraction : float, optional
        On a GPU, the part of its memory that the worker may take.

    Raises
    ------
    UsageError
        When a value cannot be.
    """

    activation_checkpointing: bool | str | Sequence[str] = False
    pooling: bool = False
    gpu_fraction: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "activation_checkpointing", _checked_blocks(self.activation_checkpointing))
        if not isinstance(self.pooling, bool):
            raise UsageError(f"memory_pooling is True or False, not {self.pooling!r}.")
        fraction = self.gpu_fraction
        is_number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        if fraction is not None and not (is_number and 0 < fraction <= 1):
            raise UsageError(
                f"gpu_memory_fraction is a part of the GPU's memory, above 0 and up to 1, not {fraction!r}."
            )

    def options(self) -> dict[str, Any]:
        """Return what the workers are told: what differs from torch's own ways."""
        found: dict[str, Any] = {}
        if blocks := self.activation_checkpointing:
            found["activation_checkpointing"] = True if blocks is True else list(blocks)
        if self.pooling:
            found["memory_pooling"] = True
        if self.gpu_fraction is not None:
            found["gpu_memory_fraction"] = float(self.gpu_fraction)
        return found

    @classmethod
    def told(cls, options: Mapping[str, Any]) -> Memory:
        """Return what a worker was told by `options`."""
        return cls(
            options.get("activation_checkpointing", False),
            bool(options.get("memory_pooling", False)),
            options.get("gpu_memory_fraction"),
        )


def _checked_blocks(blocks: Any) -> bool | tuple[str, ...]:
    if isinstance(blocks, bool):
        return blocks
    words = [blocks] if isinstance(blocks, str) else list(blocks)
    if not words or not all(isinstance(word, str) and word.strip() for word in words):
        raise UsageError(
            f"activation_checkpointing is True, or words for layers such as ['encoder.layers.*'], not {blocks!r}."
        )
    return tuple(word.strip() for word in words)
