"""How a batch is shared out: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

# Whole numbers in place of fractions: every rank must come to the same sizes, whatever its floating point does.
_UNITS = 1 << 40


def share_bounds(
    num_samples: int, num_ranks: int, weights: Sequence[float] | None = None
) -> list[tuple[int, int]]:
    """Return the half-open range of samples of each rank.

    Without weights, or with equal ones, sizes differ by at most one sample; the first ranks get the larger shares, as
    `numpy.array_split` does. Else sizes follow the weights, by the method of the largest remainder: each is the exact
    size rounded up or down, but for ranks whose part is so small that they would get nothing. They get one sample,
    where there are enough for all.

    Parameters
    ----------
    num_samples, num_ranks : int
        What is shared out, and among how many.
    weights : sequence of float, optional
        One a rank, not negative, of any sum but 0.

    Examples
    --------
    >>> share_bounds(5, 2)
    [(0, 3), (3, 5)]
    >>> share_bounds(8, 2, [3.0, 1.0])
    [(0, 6), (6, 8)]
    """
    if weights is None or min(weights) == max(weights):
        size, extra = divmod(num_samples, num_ranks)
        sizes = [size + (rank < extra) for rank in range(num_ranks)]
    else:
        sizes = _in_proportion(num_samples, weights)
    return list(pairwise(accumulate(sizes, initial=0)))


def _in_proportion(num_samples: int, weights: Sequence[float]) -> list[int]:
    total = sum(weights)
    units = [round(weight / total * _UNITS) for weight in weights]
    parts = [divmod(num_samples * unit, sum(units)) for unit in units]
    sizes = [size for size, _ in parts]
    by_remainder = sorted(range(len(parts)), key=lambda rank: (-parts[rank][1], rank))
    for rank in by_remainder[: num_samples - sum(sizes)]:
        sizes[rank] += 1
    while num_samples >= len(sizes) and 0 in sizes:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] += 1
    return sizes
