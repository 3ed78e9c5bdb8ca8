"""Tensor parallel: every rank has a part of each large layer, and sees the same batch.

    enter                the ranks' state is made common; axes of the mesh become groups
    first model(x)       a trial shows how the model can be shared out; it is, its output is held against the plain one,
                         and it is whole again: the first step is made by whole models, alike on all ranks of the axis
    after that step      parameters and optimizer state become parts: no graph of the cell holds them whole any more
    the cell trains      `engine.tensor`: parts behave as wholes; the step engine works along the data axis
    finish, exit         the parts are joined: the same parameters, whole, trained

With a data axis (`hybrid`) batches are sliced and gradients are averaged along it, each rank's parts by themselves.
After an error the parts are joined in the next group, which follows at once, if all ranks are there; else the objects
are what they were when they were shared out. So a rank that raises waits for nobody, and its error is told first.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from openclaw_nb.core.errors import OpenClawError, RefusedError, UsageError
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.group.unfinished import Unfinished
from openclaw_nb.engine.loss.record import map_tensors
from openclaw_nb.engine.objects.find import Objects
from openclaw_nb.engine.parallel.base import CellContext, Strategy
from openclaw_nb.engine.parallel.computing import Computing, on_any
from openclaw_nb.engine.steps import randomness
from openclaw_nb.engine.steps.common import make_common
from openclaw_nb.engine.steps.engine import StepEngine, StepOptions
from openclaw_nb.engine.tensor.axis import TensorAxis
from openclaw_nb.engine.tensor.compare import check_same
from openclaw_nb.engine.tensor.find import Plan, find_plan, try_out
from openclaw_nb.engine.tensor.functions import join_for_functions
from openclaw_nb.engine.tensor.shards import Shards, check_optimizer
from openclaw_nb.engine.tensor.split import joined
from openclaw_nb.plan.parallelism import Degrees, check_fits

_MOST_SHOWN = 6


class DataAxis(Ranks):
    """The ranks of the data axis, among which each batch is shared out.

    Parameters
    ----------
    part : Ranks
        Those that this rank shares batches with.
    every : Ranks
        All of the cell: what a loader draws with is made common to them all.
    """

    def __init__(self, part: Ranks, every: Ranks) -> None:
        super().__init__(part.group, part.shortcut)
        self._every = every

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value of the first of all ranks, which is the first of one of these axes."""
        return self._every.broadcast(value) if source == 0 else super().broadcast(value, source)


class TensorParallel(Strategy):
    """Shares the model's layers out over the ranks.

    Parameters
    ----------
    context : CellContext
        The cell; its options are those of `openclaw_nb.strategies.TensorParallelStrategy`.
    """

    def __init__(self, context: CellContext) -> None:
        super().__init__(context)
        self._engine: StepEngine | None = None
        self._shards: Shards | None = None
        self._plans: dict[int, Plan] = {}
        self._waiting: list[nn.Module] = []
        self._num_steps = 0

    def degrees(self) -> Degrees:
        """Return how many ranks there are along each axis.

        Raises
        ------
        UsageError
            When that is not the number of ranks.
        """
        size = self.context.ranks.size
        tensor = int(self.context.spec.options.get("tensor_parallel_degree") or size)
        check_fits(Degrees(tensor=tensor), size, {"pipeline": 1, "data": 1})
        return Degrees(tensor=tensor)

    def enter(self) -> None:
        """Find the objects, make the ranks' state common, and hang everything onto them.

        Raises
        ------
        RefusedError
            When the cell cannot be run with the single-device result.
        UsageError
            When the degrees do not fit the ranks.
        """
        context, ranks = self.context, self.context.ranks
        degrees = self.degrees()
        self._computing = Computing(context, self._find_objects(), on_any(ranks))
        self._objects = objects = self._computing.objects
        _check(objects)
        context.notes.extend(make_common(ranks, objects))
        groups = degrees.groups("tensor")
        self._axis = TensorAxis(ranks.split(groups, "tensor axis"))
        self._last = ranks.split(groups, "joining parts")
        self._data = DataAxis(ranks.split(degrees.groups("data"), "data axis"), ranks)
        self._shards = Shards(self._axis, objects.optimizers)
        self._tell_dropout(degrees)
        self._install()

    def _tell_dropout(self, degrees: Degrees) -> None:
        drops = any(
            isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0
            for model in self._objects.models.values()
            for each in model.modules()
        )
        if drops:
            self.context.notes.append(
                "dropout drops what it drops on a single device"
                if degrees.data == 1
                else "dropout differs between the parts of a batch, and is the same along the tensor axis"
            )

    # ---------------------------------------------------------------------------------- hanging on

    def _install(self) -> None:
        """Hang everything onto the objects; `_undo` takes it off, last first."""
        spec, context = self.context.spec, self.context
        self._undo += self._computing.install()
        for model in self._objects.models.values():
            self._hook(model.register_forward_pre_hook(self._before_call, with_kwargs=True))
            self._hook(model.register_forward_hook(self._after_call, with_kwargs=True))
            self._join_before_batchnorms(model)
        self._undo.append(join_for_functions())
        self._wrap_backward(is_open=False)
        options = StepOptions(
            split=spec.split,
            reduction=spec.reduction,
            batches_per_step=_batches(spec.options),
            place=self._last.rank,
            num_sharing=self._last.size,
        )
        self._engine = engine = StepEngine(self._data, self._objects, options, context.publisher)
        engine.scaling = self._computing.precision.scaling
        if self._data.size > 1 and self._synchronises_batchnorms(self._objects):
            self._synchronise_batchnorms(self._objects, engine)
        engine.install()
        self._undo.append(engine.uninstall)
        self._wrap_backward(is_open=True)
        for optimizer in self._objects.optimizers.values():
            self._open_for(optimizer)
        splitter = self._split_loaders(engine, self._objects, self._data)
        splitter.install()
        self._undo.append(splitter.remove)

    def _hook(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _wrap_backward(self, *, is_open: bool) -> None:
        """Let parameters be parts for the step engine, and wholes again for what runs in the pass itself."""
        inner = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            # A loss that is followed lets its backward run without subclasses' functions; layers that are run again in
            # the pass (torch.utils.checkpoint) need them.
            enabled = nullcontext() if is_open else torch._C._EnableTorchFunction()
            with self._axis.opened(is_open), enabled:
                inner(*args, **kwargs)

        def undo() -> None:
            torch.autograd.backward = inner

        torch.autograd.backward = backward
        self._undo.append(undo)

    def _open_for(self, optimizer: Optimizer) -> None:
        """Let parameters be parts while an optimizer steps; its ``state_dict()`` is that of the wholes."""

        def before(_: Any, args: Any, kwargs: Any) -> None:
            if any(callable(each) for each in (*args[1:], *kwargs.values())):
                raise RefusedError(
                    "optimizer.step(closure) runs the model inside of the step, where parameters are parts. Call "
                    "backward() first and step() without a closure."
                )
            self._axis.is_open = True

        def after(of: Optimizer, *_: Any) -> None:
            self._axis.is_open = False
            self._num_steps += 1
            self._share_out_after(of)

        def whole(of: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            return self._shards.whole_state(of, state) if self._shards is not None else state

        def refuse(*_: Any) -> None:
            if self._shards is not None and not self._shards.is_empty:
                raise RefusedError(
                    "Load an optimizer's state before the cell that trains in parallel, not in it."
                )

        self._hook(optimizer.register_step_pre_hook(before))
        self._hook(optimizer.register_step_post_hook(after))
        self._hook(optimizer.register_state_dict_post_hook(whole))
        self._hook(optimizer.register_load_state_dict_pre_hook(refuse))

    def _join_before_batchnorms(self, model: nn.Module) -> None:
        def join(_: nn.Module, args: Any) -> Any:
            return map_tensors(joined, args)

        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                self._hook(module.register_forward_pre_hook(join))

    # ---------------------------------------------------------------------------------- the model call

    def _before_call(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._axis.is_open = False  # a step that raised has left it
        if id(model) not in self._plans and self._axis.size > 1:
            self._plan(model, args, kwargs)

    def _plan(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Find how a model is shared out, and see whether it gives the same then; it is plain afterwards."""
        with _as_before(model):
            expected = model.forward(*args, **kwargs)
        with _as_before(model):
            trial = try_out(model, args, kwargs)
        given = self.context.spec.options.get("plan") or None
        plan = self._agree(lambda: find_plan(model, trial, self._axis.size, given))
        shards = Shards(self._axis, {}, is_trial=True)
        shards.take(model, plan)
        own, every = shards.num_bytes
        try:
            with _as_before(model):
                output = map_tensors(joined, model.forward(*args, **kwargs))
        finally:
            shards.put_back()
            self._axis.forget()
        check_same(output, expected, self.context.ranks, self._computing.precision.dtype)
        self._plans[id(model)] = plan
        self._waiting.append(model)
        self.context.notes.append(
            f"{_described(plan)}; each worker has about {own / max(1, every):.0%} of what is shared out"
        )

    def _share_out_after(self, optimizer: Optimizer) -> None:
        """Let the models that an optimizer has just stepped be parts from here on."""
        assert self._shards is not None
        assert self._engine is not None
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        ready = [model for model in self._waiting if any(id(p) in stepped for p in model.parameters())]
        if not ready or not self._engine.is_settled:  # between boundaries nothing was stepped
            return
        for model in ready:
            self._waiting.remove(model)
            self._shards.take(model, self._plans[id(model)])
        with self._axis.opened():
            self._engine.take_up_parameters()

    def _agree(self, find: Callable[[], Plan]) -> Plan:
        """Return what the first rank finds, or raise what it raises, on all ranks."""
        found: Any
        try:
            found = find()
        except (RefusedError, UsageError) as error:
            found = error
        data = self.context.ranks.broadcast(pickle.dumps(found))
        agreed = pickle.loads(data)
        if isinstance(agreed, OpenClawError):
            raise agreed
        plan: Plan = agreed
        return plan

    def _after_call(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        output = map_tensors(joined, output)
        self._axis.forget()
        return output

    # ---------------------------------------------------------------------------------- the end

    def finish(self) -> None:
        """Let the step engine conclude, and join the parts."""
        if self._engine is not None:
            self._engine.finish()
        self._join(self._last)

    def _join(self, ranks: Ranks) -> None:
        """Let every parameter be whole again. All ranks of the tensor axis call this."""
        shards = self._shards
        if shards is None or shards.is_empty:
            return
        steps = ranks.gather(torch.tensor([self._num_steps])).flatten().tolist()
        shards.put(shards.join(TensorAxis(ranks)))
        if len(set(steps)) > 1:
            told = ", ".join(f"rank {rank}'s of step {step}" for rank, step in enumerate(steps))
            self.context.notes.append(f"the cell was ended between two ranks' steps: the parts are {told}")

    def exit(self) -> None:
        """Leave the objects plain; after an error the parts are joined later."""
        self._uninstall()
        if self.context.publisher.is_trial:
            self._join(self._last)  # a trial is ended by an error of its own, on all ranks
        if self._shards is not None and not self._shards.is_empty:
            self._leave(self._shards)
        if self._engine is not None:
            self.context.notes.extend([*self._engine.notes, *self._computing.precision.told()])
            self._engine.close()

    def _leave(self, shards: Shards) -> None:
        parts = shards.set_aside()

        def finish(ranks: Ranks, _: Sequence[int]) -> None:
            parts.put(TensorAxis(ranks))

        what = Unfinished(self._last.group.label, self._last.rank, self._last.size, finish)
        self.context.leave_unfinished(what)
        self.context.notes.append(
            "the parts of the model are joined before the next cell; if a worker died, model and optimizer are what "
            "they were after the first step of this cell"
        )


def _check(objects: Objects) -> None:
    """Refuse what cannot be shared out, as far as it can be seen before the model is called."""
    for name, optimizer in objects.optimizers.items():
        check_optimizer(name, optimizer)
    seen: dict[int, str] = {}
    for name, model in objects.models.items():
        for parameter in model.parameters():
            if seen.setdefault(id(parameter), name) != name:
                raise RefusedError(
                    f"`{name}` and `{seen[id(parameter)]}` have a parameter in common: it cannot be shared out over "
                    "the ranks for both. Use data_parallel."
                )


def _batches(options: Mapping[str, Any]) -> int:
    return int(options.get("sync_frequency", 1)) * int(options.get("accumulate", 1))


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Run the body without gradients, and leave random numbers and buffers as they were."""
    random = randomness.states([])
    cuda = torch.random.fork_rng() if torch.cuda.is_available() else nullcontext()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.no_grad(), cuda:
            yield
    finally:
        randomness.put(random, [])
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def _described(plan: Plan) -> str:
    roles: dict[str, list[str]] = {}
    for name, entry in plan.items():
        roles.setdefault(entry.role, []).append(name or "the model")
    told = []
    for role, names in roles.items():
        more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
        told.append(f"{role}: {', '.join(names[:_MOST_SHOWN])}{more}")
    return f"shared out by {'; '.join(told)}"
