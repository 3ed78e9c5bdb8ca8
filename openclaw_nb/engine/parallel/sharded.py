"""Sharded data parallel: each rank has a shard of parameters, gradients and optimizer state, and a slice of each batch.

As data parallel in all that concerns batches, losses and steps. What ends the cell decides what it leaves: every rank
gives its shards, and the plain objects are trained; or a rank is gone, its shards with it, and the state from before
the cell is put back, of which each rank has kept its part in a file (`sharding.host_files`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.group.collectives import ReleasableGroup
from openclaw_nb.engine.objects.find import Objects
from openclaw_nb.engine.objects.names import cell_names
from openclaw_nb.engine.parallel.base import CellContext, Strategy
from openclaw_nb.engine.parallel.computing import Computing, on_any
from openclaw_nb.engine.sharding import checks, whole
from openclaw_nb.engine.sharding.host_files import PATIENCE_SECONDS, Ended, HostFiles
from openclaw_nb.engine.sharding.layers import choose_layers
from openclaw_nb.engine.sharding.messages import ComparedAllGather, ComparedReduceScatter
from openclaw_nb.engine.sharding.shards import Sharding
from openclaw_nb.engine.steps import state
from openclaw_nb.engine.steps.common import make_common
from openclaw_nb.engine.steps.engine import StepOptions
from openclaw_nb.engine.steps.sharded import ShardedSteps

_PATIENCE_OF_TRIALS_SECONDS = 30.0


class ShardedDataParallel(Strategy):
    """Shards the model by FSDP2 for the time of the cell; the parameters stay the user's objects.

    Parameters
    ----------
    context : CellContext
        The cell; its options are those of `openclaw_nb.strategies.ShardedDataParallelStrategy`.
    """

    def __init__(self, context: CellContext) -> None:
        super().__init__(context)
        self._sharding: Sharding | None = None
        self._files: HostFiles | None = None
        self._engine: ShardedSteps | None = None
        self._num_steps = 0
        self._has_finished = False

    def enter(self) -> None:
        """Find the objects, make the ranks' state common, shard it, and hang the step engine onto it.

        Raises
        ------
        RefusedError
            When the cell cannot be run with the single-device result.
        """
        spec, ranks = self.context.spec, self.context.ranks
        objects = self._find_objects()
        self._computing = Computing(self.context, objects, on_any(ranks))
        objects = self._computing.objects
        options = self._options(objects)
        checks.check(objects)
        asked = spec.options.get("shard_layers") or ()
        layers = {name: choose_layers(model, asked) for name, model in objects.models.items()}
        self.context.notes.extend(make_common(ranks, objects))
        self._shard(objects, layers)
        self._install(objects, options)

    def _options(self, objects: Objects) -> StepOptions:
        spec = self.context.spec
        count = int(spec.options.get("sync_frequency", 1)) * int(spec.options.get("accumulate", 1))
        if count > 1 and spec.split == "model":
            raise RefusedError(
                "--sync-frequency and --accumulate count a loader's batches: they cannot be used with --split model."
            )
        if count > 1 and any("loader" not in b.callee.lower() for b in objects.built):
            raise RefusedError(
                "With --sync-frequency or --accumulate, build the scheduler in a cell of its own first."
            )
        return StepOptions(split=spec.split, reduction=spec.reduction, batches_per_step=count)

    def _shard(self, objects: Objects, layers: dict[str, list[str]]) -> None:
        ranks, spec = self.context.ranks, self.context.spec
        self._objects = objects
        self._files = HostFiles(ranks)
        self._sharding = Sharding(
            objects,
            layers,
            reshard_after_forward=bool(spec.options.get("reshard_after_forward", True)),
            group=dist.group.WORLD,
        )
        self._sharding.apply()
        if ranks.shortcut is not None and self._sharding.shards[0].device.type == "cpu":
            self._sharding.communicate_by(ComparedAllGather(ranks), ComparedReduceScatter(ranks))
        self._files.keep(ranks, self._sharding.payload())
        self._before = (
            copy.deepcopy(self._sharding.unsharded_states()),
            [buffer.clone() for buffer in state.buffers(objects)],
            copy.deepcopy(state.settings(objects)),
            [copy.deepcopy(each.state_dict()) for each in self._adapted()],
        )
        self._sharding.release()
        self._files.watch(self._release)
        count = sum(map(len, layers.values()))
        self.context.notes.append(
            f"each of {ranks.size} workers holds 1/{ranks.size} of the parameters, gradients and optimizer state; "
            + (f"{count} layers are gathered one by one" if count else "the model is gathered as a whole")
        )

    def _release(self, cause: str) -> None:
        """End this rank's waits; called from another thread."""
        for group in (dist.group.WORLD, self.context.ranks.group):
            if isinstance(group, ReleasableGroup):
                group.release(cause)

    def _adapted(self) -> list[Any]:
        return [*self._objects.schedulers.values(), *self._objects.scalers.values()]

    def _install(self, objects: Objects, options: StepOptions) -> None:
        context = self.context
        engine = ShardedSteps(context.ranks, objects, options, context.publisher, context.continuity)
        engine.scaling = self._computing.precision.scaling
        self._engine = engine
        splitter = self._split_loaders(engine, objects)
        self._undo += self._computing.install()
        if context.ranks.size > 1 and self._synchronises_batchnorms(objects):
            self._synchronise_batchnorms(objects, engine)
        self._undo += whole.install(objects)
        for optimizer in objects.optimizers.values():
            self._undo.append(optimizer.register_step_post_hook(self._count_step).remove)
        engine.install()
        self._undo.append(engine.uninstall)
        splitter.install()
        self._undo.append(splitter.remove)

    def _count_step(self, *_: Any) -> None:
        self._num_steps += 1

    def rest(self) -> None:
        """Take note that no batch is under way, at the head of a loop of the cell."""
        if self._engine is not None and self._engine.is_settled:
            self._engine.rest()

    def finish(self) -> None:
        """Let the engine conclude, and wait until every rank has come to the end."""
        if self._engine is not None:
            self._engine.finish()
        namespace: Any = self.context.namespace
        whole.keep_whole(namespace, cell_names(self.context.source).stores)
        self.context.ranks.gather(torch.zeros(1))
        self._has_finished = True

    def exit(self) -> None:
        """Take everything off again, and leave the objects plain and whole."""
        if self._files is not None:
            self._files.stop_watching()
        self._uninstall()
        try:
            self._give_back()
        finally:
            if self._engine is not None:
                self.context.notes.extend([*self._engine.notes, *self._computing.precision.told()])
                self._engine.close()
            if self._files is not None:
                self._files.close()

    def _give_back(self) -> None:
        sharding, files = self._sharding, self._files
        if sharding is None or files is None:
            return
        if not sharding.is_released:  # it failed on the way in: everything is there
            sharding.undo(None)
            files.give_up()
            return
        is_trial = (
            self.context.publisher.is_trial
        )  # it is ended by an error, on all ranks after the same step
        ended = files.exchange(
            sharding.payload(),
            self._num_steps,
            has_failed=not (self._has_finished or is_trial),
            patience_seconds=_PATIENCE_OF_TRIALS_SECONDS if is_trial else PATIENCE_SECONDS,
        )
        if ended.why_before:
            self._go_back(sharding, ended)
            return
        sharding.undo(ended.payloads)
        if len(set(ended.num_steps)) > 1:
            told = ", ".join(f"rank {rank} has made {count}" for rank, count in enumerate(ended.num_steps))
            self.context.notes.append(
                f"the cell ended while a step was made ({told}): that step is in some parts of the parameters and not "
                "in others. To be exact, build the model again, or load what you have saved"
            )

    def _go_back(self, sharding: Sharding, ended: Ended) -> None:
        """Put the state from before the cell back."""
        others, buffers, settings, adapted = self._before
        sharding.undo(ended.payloads, others)
        for buffer, value in zip(state.buffers(self._objects), buffers, strict=True):
            buffer.copy_(value)
        state.put_settings(self._objects, settings)
        for thing, value in zip(self._adapted(), adapted, strict=True):
            thing.load_state_dict(value)
        self.context.notes.append(
            f"{ended.why_before}: what this cell has trained is lost, and the state from before it is put back"
        )
