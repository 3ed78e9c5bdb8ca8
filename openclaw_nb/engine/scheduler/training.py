"""One training step of a pipeline on this rank: its lane of the schedule's actions, over messages.

    first lane:  checks ──> start (how many micro-batches, y to the last) ──> every rank
    each lane:   actions in order; activations and gradients come and go by key (kind, stage, micro-batch)
    last lane:   loss of the micro-batches against that of the batch ──> verdict ──> every rank

Gradients are added to the parameters only after the verdict, so that a step that is refused changes nothing.
Knows stages and actions; does not know the notebook, or how lanes are drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.group.collectives import ReleasableGroup
from openclaw_nb.engine.scheduler import backward, parts
from openclaw_nb.engine.scheduler.mail import Mail
from openclaw_nb.plan.schedule import Action, Kind, build, check, choose_num_microbatches

LossFunction = Callable[[Tensor, Tensor], Tensor]

_ACTIVATION, _GRADIENT, _START, _VERDICT, _STATE, _NORM, _TIMES = range(7)


@dataclass(frozen=True)
class Plan:
    """What a step needs to know besides the model: which parts make which stage, and where stages are.

    Attributes
    ----------
    stages : sequence of sequences of str
        The parts' names, by stage.
    ranks : sequence of int
        The rank of each lane; stage s is in lane s mod p.
    schedule : str
        Its name.
    num_microbatches : int or None
        Chosen by the batch when None.
    """

    stages: Sequence[Sequence[str]]
    ranks: Sequence[int]
    schedule: str
    num_microbatches: int | None

    @property
    def num_chunks(self) -> int:
        """Stages a lane."""
        return len(self.stages) // len(self.ranks)


class TrainingPipeline:
    """A model that is trained in stages, on this rank.

    Parameters
    ----------
    model : Module
        The whole model, the same on every rank; this rank trains its stages of it.
    plan : Plan
        The stages.
    group : ReleasableGroup
        The ranks.
    lanes_only : bool
        Whether ranks without a stage take no part; otherwise they learn all that a rank with one does.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, group: ReleasableGroup, *, lanes_only: bool = False
    ) -> None:
        self.model, self.plan, self._lanes_only = model, plan, lanes_only
        self._stages = parts.split(model, plan.stages)
        self.move(group)
        self._shape: tuple[int, ...] | None = None
        self.times: list[tuple[Action, float, float]] = []
        self.num_microbatches = 0

    def move(self, group: ReleasableGroup) -> None:
        """Go on with another group of the same ranks, as after a cell that has raised."""
        self.group = group
        rank, ranks = group.rank(), list(self.plan.ranks)
        self.lane: int | None = ranks.index(rank) if rank in ranks else None
        self.ranks = ranks if self._lanes_only else list(range(group.size()))

    # --------------------------------------------------------------------------------------------- a step

    def step(self, x: Tensor | None, y: Tensor | None, loss_fn: LossFunction) -> float:
        """Run a batch forward and back; this rank's stages then have its gradients. Return its loss.

        Parameters
        ----------
        x, y : Tensor
            The batch, as the first lane has it; others may have None.
        loss_fn : callable
            Of an output and y; a mean or a sum over the samples.

        Returns
        -------
        float
            The loss of the whole batch.

        Raises
        ------
        RefusedError
            On all ranks, with no gradient changed, when the result would differ from a single device's.
        """
        held = {p: p.grad for p in self._own_parameters()}
        for parameter in held:
            parameter.grad = None
        try:
            with self._mail("a step") as mail:
                start = self._start(mail, x, y)
                if isinstance(start, str):
                    refusal, scale, loss = start, 1.0, 0.0
                elif self.lane is None:
                    refusal, scale, loss = mail.take(self.plan.ranks[-1], (_VERDICT, 0, 0))
                else:
                    self.num_microbatches = start["num_microbatches"]
                    refusal, scale, loss = _Step(self, mail, start, x, loss_fn).run()
            if refusal:
                raise RefusedError(refusal)
        except BaseException:
            for parameter, grad in held.items():
                parameter.grad = grad
            raise
        _merge(held, scale)
        return loss

    def _start(self, mail: Mail, x: Tensor | None, y: Tensor | None) -> Any:
        """Let the first lane check the batch; return what it says to all: a plan, or why not."""
        if self.lane != 0:
            return mail.take(self.plan.ranks[0], (_START, 0, 0))
        try:
            start: Any = {"num_microbatches": self._check_batch(x, y), "y": None}
        except RefusedError as error:
            start = str(error)
        last = self.plan.ranks[-1]
        for rank in self.ranks:
            if rank != self.plan.ranks[0]:
                told = {**start, "y": y} if rank == last and isinstance(start, dict) else start
                mail.send(rank, (_START, 0, 0), told)
        return {**start, "y": y} if isinstance(start, dict) else start

    def _check_batch(self, x: Tensor | None, y: Tensor | None) -> int:
        if (
            not isinstance(x, Tensor)
            or not isinstance(y, Tensor)
            or not x.dim()
            or not y.dim()
            or len(x) != len(y)
        ):
            kinds = f"{type(x).__name__} and {type(y).__name__}"
            raise RefusedError(
                "step(x, y, loss_fn) takes two tensors with as many samples each, along their first dimension, not "
                f"{kinds}{_shapes(x, y)}."
            )
        plan = self.plan
        number = plan.num_microbatches
        if number is None:
            number = choose_num_microbatches(len(x), len(plan.ranks), plan.schedule)
        check(plan.schedule, len(plan.ranks), number, plan.num_chunks)
        if len(x) % number:
            near = [m for m in range(1, len(x) + 1) if len(x) % m == 0]
            near.sort(key=lambda m: (abs(m - number), m))
            raise RefusedError(
                f"A batch of {len(x)} samples cannot be cut into {number} equal micro-batches. Take one of "
                f"{', '.join(map(str, sorted(near[:4])))}, or another batch size (a last smaller batch: "
                "drop_last=True)."
            )
        parts.check_statistics(self.model, number)
        if self._shape is None:
            parts.check_equal(self.model, self._stages, x[: len(x) // number])
            self._shape = tuple(x.shape)
        if tuple(x.shape) != self._shape:
            raise RefusedError(
                f"The batch has the shape {list(x.shape)}, and the first one had {list(self._shape)}: a pipeline's "
                "messages keep their shapes. Drop a last smaller batch (drop_last=True), pad, or bind the model again."
            )
        return number

    def _mail(self, purpose: str) -> Mail:
        return Mail(self.group, self.ranks, purpose)

    def own_stages(self) -> list[int]:
        """The numbers of this rank's stages."""
        return [] if self.lane is None else list(range(self.lane, len(self._stages), len(self.plan.ranks)))

    def stage(self, number: int) -> parts.Stage:
        """Return a stage."""
        return self._stages[number]

    def _own_parameters(self) -> list[nn.Parameter]:
        own = [p for number in self.own_stages() for p in self._stages[number].parameters()]
        return [parameter for parameter in own if parameter.requires_grad]

    # ---------------------------------------------------------------------------------------- between steps

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the gradients of all stages so that their common norm is at most `max_norm`; return the norm before.

        As `torch.nn.utils.clip_grad_norm_`, which would see this rank's gradients only.
        """
        grads = [p.grad for p in self._own_parameters() if p.grad is not None]
        own = (
            torch.stack([g.detach().float().square().sum() for g in grads]).sum()
            if grads
            else torch.zeros(())
        )
        norms = self._from_all("the gradients' norm", _NORM, own.cpu().double())
        norm = float(torch.stack(norms).sum().sqrt())
        factor = max_norm / (norm + 1e-6)
        if factor < 1.0:
            for grad in grads:
                grad.mul_(factor)
        return norm

    def collect(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Bring every stage's parameters and buffers, and the optimizer's state of them, to all ranks."""
        own = {n: self._state(n, optimizer) for n in self.own_stages()}
        for other in self._from_all("collect", _STATE, own):
            for number, (tensors, states) in other.items():
                if number not in own:
                    self._take_state(number, tensors, states, optimizer)

    def _state(self, number: int, optimizer: torch.optim.Optimizer | None) -> tuple[list[Tensor], list[Any]]:
        stage = self._stages[number]
        states = [optimizer.state.get(p) for p in stage.parameters()] if optimizer is not None else []
        return [tensor.detach().cpu() for tensor in [*stage.parameters(), *stage.buffers()]], states

    def _take_state(
        self,
        number: int,
        tensors: Sequence[Tensor],
        states: Sequence[Any],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        stage = self._stages[number]
        with torch.no_grad():
            for mine, theirs in zip([*stage.parameters(), *stage.buffers()], tensors, strict=True):
                mine.copy_(theirs)
        if optimizer is not None:
            for parameter, state in zip(stage.parameters(), states, strict=True):
                if state is not None:
                    optimizer.state[parameter] = state

    def all_times(self) -> list[list[tuple[Action, float, float]]]:
        """Return, by lane, what each lane has run in its newest step, and when."""
        return self._from_all("the step's times", _TIMES, self.times)

    def _from_all(self, purpose: str, kind: int, own: Any) -> list[Any]:
        """Return every lane's value, by lane, on every rank."""
        with self._mail(purpose) as mail:
            return mail.gather(self.plan.ranks, (kind, 0, 0), own)


class _Step:
    """This lane's actions of one step."""

    def __init__(
        self,
        pipeline: TrainingPipeline,
        mail: Mail,
        start: Mapping[str, Any],
        x: Tensor | None,
        loss_fn: LossFunction,
    ) -> None:
        self._pipeline, self._mail, self._loss_fn = pipeline, mail, loss_fn
        plan = pipeline.plan
        self._ranks, self._last = plan.ranks, len(plan.stages) - 1
        self._rank = plan.ranks[pipeline.lane or 0]
        count = start["num_microbatches"]
        self._count = count
        self._lane = build(plan.schedule, len(plan.ranks), count, plan.num_chunks)[pipeline.lane or 0]
        self._inputs = x.chunk(count) if x is not None and not pipeline.lane else ()
        self._targets = start["y"].chunk(count) if start["y"] is not None else ()
        self._y: Tensor | None = start["y"]
        self._local: dict[tuple[int, int, int], Tensor] = {}
        self._passes: dict[tuple[int, int], backward.Pass] = {}
        self._losses: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._shapes: dict[int, torch.Size] = {}

    def run(self) -> tuple[str, float, float]:
        """Return why the step is refused or "", what its gradients are to be multiplied with, and the loss."""
        times = []
        for action in self._lane:
            value = self._needed(action)
            begin = time.monotonic()
            self._do(action, value)
            times.append((action, begin, time.monotonic()))
        self._pipeline.times = times
        last = self._ranks[-1]
        if self._rank != last:
            verdict: tuple[str, float, float] = self._mail.take(last, (_VERDICT, 0, 0))
            return verdict
        assert self._y is not None
        verdict = _judge(self._losses, self._outputs, self._y, self._loss_fn)
        for rank in self._pipeline.ranks:
            if rank != last:
                self._mail.send(rank, (_VERDICT, 0, 0), verdict)
        return verdict

    def _needed(self, action: Action) -> Tensor | None:
        """Return the input or the gradient that the action needs, waiting for it outside of its time."""
        kind, stage, number = action.kind, action.stage, action.microbatch
        if kind is Kind.WEIGHT:
            return None
        if kind is Kind.FORWARD:
            return (
                self._inputs[number] if stage == 0 else self._arrived(_ACTIVATION, stage, number, stage - 1)
            )
        return None if stage == self._last else self._arrived(_GRADIENT, stage, number, stage + 1)

    def _arrived(self, kind: int, stage: int, number: int, source: int) -> Tensor:
        rank, key = self._ranks[source % len(self._ranks)], (kind, stage, number)
        value: Tensor = self._local.pop(key) if rank == self._rank else self._mail.take(rank, key)
        return value

    def _deliver(self, kind: int, stage: int, number: int, value: Tensor) -> None:
        rank, key = self._ranks[stage % len(self._ranks)], (kind, stage, number)
        if rank == self._rank:
            self._local[key] = value.detach()
        else:
            self._mail.send(rank, key, value)

    def _do(self, action: Action, value: Tensor | None) -> None:
        stage, number = action.stage, action.microbatch
        match action.kind:
            case Kind.FORWARD:
                assert value is not None
                self._forward(stage, number, value)
            case Kind.WEIGHT:
                self._passes.pop((stage, number)).weights()
            case Kind.BACKWARD:
                self._send_back(stage, number, self._passes.pop((stage, number)).whole(value))
            case Kind.INPUT:
                self._send_back(stage, number, self._passes[stage, number].inputs(value))

    def _forward(self, stage: int, number: int, value: Tensor) -> None:
        module = self._pipeline.stage(stage)
        if stage and value.is_floating_point():
            value = value.detach().requires_grad_()
        output = module(value)
        self._check_shape(stage, module, output)
        if stage == self._last:
            self._outputs.append(output.detach())
            output = self._loss_fn(output, self._targets[number])
            if not isinstance(output, Tensor) or output.numel() != 1:
                raise RefusedError(
                    "loss_fn(output, y) returns one number as a tensor: a mean or a sum over the samples."
                )
            self._losses.append(output.detach())
        else:
            self._deliver(_ACTIVATION, stage + 1, number, output)
        self._passes[stage, number] = backward.Pass(value, output, list(module.parameters()))

    def _check_shape(self, stage: int, module: parts.Stage, output: Tensor) -> None:
        first = self._shapes.setdefault(stage, output.shape)
        if output.shape != first:
            raise RefusedError(
                f"Stage {stage} ({', '.join(module.names)}) gives a tensor of shape {list(output.shape)}, and gave "
                f"{list(first)} for the first micro-batch: a pipeline's messages keep their shapes. Pad them."
            )

    def _send_back(self, stage: int, number: int, gradient: Tensor | None) -> None:
        if stage:
            assert gradient is not None
            self._deliver(_GRADIENT, stage - 1, number, gradient)


def _judge(
    losses: Sequence[Tensor], outputs: Sequence[Tensor], y: Tensor, loss_fn: LossFunction
) -> tuple[str, float, float]:
    """Compare the batch's loss with those of its micro-batches: their mean, or their sum."""
    with torch.no_grad():
        whole = float(loss_fn(torch.cat(list(outputs)), y))
    count, total = len(losses), float(torch.stack([loss.double() for loss in losses]).sum())
    tolerance = min(1e-2, 200 * torch.finfo(losses[0].dtype).eps)
    for scale in (1.0 / count, 1.0):
        if (
            abs(total * scale - whole) <= tolerance * max(abs(whole), abs(total * scale))
            or total * scale == whole
        ):
            return "", scale, whole
    if whole != whole and total != total:
        return "", 1.0 / count, whole  # not a number either way, as on a single device
    return (
        (
            f"The loss of the batch is {whole:.7g}, the mean of its {count} micro-batches' {total / count:.7g} and "
            f"their sum {total:.7g}: it is neither a mean nor a sum over the samples (ignore_index, batch-wise "
            "losses, …), and its gradients would be wrong. Take microbatches=1, or a sum divided by a number that does "
            "not depend on the micro-batch."
        ),
        1.0,
        whole,
    )


def _merge(held: Mapping[nn.Parameter, Tensor | None], scale: float) -> None:
    """Scale the new gradients and add those that were there before."""
    for parameter, before in held.items():
        if parameter.grad is None:
            parameter.grad = before
            continue
        if scale != 1.0:
            parameter.grad.mul_(scale)
        if before is not None:
            parameter.grad = before.add_(parameter.grad)


def _shapes(x: Any, y: Any) -> str:
    shapes = [list(value.shape) for value in (x, y) if isinstance(value, Tensor)]
    return f" of shapes {shapes[0]} and {shapes[1]}" if len(shapes) == 2 else ""
