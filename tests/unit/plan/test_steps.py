from __future__ import annotations

import pytest

from openclaw_nb.plan.steps import ideal_times, idle_share, last_sharers


def last_end(times: list[list[tuple[float, float]]]) -> float:
    return max(end for lane in times for _, end in lane)


def test_steps_that_share_nothing_overlap() -> None:
    times = ideal_times([1.0, 2.0, 1.0], 10, 2, [0, 1, 2])
    assert (
        last_end(times) == 1 + 2 + 1 + 9 * 2
    )  # the first item's way, then one each time of the slowest step
    assert idle_share(times) == pytest.approx(1 - 10 * 4 / (3 * 22))


def test_steps_that_share_a_model_take_turns() -> None:
    waits_for = last_sharers([set(), {1}, {1}])
    assert waits_for == [0, 2, 2]
    assert last_end(ideal_times([1.0, 2.0, 1.0], 10, 2, waits_for)) == 1 + 10 * 3


def test_a_channel_without_room_holds_the_step_before() -> None:
    starts = [start for start, _ in ideal_times([1.0, 5.0], 4, 1, [0, 1])[0]]
    assert starts == [0.0, 6.0, 12.0, 18.0]


def test_what_overlaps_counts_once() -> None:
    assert idle_share([[(0.0, 4.0), (1.0, 2.0)], [(0.0, 2.0)]]) == pytest.approx(0.25)
