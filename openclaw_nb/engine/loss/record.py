"""Follows how a cell turns the model's outputs into a loss, without changing what the cell computes.

Knows: how to follow tensors from the model to the loss (`Tracked`), which operations led there (`Recorder`),
and which single numbers the cell made on the way, so that they can be given their global values. What the
operations say about the loss is found by `kind`. Does not know ranks, or when a step begins and ends::

    forward hook    out = recorder.track(out)
    backward        kind = recorder.classify(loss, n)
                    recorder.clear()                             every tensor is plain again
                    the backward pass; then the numbers are filled with their global values

Clear before the pass: for a subclass torch looks `Tensor.backward` up again, and a patched one runs twice.

A tracked tensor holds what led to it, as its autograd graph does, and nothing else does: a result that the
cell drops is freed at once, and `Recorder.clear` leaves plain tensors behind, wherever the cell keeps them.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from openclaw_nb.engine.loss.kind import LossKind, decide
from openclaw_nb.engine.loss.ops import (
    Function,
    Op,
    ancestors,
    as_number,
    counted_labels,
    flatten,
    inputs_of,
    mutates,
    number_at,
)

__all__ = ["LossKind", "Recorder", "Tracked", "find_disagreement", "map_tensors", "untrack_tree"]

_untouched = torch._C.DisableTorchFunctionSubclass  # the guard that torch's own subclass examples use
_SETITEM = Tensor.__setitem__
_PRUNE_AT = 1024


class Tracked(Tensor):
    """A tensor that depends on a model output and still carries a gradient; behaves as a plain one.

    Made by `Recorder.track`. Results of torch functions that need a gradient are tracked again; all others
    (``argmax``, ``detach()``, numbers, comparisons) are plain. Prints, formats, copies and pickles as plain.
    """

    _op: Op

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with _untouched():
            given = args
            if args and type(args[0]) is Tensor and mutates(func):
                given = (args[0].detach().clone(), *args[1:])  # its value before it is written to
            result = func(*args, **kwargs) if kwargs else func(*args)
            kind = type(result)
            if kind is Tensor or kind is Tracked:
                if result.requires_grad:
                    _record(func, given, kwargs, result)
            elif isinstance(result, tuple | list):
                _record_each(func, given, kwargs, result)
            elif func is _SETITEM and args[0].requires_grad:
                _record(func, given, kwargs, args[0])
            return result

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        with _as_plain(self):
            return str(Tensor.__repr__(self, **kwargs))  # type: ignore[no-untyped-call]

    def __format__(self, spec: str) -> str:
        with _as_plain(self):
            return str(Tensor.__format__(self, spec))  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _as_plain(self):
            return Tensor.__reduce_ex__(self, protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with _untouched():
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]


@contextmanager
def _as_plain(tensor: Tensor) -> Iterator[None]:
    """Make a tracked tensor plain for a moment: torch prints and pickles by exact class."""
    op = tensor.__dict__.pop("_op")
    tensor.__class__ = Tensor
    try:
        yield
    finally:
        tensor.__class__ = Tracked
        tensor._op = op  # type: ignore[attr-defined]


def _handle(part: Any) -> Any:
    """Replace tracked tensors by what led to them, in nested arguments too."""
    kind = type(part)
    if kind is Tracked:
        return part._op
    if kind is tuple or kind is list:
        return kind([_handle(inner) for inner in part])
    return part


def _new_op(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Op:
    handles = tuple([_handle(part) for part in args])
    named = {name: _handle(part) for name, part in kwargs.items()} if kwargs else {}
    first = handles[0] if handles else None
    if type(first) is not Op:
        first = next(part for part in itertools.chain(flatten(handles), flatten(named)) if type(part) is Op)
    recorder: Recorder = first.recorder
    op = Op(next(recorder._orders), recorder, func, handles)
    op.kwargs = named
    return op


def _record(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Tensor) -> None:
    op = _new_op(func, args, kwargs)
    op.shape = result.shape
    if type(result) is Tracked or mutates(func):  # an argument came back, so it may have been written to
        op.recorder._mutations.append(op)
    op.recorder._adopt(result, op)


def _record_each(func: Function, args: Any, kwargs: Any, results: Sequence[Any]) -> None:
    parent: Op | None = None
    for position, result in enumerate(results):
        if type(result) is Tensor and result.requires_grad:
            parent = parent or _new_op(func, args, kwargs)
            op = Op(next(parent.recorder._orders), parent.recorder, operator.getitem, (parent, position))
            op.shape = result.shape
            parent.recorder._adopt(result, op)


class Recorder:
    """Follows model outputs through a cell and says how its loss depends on the batch.

    Examples
    --------
    >>> recorder = Recorder()
    >>> out = recorder.track(torch.ones(4, 2, requires_grad=True) * 2)
    >>> recorder.classify(out.pow(2).mean(), num_samples=4).name
    'mean'
    """

    def __init__(self) -> None:
        self._orders = itertools.count()
        self._made: list[weakref.ref[Tensor]] = []
        self._mutations: list[Op] = []
        self._tails: dict[Op, list[Op]] = {}
        self._prune_at = _PRUNE_AT

    # -- following

    def track(self, tensor: Tensor) -> Tensor:
        """Follow a model output from here on.

        Parameters
        ----------
        tensor : Tensor
            Dim 0 is the samples.

        Returns
        -------
        Tensor
            The same values in the same autograd graph as `Tracked`; ``tensor`` itself if it needs no
            gradient.
        """
        with _untouched():
            if not tensor.requires_grad:
                return tensor
            output = tensor.as_subclass(Tracked)
            op = Op(next(self._orders), self, None, ())
            op.value, op.node, op.shape = tensor.detach(), output.grad_fn, tensor.shape
            self._adopt(output, op)
            return output

    def clear(self) -> None:
        """Forget everything; every tensor that was tracked becomes a plain one, where it is."""
        for made in self._made:
            tensor = made()
            if tensor is not None:
                tensor.__dict__.pop("_op", None)
                tensor.__class__ = Tensor
        self._made.clear()
        self._mutations.clear()
        self._tails.clear()

    def _adopt(self, tensor: Tensor, op: Op) -> None:
        tensor.__class__ = Tracked
        tensor._op = op  # type: ignore[attr-defined]
        self._made.append(weakref.ref(tensor))
        if len(self._made) > self._prune_at:
            self._made = [made for made in self._made if made() is not None]
            self._prune_at = max(_PRUNE_AT, 2 * len(self._made))

    # -- answers

    def classify(self, root: Tensor, num_samples: int) -> LossKind:
        """Say whether a single number is a mean over the samples, a sum over them, or neither.

        Parameters
        ----------
        root : Tensor
            A tensor of one element, usually what ``backward`` is called on.
        num_samples : int
            Samples of this rank's slice, the dim 0 of the model outputs.

        Returns
        -------
        LossKind
            ``MEAN``: the global value is the sample-weighted mean of the ranks' values. ``SUM``: it is
            their sum. ``UNKNOWN``: neither, or it cannot be told; with the reason.
        """
        ops = self._tail(root)
        if not ops:
            return LossKind.unknown(
                "the loss does not come from the model's output by torch functions that can be followed"
                " (a custom autograd.Function, a compiled function, or a module other than the model)"
            )
        with _untouched():
            return decide(ops, num_samples)

    def scalars(self, root: Tensor) -> list[Tensor]:
        """Give the 0-dim tensors that depend on model outputs, ``root`` among them, in recording order.

        Those that the cell has dropped are not among them: nobody can read them.
        """
        found: dict[int, Tensor] = {}
        with _untouched():
            for made in self._made:
                tensor = made()
                if tensor is not None and tensor.dim() == 0:
                    found[id(tensor)] = tensor
            if root.dim() == 0:
                found.setdefault(id(root), root)
        return list(found.values())

    def signature(self, root: Tensor) -> tuple[str, ...]:
        """Name the operations that led to a number, with the words and keywords they were given.

        Equal signatures mean the same code path, so a kind may be kept for the next batch. Cheap, and without
        sizes, so that a smaller last batch does not differ.
        """
        return tuple(_describe(op) for op in self._tail(root))

    def num_ignored(self, root: Tensor) -> Tensor | None:
        """Count labels that a mean leaves out, which a kept kind would not see.

        Returns
        -------
        Tensor or None
            0-dim integer on the labels' device, not waited for; None if no such loss led to ``root``.
        """
        counts = [counted_labels(op) for op in self._tail(root)]
        with _untouched():
            hits = [(labels == ignored).sum() for labels, ignored, _ in filter(None, counts)]
            return torch.stack(hits).sum() if hits else None

    def constants(self, root: Tensor) -> list[tuple[str, float]]:
        """Numbers that scale or enter the loss from outside, each with its operation's name, in order.

        They must be the same on every rank, or follow the number of samples: one that does not was computed
        from the rank's own slice (``/ mask.sum()``), and the loss is no mean and no sum. See
        `find_disagreement`.
        """
        found: list[tuple[str, float]] = []
        with _untouched():
            for op in self._tail(root):
                at = number_at(op)
                scale = op.args[at] if at is not None else None
                parts = [part for part in inputs_of(op) if isinstance(part, Tensor) and part.dim() == 0]
                numbers = [as_number(part.detach()) for part in parts]
                if not isinstance(scale, Tensor):
                    numbers.append(as_number(scale))
                found += [(op.name, number) for number in numbers if number is not None]
        return found

    def _tail(self, root: Tensor) -> list[Op]:
        op: Any = root.__dict__.get("_op")
        if type(op) is not Op or op.recorder is not self:
            return []
        tail: list[Op] | None = self._tails.get(op)
        if tail is None:  # nothing that is recorded later can be part of it
            tail = self._tails[op] = ancestors(op, self._mutations)
        return tail


def _describe(op: Op) -> str:
    words = [str(part) for part in op.args if isinstance(part, str | bool)]
    for key, part in op.kwargs.items():
        if part is not None:
            words.append(f"{key}={part}" if isinstance(part, str | bool | int | float) else key)
    return op.name + (f"({', '.join(words)})" if words else "")


def find_disagreement(constants: Sequence[Sequence[float]], num_samples: Sequence[int]) -> int | None:
    """Find the first number that is neither equal on all ranks nor in proportion to their samples.

    Parameters
    ----------
    constants : sequence of sequence of float
        One row a rank, as `Recorder.constants` gives them.
    num_samples : sequence of int
        Samples of each rank.

    Returns
    -------
    int or None
        Its position; also where a rank has no such number, because it ran other operations.
    """
    for position, column in enumerate(itertools.zip_longest(*constants)):
        if None in column:
            return position
        each = [value / size for value, size in zip(column, num_samples, strict=True)]
        per = [value * size for value, size in zip(column, num_samples, strict=True)]  # a factor of 1 / size
        if not any(_all_close(row) for row in (column, each, per)):
            return position
    return None


def _all_close(row: Sequence[float]) -> bool:
    return all(math.isclose(value, row[0], rel_tol=1e-4, abs_tol=1e-8) for value in row)


def untrack_tree(tree: Any) -> Any:
    """Give plain tensors in the same autograd graph, for a model that is fed what another one returned."""
    return map_tensors(_untrack, tree)


def _untrack(tensor: Tensor) -> Tensor:
    with _untouched():
        return tensor.as_subclass(Tensor) if type(tensor) is Tracked else tensor


def map_tensors(change: Callable[[Any], Any], tree: Any, kind: type = Tensor) -> Any:
    """Apply a function to every tensor of nested tuples, lists, dicts and dataclasses; all else stays.

    With ``kind`` it is applied to the values of that type instead.
    """
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        changed = copy.copy(tree)
        for key, part in tree.items():
            changed[key] = map_tensors(change, part, kind)
        return changed
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(change, part, kind) for part in tree))
    if type(tree) is tuple or type(tree) is list:
        return type(tree)(map_tensors(change, part, kind) for part in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed = copy.copy(tree)  # type: ignore[arg-type]
        for part in dataclasses.fields(tree):
            object.__setattr__(changed, part.name, map_tensors(change, getattr(tree, part.name), kind))
        return changed
    return tree
