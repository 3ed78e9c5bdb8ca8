"""Shares by speed: fed with what ranks of known speed would measure, held against the split that is right for them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from openclaw_nb.plan.balance import BAND, WINDOW, SpeedMeter, equal_shares, next_shares, shares_of
from openclaw_nb.plan.shares import share_bounds


class Rank:
    """A rank whose step takes ``fixed`` seconds and ``per_sample`` more for each sample."""

    def __init__(self, per_sample: float, fixed: float = 0.0) -> None:
        self.per_sample, self.fixed = per_sample, fixed

    def seconds(self, num_samples: int) -> float:
        return self.fixed + self.per_sample * num_samples


def rounds(ranks: Sequence[Rank], batch: int, count: int, noise: float = 0.0) -> list[tuple[float, ...]]:
    """Balance again and again, as a continuous cell does; return the shares after each time."""
    dice = random.Random(3)
    shares = equal_shares(len(ranks))
    found = []
    for _ in range(count):
        meters = [SpeedMeter() for _ in ranks]
        bounds = share_bounds(batch, len(ranks), shares)
        for _ in range(WINDOW):
            for rank, meter, (low, high) in zip(ranks, meters, bounds, strict=True):
                meter.take(high - low, rank.seconds(high - low) * dice.uniform(1 - noise, 1 + noise))
        shares = next_shares(shares, [meter.speed for meter in meters])
        found.append(shares)
    return found


def step_seconds(ranks: Sequence[Rank], batch: int, shares: Sequence[float]) -> list[float]:
    bounds = share_bounds(batch, len(ranks), shares)
    return [rank.seconds(high - low) for rank, (low, high) in zip(ranks, bounds, strict=True)]


def test_without_fixed_costs_shares_are_right_at_once_and_stay() -> None:
    found = rounds([Rank(1e-3), Rank(3e-3)], 64, 4)
    assert found[0] == pytest.approx((0.75, 0.25))
    assert set(found) == {found[0]}


@pytest.mark.parametrize("fixed", [(0.01, 0.01), (0.05, 0.05), (0.0, 0.02), (0.02, 0.0)])
def test_with_fixed_costs_all_work_equally_long_in_the_end(fixed: tuple[float, float]) -> None:
    ranks = [Rank(1e-3, fixed[0]), Rank(3e-3, fixed[1])]
    found = rounds(ranks, 1024, 12)
    first, second = step_seconds(ranks, 1024, found[-1])
    assert first == pytest.approx(second, rel=2 * BAND)
    parts = [shares[0] for shares in found]
    assert parts == sorted(parts) or parts == sorted(parts, reverse=True), "it never goes past what is right"


def test_noise_does_not_change_shares() -> None:
    equal = rounds([Rank(1e-3), Rank(1e-3), Rank(1e-3)], 96, 50, noise=0.05)
    assert set(equal) == {equal_shares(3)}


def test_a_median_step_is_not_moved_by_a_few_disturbed_ones() -> None:
    meter = SpeedMeter()
    for number in range(WINDOW):
        meter.take(8, 5.0 if number % 3 == 0 else 0.25)
    assert meter.speed == 32.0


def test_only_the_newest_measurements_count_and_no_samples_tell_nothing() -> None:
    meter = SpeedMeter()
    assert meter.speed == 0.0
    meter.take(0, 1.0)
    meter.take(1, 0.0)
    assert meter.speed == 0.0
    for seconds in [9.0] * WINDOW + [0.5] * WINDOW:
        meter.take(1, seconds)
    assert meter.speed == 2.0
    meter.clear()
    assert meter.speed == 0.0


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([300.0, 100.0], (0.75, 0.25)),
        ([300.0, 100.0, 0.0], (0.5, 1 / 6, 1 / 3)),
        ([0.0, 0.0], (0.5, 0.5)),
        ([7.0], (1.0,)),
    ],
    ids=["known", "a newcomer counts as the mean", "nobody is known", "alone"],
)
def test_shares_follow_speeds(speeds: list[float], expected: tuple[float, ...]) -> None:
    assert shares_of(speeds) == pytest.approx(expected)


@pytest.mark.parametrize(("second", "moves"), [(100.0, False), (107.0, False), (90.0, True), (110.0, True)])
def test_a_small_difference_is_left_as_it_is(second: float, moves: bool) -> None:
    shares = next_shares((0.5, 0.5), (100.0, second))
    assert (shares != (0.5, 0.5)) is moves
