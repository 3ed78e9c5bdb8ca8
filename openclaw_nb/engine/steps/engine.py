"""The step engine: the sole owner of batches, weights and boundaries of a strategy cell.

    loader ──slice──> model(x) ──> out (its gradient will be scaled by this rank's weight, it is followed)
                                    │  any loss the cell computes
    loss.backward() ──> agree what the loss is ──> backward, gradients averaged ──> loss is the global value
    clip, optimizer.step(), scheduler.step() see the same gradients on every rank as on a single device

The gradient of a mean over N samples is the sum over ranks of (n_r / N) times the gradient of rank r's
mean; of a sum, the plain sum. The weight goes in at the model's output, so that a term of the loss which
does not pass through the model (a penalty on the weights) counts once.

With ``sync_frequency`` K, gradients of K batches are kept aside and only the K-th has a gradient to step
with: between boundaries every parameter's gradient is None, for which clip, scaler and optimizers do nothing.

When a rank dies, `Continuity` takes the others on. The batch is void then: it leaves no gradient, schedulers and
scalers do nothing, and the loader gives it again, shared out among those who are left.

Knows models, optimizers, slices and losses; does not know cells, messages or how the ranks communicate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from openclaw_nb.core.errors import OpenClawError, RefusedError
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.loss import votes
from openclaw_nb.engine.loss.record import LossKind, Recorder, map_tensors, untrack_tree
from openclaw_nb.engine.loss.votes import KindCache, Told, Vote
from openclaw_nb.engine.objects.find import Objects
from openclaw_nb.engine.precision.agreement import agree_on_overflow
from openclaw_nb.engine.precision.scaling import Unscaled
from openclaw_nb.engine.steps import randomness, state
from openclaw_nb.engine.steps.continuity import Continuity
from openclaw_nb.engine.steps.loaders import Slice
from openclaw_nb.engine.steps.measure import Publisher
from openclaw_nb.engine.steps.randomness import ModelStream
from openclaw_nb.engine.steps.reducer import BUCKET_BYTES, GradientReducer
from openclaw_nb.engine.steps.shares import Shares
from openclaw_nb.engine.steps.splitting import BatchSplitter
from openclaw_nb.engine.steps.window import Window, hold_while, times
from openclaw_nb.plan.shares import share_bounds


@dataclass(frozen=True)
class StepOptions:
    """How steps are made.

    Attributes
    ----------
    split : str
        ``loader`` or ``model``.
    reduction : str
        ``auto``, ``mean`` or ``sum``.
    batches_per_step : int
        How many batches make one step.
    steps_per_average : int
        With local steps (`averaging.LocalSteps`), after how many of them parameters are averaged.
    bucket_bytes : int
        How many bytes of gradients are reduced at once.
    place, num_sharing : int
        Of the ranks that have the same slice of each batch: which one this is, and how many they are. Each tells of its
        part of the samples, so that all ranks' add up to those of the batch.
    """

    split: str = "loader"
    reduction: str = "auto"
    batches_per_step: int = 1
    steps_per_average: int = 1
    bucket_bytes: int = BUCKET_BYTES
    place: int = 0
    num_sharing: int = 1


_LEFT_IN_VOID = (
    "A worker died during a batch, and the loop was left before the batch could be repeated: it is not trained. All "
    "parameters are those of the batches before it. Run the rest of the training again."
)


@dataclass(frozen=True)
class _Head:
    """What a batch changes before its step: restored when it is repeated."""

    random: bytes
    buffers: list[Tensor]
    settings: list[list[dict[str, Any]]]


class _Weigh(torch.autograd.Function):
    """The identity, whose gradient is multiplied by the rank's weight when it is known."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, engine: StepEngine) -> Tensor:
        ctx.engine = engine
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        weight = ctx.engine.weight_now()
        return (gradient if weight == 1.0 else gradient * weight), None


_LEFT_EARLY = (
    "A worker died during a batch, which the loader then gave once more; the loop was left before the loader had given "
    "all. If it counts batches by itself (range, islice in a function, a counter), one of them is not trained. Iterate "
    "the loader to its end, or in a loop of the cell itself, and run the training again."
)


class StepEngine:
    """Makes the steps of one cell.

    Parameters
    ----------
    ranks : Ranks
        The ranks that make each step together.
    objects : Objects
        The cell's models and what trains them.
    options : StepOptions
        How steps are made.
    publisher : Publisher
        Told of each step.
    continuity : Continuity, optional
        How the cell goes on after the death of a rank; it ends when not given.

    Attributes
    ----------
    notes : list of str
        Lines for the person.
    is_void : bool
        Whether the present batch has to be repeated.
    num_groups : int
        How many groups of ranks there have been.
    shares : Shares
        Which part of each batch each rank gets.
    wishes : tuple of bool
        Whether newcomers wait, and whether ranks are to leave, as all ranks know alike.
    at_rest : callable
        Called between batches, when the state is that of all batches so far: the same on all ranks.
    scaling : Unscaled
        What backward passes are scaled by.
    """

    def __init__(
        self,
        ranks: Ranks,
        objects: Objects,
        options: StepOptions,
        publisher: Publisher,
        continuity: Continuity | None = None,
    ) -> None:
        self._ranks = ranks
        self._objects = objects
        self._options = options
        self._publisher, self._clock = publisher, publisher.clock
        self._recorder = Recorder()
        forced = None if options.reduction == "auto" else LossKind(options.reduction)
        self._kinds = KindCache(self._recorder, forced)
        self._splitter = BatchSplitter(ranks) if options.split == "model" else None
        self._stream = ModelStream(ranks.rank)
        self._slice: Slice | None = None
        self._calls = 0
        self._depth = 0
        self._whole = False
        self._weight: float | None = None
        self._window = Window(options.batches_per_step)
        self._continuity = continuity or Continuity(ranks)
        self.shares = Shares(ranks, publisher.pace)
        self._head: _Head | None = None
        self.is_void = self._is_taken_over = False
        self._why_left = ""
        self.num_groups = self._num_steps_of_batch = 0
        self.wishes = (False, False)
        self._is_accumulating = self._has_unused = False
        self._handles: list[Any] = []
        self.notes: list[str] = []
        self.at_rest: Callable[[], None] = lambda: None
        self.scaling = Unscaled()
        self._reducer: GradientReducer
        self._continuity.start(self._renew)

    # ------------------------------------------------------------------------------- install, remove

    def install(self) -> None:
        """Hang the engine onto the models, and onto backward, until `uninstall`."""
        for model in self._objects.models.values():
            self._handles += [
                model.register_forward_pre_hook(self._before_call, with_kwargs=True, prepend=True),
                model.register_forward_hook(self._after_call, always_call=True),
            ]
        self._backward, self._grad = torch.autograd.backward, torch.autograd.grad
        torch.autograd.backward = self._on_backward
        torch.autograd.grad = self._on_grad
        self._hold_back: list[Callable[[], None]] = []
        if self._continuity.is_possible:
            self._handles += [
                o.register_step_post_hook(self._on_step) for o in self._objects.optimizers.values()
            ]
        if self._options.batches_per_step > 1 or self._continuity.is_possible:
            self._hold_back = [
                hold_while(LRScheduler, ("step",), self._holds_schedule),
                hold_while(torch.amp.GradScaler, ("step", "update", "unscale_"), self._holds_scale),
            ]
        self._agree_on_overflows()
        self._clock.restart()

    def _agree_on_overflows(self) -> None:
        """Let scalers of the cell skip a step on all ranks, also when the cell itself has changed a gradient on one.

        What is in the summed gradients they find alike. Where the cell may go on without a rank that is all: one more
        operation of all ranks in each step would have an outcome that a survivor could miss.
        """
        if self._continuity.is_possible or self._ranks.size == 1:
            return
        scalers = [each for each in self._objects.scalers.values() if each.is_enabled()]
        self._hold_back += [agree_on_overflow(each, self._ranks.gather) for each in scalers]

    def _on_step(self, *_: Any) -> None:
        self._has_unused = False

    def _holds_back(self) -> bool:
        return self._window.is_open or self.is_void

    def _holds_schedule(self, scheduler: LRScheduler) -> bool:
        if scheduler._is_initial:  # it is made now, and sets its first rate
            return False
        ours = self._objects.optimizers.values()
        return self._holds_back() and any(scheduler.optimizer is each for each in ours)

    def _holds_scale(self, scaler: torch.amp.GradScaler) -> bool:
        return self._holds_back() or self._is_taken_over

    def uninstall(self) -> None:
        """Leave every object as it was; the engine may be installed again."""
        torch.autograd.backward, torch.autograd.grad = self._backward, self._grad
        while self._hold_back:
            self._hold_back.pop()()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        """End the engine's work, after it was uninstalled."""
        self._recorder.clear()
        self._reducer.remove()
        self._publisher.flush()

    def tell(self, line: str) -> None:
        """Take a line for the person; the same one is told once."""
        if line not in self.notes:
            self.notes.append(line)

    def finish(self) -> None:
        """End the cell's training well; called when the cell has ended without an error, on every rank."""
        self._check_left()
        if self._continuity.is_possible:  # until all are here, one may need what another has
            self.agree(lambda: self._ranks.gather(torch.zeros(1)))

    def _new_reducer(self) -> GradientReducer:
        found = {id(p): p for model in self._objects.models.values() for p in model.parameters()}
        self._parameters = list(found.values())
        size = votes.message_size(self._ranks.size)
        return GradientReducer(
            self._parameters, self._ranks, message_size=size, bucket_bytes=self._options.bucket_bytes
        )

    def take_up_parameters(self) -> None:
        """Follow the models' parameters as they are now: other shapes, as when parts of them are elsewhere."""
        self._reducer.remove()
        self._reducer = self._new_reducer()

    # ------------------------------------------------------------------------------- after a death

    def _renew(self) -> None:
        if "_reducer" in vars(self):
            self._reducer.remove()
        self._reducer = self._new_reducer()
        self.shares.renew()
        self._clock.restart()  # nobody has worked while the group was formed
        self.wishes = (False, False)
        self.num_groups += 1

    def _survive(self, error: BaseException) -> None:
        """Go on after a rank's end: the batch is void, or its step is taken over from a rank that has it."""
        missed = self._continuity.recover(error)
        self._calls = 0
        self._window.clear()
        if missed is None:
            self.is_void = True
            self._check_repeatable()
        else:
            state.put(self._objects, missed.value)
            self._continuity.complete(self._state, is_step=True)
            self._is_taken_over = True
        self._reducer.drop_gradients()

    def _check_repeatable(self) -> None:
        """Refuse to repeat a batch of which a part is trained already."""
        what = ""
        if self._num_steps_of_batch:
            what = "makes several steps, of which the first had been made"
        elif self._is_accumulating:
            what = "adds its gradient to those of earlier batches by itself (use --accumulate instead)"
        if what:
            self._reducer.drop_gradients()
            raise RefusedError(
                f"A worker died during a batch that {what}: it cannot be repeated. The parameters are those of the "
                "last step. Run the rest of the training again."
            )

    def _state(self) -> Any:
        return state.take(self._objects)

    def gather(self, vector: Tensor) -> Tensor:
        """Return the ranks' vectors as rows, in the midst of a batch; in a void one only this rank's."""
        if not self.is_void:
            try:
                with self._clock.waiting():
                    return self._ranks.gather(vector)
            except (OpenClawError, RuntimeError) as error:
                self._note_older_gradients()
                self._survive(error)
        return vector.detach().unsqueeze(0)

    # ---------------------------------------------------------------------------------- the batch

    def take_slice(self, part: Slice | None) -> None:
        """Take note of the batch that the cell works on now; None when a pass has ended."""
        self._slice = part
        if part is None:
            return
        self._check_left()
        if self._continuity.is_possible and self._window.is_boundary:
            buffers = [buffer.clone() for buffer in state.buffers(self._objects)]
            self._head = _Head(randomness.capture([]), buffers, state.settings(self._objects))
        self._is_taken_over = False
        self._num_steps_of_batch = 0
        self._window.next_batch(part.is_last)

    @property
    def is_settled(self) -> bool:
        """Whether no batch that was given may have to be repeated any more."""
        return self._window.is_boundary and not self.is_void

    def rest(self) -> None:
        """Take note that all batches so far are trained, and that the next one is not drawn yet."""
        self.at_rest()

    def begin_again(self) -> None:
        """Go back to where the first batch that is not trained began."""
        if not self.is_void:
            return
        self.is_void = False
        if self._head is not None:
            randomness.restore(self._head.random, [])
            for buffer, before in zip(state.buffers(self._objects), self._head.buffers, strict=True):
                buffer.copy_(before)
            state.put_settings(self._objects, self._head.settings)

    def leave_loop(self, *, repeated: bool) -> None:
        """Take note that a loop over a loader was left early, and whether it has given a batch twice."""
        if self.is_void:
            self._why_left = self._why_left or _LEFT_IN_VOID
        elif repeated:
            self._why_left = self._why_left or _LEFT_EARLY

    def _check_left(self) -> None:
        if self._why_left:
            raise RefusedError(self._why_left)

    def agree(self, make: Callable[[], Any]) -> Any:
        """Return what an operation of all ranks returns; see `Continuity.agree`."""
        with self._clock.waiting():
            return self._continuity.agree(make)

    def num_real(self) -> int:
        """Return how many samples of the present batch are real ones of this rank."""
        if self._splitter is not None:
            return self._splitter.num_real
        return self._slice.num_local if self._slice is not None else 1

    def is_training(self) -> bool:
        """Whether a loop that begins now trains."""
        return torch.is_grad_enabled() and any(m.training for m in self._objects.models.values())

    # ----------------------------------------------------------------------------------- the call

    def _before_call(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._depth += 1
        if self._depth == 1 and self._ranks.size > 1:
            self._stream.enter()
        args, kwargs = untrack_tree(args), untrack_tree(kwargs)
        if self._splitter is not None and torch.is_grad_enabled():
            return self._splitter.split(args, kwargs)
        return args, kwargs

    def _after_call(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._depth -= 1
        if self._depth == 0:
            self._stream.leave()
        if output is None or not torch.is_grad_enabled():
            return output
        self._calls += 1
        if self._splitter is not None:
            return self._splitter.join(output, self.weight_now)
        # Loaders are not sliced for a model in evaluation mode: each rank has the whole batch then.
        self._whole = self._slice is None and not module.training
        if not self._whole:
            self._check_rows(output)
        return map_tensors(self._follow, output)

    def _follow(self, tensor: Tensor) -> Tensor:
        if not (tensor.requires_grad and tensor.is_floating_point()):
            return tensor
        weighed: Tensor = _Weigh.apply(tensor, self)  # type: ignore[no-untyped-call]
        return self._recorder.track(weighed)

    def _check_rows(self, output: Any) -> None:
        """Refuse a call on something else than the slice: its weight would be wrong."""
        if self._ranks.size == 1 and self._options.batches_per_step == 1:
            return
        if self._slice is None:
            raise RefusedError(
                "The model was called for training on data that no loader of this cell has given. Iterate a "
                "DataLoader in the cell, or use --split model, under which the model call itself is split."
            )
        first = next(iter(_tensors(output)), None)
        if first is not None and first.dim() and first.shape[0] % self._slice.num_rows:
            raise RefusedError(
                f"The model returned {first.shape[0]} rows, which are not the {self._slice.num_rows} samples "
                "of this rank's part of the batch. Samples must be in dim 0, and the model must be called on "
                "the loader's batch; else use --split model, under which the model call itself is split."
            )

    # -------------------------------------------------------------------------------- the backward

    def weight_now(self) -> float:
        """Return what this rank's output gradients are multiplied by in the backward pass that runs.

        Raises
        ------
        RefusedError
            When the pass was not begun by ``loss.backward()``.
        """
        if self._weight is None:
            raise RefusedError(
                "Gradients are being computed past loss.backward() (torch.autograd.backward taken by name "
                "before the cell?). Call loss.backward()."
            )
        return self._weight

    def _on_backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        if not self._calls:  # nothing of the models should be in this graph
            self._reducer.strayed = False
            self._backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            self._check_strayed()
            return
        root = self._check_backward(tensors, create_graph, inputs)
        if not retain_graph:
            self._calls = 0
        self._run_backward(root, grad_tensors, retain_graph)

    def _run_backward(self, root: Tensor, grad_tensors: Any, retain_graph: bool | None) -> None:
        if self.is_void:
            self._recorder.clear()
            return
        vote = self._vote(root)
        self._check_parameters()
        self._note_older_gradients()
        self._check_several(vote.kind)
        self._recorder.clear()  # from here on the cell's tensors are plain ones again
        self._check_window()
        boundary = self._window.is_boundary
        self.scaling.begin(self._reducer.parameters)
        given = times(grad_tensors, root, self._window.weigh(self._num_global()) * self.scaling.factor)
        self._weight = self._weight_of(vote.kind)
        try:
            if boundary:
                self._begin(vote)
            self._backward(root, given, retain_graph)
            total = self._sum() if boundary and self._goes_on() else None
        except (OpenClawError, RuntimeError) as error:
            self._reducer.drop_gradients()
            self._survive(error)
            if self._is_taken_over:
                self._count_step(root, float(root.detach()))
            return
        except BaseException:
            self._reducer.drop_gradients()
            raise
        finally:
            self._weight = None
        if total is not None:
            self._conclude(root, vote, total)
        elif self._goes_on():
            self._window.keep(self._reducer.parameters)
            self._count_batch()
        else:
            self._reducer.drop_gradients()

    def _goes_on(self) -> bool:
        """Whether the batch still counts: it may have become void in the midst of a pass."""
        return not self.is_void

    def _begin(self, vote: Vote) -> None:
        self._window.give_back(self._reducer.parameters)
        self._clock.slow_down()
        shares, wishes = self.shares, self._continuity.wishes
        told = Told(wishes, shares.tell(), shares.is_held, self._clock.tell())
        message = votes.pack(vote, self._ranks.rank, self._ranks.size, self._num_local(), told)
        self._reducer.begin(self._window.factor / self._ranks.size, message)

    def _sum(self) -> Tensor:
        self._clock.arrive()
        try:
            total = self._reducer.finish()
        finally:
            self._clock.leave()
        self._continuity.complete(self._state, is_step=True)
        return total

    def _note_older_gradients(self) -> None:
        """Take note whether the cell has kept gradients of earlier batches, with which no step was made."""
        self._is_accumulating = self._has_unused and any(
            p.grad is not None and bool(p.grad.any()) for p in self._reducer.parameters
        )

    def _check_several(self, kind: LossKind) -> None:
        """Refuse a loss whose batches cannot be counted as parts of a larger one."""
        if self._options.batches_per_step > 1 and kind.name not in ("mean", "none"):
            raise RefusedError(
                "Several batches a step (--sync-frequency, --accumulate) need a loss that is a mean over the samples; "
                f"this one is {kind.name}{': ' * bool(kind.reason)}{kind.reason}."
            )

    def _check_window(self) -> None:
        """Refuse what several batches a step would have to count in another way."""
        if self._options.batches_per_step == 1:
            return
        if self._window.has_batch:
            raise RefusedError(
                "With several batches a step (--sync-frequency, --accumulate) a batch may have one backward() only: "
                "add its losses up first."
            )
        left = (p.grad for p in self._parameters if p.grad is not None)
        if self._window.is_empty and any(bool(gradient.any()) for gradient in left):
            raise RefusedError(
                "With several batches a step (--sync-frequency, --accumulate) gradients must be cleared before each "
                "batch: call optimizer.zero_grad() in the loop."
            )

    def _check_strayed(self) -> None:
        if self._reducer.strayed and self._ranks.size > 1:
            self._reducer.drop_gradients()
            raise RefusedError(
                "backward() reached the model's parameters, but the model was not called as a whole since "
                "the last backward(): a part of it was called by itself, or the same graph was run back "
                "twice. Call the model itself and run one backward() a call."
            )

    def _conclude(self, root: Tensor, vote: Vote, total: Tensor) -> None:
        self.wishes = votes.wishes(total)
        self._clock.settle(votes.arrivals(total, self._ranks.size))
        self.shares.agree(votes.speeds(total, self._ranks.size), is_held=votes.is_held(total))
        if self._reducer.repeated and self._ranks.size > 1:
            self._reducer.drop_gradients()
            raise RefusedError(
                "A parameter's gradient appeared twice in one backward() (reentrant activation checkpointing of layers "
                "that share weights?). Use torch.utils.checkpoint with use_reentrant=False."
            )
        try:
            votes.check(total, vote, self._ranks.size, self._shares())
        except RefusedError:
            self._reducer.drop_gradients()
            raise
        self._reducer.set_gradients()
        self.scaling.end(self._reducer.parameters)
        own = float(root.detach())
        for scalar, value in votes.global_values(total, vote) if self._splitter is None else ():
            scalar.data.fill_(value)
        self._count_step(root, own)

    def _count_step(self, root: Tensor, own: float) -> None:
        self._num_steps_of_batch += 1
        self._has_unused = True
        self._count_batch()
        self.shares.step(self._clock.work_seconds)
        self._publisher.step(float(root.detach()), own, self._reducer.num_bytes)

    def _count_batch(self) -> None:
        low, high = share_bounds(self._num_local(), self._options.num_sharing)[self._options.place]
        self._publisher.batch(high - low)
        self.shares.count(self._num_local())

    def _check_backward(self, tensors: Any, create_graph: bool, inputs: Any) -> Tensor:
        if create_graph:
            raise RefusedError(
                "create_graph=True differentiates through the gradient, which differs on each rank's slice. "
                "It cannot be run in parallel; run this cell without --strategy on one worker (--targets 0)."
            )
        if inputs is not None:
            raise RefusedError(
                "backward(inputs=...) is not supported under a strategy: call loss.backward()."
            )
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if len(roots) != 1:
            raise RefusedError(
                "backward() of several tensors at once is not supported: add the losses up first."
            )
        root = roots[0]
        if root.numel() != 1:
            raise RefusedError(
                "backward() of a loss with several elements is not supported: reduce it first."
            )
        return root

    def _vote(self, root: Tensor) -> Vote:
        if self._whole or self._splitter is not None:
            return Vote(LossKind.MEAN, [], [])
        if self._ranks.size == 1 and self._options.batches_per_step == 1:
            return Vote(LossKind.MEAN, [], [])
        part = self._slice
        assert part is not None
        return self._kinds.vote(root, part.num_rows, counts=part.num_local > 0)

    def _weight_of(self, kind: LossKind) -> float:
        size = self._ranks.size
        if self._splitter is not None:
            return float(size)
        if size == 1 or self._whole:
            return 1.0
        if kind.name == "sum":
            return float(size)
        return size * self._num_local() / self._num_global()

    def _num_local(self) -> int:
        return self.num_real()

    def _num_global(self) -> int:
        if self._splitter is not None:
            return self._splitter.num_global
        return self._slice.num_global if self._slice is not None else 1

    def _shares(self) -> list[int]:
        """Return how many samples of the present batch each rank has; other shares may have been agreed on since."""
        if self._slice is not None:
            return list(self._slice.shares)
        return [high - low for low, high in share_bounds(self._num_global(), self._ranks.size)]

    def _check_parameters(self) -> None:
        """Follow parameters that were frozen or thawed since the last step."""
        trained = [id(p) for p in self._parameters if p.requires_grad]
        if trained != [id(p) for p in self._reducer.parameters]:
            self._reducer.remove()
            self._reducer = self._new_reducer()

    def _on_grad(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        own = {id(p) for p in self._reducer.parameters}
        if self._calls and any(id(t) in own for t in wanted):
            raise RefusedError(
                "torch.autograd.grad of the model's parameters gives this rank's gradients alone. "
                "Use loss.backward() and the parameters' .grad."
            )
        previous, self._weight = self._weight, 1.0
        try:
            return self._grad(outputs, inputs, *args, **kwargs)
        finally:
            self._weight = previous


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found
