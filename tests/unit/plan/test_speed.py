"""Rates, latencies and speed-ups against values worked out by hand."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_nb.plan.load import load_of
from openclaw_nb.plan.speed import PLAIN, Result, Timed, compared, percentile, results_of, timed


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], part: float) -> None:
    assert percentile(values, part) == pytest.approx(float(numpy.quantile(values, part)), abs=1e-6)


def test_a_training_takes_what_its_slowest_rank_takes() -> None:
    found = timed([[10.0, 11.0, 12.0], [20.0, 21.0, 24.0], [30.0]], samples=48)
    assert found is not None
    assert (found.seconds, found.scaled_seconds, found.steps, found.samples) == (4.0, 6.0, 3, 48)
    assert found.latencies == (1.0, 1.0, 1.0, 3.0)


@pytest.mark.parametrize("ends", [[], [[]], [[1.0], [2.0]]])
def test_no_time_is_known_without_two_steps(ends: list[list[float]]) -> None:
    assert timed(ends) is None


def test_trainings_of_one_program_add_up() -> None:
    one, two = Timed(1.0, 2.0, (0.5, 0.5), 3, 30), Timed(3.0, 4.0, (3.0,), 2)
    assert one + two == Timed(4.0, 6.0, (0.5, 0.5, 3.0), 5, 30)
    assert (two + two).samples is None


def run_of(seconds: float, samples: int | None = None) -> Timed:
    return Timed(seconds, seconds, (0.01, 0.03), 3, samples)


def test_speed_up_is_over_the_program_as_it_is_and_medians_are_told() -> None:
    two = [run_of(2.0, 100), run_of(5.0, 100), run_of(90.0, 100)]
    plain, fast = results_of({(PLAIN, 1): [run_of(8.0)], ("data_parallel", 2): two}, {})
    assert (plain.speedup, plain.efficiency, plain.samples_per_second) == (1.0, 1.0, 12.5)
    assert (fast.seconds, fast.samples_per_second, fast.speedup, fast.efficiency) == (5.0, 20.0, 1.6, 0.8)
    assert (fast.p50_ms, fast.p99_ms) == (pytest.approx(20.0), pytest.approx(30.0))


def test_without_the_program_as_it_is_there_is_no_speed_up() -> None:
    plain, other = results_of({(PLAIN, 1): [], ("sharded", 2): [run_of(2.0, 10)]}, {(PLAIN, 1): "it died"})
    assert (plain.error, plain.seconds) == ("it died", None)
    assert (other.samples_per_second, other.speedup, other.efficiency) == (5.0, None, None)


def test_what_only_one_report_has_has_no_ratio() -> None:
    before = [Result(setting="a", workers=1, samples_per_second=10.0, p50_ms=4.0)]
    after = [
        Result(setting="a", workers=1, samples_per_second=15.0, p50_ms=2.0),
        Result(setting="a", workers=2, samples_per_second=9.0),
    ]
    same, new = compared(before, after)
    assert (same.rate, same.p50, same.p99) == (1.5, 0.5, None)
    assert (new.before, new.rate) == (None, None)


class Worker:
    def __init__(self, number: int, **seconds: float) -> None:
        self.worker, self.steps, self.num_bytes, self.seconds = number, 10, 0, seconds


def test_load_is_work_over_the_mean_and_the_rest_is_communication() -> None:
    busy = Worker(0, data=1.0, compute=5.0, wait=0.0, transfer=2.0)
    waits = Worker(1, data=1.0, compute=1.0, wait=4.0, transfer=2.0)
    found = load_of([busy, waits])
    assert [share.load for share in found.workers] == [1.5, 0.5]
    assert (found.skew, found.efficiency, found.communication) == (1.5, 0.5, 0.5)
    assert found.workers[1].split == {"data": 0.125, "compute": 0.125, "wait": 0.5, "transfer": 0.25}


def test_a_run_that_measured_nothing_is_even() -> None:
    found = load_of([Worker(0), Worker(1)])
    assert (found.skew, found.efficiency, found.communication) == (1.0, None, 0.0)
    assert load_of([]).workers == ()
