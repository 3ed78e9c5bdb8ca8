"""Model parallel and pipeline: each rank has some of the model's layers, and the whole batch goes through all."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

from torch import nn

from openclaw_nb.core.errors import RefusedError, unknown_name
from openclaw_nb.engine.group.unfinished import Unfinished
from openclaw_nb.engine.parallel.base import CellContext, Strategy
from openclaw_nb.engine.parallel.computing import Computing
from openclaw_nb.engine.stages import shared
from openclaw_nb.engine.stages.engine import StageEngine
from openclaw_nb.engine.stages.layout import Layout, check_undivided, lay_out
from openclaw_nb.engine.steps.common import make_common
from openclaw_nb.plan.stages import segments

_DEVICE_BYTES = 64
_ENDED_EARLY = (
    "the cell ended early: each worker has trained its own layers, and they are exchanged before the next "
    "cell runs; those "
    "of a worker that died stay as they were before this cell"
)


class ModelParallel(Strategy):
    """Lets each rank keep and run its part of the layers, in place: the model stays the user's object.

    Parameters
    ----------
    context : CellContext
        The cell; its options are those of `openclaw_nb.strategies.ModelParallelStrategy`.
    """

    has_whole_batches = True

    def __init__(self, context: CellContext) -> None:
        super().__init__(context)
        self._engine: StageEngine | None = None
        self._is_finished = False

    @property
    def num_microbatches(self) -> int:
        """Into how many parts each batch is cut."""
        return 1

    def enter(self) -> None:
        """Find the objects, make the ranks' state common, and give each rank its layers.

        Raises
        ------
        RefusedError
            When the model cannot be cut so.
        """
        context = self.context
        objects = self._find_objects()
        model = objects.model
        self._computing = Computing(context, objects)
        objects = self._computing.objects
        self._layout = layout = self._lay_out(model)
        self.check(layout)
        context.notes.extend(make_common(context.ranks, objects))
        engine = StageEngine(context.ranks, objects, layout, self.num_microbatches, context.publisher)
        engine.scaling = self._computing.precision.scaling
        self._engine = engine
        splitter = self._split_loaders(engine, objects)
        context.notes.append("; ".join(layout.describe(rank) for rank in range(context.ranks.size)))
        self._tell_shared(layout)
        self._tell_dropout(model)
        self._undo += self._computing.install()
        self._undo.append(engine.remove)
        engine.install()
        self._undo.append(splitter.remove)
        splitter.install()

    def check(self, layout: Layout) -> None:
        """Refuse layers that this strategy cannot run."""

    def _lay_out(self, model: nn.Module) -> Layout:
        options, size = self.context.spec.options, self.context.ranks.size
        mapping: Mapping[str, str] | None = options.get("device_mapping")
        ranks_of = None if mapping is None else self._ranks_of(mapping)
        layers = options.get("model_layers") or (None if mapping is None else list(mapping))
        blocks = self._computing.blocks
        layout = lay_out(
            model,
            size,
            layers=layers,
            groups=options.get("stages"),
            ranks_of=ranks_of,
            undivided=list(blocks.values()),
        )
        check_undivided(layout, blocks)
        return layout

    def _ranks_of(self, mapping: Mapping[str, str]) -> dict[str, int]:
        own = os.environ.get("OPENCLAW_DEVICE", "").encode()[:_DEVICE_BYTES].ljust(_DEVICE_BYTES, b"\0")
        rows = self.context.ranks.gather_bytes(own)
        ranks = {row.rstrip(b"\0").decode(): rank for rank, row in enumerate(rows)}
        for device in mapping.values():
            if device not in ranks:
                raise RefusedError(str(unknown_name("device among the workers of this cell", device, ranks)))
        return {layer: ranks[device] for layer, device in mapping.items()}

    def _tell_shared(self, layout: Layout) -> None:
        tied = [home for home in {*layout.homes.values()} if len(home.owners) > 1]
        for home in sorted(tied, key=lambda home: home.name):
            self.context.notes.append(
                f"{home.name} is used on ranks {', '.join(map(str, sorted(home.owners)))}: each has a copy, and their "
                "gradients are summed"
            )

    def _tell_dropout(self, model: nn.Module) -> None:
        if self.num_microbatches > 1 and any(_drops(module) for module in model.modules()):
            self.context.notes.append(
                "dropout masks are drawn for each micro-batch: they differ from those of single-device training"
            )

    def finish(self) -> None:
        """Give every rank all trained layers."""
        if self._engine is not None:
            self._uninstall()
            self._engine.share()
            self._is_finished = True

    def exit(self) -> None:
        """Take everything off again; what could not be shared is left for the next group."""
        self._uninstall()
        engine = self._engine
        if engine is None:
            return
        self.context.notes.extend(self._computing.precision.told(self._is_here))
        engine.close()
        if not self._is_finished and self.context.ranks.size > 1 and not self.context.publisher.is_trial:
            self._leave(engine)

    def _leave(self, engine: StageEngine) -> None:
        ranks = self.context.ranks
        finish = functools.partial(shared.share, engine.holdings)
        what = Unfinished("sharing layers", ranks.rank, ranks.size, finish, needs_all=False)
        self.context.leave_unfinished(what)
        self.context.notes.append(_ENDED_EARLY)

    def _is_here(self, layer: nn.Module) -> bool:
        """Whether this rank runs a layer: the last one runs what is in no part, as it runs the code to its end."""
        owner = self._layout.owner_of(layer)
        return self.context.ranks.rank == (self._layout.owners[-1] if owner is None else owner)


class Pipeline(ModelParallel):
    """Model parallel with the batch cut into micro-batches, so that ranks work at the same time.

    Parameters
    ----------
    context : CellContext
        The cell; its options are those of `openclaw_nb.strategies.PipelineStrategy`.
    """

    @property
    def num_microbatches(self) -> int:
        """Into how many parts each batch is cut."""
        return int(self.context.spec.options.get("microbatches") or 2 * self.context.ranks.size)

    def check(self, layout: Layout) -> None:
        """Refuse stages that are not consecutive."""
        runs = segments(layout.owners)
        if len(runs) > len({*layout.owners}):
            order = ", ".join(f"{layout.parts[start].name} on rank {owner}" for owner, start, _ in runs)
            raise RefusedError(
                "A pipeline's stages are consecutive layers, one stage a worker; here layers change the "
                "worker and come "
                f"back to it: {order}. Order them so (--stages a,b/c,d), or use -s model_parallel."
            )


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0
