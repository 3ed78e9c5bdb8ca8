"""Whether a model that is shared out gives what it gave as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.loss.record import map_tensors

# Sums in another order differ by some units in the last place, and more after many layers; a layer that is shared out
# wrongly differs in the first digits.
_UNITS = 2**11
_MOST = 0.05


def check_same(output: Any, expected: Any, ranks: Ranks, dtype: torch.dtype = torch.float32) -> None:
    """Refuse to go on when a model's outputs are not those that it had as a whole. All ranks call this.

    Parameters
    ----------
    output, expected
        What it gives now, and what it gave.
    ranks : Ranks
        All of the cell.
    dtype : torch.dtype
        What it computes in, which may be coarser than what it gives.

    Raises
    ------
    RefusedError
        On all ranks, if they differ on one.
    """
    worst, allowed = _difference(output, expected, dtype)
    rows = ranks.gather(torch.tensor([worst, float(worst > allowed or worst != worst)], dtype=torch.float64))
    if rows[:, 1].any():
        raise RefusedError(
            f"Shared out so, the model gives another output than on a single device: off by {rows[:, 0].max():.2g} of "
            f"its largest value, where rounding explains {allowed:.2g}. No step was made. Does it draw random numbers "
            "by itself, or does a layer keep what an earlier call has left? Give another plan, or use data_parallel."
        )


def _difference(output: Any, expected: Any, dtype: torch.dtype) -> tuple[float, float]:
    """Return the largest difference by the largest value, and what is allowed."""
    mine, theirs = _floats(output), _floats(expected)
    if [each.shape for each in mine] != [each.shape for each in theirs]:
        return float("inf"), 0.0
    worst, allowed = 0.0, 0.0
    for one, other in zip(mine, theirs, strict=True):
        allowed = max(
            allowed, min(_UNITS * max(torch.finfo(each).eps for each in (other.dtype, dtype)), _MOST)
        )
        finite = torch.isfinite(other)
        if not torch.equal(torch.isfinite(one), finite):
            return float("inf"), allowed
        if finite.any():
            scale = float(other[finite].abs().max()) or 1.0
            worst = max(worst, float((one[finite] - other[finite]).abs().max()) / scale)
    return worst, allowed


def _floats(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            found.append(tensor.detach())
        return tensor

    map_tensors(note, tree)
    return found
