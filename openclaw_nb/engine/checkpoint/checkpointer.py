"""Takes the checkpoints of one cell: asks whether one is due, has the state copied, and lets it be written meanwhile.

    StepEngine.rest ──> at_rest ── plan.checkpoints.decide ──> state.take ──> HostBuffer.fill ──> Writer.begin
                                                               └─── training waits for this ───┘

Rank 0 writes, whoever that is: ranks have equal parameters there, so that none has to be asked. When another becomes
rank 0, it goes on with a store of its own. Knows the parts of a checkpoint and wires them; does not know loops.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openclaw_nb._version import __version__
from openclaw_nb.core.errors import CheckpointError, RefusedError
from openclaw_nb.engine.checkpoint import state
from openclaw_nb.engine.checkpoint.catalog import listed, name_of
from openclaw_nb.engine.checkpoint.store import Store
from openclaw_nb.engine.checkpoint.tensors import HostBuffer
from openclaw_nb.engine.checkpoint.writer import Failure, Job, Writer
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.objects.find import Objects
from openclaw_nb.plan.checkpoints import Decision, Every, Moment, decide, parse_every

_PATIENCE_SECONDS = 1.0
_unfinished: list[Writer] = []  # of cells that were interrupted; the next one waits for them


@dataclass(frozen=True)
class CheckpointOptions:
    """Where checkpoints are written, how often, how many are kept, and whether training waits for them."""

    directory: Path
    every: Every
    keep: int
    waits: bool = False

    @classmethod
    def read(cls, options: dict[str, Any]) -> CheckpointOptions | None:
        """Return what a strategy's options ask for; None when no checkpoints are wanted."""
        if not options.get("checkpoint"):
            return None
        directory = Path(options["checkpoint"]).expanduser().absolute()
        every = parse_every(options.get("checkpoint_every", "300s"), "checkpoint_every")
        waits = options.get("async_io") is False
        return cls(directory, every, int(options.get("keep", 3)), waits)


class Checkpointer:
    """Takes checkpoints of a cell's objects.

    Parameters
    ----------
    objects : Objects
        The cell's objects.
    ranks : Ranks
        The cell's ranks; rank 0 writes.
    store : Store
        Where they are written; opened and closed here.
    options : CheckpointOptions
        How often they are taken, and how many are kept.
    num_steps : callable
        Returns how many steps the cell has made.
    clock : callable
        Returns seconds that only grow.

    Attributes
    ----------
    place : callable
        Returns where in its loops the cell is, in numbers, strings, tensors and containers of them; kept in each
        checkpoint for whoever goes on from there (`load.place_of`).
    can_rest : callable
        Returns whether one may be taken here.
    """

    def __init__(
        self,
        objects: Objects,
        ranks: Ranks,
        store: Store,
        options: CheckpointOptions,
        num_steps: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects, self._ranks, self._options = objects, ranks, options
        self._store = store
        self._num_steps, self._clock = num_steps, clock
        self.place: Callable[[], Any] = lambda: None
        self.can_rest: Callable[[], bool] = lambda: True
        self._buffer = HostBuffer()
        self._writer: Writer | None = None
        self._first = self._num_late = self._stepped_at = 0
        self._was_late = False
        self._last = Moment(0, clock())
        self._handles: list[Any] = []

    # ------------------------------------------------------------------------------------ begin, end

    def open(self, *, writes: bool = True) -> None:
        """Check that checkpoints can be taken and written, before training begins.

        Parameters
        ----------
        writes : bool
            Whether rank 0 takes the directory now. A newcomer waits until it has to: another may still write there.

        Raises
        ------
        CheckpointError
            When they cannot: the directory, or what of the state cannot be kept.
        RefusedError
            When the cell builds what would be missing in them.
        """
        built = next((b for b in self._objects.built if "loader" not in b.callee.lower()), None)
        if built is not None:
            raise RefusedError(
                f"With --checkpoint, build the scheduler ({built.callee}) in a cell of its own first: what the cell "
                "builds is not in its checkpoints."
            )
        state.take(self._objects)
        if self._ranks.rank == 0 and writes:
            self._begin_writing()
        # Steps go on from what is there, so that the newest has the highest number also for a second cell.
        self._first = next((step for step, _ in listed(self._store.directory)), 0)
        self._last = Moment(self._first, self._clock())
        for optimizer in self._objects.optimizers.values():
            self._handles.append(optimizer.register_step_post_hook(self._take_note))

    def finish(self, end: Any = None) -> None:
        """Write a last checkpoint, if steps were made since the one before, and wait until it is there.

        Parameters
        ----------
        end : object
            Its place.
        """
        if self._writer is not None:
            self._writer.wait()
            if self._ranks.rank == 0 and self._now.num_steps > self._last.num_steps:
                self.place = lambda: end
                self._take()
                self._writer.wait()

    def close(self) -> None:
        """End; in the midst of a long write, let that go on for itself: an interrupted cell must not wait for it."""
        for handle in self._handles:
            handle.remove()
        if self._writer is not None:
            if not self._writer.wait(_PATIENCE_SECONDS):
                _unfinished.append(self._writer)
            self._writer.abandon()

    def note(self) -> str:
        """Return what is told of the checkpoints at the cell's end; "" on ranks that have written none."""
        if self._writer is None:
            return ""
        written, failures = self._writer.written, self._writer.failures
        words = [f"{len(written)} checkpoint{'s' * (len(written) != 1)} written to {self._store.directory}"]
        words += [f"the newest is {written[-1]}"] if written else []
        words += [f"numbered on from {name_of(self._first)}, which was there"] if self._first else []
        if self._num_late:
            words.append(f"{self._num_late} late, as the one before was still being written")
        if self._writer.is_busy:
            words.append("one is still being written")
        return "; ".join([*words, *_told(failures)])

    def _begin_writing(self) -> None:
        while _unfinished:
            _unfinished[-1].wait()
            _unfinished.pop()
        self._store.open()
        self._writer = Writer(self._store, self._options.keep)

    # ---------------------------------------------------------------------------------- between batches

    def at_rest(self) -> None:
        """Take a checkpoint if one is due; every batch so far is trained, and the next one not yet drawn."""
        if self._ranks.rank and self._writer is not None:  # another is rank 0 now, and writes
            self._writer.abandon()
        if not self.can_rest():
            return
        now = self._now
        if self._objects.optimizers and self._stepped_at != self._num_steps():
            return  # gradients that a later step is to use would be missing
        match decide(self._options.every, self._last, now):
            case Decision.LATE:
                self._was_late = True
            case Decision.TAKE:
                self._num_late += self._was_late
                self._was_late = False
                self._take()

    @property
    def _now(self) -> Moment:
        is_writing = self._writer is not None and self._writer.is_busy
        return Moment(self._first + self._num_steps(), self._clock(), is_writing)

    def _take_note(self, *_: Any) -> None:
        self._stepped_at = self._num_steps()

    def _take(self) -> None:
        self._last = now = self._now
        if self._ranks.rank:
            return
        try:
            if self._writer is None:  # rank 0 has died, and this rank is it now
                self._writer = Writer(self._store, self._options.keep)
                self._store.open()
            self._writer.begin(self._copied(now.num_steps))
            if self._options.waits:
                self._writer.wait()
        except (CheckpointError, OSError, RuntimeError, MemoryError) as error:
            assert self._writer is not None
            self._writer.fail(Failure(now.num_steps, str(error)))

    def _copied(self, step: int) -> Job:
        """Copy the state into memory of ours, which is all that training waits for."""
        content = state.take(self._objects, self.place())
        layout = self._buffer.fill(content.tensors)
        about = {
            "world_size": self._ranks.size,
            "versions": {"openclaw_nb": __version__, "torch": torch.__version__},
            "models": content.models,
        }
        pieces = (layout.header(), self._buffer.data())
        return Job(step, pieces, content.state | {"aliases": layout.aliases}, about)


def _told(failures: list[Failure]) -> list[str]:
    """Return one part of a line for each kind of failure: how often, and where first."""
    alike: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        alike.setdefault((failure.what, failure.reason), []).append(failure)
    return [
        f"{what}: {name_of(those[0].step)}{f' and {len(those) - 1} more' * (len(those) > 1)}, {reason}"
        f"{f' ({those[-1].room})' * bool(those[-1].room)}"
        for (what, reason), those in alike.items()
    ]
