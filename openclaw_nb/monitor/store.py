"""What strategy cells measure, kept while they run: samples, samples/s and loss of the last few runs.

    Measured events ──> Monitor.take ──> a log a run and worker ──> Monitor.latest() ──> RunHistory (frozen)

Bounded: a series that grows too long keeps every second of its points, again and again, so that a run of
hours keeps its whole shape. Knows events and time; does not know what runs now, nor how anything is drawn.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from openclaw_nb.protocol.messages import Event, Measured

WINDOW_SECONDS = 2.0
"""Samples/s are those of the last events that together span at least this time."""

_POINTS = 2000
_RUNS = 5
_SILENT_GAPS = 3.0
_WAITED_FOR = 0.1


@dataclass(frozen=True)
class Curve:
    """Points of a line, in the order of ``x``."""

    x: tuple[float, ...] = ()
    y: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, kw_only=True)
class WorkerHistory:
    """What one worker has done in a run.

    Attributes
    ----------
    worker : int
        Its number.
    steps, samples : int
        How many, so far; ``samples`` are its own.
    rate, mean_rate : float or None
        Samples/s now and since its first event; None before the second event.
        ``rate`` falls to 0 when the worker tells nothing for long.
    lost : int
        Events that did not arrive: ``steps`` and ``samples`` lack what they told.
    seconds, recent : mapping of str to float
        Time by what it was spent on (data, compute, wait, transfer), so far and in the last `WINDOW_SECONDS`.
    num_bytes : int
        What it gave into reductions.
    drift : float or None
        How far its parameters were from the average at the last one, relative to it; None with shared gradients.
    first_nan : int or None
        The first step whose loss was not finite on its own samples.
    cumulative, rates : Curve
        Samples so far and samples/s, by seconds since the run's first event.
    """

    worker: int
    steps: int
    samples: int
    rate: float | None
    mean_rate: float | None
    lost: int
    seconds: Mapping[str, float]
    recent: Mapping[str, float]
    num_bytes: int
    drift: float | None
    first_nan: int | None
    cumulative: Curve
    rates: Curve


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What one worker has done in all runs together, also those that are no longer kept: numbers that only grow.

    Attributes
    ----------
    worker : int
        Its number.
    steps, samples, lost, num_bytes, seconds
        As in `WorkerHistory`.
    """

    worker: int
    steps: int = 0
    samples: int = 0
    lost: int = 0
    num_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Totals) -> Totals:
        names = [*self.seconds, *(name for name in other.seconds if name not in self.seconds)]
        return Totals(
            worker=self.worker,
            steps=self.steps + other.steps,
            samples=self.samples + other.samples,
            lost=self.lost + other.lost,
            num_bytes=self.num_bytes + other.num_bytes,
            seconds={name: self.seconds.get(name, 0.0) + other.seconds.get(name, 0.0) for name in names},
        )


@dataclass(frozen=True)
class Straggler:
    """The worker that the others wait for.

    Attributes
    ----------
    worker : int
        Its number.
    since : float
        Seconds since the run's first event when it became the slowest.
    share : float
        Which part of their time the others spend waiting for it, 0 to 1.
    """

    worker: int
    since: float
    share: float


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """What is known of one run at one moment.

    Attributes
    ----------
    run_id : str
        The run.
    steps, samples, lost : int
        The most advanced worker's steps; samples and lost events of all workers.
    seconds : float
        From the first event to the newest.
    rate, mean_rate : float or None
        Samples/s of all workers together, now and since the first event.
    loss : Curve
        The global loss by step; a loss may be NaN.
    rates : Curve
        Samples/s of all workers together, by seconds since the first event.
    workers : tuple of WorkerHistory
        In the order of their numbers.
    straggler : Straggler or None
        Who is waited for now, if anybody is for more than a tenth of the time.
    silent : tuple of int
        Workers that take part, see `Monitor.expect`, and have told nothing: they are in none of the above.
    """

    run_id: str
    steps: int
    samples: int
    lost: int
    seconds: float
    rate: float | None
    mean_rate: float | None
    loss: Curve
    rates: Curve
    workers: tuple[WorkerHistory, ...]
    straggler: Straggler | None
    silent: tuple[int, ...] = ()


class Series:
    """Points of a growing line, never more than ``capacity`` and one.

    The first and the newest point are always kept; those between are evenly thinned, not averaged.

    Parameters
    ----------
    capacity : int
        At least 2.
    """

    def __init__(self, capacity: int = _POINTS) -> None:
        self._capacity = max(2, capacity)
        self._x: list[float] = []
        self._y: list[float] = []
        self._newest: tuple[float, float] | None = None
        self._offered = 0
        self._stride = 1

    def add(self, x: float, y: float) -> None:
        """Take the next point."""
        if len(self._x) >= self._capacity:
            del self._x[1::2], self._y[1::2]
            self._stride *= 2
        if self._offered % self._stride == 0:
            self._x.append(x)
            self._y.append(y)
        self._offered += 1
        self._newest = (x, y)

    def curve(self) -> Curve:
        """Return the points that are kept."""
        if self._newest is None:
            return Curve()
        if (self._offered - 1) % self._stride == 0:
            return Curve(tuple(self._x), tuple(self._y))
        x, y = self._newest
        return Curve((*self._x, x), (*self._y, y))


# ------------------------------------------------------------------------------------------- one run's log


@dataclass(frozen=True)
class _Point:
    """What a worker had done at one moment."""

    at: float
    samples: int
    seconds: Mapping[str, float]


class _WorkerLog:
    """What the events of one worker have told in one run."""

    def __init__(self, worker: int, points: int) -> None:
        self.worker = worker
        self.steps = self.samples = self.lost = 0
        self.rate: float | None = None
        self._arrived: float | None = None
        self._gap = 0.0
        self._seq = 0
        self._at = float("-inf")
        self._elapsed = 0.0
        self._first: tuple[float, int] | None = None
        self._recent: deque[_Point] = deque(maxlen=points)
        self._seconds: dict[str, float] = {}
        self._num_bytes = 0
        self._drift: float | None = None
        self._first_nan: int | None = None
        self._cumulative, self._rates = Series(points), Series(points)

    def take(self, event: Measured, elapsed: float, arrived: float) -> bool:
        """Take an event; return False for one that came before."""
        if event.seq <= self._seq and event.at <= self._at:
            return False
        self._count_lost(event)
        self._count(event)
        self._measure(event.at, elapsed)
        self._gap = 0.0 if self._arrived is None else arrived - self._arrived
        self._arrived = arrived
        return True

    def _count_lost(self, event: Measured) -> None:
        # A number that does not grow comes from a new process in the place of one that died.
        before = self._seq if event.seq > self._seq else 0
        self.lost += max(0, event.seq - before - event.count)
        self._seq = event.seq

    def _count(self, event: Measured) -> None:
        self.steps += event.steps
        self.samples += event.samples
        self._num_bytes += event.num_bytes
        self._drift = event.drift if event.drift is not None else self._drift
        self._first_nan = event.first_nan if self._first_nan is None else self._first_nan
        for name, seconds in event.seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def _measure(self, at: float, elapsed: float) -> None:
        if at < self._at:
            self._recent.clear()  # the clock was set back: times before and after cannot be compared
        self._at, self._elapsed = at, elapsed
        self._first = self._first or (elapsed, self.samples)
        self._recent.append(_Point(at, self.samples, dict(self._seconds)))
        self.rate = self._window_rate(at)
        self._cumulative.add(elapsed, self.samples)
        if self.rate is not None:
            self._rates.add(elapsed, self.rate)

    def _window_rate(self, at: float) -> float | None:
        recent = self._recent
        while len(recent) > 2 and recent[1].at <= at - WINDOW_SECONDS:
            recent.popleft()
        first, last = recent[0], recent[-1]
        return (last.samples - first.samples) / (last.at - first.at) if last.at > first.at else None

    def recent_seconds(self) -> dict[str, float]:
        """Time by what it was spent on in the window."""
        if not self._recent:
            return {}
        before = self._recent[0].seconds if len(self._recent) > 1 else {}
        return {name: total - before.get(name, 0.0) for name, total in self._recent[-1].seconds.items()}

    def silent(self, now: float) -> bool:
        """Whether it tells nothing for longer than its steps explain."""
        return self._arrived is not None and now - self._arrived > max(
            WINDOW_SECONDS, _SILENT_GAPS * self._gap
        )

    def rate_at(self, now: float) -> float | None:
        return 0.0 if self.rate is not None and self.silent(now) else self.rate

    def totals(self) -> Totals:
        return Totals(
            worker=self.worker,
            steps=self.steps,
            samples=self.samples,
            lost=self.lost,
            num_bytes=self._num_bytes,
            seconds=dict(self._seconds),
        )

    @property
    def samples_of_first_event(self) -> int:
        return self._first[1] if self._first else 0

    def history(self, now: float, curves: bool) -> WorkerHistory:
        span = self._elapsed - self._first[0] if self._first else 0.0
        return WorkerHistory(
            worker=self.worker,
            steps=self.steps,
            samples=self.samples,
            rate=self.rate_at(now),
            mean_rate=(self.samples - self.samples_of_first_event) / span if span > 0 else None,
            lost=self.lost,
            seconds=MappingProxyType(dict(self._seconds)),
            recent=MappingProxyType(self.recent_seconds()),
            num_bytes=self._num_bytes,
            drift=self._drift,
            first_nan=self._first_nan,
            cumulative=self._cumulative.curve() if curves else Curve(),
            rates=self._rates.curve() if curves else Curve(),
        )


class _RunLog:
    """What the events of all workers have told in one run."""

    def __init__(self, run_id: str, points: int) -> None:
        self._run_id = run_id
        self._points = points
        self._started: float | None = None
        self._elapsed = 0.0
        self._loss_step = 0
        self._loss, self._rates = Series(points), Series(points)
        self._workers: dict[int, _WorkerLog] = {}
        self._straggler: Straggler | None = None
        self.expected: frozenset[int] = frozenset()

    def take(self, event: Measured, now: float) -> None:
        if self._started is None:
            self._started = event.at
        # Clocks of hosts differ a little, and may be set back: no line may run backwards.
        elapsed = max(self._elapsed, event.at - self._started)
        log = self._workers.setdefault(event.worker, _WorkerLog(event.worker, self._points))
        if not log.take(event, elapsed, now):
            return
        self._elapsed = elapsed
        self._take_loss(log.steps, event.loss)
        self._take_rate(elapsed, now)
        self._straggler = _find_straggler(self._straggler, self._workers, elapsed)

    def _take_loss(self, step: int, loss: float | None) -> None:
        """Every rank tells the same global loss: the first that tells of a step is heard."""
        if loss is not None and step > self._loss_step:
            self._loss_step = step
            self._loss.add(step, loss)

    def _take_rate(self, elapsed: float, now: float) -> None:
        rates = [log.rate_at(now) for log in self._workers.values()]
        known = [rate for rate in rates if rate is not None]
        if len(known) == len(rates):  # a worker that has only begun would show as a dip
            self._rates.add(elapsed, sum(known))

    def history(self, now: float, worker_curves: bool = True) -> RunHistory:
        workers = tuple(log.history(now, worker_curves) for _, log in sorted(self._workers.items()))
        samples = sum(worker.samples for worker in workers)
        known = [worker.rate for worker in workers if worker.rate is not None]
        return RunHistory(
            run_id=self._run_id,
            steps=max((worker.steps for worker in workers), default=0),
            samples=samples,
            lost=sum(worker.lost for worker in workers),
            seconds=self._elapsed,
            rate=sum(known) if known else None,
            mean_rate=self._mean_rate(samples),
            loss=self._loss.curve(),
            rates=self._rates.curve(),
            workers=workers,
            straggler=self._straggler,
            silent=tuple(sorted(self.expected - self._workers.keys())),
        )

    def totals(self) -> list[Totals]:
        return [log.totals() for log in self._workers.values()]

    def _mean_rate(self, samples: int) -> float | None:
        """Return samples/s since the first events, whose own samples took nobody knows how long."""
        before = sum(log.samples_of_first_event for log in self._workers.values())
        return (samples - before) / self._elapsed if self._elapsed > 0 else None


def _find_straggler(
    before: Straggler | None, workers: Mapping[int, _WorkerLog], elapsed: float
) -> Straggler | None:
    """Return who waits least, if the others wait for more than a tenth of their time and at least twice as long."""
    waits: dict[int, float] = {}
    for number, log in workers.items():
        recent = log.recent_seconds()
        if total := sum(recent.values()):
            waits[number] = recent.get("wait", 0.0) / total
    if len(waits) < 2:
        return None
    slowest = min(waits, key=lambda number: waits[number])
    others = [wait for number, wait in waits.items() if number != slowest]
    share = sum(others) / len(others)
    if share < _WAITED_FOR or waits[slowest] > share / 2:
        return None
    same = before is not None and before.worker == slowest
    return Straggler(slowest, before.since if before is not None and same else elapsed, share)


# ---------------------------------------------------------------------------------------------- the monitor


class Monitor:
    """Keeps what the last few runs have measured; events in, histories out, from any thread.

    Parameters
    ----------
    clock : callable
        Seconds that only grow; tells when a worker has become silent.
    num_runs : int
        How many runs are kept; the oldest is dropped for a new one.
    num_points : int
        How many points each line keeps.

    Examples
    --------
    >>> monitor = Monitor()
    >>> for n in range(1, 4):
    ...     monitor.take(Measured(worker=0, run_id="a", seq=n, at=n, steps=1, samples=64, loss=None))
    >>> monitor.latest().mean_rate
    64.0
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, num_runs: int = _RUNS, num_points: int = _POINTS
    ) -> None:
        self._clock = clock
        self._num_runs = max(1, num_runs)
        self._num_points = num_points
        self._runs: OrderedDict[str, _RunLog] = OrderedDict()
        self._before: dict[int, Totals] = {}  # of the runs that are no longer kept
        self._version = self._num_begun = 0
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        """A number that grows with each event that was taken."""
        return self._version

    def take(self, event: Event) -> None:
        """Take an event of a worker; those that measure nothing are passed over."""
        if not isinstance(event, Measured):
            return
        with self._lock:
            if event.run_id not in self._runs:
                self._runs[event.run_id] = _RunLog(event.run_id, self._num_points)
                self._num_begun += 1
                while len(self._runs) > self._num_runs:
                    _, oldest = self._runs.popitem(last=False)
                    _add_to(self._before, oldest.totals())
            self._runs[event.run_id].take(event, self._clock())
            self._version += 1

    def expect(self, run_id: str, workers: Iterable[int]) -> None:
        """Take note of which workers take part in a run, so that one that tells nothing can be named."""
        with self._lock:
            if run_id in self._runs:
                self._runs[run_id].expected = frozenset(workers)

    @property
    def num_begun(self) -> int:
        """How many runs have measured anything, also those that are no longer kept."""
        return self._num_begun

    def totals(self) -> list[Totals]:
        """Return what each worker has done in all runs together, in the order of their numbers."""
        with self._lock:
            found = dict(self._before)
            for run in self._runs.values():
                _add_to(found, run.totals())
            return [found[number] for number in sorted(found)]

    def latest(self, *, worker_curves: bool = True) -> RunHistory | None:
        """Return what is known of the run that began last, or None when nothing was measured.

        Parameters
        ----------
        worker_curves : bool
            Whether to copy each worker's lines, too, which takes a while for many workers.
        """
        with self._lock:
            newest = next(reversed(self._runs.values()), None)
            return newest.history(self._clock(), worker_curves) if newest is not None else None

    def history(self, run_id: str) -> RunHistory | None:
        """Return what is known of a run, or None when it measured nothing or is no longer kept."""
        with self._lock:
            run = self._runs.get(run_id)
            return run.history(self._clock()) if run is not None else None

    def histories(self) -> list[RunHistory]:
        """Return all runs that are kept, the oldest first."""
        with self._lock:
            return [run.history(self._clock()) for run in self._runs.values()]


def _add_to(found: dict[int, Totals], more: Iterable[Totals]) -> None:
    for each in more:
        found[each.worker] = found.get(each.worker, Totals(worker=each.worker)) + each
