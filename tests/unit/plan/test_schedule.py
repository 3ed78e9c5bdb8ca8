"""Schedules against what their papers say of them."""

from __future__ import annotations

from collections import Counter

import pytest

from openclaw_nb.core.errors import RefusedError, UsageError
from openclaw_nb.plan.schedule import (
    SCHEDULES,
    Action,
    Costs,
    Kind,
    bubble_of,
    build,
    choose_num_microbatches,
    closed_form_bubble,
    num_held,
    simulate,
)

CASES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 8, 16, 24)]


def lanes_of(schedule: str, p: int, m: int) -> tuple[list[list[Action]], int]:
    chunks = 2 if schedule == "interleaved" else 1
    return build(schedule, p, m, chunks), chunks


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_microbatch_passes_every_stage_once_each_way(schedule: str) -> None:
    for p, m in CASES:
        if schedule == "interleaved" and m % p:
            continue
        lanes, chunks = lanes_of(schedule, p, m)
        back = {Kind.INPUT, Kind.WEIGHT} if schedule == "zero-bubble" else {Kind.BACKWARD}
        expected = {
            Action(kind, stage, n)
            for kind in {Kind.FORWARD, *back}
            for stage in range(p * chunks)
            for n in range(m)
        }
        counts = Counter(action for lane in lanes for action in lane)
        assert counts == dict.fromkeys(expected, 1)
        assert all(action.stage % p == rank for rank, lane in enumerate(lanes) for action in lane)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("costs", [Costs(), Costs(1.0, 1.5, 1.0), Costs(2.0, 2.0, 1.0)], ids=str)
def test_the_simulated_bubble_is_the_closed_form(schedule: str, costs: Costs) -> None:
    for p, m in CASES:
        if m < p or (schedule == "interleaved" and m % p):
            continue
        lanes, chunks = lanes_of(schedule, p, m)
        simulated = bubble_of(simulate(lanes, costs))
        assert simulated == pytest.approx(closed_form_bubble(schedule, p, m, chunks, costs), abs=1e-9), (p, m)


def test_weight_gradients_that_are_longer_than_all_gaps_leave_none() -> None:
    assert closed_form_bubble("zero-bubble", 4, 8, costs=Costs(1.0, 1.0, 3.0)) == 0.0
    assert closed_form_bubble("zero-bubble", 4, 8, costs=Costs(1.0, 1.0, 1.0)) == pytest.approx(
        3 / (3 * 8 + 3)
    )


def test_memory_is_what_the_papers_say() -> None:
    for p, m in CASES:
        assert [num_held(lane) for lane in build("gpipe", p, m)] == [m] * p
        assert [num_held(lane) for lane in build("1f1b", p, m)] == [min(m, p - rank) for rank in range(p)]
        assert max(num_held(lane) for lane in build("zero-bubble", p, m)) <= p


def test_what_is_written_out_in_the_papers() -> None:
    first, last = build("1f1b", 4, 8)[0], build("1f1b", 4, 8)[3]
    assert " ".join(map(str, first[:8])) == "F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1 F0.5"
    assert " ".join(map(str, last[:4])) == "F3.0 B3.0 F3.1 B3.1"
    # Megatron-LM's figure: the first of four devices with two chunks each does 1234 1234(second chunk) 567 first.
    interleaved = build("interleaved", 4, 8, 2)[0]
    assert " ".join(map(str, interleaved[:10])) == "F0.0 F0.1 F0.2 F0.3 F4.0 F4.1 F4.2 F4.3 F0.4 F0.5"


def test_slower_messages_and_stages_make_it_longer() -> None:
    lanes = build("1f1b", 2, 4)
    assert simulate(lanes)[-1].end == 15.0  # (m + p - 1) (F + B)
    assert max(each.end for each in simulate(lanes, hop=0.5)) > 15.0
    uneven = simulate(lanes, [Costs(), Costs(2.0, 2.0, 2.0)])
    assert (
        max(each.end for each in uneven) == 4 * 6.0 + 3.0
    )  # the slow stage, and the first's way there and back


def test_numbers_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="Did you mean '1f1b'"):
        build("1f1", 2, 4)
    with pytest.raises(RefusedError, match="multiple of 2"):
        build("interleaved", 2, 3, 2)
    with pytest.raises(RefusedError, match="several stages a device"):
        build("interleaved", 2, 4)
    with pytest.raises(RefusedError, match="one stage a device"):
        build("gpipe", 2, 4, 2)
    with pytest.raises(UsageError, match="at least one"):
        build("gpipe", 2, 0)
    with pytest.raises(UsageError, match=r"wait for each other: rank 0 at B0\.0"):
        simulate([[Action(Kind.BACKWARD, 0, 0), Action(Kind.FORWARD, 0, 0)]])


def test_the_number_of_microbatches_follows_the_batch() -> None:
    assert choose_num_microbatches(64, 2, "1f1b") == 8
    assert choose_num_microbatches(30, 4, "gpipe") == 15
    assert choose_num_microbatches(7, 2, "gpipe") == 7
    assert choose_num_microbatches(30, 2, "interleaved") == 6
    with pytest.raises(RefusedError, match="multiple of 4"):
        choose_num_microbatches(6, 4, "interleaved")
