"""How fast each worker is, and what that makes of its share of each batch.

    Measured events ──> a meter a worker ──> `balance_load`: shares ──> SetPace, to the cell that runs and to later ones

The speeds come from the events that the workers send anyway: so the table that is returned holds the very numbers that
are sent, and nobody has to be asked. In the continuous mode each worker goes on by its own clock from there on.

Knows events and workers' numbers; does not know the cell that runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from openclaw_nb.core.errors import UsageError
from openclaw_nb.core.table import Table
from openclaw_nb.plan.balance import SpeedMeter, equal_shares, next_shares
from openclaw_nb.protocol.messages import Event, Measured, SetPace

_WORK = ("data", "compute")
_UNMEASURED = (
    "Nothing was measured yet, so that shares cannot follow speeds: run a data-parallel cell first, of half a second "
    "or more, or say continuous=True: the shares then follow what is measured from the next cell on."
)


@dataclass(frozen=True)
class WorkerShare:
    """One worker's part of each batch.

    Attributes
    ----------
    worker : str
        Its id.
    rank : int
        Its rank.
    samples_per_second : float or None
        What it works off by itself, without waiting for the others; None when that was not measured.
    share : float
        Its part of each batch, from 0 to 1.
    """

    worker: str
    rank: int
    samples_per_second: float | None
    share: float


class Paces:
    """The speeds of a cluster's workers."""

    def __init__(self) -> None:
        self._run_id = ""
        self._meters: defaultdict[int, SpeedMeter] = defaultdict(SpeedMeter)
        self._speeds: dict[int, float] = {}
        self._slowdowns: dict[int, float] = {}
        self._is_continuous = False

    def take(self, event: Event) -> None:
        """Take an event of a worker; only those that measure count, and only the newest run's."""
        if not isinstance(event, Measured):
            return
        if event.run_id != self._run_id:
            self._run_id = event.run_id
            self._meters.clear()
        meter = self._meters[event.worker]
        if event.seq == 2:
            meter.clear()  # the first one is of the first step, which takes longer than any other
        meter.take(event.samples, sum(event.seconds.get(part, 0.0) for part in _WORK))

    def balance(self, ranks: Mapping[int, int], *, continuous: bool) -> Table:
        """Let shares follow the speeds from now on; return them.

        Parameters
        ----------
        ranks : mapping of int to int
            Worker number of each rank.
        continuous : bool
            Whether they go on to follow the speeds.

        Raises
        ------
        UsageError
            When no worker's speed is known.
        """
        numbers = list(ranks.values())
        measured = [self._speed(number) for number in numbers]
        if not (continuous or any(measured)):
            raise UsageError(_UNMEASURED)
        told = [self._speeds.get(number, 0.0) for number in numbers]
        before = next_shares(equal_shares(len(numbers)), told)
        shares = next_shares(before, measured) if any(measured) else before
        if shares != before:
            self._speeds = dict(zip(numbers, measured, strict=True))
        self._is_continuous = continuous
        records = [
            WorkerShare(f"worker-{number}", rank, speed or None, share)
            for (rank, number), speed, share in zip(ranks.items(), measured, shares, strict=True)
        ]
        return _table(records, continuous=continuous)

    def share_equally(self) -> None:
        """Let shares be equal again."""
        self._speeds, self._is_continuous = {}, False

    def slow_down(self, number: int, factor: float) -> None:
        """Let a worker's work take so many times as long; 1 for as long as it does."""
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1.0 <= factor < 1e6:
            raise UsageError(f"factor={factor!r}: give a number, 1 (as fast as it can) or more.")
        self._slowdowns[number] = float(factor)

    def command(self, run_id: str, *, shared: bool) -> SetPace | None:
        """Return the pace of a run, or None when nothing was asked for.

        Parameters
        ----------
        run_id : str
            The run.
        shared : bool
            Whether it is one whose batches are shared out by speed.
        """
        slowdowns = {str(number): factor for number, factor in self._slowdowns.items() if factor > 1.0}
        speeds: dict[str, float] = {}
        if shared:
            speeds = {str(number): speed for number, speed in self._told().items() if speed > 0.0}
        continuous = shared and self._is_continuous
        if not (slowdowns or speeds or continuous):
            return None
        return SetPace(run_id=run_id, speeds=speeds, continuous=continuous, slowdowns=slowdowns)

    def _told(self) -> dict[int, float]:
        """Return the speeds to begin with: the newest ones, when the shares follow them."""
        newest = {number: self._speed(number) for number in list(self._meters)}
        return newest if self._is_continuous and any(newest.values()) else self._speeds

    def _speed(self, number: int) -> float:
        meter = self._meters.get(number)
        return meter.speed if meter is not None else 0.0


def _table(records: list[WorkerShare], *, continuous: bool) -> Table:
    title = "Shares of each batch, by measured speed"
    if continuous:
        title += "; they follow the speeds while cells run"
    rows = (
        (
            str(each.rank),
            each.worker,
            "-" if each.samples_per_second is None else f"{each.samples_per_second:.4g}",
            f"{each.share:.1%}",
        )
        for each in records
    )
    return Table(title, ("rank", "worker", "samples/s", "share"), tuple(rows), tuple(records))
