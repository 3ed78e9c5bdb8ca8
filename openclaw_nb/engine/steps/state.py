"""The state of training as one value: parameters, buffers, what optimizers and loss scalers keep.

Without what the cell's own code sets, such as learning rates: whoever takes a state over has run that code itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openclaw_nb.engine.objects.find import Objects


def take(objects: Objects) -> dict[str, list[Any]]:
    """Return the state; tensors are not copied."""
    return {
        "tensors": [tensor.detach() for tensor in _tensors(objects)],
        "optimizers": [optimizer.state_dict()["state"] for optimizer in objects.optimizers.values()],
        "scalers": [scaler.state_dict() for scaler in objects.scalers.values()],
    }


def put(objects: Objects, state: dict[str, list[Any]]) -> None:
    """Take a state over, in place."""
    with torch.no_grad():
        for tensor, value in zip(_tensors(objects), state["tensors"], strict=True):
            tensor.copy_(value)
    for optimizer, values in zip(objects.optimizers.values(), state["optimizers"], strict=True):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": values})
    for scaler, values in zip(objects.scalers.values(), state["scalers"], strict=True):
        scaler.load_state_dict(values)


def buffers(objects: Objects) -> list[Tensor]:
    """Return the models' buffers, each once."""
    found = {id(b): b for model in objects.models.values() for b in model.buffers()}
    return list(found.values())


def settings(objects: Objects) -> list[list[dict[str, Any]]]:
    """Return what optimizers are set to, such as learning rates, by group."""
    return [
        [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        for optimizer in objects.optimizers.values()
    ]


def put_settings(objects: Objects, before: list[list[dict[str, Any]]]) -> None:
    """Set optimizers to what `settings` returned."""
    for optimizer, groups in zip(objects.optimizers.values(), before, strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)


def _tensors(objects: Objects) -> list[Tensor]:
    found = {id(p): p for model in objects.models.values() for p in model.parameters()}
    return [*found.values(), *buffers(objects)]
