"""When a cell is released: each rule alone, at its limit, and which of them wins."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from openclaw_nb.plan.release import (
    DEADLINE_SECONDS,
    ENDED_SECONDS,
    MISMATCH_SECONDS,
    STOPPED_SECONDS,
    GiveUp,
    KeepWaiting,
    Limits,
    Phase,
    RankView,
    ReleaseNow,
    decide,
    waiting_table,
)

COMPUTES = RankView()
DONE = RankView(phase=Phase.DONE)
ABSENT = RankView(phase=Phase.ABSENT)
DIED = RankView(phase=Phase.DIED)
RAISED = RankView(phase=Phase.RAISED, error="ValueError")


def waits(seconds: float, call: str = "barrier()", group: str = "default 2", **place: Any) -> RankView:
    place.setdefault("told_after_end_seconds", seconds)
    return RankView(call=call, group=group, waiting_seconds=seconds, **place)


def views(*ranks: RankView) -> dict[int, RankView]:
    return dict(enumerate(ranks))


# ------------------------------------------------------------------------------- nothing to do


@pytest.mark.parametrize(
    "ranks",
    [
        (COMPUTES, COMPUTES),
        (DONE, COMPUTES),
        (DONE, DONE),
        (ABSENT, COMPUTES),
        (DIED, DIED),
        (RAISED, DONE, DIED),
        (),
    ],
    ids=lambda ranks: "-".join(view.phase.value for view in ranks) or "nobody",
)
def test_ranks_that_compute_or_are_over_need_nothing(ranks: tuple[RankView, ...]) -> None:
    assert decide(views(*ranks), None) == KeepWaiting()


@pytest.mark.parametrize("seconds", [0.5, 100.0, 1e9])
def test_a_slow_rank_is_no_cause_however_long_the_others_wait(seconds: float) -> None:
    assert decide(views(COMPUTES, waits(seconds), waits(seconds)), None) == KeepWaiting()


@pytest.mark.parametrize("seconds", [MISMATCH_SECONDS, 100.0, 1e9])
def test_one_slow_collective_that_all_take_part_in_is_no_cause(seconds: float) -> None:
    assert decide(views(waits(seconds), waits(seconds + 1, number=7)), None) == KeepWaiting()


def test_a_rank_alone_waits_for_nobody() -> None:
    assert decide(views(waits(1e9)), None) == KeepWaiting()


# ------------------------------------------------------------------------ a rank raised or died


@pytest.mark.parametrize(("culprit", "cause"), [(DIED, "rank 1 died"), (RAISED, "rank 1 raised ValueError")])
@pytest.mark.parametrize("other", [COMPUTES, waits(0.0), waits(5.0)])
def test_a_rank_that_raised_or_died_releases_the_others_at_once(
    culprit: RankView, cause: str, other: RankView
) -> None:
    assert decide(views(other, culprit, DONE), None) == ReleaseNow(cause)


def test_the_failure_is_named_before_what_the_others_wait_for() -> None:
    assert decide(views(waits(9.0), DONE, RAISED), None) == ReleaseNow("rank 2 raised ValueError")


# ------------------------------------------------------------------------- a rank is not coming


def test_all_wait_for_a_rank_that_has_finished() -> None:
    late = waits(ENDED_SECONDS + 0.01, line=3)
    assert decide(views(late, DONE, late), None) == ReleaseNow(
        "rank 1 has finished the cell, but rank 0 waits in barrier(), line 3"
    )


def test_all_wait_for_a_rank_that_does_not_run_the_cell() -> None:
    assert decide(views(ABSENT, waits(ENDED_SECONDS + 0.01)), None) == ReleaseNow(
        "rank 0 does not run this cell (--targets), but rank 1 waits in barrier()"
    )


@pytest.mark.parametrize("over", [DONE, ABSENT])
def test_a_wait_as_long_as_the_limit_is_not_yet_too_long(over: RankView) -> None:
    assert decide(views(over, waits(ENDED_SECONDS)), None) == KeepWaiting()


@pytest.mark.parametrize("over", [DONE, ABSENT])
def test_while_one_still_computes_it_may_be_the_one_that_is_waited_for(over: RankView) -> None:
    assert decide(views(over, waits(9.0), COMPUTES), None) == KeepWaiting()


# ----------------------------------------------------------------------- they wait for each other


@pytest.mark.parametrize(
    "other",
    [waits(MISMATCH_SECONDS + 0.1, "recv(float32[1], src=0)"), waits(MISMATCH_SECONDS + 0.1, group="sub 3")],
    ids=["another call", "another group"],
)
def test_ranks_in_different_calls_wait_for_each_other(other: RankView) -> None:
    decision = decide(views(waits(MISMATCH_SECONDS + 0.1, line=2), other), None)
    assert isinstance(decision, ReleaseNow)
    assert decision.cause == (
        f"the ranks wait for each other: rank 0 waits in barrier(), line 2; rank 1 waits in {other.call}"
    )


def test_a_mismatch_counts_when_all_have_waited_past_the_limit() -> None:
    ranks = views(waits(9.0), waits(MISMATCH_SECONDS, "recv(float32[1], src=0)"))
    assert decide(ranks, None) == KeepWaiting()


def test_ranks_in_different_calls_may_wait_for_one_that_computes() -> None:
    assert decide(views(waits(9.0), waits(9.0, "recv"), COMPUTES), None) == KeepWaiting()


# ---------------------------------------------------------------------------- the person's limits

LIMITS = Limits(communication_seconds=60.0, computation_seconds=300.0)


def test_who_computes_longer_than_allowed_is_named() -> None:
    slow = COMPUTES.located(call="", group="", number=0, waiting_seconds=0.0, line=7, code="sleep()")
    assert decide(views(waits(300.0, line=3), slow), None, LIMITS) == KeepWaiting()
    assert decide(views(waits(300.5, line=3), slow), None, LIMITS) == ReleaseNow(
        "rank 0 waits in barrier(), line 3 for longer than the 300 s that set_timeout allows (computation), while "
        "rank 1 computes, line 7; where that is a long step, allow more, by master.set_timeout(computation=...)"
    )


def test_where_nobody_waits_there_is_no_limit() -> None:
    assert decide(views(COMPUTES, COMPUTES), None, Limits(0.001, 0.001)) == KeepWaiting()


def test_all_that_wait_in_the_same_call_are_released_after_the_communication_limit() -> None:
    assert decide(views(waits(60.0), waits(90.0)), None, LIMITS) == KeepWaiting()
    decision = decide(views(waits(60.5), waits(90.0)), None, LIMITS)
    assert isinstance(decision, ReleaseNow)
    assert decision.cause.startswith("all ranks wait for longer than the 60 s that set_timeout allows")
    assert "by parallel.timeout or master.set_timeout(communication=...)" in decision.cause


def test_a_computing_rank_is_not_held_to_the_communication_limit() -> None:
    assert decide(views(waits(200.0), COMPUTES), None, LIMITS) == KeepWaiting()


# ------------------------------------------------------------------------------- after a release


def test_after_the_deadline_those_inside_are_given_up() -> None:
    ranks = views(COMPUTES, DONE, waits(9.0), DIED, RAISED)
    assert decide(ranks, DEADLINE_SECONDS + 0.01) == GiveUp((0, 2))


@pytest.mark.parametrize("seconds", [0.0, DEADLINE_SECONDS])
def test_until_the_deadline_nothing_is_released_twice(seconds: float) -> None:
    assert decide(views(COMPUTES, RAISED, waits(9.0)), seconds) == KeepWaiting()


def test_nobody_is_given_up_when_all_are_out() -> None:
    assert decide(views(DONE, DIED, RAISED), DEADLINE_SECONDS + 100) == KeepWaiting()


def test_every_release_has_a_positive_cause() -> None:
    """Whatever is known of three ranks: a release needs one that failed, ended, or waits where others do not."""
    kinds = [COMPUTES, DONE, ABSENT, DIED, RAISED, waits(9.0), waits(9.0, "recv")]
    for ranks in itertools.product(kinds, repeat=3):
        decision = decide(views(*ranks), None)
        running = [view for view in ranks if view.phase is Phase.RUNNING]
        failed = any(view in (DIED, RAISED) for view in ranks)
        in_vain = all(view.call for view in running) and any(view in (DONE, ABSENT) for view in ranks)
        apart = len({view.call for view in running}) > 1 and all(view.call for view in running)
        expected = bool(running) and (failed or in_vain or apart)
        assert isinstance(decision, ReleaseNow) == expected, ranks


# ------------------------------------------------------------------------------------- the table


def test_the_table_says_of_each_rank_what_it_does() -> None:
    located = COMPUTES.located(
        call="barrier()", group="default 2", number=3, waiting_seconds=3.4, line=5, code="dist.barrier()"
    )
    ranks = views(located, COMPUTES, DONE, RAISED, DIED, ABSENT)
    assert waiting_table(ranks) == [
        (0, "waits in barrier() for 3 s", "line 5: dist.barrier()"),
        (1, "computes", ""),
        (2, "has finished", ""),
        (3, "raised ValueError", ""),
        (4, "died", ""),
        (5, "does not run this cell", ""),
    ]


def test_what_was_told_before_the_end_is_old_news() -> None:
    """The end of rank 0 may be what rank 1 waited for: only what it tells afterwards counts."""
    assert decide(views(DONE, waits(9.0, told_after_end_seconds=0.3)), None) == KeepWaiting()


def test_a_stopped_process_is_a_cause_when_another_rank_waits() -> None:
    long, short = RankView(stopped_seconds=STOPPED_SECONDS + 0.1), RankView(stopped_seconds=STOPPED_SECONDS)
    decision = decide(views(waits(0.2), long), None)
    assert isinstance(decision, ReleaseNow)
    assert "the process of rank 1 is stopped (SIGSTOP), for 1.1 s" in decision.cause
    assert decide(views(waits(0.2), short), None) == KeepWaiting()
    assert decide(views(COMPUTES, long), None) == KeepWaiting()
    assert decide(views(replace(waits(0.2), stopped_seconds=9.0), COMPUTES), None) == KeepWaiting()
