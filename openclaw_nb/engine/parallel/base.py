"""What a strategy does with a cell's objects: the base class runs the cell as it is.

A strategy makes a description (``strategies``) real on torch for the time of one cell::

    enter    find and prepare the objects; refuse what cannot be done
    (the cell runs, unedited)
    exit     leave every object plain again, trained

A newcomer takes part from the midst of the cell on, with what a rank that is there has exported::

    export_state   on a rank that lets it in, while its objects are `plain`
    import_state   on the newcomer, in place of enter
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.group.unfinished import Unfinished
from openclaw_nb.engine.objects.find import Objects, find_objects
from openclaw_nb.engine.reentry.loops import Loops
from openclaw_nb.engine.steps import batchnorm
from openclaw_nb.engine.steps.continuity import Continuity
from openclaw_nb.engine.steps.engine import StepEngine
from openclaw_nb.engine.steps.loaders import LoaderSplitter, Steps
from openclaw_nb.engine.steps.measure import Publisher
from openclaw_nb.protocol.messages import StrategySpec


@dataclass(frozen=True)
class CellContext:
    """What a strategy is given: the ranks, the cell, and where to tell what happens.

    ``notes`` takes lines for the person who runs the cell; ``continuity`` is how it goes on when ranks go or come, and
    ``loops`` are the cell's own. With ``book`` it can be gone on from a checkpoint. ``leave_unfinished`` takes what the
    ranks are to finish in their next group.
    """

    ranks: Ranks
    spec: StrategySpec
    source: str
    namespace: Mapping[str, Any]
    publisher: Publisher
    notes: list[str]
    continuity: Continuity
    loops: Loops = field(default_factory=Loops)
    book: Book | None = None
    leave_unfinished: Callable[[Unfinished], None] = lambda _: None


class Book(Protocol):
    """Where in its loops the cell is, for its checkpoints.

    ``has_ended`` says that the cell is gone on from its end.
    """

    has_ended: bool

    @property
    def can_mark(self) -> bool:
        """Whether what is here and now can be gone on from."""

    def mark(self) -> dict[str, Any] | None:
        """Return where the cell is."""

    def resume(self, place: Mapping[str, Any] | None, step: int, source: str) -> None:
        """Go on from there when the cell runs."""


class Strategy:
    """Runs the cell as it is.

    Parameters
    ----------
    context : CellContext
        The cell.

    Attributes
    ----------
    has_whole_batches : bool
        Whether every rank has each batch as a whole.
    """

    has_whole_batches: bool = False

    def __init__(self, context: CellContext) -> None:
        self.context = context
        self._undo: list[Callable[[], None]] = []

    def _uninstall(self) -> None:
        """Take off what was hung onto the objects, last first."""
        while self._undo:
            self._undo.pop()()

    def _find_objects(self) -> Objects:
        """Return the objects that the cell trains with; see `find_objects`."""
        context, spec = self.context, self.context.spec
        return find_objects(
            context.source, context.namespace, model=spec.model, optimizer=spec.optimizer, loader=spec.loader
        )

    def _split_loaders(self, steps: Steps, objects: Objects, ranks: Ranks | None = None) -> LoaderSplitter:
        """Return what gives each rank its part of the loaders' batches.

        Parameters
        ----------
        steps : Steps
            The step engine.
        objects : Objects
            The cell's.
        ranks : Ranks, optional
            Among which batches are shared out; all when not given.
        """
        context, spec = self.context, self.context.spec
        return LoaderSplitter(
            ranks or context.ranks,
            steps,
            fetching=context.publisher.clock.fetching,
            common_only=spec.split == "model" or self.has_whole_batches,
            only=list(objects.loaders.values()) if spec.loader else None,
            loops=context.loops,
            pinning=bool(spec.options.get("memory_pinning", True)),
            loads_ahead=spec.options.get("async_io"),
        )

    def _synchronises_batchnorms(self, objects: Objects) -> bool:
        """Whether BatchNorm layers take their statistics of the whole batch; it is said."""
        count = sum(batchnorm.count_batchnorms(model) for model in objects.models.values())
        if not count:
            return False
        synchronises = self.context.spec.sync_batchnorm
        self.context.notes.append(
            f"{count} BatchNorm layers use the statistics of the whole batch"
            if synchronises
            else f"{count} BatchNorm layers use each rank's own statistics (--no-sync-batchnorm): the result differs "
            "from single-device training"
        )
        return synchronises

    def _synchronise_batchnorms(self, objects: Objects, engine: StepEngine) -> None:
        """Let BatchNorm layers take their statistics of the whole batch."""
        for model in objects.models.values():
            self._undo.append(batchnorm.synchronise(model, engine.gather, engine.num_real))

    def enter(self) -> None:
        """Prepare the objects for the cell."""

    def finish(self) -> None:
        """Conclude what the ranks do together, after a cell that ended without an error on this rank."""

    def exit(self) -> None:
        """Leave the objects plain; called also when the cell failed."""

    @property
    def wishes(self) -> tuple[bool, bool]:
        """Whether newcomers wait, and whether ranks are to leave, as all know alike; not during a batch."""
        return False, False

    @property
    def is_void(self) -> bool:
        """Whether the present batch has to come again."""
        return False

    def begin_again(self) -> None:
        """Go back to where the first batch that has to come again began."""

    def why_not(self, num_ranks: int) -> str:
        """Return why there cannot be so many ranks, or ""."""
        return ""

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Leave the objects plain while the body runs."""
        yield

    def rest(self) -> None:
        """Take note that no batch is under way, at the head of a loop of the cell."""

    def export_state(self) -> Any:
        """Return what a newcomer needs beside the variables; objects of theirs are shared with them."""

    def import_state(self, state: Any) -> None:
        """Prepare the objects of a newcomer, as `enter` does on the others."""
