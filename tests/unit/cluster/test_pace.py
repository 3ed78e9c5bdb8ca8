"""Speeds and shares on the notebook's side, from events as workers send them."""

from __future__ import annotations

from typing import Any

import pytest

from openclaw_nb.cluster.pace import Paces
from openclaw_nb.core.errors import UsageError
from openclaw_nb.protocol.messages import AtHead, Measured, SetPace

RANKS = {0: 4, 1: 7}


def measured(worker: int, seq: int, samples: int, *, run_id: str = "a", **seconds: float) -> Measured:
    return Measured(
        worker=worker, run_id=run_id, seq=seq, at=0.0, steps=1, samples=samples, loss=None, seconds=seconds
    )


def three_to_one() -> Paces:
    paces = Paces()
    paces.take(AtHead(worker=4, run_id="a", epoch=1, lets_in=True))
    for worker, seconds in ((4, 0.1), (7, 0.3)):
        paces.take(measured(worker, 1, 30, compute=50.0))  # the first step is no measure
        paces.take(measured(worker, 2, 30, data=seconds / 2, compute=seconds / 2, wait=9.0, transfer=9.0))
    return paces


def test_shares_follow_the_work_and_not_the_waiting() -> None:
    fast, slow = three_to_one().balance(RANKS, continuous=False)
    assert (fast.worker, fast.rank, slow.worker, slow.rank) == ("worker-4", 0, "worker-7", 1)
    assert (fast.samples_per_second, slow.samples_per_second) == pytest.approx((300.0, 100.0))
    assert (fast.share, slow.share) == pytest.approx((0.75, 0.25))


def test_the_table_displays_well() -> None:
    table = three_to_one().balance({**RANKS, 2: 9}, continuous=True)
    assert repr(table).splitlines() == [
        "Shares of each batch, by measured speed; they follow the speeds while cells run",
        "  rank  worker    samples/s  share",
        "  0     worker-4  300        50.0%",
        "  1     worker-7  100        16.7%",
        "  2     worker-9  -          33.3%",
    ]
    assert "<td" in table._repr_html_()


def test_before_anything_was_measured_it_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="run a data-parallel cell first"):
        Paces().balance(RANKS, continuous=False)
    shares = Paces().balance(RANKS, continuous=True)
    assert [(each.samples_per_second, each.share) for each in shares] == [(None, 0.5), (None, 0.5)]


def test_another_run_is_measured_anew() -> None:
    paces = three_to_one()
    for worker, samples in ((4, 10), (7, 30)):
        paces.take(measured(worker, 1, samples, run_id="b", compute=0.1))
    fast, slow = paces.balance(RANKS, continuous=False)
    assert (fast.share, slow.share) == pytest.approx((0.25, 0.75))


def test_a_cell_gets_what_was_balanced() -> None:
    paces = three_to_one()
    assert paces.command("b", shared=True) is None
    paces.balance(RANKS, continuous=False)
    command = paces.command("b", shared=True)
    assert command is not None
    assert command.speeds == pytest.approx({"4": 300.0, "7": 100.0})
    assert (command.run_id, command.continuous, command.slowdowns) == ("b", False, {})
    assert paces.command("b", shared=False) is None
    paces.share_equally()
    assert paces.command("b", shared=True) is None


def test_continuously_a_cell_begins_with_the_newest_speeds() -> None:
    paces = three_to_one()
    paces.balance(RANKS, continuous=True)
    for worker, samples in ((4, 10), (7, 30)):
        paces.take(measured(worker, 1, samples, run_id="b", compute=0.1))
    assert paces.command("c", shared=True) == SetPace(
        run_id="c", speeds=pytest.approx({"4": 100.0, "7": 300.0}), continuous=True
    )


def test_what_would_hardly_change_is_left_and_sent_as_it_was() -> None:
    paces = three_to_one()
    before = paces.balance(RANKS, continuous=False)
    for worker, samples in ((4, 30), (7, 10)):
        paces.take(measured(worker, 1, samples, run_id="b", compute=0.1 if worker == 4 else 0.102))
    after = paces.balance(RANKS, continuous=False)
    assert [each.share for each in after] == [each.share for each in before]
    command = paces.command("c", shared=True)
    assert command is not None
    assert command.speeds == pytest.approx({"4": 300.0, "7": 100.0})


def test_a_slow_down_is_sent_also_where_nothing_is_shared_and_can_end() -> None:
    paces = Paces()
    paces.slow_down(7, 3)
    assert paces.command("a", shared=False) == SetPace(run_id="a", slowdowns={"7": 3.0})
    paces.slow_down(7, 1)
    assert paces.command("a", shared=False) is None


@pytest.mark.parametrize("factor", [0.5, 0, -1, True, "3", None, float("nan"), float("inf")])
def test_bad_factors_are_refused(factor: Any) -> None:
    with pytest.raises(UsageError, match="factor="):
        Paces().slow_down(0, factor)
