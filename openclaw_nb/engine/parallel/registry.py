"""Which class makes which strategy real, and the context that a strategy cell runs in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from openclaw_nb.core.errors import GroupError, unknown_name
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.group.service import GroupService
from openclaw_nb.engine.memory.limits import has_gpu, memory_limited
from openclaw_nb.engine.parallel.base import CellContext, Strategy
from openclaw_nb.engine.parallel.data import DataParallel
from openclaw_nb.engine.parallel.hybrid import HybridParallel
from openclaw_nb.engine.parallel.sharded import ShardedDataParallel
from openclaw_nb.engine.parallel.stages import ModelParallel, Pipeline
from openclaw_nb.engine.parallel.tensor import TensorParallel
from openclaw_nb.engine.reentry.gate import Gate
from openclaw_nb.engine.reentry.loops import Loops
from openclaw_nb.engine.steps.continuity import Continuity, Regrouper
from openclaw_nb.engine.steps.measure import Publisher
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.strategies.memory import Memory

STRATEGIES: dict[str, type[Strategy]] = {
    "data_parallel": DataParallel,
    "sharded": ShardedDataParallel,
    "tensor_parallel": TensorParallel,
    "model_parallel": ModelParallel,
    "pipeline": Pipeline,
    "hybrid_parallel": HybridParallel,
}


def ranks_of(group: GroupService) -> Ranks:
    """Return the ranks of the worker's group.

    Raises
    ------
    GroupError
        When it is in none.
    """
    if group.internal is None:
        raise GroupError("The worker is in no group. Run %openclaw reset to form one.")
    return Ranks(group.internal, group.shortcut, group.divide)


@dataclass(frozen=True)
class Crossing:
    """What a cell needs beside its strategy to go on when ranks go and newcomers come.

    Attributes
    ----------
    regrouper : Regrouper
        Where the next groups come from.
    is_newcomer : bool
        Whether this worker comes into a cell that runs.
    """

    regrouper: Regrouper
    is_newcomer: bool = False


@dataclass(frozen=True)
class Prepared:
    """A cell whose objects are prepared.

    Attributes
    ----------
    strategy : Strategy
        By which; the body concludes it (`Strategy.finish`).
    gate : Gate or None
        Where newcomers come in: it makes the program that is run of the cell's tree.
    """

    strategy: Strategy
    gate: Gate | None


@contextmanager
def strategy_context(
    spec: StrategySpec,
    group: GroupService,
    namespace: dict[str, Any],
    source: str,
    publisher: Publisher,
    report: dict[str, Any],
    crossing: Crossing | None = None,
    hidden: Mapping[str, Any] | None = None,
) -> Iterator[Prepared]:
    """Run the body with the cell's objects prepared for the strategy.

    Parameters
    ----------
    spec : StrategySpec
        The strategy and its options.
    group : GroupService
        The worker's group.
    namespace : dict
        The worker's variables.
    source : str
        The cell.
    publisher : Publisher
        Told of each step.
    report : dict
        ``notes`` is added: lines for the person.
    crossing : Crossing, optional
        How the cell goes on when ranks go or come.
    hidden : mapping, optional
        Variables that are the worker's own; without them nobody can come in, or go on from a checkpoint.
    """
    strategy_class = STRATEGIES.get(spec.name)
    if strategy_class is None:
        raise unknown_name("strategy", spec.name, STRATEGIES)
    notes: list[str] = []
    report["notes"] = notes
    ranks = ranks_of(group)
    continuity = Continuity(ranks, crossing.regrouper if crossing else None)
    gate = Gate(ranks, continuity, namespace, hidden, notes) if hidden is not None else None
    loops = gate.loops if gate is not None else Loops()

    context = CellContext(
        ranks, spec, source, namespace, publisher, notes, continuity, loops, gate, group.leave_unfinished
    )
    strategy = strategy_class(context)
    limits = ExitStack()
    try:
        limits.enter_context(memory_limited(Memory.told(spec.options), notes, has_gpu=has_gpu()))
        if gate is not None:
            gate.strategy = strategy
        if gate is not None and crossing is not None and crossing.is_newcomer:
            strategy.import_state(gate.enter())
        else:
            strategy.enter()
        yield Prepared(strategy, gate)
    finally:
        strategy.exit()
        limits.close()
        if gate is not None:
            gate.close()
