"""The step engine of a model that is cut into stages: model call, backward and optimizer step of one cell.

    for x, y in loader      every rank draws the same whole batch
    out = model(x)          `call.ModelCall`: through all ranks, the same output on each
    loss = loss_fn(out, y)  the same number on each rank, computed by each
    loss.backward()         back through all ranks; then gradients of shared parameters are summed, and all ranks tell
                            which parameters have one, and their loss
    clip, zero_grad         `holdings`: what the cell sees of gradients that are elsewhere
    optimizer.step()        each rank steps its own layers

Knows models, steps and what is hung onto them; does not know cells, or how layers were chosen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.group.exchange import Exchange
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.objects.find import Objects
from openclaw_nb.engine.precision.scaling import Unscaled
from openclaw_nb.engine.stages import shared
from openclaw_nb.engine.stages.call import ModelCall, Through, num_rows_of
from openclaw_nb.engine.stages.holdings import Holdings
from openclaw_nb.engine.stages.layout import Layout, count_batchnorms
from openclaw_nb.engine.stages.route import Route
from openclaw_nb.engine.steps.loaders import Slice
from openclaw_nb.engine.steps.measure import Publisher
from openclaw_nb.engine.steps.randomness import ModelStream
from openclaw_nb.engine.steps.shares import Shares
from openclaw_nb.engine.steps.window import times
from openclaw_nb.plan.shares import share_bounds
from openclaw_nb.plan.stages import check_microbatches

_MOST_APART = 1e-4


class StageEngine:
    """Makes the steps of one cell.

    Parameters
    ----------
    ranks : Ranks
        The ranks that have the stages.
    objects : Objects
        The cell's model and what trains it.
    layout : Layout
        Which rank has which layer.
    num_parts : int
        Into how many micro-batches each batch is cut.
    publisher : Publisher
        Told of each step.

    Attributes
    ----------
    holdings : Holdings
        The model's tensors.
    scaling : Unscaled
        What backward passes are scaled by.
    """

    def __init__(
        self, ranks: Ranks, objects: Objects, layout: Layout, num_parts: int, publisher: Publisher
    ) -> None:
        self._ranks, self._objects, self._model = ranks, objects, objects.model
        self._num_parts, self._publisher, self._clock = num_parts, publisher, publisher.clock
        self._backward, self._grad = torch.autograd.backward, torch.autograd.grad
        self._exchange = Exchange(ranks.group) if ranks.size > 1 else None
        self._route = Route(layout, ranks.rank, self._exchange, self._clock.waiting, self._run_backward)
        self.holdings = Holdings(self._model, layout.homes, list(objects.optimizers.values()), ranks)
        self.scaling = Unscaled()
        self._stream = ModelStream(ranks.rank)
        self._anchor = torch.zeros((), requires_grad=True)
        self._num_calls = self._num_rows = 0
        self._is_back = False
        self._flags_of_closure: list[bool] | None = None
        self._undo: list[Callable[[], Any]] = []
        # Of the protocol that loaders are split by: here every rank has each batch as a whole.
        self.num_groups, self.shares = 1, Shares(ranks, publisher.pace)

    # ------------------------------------------------------------------------------- install, remove

    def install(self) -> None:
        """Hang the engine onto the model, its optimizers and backward, until `remove`."""
        self.holdings.enter()
        self._undo.append(self.holdings.leave)
        self._route.install()
        self._undo.append(self._route.remove)
        self._replace_forward()
        for optimizer in self._objects.optimizers.values():
            self._hang_on(optimizer)
        handle = self._model.register_state_dict_post_hook(functools.partial(self._complete_state))
        self._undo.append(handle.remove)
        self._backward, self._grad = torch.autograd.backward, torch.autograd.grad
        torch.autograd.backward, torch.autograd.grad = self._on_backward, self._on_grad
        self._undo.append(self._give_back_autograd)
        self._clock.restart()

    def _replace_forward(self) -> None:
        model: Any = self._model
        own, plain = model.__dict__.get("forward"), model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(plain, args, kwargs)

        def undo() -> None:
            model.__dict__.pop("__deepcopy__", None)
            if own is None:
                del model.forward
            else:
                model.forward = own

        model.forward = forward
        model.__dict__["__deepcopy__"] = _no_copy
        self._undo.append(undo)

    def _hang_on(self, optimizer: torch.optim.Optimizer) -> None:
        steps: list[tuple[Any, list[bool]]] = []

        def before(*_: Any) -> None:
            flags = self.holdings.unstage_gradients()
            steps.append((self.holdings.plain(), flags))
            steps[-1][0].__enter__()

        def after(*_: Any) -> None:
            plain, flags = steps.pop()
            plain.__exit__(None, None, None)
            self.holdings.stage_gradients(self._flags_of_closure or flags)
            self._flags_of_closure = None

        handles = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
            optimizer.register_state_dict_post_hook(self._complete_optimizer_state),
        ]
        self._undo += [handle.remove for handle in handles]

    def _give_back_autograd(self) -> None:
        torch.autograd.backward, torch.autograd.grad = self._backward, self._grad

    def remove(self) -> None:
        """Leave every object as it was, last first."""
        while self._undo:
            self._undo.pop()()

    def close(self) -> None:
        """End the engine's work, after it was removed."""
        self._publisher.flush()

    def share(self) -> None:
        """Give every rank the trained values of all layers; called on all ranks, when the engine was removed."""
        shared.share(self.holdings, self._ranks, range(self._ranks.size))

    # ----------------------------------------------------------------------- what loaders ask

    def is_training(self) -> bool:
        """Whether a loop that begins now trains."""
        return torch.is_grad_enabled() and self._model.training

    def agree(self, make: Callable[[], Any]) -> Any:
        """Return what an operation of all ranks returns."""
        with self._clock.waiting():
            return make()

    @property
    def is_settled(self) -> bool:
        """Whether no batch that was given may have to be repeated."""
        return True

    def take_slice(self, part: Slice | None) -> None:
        """Take note of the batch that the cell gets: a whole one."""

    def begin_again(self) -> None:
        """Go back: no batch is repeated."""

    def rest(self) -> None:
        """Take note that all batches so far are trained."""

    def leave_loop(self, *, repeated: bool) -> None:
        """Take note that a loop over a loader was left early."""

    # ----------------------------------------------------------------------------------- the call

    def _call(self, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        num_rows = num_rows_of(args, kwargs)
        num_parts = check_microbatches(num_rows, self._num_parts, count_batchnorms(self._model))
        self._check_inputs(args, kwargs)
        self._num_calls += 1
        call = ModelCall(self._route, self._num_calls, plain, self._stream)

        def run() -> list[Tensor]:
            return call.run(args, kwargs, num_rows, num_parts)

        with self.holdings.plain(is_running=True):
            if torch.is_grad_enabled():
                self._num_rows += num_rows
                return call.output(Through.apply(self._anchor, call, run))  # type: ignore[no-untyped-call]
            return call.output(run())

    def _check_inputs(self, args: Any, kwargs: Any) -> None:
        leaves, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in leaves):
            raise RefusedError(
                "An argument of the model needs a gradient. Where its layers are on different workers, "
                "gradients end at the "
                "model's input: pass x.detach(), or make what computes it a part of the model."
            )

    # -------------------------------------------------------------------------------- the backward

    def _run_backward(self, tensors: Any, gradients: Any) -> None:
        """Run autograd through this rank's layers, in the midst of the cell's backward pass."""
        if not self._is_back:
            raise RefusedError(
                "Gradients are being computed past loss.backward() (torch.autograd.backward taken by name before the "
                "cell?). Call loss.backward()."
            )
        self._backward(tensors, gradients)

    def _on_backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        if create_graph or inputs is not None:
            what = "create_graph=True" if create_graph else "backward(inputs=...)"
            raise RefusedError(
                f"{what} is not supported where layers are on different workers. Call loss.backward(), or run "
                "this cell "
                "without --strategy on one worker (--targets 0)."
            )
        root = tensors if isinstance(tensors, Tensor) else next(iter(tensors))
        holdings = self.holdings
        holdings.unstage_gradients()
        self.scaling.begin(holdings.parameters)
        given = self._scaled(tensors, grad_tensors)
        kept = shared.set_aside(holdings)
        self._is_back = True
        try:
            with holdings.plain():
                self._backward(tensors, given, retain_graph, create_graph, grad_variables)
                shared.add_up(holdings, self._exchange, self._clock.waiting, kept)
                self._flush()
                overflowed = self.scaling.check(holdings.parameters)
            flags = self._agree_on_gradients(float(root.detach().sum()), overflowed=overflowed)
        except BaseException:
            holdings.drop_gradients()
            raise
        finally:
            self._is_back = False
        if holdings.is_stepping:  # in an optimizer's closure
            self._flags_of_closure = flags
        else:
            holdings.stage_gradients(flags)
        self._count(float(root.detach().sum()))

    def _scaled(self, tensors: Any, gradients: Any) -> Any:
        """Return what the backward pass begins with."""
        factor = self.scaling.factor
        if factor == 1.0 or isinstance(tensors, Tensor):
            return gradients if factor == 1.0 else times(gradients, tensors, factor)
        roots = list(tensors)
        given = [None] * len(roots) if gradients is None else list(gradients)
        return [times(gradient, root, factor) for gradient, root in zip(given, roots, strict=True)]

    def _flush(self) -> None:
        """Wait until this rank's last gradient is sent: ranks that wait in different calls seem stuck."""
        if self._exchange is not None:
            with self._clock.waiting():
                self._exchange.flush()

    def _agree_on_gradients(self, loss: float, *, overflowed: bool) -> list[bool]:
        """Return which parameters have a gradient somewhere; refuse it when ranks have come to different losses.

        After an overflow on any rank none has one: the step does nothing.
        """
        told = torch.tensor([loss, float(overflowed), *self.holdings.own_flags()], dtype=torch.float64)
        self._clock.arrive()
        try:
            rows = self._ranks.gather(told)
        finally:
            self._clock.leave()
        losses = rows[:, 0].tolist()
        if not all(_alike(each, losses[0]) for each in losses):
            listed = ", ".join(f"{each:.6g} on rank {rank}" for rank, each in enumerate(losses))
            raise RefusedError(
                f"The ranks have computed different losses: {listed}. No parameter was changed. Where layers are on "
                "different workers, every rank must compute the loss of the same whole batch: draw it from a "
                "DataLoader "
                "that the cell iterates, and let nothing depend on the rank."
            )
        overflowed = bool(rows[:, 1].any())
        self.scaling.settle(self.holdings.parameters, overflowed=overflowed)
        return [bool(value) and not overflowed for value in rows[:, 2:].sum(0).tolist()]

    def _count(self, loss: float) -> None:
        low, high = share_bounds(self._num_rows, self._ranks.size)[self._ranks.rank]
        self._publisher.batch(high - low)  # so that all ranks' samples add up to those of the batch
        self._publisher.step(loss, loss, self._route.num_bytes)
        self._num_rows = self._route.num_bytes = 0

    def _on_grad(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        own = {id(p) for p in self.holdings.parameters}
        if any(id(t) in own for t in wanted):
            raise RefusedError(
                "torch.autograd.grad of the model's parameters is not supported where layers are on different workers. "
                "Use loss.backward() and the parameters' .grad."
            )
        return self._grad(outputs, inputs, *args, **kwargs)

    # --------------------------------------------------------------------------------- what is saved

    def _complete_state(self, module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Bring all values of the model's ``state_dict()`` here."""
        for name, value in state.items():
            if isinstance(value, Tensor) and self.holdings.is_staged(value):
                state[name] = self.holdings.read(value).detach()

    def _complete_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Bring all of an optimizer's ``state_dict()`` here."""
        return {**state, "state": shared.gather_states(self.holdings, optimizer, self._ranks, state["state"])}


def _no_copy(_: Any) -> Any:
    raise RefusedError(
        "A model whose layers are on different workers cannot be copied in the cell: keep its values, by "
        "copy.deepcopy(model.state_dict()), or copy it in a cell without --strategy."
    )


def _alike(one: float, other: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or math.isclose(one, other, rel_tol=_MOST_APART, abs_tol=1e-12)
