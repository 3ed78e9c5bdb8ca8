"""Which elements each rank has after a change of shape, against the elements themselves."""

from __future__ import annotations

import itertools

import pytest
import torch

from openclaw_nb.engine.tensor.layout import Layout, share_out, view


def part_of(whole: torch.Tensor, layout: Layout, rank: int) -> list[int]:
    """Return the elements of a rank, taken block by block."""
    blocks = whole.chunk(layout.blocks, layout.dim)
    low, high = layout.bounds[rank]
    return (
        torch.cat([block.narrow(layout.dim, low, high - low) for block in blocks], layout.dim)
        .flatten()
        .tolist()
    )


CASES = [
    ((2, 12), (2, 3, 4), 4, 1),  # features to heads
    ((2, 3, 4), (2, 12), 1, 1),  # and back
    ((2, 5, 12), (10, 12), 1, 1),  # batch dims put together
    ((10, 12), (2, 5, 1, 12), 1, 1),
    ((2, 24), (2, 2, 3, 4), 4, 2),  # keys and values to two and heads
    ((2, 24), (2, 1, 24), 1, 2),
    ((12,), (12, 1), 1, 1),
]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("old", "new", "unit", "blocks"), CASES)
def test_a_view_keeps_each_ranks_elements(
    old: tuple[int, ...], new: tuple[int, ...], unit: int, blocks: int, num_ranks: int
) -> None:
    dim = 1 if len(old) > 1 and old != (2, 5, 12) else len(old) - 1
    layout = share_out(dim, old[dim], num_ranks, unit, blocks)
    assert layout is not None
    after = view(layout, old, new)
    assert after is not None
    numbers = torch.arange(torch.Size(old).numel())
    for rank in range(num_ranks):
        before, now = part_of(numbers.view(old), layout, rank), part_of(numbers.view(new), after, rank)
        assert before == now
        assert after.extent(rank) * numbers.numel() // new[after.dim] == len(now)


@pytest.mark.parametrize(
    ("old", "new", "dim"),
    [((2, 12), (2, 4, 3), 1), ((3, 4), (12,), 1), ((2, 12), (24,), 1), ((4, 6), (3, 8), 1)],
    ids=["heads do not fit", "features go inside", "the batch is outside", "mixed"],
)
def test_what_is_no_range_any_more(old: tuple[int, ...], new: tuple[int, ...], dim: int) -> None:
    layout = share_out(dim, old[dim], 2, unit=1 if old[dim] != 12 else 4)
    assert layout is not None
    assert view(layout, old, new) is None


def test_units_stay_together_and_nobody_gets_nothing() -> None:
    for units, num_ranks in itertools.product(range(1, 7), range(1, 5)):
        layout = share_out(0, units * 4, num_ranks, 4)
        if units < num_ranks:
            assert layout is None
            continue
        assert layout is not None
        assert layout.size == units * 4
        assert all(low % 4 == 0 and high > low for low, high in layout.bounds)
    assert share_out(0, 10, 2, unit=4) is None
    assert share_out(0, 10, 2, blocks=3) is None
