"""What a strategy does with a cell's objects: the base class runs the cell as it is.

A strategy makes a description (``strategies``) real on torch for the time of one cell::

    enter    find and prepare the objects; refuse what cannot be done
    (the cell runs, unedited)
    exit     leave every object plain again, trained
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.steps.continuity import Regrouper
from openclaw_nb.engine.steps.measure import Publisher
from openclaw_nb.protocol.messages import StrategySpec


@dataclass(frozen=True)
class CellContext:
    """What a strategy is given: the ranks, the cell, and where to tell what happens.

    ``notes`` takes lines for the person who runs the cell; ``regrouper`` is how it goes on after a rank's death, if it
    is to.
    """

    ranks: Ranks
    spec: StrategySpec
    source: str
    namespace: Mapping[str, Any]
    publisher: Publisher
    notes: list[str]
    regrouper: Regrouper | None = None


class Strategy:
    """Runs the cell as it is.

    Parameters
    ----------
    context : CellContext
        The cell.
    """

    def __init__(self, context: CellContext) -> None:
        self.context = context

    def enter(self) -> None:
        """Prepare the objects for the cell."""

    def finish(self) -> None:
        """Conclude what the ranks do together, after a cell that ended without an error on this rank."""

    def exit(self) -> None:
        """Leave the objects plain; called also when the cell failed."""
