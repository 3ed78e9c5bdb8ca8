"""What several strategies are asked for alike, checked in one place.

Knows words and numbers; does not know torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_nb.plan.parallelism import check_degree
from openclaw_nb.strategies.memory import Memory
from openclaw_nb.strategies.precision import HasPrecision, Precision, read_precision

_COUNTS = ("sync_frequency", "accumulate")


@dataclass(frozen=True, kw_only=True)
class Computing:
    """How the workers' models compute: in which precision, and what they save memory by.

    Parameters
    ----------
    precision : {"fp32", "bf16", "fp16"} or MixedPrecisionCoordinator
        What the model's operations compute in; parameters, gradients and optimizers stay float32. With ``"fp16"`` the
        loss is scaled, by one scale on all workers. A coordinator chooses layers, and its devices when none are given.
    activation_checkpointing : bool, str or sequence of str
        Keep only the inputs of the model's blocks for the backward pass, and compute the rest again there: True for the
        elements of lists of blocks, or words for layers. The result is the same; memory is saved for time.
    memory_pooling : bool
        On a GPU, let torch's pool of memory grow in place, so that freed pieces of any size are used again.
    gpu_memory_fraction : float, optional
        On a GPU, the part of its memory that a worker may take.

    Raises
    ------
    UsageError
        When a value cannot be.
    """

    precision: str | Precision | HasPrecision = "fp32"
    activation_checkpointing: bool | str | Sequence[str] = False
    memory_pooling: bool = False
    gpu_memory_fraction: float | None = None

    def __post_init__(self) -> None:
        for option in _COUNTS:
            check_degree(option, getattr(self, option, 1))
        _ = self._memory
        devices = getattr(self, "devices", None) or getattr(self.precision, "devices", None)
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "precision", read_precision(self.precision))

    @property
    def _memory(self) -> Memory:
        return Memory(self.activation_checkpointing, self.memory_pooling, self.gpu_memory_fraction)

    def computing_options(self) -> dict[str, Any]:
        """Return what the workers are told of this: what differs from torch's own ways."""
        return read_precision(self.precision).options() | self._memory.options()
