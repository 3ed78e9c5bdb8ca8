"""The scale of a loss in float16: one number, the same on all ranks, that follows overflows.

Gradients below 6e-8 are zero in float16. So the loss is multiplied before the backward pass, and the gradients are
divided after it (Micikevicius et al., "Mixed Precision Training", ICLR 2018). An infinite one means that the scale was
too large: the step is skipped, and the scale halved; after many steps without it is doubled.

Knows the number and its rule, which is that of `torch.amp.GradScaler`; does not know gradients or ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from openclaw_nb.strategies.precision import Precision

NAME = "loss scale"
"""Under which it is among a cell's scalers; a variable has no space in its name."""


class LossScale(torch.amp.GradScaler):
    """A loss scale that is told each step's overflow; kept, copied and put back like any GradScaler.

    Parameters
    ----------
    device_type : str
        ``"cpu"`` or ``"cuda"``.
    factor : float or None
        The scale, if it is to stay.
    """

    def __init__(self, device_type: str = "cpu", factor: float | None = None) -> None:
        super().__init__(device_type, init_scale=factor or 2.0**16)
        self.is_fixed = factor is not None
        self.num_steps = self.num_skipped = 0

    def take(self, *, overflowed: bool) -> None:
        """Take note of a step, and follow it."""
        self.num_steps += 1
        self.num_skipped += overflowed
        if not self.is_fixed:
            self.load_state_dict(followed(self.state_dict(), overflowed=overflowed))


def followed(state: dict[str, Any], *, overflowed: bool) -> dict[str, Any]:
    """Return the state of a GradScaler after a step."""
    if overflowed:
        return state | {"scale": state["scale"] * state["backoff_factor"], "_growth_tracker": 0}
    count = state["_growth_tracker"] + 1
    if count < state["growth_interval"]:
        return state | {"_growth_tracker": count}
    return state | {"scale": state["scale"] * state["growth_factor"], "_growth_tracker": 0}


_known: WeakKeyDictionary[nn.Module, LossScale] = WeakKeyDictionary()


def scale_for(models: Iterable[nn.Module], precision: Precision, device_type: str) -> LossScale:
    """Return the scale that the models were trained with in this process, or a new one.

    It is kept with the first model, so that the next cell goes on with what this one has found.
    """
    factor = None if precision.scaler == "dynamic" else float(precision.scaler or 1.0)
    model = next(iter(models))
    found = _known.get(model)
    is_other = found is None or found.is_fixed is (factor is None)
    if found is None or is_other or (factor is not None and found.get_scale() != factor):
        found = LossScale(device_type, factor)
    keep(model, found)
    return found


def keep(model: nn.Module, scale: LossScale) -> None:
    """Let a scale be a model's."""
    _known[model] = scale


def copied(scale: LossScale) -> LossScale:
    """Return a scale of its own, in the same state."""
    twin = LossScale(scale._device, scale.get_scale() if scale.is_fixed else None)
    twin.load_state_dict(scale.state_dict())
    return twin
