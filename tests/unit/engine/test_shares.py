"""How ranks agree on their shares: all take what all have told, at the same batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openclaw_nb.engine.steps.pace import Pace
from openclaw_nb.engine.steps.shares import Shares
from openclaw_nb.plan.balance import WINDOW
from openclaw_nb.protocol.messages import SetPace


class Told:
    """Ranks of which the others have told something already."""

    rank = 0

    def __init__(self, *others: float) -> None:
        self.others = list(others)
        self.size = 1 + len(others)

    def gather(self, vector: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[float(vector)], *([other] for other in self.others)], dtype=vector.dtype)


def shares_of(ranks: Any, **pace: Any) -> Shares:
    shares = Shares(ranks, Pace(**pace))
    shares.renew()
    return shares


def sizes(shares: Shares, num_samples: int = 100) -> list[int]:
    return [high - low for low, high in shares.bounds(num_samples)]


def test_a_cell_begins_with_the_speeds_that_are_known() -> None:
    assert sizes(shares_of(Told(0.0))) == [50, 50]
    assert sizes(shares_of(Told(100.0), speed=300.0)) == [75, 25]


def test_what_is_agreed_on_counts_when_it_is_taken_up() -> None:
    shares = shares_of(Told(0.0))
    shares.agree([300.0, 100.0], is_held=False)
    assert sizes(shares) == [50, 50]
    shares.take_up()
    assert (sizes(shares), shares.turn) == ([75, 25], 1)
    shares.agree([301.0, 100.0], is_held=False)
    shares.take_up()
    assert (sizes(shares), shares.turn) == ([75, 25], 1)


def test_while_another_loader_is_open_on_some_rank_nothing_changes() -> None:
    shares = shares_of(Told(0.0))
    shares.agree([300.0, 100.0], is_held=False)
    shares.agree([300.0, 100.0], is_held=True)  # before it was taken up
    shares.take_up()
    assert (sizes(shares), shares.turn) == ([50, 50], 0)
    shares.num_open = 1
    assert not shares.is_held
    shares.num_open = 2
    assert shares.is_held


def test_another_group_begins_with_what_each_of_its_ranks_tells() -> None:
    ranks = Told(100.0)
    shares = shares_of(ranks, speed=300.0)
    ranks.others, ranks.size = [100.0, 0.0], 3  # the newcomer counts as the mean
    shares.renew()
    assert sizes(shares, 120) == [60, 20, 40]
    ranks.others, ranks.size = [], 1
    shares.renew()
    assert sizes(shares) == [100]


def test_a_rank_measures_by_itself_and_tells_at_the_end_of_each_window() -> None:
    shares = shares_of(Told(0.0), speed=5.0, is_continuous=True)
    for number in range(WINDOW):
        assert shares.tell() == 5.0, number
        shares.count(10)
        shares.count(6)
        shares.step(0.5)
    assert shares.tell() == 32.0
    for _ in range(WINDOW):
        shares.count(8)
        shares.step(0.5)
    assert shares.tell() == 16.0


def test_without_the_continuous_mode_the_speed_is_the_one_that_was_told() -> None:
    shares = shares_of(Told(0.0), speed=5.0)
    for _ in range(2 * WINDOW):
        shares.count(8)
        shares.step(0.5)
    assert shares.tell() == 5.0


def test_samples_of_a_batch_that_became_void_do_not_count() -> None:
    shares = shares_of(Told(0.0), is_continuous=True)
    shares.count(1000)
    shares.renew()
    for _ in range(WINDOW):
        shares.count(8)
        shares.step(0.5)
    assert shares.tell() == 16.0


@pytest.mark.parametrize(("worker", "expected"), [(1, (33.5, 3.0)), (2, (0.0, 1.0))])
def test_a_worker_takes_from_a_command_what_is_its_own(worker: int, expected: tuple[float, float]) -> None:
    pace = Pace()
    pace.set(None, worker)
    assert pace == Pace()
    pace.set(SetPace(run_id="a", speeds={"1": 33.5}, continuous=True, slowdowns={"1": 3.0}), worker)
    assert (pace.speed, pace.slowdown, pace.is_continuous) == (*expected, True)
