"""How a batch is shared out: equally, against `numpy.array_split`; by weights, against exact fractions."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import floor

import numpy as np
import pytest

from openclaw_nb.plan.shares import share_bounds

SIZES = [0, 1, 2, 3, 5, 7, 8, 31, 32, 33, 100, 1_000_003]


@pytest.mark.parametrize("num_ranks", range(1, 10))
@pytest.mark.parametrize("num_samples", SIZES)
def test_shares_are_those_of_array_split(num_samples: int, num_ranks: int) -> None:
    expected = [len(part) for part in np.array_split(np.empty(num_samples), num_ranks)]
    assert [high - low for low, high in share_bounds(num_samples, num_ranks)] == expected


@pytest.mark.parametrize("num_ranks", range(1, 10))
@pytest.mark.parametrize("num_samples", SIZES)
def test_shares_lie_behind_each_other_and_leave_nothing_out(num_samples: int, num_ranks: int) -> None:
    bounds = share_bounds(num_samples, num_ranks)
    assert len(bounds) == num_ranks
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_samples
    assert all(end == start for (_, end), (start, _) in pairwise(bounds))
    sizes = [high - low for low, high in bounds]
    assert sum(sizes) == num_samples
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


WEIGHTS = [
    [3, 1],
    [1, 3],
    [0.75, 0.25],
    [5, 3, 2],
    [1, 1, 1e-9],
    [0.0, 1.0],
    [1e-9, 1e9],
    [0.1, 0.2, 0.3, 0.4],
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("num_samples", SIZES)
def test_weighted_sizes_are_the_exact_ones_rounded_and_nobody_gets_nothing(
    num_samples: int, weights: list[float]
) -> None:
    bounds = share_bounds(num_samples, len(weights), weights)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_samples
    assert all(end == start for (_, end), (start, _) in pairwise(bounds))
    sizes = [high - low for low, high in bounds]
    exact = [Fraction(num_samples) * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    enough = num_samples >= len(weights)
    assert min(sizes) >= enough
    lifted = sum(floor(size) == 0 for size in exact)  # each may have been given one sample of another rank
    for size, right in zip(sizes, exact, strict=True):
        assert right - 1 - lifted * enough <= size <= right + 1
    by_weight = [size for _, size in sorted(zip(weights, sizes, strict=True), key=lambda pair: pair[0])]
    if len(set(weights)) == len(weights):
        assert by_weight == sorted(by_weight)


@pytest.mark.parametrize("num_ranks", range(1, 10))
@pytest.mark.parametrize("num_samples", SIZES)
@pytest.mark.parametrize("weight", [1.0, 1 / 3, 1e-3])
def test_equal_weights_are_none(num_samples: int, num_ranks: int, weight: float) -> None:
    expected = share_bounds(num_samples, num_ranks)
    assert share_bounds(num_samples, num_ranks, [weight] * num_ranks) == expected
