"""When a checkpoint is taken: moments in, decisions out, without a clock."""

from __future__ import annotations

import pytest

from openclaw_nb.core.errors import UsageError
from openclaw_nb.plan.checkpoints import Decision, Every, Moment, decide, parse_every


def taken(every: Every, moments: list[Moment]) -> list[int]:
    """Return the steps at which checkpoints are taken, one after the other."""
    last, steps = Moment(0, 0.0), []
    for now in moments:
        if decide(every, last, now) is Decision.TAKE:
            steps.append(now.num_steps)
            last = now
    return steps


def a_second_each(num_steps: int) -> list[Moment]:
    return [Moment(step, float(step)) for step in range(num_steps + 1)]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (Every(steps=3), [3, 6, 9]),
        (Every(steps=1), list(range(1, 11))),
        (Every(seconds=4), [4, 8]),
        (Every(steps=5, seconds=3), [3, 5, 8, 10]),  # whichever is first; seconds count from the last one
        (Every(steps=11, seconds=60), []),
    ],
)
def test_by_steps_by_seconds_or_both(every: Every, expected: list[int]) -> None:
    assert taken(every, a_second_each(10)) == expected


def test_steps_that_pass_a_multiple_count() -> None:
    """Several backward passes a batch, or a batch that is no moment of rest, skip numbers."""
    moments = [Moment(step, 0.0) for step in (2, 4, 7, 9, 12)]
    assert taken(Every(steps=5), moments) == [7, 12]


def test_without_a_step_there_is_nothing_to_keep() -> None:
    assert decide(Every(seconds=1), Moment(7, 0.0), Moment(7, 99.0)) is Decision.NOT_DUE


def test_what_falls_due_during_a_write_is_one_and_late() -> None:
    every, last = Every(steps=2), Moment(2, 0.0)
    assert decide(every, last, Moment(3, 0.0, is_writing=True)) is Decision.NOT_DUE
    assert decide(every, last, Moment(4, 0.0, is_writing=True)) is Decision.LATE
    assert decide(every, last, Moment(7, 0.0, is_writing=True)) is Decision.LATE
    assert decide(every, last, Moment(7, 0.0)) is Decision.TAKE
    assert decide(every, Moment(7, 0.0), Moment(8, 0.0)) is Decision.TAKE


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (100, Every(steps=100)),
        ("100", Every(steps=100)),
        ("300s", Every(seconds=300)),
        ("0.5s", Every(seconds=0.5)),
        ("400h", Every(seconds=1_440_000)),
        ("12.3456789s", Every(seconds=12.3456789)),
        ("5m", Every(seconds=300)),
        ("1h", Every(seconds=3600)),
        ("100, 300s", Every(steps=100, seconds=300)),
        ("300s,100", Every(steps=100, seconds=300)),
    ],
)
def test_as_it_is_written(given: int | str, expected: Every) -> None:
    assert parse_every(given, "it") == expected
    assert parse_every(str(expected), "it") == expected


@pytest.mark.parametrize(
    "given", [0, "0", -3, "0s", "often", "", "5d", "1.5", "10,20", "10s,1m", "10,", True, None]
)
def test_what_is_no_interval_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match=r"every is a number of steps of at least 1 \(100\).*, not "):
        parse_every(given, "every")  # type: ignore[arg-type]
