"""A loss that is scaled in the backward pass, and gradients that are not when it is over.

    begin   gradients that the cell has kept are multiplied, as new ones will be added to them
    (the backward pass, begun with the scale; gradients are summed over the ranks)
    end     all are divided again; one that is not finite drops them all: the step does nothing

Where all ranks have the same sums they drop the same steps: an overflow on one rank is in the sum of all. Where each
has a part of the gradients, they agree between the two halves of the end, `check` and `settle`. The cell sees gradients
that are not scaled, so that clipping and printing mean what they say. Knows gradients and optimizers; does not know how
gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from openclaw_nb.engine.precision.scale import LossScale


class Unscaled:
    """Leaves the loss as it is.

    Attributes
    ----------
    factor : float
        What the backward pass begins with.
    scale : LossScale or None
        Its scale.
    """

    factor: float = 1.0
    scale: LossScale | None = None

    def begin(self, parameters: Sequence[Parameter]) -> None:
        """Prepare the gradients for a backward pass."""

    def end(self, parameters: Sequence[Parameter]) -> None:
        """Leave the gradients unscaled."""

    def check(self, parameters: Sequence[Parameter]) -> bool:
        """Leave the gradients unscaled; return whether one of this rank has overflowed."""
        return False

    def settle(self, parameters: Sequence[Parameter], *, overflowed: bool) -> None:
        """Go on as all ranks do, when it is known whether a gradient has overflowed on any."""

    def install(self) -> None:
        """Begin to skip steps."""

    def remove(self) -> None:
        """End it."""


class Scaled(Unscaled):
    """Scales the loss.

    Parameters
    ----------
    scale : LossScale
        By this.
    optimizers : iterable of Optimizer
        Whose steps do nothing after an overflow.
    agree : callable
        Returns whether an overflow was on any rank; not needed where ranks have the same gradients.
    """

    def __init__(
        self,
        scale: LossScale,
        optimizers: Iterable[Optimizer],
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self.scale: LossScale = scale
        self._optimizers, self._agree = list(optimizers), agree
        self._skips = self._was_stepped = False
        self._handles: list[Any] = []

    @property
    def factor(self) -> float:  # type: ignore[override]
        """What the backward pass begins with."""
        return self.scale.get_scale()

    def install(self) -> None:
        """Let steps do nothing after an overflow, until `remove`."""
        self._handles = [each.register_step_pre_hook(self._before_step) for each in self._optimizers]

    def remove(self) -> None:
        """Leave the optimizers as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin(self, parameters: Sequence[Parameter]) -> None:
        """Multiply the gradients that are there."""
        if self._was_stepped:
            self._skips = self._was_stepped = False
        kept = _own_parts(parameters)
        if kept:
            torch._foreach_mul_(kept, self.factor)

    def end(self, parameters: Sequence[Parameter]) -> None:
        """Divide the gradients; drop them if one is not finite, and let the scale follow."""
        self.settle(parameters, overflowed=self._agree(self.check(parameters)))

    def check(self, parameters: Sequence[Parameter]) -> bool:
        """Divide the gradients; return whether one of this rank is not finite."""
        return unscale(_own_parts(parameters), self.factor)

    def settle(self, parameters: Sequence[Parameter], *, overflowed: bool) -> None:
        """Drop the gradients after an overflow, and let the scale follow."""
        if overflowed:
            _drop(parameters)
            self._skips = True
        self.scale.take(overflowed=overflowed)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Let the step find no gradient, also none that was added after the overflow."""
        self._was_stepped = True
        if self._skips:
            _drop(p for group in optimizer.param_groups for p in group["params"])


def _own_parts(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return what this rank has of the gradients: all of each, or its shard."""
    found = (p.grad for p in parameters if p.grad is not None)
    return [g.to_local() if hasattr(g, "to_local") else g for g in found]


def _drop(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def unscale(gradients: Sequence[Tensor], factor: float) -> bool:
    """Divide gradients in place; return whether one is not finite."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    overflowed = False
    for (device, _), group in groups.items():
        found = torch.zeros(1, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(
            group, found, torch.full((1,), 1.0 / factor, device=device)
        )
        overflowed |= bool(found)
    return overflowed
