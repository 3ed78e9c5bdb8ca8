"""Whether two records of the same steps are the same training, up to rounding.

    parallel ── difference ── single device ── rounding ── single device in float64

The difference of a gradient or parameter is the root mean square of its values' differences, relative to that of its
values; one whose values are all small beside the others' is compared at a thousandth of theirs, as rounding is. What
single-device training differs from its float64 self is what rounding does to this cell in its dtype; the sums of the
parallel run are in another order and so differ by about as much: `ROUNDING_FACTOR` times that is allowed, and no less
than a few units of the dtype. In 16 bits a value near a kink (ReLU, max-pooling) may fall to either side of it in one
run and not in the other, which a measurement can miss: there the root of a unit is the least.

Where rounding alone does so much that a fault could hide in it, nothing is compared from that step on. Where float64
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

ROUNDING_FACTOR = 8.0
_SMALL = 1e-3
_FLOOR_UNITS = 4.0
_SUM_UNITS = 16.0
# More than this, in roots of the unit in the last place, is no rounding: the two runs did not compute the same.
_MOST = {"loss": 3.0, "gradient": 3.0, "state": 30.0}
# Nor is, in any dtype, this part of a value: half a gradient, or twice of it, must show.
_MOST_OF_ALL = 1 / 3
_COARSE_UNIT = 1e-4
# A value of a gradient that is this small in float64 is zero.
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
        tolerance, in words; ``blurred``, why there are no more rows, or ""; ``no_exact``, why ``exact`` was not used.
    """
    limits = _Limits(dtype, num_samples)
    rows: list[dict[str, Any]] = []
    if exact is not None:
        idle = _without_influence(single, exact)
        parallel, single, exact = (_without(idle, steps) for steps in (parallel, single, exact))
    no_exact = ""
    if (
        exact
        and single
        and limits.too_much(_differences(single[0], exact[0], with_loss))
        and not limits.is_coarse
    ):
        exact, no_exact = None, "the run in float64 computes something else"
    for number, (mine, theirs) in enumerate(zip(parallel, single, strict=True), start=1):
        limits.take(None if exact is None else _differences(theirs, exact[number - 1], with_loss), number)
        if not _is_finite(theirs):
            limits.blurred = f"from step {number} on training is not finite on a single device either"
        if limits.blurred:
            break
        found = _differences(mine, theirs, with_loss)
        rows.append(
            {"step": number, "limits": limits.at(number)}
            | {kind: each.size for kind, each in found.items()}
            | {f"{kind}_name": each.name for kind, each in found.items()}
        )
    return {
        "rows": rows,
        "parted": _first_parted(rows),
        "reason": limits.reason,
        "blurred": limits.blurred,
        "no_exact": no_exact,
    }


def _without_influence(single: Sequence[Step], exact: Sequence[Step]) -> dict[str, Tensor]:
    """Say which values of which parameters have a gradient that is zero in float64 and noise otherwise, in all steps.

    Such as a bias before a BatchNorm, and of an attention's biases that of the keys. Where it is zero in all runs, as
    of an embedding's unused rows, there is no noise, and they are compared.
    """
    largest = max((_size(g) for step in exact for g in step.gradients.values()), default=0.0)
    idle: dict[str, Tensor] = {}
    noisy: dict[str, Tensor] = {}
    for mine, theirs in zip(single, exact, strict=False):
        for name in mine.gradients.keys() & theirs.gradients.keys():
            small = theirs.gradients[name].abs() < _ZERO * largest
            idle[name] = idle[name] & small if name in idle else small
            nonzero = mine.gradients[name] != 0
            noisy[name] = noisy[name] | nonzero if name in noisy else nonzero
    return {name: mask & noisy[name] for name, mask in idle.items() if bool((mask & noisy[name]).any())}


def _without(idle: Mapping[str, Tensor], steps: Sequence[Step]) -> list[Step]:
    """Return the steps with these values set to zero."""

    def cleared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: t.masked_fill(idle[name], 0.0) if name in idle else t for name, t in tensors.items()}

    return [Step(step.loss, cleared(step.gradients), cleared(step.state)) for step in steps]


def _differences(one: Step, other: Step, with_loss: bool) -> dict[str, Difference]:
    loss = abs(one.loss - other.loss) / max(abs(other.loss), 1e-12) if with_loss else 0.0
    return {
        "loss": Difference(loss if math.isfinite(loss) or _same(one.loss, other.loss) else math.inf, "loss"),
        "gradient": _largest(one.gradients, other.gradients),
        "state": _largest(one.state, other.state),
    }


def _is_finite(step: Step) -> bool:
    tensors = (*step.gradients.values(), *step.state.values())
    return math.isfinite(step.loss) and all(bool(tensor.isfinite().all()) for tensor in tensors)


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
        apart = _size(one[name].double() - tensor.double())
        size = apart / scale if scale else (math.inf if apart else 0.0)
        if not size <= found.size:  # also for NaN
            found = Difference(math.inf if math.isnan(size) else size, name)
    return found


def _size(tensor: Tensor) -> float:
    return (
        float(torch.linalg.vector_norm(tensor.double())) / math.sqrt(tensor.numel())
        if tensor.numel()
        else 0.0
    )


class _Limits:
    """What is allowed at each step.

    Parameters
    ----------
    dtype : torch.dtype
        What the model computes in.
    num_samples : int
        Samples that a gradient is the sum of.
    """

    def __init__(self, dtype: torch.dtype, num_samples: int) -> None:
        self._name = str(dtype).removeprefix("torch.")
        self._unit = torch.finfo(dtype).eps
        self._num_samples = num_samples
        self._worst: float | None = None
        self._most = {kind: min(most * math.sqrt(self._unit), _MOST_OF_ALL) for kind, most in _MOST.items()}
        self.blurred = ""

    def too_much(self, rounding: Mapping[str, Difference]) -> str:
        """Say what rounding changes so much that a fault could hide in it; "" when it is nothing."""
        for kind, each in rounding.items():
            if not each.size <= self._most[kind] / 2:
                return f"{_in_words(kind, each.name)} by {each.size:.0%}"
        return ""

    def take(self, rounding: Mapping[str, Difference] | None, step: int) -> None:
        """Take what rounding does at the next step, if that is known."""
        if rounding is None:
            return
        if much := self.too_much(rounding):
            self.blurred = (
                f"from step {step} on rounding in {self._name} alone changes {much}: a fault could hide"
            )
        # A loss or a state may round better by chance than what it is made of, and so may one step.
        self._worst = max(self._worst or 0.0, *(each.size for each in rounding.values()))

    def at(self, step: int) -> dict[str, float]:
        """Return what is allowed of each kind."""
        if self._worst is None:
            bound = _SUM_UNITS * self._unit * math.sqrt(max(1, self._num_samples)) * step
        else:
            bound = max(ROUNDING_FACTOR * self._worst, self._least(step))
        return {kind: min(bound, most) for kind, most in self._most.items()}

    def _least(self, step: int) -> float:
        units = _FLOOR_UNITS * self._unit * math.sqrt(step)
        return max(units, math.sqrt(self._unit)) if self.is_coarse else units

    @property
    def is_coarse(self) -> bool:
        """Whether the dtype has 16 bits."""
        return self._unit > _COARSE_UNIT

    @property
    def reason(self) -> str:
        """Where the tolerance comes from, in words."""
        if self._worst is not None:
            least = "a root of a unit" if self.is_coarse else f"{_FLOOR_UNITS:.0f} units"
            return (
                f"{ROUNDING_FACTOR:.0f} times what single-device training in {self._name} differs from itself in "
                f"float64, at least {least} in the last place, and never what no rounding explains"
            )
        return (
            f"{_SUM_UNITS:.0f} units in the last place of {self._name}, times the root of {self._num_samples} summed "
            "samples, times the step"
        )


def _in_words(kind: str, name: str) -> str:
    return {"loss": "the loss", "gradient": f"the gradient of {name}", "state": name}[kind]


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
