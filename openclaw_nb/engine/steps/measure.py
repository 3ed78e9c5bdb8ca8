"""Tells the notebook side how a strategy cell goes on: steps, samples, loss and times, a few times a second."""

from __future__ import annotations

import math
import time
from typing import ClassVar

from openclaw_nb.engine.outbox import Outbox
from openclaw_nb.engine.steps.clock import StepClock
from openclaw_nb.engine.steps.pace import Pace
from openclaw_nb.protocol.messages import Measured

_INTERVAL_SECONDS = 0.2


class Publisher:
    """Gathers what steps report and sends it at most five times a second.

    Parameters
    ----------
    outbox : Outbox
        Where events go.
    worker : int
        This worker's number.
    run_id : str
        The run that the events belong to.
    pace : Pace, optional
        What this worker is told of its speed.

    Attributes
    ----------
    is_trial : bool
        Whether the steps are only tried, and their outcome dropped.
    """

    def __init__(self, outbox: Outbox, worker: int, run_id: str, pace: Pace | None = None) -> None:
        self._outbox, self._worker, self._run_id = outbox, worker, run_id
        self._seq = self._steps = self._samples = self._num_bytes = 0
        self._loss: float | None = None
        self._steps_so_far = 0
        self._first_nan: int | None = None
        self._drift: float | None = None
        self._sent = 0.0
        self.pace = pace = pace or Pace()
        self.clock = StepClock(slowdown=lambda: pace.slowdown)

    is_trial: ClassVar[bool] = False

    def batch(self, num_samples: int) -> None:
        """Take one finished backward pass of ``num_samples`` samples of this rank."""
        self._samples += num_samples

    def average(self, drift: float, num_bytes: int) -> None:
        """Take one average of the parameters: how far this rank was from it, and the bytes that it gave."""
        self._drift = drift
        self._num_bytes += num_bytes

    def step(self, loss: float, own: float, num_bytes: int) -> None:
        """Take one step: the loss, this rank's own part of it, and the bytes that it gave into the reduction."""
        self._steps += 1
        self._steps_so_far += 1
        if not math.isfinite(own) and self._first_nan is None:
            self._first_nan = self._steps_so_far
        self._num_bytes += num_bytes
        self._loss = loss
        if time.monotonic() - self._sent > _INTERVAL_SECONDS:
            self.flush()

    @property
    def num_steps(self) -> int:
        """How many steps were taken so far."""
        return self._steps_so_far

    @property
    def num_sent(self) -> int:
        """How many events were sent."""
        return self._seq

    def flush(self) -> None:
        """Send what has not been sent."""
        if not (self._samples or self._steps or self._num_bytes):
            return
        self._seq += 1
        self._sent = time.monotonic()
        event = Measured(
            worker=self._worker,
            run_id=self._run_id,
            seq=self._seq,
            at=time.monotonic(),
            steps=self._steps,
            samples=self._samples,
            loss=self._loss,
            seconds=self.clock.take(),
            num_bytes=self._num_bytes,
            drift=self._drift,
            first_nan=self._first_nan,
        )
        self._outbox.publish(event)
        self._steps = self._samples = self._num_bytes = 0


class SilentPublisher(Publisher):
    """Tells nobody: for steps that are only tried."""

    is_trial = True

    def flush(self) -> None:
        """Forget what has not been sent."""
        self._steps = self._samples = self._num_bytes = 0
