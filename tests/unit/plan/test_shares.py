"""How a batch is shared out, against `numpy.array_split`."""

from __future__ import annotations

from itertools import pairwise

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
