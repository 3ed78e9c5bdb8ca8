"""When the phases of a cell's first steps begin and end, noted while it runs.

    end of the last update ─ data ─ model called ─ forward, backward ─ all meet ─ update ─ end

Knows torch's hooks; does not know why steps are timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from openclaw_nb.engine.verify.records import StepsDone

WARM_UP = 2
_PHASES = ("data", "model", "update")


def now() -> float:
    """Return the time when all that was given to the device is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class StepClock:
    """Times the first steps of whatever runs in its `timing` block.

    Parameters
    ----------
    model : nn.Module
        A step begins when it is called, after an update.
    optimizer : Optimizer
        Its step ends one.
    num_steps : int
        How many are timed, after some that are not; the next call of the model then raises `StepsDone`.
    meet : callable
        Called at the end of each backward pass: waits for the other ranks, as training does there.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, num_steps: int, meet: Callable[[], object]
    ) -> None:
        self._model, self._optimizer, self._meet = model, optimizer, meet
        self._num_steps = num_steps + WARM_UP
        self._ended = self._begun = self._backward = 0.0
        self._steps: list[tuple[float, float, float]] = []

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time steps in the ``with`` block."""
        inner = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            inner(*args, **kwargs)
            self._meet()
            self._backward = now()

        torch.autograd.backward = backward
        handles: list[Any] = [
            self._model.register_forward_pre_hook(self._begin, prepend=True),
            self._optimizer.register_step_post_hook(self._end),
        ]
        self._ended = now()
        try:
            yield
        finally:
            torch.autograd.backward = inner
            for handle in handles:
                handle.remove()

    def _begin(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if len(self._steps) >= self._num_steps:
            raise StepsDone
        if self._begun <= self._ended:
            self._begun = now()

    def _end(self, *_: Any) -> None:
        ended = now()
        if self._begun > self._ended and self._backward > self._begun:
            self._steps.append(
                (self._begun - self._ended, self._backward - self._begun, ended - self._backward)
            )
        self._ended = ended

    @property
    def num_steps(self) -> int:
        """How many steps count."""
        return max(0, len(self._steps) - WARM_UP)

    def phases(self) -> list[float]:
        """Return the median seconds of data, model and update."""
        return [median(phase) for phase in zip(*self._steps[WARM_UP:], strict=True)]


def as_timing(num_samples: int, phases: list[float]) -> dict[str, float]:
    """Return a timing as it is told."""
    return {"num_samples": num_samples, **dict(zip(_PHASES, phases, strict=True))}
