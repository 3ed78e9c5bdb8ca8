"""Says whether a recorded loss is a mean over the samples, a sum over them, or neither.

Knows: the numerical test, on two different splits of the rows into A (a rows) and B (b rows)::

    mean:  L(A and B) = (a L(A) + b L(B)) / (a + b)        sum:  L(A and B) = L(A) + L(B)

The real data come first; other outputs and other masks must then agree, so that a lucky batch (all samples
equal, nothing masked) decides nothing. Does not know how a loss is run on some rows (`replay`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from openclaw_nb.engine.loss.ops import Op, RefusedTail
from openclaw_nb.engine.loss.replay import Picked, Replay, Rows, unchanged
from openclaw_nb.engine.loss.rules import refuse_by_rule

# float64 keeps 1e-16 of each term, about 1e-13 of a sum over a million of them; a step that casts to float32
# inside a function keeps 1e-7. A loss of another kind is off by far more than 1e-6.
RELATIVE_TOLERANCE = 1e-6

# What a replay may raise on data that the cell never saw: shapes that do not fit, labels out of range.
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)


@dataclass(frozen=True)
class LossKind:
    """How a value depends on the batch; two kinds are equal whatever their reasons.

    Parameters
    ----------
    name : str
        ``"mean"``, ``"sum"`` or ``"unknown"``.
    reason : str
        For ``"unknown"``: why, in words that can be shown to a person.
    """

    name: str
    reason: str = field(default="", compare=False)

    MEAN: ClassVar[LossKind]
    SUM: ClassVar[LossKind]
    UNKNOWN: ClassVar[LossKind]

    @classmethod
    def unknown(cls, reason: str) -> LossKind:
        """Neither a mean nor a sum, with the reason."""
        return cls("unknown", reason)


LossKind.MEAN = LossKind("mean")
LossKind.SUM = LossKind("sum")
LossKind.UNKNOWN = LossKind("unknown")


class _IndistinctError(ValueError):
    """These data cannot tell the kinds apart."""


def decide(ops: list[Op], num_samples: int) -> LossKind:
    """Say how the result of the last operation depends on the batch.

    Parameters
    ----------
    ops : list of Op
        What the result needs, in order (see `ops.ancestors`).
    num_samples : int
        Samples of the batch that the model outputs were computed on.

    Returns
    -------
    LossKind
        ``UNKNOWN`` always has a reason.
    """
    try:
        refuse_by_rule(ops, num_samples)
        return _Trial(Replay(ops, num_samples)).verdict()
    except RefusedTail as refused:
        return LossKind.unknown(str(refused))


class _Trial:
    """Settles the doubts of a replay, and holds what comes out against other data."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.splits = _splits(replay.num_rows)

    def verdict(self) -> LossKind:
        reason = ""  # of the likeliest way to settle the doubts
        for picked in self.replay.combinations():
            try:
                kind = self._kind(picked)
            except _FAILURES as error:
                reason = reason or f"the loss cannot be judged on parts of the batch: {_first_line(error)}"
                continue
            if kind is not None:
                self._confirm_outputs(kind, picked)
                self._confirm_masks(kind, picked)
                self._confirm_factors(kind, picked)
                return kind
            reason = (
                reason or "the loss of the batch is neither the mean nor the sum of the losses of its parts"
            )
        raise RefusedTail(reason)

    def _kind(self, picked: Picked) -> LossKind | None:
        """Kind on the real outputs, or on others where these cannot tell; None if neither."""
        try:
            return self._compare(picked)
        except _IndistinctError as indistinct:
            for change in (_noisy, _shrunk, torch.neg):
                try:
                    return self._compare(picked, change)
                except _FAILURES:
                    continue  # not defined there, or as indistinct there
            raise indistinct

    def _confirm_outputs(self, kind: LossKind, picked: Picked) -> None:
        for change in (_noisy, _shrunk):
            try:
                again = self._compare(picked, change)
            except _FAILURES:
                continue  # the loss is not defined there, or says nothing there
            if again != kind:
                raise RefusedTail(
                    f"the loss is a {kind.name} over the samples for this batch, but not for others"
                )

    def _confirm_masks(self, kind: LossKind, picked: Picked) -> None:
        if not self.replay.has_masks:
            return
        try:
            again = self._compare(picked, masks=_coin)
        except _IndistinctError:
            return
        except _FAILURES:  # another number of entries is selected
            again = None
        if again != kind:
            raise RefusedTail("what the loss is divided by depends on how many entries a mask selects")

    def _confirm_factors(self, kind: LossKind, picked: Picked) -> None:
        """Refuse ``loss * 8`` with 8 samples: a weight of 8 and the number of samples look the same."""
        for op, factor in self.replay.factors():
            if factor != self.replay.num_samples or factor == 1:
                continue
            other = self._compare({**picked, ("number", op.order): "scale"}, _noisy)
            if other not in (kind, None):
                raise RefusedTail(
                    f"the loss is multiplied by {factor:g}, which is the number of samples here too"
                )

    def _compare(
        self,
        picked: Picked,
        outputs: Callable[[Tensor], Tensor] = unchanged,
        masks: Callable[[Tensor], Tensor] = unchanged,
    ) -> LossKind | None:
        """Kind that holds for all splits, None if neither does; raises `_IndistinctError` if both do."""
        holds_mean, holds_sum = True, True
        run = functools.cache(lambda rows: self.replay.run(rows, picked, outputs, masks))
        for whole, first, second in self.splits:
            total, a, b = run(whole), run(first), run(second)
            if not all(map(math.isfinite, (total, a, b))):
                raise _IndistinctError("it is not finite")
            allowed = RELATIVE_TOLERANCE * max(abs(total), abs(a), abs(b))
            mean = (len(first) * a + len(second) * b) / len(whole)
            holds_mean = holds_mean and abs(total - mean) <= allowed
            holds_sum = holds_sum and abs(total - (a + b)) <= allowed
        if holds_mean and holds_sum:
            raise _IndistinctError("it is zero")
        return LossKind.MEAN if holds_mean else LossKind.SUM if holds_sum else None


def _splits(num_rows: int) -> list[tuple[Rows, Rows, Rows]]:
    """Part the rows in two ways (whole, first, second); with one or two of them a row is taken twice."""
    rows = tuple(range(num_rows))
    if num_rows == 1:
        return [((0, 0), (0,), (0,)), ((0, 0, 0), (0,), (0, 0))]
    if num_rows == 2:
        return [(rows, (0,), (1,)), ((0, 1, 1), (0,), (1, 1))]
    half = -(-num_rows // 2)
    others = tuple(row for row in rows if row % 3)
    return [(rows, rows[:half], rows[half:]), (rows, rows[::3], others)]


def _noise(like: Tensor) -> Tensor:
    """Random normal values, the same on every call with one shape; the cell's random state is not touched."""
    generator = torch.Generator().manual_seed(20_231)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)


def _noisy(value: Tensor) -> Tensor:
    """Move outputs by random amounts of their own size; what is not finite becomes random."""
    finite = torch.where(torch.isfinite(value), value, torch.zeros_like(value))
    return finite + (1.0 + finite.abs().mean()) * _noise(value)


def _shrunk(value: Tensor) -> Tensor:
    """Scale outputs by random factors between 0 and 1: what is a probability stays one."""
    finite = torch.where(torch.isfinite(value), value, torch.full_like(value, 0.5))
    return finite * torch.sigmoid(_noise(value).abs())


def _coin(value: Tensor) -> Tensor:
    """Other entries for a mask; labels and weights stay."""
    return _noise(value.double()) > 0.3 if value.dtype is torch.bool else value


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
