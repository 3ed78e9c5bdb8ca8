"""Where time goes, with a clock that is set by hand."""

from __future__ import annotations

import pytest

from openclaw_nb.engine.steps.clock import PERIOD_SECONDS, UNKNOWN, StepClock


class Hand:
    """A clock that goes on when it is told to."""

    def __init__(self, at: float = 1000.0) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at

    def go_on(self, seconds: float) -> None:
        self.at += seconds


def step(clock: StepClock, hand: Hand, *, compute: float, held: float) -> float:
    """Make a step; return when this rank arrived."""
    hand.go_on(compute)
    clock.arrive()
    arrival = hand.at
    hand.go_on(held)
    clock.leave()
    return arrival


def test_time_until_a_batch_is_there_is_data() -> None:
    hand = Hand()
    clock = StepClock(hand)

    def slow_batches() -> object:
        for number in range(3):
            hand.go_on(0.25)
            yield number
        hand.go_on(0.5)

    for _ in clock.fetching(slow_batches()):  # type: ignore[arg-type]
        hand.go_on(1.0)
    assert clock.take() == {"data": 1.25, "compute": 3.0, "wait": 0.0, "transfer": 0.0}
    assert clock.take() == {"data": 0.0, "compute": 0.0, "wait": 0.0, "transfer": 0.0}


@pytest.mark.parametrize(
    ("others", "wait"),
    [([0.0], 0.0), ([0.25], 0.25), ([-3.0], 0.0), ([0.125, 0.5], 0.5), ([9.0], 1.0)],
    ids=["together", "later", "earlier", "the last one counts", "longer than it was held"],
)
def test_the_wait_ends_when_the_last_rank_is_there(others: list[float], wait: float) -> None:
    hand = Hand()
    clock = StepClock(hand)
    arrival = step(clock, hand, compute=2.0, held=1.0)
    told = clock.tell()
    assert told == arrival % PERIOD_SECONDS
    clock.settle([told, *((arrival + late) % PERIOD_SECONDS for late in others)])
    assert clock.take() == {"data": 0.0, "compute": 2.0, "wait": wait, "transfer": 1.0 - wait}


def test_arrivals_are_told_with_the_next_step_and_meet_their_own() -> None:
    """What is settled during a step is the one before, whatever this one has measured by then."""
    hand = Hand()
    clock = StepClock(hand)
    assert clock.tell() == UNKNOWN
    step(clock, hand, compute=1.0, held=0.5)
    clock.settle([UNKNOWN, UNKNOWN])
    told = clock.tell()
    step(clock, hand, compute=1.0, held=4.0)
    clock.settle([told, told + 0.25])
    assert clock.take() == {"data": 0.0, "compute": 2.0, "wait": 0.25, "transfer": 0.25}


def test_a_period_that_ends_in_between_does_not_matter() -> None:
    hand = Hand(PERIOD_SECONDS * 7 - 2.25)
    clock = StepClock(hand)
    step(clock, hand, compute=2.0, held=1.0)
    told = clock.tell()
    clock.settle([told, 0.25])
    assert clock.take()["wait"] == 0.5


def test_what_was_before_a_restart_belongs_to_nothing() -> None:
    hand = Hand()
    clock = StepClock(hand)
    hand.go_on(5.0)
    clock.restart()
    hand.go_on(1.0)
    assert clock.take()["compute"] == 1.0


def test_work_is_what_a_rank_does_by_itself() -> None:
    hand = Hand()
    clock = StepClock(hand)
    with_batch = clock.fetching(iter([0]))
    hand.go_on(0.5)
    next(with_batch)
    with clock.waiting():
        hand.go_on(7.0)
    step(clock, hand, compute=1.0, held=3.0)
    assert clock.work_seconds == 1.5
    clock.settle([])
    step(clock, hand, compute=0.25, held=0.0)
    assert clock.work_seconds == 0.25
    assert clock.take()["wait"] == 7.0


def test_a_slowed_rank_sleeps_until_its_work_has_taken_so_many_times_as_long() -> None:
    hand = Hand()
    clock = StepClock(hand, slowdown=lambda: 3.0, sleep=hand.go_on)
    for _ in range(3):
        hand.go_on(0.25)
        clock.slow_down()
        with clock.waiting():
            hand.go_on(5.0)
        step(clock, hand, compute=0.125, held=1.0)
    # The work before each call is slowed there; the last 0.125 s would be at the next one.
    assert clock.take()["compute"] == pytest.approx(3 * 3 * 0.375 - 2 * 0.125)
