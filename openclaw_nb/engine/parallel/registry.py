"""Which class makes which strategy real, and the context that a strategy cell runs in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from openclaw_nb.core.errors import GroupError, unknown_name
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.group.service import GroupService
from openclaw_nb.engine.parallel.base import CellContext, Strategy
from openclaw_nb.engine.parallel.data import DataParallel
from openclaw_nb.engine.steps.continuity import Regrouper
from openclaw_nb.engine.steps.measure import Publisher
from openclaw_nb.protocol.messages import StrategySpec

STRATEGIES: dict[str, type[Strategy]] = {"data_parallel": DataParallel}


def ranks_of(group: GroupService) -> Ranks:
    """Return the ranks of the worker's group.

    Raises
    ------
    GroupError
        When it is in none.
    """
    if group.internal is None:
        raise GroupError("The worker is in no group. Run %openclaw reset to form one.")
    return Ranks(group.internal, group.shortcut)


@contextmanager
def strategy_context(
    spec: StrategySpec,
    group: GroupService,
    namespace: Mapping[str, Any],
    source: str,
    publisher: Publisher,
    report: dict[str, Any],
    regrouper: Regrouper | None = None,
) -> Iterator[Strategy]:
    """Run the body with the cell's objects prepared for the strategy, which the body concludes (`Strategy.finish`).

    Parameters
    ----------
    spec : StrategySpec
        The strategy and its options.
    group : GroupService
        The worker's group.
    namespace : mapping
        The worker's variables.
    source : str
        The cell.
    publisher : Publisher
        Told of each step.
    report : dict
        ``notes`` is added: lines for the person.
    regrouper : Regrouper, optional
        How the cell goes on after the death of a rank.
    """
    strategy_class = STRATEGIES.get(spec.name)
    if strategy_class is None:
        raise unknown_name("strategy", spec.name, STRATEGIES)
    notes: list[str] = []
    report["notes"] = notes
    context = CellContext(ranks_of(group), spec, source, namespace, publisher, notes, regrouper)
    strategy = strategy_class(context)
    try:
        strategy.enter()
        yield strategy
    finally:
        strategy.exit()
