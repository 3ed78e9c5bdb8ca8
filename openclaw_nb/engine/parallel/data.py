"""Data parallel: every rank has the whole model and a slice of each batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Parameter

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.checkpoint import manifest
from openclaw_nb.engine.checkpoint.catalog import Checkpoint, find_newest
from openclaw_nb.engine.checkpoint.checkpointer import Checkpointer, CheckpointOptions
from openclaw_nb.engine.checkpoint.load import load_into, place_of
from openclaw_nb.engine.checkpoint.store import Store
from openclaw_nb.engine.objects.find import Objects
from openclaw_nb.engine.parallel.base import CellContext, Strategy
from openclaw_nb.engine.parallel.computing import Computing
from openclaw_nb.engine.reentry import bookmark
from openclaw_nb.engine.steps.averaging import LocalSteps
from openclaw_nb.engine.steps.common import common_state, make_common, take_common
from openclaw_nb.engine.steps.continuity import Continuity, Missed
from openclaw_nb.engine.steps.engine import StepEngine, StepOptions
from openclaw_nb.engine.steps.loaders import LoaderSplitter
from openclaw_nb.engine.steps.reducer import BUCKET_BYTES

_LOCAL = (
    "each worker takes steps of its own, with its own loss and BatchNorm statistics; parameters are averaged every "
    "sync-frequency steps, before evaluations and at the end"
)


_SHORT = (
    "memory is short: gradients are summed by the process group, not through shared memory, which is slower"
)


class DataParallel(Strategy):
    """Slices batches and averages gradients, in place: the model stays the user's object.

    Parameters
    ----------
    context : CellContext
        The cell; its options are those of `openclaw_nb.strategies.DataParallelStrategy`.
    """

    def __init__(self, context: CellContext) -> None:
        super().__init__(context)
        self._engine: StepEngine | None = None
        self._splitter: LoaderSplitter | None = None
        self._has_common_statistics = False
        self._checkpointer: Checkpointer | None = None

    def enter(self) -> None:
        """Find the objects, make the ranks' state common, and hang the step engine onto them.

        Raises
        ------
        RefusedError
            When the cell cannot be run with the single-device result.
        """
        objects = self._find_objects()
        objects = self._take_computing(objects)
        options = self._options()
        if options.batches_per_step > 1 and any("loader" not in b.callee.lower() for b in objects.built):
            raise RefusedError(
                "With --sync-frequency or --accumulate, build the scheduler in a cell of its own first."
            )
        self._checkpointer = self._open_checkpoints(objects)
        self._resume(objects)
        self._make_common(objects, self.context.continuity)
        self._tell_short_passes(objects, options)
        self._prepare(objects, options)

    def _take_computing(self, objects: Objects) -> Objects:
        """Find what computes in which precision, and what is computed twice; return the objects, with their scale."""
        self._computing = Computing(self.context, objects)
        local = self.context.spec.options.get("mode") == "parameter"
        if local and self._computing.precision.scaling.scale is not None:
            raise RefusedError(
                "With --mode parameter ranks overflow by themselves, and there is no one loss scale: use --precision "
                "bf16, or a torch.amp.GradScaler in the cell, whose smallest scale is taken at each average."
            )
        return self._computing.objects

    def _prepare(self, objects: Objects, options: StepOptions) -> None:
        """Make the step engine of these objects, and hang it onto them."""
        spec, ranks, publisher = self.context.spec, self.context.ranks, self.context.publisher
        local = spec.options.get("mode") == "parameter"
        given = (ranks, objects, options, publisher)
        engine = LocalSteps(*given) if local else StepEngine(*given, self.context.continuity)
        engine.scaling = self._computing.precision.scaling
        self._engine, self._objects = engine, objects
        self._splitter = self._split_loaders(engine, objects)
        if ranks.short_of_memory:
            self.context.notes.append(_SHORT)
        if local:
            self.context.notes.append(_LOCAL)
        elif ranks.size > 1 or self.context.continuity.is_possible:
            self._has_common_statistics = self._synchronises_batchnorms(objects)
        if self._checkpointer is not None:
            engine.at_rest = self._checkpointer.at_rest
        self._install()

    def _install(self) -> None:
        """Hang everything onto the objects; `_undo` takes it off, last first."""
        assert self._engine is not None
        assert self._splitter is not None
        self._undo += self._computing.install()
        if self._has_common_statistics:
            self._synchronise_batchnorms(self._objects, self._engine)
        self._engine.install()
        self._undo.append(self._engine.uninstall)
        self._splitter.install()
        self._undo.append(self._splitter.remove)

    # ------------------------------------------------------------------------------------ newcomers

    @property
    def wishes(self) -> tuple[bool, bool]:
        """Whether newcomers wait, and whether ranks are to leave, as all know alike; not during a batch."""
        if self._engine is None or not self._engine.is_settled:
            return False, False
        return self._engine.wishes

    @property
    def is_void(self) -> bool:
        """Whether the present batch has to come again."""
        return self._engine is not None and self._engine.is_void

    def begin_again(self) -> None:
        """Go back to where the first batch that has to come again began."""
        assert self._engine is not None
        self._engine.begin_again()

    def why_not(self, num_ranks: int) -> str:
        """Return why there cannot be so many ranks: a batch has too few samples."""
        for name, loader in self._objects.loaders.items():
            if loader.batch_size is not None and loader.batch_size < num_ranks:
                return (
                    f"the batches of {name} have {loader.batch_size} samples, fewer than {num_ranks} workers"
                )
        return ""

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Leave the objects plain while the body runs."""
        self._uninstall()
        try:
            yield
        finally:
            self._install()

    def export_state(self) -> dict[str, Any]:
        """Return the objects, and the gradients that the cell has kept."""
        return {"objects": self._objects, "gradients": [p.grad for p in self._parameters()]}

    def import_state(self, state: dict[str, Any]) -> None:
        """Hang a step engine onto the objects that another rank has exported."""
        objects = self._take_computing(state["objects"])
        self._checkpointer = self._open_checkpoints(objects, is_newcomer=True)
        self._prepare(objects, self._options())
        for parameter, gradient in zip(self._parameters(), state["gradients"], strict=True):
            parameter.grad = gradient
        self.context.continuity.tell()

    def _parameters(self) -> list[Parameter]:
        return [p for model in self._objects.models.values() for p in model.parameters()]

    # ---------------------------------------------------------------------------------------- parts

    def _open_checkpoints(self, objects: Objects, *, is_newcomer: bool = False) -> Checkpointer | None:
        context = self.context
        options = CheckpointOptions.read(context.spec.options)
        if options is None or context.publisher.is_trial:
            return None
        publisher, before = context.publisher, context.continuity.num_steps
        checkpointer = Checkpointer(
            objects, context.ranks, Store(options.directory), options, lambda: before + publisher.num_steps
        )
        checkpointer.open(writes=not is_newcomer)
        if context.book is not None:
            checkpointer.place, book = context.book.mark, context.book
            checkpointer.can_rest = lambda: book.can_mark
        return checkpointer

    def _resume(self, objects: Objects) -> None:
        """Load the newest checkpoint, and go on from where the cell was."""
        context = self.context
        book, directory = context.book, context.spec.options.get("checkpoint")
        if not context.spec.options.get("resume") or context.publisher.is_trial:
            return
        assert book is not None
        assert directory is not None
        if context.spec.split == "model" or context.spec.options.get("mode") == "parameter":
            raise RefusedError(
                "--resume needs --split loader and --mode gradient: else ranks keep what is not in it."
            )
        own = find_newest(directory) if context.ranks.rank == 0 else None
        path = None if own is None else own.path
        path = context.continuity.agree(lambda: context.ranks.broadcast(path))
        if path is None:
            context.notes.append(f"there is no checkpoint in {directory} yet: the training begins")
            return
        found = own or Checkpoint(path, manifest.read(path))
        load_into(objects, found)
        book.resume(place_of(found), found.step, context.source)
        context.notes.extend(f"skipped: {line}" for line in found.skipped)
        context.notes.append(
            f"{found.path.name} in {directory} is the end of this cell: its state is loaded, and nothing is left to "
            "train"
            if book.has_ended
            else f"the training goes on from {found.path.name} in {directory}"
        )

    def rest(self) -> None:
        """Take note that no batch is under way, at the head of a loop of the cell."""
        if self._engine is not None and self._engine.is_settled:
            self._engine.rest()

    def _make_common(self, objects: Objects, continuity: Continuity) -> None:
        found = continuity.attempt(lambda: make_common(self.context.ranks, objects))
        if isinstance(found, Missed):
            take_common(objects, found.value)
        else:
            self.context.notes.extend(found)
        continuity.complete(lambda: common_state(objects))

    def _options(self) -> StepOptions:
        spec = self.context.spec
        frequency = int(spec.options.get("sync_frequency", 1))
        accumulate = int(spec.options.get("accumulate", 1))
        local = spec.options.get("mode") == "parameter"
        if (frequency * accumulate > 1 or local) and spec.split == "model":
            raise RefusedError(
                "--sync-frequency and --accumulate count a loader's batches: they cannot be used with --split model."
            )
        return StepOptions(
            split=spec.split,
            reduction=spec.reduction,
            batches_per_step=accumulate if local else frequency * accumulate,
            steps_per_average=frequency if local else 1,
            bucket_bytes=int(spec.options.get("fusion_buffer_size", BUCKET_BYTES)),
        )

    def _tell_short_passes(self, objects: Objects, options: StepOptions) -> None:
        every = options.batches_per_step * options.steps_per_average
        for name, loader in objects.loaders.items():
            count = 0
            with contextlib.suppress(TypeError):  # a loader without a length
                count = len(loader)
            if every > count > 0:
                self.context.notes.append(
                    f"{every} batches between synchronisations are more than a pass of {name} has ({count}): "
                    "it is synchronised once a pass"
                )

    def finish(self) -> None:
        """Let the engine conclude, and write the last checkpoint."""
        if self._engine is not None:
            if self.context.loops.have_repeated:
                self._engine.leave_loop(repeated=True)
            self._engine.finish()
        if self._checkpointer is not None:  # last: no rank waits for another's files
            self._checkpointer.finish(bookmark.ENDED)

    def exit(self) -> None:
        """Take everything off again, last first."""
        self._uninstall()
        if self._engine is not None:
            self.context.notes.extend([*self._engine.notes, *self._computing.precision.told()])
            self._engine.close()
        if self._checkpointer is not None:
            self._checkpointer.close()
            self.context.notes.extend(filter(None, [self._checkpointer.note()]))
