"""How fast a training is under several settings: rate, latency, speed-up, efficiency; and two such reports compared.

    when each step ended, by rank ──> `Timed` ──> `Result` ──> `results_of` ──> speed-up over one device

The same training takes the same samples under every setting, so its speed-up is the ratio of the seconds it takes.
Pure: numbers in, numbers out. Knows no clusters, files or tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

PLAIN = "single device"
"""The setting to which others are compared: the program as it is, on one worker."""


@dataclass(frozen=True)
class Timed:
    """One run of a program: what its trainings took.

    Attributes
    ----------
    seconds : float
        From the end of the first step to the end of the last, of the slowest rank, in all trainings.
    scaled_seconds : float
        The same for all steps, the first included, as if it had taken as long as the others.
    latencies : tuple of float
        Seconds of each step but the first of each training, of all ranks.
    steps : int
        How many steps a rank took.
    samples : int or None
        How many samples all ranks took together; None where that is not measured.
    """

    seconds: float
    scaled_seconds: float
    latencies: tuple[float, ...]
    steps: int
    samples: int | None = None

    def __add__(self, other: Timed) -> Timed:
        samples = [each for each in (self.samples, other.samples) if each is not None]
        return Timed(
            self.seconds + other.seconds,
            self.scaled_seconds + other.scaled_seconds,
            self.latencies + other.latencies,
            self.steps + other.steps,
            sum(samples) if samples else None,
        )


def timed(ends: Sequence[Sequence[float]], samples: int | None = None) -> Timed | None:
    """Return what one training took; None where no rank took two steps.

    Parameters
    ----------
    ends : sequence of sequence of float
        By rank, when each of its steps ended, in seconds.
    samples : int, optional
        How many samples all ranks took together.

    Examples
    --------
    >>> found = timed([[0.0, 1.0, 2.0], [0.0, 1.0, 3.0]], 30)
    >>> found.seconds, found.scaled_seconds, found.latencies
    (3.0, 4.5, (1.0, 1.0, 1.0, 2.0))
    """
    full = [rank for rank in ends if len(rank) > 1]
    if not full:
        return None
    slowest = max(full, key=lambda rank: rank[-1] - rank[0])
    seconds = slowest[-1] - slowest[0]
    latencies = tuple(later - earlier for rank in full for earlier, later in pairwise(rank))
    return Timed(seconds, seconds * len(slowest) / (len(slowest) - 1), latencies, len(slowest), samples)


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value below which a ``part`` of the values lies, 0 to 1, between neighbours in proportion.

    Examples
    --------
    >>> percentile([4.0, 1.0, 3.0, 2.0], 0.5)
    2.5
    """
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, kw_only=True)
class Result:
    """One setting on so many workers.

    Attributes
    ----------
    setting : str
        Its options, or `PLAIN`.
    workers : int
        On how many workers.
    steps, samples : int or None
        Of one run.
    seconds : float or None
        What a run's training takes, the median of all.
    samples_per_second : float or None
        Throughput.
    p50_ms, p99_ms : float or None
        Latency of a step, in milliseconds.
    speedup : float or None
        How many times as fast as `PLAIN`.
    efficiency : float or None
        The speed-up a worker: 1 where n workers are n times as fast.
    error : str
        Why it could not be measured, or "".
    """

    setting: str
    workers: int
    steps: int | None = None
    samples: int | None = None
    seconds: float | None = None
    samples_per_second: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    speedup: float | None = None
    efficiency: float | None = None
    error: str = ""


def results_of(
    runs: Mapping[tuple[str, int], Sequence[Timed]], errors: Mapping[tuple[str, int], str]
) -> list[Result]:
    """Return what each setting on so many workers has reached, in the order in which they were measured.

    Parameters
    ----------
    runs : mapping
        By setting and number of workers, what was measured; that of `PLAIN` on one worker is what others are compared
        to.
    errors : mapping
        Why some could not be measured.
    """
    plain = runs.get((PLAIN, 1))
    base = median(run.scaled_seconds for run in plain) if plain else None
    # What is not measured without a strategy is the same with one: the training is.
    known = next((run.samples for each in runs.values() for run in each if run.samples), None)
    return [_result(key, runs.get(key, ()), errors.get(key, ""), base, known) for key in {**runs, **errors}]


def _result(
    key: tuple[str, int], runs: Sequence[Timed], error: str, base: float | None, known: int | None
) -> Result:
    setting, workers = key
    if not runs or error:
        return Result(setting=setting, workers=workers, error=error or "nothing was measured")
    seconds = median(run.scaled_seconds for run in runs)
    latencies = [1000 * each for run in runs for each in run.latencies]
    samples = runs[0].samples or known
    speedup = base / seconds if base and seconds else None
    return Result(
        setting=setting,
        workers=workers,
        steps=runs[0].steps,
        samples=samples,
        seconds=seconds,
        samples_per_second=samples / seconds if samples and seconds else None,
        p50_ms=percentile(latencies, 0.5),
        p99_ms=percentile(latencies, 0.99),
        speedup=speedup,
        efficiency=None if speedup is None else speedup / workers,
    )


@dataclass(frozen=True, kw_only=True)
class Change:
    """One setting in two reports: the ratios of the second to the first, None where one has no number."""

    setting: str
    workers: int
    before: Result | None
    after: Result | None
    rate: float | None
    p50: float | None
    p99: float | None


def compared(before: Iterable[Result], after: Iterable[Result]) -> list[Change]:
    """Return how each setting has changed between two reports; those of only one report, too."""
    return list(_changes(_by_setting(before), _by_setting(after)))


def _by_setting(results: Iterable[Result]) -> dict[tuple[str, int], Result]:
    return {(each.setting, each.workers): each for each in results}


def _changes(
    before: Mapping[tuple[str, int], Result], after: Mapping[tuple[str, int], Result]
) -> Iterator[Change]:
    for key in {**before, **after}:
        one, two = before.get(key), after.get(key)
        yield Change(
            setting=key[0],
            workers=key[1],
            before=one,
            after=two,
            rate=_ratio(one, two, lambda each: each.samples_per_second),
            p50=_ratio(one, two, lambda each: each.p50_ms),
            p99=_ratio(one, two, lambda each: each.p99_ms),
        )


def _ratio(
    before: Result | None, after: Result | None, number: Callable[[Result], float | None]
) -> float | None:
    earlier, later = (None if each is None else number(each) for each in (before, after))
    return later / earlier if earlier and later else None
