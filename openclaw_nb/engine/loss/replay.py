"""Runs the recorded tail of a loss again, in float64, on some of the samples.

Knows: how arguments are cut to the samples, and what may be doubted. A size such as the 512 of
``logits.view(512, 10)`` may or may not stand for the batch, a tensor of as many entries as there are samples
may be labels or class weights. Every doubt is a `Choice` with the likeliest option first.

Does not know: which options are right. `kind` tries them: a wrong one fails or gives unrelated numbers.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openclaw_nb.engine.loss.ops import (
    MULTIPLYING,
    Op,
    RefusedTail,
    as_number,
    mutates,
    number_at,
    plain_tensors,
)

MOST_SAMPLES = 8  # samples that take part: enough for two different splits, one of them uneven
MOST_VALUES = 4_000_000  # values of model output that take part: 32 MB in float64
MOST_COMBINATIONS = 64

_SHAPING = frozenset({"view", "reshape", "expand", "broadcast_to", "unflatten", "repeat", "tile"})
_CASTING = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as", "cuda", "cpu"})

Rows = tuple[int, ...]
Change = Callable[[Tensor], Tensor]
Key = tuple[str, int]
Picked = dict[Key, Any]


class Choice(NamedTuple):
    """A doubt: what it is about (a tensor's id, or an op's order) and the options, likeliest first."""

    key: Key
    options: tuple[Any, ...]


def unchanged(value: Tensor) -> Tensor:
    """Leave data as they were recorded."""
    return value


class Replay:
    """The operations between the model and one number, ready to run on some of the samples.

    Parameters
    ----------
    ops : list of Op
        What the number needs, in order; the last one makes it.
    num_samples : int
        Samples that the model outputs were computed on; dim 0 of each output is a multiple of it.
    """

    def __init__(self, ops: list[Op], num_samples: int) -> None:
        self.ops = ops
        self.num_samples = num_samples
        self.num_rows = self._num_rows()
        self.has_masks = any(t.dtype is torch.bool and self._fits(t) for t in plain_tensors(ops))
        self._sizes = self._known_sizes()
        self._ready: dict[tuple[int, Change | None], Tensor] = {}

    def combinations(self) -> Iterator[Picked]:
        """Walk the ways to settle all doubts, likeliest first."""
        choices = [self._tensor_choice(t) for t in plain_tensors(self.ops) if self._fits(t)]
        choices += [choice for op in self.ops for choice in self._op_choices(op)]
        every = itertools.product(*(choice.options for choice in choices))
        for options in itertools.islice(every, MOST_COMBINATIONS):
            yield {choice.key: option for choice, option in zip(choices, options, strict=True)}

    def factors(self) -> Iterator[tuple[Op, float]]:
        """Walk the operations that multiply by a number, with it."""
        for op in self.ops:
            at = number_at(op)
            if at is not None and op.name in MULTIPLYING:
                yield op, as_number(op.args[at]) or 0.0

    @torch.no_grad()
    def run(
        self, rows: Rows, picked: Picked, outputs: Change = unchanged, masks: Change = unchanged
    ) -> float:
        """Compute the number on some rows.

        On the CPU, because a label that does not fit a wrong guess would end a CUDA context for good.

        Parameters
        ----------
        rows : tuple of int
            Below `num_rows`; a row may be taken twice.
        picked : dict
            One of `combinations`.
        outputs, masks : callable
            Change the model outputs, and the other tensors that are cut to the samples, before they are used.

        Raises
        ------
        RefusedTail
            If random numbers are drawn.
        """
        results: dict[Op, Any] = {}
        call = _Call(self, rows, picked, masks, results)
        with torch.autocast("cpu", enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a wrong guess may broadcast
            for op in self.ops:
                with _nothing_random(op):
                    results[op] = self.take(op.value, rows, outputs) if op.value is not None else call(op)
        return float(results[self.ops[-1]])

    def take(self, tensor: Tensor, rows: Rows, change: Change) -> Tensor:
        """Give a fresh float64 copy of some rows, changed as asked; a sample may own several entries."""
        key = (id(tensor), change)
        if key not in self._ready:
            each = tensor.shape[0] // self.num_samples
            some = tensor.detach()[: self.num_rows * each]
            self._ready[key] = change(_wide(some)).unflatten(0, (self.num_rows, each))
        return self._ready[key][list(rows)].flatten(0, 1)

    def keep(self, tensor: Tensor) -> Tensor:
        """Give a float64 copy of the whole, to be read only."""
        key = (id(tensor), None)
        if key not in self._ready:
            self._ready[key] = _wide(tensor.detach())
        return self._ready[key]

    def _num_rows(self) -> int:
        values = sum(op.value.numel() for op in self.ops if op.value is not None) / self.num_samples
        rows = min(self.num_samples, MOST_SAMPLES)
        while rows > 2 and rows * values > MOST_VALUES:
            rows //= 2
        return rows

    def _fits(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and tensor.shape[0] > 0 and tensor.shape[0] % self.num_samples == 0

    def _tensor_choice(self, tensor: Tensor) -> Choice:
        """Labels and masks follow the samples; parameters, and class weights of the same size, do not."""
        options = ("keep",) if isinstance(tensor, nn.Parameter) else ("slice", "keep")
        return Choice(("tensor", id(tensor)), options[::-1] if tensor.requires_grad else options)

    def _op_choices(self, op: Op) -> list[Choice]:
        if op.name in _SHAPING:
            places = self._batch_places(op)
            return [Choice(("shape", op.order), (*places, None))] if places else []
        at = number_at(op)
        if at is not None and self.is_size(op, as_number(op.args[at]) or 0.0):
            return [Choice(("number", op.order), ("scale", "keep"))]
        return []

    def _batch_places(self, op: Op) -> list[int]:
        """Find the places, among the sizes given to a shape operation, that may stand for the batch."""
        sizes = sizes_given(op)
        known = math.prod(size for size in sizes if size > 0)
        first = op.args[0]
        whole = first.shape.numel() if type(first) is Op and first.shape is not None else 0
        resolved = [size if size >= 0 else whole // max(known, 1) for size in sizes]
        return [place for place, size in enumerate(resolved) if size > 0 and size % self.num_samples == 0]

    def is_size(self, op: Op, number: float) -> bool:
        """Whether an operation divides by the number of samples, times sizes of dims in the tail."""
        if op.name in MULTIPLYING:  # only as 1 / size: a factor of 8 is rather a weight
            return 0 < number < 0.7 and any(
                math.isclose(number * size, 1, rel_tol=1e-6) for size in self._sizes
            )
        return number in self._sizes

    def _known_sizes(self) -> set[int]:
        shapes = [op.shape for op in self.ops if op.shape is not None]
        shapes += [tensor.shape for tensor in plain_tensors(self.ops)]
        found = {self.num_samples}
        for shape in shapes:
            if shape and shape[0] and shape[0] % self.num_samples == 0:
                dims = (shape[0] // self.num_samples, *shape[1:5])
                groups = itertools.product(*((1, dim) for dim in dims))
                found |= {self.num_samples * math.prod(group) for group in groups}
        return found


class _Call:
    """Calls operations with their arguments cut to some rows."""

    def __init__(
        self, replay: Replay, rows: Rows, picked: Picked, masks: Change, results: dict[Op, Any]
    ) -> None:
        self.replay = replay
        self.rows = rows
        self.ratio = len(rows) / replay.num_samples
        self.picked = picked
        self.masks = masks
        self.results = results

    def __call__(self, op: Op) -> Any:
        func = op.func
        assert func is not None
        if op.name in _CASTING:
            return self.resolve(op.args[0])
        args, kwargs = self.resolve(self.rewritten(op)), self.resolve(op.kwargs)
        if mutates(func) and isinstance(op.args[0], Tensor):
            args = (args[0].clone(), *args[1:])  # what is kept for other rows must stay as it is
        result = func(*args, **kwargs)
        return args[0] if op.name == "__setitem__" else result

    def rewritten(self, op: Op) -> tuple[Any, ...]:
        """Bring the numbers that stand for the batch to the number of rows."""
        place = self.picked.get(("shape", op.order))
        if place is not None:
            sizes = sizes_given(op)
            sizes[place] = round(sizes[place] * self.ratio) if sizes[place] > 0 else -1
            return (*op.args[: _first_size(op)], tuple(sizes))
        if self.picked.get(("number", op.order)) == "scale":
            return self._scaled(op)
        if op.name == "__getitem__":
            return (op.args[0], self._positions(op.args[1]))
        if op.name == "ctc_loss":
            return tuple(self._lengths(part) for part in op.args)
        return op.args

    def _scaled(self, op: Op) -> tuple[Any, ...]:
        at = number_at(op)
        number = as_number(op.args[at]) if at is not None else None
        assert at is not None
        assert number is not None
        inverse = op.name in MULTIPLYING and self.replay.is_size(op, number)
        return (*op.args[:at], number / self.ratio if inverse else number * self.ratio, *op.args[at + 1 :])

    def _lengths(self, part: Any) -> Any:
        """Cut a tuple of one length a sample to the rows, as a tensor of lengths would be."""
        if type(part) is tuple and len(part) == self.replay.num_samples:
            return tuple(part[row] for row in self.rows)
        return part

    def _positions(self, index: Any) -> Any:
        """Turn an index that numbers the samples, such as ``arange(n)``, into one that numbers the rows."""
        if isinstance(index, tuple):
            return tuple(self._positions(part) for part in index)
        size = self.replay.num_samples
        if isinstance(index, Tensor) and index.dim() == 1 and index.dtype is torch.int64:
            size = len(index) - len(index) % size
            index = index.tolist() if torch.equal(index.cpu(), torch.arange(size)) else index
        if isinstance(index, range | list) and size and list(index) == list(range(size)):
            return list(range(round(size * self.ratio)))
        return index

    def resolve(self, part: Any) -> Any:
        """Replace what was recorded by what it is on these rows."""
        if type(part) is Op:
            return self.results[part]
        if isinstance(part, Tensor):
            sliced = self.picked.get(("tensor", id(part))) == "slice"
            return self.replay.take(part, self.rows, self.masks) if sliced else self.replay.keep(part)
        if type(part) is tuple or type(part) is list:
            return type(part)(self.resolve(inner) for inner in part)
        if type(part) is dict:
            return {key: self.resolve(inner) for key, inner in part.items()}
        if isinstance(part, torch.dtype):
            return torch.float64 if part.is_floating_point else part
        return torch.device("cpu") if isinstance(part, torch.device) else part


@contextmanager
def _nothing_random(op: Op) -> Iterator[None]:
    """Put the random state back, and refuse an operation that moved it."""
    before = torch.get_rng_state()
    try:
        yield
    finally:
        drew = not torch.equal(torch.get_rng_state(), before)
        if drew:
            torch.set_rng_state(before)
    if drew:
        raise RefusedTail(f"{op.name} draws random numbers between the model and the loss")


def _wide(tensor: Tensor) -> Tensor:
    """Bring to the CPU and to float64 (complex128); integers and booleans keep their type."""
    tensor = tensor.as_subclass(Tensor).cpu()
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _first_size(op: Op) -> int:
    return 2 if op.name == "unflatten" else 1


def sizes_given(op: Op) -> list[int]:
    """Sizes given to a shape operation, one by one or as one tuple; empty where they are keywords."""
    given = op.args[_first_size(op) :]
    if len(given) == 1 and isinstance(given[0], tuple | list):
        given = tuple(given[0])
    return list(given) if all(isinstance(size, int) for size in given) else []
