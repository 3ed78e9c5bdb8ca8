"""Whether two records of the same steps are the same training, up to rounding.

    parallel ── difference ── single device ── rounding ── single device in float64

The difference of a gradient or parameter is the largest of its values' differences, relative to the largest of its
values; one whose values are all small beside the others' is compared at a thousandth of theirs, as rounding is. What
single-device training in float32 differs from its float64 self is what rounding does to this cell; the sums of the
parallel run are in another order and so differ by about as much: `ROUNDING_FACTOR` times that is allowed. Where float64
cannot be had, the bound of summing n values in any order is used, growing with the steps (Higham, "Accuracy and
Stability of Numerical Algorithms", 2nd ed., section 4.2).

Pure arithmetic on records; does not know how they came about.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openclaw_nb.engine.verify.records import Step

ROUNDING_FACTOR = 20.0
_SMALL = 1e-3
_FLOOR_UNITS = 16.0
# More than this, in roots of the unit in the last place, is no rounding: the two runs did not compute the same.
_MOST = {"loss": 3.0, "gradient": 3.0, "state": 30.0}
# A gradient that is this small in float64 is zero, as of a bias before a BatchNorm: in float32 it is all noise.
_ZERO = 1e-10


@dataclass(frozen=True)
class Difference:
    """The largest difference of one kind at one step, and whose it is."""

    size: float
    name: str


def certificate(
    parallel: Sequence[Step],
    single: Sequence[Step],
    exact: Sequence[Step] | None,
    *,
    dtype: torch.dtype,
    num_samples: int,
    with_loss: bool,
) -> dict[str, Any]:
    """Compare the steps of a parallel run with those of single-device training.

    Parameters
    ----------
    parallel, single : sequence of Step
        The same number of steps of each.
    exact : sequence of Step or None
        The single-device ones in float64.
    dtype : torch.dtype
        What the model computes in.
    num_samples : int
        Samples that a gradient is the sum of.
    with_loss : bool
        Whether losses are comparable.

    Returns
    -------
    dict
        ``rows``, a dictionary a step with ``loss``, ``gradient``, ``state`` (differences), whose they are, and the
        tolerances; ``parted``, the first row and kind that is beyond its tolerance, or None; ``reason`` of the
        tolerance, in words.
    """
    unit = torch.finfo(dtype).eps
    rows = []
    idle = set() if exact is None else _without_influence(exact)
    parallel, single = _without(idle, parallel), _without(idle, single)
    exact = None if exact is None else _without(idle, exact)
    for number, (mine, theirs) in enumerate(zip(parallel, single, strict=True), start=1):
        rounding = None if exact is None else _differences(theirs, exact[number - 1], with_loss)
        limits = _limits(rounding, unit, num_samples, number)
        found = _differences(mine, theirs, with_loss)
        rows.append(
            {"step": number, "limits": limits}
            | {kind: each.size for kind, each in found.items()}
            | {f"{kind}_name": each.name for kind, each in found.items()}
        )
    return {"rows": rows, "parted": _first_parted(rows), "reason": _reason(exact, dtype, num_samples)}


def _without_influence(steps: Sequence[Step]) -> set[str]:
    """Return the parameters whose gradient is zero in all steps."""
    largest = max((_size(g) for step in steps for g in step.gradients.values()), default=0.0)
    names = {name for step in steps for name in step.gradients}
    return {
        n for n in names if all(_size(s.gradients[n]) < _ZERO * largest for s in steps if n in s.gradients)
    }


def _without(names: set[str], steps: Sequence[Step]) -> list[Step]:
    return [
        Step(
            step.loss,
            {n: g for n, g in step.gradients.items() if n not in names},
            {n: t for n, t in step.state.items() if n not in names},
        )
        for step in steps
    ]


def _differences(one: Step, other: Step, with_loss: bool) -> dict[str, Difference]:
    loss = abs(one.loss - other.loss) / max(abs(other.loss), 1e-12) if with_loss else 0.0
    return {
        "loss": Difference(loss if math.isfinite(loss) or _same(one.loss, other.loss) else math.inf, "loss"),
        "gradient": _largest(one.gradients, other.gradients),
        "state": _largest(one.state, other.state),
    }


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def _largest(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Difference:
    """Return the largest difference; of a tensor that only one side has it is infinite."""
    for name in [*(one.keys() ^ other.keys())]:
        return Difference(math.inf, name)
    sizes = {name: _size(tensor) for name, tensor in other.items()}
    least = _SMALL * max(sizes.values(), default=0.0)
    found = Difference(0.0, "")
    for name, tensor in other.items():
        scale = max(sizes[name], least)
        apart = _size(one[name] - tensor)
        size = apart / scale if scale else (math.inf if apart else 0.0)
        if not size <= found.size:  # also for NaN
            found = Difference(math.inf if math.isnan(size) else size, name)
    return found


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _limits(
    rounding: Mapping[str, Difference] | None, unit: float, num_samples: int, step: int
) -> dict[str, float]:
    least = _FLOOR_UNITS * unit * math.sqrt(step)
    if rounding is not None and all(math.isfinite(each.size) for each in rounding.values()):
        # A loss or a state may round better by chance than what it is made of.
        worst = max(each.size for each in rounding.values())
        bound = max(ROUNDING_FACTOR * worst, least)
    else:
        bound = _FLOOR_UNITS * unit * math.sqrt(max(1, num_samples)) * step
    return {kind: min(bound, most * math.sqrt(unit)) for kind, most in _MOST.items()}


def _first_parted(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    for row in rows:
        for kind in ("loss", "gradient", "state"):
            if row[kind] > row["limits"][kind]:
                return {
                    "step": row["step"],
                    "kind": kind,
                    "name": row[f"{kind}_name"],
                    "difference": row[kind],
                    "limit": row["limits"][kind],
                }
    return None


def _reason(exact: Sequence[Step] | None, dtype: torch.dtype, num_samples: int) -> str:
    kind = str(dtype).removeprefix("torch.")
    if exact is not None:
        return (
            f"{ROUNDING_FACTOR:.0f} times what single-device training in {kind} differs from itself in float64, "
            f"at least {_FLOOR_UNITS:.0f} units in the last place, and never what no rounding explains"
        )
    return (
        f"{_FLOOR_UNITS:.0f} units in the last place of {kind}, times the root of {num_samples} summed samples, "
        "times the step"
    )
