"""Several batches that make one step: their gradients are kept aside, and stepping is held back, until the last.

Between boundaries every parameter's gradient is None, for which clip, scaler and optimizers do nothing.

Knows gradients and counts of samples; does not know losses or ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Window:
    """The batches that make one step together.

    Parameters
    ----------
    length : int
        How many batches a step takes.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._count = 0
        self._num_samples = 0
        self.has_batch = False
        self._kept: dict[int, Tensor] = {}
        self.is_boundary = True

    @property
    def is_open(self) -> bool:
        """Whether gradients are kept aside, so that steps do nothing now."""
        return not self.is_boundary

    @property
    def is_empty(self) -> bool:
        """Whether no gradient is kept aside."""
        return not self._kept

    @property
    def factor(self) -> float:
        """What the sum of the window's gradients, each weighted by its samples, is multiplied by."""
        return 1.0 if self._length == 1 else 1.0 / max(1, self._num_samples)

    def next_batch(self, is_last: bool) -> None:
        """Go on to the next batch; the last one of a pass always ends its window."""
        if self.is_boundary:
            self._count = 0
            if not self._kept:  # else the last batch had no backward pass, and its window goes on
                self._num_samples = 0
        self._count += 1
        self.has_batch = False
        self.is_boundary = is_last or self._count >= self._length

    def clear(self) -> None:
        """Drop what was kept: the window's batches come again."""
        self._kept.clear()
        self._count = self._num_samples = 0
        self.is_boundary = True

    def weigh(self, num_samples: int) -> float:
        """Return the batch's weight in the window and count its samples."""
        if self._length == 1:
            return 1.0
        self.has_batch = True
        self._num_samples += num_samples
        return float(num_samples)

    def keep(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put the gradients aside."""
        for parameter in parameters:
            if parameter.grad is not None:
                kept = self._kept.get(id(parameter))
                self._kept[id(parameter)] = parameter.grad if kept is None else kept.add_(parameter.grad)
                parameter.grad = None

    def give_back(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set the gradients that were put aside, for the boundary's own to be added to."""
        for parameter in parameters:
            kept = self._kept.pop(id(parameter), None)
            if kept is not None:
                parameter.grad = kept


def hold_while(base: type, names: Sequence[str], is_held: Callable[[Any], bool]) -> Callable[[], None]:
    """Let methods of a class and its subclasses do nothing for objects that are held; return how to undo that.

    Classes are changed, not objects: so those count, too, that the cell makes itself, and nothing gets into a
    scheduler's ``state_dict()``.

    Parameters
    ----------
    base : type
        The class.
    names : sequence of str
        Its methods.
    is_held : callable
        Told the object whose method is called.
    """
    replaced = [
        (kind, name, vars(kind)[name]) for kind in _kinds(base) for name in names if name in vars(kind)
    ]
    for kind, name, method in replaced:
        setattr(kind, name, _held(method, is_held))

    def undo() -> None:
        for kind, name, method in replaced:
            setattr(kind, name, method)

    return undo


def _kinds(base: type) -> set[type]:
    return {base}.union(*map(_kinds, base.__subclasses__()))


def _held(method: Callable[..., Any], is_held: Callable[[Any], bool]) -> Callable[..., Any]:
    @functools.wraps(method)
    def held(thing: Any, *args: Any, **kwargs: Any) -> Any:
        return None if is_held(thing) else method(thing, *args, **kwargs)

    return held


def times(gradient: Any, root: Tensor, weight: float) -> Any:
    """Return the gradient to start backward with, times ``weight``."""
    if weight == 1.0:
        return gradient
    return (torch.ones_like(root) if gradient is None else gradient) * weight
