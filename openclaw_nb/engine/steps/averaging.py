"""Local steps: each rank trains on its own slices for a while, then parameters are averaged (local SGD).

    batch ─> backward and step on this rank alone ─> ... ─> before batch K + 1: average over the ranks
                                                       └─> also before an evaluation, state_dict(), and at the end

Averaged are parameters, buffers and the optimizers' state, each rank's by the samples that it has seen since the last
time, so that all ranks are equal afterwards. As all of it is linear, K = 1 with SGD, also with momentum, gives the
parameters of single-device training. For that, the gradient of a loss that is a sum is multiplied by the samples of the
whole batch over those of the rank's part: a sum over a part is that much smaller. Stich, "Local SGD Converges Fast and
Communicates Little", ICLR 2019; with the momentum averaged too, Yu, Jin and Yang, "On the Linear Speedup Analysis of
Communication Efficient Momentum SGD for Distributed Non-Convex Optimization", ICML 2019.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from openclaw_nb.core.errors import MismatchError
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.group.sums import Layout, Sum
from openclaw_nb.engine.loss.record import LossKind
from openclaw_nb.engine.objects.find import Objects
from openclaw_nb.engine.steps.engine import StepEngine, StepOptions
from openclaw_nb.engine.steps.loaders import Slice
from openclaw_nb.engine.steps.measure import Publisher
from openclaw_nb.engine.steps.reducer import GradientReducer
from openclaw_nb.engine.steps.settings import Settings
from openclaw_nb.engine.steps.window import Window, times

_DIGEST_BYTES = 16


class Average:
    """Averages the tensors of some objects over the ranks.

    Parameters
    ----------
    ranks : Ranks
        Whose tensors are averaged.
    objects : Objects
        Their models and optimizers; what has no floating-point type is left as it is.
    tell : callable
        Takes a line for the person.
    """

    def __init__(self, ranks: Ranks, objects: Objects, tell: Callable[[str], None]) -> None:
        self._ranks, self._objects, self._tell = ranks, objects, tell
        self._settings = Settings(ranks, objects)
        self._layouts: list[Layout] = []
        self._sums: Sequence[Sum] = []
        self._turn = 0

    def __call__(self, weight: float, occasion: str, kinds: str = "") -> float:
        """Replace the tensors by the sum over the ranks of ``weight`` times theirs.

        Parameters
        ----------
        weight : float
            This rank's; those of all ranks add up to 1.
        occasion : str
            Why now; the same on every rank.
        kinds : str
            What the losses were since the last time; the same on every rank.

        Returns
        -------
        float
            How far this rank's parameters were from the average: the norm of the difference by the norm of the
            average, over all parameters.

        Raises
        ------
        MismatchError
            When the ranks are not at the same average, or have other tensors.
        """
        groups = _by_kind(self._tensors())
        shapes = {kind: [tuple(t.shape) for t in group] for kind, group in groups.items()}
        if not self._check_same(occasion, repr(shapes), kinds):
            self._tell(self._settings.make_equal())
        self._prepare([Layout(sum(t.numel() for t in group), *kind) for kind, group in groups.items()])
        works = []
        for each, group in zip(self._sums, groups.values(), strict=True):
            turn = self._turn % len(each.inputs)
            torch.cat([t.reshape(-1) for t in group], out=each.inputs[turn])
            each.inputs[turn].mul_(weight)
            works.append(each.start(turn, self._turn))
        self._turn += 1
        for work in works:
            if work is not None:
                work.wait()
        own = {id(p) for model in self._objects.models.values() for p in model.parameters()}
        moved = norm = 0.0
        for each, group in zip(self._sums, groups.values(), strict=True):
            parts = each.result.split([t.numel() for t in group])
            for tensor, part in zip(group, parts, strict=True):
                average = part.view(tensor.shape)
                if id(tensor) in own:
                    moved += float(torch.linalg.vector_norm(tensor - average)) ** 2
                    norm += float(torch.linalg.vector_norm(average)) ** 2
                tensor.copy_(average)
        return float((moved / norm) ** 0.5) if norm else 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes that each rank gives into one average."""
        return 0 if self._ranks.size == 1 else sum(each.result.nbytes for each in self._sums)

    def _check_same(self, occasion: str, shapes: str, kinds: str) -> bool:
        """Refuse to average what is not alike; return whether the settings are."""
        told = [f"{self._turn} {occasion}", shapes, str(self._settings), kinds]
        rows = self._ranks.gather_bytes(b"".join(map(_digest, told)))
        occasions, all_shapes, settings, all_kinds = (
            {row[at : at + _DIGEST_BYTES] for row in rows} for at in range(0, len(rows[0]), _DIGEST_BYTES)
        )
        if len(occasions) > 1:
            raise MismatchError(
                f"The ranks average their parameters on different occasions: rank {self._ranks.rank} {occasion}, "
                f"average number {self._turn}. Evaluate and call state_dict() on every rank, not on one of them."
            )
        if len(all_shapes) > 1:
            raise MismatchError(
                "The ranks' optimizers hold different state, so that it cannot be averaged: on some rank a step was "
                "skipped (by a GradScaler), or a parameter has had no gradient yet. Use --mode gradient."
            )
        if len(all_kinds - {_digest("")}) > 1:  # a rank without samples has no say
            raise MismatchError(
                f"The loss is not of the same kind on all ranks, so that their steps do not fit: on rank "
                f"{self._ranks.rank} it is {kinds}. Say --reduction mean or --reduction sum."
            )
        return len(settings) == 1

    def _prepare(self, layouts: list[Layout]) -> None:
        if layouts != self._layouts:  # an optimizer has its state only after its first step
            self._sums = self._ranks.make_sums(layouts)
            self._layouts = layouts

    def _tensors(self) -> Iterator[Tensor]:
        seen: set[int] = set()
        for tensor in self._every():
            if tensor.is_floating_point() and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor

    def _every(self) -> Iterator[Tensor]:
        for model in self._objects.models.values():
            yield from model.parameters()
            yield from model.buffers()
        for optimizer in self._objects.optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    yield from (value for _, value in sorted(state.items()) if isinstance(value, Tensor))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def _by_kind(tensors: Iterator[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return groups


class LocalSteps(StepEngine):
    """A step engine whose ranks step by themselves and average every so many steps.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    objects : Objects
        The cell's models and what trains them.
    options : StepOptions
        How steps are made.
    publisher : Publisher
        Told of each step and each average.
    """

    def __init__(self, ranks: Ranks, objects: Objects, options: StepOptions, publisher: Publisher) -> None:
        super().__init__(ranks, objects, options, publisher)
        self._average = Average(ranks, objects, self.tell)
        self._until_average = Window(options.batches_per_step * options.steps_per_average)
        self._seen = self._seen_by_all = 0
        self._kinds_seen: set[str] = set()

    def _new_reducer(self) -> GradientReducer:
        """Return one that reduces nothing: gradients stay where they are."""
        found = {id(p): p for model in self._objects.models.values() for p in model.parameters()}
        self._parameters = list(found.values())
        return GradientReducer([], self._ranks, message_size=1)

    def install(self) -> None:
        """Hang the engine onto the models, until `remove`."""
        super().install()
        for model in self._objects.models.values():
            self._handles.append(
                model.register_state_dict_pre_hook(lambda *_: self.synchronise("calls state_dict()"))
            )

    def _agree_on_overflows(self) -> None:
        """Let each rank skip its own steps."""

    def take_slice(self, part: Slice | None) -> None:
        """Take note of the next batch; average first if it is time to."""
        if self._until_average.is_boundary:
            self.synchronise("asks for the next batch")
        super().take_slice(part)
        if part is not None:
            self._until_average.next_batch(part.is_last)

    def rest(self) -> None:
        """Average if it is time to: only then are the ranks equal."""
        if self._until_average.is_boundary:
            self.synchronise("asks for the next batch")
            super().rest()

    def _before_call(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not (module.training and torch.is_grad_enabled()):
            self.synchronise("evaluates")  # an evaluation is one of the model that training leads to
        return super()._before_call(module, args, kwargs)

    def finish(self) -> None:
        """Make all ranks equal at the end of the cell."""
        self.synchronise("is at the cell's end")

    def synchronise(self, occasion: str) -> None:
        """Average over the ranks, if any of them has trained since the last time. Every rank calls this.

        Parameters
        ----------
        occasion : str
            Why now.
        """
        if not self._seen_by_all or self._ranks.size == 1:
            return
        weight, self._seen, self._seen_by_all = self._seen / self._seen_by_all, 0, 0
        kinds, self._kinds_seen = " and ".join(sorted(self._kinds_seen)), set()
        self._clock.slow_down()
        self._clock.arrive()
        try:
            with torch.no_grad():
                drift = self._average(weight, occasion, kinds)
        finally:
            self._clock.leave()
        self._publisher.average(drift, self._average.num_bytes)

    def _run_backward(self, root: Tensor, grad_tensors: Any, retain_graph: bool | None) -> None:
        vote = self._vote(root)
        self._check_several(vote.kind)
        self._take_kind(vote.kind)
        self._recorder.clear()
        self._check_window()
        boundary = self._window.is_boundary
        given = times(grad_tensors, root, self._window.weigh(self._num_local()))
        self._weight = self._weight_of(vote.kind)
        scale = self._weight or 1.0
        if boundary:
            self._window.give_back(self._parameters)
        try:
            self._backward(root, given, retain_graph)
        finally:
            self._weight = None
        self._seen += self._num_local()
        self._seen_by_all += self._num_global()
        self._publisher.batch(self._num_local())
        if not boundary:
            self._window.keep(self._parameters)
            return
        if self._window.factor != 1.0:
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], self._window.factor)
        loss = float(root.detach())
        self._publisher.step(loss * scale, loss, 0)

    def _weight_of(self, kind: LossKind) -> float:
        """Return what brings the gradient of this rank's part to the size of the whole batch's."""
        if not self._num_local():
            return 0.0
        return self._num_global() / self._num_local() if kind.name == "sum" else 1.0

    def _take_kind(self, kind: LossKind) -> None:
        if kind.name == "unknown":
            self.tell(
                f"the loss is neither a mean nor a sum over the samples, as far as can be seen ({kind.reason}): each "
                "worker steps with the gradient of its own part as it is. If it is a sum, say --reduction sum."
            )
        if kind.name != "none":
            self._kinds_seen.add(kind.name)
