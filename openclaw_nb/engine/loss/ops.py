"""Recorded operations: what is kept of each, and what can be read off it.

Knows: the shape of a record, torch's names for functions that write, divide or count labels. Does not know
how records are made (`openclaw_nb.engine.loss.record`), run again (`replay`) or judged (`rules`,
`kind`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]

DIVIDING = frozenset({"div", "div_", "divide", "divide_", "true_divide", "true_divide_"})
MULTIPLYING = frozenset({"mul", "mul_", "multiply", "multiply_"})


class RefusedTail(Exception):
    """What led to a number can be no mean and no sum over the samples, with the reason."""


class Op:
    """One recorded operation; stands for its result wherever a later operation used it.

    A model output is an `Op` without a function: its ``value`` is the data and ``node`` its place in the
    autograd graph. ``shape`` is None where the result is several tensors.
    """

    __slots__ = ("__weakref__", "args", "func", "kwargs", "node", "order", "recorder", "shape", "value")

    def __init__(self, order: int, recorder: Any, func: Function | None, args: tuple[Any, ...]) -> None:
        self.order = order
        self.recorder = recorder
        self.func = func
        self.args = args
        self.kwargs: dict[str, Any] = {}
        self.shape: torch.Size | None = None
        self.value: Tensor | None = None
        self.node: Any = None

    @property
    def name(self) -> str:
        """Name of the torch function, ``"output"`` for a model output."""
        return "output" if self.func is None else name_of(self.func)


@functools.lru_cache(maxsize=4096)
def name_of(func: Function) -> str:
    """Name of a torch function; a property such as ``.T`` goes by its own name."""
    name: str = getattr(func, "__name__", type(func).__name__)
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


@functools.lru_cache(maxsize=4096)
def mutates(func: Function) -> bool:
    """Whether a torch function writes into its first argument, by torch's naming."""
    name = name_of(func)
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


@functools.lru_cache(maxsize=64)
def _parameters_of(func: Function) -> tuple[str, ...]:
    return tuple(inspect.signature(func).parameters)


def flatten(value: Any) -> Iterator[Any]:
    """Walk the leaves of nested tuples, lists and dicts of arguments."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        yield value
        return
    for part in value:
        yield from flatten(part)


def inputs_of(op: Op) -> Iterator[Any]:
    """Walk everything that an operation was given."""
    yield from flatten(op.args)
    yield from flatten(op.kwargs)


def plain_tensors(ops: Iterable[Op]) -> list[Tensor]:
    """Tensors that operations were given and that come from no recorded operation, each once."""
    found = {id(part): part for op in ops for part in inputs_of(op) if isinstance(part, Tensor)}
    return list(found.values())


def ancestors(root: Op, mutations: Sequence[Op]) -> list[Op]:
    """Operations that a result needs, itself included, in the order in which they ran.

    A write into a view reaches the result without being an argument of it, so writes that ran earlier count.
    """
    found: set[Op] = set()
    waiting = [root, *(op for op in mutations if op.order < root.order)]
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting.extend(part for part in inputs_of(op) if type(part) is Op)
    return sorted(found, key=lambda op: op.order)


def as_number(part: Any) -> float | None:
    """Value of a Python number or of a real 0-dim tensor without gradient, else None."""
    if isinstance(part, int | float) and not isinstance(part, bool):
        return float(part)
    if isinstance(part, Tensor) and part.dim() == 0 and not part.requires_grad and not part.is_complex():
        return float(part)
    return None


def number_at(op: Op) -> int | None:
    """Position of the number that an operation divides or multiplies by, if there is one."""
    if op.name in DIVIDING:
        return 1 if len(op.args) > 1 and as_number(op.args[1]) is not None else None
    if op.name in MULTIPLYING:
        return next((at for at, part in enumerate(op.args[:2]) if as_number(part) is not None), None)
    return None


def counted_labels(op: Op) -> tuple[Tensor, int, bool] | None:
    """Labels, ignore_index and whether classes are weighted, of a loss that divides by labels it counts.

    ``F.cross_entropy`` and ``F.nll_loss`` with ``reduction="mean"`` and integer labels divide by the sum of
    the weights of the labels that are not ignored (PyTorch doc of ``CrossEntropyLoss``); None for all others.
    """
    if op.func is not F.cross_entropy and op.func is not F.nll_loss:
        return None
    given = {**dict(zip(_parameters_of(op.func), op.args, strict=False)), **op.kwargs}
    labels = given["target"]
    if type(labels) is Op or labels.is_floating_point() or given.get("reduction", "mean") != "mean":
        return None
    return labels, given.get("ignore_index", -100), given.get("weight") is not None
