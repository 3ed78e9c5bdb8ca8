"""Data parallel: every rank has the whole model and a slice of each batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.checkpoint.checkpointer import Checkpointer, CheckpointOptions
from openclaw_nb.engine.checkpoint.store import Store
from openclaw_nb.engine.objects.find import Objects, find_objects
from openclaw_nb.engine.parallel.base import CellContext, Strategy
from openclaw_nb.engine.steps import batchnorm
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
        self._undo: list[Callable[[], None]] = []
        self._engine: StepEngine | None = None
        self._checkpointer: Checkpointer | None = None

    def enter(self) -> None:
        """Find the objects, make the ranks' state common, and hang the step engine onto them.

        Raises
        ------
        RefusedError
            When the cell cannot be run with the single-device result.
        """
        spec, ranks = self.context.spec, self.context.ranks
        objects = find_objects(
            self.context.source,
            self.context.namespace,
            model=spec.model,
            optimizer=spec.optimizer,
            loader=spec.loader,
        )
        options = self._options()
        local = spec.options.get("mode") == "parameter"
        if options.batches_per_step > 1 and any("loader" not in b.callee.lower() for b in objects.built):
            raise RefusedError(
                "With --sync-frequency or --accumulate, build the scheduler in a cell of its own first."
            )
        checkpoints = self._open_checkpoints(objects)
        continuity = Continuity(ranks, self.context.regrouper)
        self._make_common(objects, continuity)
        given = (ranks, objects, options, self.context.publisher)
        engine = LocalSteps(*given) if local else StepEngine(*given, continuity)
        splitter = LoaderSplitter(
            ranks,
            engine,
            fetching=self.context.publisher.clock.fetching,
            common_only=options.split == "model",
            only=list(objects.loaders.values()) if spec.loader else None,
            pinning=bool(spec.options.get("memory_pinning", True)),
        )
        self._tell_short_passes(objects, options)
        if ranks.short_of_memory:
            self.context.notes.append(_SHORT)
        if local:
            self.context.notes.append(_LOCAL)
        else:
            self._synchronise_batchnorms(objects.models, engine)
        if checkpoints is not None:
            engine.at_rest = checkpoints.at_rest
        engine.install()
        self._engine = engine
        self._undo.append(engine.remove)
        splitter.install()
        self._undo.append(splitter.remove)

    def _open_checkpoints(self, objects: Objects) -> Checkpointer | None:
        context = self.context
        options = CheckpointOptions.read(context.spec.options)
        if options is None or context.publisher.is_trial:
            return None
        publisher = context.publisher
        checkpointer = Checkpointer(
            objects, context.ranks, Store(options.directory), options, lambda: publisher.num_steps
        )
        checkpointer.open()
        self._checkpointer = checkpointer
        return checkpointer

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

    def _synchronise_batchnorms(self, models: dict, engine: StepEngine) -> None:  # type: ignore[type-arg]
        count = sum(batchnorm.count_batchnorms(model) for model in models.values())
        if not count or self.context.ranks.size == 1:
            return
        if not self.context.spec.sync_batchnorm:
            self.context.notes.append(
                f"{count} BatchNorm layers use each rank's own statistics (--no-sync-batchnorm): the result "
                "differs from single-device training"
            )
            return
        for model in models.values():
            self._undo.append(batchnorm.synchronise(model, engine.gather, engine.num_real))
        self.context.notes.append(f"{count} BatchNorm layers use the statistics of the whole batch")

    def finish(self) -> None:
        """Let the engine conclude, and write the last checkpoint."""
        if self._engine is not None:
            self._engine.finish()
        if self._checkpointer is not None:  # last: no rank waits for another's files
            self._checkpointer.finish()

    def exit(self) -> None:
        """Take everything off again, last first."""
        if self._engine is not None:
            self.context.notes.extend(self._engine.notes)
        while self._undo:
            self._undo.pop()()
        if self._checkpointer is not None:
            self._checkpointer.close()
            self.context.notes.extend(filter(None, [self._checkpointer.note()]))
