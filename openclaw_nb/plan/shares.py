"""How a batch is shared out: pure arithmetic."""

from __future__ import annotations

from itertools import pairwise


def share_bounds(num_samples: int, num_ranks: int) -> list[tuple[int, int]]:
    """Return the half-open range of samples of each rank.

    Sizes differ by at most one sample; the first ranks get the larger shares, as `numpy.array_split` does.

    Examples
    --------
    >>> share_bounds(5, 2)
    [(0, 3), (3, 5)]
    """
    size, extra = divmod(num_samples, num_ranks)
    starts = [rank * size + min(rank, extra) for rank in range(num_ranks + 1)]
    return list(pairwise(starts))
