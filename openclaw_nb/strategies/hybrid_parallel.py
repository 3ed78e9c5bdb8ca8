"""Hybrid as it is asked for: how many workers along each axis, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from openclaw_nb.core.errors import UsageError
from openclaw_nb.plan.parallelism import check_degree
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.strategies.common import Computing
from openclaw_nb.strategies.tensor_parallel import check_plan

_DEGREES = ("data_parallel_degree", "model_parallel_degree", "pipeline_degree", "tensor_parallel_degree")


@dataclass(frozen=True)
class HybridParallelStrategy(Computing):
    """Workers along several axes: batches are shared out along one, layers along the other.

    Parameters
    ----------
    data_parallel_degree : int
        How many parts a batch has.
    model_parallel_degree, pipeline_degree : int
        How many parts the model is cut into, layer by layer; 1 is possible so far.
    tensor_parallel_degree : int
        Among how many workers each large layer is shared out.
    devices : sequence of str, optional
        The devices whose workers take part; all when not given. The degrees multiply to their number.
    plan : mapping of str to str, optional
        As of `TensorParallelStrategy`.
    sync_frequency, accumulate : int
        How many batches make one step; both multiply.
    **computing
        Precision and memory: those of `openclaw_nb.strategies.common.Computing`.

    Raises
    ------
    UsageError
        When a value cannot be.

    Examples
    --------
    >>> HybridParallelStrategy(2, tensor_parallel_degree=2).spec().options["tensor_parallel_degree"]
    2
    """

    name: ClassVar[str] = "hybrid_parallel"

    data_parallel_degree: int = 1
    model_parallel_degree: int = 1
    pipeline_degree: int = 1
    tensor_parallel_degree: int = 1
    devices: Sequence[str] | None = None
    plan: Mapping[str, str] | None = None
    sync_frequency: int = 1
    accumulate: int = 1
    memory_pinning: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in _DEGREES:
            check_degree(option, getattr(self, option))
        check_plan(self.plan)
        for option in ("model_parallel_degree", "pipeline_degree"):
            if getattr(self, option) > 1:
                raise UsageError(
                    f"{option}={getattr(self, option)}: hybrid_parallel has no stages of layers yet, as its step "
                    "engine runs the whole model in one call on each rank. Use data_parallel_degree and "
                    "tensor_parallel_degree (--dp, --tp)."
                )

    def spec(self, **cell: Any) -> StrategySpec:
        """Return what the workers are told.

        Parameters
        ----------
        **cell
            The other fields of `StrategySpec`: which model, optimizer and loader.
        """
        options: dict[str, Any] = {
            "data_parallel_degree": self.data_parallel_degree,
            "tensor_parallel_degree": self.tensor_parallel_degree,
            "sync_frequency": self.sync_frequency,
            "accumulate": self.accumulate,
            "memory_pinning": self.memory_pinning,
        }
        if self.plan:
            options["plan"] = dict(self.plan)
        options |= self.computing_options()
        return StrategySpec(name=self.name, options=options, **cell)
