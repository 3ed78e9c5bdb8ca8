"""Who gets how much of each batch, by measured speed: pure decisions.

    samples and seconds of work, step by step ──> `SpeedMeter`: samples per second of work, by the median step
    speeds of all ranks, shares now ──> `next_shares`: in proportion to the speeds, unless that is nearly what they are

Work is what a rank does by itself: loading and computing. Waiting for the others is none, or the fast ones would seem
slow. A step also costs time that does not depend on the samples, so that a rank's samples per second depend on its
share. Shares in proportion to samples per second *at the present shares* are right exactly when all ranks work equally
long. From one change to the next the logarithm of two ranks' ratio comes nearer to that by the part of their time that
does depend on samples, and never goes past it.

Knows numbers; does not know clocks, ranks or batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

BAND = 0.04
"""Shares stay as they are while no rank's would change by more than this part of it: a change has its price, too."""

WINDOW = 16
"""How many measurements count. Of so many, the median does not follow a few that something has disturbed."""


class SpeedMeter:
    """How many samples one rank works off in a second.

    Examples
    --------
    >>> meter = SpeedMeter()
    >>> for seconds in (0.5, 0.5, 9.0):     # the last one was disturbed
    ...     meter.take(16, seconds)
    >>> meter.speed
    32.0
    """

    def __init__(self) -> None:
        self._seconds_a_sample: deque[float] = deque(maxlen=WINDOW)

    def take(self, num_samples: int, seconds: float) -> None:
        """Take the work on some samples; none tell nothing."""
        if num_samples > 0 and seconds > 0.0:
            self._seconds_a_sample.append(seconds / num_samples)

    def clear(self) -> None:
        """Forget what was measured."""
        self._seconds_a_sample.clear()

    @property
    def speed(self) -> float:
        """Samples per second, or 0 when nothing was measured."""
        return 1.0 / median(self._seconds_a_sample) if self._seconds_a_sample else 0.0


def equal_shares(num_ranks: int) -> tuple[float, ...]:
    """Return shares of the same size."""
    return (1.0 / num_ranks,) * num_ranks


def shares_of(speeds: Sequence[float]) -> tuple[float, ...]:
    """Return shares in proportion to speeds, which add up to 1.

    Parameters
    ----------
    speeds : sequence of float
        Samples per second of each rank; 0 for one that is not known, which counts as the mean of the others.
    """
    known = [speed for speed in speeds if speed > 0.0]
    if not known:
        return equal_shares(len(speeds))
    mean = math.fsum(known) / len(known)
    counted = [speed if speed > 0.0 else mean for speed in speeds]
    total = math.fsum(counted)
    return tuple(speed / total for speed in counted)


def next_shares(shares: Sequence[float], speeds: Sequence[float], *, band: float = BAND) -> tuple[float, ...]:
    """Return the shares that come after ``shares``: the same ones while the speeds ask for nearly those.

    Parameters
    ----------
    shares : sequence of float
        The present ones.
    speeds : sequence of float
        As for `shares_of`.
    band : float
        By which part of it each share may be off.
    """
    wanted = shares_of(speeds)
    moved = max(abs(new / old - 1.0) for new, old in zip(wanted, shares, strict=True))
    return wanted if moved > band else tuple(shares)
