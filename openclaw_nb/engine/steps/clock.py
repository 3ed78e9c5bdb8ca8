"""Where the time of a step goes, measured at the step engine's own hooks.

    loader asked ─data─> batch ─compute─> gradients there ─wait─> all ranks there ─transfer─> sums there ─compute─>

A rank cannot see when the last one arrives. Each rank therefore tells its arrival with the next step's sums, and the
time between its own arrival and the latest is what it waited for the slowest; the rest was transfer. Arrivals are
times of the clock that only grows, which all processes of a host share.

Knows times; does not know gradients or messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")
_END = object()

PERIOD_SECONDS = 256.0
"""Arrivals are told modulo this: in float32 they are then right to 15 microseconds."""

UNKNOWN = -1.0
"""Told by a rank that has no arrival yet."""

PARTS = ("data", "compute", "wait", "transfer")
_WORK = ("data", "compute")


class StepClock:
    """Splits the time since it was started into data, compute, wait and transfer.

    Parameters
    ----------
    now : callable
        Seconds of a clock that only grows.
    slowdown : callable
        Returns how many times as long this rank's work is to take; it sleeps for the rest.
    sleep : callable
        Sleeps for so many seconds.

    Attributes
    ----------
    work_seconds : float
        How long this rank has loaded and computed by itself for the step at which it arrived last.

    Examples
    --------
    >>> times = iter([0.0, 3.0, 4.0, 4.5])
    >>> clock = StepClock(lambda: next(times))
    >>> clock.arrive()
    >>> clock.leave()
    >>> clock.tell()
    3.0
    >>> clock.settle([3.25, 3.0])     # the other rank came a quarter of a second later
    >>> clock.take()
    {'data': 0.0, 'compute': 3.5, 'wait': 0.25, 'transfer': 0.75}
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        slowdown: Callable[[], float] = lambda: 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now, self._slowdown, self._sleep = now, slowdown, sleep
        self._work = self._unslowed = self.work_seconds = 0.0
        self._mark = now()
        self._spent = dict.fromkeys(PARTS, 0.0)
        self._last: tuple[float, float] | None = None  # arrival, and for how long this rank was held then
        self._told: tuple[float, float] | None = None

    def _pass_to(self, part: str) -> float:
        """Count the time since the last mark."""
        now = self._now()
        seconds = now - self._mark
        self._mark = now
        self._spent[part] += seconds
        if part in _WORK:
            self._work += seconds
            self._unslowed += seconds
        return seconds

    def restart(self) -> None:
        """Count from now on: what was before belongs to no step."""
        self._mark = self._now()
        self._work = self._unslowed = 0.0

    def fetching(self, batches: Iterable[_T]) -> Iterator[_T]:
        """Yield the batches; count the time until each one is there."""
        iterator = iter(batches)
        while True:
            self._pass_to("compute")
            batch = next(iterator, _END)
            self._pass_to("data")
            if batch is _END:
                return
            yield batch  # type: ignore[misc] # not the end

    def arrive(self) -> None:
        """Take note that this rank has its gradients and has to wait from here on."""
        self._pass_to("compute")
        self.work_seconds, self._work = self._work, 0.0

    def slow_down(self) -> None:
        """Sleep for as long as it takes to make the work since the last call as slow as is asked for.

        Called before a rank gives the first of its gradients, as others may go on with those while it sleeps.
        """
        self._pass_to("compute")
        factor = self._slowdown()
        if factor > 1.0:
            self._sleep((factor - 1.0) * self._unslowed)
            self._pass_to("compute")
        self._unslowed = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the body as a wait for the others: they meet in the midst of a step, as in BatchNorm."""
        self._pass_to("compute")
        try:
            yield
        finally:
            self._pass_to("wait")

    def leave(self) -> None:
        """Take note that the sums are there."""
        now = self._now()
        self._last = self._mark, now - self._mark
        self._mark = now

    def tell(self) -> float:
        """Return when this rank arrived last, modulo `PERIOD_SECONDS`, or `UNKNOWN`; for the other ranks."""
        self._told, self._last = self._last, None
        return UNKNOWN if self._told is None else self._told[0] % PERIOD_SECONDS

    def settle(self, arrivals: Sequence[float]) -> None:
        """Split the time between `arrive` and `leave` that was told of last.

        Parameters
        ----------
        arrivals : sequence of float
            What `tell` has returned on each rank.
        """
        if self._told is None:
            return
        (arrival, held), self._told = self._told, None
        waits = [_difference(other, arrival) for other in arrivals if other >= 0.0]
        wait = min(max([0.0, *waits]), held)
        self._spent["wait"] += wait
        self._spent["transfer"] += held - wait

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call; what is not settled yet comes with the next."""
        self._pass_to("compute")
        spent, self._spent = self._spent, dict.fromkeys(PARTS, 0.0)
        return spent


def _difference(one: float, other: float) -> float:
    """Return by how much one time is later than another, both modulo the period."""
    half = PERIOD_SECONDS / 2
    return (one - other + half) % PERIOD_SECONDS - half
