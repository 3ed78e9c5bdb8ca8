"""How a tensor is shared out along one of its dims: which elements each rank has, before and after a change of shape.

    blocks = 1    | rank 0 | rank 1 |                     blocks = 2    | rank 0 | rank 1 | rank 0 | rank 1 |

Several blocks are what a projection to queries, keys and values at once needs: each block is shared out by itself.

Pure arithmetic on shapes; knows no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from openclaw_nb.plan.shares import share_bounds

Shape = Sequence[int]


@dataclass(frozen=True)
class Layout:
    """How one dim is shared out.

    Attributes
    ----------
    dim : int
        Which; not negative.
    bounds : tuple of (int, int)
        The half-open range of each rank in a block, in elements of that dim.
    blocks : int
        How many blocks the dim has, each shared out alike.
    scale : int
        How many features of the layer that the tensor comes from one element stands for: a head stands for its size.
    """

    dim: int
    bounds: tuple[tuple[int, int], ...]
    blocks: int = 1
    scale: int = 1

    @property
    def block(self) -> int:
        """Elements of one block."""
        return self.bounds[-1][1]

    @property
    def size(self) -> int:
        """Elements of the dim, of all ranks."""
        return self.blocks * self.block

    def extent(self, rank: int) -> int:
        """Return how many elements a rank has."""
        low, high = self.bounds[rank]
        return self.blocks * (high - low)

    def moved(self, dim: int) -> Layout:
        """Return the same along another dim."""
        return replace(self, dim=dim)

    def shares(self, other: Layout) -> bool:
        """Whether elements lie on the same ranks, whatever the dim."""
        return (self.bounds, self.blocks) == (other.bounds, other.blocks)


def share_out(dim: int, size: int, num_ranks: int, unit: int = 1, blocks: int = 1) -> Layout | None:
    """Share a dim out in whole units; None when some rank would get nothing.

    Examples
    --------
    >>> share_out(0, 12, 2, unit=4).bounds
    ((0, 8), (8, 12))
    """
    per_block, rest = divmod(size, blocks)
    units, left = divmod(per_block, unit)
    if rest or left or units < num_ranks:
        return None
    bounds = tuple((low * unit, high * unit) for low, high in share_bounds(units, num_ranks))
    return Layout(dim, bounds, blocks)


def view(layout: Layout, old: Shape, new: Shape, guessed_blocks: Sequence[int] = ()) -> Layout | None:
    """Return how a tensor of shape ``old`` is shared out when it is viewed as ``new``, of as many elements.

    Parameters
    ----------
    layout : Layout
        How it is before.
    old, new : sequence of int
        The whole tensor's shapes.
    guessed_blocks : sequence of int
        Numbers of blocks that a dim of one block may turn out to have, when it is viewed as so many times at least two
        dims.

    Returns
    -------
    Layout or None
        None when a rank's elements are no range of any new dim.
    """
    for before, after in _factor_groups(old, new):
        if layout.dim in before:
            inside = [old[i] for i in before]
            place = layout.dim - before[0]
            if math.prod(inside[:place]) != 1 or not after:
                return None
            return _spread(layout, math.prod(inside[place + 1 :]), after, new, guessed_blocks)
    return None


def _spread(
    layout: Layout, inner: int, after: Sequence[int], new: Shape, guessed_blocks: Sequence[int]
) -> Layout | None:
    """Lay the split dim, each of whose elements holds ``inner`` values, over the new dims ``after``."""
    place = next((i for i in after if new[i] != 1), after[-1])
    rest = math.prod(new[i] for i in after if i > place)
    if layout.blocks > 1 and rest == inner:
        return layout.moved(place)
    is_guess = layout.blocks == 1 and new[place] in guessed_blocks and after[-1] - place >= 2
    if layout.blocks > 1 or is_guess:
        blocks = new[place] if is_guess else layout.blocks
        if new[place] != blocks or place == after[-1]:
            return None
        place += 1
        rest = math.prod(new[i] for i in after if i > place)
        if is_guess:
            bounds = tuple((low // blocks, high // blocks) for low, high in layout.bounds)
            layout = replace(layout, bounds=bounds)
    edges = [edge * inner for bounds in layout.bounds for edge in bounds]
    if any(edge % rest for edge in edges):
        return None
    bounds = tuple((low * inner // rest, high * inner // rest) for low, high in layout.bounds)
    return Layout(place, bounds, 1, max(1, layout.scale * rest // inner))


def _factor_groups(old: Shape, new: Shape) -> Iterator[tuple[range, range]]:
    """Part two shapes into the smallest runs of dims of equal product."""
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = _at(old, i), _at(new, j)
        start_i, start_j = i, j
        i, j = i + 1, j + 1
        while a != b and (i < len(old) or j < len(new)):
            if a < b and i < len(old):
                a *= old[i]
                i += 1
            elif j < len(new):
                b *= new[j]
                j += 1
            else:
                return
        yield range(start_i, min(i, len(old))), range(start_j, min(j, len(new)))


def _at(shape: Shape, place: int) -> int:
    return shape[place] if place < len(shape) else 1
