"""Data parallel: every rank has the whole model and a slice of each batch."""

from __future__ import annotations

from collections.abc import Callable

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine import batchnorm
from openclaw_nb.engine.common import make_common
from openclaw_nb.engine.loaders import LoaderSplitter
from openclaw_nb.engine.objects import find_objects
from openclaw_nb.engine.parallel.base import CellContext, Strategy
from openclaw_nb.engine.steps import StepEngine, StepOptions


class DataParallel(Strategy):
    """Slices batches and averages gradients, in place: the model stays the user's object.

    Parameters
    ----------
    context : CellContext
        The cell; its options may hold ``sync_frequency``.
    """

    def __init__(self, context: CellContext) -> None:
        super().__init__(context)
        self._undo: list[Callable[[], None]] = []

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
        if options.sync_frequency > 1 and any("loader" not in b.callee.lower() for b in objects.built):
            raise RefusedError("With --sync-frequency, build the scheduler in a cell of its own first.")
        self.context.notes.extend(make_common(ranks, objects))
        engine = StepEngine(ranks, objects, options, self.context.publisher)
        splitter = LoaderSplitter(
            ranks,
            engine.is_training,
            engine.take_slice,
            fetching=self.context.publisher.clock.fetching,
            common_only=options.split == "model",
            only=list(objects.loaders.values()) if spec.loader else None,
        )
        self._synchronise_batchnorms(objects.models, engine)
        engine.install()
        self._undo.append(engine.remove)
        splitter.install()
        self._undo.append(splitter.remove)

    def _options(self) -> StepOptions:
        spec = self.context.spec
        frequency = int(spec.options.get("sync_frequency", 1))
        if frequency < 1:
            raise RefusedError(f"--sync-frequency {frequency}: it is a number of batches, at least 1.")
        if frequency > 1 and spec.split == "model":
            raise RefusedError(
                "--sync-frequency counts a loader's batches: it cannot be used with --split model."
            )
        return StepOptions(split=spec.split, reduction=spec.reduction, sync_frequency=frequency)

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
            self._undo.append(batchnorm.synchronise(model, self.context.ranks.gather, engine.num_real))
        self.context.notes.append(f"{count} BatchNorm layers use the statistics of the whole batch")

    def exit(self) -> None:
        """Take everything off again, last first."""
        while self._undo:
            self._undo.pop()()
