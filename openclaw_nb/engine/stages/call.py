"""The model call: one autograd function on every rank, whatever the model and however its batch is cut.

    model(x) ─> cut into micro-batches ─> each through this rank's layers (`route`) ─> joined on the last rank
                                                                                └─> the same output on all ranks
    backward ─> the output's gradient, the same on all ranks, cut again ─> each back through this rank's layers

That is GPipe: all micro-batches forward, then all back. The output's rows are those of the whole batch, so that any
loss, metric or print works, and parts of unequal size count as they should.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.group.exchange import Expected
from openclaw_nb.engine.loss.record import map_tensors
from openclaw_nb.engine.stages.route import Left, Pass, Route
from openclaw_nb.engine.steps.randomness import ModelStream
from openclaw_nb.plan.shares import share_bounds


class ModelCall:
    """One call of the model.

    Parameters
    ----------
    route : Route
        Through which ranks it goes.
    number : int
        Of the call.
    plain : callable
        The model's own code.
    stream : ModelStream
        This rank's random numbers, for a batch that is cut.
    """

    def __init__(self, route: Route, number: int, plain: Callable[..., Any], stream: ModelStream) -> None:
        self._route, self._number, self._plain, self._stream = route, number, plain, stream
        self._passes: list[Pass] = []
        self._rows: list[list[int]] = []
        self._tree: Any = None
        self.flags: list[bool] = []

    def run(self, args: Any, kwargs: Any, num_rows: int, num_parts: int) -> list[Tensor]:
        """Run the model, and return the tensors of its output, the same on every rank.

        Parameters
        ----------
        args, kwargs
            Of the call, the whole batch.
        num_rows : int
            Samples of the batch: tensors of that length in dim 0 are cut.
        num_parts : int
            Into how many micro-batches.
        """
        bounds = share_bounds(num_rows, num_parts) if num_parts > 1 else [(0, num_rows)]
        expected = self._expect(num_parts)
        outputs = []
        for part, (low, high) in enumerate(bounds):
            inputs = (
                (args, kwargs) if num_parts == 1 else _rows_of((args, kwargs), num_rows, slice(low, high))
            )
            one = Pass(
                self._route, (self._number, part), keeps_random=num_parts == 1, expected=next(expected, None)
            )
            self._passes.append(one)
            outputs.append(self._run_one(one, inputs, is_alone=num_parts == 1))
        return self._join(outputs, bounds)

    def _expect(self, num_parts: int) -> Iterator[Expected]:
        """Begin to receive what all micro-batches bring to this rank, so that they arrive while it computes."""
        runs, exchange = self._route.runs, self._route.exchange
        if num_parts == 1 or exchange is None or len(runs) != 1 or runs[0].before is None:
            return iter(())
        before = runs[0].before
        return iter([exchange.expect(before) for _ in range(num_parts)])

    def _run_one(self, one: Pass, inputs: Any, *, is_alone: bool) -> Any:
        args, kwargs = inputs
        self._route.current = one
        try:
            with _own_stream(None if is_alone else self._stream):
                return one.finish(self._plain(*args, **kwargs))
        except Left:
            return None
        finally:
            self._route.current = None

    def _join(self, outputs: Sequence[Any], bounds: Sequence[tuple[int, int]]) -> list[Tensor]:
        route = self._route
        key = (self._number, "output")
        random = [torch.get_rng_state()] if len(bounds) == 1 else []
        if route.rank != route.last:
            message = route.receive(route.last, key)
            _, self._tree, self.flags = message.header
            tensors = list(message.tensors)
            if random:
                torch.set_rng_state(tensors.pop())
            return [tensor.to(route.device) for tensor in tensors]
        lists = [_leaves(output) for output in outputs]
        self._tree = map_tensors(_Hole.numbered(), outputs[0])
        self.flags = [leaf.requires_grad and torch.is_grad_enabled() for leaf in lists[0]]
        joined = [self._cat([parts[at] for parts in lists], bounds) for at in range(len(lists[0]))]
        if route.exchange is not None:
            for peer in sorted({*route.owners} - {route.rank}):
                route.send(peer, (key, self._tree, self.flags), [*joined, *random])
            route.exchange.flush()  # the cell may write to its output
        return joined

    def _cat(self, parts: Sequence[Tensor], bounds: Sequence[tuple[int, int]]) -> Tensor:
        if len(bounds) == 1:
            self._rows.append([])
            return parts[0].detach()
        sizes = [high - low for low, high in bounds]
        first = parts[0]
        if not first.dim() or any(
            part.shape[0] * sizes[0] != first.shape[0] * size for part, size in zip(parts, sizes, strict=True)
        ):
            raise RefusedError(
                f"With {len(bounds)} micro-batches the model's outputs must have the samples in dim 0; it has "
                "returned a "
                f"tensor of shape {list(first.shape)} for {sizes[0]} samples. Compute such values outside of "
                "the model, or "
                "use --microbatches 1."
            )
        self._rows.append([part.shape[0] for part in parts])
        return torch.cat([part.detach() for part in parts])

    def output(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the model returns, with these tensors in it."""
        return map_tensors(lambda hole: tensors[hole.number], self._tree, _Hole)

    def go_back(self, gradients: Sequence[Tensor | None]) -> None:
        """Compute this rank's gradients from those of the output's tensors; once."""
        if not self._passes:
            raise RefusedError(
                "backward() runs a second time through one call of the model: call the model again, or add "
                "the losses up "
                "and run one backward()."
            )
        passes, self._passes = self._passes, []
        last = self._route.rank == self._route.last
        for part, one in enumerate(passes):
            cut = [
                self._part_of(gradient, at, part) for at, gradient in enumerate(gradients) if self.flags[at]
            ]
            one.go_back(cut if last else ())

    def _part_of(self, gradient: Tensor | None, at: int, part: int) -> Tensor | None:
        if gradient is None or not self._rows or not self._rows[at]:
            return gradient
        rows = self._rows[at]
        start = sum(rows[:part])
        return gradient[start : start + rows[part]]


class _Hole:
    """The place of a tensor in an output."""

    def __init__(self, number: int) -> None:
        self.number = number

    @classmethod
    def numbered(cls) -> Callable[[Tensor], _Hole]:
        """Return what makes one for each tensor, in order."""
        count = iter(range(1 << 30))
        return lambda _: cls(next(count))


class Through(torch.autograd.Function):
    """A call as one step of the cell's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, call: ModelCall, run: Callable[[], list[Tensor]]
    ) -> tuple[Tensor, ...]:
        """Run the model's code with a graph of its own, which only `backward` knows."""
        with torch.enable_grad():
            tensors = run()
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t, flag in zip(tensors, call.flags, strict=True) if not flag))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        """Run that graph back."""
        ctx.call.go_back(gradients)
        return None, None, None


def num_rows_of(args: Any, kwargs: Any) -> int:
    """Return how many samples the arguments of a call have: the length of the first tensor."""
    first = next((leaf for leaf in _leaves((args, kwargs)) if leaf.dim()), None)
    return 1 if first is None else first.shape[0]


def _rows_of(tree: Any, num_rows: int, rows: slice) -> Any:
    return map_tensors(lambda t: t[rows] if t.dim() and t.shape[0] == num_rows else t, tree)


def _leaves(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found


@contextmanager
def _own_stream(stream: ModelStream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    stream.enter()
    try:
        yield
    finally:
        stream.leave()
