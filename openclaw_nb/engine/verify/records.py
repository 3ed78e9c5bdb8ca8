"""What the first steps of a cell were: losses, gradients and parameters, noted while it runs.

Knows torch's hooks; does not know why steps are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook


class StepsDone(BaseException):
    """As many steps as were asked for are noted; a cell that catches every Exception does not catch it."""


@dataclass
class Step:
    """One optimizer step: the loss, the gradients that it was made with, and what came of it.

    ``gradients`` are those that the last ``backward()`` left, before anything clipped them; ``state`` holds parameters
    and floating-point buffers.
    """

    loss: float
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


class StepRecorder:
    """Notes the first steps of whatever runs in its `recording` block.

    Parameters
    ----------
    models : mapping of str to nn.Module
        Whose gradients and parameters are noted.
    num_steps : int
        After how many steps the next call of a model raises `StepsDone`.

    Attributes
    ----------
    steps : list of Step
        What was noted.
    coarsest : torch.dtype
        Of the parameters' and of what layers returned: under autocast layers compute in another than their parameters.
    """

    def __init__(self, models: Mapping[str, nn.Module], num_steps: int) -> None:
        self._models = dict(models)
        self._num_steps = num_steps
        self._last: tuple[float, dict[str, Tensor]] | None = None
        self.steps: list[Step] = []
        self.coarsest = max((p.dtype for _, p in _parameters(models)), key=_unit, default=torch.float32)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note steps in the ``with`` block. Enter it last: what is hung onto ``backward`` earlier runs inside."""
        inner = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            inner(tensors, *args, **kwargs)
            root = tensors if isinstance(tensors, Tensor) else next(iter(tensors))
            self._note_gradients(root)

        torch.autograd.backward = backward
        handles = [
            model.register_forward_pre_hook(self._stop, prepend=True) for model in self._models.values()
        ]
        layers = {layer for model in self._models.values() for layer in model.modules()}
        handles += [layer.register_forward_hook(self._note_dtype) for layer in layers]
        handles.append(register_optimizer_step_post_hook(self._note_step))
        try:
            yield
        finally:
            torch.autograd.backward = inner
            for handle in handles:
                handle.remove()

    def _stop(self, *_: Any) -> None:
        if len(self.steps) >= self._num_steps:
            raise StepsDone

    def _note_dtype(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            self.coarsest = max(self.coarsest, output.dtype, key=_unit)

    def _note_gradients(self, root: Tensor) -> None:
        gradients = {
            name: _copy(parameter.grad)
            for name, parameter in _parameters(self._models)
            if parameter.grad is not None
        }
        if gradients and root.numel() == 1:
            self._last = float(root.detach()), gradients

    def _note_step(self, *_: Any) -> None:
        if self._last is None and self.steps:
            self.steps[-1].state = self._state()  # another optimizer's part of the same step
        if self._last is None or len(self.steps) >= self._num_steps:
            return
        loss, gradients = self._last
        self._last = None
        self.steps.append(Step(loss, gradients, self._state()))

    def _state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(_parameters(self._models))
        for prefix, model in _prefixed(self._models):
            found |= {prefix + n: b for n, b in model.named_buffers() if b.is_floating_point()}
        return {name: _copy(tensor) for name, tensor in found.items()}


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64, copy=True)


def _prefixed(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for name, model in models.items():
        yield f"{name}." if len(models) > 1 else "", model


def _parameters(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, model in _prefixed(models):
        for name, parameter in model.named_parameters():
            yield prefix + name, parameter
