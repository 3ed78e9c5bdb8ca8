from __future__ import annotations

import math
import random
import threading

import pytest

from openclaw_nb.monitor.store import Curve, Monitor, Series
from openclaw_nb.protocol.messages import Measured, Shown


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def event(
    seq: int,
    at: float,
    *,
    worker: int = 0,
    samples: int = 64,
    steps: int = 1,
    loss: float | None = None,
    run_id: str = "run-1",
    seconds: dict[str, float] | None = None,
) -> Measured:
    return Measured(
        worker=worker,
        run_id=run_id,
        seq=seq,
        at=at,
        steps=steps,
        samples=samples,
        loss=loss,
        seconds=seconds or {},
    )


def told(*events: Measured, clock: Clock | None = None, **options: int) -> Monitor:
    monitor = Monitor(clock or Clock(), **options)
    for each in events:
        monitor.take(each)
    return monitor


def test_ten_events_of_64_samples_a_second_are_64_samples_a_second() -> None:
    history = told(*(event(n, 50.0 + n) for n in range(1, 11))).latest()
    assert history is not None
    assert (history.steps, history.samples, history.seconds, history.lost) == (10, 640, 9.0, 0)
    assert history.rate == history.mean_rate == pytest.approx(64.0)
    assert history.rates == Curve(tuple(float(n) for n in range(1, 10)), (64.0,) * 9)
    (worker,) = history.workers
    assert worker.cumulative == Curve(
        tuple(float(n) for n in range(10)), tuple(64.0 * n for n in range(1, 11))
    )


def test_one_event_has_samples_but_no_samples_a_second() -> None:
    history = told(event(1, 5.0, loss=2.0)).latest()
    assert history is not None
    assert (history.samples, history.rate, history.mean_rate, len(history.rates)) == (64, None, None, 0)
    assert history.loss == Curve((1,), (2.0,))


def test_workers_add_up() -> None:
    events = [
        event(n, n + worker / 10, worker=worker, samples=size)
        for n in range(1, 8)
        for worker, size in enumerate((100, 50))
    ]
    history = told(*events).latest()
    assert history is not None
    assert [worker.rate for worker in history.workers] == pytest.approx([100.0, 50.0])
    assert history.rate == pytest.approx(150.0)
    # No dip where only one of both has told twice.
    assert history.rates.y == pytest.approx((150.0,) * len(history.rates))
    assert history.samples == 7 * 150


def test_the_rate_follows_a_change_within_the_window() -> None:
    slow = [event(n, float(n), samples=10) for n in range(1, 11)]
    fast = [event(n, float(n), samples=30) for n in range(11, 21)]
    history = told(*slow, *fast).latest()
    assert history is not None
    assert history.rate == pytest.approx(30.0)
    # 19 seconds since the first event: nine of them with 10 samples, ten with 30.
    assert history.mean_rate == pytest.approx((9 * 10 + 10 * 30) / 19)


def test_a_worker_that_tells_nothing_for_long_is_at_zero() -> None:
    clock = Clock()
    monitor = Monitor(clock)
    for n in range(1, 5):
        clock.now += 1.0
        monitor.take(event(n, float(n)))
    clock.now += 2.5
    assert _rate(monitor) == pytest.approx(64.0)
    clock.now += 1.0  # more than three times its usual pause
    assert _rate(monitor) == 0.0
    assert monitor.latest().mean_rate == pytest.approx(64.0)  # type: ignore[union-attr]


def _rate(monitor: Monitor) -> float | None:
    history = monitor.latest()
    assert history is not None
    return history.rate


def test_events_that_did_not_arrive_are_counted() -> None:
    history = told(event(1, 1.0), event(2, 2.0), event(5, 5.0), event(3, 1.0, worker=1)).latest()
    assert history is not None
    assert [worker.lost for worker in history.workers] == [2, 2]
    assert history.lost == 4
    assert history.samples == 4 * 64


def test_an_event_that_comes_twice_counts_once() -> None:
    history = told(event(1, 1.0), event(2, 2.0), event(2, 2.0), event(1, 1.0)).latest()
    assert history is not None
    assert (history.samples, history.lost) == (128, 0)


def test_a_new_process_of_a_worker_goes_on_counting() -> None:
    events = [event(n, float(n)) for n in range(1, 6)] + [event(n, 8.0 + n) for n in range(1, 4)]
    history = told(*events).latest()
    assert history is not None
    assert (history.samples, history.steps, history.lost) == (8 * 64, 8, 0)
    assert history.rate == pytest.approx(64.0)


def test_a_clock_that_is_set_back_gives_no_negative_rate() -> None:
    events = [event(n, 1000.0 + n) for n in range(1, 6)] + [event(n, 500.0 + n) for n in range(6, 11)]
    history = told(*events).latest()
    assert history is not None
    assert history.rate == pytest.approx(64.0)
    assert all(y > 0 for y in history.rates.y)
    assert list(history.rates.x) == sorted(history.rates.x)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_times_are_told_rates_are_rates(seed: int) -> None:
    """Times jump by up to a day, stand still or go back; a straggler is told only by what ranks waited."""
    draw = random.Random(seed)
    monitor, now = Monitor(clock := Clock()), {0: 0.0, 1: 0.0}
    for n in range(1, 200):
        worker = n % 2
        jump = draw.choice([0.0, 0.0, 0.5, 0.5, 0.5, -86400.0, 86400.0, 1e-300])
        now[worker] += jump
        clock.now += 0.25
        spent = {"compute": 0.3 - 0.2 * worker, "wait": 0.2 * worker}  # worker 1 waits for worker 0
        monitor.take(event((n + 1) // 2, now[worker], worker=worker, seconds=spent))
        history = monitor.latest()
        assert history is not None
        rates = [
            history.rate,
            history.mean_rate,
            *(r for w in history.workers for r in (w.rate, w.mean_rate)),
        ]
        rates += [*history.rates.y, *(y for w in history.workers for y in w.rates.y)]
        assert all(rate is None or (rate >= 0 and math.isfinite(rate)) for rate in rates)
        assert list(history.rates.x) == sorted(history.rates.x)
    assert history.samples == 199 * 64
    assert history.straggler is not None
    assert history.straggler.worker == 0


def test_who_takes_part_and_tells_nothing_is_named() -> None:
    monitor = told(*(event(n, float(n)) for n in range(1, 11)))
    monitor.expect("run-1", [0, 2, 1])
    monitor.expect("another", [7])
    history = monitor.latest()
    assert history is not None
    assert history.silent == (1, 2)
    assert (history.samples, history.rate) == (640, pytest.approx(64.0))
    monitor.take(event(1, 11.0, worker=2))
    assert monitor.latest().silent == (1,)  # type: ignore[union-attr]


def test_the_global_loss_is_heard_once_a_step() -> None:
    events = [event(n, float(n), worker=w, loss=3.0 / n) for n in range(1, 4) for w in (0, 1)]
    history = told(*events).latest()
    assert history is not None
    assert history.loss == Curve((1, 2, 3), (3.0, 1.5, 1.0))


def test_a_loss_that_is_no_number_is_kept() -> None:
    history = told(event(1, 1.0, loss=2.0), event(2, 2.0, loss=math.nan), event(3, 3.0)).latest()
    assert history is not None
    assert history.loss.x == (1, 2)
    assert math.isnan(history.loss.y[1])


def test_time_is_summed_by_what_it_was_spent_on() -> None:
    parts = [{"compute": 0.5}, {"compute": 0.25, "wait": 1.0}]
    history = told(*(event(n, float(n), seconds=s) for n, s in enumerate(parts, 1))).latest()
    assert history is not None
    assert dict(history.workers[0].seconds) == {"compute": 0.75, "wait": 1.0}


def test_only_the_last_runs_are_kept_and_other_events_passed_over() -> None:
    monitor = told(*(event(1, float(n), run_id=f"run-{n}") for n in range(8)), num_runs=3)
    version = monitor.version
    monitor.take(Shown(run_id="run-9", worker=0, seq=1, entries=[]))
    assert [history.run_id for history in monitor.histories()] == ["run-5", "run-6", "run-7"]
    assert monitor.latest().run_id == "run-7"  # type: ignore[union-attr]
    assert monitor.history("run-6") is not None
    assert monitor.history("run-0") is None
    assert monitor.version == version == 8


def test_nothing_was_measured() -> None:
    assert Monitor().latest() is None
    assert Monitor().histories() == []


def test_what_was_given_out_does_not_change() -> None:
    monitor = told(event(1, 1.0, loss=1.0, seconds={"compute": 1.0}))
    before = monitor.latest()
    monitor.take(event(2, 2.0, loss=0.5, seconds={"compute": 1.0}))
    assert before is not None
    assert (before.samples, len(before.loss), before.workers[0].seconds["compute"]) == (64, 1, 1.0)


@pytest.mark.parametrize("capacity", [2, 7, 100])
@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 12345])
def test_a_long_series_keeps_its_whole_shape(capacity: int, count: int) -> None:
    series = Series(capacity)
    for n in range(count):
        series.add(n, n * n)
    curve = series.curve()
    assert min(count, capacity // 2) <= len(curve) <= capacity + 1
    assert (curve.x[0], curve.x[-1]) == (0, count - 1)
    assert all(y == x * x for x, y in zip(curve.x, curve.y, strict=True))
    gaps = {b - a for a, b in zip(curve.x[:-1], curve.x[1:-1], strict=False)}
    assert len(gaps) <= 1  # evenly thinned, apart from the newest point


def test_a_long_run_is_bounded_and_exact_where_it_is_kept() -> None:
    history = told(
        *(event(n, n / 5, samples=8, loss=1.0 / n) for n in range(1, 1001)), num_points=50
    ).latest()
    assert history is not None
    worker = history.workers[0]
    assert all(len(c) <= 51 for c in (history.loss, history.rates, worker.cumulative, worker.rates))
    assert all(y == pytest.approx(8 * (5 * x + 1)) for x, y in zip(*_points(worker.cumulative), strict=True))
    assert history.rates.y == pytest.approx((40.0,) * len(history.rates))
    assert history.samples == 8000


def _points(curve: Curve) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return curve.x, curve.y


def test_many_threads_lose_nothing() -> None:
    monitor = Monitor()

    def tell(worker: int) -> None:
        for n in range(1, 501):
            monitor.take(event(n, n / 100, worker=worker, samples=1))
            if n % 50 == 0:
                monitor.latest()

    threads = [threading.Thread(target=tell, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = monitor.latest()
    assert history is not None
    assert (history.samples, history.steps, history.lost) == (2000, 500, 0)
