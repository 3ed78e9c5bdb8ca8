"""The steps of a process on their ranks: items flow down through bounded channels, gradients and changes flow back.

    item ──> step 0 ──> value ──> step 1 ──> value ──> step 2 ──> result
                 <── done(k), what changed ──┘    <── done(k), what changed ──┘
                                  <── gradient of a value whose graph is here ──┘

A tensor that has a graph goes down without it. Where backward() is called on what became of it, its gradient goes back
to the rank that has the graph; the parameters' gradients return to the caller, as if the graph had been there.

Knows functions, values and messages; does not know schedules of micro-batches or how lanes are drawn.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.group.collectives import ReleasableGroup
from openclaw_nb.engine.scheduler.mail import Mail
from openclaw_nb.engine.scheduler.shared import Shared
from openclaw_nb.plan.steps import last_sharers

_ITEM, _DONE, _ASK, _ANSWER, _STATES, _RESULT, _LAST = range(10, 17)
_END = "end of the items"

Times = list[tuple[int, int, float, float]]


class StepPipeline:
    """This rank's step, or steps, of a process.

    Parameters
    ----------
    functions : mapping of str to callable
        The steps by name, in order; each takes what the one before returned.
    stages : sequence of sequences of str
        Which steps are on which lane.
    ranks : sequence of int
        The rank of each lane.
    group : ReleasableGroup
        The ranks.
    lanes_only : bool
        Whether ranks without a step take no part; otherwise they learn all that a rank with one does.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        stages: Sequence[Sequence[str]],
        ranks: Sequence[int],
        group: ReleasableGroup,
        *,
        lanes_only: bool = False,
    ) -> None:
        self._functions, self._stages, self._ranks, self.group = functions, stages, list(ranks), group
        self._order = list(functions)
        by_step = Shared(functions)
        self.shared = by_step
        self._reached = [
            set().union(*(by_step.reached[self._order.index(name)] for name in names)) for names in stages
        ]
        self.waits_for = last_sharers(self._reached)
        rank = group.rank()
        self.lane = self._ranks.index(rank) if rank in self._ranks else None
        self.everyone = self._ranks if lanes_only else list(range(group.size()))
        self.times: Times = []

    def run(self, items: Iterable[Any] | None, *, synchronous: bool, depth: int) -> list[Any]:
        """Let all items pass; return the last step's results, on every rank.

        Parameters
        ----------
        items : iterable
            What the first step is called with, one after the other; others may have None.
        synchronous : bool
            A step that shares a model with later ones waits until they are done with the item before.
        depth : int
            How many items a step may be ahead of the next.
        """
        self.times = []
        end_watching = self.shared.watch_zeroing()
        try:
            with Mail(self.group, self.everyone, "a run") as mail:
                run = _Run(self, mail, synchronous, depth)
                return run.look_on() if self.lane is None else run.run(items)
        finally:
            end_watching()

    def all_times(self) -> list[Times]:
        """Return, by lane, what each lane has run, and when: (step, item, start, end)."""
        with Mail(self.group, self.everyone, "the run's times") as mail:
            times: list[Times] = mail.gather(self._ranks, (_LAST, 0, 0), self.times)
            return times

    # What a run reads of it.
    @property
    def ranks(self) -> list[int]:
        """The rank of each lane."""
        return self._ranks

    @property
    def reached(self) -> list[set[int]]:
        """By lane, the numbers of the shared tensors that it uses."""
        return self._reached

    def steps_of(self, lane: int) -> list[tuple[int, Callable[..., Any]]]:
        """Return a lane's steps, with their numbers."""
        return [(self._order.index(name), self._functions[name]) for name in self._stages[lane]]


class _Run:
    """One run of the items through this lane."""

    def __init__(self, pipeline: StepPipeline, mail: Mail, synchronous: bool, depth: int) -> None:
        self._pipeline, self._mail = pipeline, mail
        self._synchronous, self._depth = synchronous, depth
        self._lane = pipeline.lane or 0
        self._last = len(pipeline.ranks) - 1
        self._shared = pipeline.shared
        self._graphs: dict[int, list[Tensor]] = {}  # by item, what went down without its graph
        self._done = [0] * len(pipeline.ranks)  # how many items each later lane is done with
        self._changed: set[int] = set()
        self._passed_on: list[Any] = []
        self._anchor = torch.zeros((), requires_grad=True)

    def run(self, items: Iterable[Any] | None) -> list[Any]:
        self._agree_on_state()
        results: list[Any] = []
        source = iter(items if items is not None else ()) if not self._lane else None
        number = 0
        while True:
            self._await_turn(number)
            value = self._next_value(source, number)
            if value is _END:
                break
            self._await_room(number)
            self._work(value, number, results)
            number += 1
        return self._finish(number, results)

    def look_on(self) -> list[Any]:
        """Have what the lanes have in the end, on a rank that has no step."""
        self._agree_on_state()
        return self._exchange_results([])

    # ---------------------------------------------------------------------------------------- waiting

    def _await_turn(self, number: int) -> None:
        """Let later steps that share a model be done with the item before, if they are to."""
        if self._synchronous:
            for lane in range(self._lane + 1, self._pipeline.waits_for[self._lane] + 1):
                self._serve_until(partial(self._is_done, lane, number))
        self._serve()

    def _await_room(self, number: int) -> None:
        if self._lane < self._last:
            self._serve_until(lambda: self._done[self._lane + 1] > number - self._depth)

    def _is_done(self, lane: int, number: int) -> bool:
        return self._done[lane] >= number

    def _serve(self) -> None:
        """Take what later lanes have sent so far."""
        while (wanted := self._wanted()) and any(self._mail.has(*each) for each in wanted):
            self._take(wanted)

    def _serve_until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._take(self._wanted())

    def _wanted(self, kinds: Sequence[int] = (_ASK, _DONE)) -> list[tuple[int, tuple[int, int, int]]]:
        ranks = self._pipeline.ranks
        later = range(self._lane + 1, self._last + 1)
        return [(ranks[lane], (kind, 0, 0)) for kind in kinds for lane in later]

    def _take(
        self,
        wanted: list[tuple[int, tuple[int, int, int]]],
        also: tuple[int, tuple[int, int, int]] | None = None,
    ) -> Any:
        """Take one message; of ``also`` return it, serve any other and return None."""
        place, message = self._mail.take_any([*wanted, also] if also else wanted)
        if place == len(wanted):
            return message
        rank, (kind, _, _) = wanted[place]
        if kind == _ASK:
            self._answer(rank, message)
        else:
            self._take_done(self._pipeline.ranks.index(rank), message)
        return None

    def _take_done(self, lane: int, message: Any) -> None:
        values, gradients = message
        self._shared.apply(values, gradients)
        number = self._done[lane]
        self._done[lane] += 1
        if lane == self._last:
            self._graphs.pop(number, None)

    # ------------------------------------------------------------------------------------------- items

    def _next_value(self, source: Iterator[Any] | None, number: int) -> Any:
        if source is not None:
            return next(source, _END)
        above = self._pipeline.ranks[self._lane - 1], (_ITEM, 0, 0)
        message = None
        while message is None:
            message = self._take(self._wanted(), above)
        if message == _END:
            return _END
        data, changes = message
        for values, gradients in changes:
            self._shared.apply(values, gradients)
        self._passed_on = list(changes)
        return _load(data, lambda place, tensor: self._graphless(number, place, tensor))

    def _work(self, value: Any, number: int, results: list[Any]) -> None:
        before = self._shared.remember(sorted(self._pipeline.reached[self._lane]))
        for step, function in self._pipeline.steps_of(self._lane):
            begin = time.monotonic()
            with self._keeping_weights():
                value = function(value)
            self._pipeline.times.append((step, number, begin, time.monotonic()))
        values, gradients = self._shared.changes(before)
        self._changed |= values.keys()
        self._tell_earlier(values, gradients)
        if self._lane == self._last:
            results.append(_detached(value))
            return
        data, graphs = _dump(value)
        if graphs:
            self._graphs[number] = graphs
        changes = [*self._passed_on, *([(values, gradients)] if values or gradients else [])]
        wanted = set().union(*self._pipeline.reached[self._lane + 1 :])
        self._mail.send(self._below, (_ITEM, 0, 0), (data, [_only(wanted, *change) for change in changes]))

    @property
    def _below(self) -> int:
        return self._pipeline.ranks[self._lane + 1]

    def _tell_earlier(self, values: Mapping[int, Tensor], gradients: Mapping[int, Tensor | None]) -> None:
        zeroed = {number: None for number, gradient in gradients.items() if gradient is None}
        for lane in range(self._lane):
            message = _only(self._pipeline.reached[lane], values, zeroed)
            self._mail.send(self._pipeline.ranks[lane], (_DONE, 0, 0), message)

    def _keeping_weights(self) -> Any:
        """Let graphs hold on to the weights that they were recorded with, where newer ones may come meanwhile."""
        if self._synchronous:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)

    # --------------------------------------------------------------------------------------- gradients

    def _graphless(self, number: int, place: int, tensor: Tensor) -> Tensor:
        """Return a tensor whose gradient goes back to the lane above, where its graph is."""
        result: Tensor = _Remote.apply(self, (number, place), tensor, self._anchor, *self._shared.parameters)  # type: ignore[no-untyped-call]
        return result

    def ask(self, place: tuple[int, int], gradient: Tensor) -> list[Tensor | None]:
        """Let the lane above go back through its graph; return the gradients of the shared parameters."""
        above = self._pipeline.ranks[self._lane - 1]
        self._mail.send(above, (_ASK, 0, 0), (place, gradient.detach().cpu()))
        answer = None
        while answer is None:
            # Not what later lanes have changed: a function is in the midst of its work here.
            answer = self._take(self._wanted((_ASK,)), (above, (_ANSWER, 0, 0)))
        found: list[Tensor | None] = answer
        return found

    def _answer(self, rank: int, question: Any) -> None:
        (number, place), gradient = question
        begin = time.monotonic()
        parameters = self._shared.parameters
        held = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        tensor = self._graphs[number][place]
        try:
            # Several results may have a graph in common, or be asked for again; it goes when the item is done.
            torch.autograd.backward(tensor, gradient.to(tensor.device), retain_graph=True)
            answer = [parameter.grad for parameter in parameters]
        finally:
            for parameter, grad in zip(parameters, held, strict=True):
                parameter.grad = grad
        self._pipeline.times.append((-1, number, begin, time.monotonic()))
        self._mail.send(rank, (_ANSWER, 0, 0), answer)

    # ------------------------------------------------------------------------------------ begin and end

    def _agree_on_state(self) -> None:
        """Begin with the first lane's models and optimizers."""
        ranks = self._pipeline.ranks
        if self._pipeline.lane != 0:
            self._shared.load(self._mail.take(ranks[0], (_STATES, 0, 0)))
            return
        states = self._shared.states()
        for rank in self._pipeline.everyone:
            if rank != ranks[0]:
                self._mail.send(rank, (_STATES, 0, 0), states)

    def _finish(self, number: int, results: list[Any]) -> list[Any]:
        """Wait for the later lanes, and have all ranks know results, final values and the states of optimizers."""
        if self._lane < self._last:
            self._mail.send(self._below, (_ITEM, 0, 0), _END)
        for lane in range(self._lane + 1, self._last + 1):
            self._serve_until(partial(self._is_done, lane, number))
        return self._exchange_results(results)

    def _exchange_results(self, results: list[Any]) -> list[Any]:
        ranks = self._pipeline.ranks
        own = {n: self._shared.tensors[n].detach() for n in self._changed}
        optimizers = self._own_optimizers()
        given = self._mail.gather(ranks, (_RESULT, 0, 0), (own, optimizers, results))
        for lane, (values, states, _) in enumerate(given):
            if lane == self._pipeline.lane:
                continue
            self._shared.apply({n: v for n, v in values.items() if n not in own}, {})
            for place, state in states.items():
                if place not in optimizers:
                    self._shared.objects[place].load_state_dict(state)
        found: list[Any] = given[-1][2]
        return found

    def _own_optimizers(self) -> dict[int, Any]:
        """The states of optimizers that have made steps here."""
        return {
            place: each.state_dict()
            for place, each in enumerate(self._shared.objects)
            if isinstance(each, torch.optim.Optimizer) and self._stepped(each)
        }

    def _stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        own = {id(self._shared.tensors[n]) for n in self._changed}
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


class _Remote(torch.autograd.Function):
    """The identity, whose way back leads to the rank that has the graph."""

    @staticmethod
    def forward(ctx: Any, run: _Run, place: tuple[int, int], value: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.place = run, place
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, None, *ctx.run.ask(ctx.place, gradients[0])


def _only(
    wanted: set[int], values: Mapping[int, Tensor], gradients: Mapping[int, Tensor | None]
) -> tuple[dict[int, Tensor], dict[int, Tensor | None]]:
    return (
        {number: value.cpu() for number, value in values.items() if number in wanted},
        {n: None if g is None else g.detach().cpu() for n, g in gradients.items() if n in wanted},
    )


class _Pickler(pickle.Pickler):
    """Leaves the graph of tensors out, and notes which had one."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.graphs: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, nn.Module | torch.optim.Optimizer):
            raise RefusedError(
                f"A step returns a {type(value).__name__}: models and optimizers do not travel between steps. Let each "
                "step use them as the plain loop does, by name; what changes is taken along."
            )
        if isinstance(value, Tensor) and value.requires_grad and not isinstance(value, nn.Parameter):
            self.graphs.append(value)
            return len(self.graphs) - 1, value.detach().cpu()
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, attach: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__(file)
        self._attach = attach

    def persistent_load(self, reference: Any) -> Tensor:
        return self._attach(*reference)


def _dump(value: Any) -> tuple[bytes, list[Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.graphs


def _load(data: bytes, attach: Callable[[int, Tensor], Tensor]) -> Any:
    return _Unpickler(io.BytesIO(data), attach).load()


def _detached(value: Any) -> Any:
    data, _ = _dump(value)
    return _load(data, lambda place, tensor: tensor)
