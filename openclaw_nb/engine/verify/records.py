"""What the first steps of a cell were: losses, gradients and parameters, noted while it runs.

Knows torch's hooks; does not know why steps are compared.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

DIGEST_BYTES = 16


class StepsDone(BaseException):
    """As many steps as were asked for are noted; a cell that catches every Exception does not catch it."""


@dataclass
class Step:
    """One optimizer step: the loss, the gradients that it was made with, and what came of it.

    ``gradients`` are those that the last ``backward()`` left, before anything clipped them; ``state`` holds parameters
    and floating-point buffers. ``digest`` stands for the state. ``random`` tells, by its name, how far each source of
    random numbers had come.
    """

    loss: float
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    digest: bytes = b""
    random: dict[str, bytes] = field(default_factory=dict)


class StepRecorder:
    """Notes the first steps of whatever runs in its `recording` block.

    Parameters
    ----------
    models : mapping of str to nn.Module
        Whose gradients and parameters are noted.
    num_steps : int
        After how many steps the next call of a model raises `StepsDone`.
    values : bool
        Keep gradients and states, not only the states' digests.

    Attributes
    ----------
    steps : list of Step
        What was noted.
    coarsest : torch.dtype
        Of the parameters' and of what layers returned: under autocast layers compute in another than their parameters.
    """

    def __init__(self, models: Mapping[str, nn.Module], num_steps: int, *, values: bool = True) -> None:
        self._models, self._values = dict(models), values
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
        found = {name: _gradient(p) for name, p in _parameters(self._models) if p.grad is not None}
        if found and root.numel() == 1:
            # Read on all ranks, also where it is not kept: those that have a gradient give it to the others.
            read = {name: _copy(gradient) for name, gradient in found.items()}
            self._last = float(root.detach()), read if self._values else {}

    def _note_step(self, *_: Any) -> None:
        if self._last is not None and len(self.steps) < self._num_steps:
            loss, gradients = self._last
            self._last = None
            self.steps.append(Step(loss, gradients))
        elif self._last is not None or not self.steps:
            return
        self._note_state(self.steps[-1])  # again, when this is another optimizer's part of the same step

    def _note_state(self, step: Step) -> None:
        found: dict[str, Tensor] = dict(_parameters(self._models))
        for prefix, model in _prefixed(self._models):
            found |= {prefix + n: b for n, b in model.named_buffers() if b.is_floating_point()}
        state = {name: _copy(_whole(tensor)) for name, tensor in found.items()}
        step.state = state if self._values else {}
        step.digest = _digest(state)
        step.random = positions()


def _digest(state: Mapping[str, Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def positions() -> dict[str, bytes]:
    """Tell how far the process's sources of random numbers have come; equal ones give the same numbers from here on."""
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": repr(random.getstate()).encode(),
        "numpy.random": pickle.dumps(np.random.get_state()),
    }
    return {name: hashlib.blake2b(state, digest_size=8).digest() for name, state in states.items()}


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _gradient(parameter: nn.Parameter) -> Any:
    """Return a gradient whole; where each rank has a part of it, all of them join it."""
    join = getattr(parameter, "full_gradient", None)
    if join is not None:
        return join()
    return None if parameter.grad is None else _whole(parameter.grad)


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor of which each rank has a part whole, joined by all of them, and any other as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _prefixed(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for name, model in models.items():
        yield f"{name}." if len(models) > 1 else "", model


def _parameters(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, model in _prefixed(models):
        for name, parameter in model.named_parameters():
            yield prefix + name, parameter
