"""Tensor parallel as it is asked for: the options, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from openclaw_nb.core.errors import UsageError, unknown_name
from openclaw_nb.plan.parallelism import check_degree
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.strategies.common import Computing

ROLES = ("column", "row", "heads")


@dataclass(frozen=True)
class TensorParallelStrategy(Computing):
    """Every worker has a part of each large layer, and sees the same batch.

    Parameters
    ----------
    devices : sequence of str, optional
        The devices whose workers take part; all when not given.
    tensor_parallel_degree : int, optional
        Among how many workers layers are shared out; all that take part when not given.
    plan : mapping of str to {"column", "row", "heads"}, optional
        Names of layers, or regular expressions that match whole names, to how they are shared out: ``column`` by the
        output features of an ``nn.Linear`` or the features of an ``nn.Embedding``, ``row`` by the input features of an
        ``nn.Linear`` or the rows of an ``nn.Embedding``, ``heads`` an ``nn.MultiheadAttention``. Found from the
        model's first forward pass when not given.
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
    >>> TensorParallelStrategy(plan={"net.0": "column", "net.2": "row"}).spec().options["plan"]
    {'net.0': 'column', 'net.2': 'row'}
    """

    name: ClassVar[str] = "tensor_parallel"

    devices: Sequence[str] | None = None
    tensor_parallel_degree: int | None = None
    plan: Mapping[str, str] | None = None
    sync_frequency: int = 1
    accumulate: int = 1
    memory_pinning: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_parallel_degree is not None:
            check_degree("tensor_parallel_degree", self.tensor_parallel_degree)
        check_plan(self.plan)

    def spec(self, **cell: Any) -> StrategySpec:
        """Return what the workers are told.

        Parameters
        ----------
        **cell
            The other fields of `StrategySpec`: which model, optimizer and loader.
        """
        options: dict[str, Any] = {
            "sync_frequency": self.sync_frequency,
            "accumulate": self.accumulate,
            "memory_pinning": self.memory_pinning,
        }
        if self.tensor_parallel_degree is not None:
            options["tensor_parallel_degree"] = self.tensor_parallel_degree
        if self.plan:
            options["plan"] = dict(self.plan)
        options |= self.computing_options()
        return StrategySpec(name=self.name, options=options, **cell)


def check_plan(plan: Any) -> None:
    """Refuse what is no plan.

    Raises
    ------
    UsageError
        When it is no mapping of names to roles.
    """
    if plan is None:
        return
    if not isinstance(plan, Mapping):
        raise UsageError(f"plan maps names of layers to {', '.join(ROLES)}, it is not {plan!r}.")
    for name, role in plan.items():
        if not isinstance(name, str):
            raise UsageError(f"plan has names of layers, not {name!r}.")
        if role not in ROLES:
            raise unknown_name(f"role for {name}", str(role), ROLES)


def parse_plan(text: str) -> dict[str, str]:
    """Read a plan as it is written on a line: ``net.0=column,net.2=row``.

    Raises
    ------
    UsageError
        When it cannot be read.

    Examples
    --------
    >>> parse_plan("net.0=column,net.2=row")
    {'net.0': 'column', 'net.2': 'row'}
    """
    plan: dict[str, str] = {}
    for part in text.split(","):
        name, equals, role = part.rpartition("=")
        if not equals or not name.strip():
            raise UsageError(f"--tp-plan is written as net.0=column,net.2=row, not {text!r}.")
        plan[name.strip()] = role.strip()
    check_plan(plan)
    return plan
