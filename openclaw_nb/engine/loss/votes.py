"""Which ranks agree on how the loss depends on the batch, and what its global values are.

    each rank: kind of the loss (mean | sum | unknown | no vote), whether newcomers wait or ranks want to leave, whether
    shares must stay, the numbers the cell made on the way, its speed, when it arrived at its last step
        └─ one vector, summed over the ranks with the gradients ─> verdict, global values

The vector has fixed length, so that ranks that took different paths still make the same collective call.
Knows the vector's layout and the arithmetic; `record` and `kind` find the kinds, the step engine sums the vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.loss.record import LossKind, Recorder, find_disagreement
from openclaw_nb.plan.wishes import Wishes

MAX_SCALARS = 16
MAX_CONSTANTS = 6
_VOTES = ("mean", "sum", "unknown", "none")
_WISHES = len(_VOTES)
_HELD = _WISHES + 2
_SAMPLES = _HELD + 1
_HEAD = _SAMPLES + 1
_ROW = 1 + MAX_CONSTANTS + 2  # a rank's own: how many numbers, the numbers, its speed, when it arrived last


@dataclass(frozen=True)
class Told:
    """What one rank says beside its vote: its wishes, its speed, whether shares must stay, when it arrived last."""

    wishes: Wishes
    speed: float
    is_held: bool
    arrival: float


@dataclass(frozen=True)
class Vote:
    """What one rank says of its loss."""

    kind: LossKind
    scalars: list[tuple[Tensor, LossKind]]
    constants: list[float]


def message_size(num_ranks: int) -> int:
    """Return the vector's length."""
    return _HEAD + MAX_SCALARS + num_ranks * _ROW


class KindCache:
    """Finds the kinds of a cell's losses; a loss made by the same operations is looked at once.

    Parameters
    ----------
    recorder : Recorder
        Follows the model's outputs.
    forced : LossKind or None
        The kind that the person gave (``--reduction``).
    """

    def __init__(self, recorder: Recorder, forced: LossKind | None) -> None:
        self._recorder = recorder
        self._forced = forced
        self._known: dict[tuple[str, ...], LossKind] = {}

    def vote(self, root: Tensor, num_rows: int, *, counts: bool) -> Vote:
        """Return this rank's vote on a loss; a rank whose samples do not count has none on the kind."""
        scalars = [(s, self._kind(s, num_rows)) for s in self._recorder.scalars(root)]
        of_root = next((kind for scalar, kind in scalars if scalar is root), None)
        kind = (of_root or self._kind(root, num_rows)) if counts else LossKind("none")
        constants = [] if self._forced else [value for _, value in self._recorder.constants(root)]
        return Vote(kind, scalars[:MAX_SCALARS], constants[:MAX_CONSTANTS])

    def _kind(self, value: Tensor, num_rows: int) -> LossKind:
        if self._forced is not None:
            return self._forced
        signature = self._recorder.signature(value)
        kind = self._known.get(signature)
        if kind is None or not signature:
            kind = self._known[signature] = self._recorder.classify(value, num_rows)
        elif kind.name != "unknown":
            ignored = self._recorder.num_ignored(value)
            if ignored is not None and ignored:
                return self._recorder.classify(value, num_rows)
        return kind


def pack(vote: Vote, rank: int, num_ranks: int, num_local: int, told: Told) -> Tensor:
    """Return this rank's summand of the vector, float64 of `message_size` values."""
    vector = [0.0] * message_size(num_ranks)
    vector[_VOTES.index(vote.kind.name)] = 1.0
    vector[_WISHES : _WISHES + 2] = [float(told.wishes.num_new), float(told.wishes.leaves)]
    vector[_HELD] = float(told.is_held)
    vector[_SAMPLES] = float(num_local)
    for i, (scalar, kind) in enumerate(vote.scalars):
        weight = num_local if kind.name == "mean" else 1
        vector[_HEAD + i] = float(scalar.detach()) * weight if num_local else 0.0
    start = _HEAD + MAX_SCALARS + rank * _ROW
    vector[start] = len(vote.constants) if num_local else -1.0
    vector[start + 1 : start + 1 + len(vote.constants)] = vote.constants
    vector[start + _ROW - 2 : start + _ROW] = [told.speed, told.arrival]
    return torch.tensor(vector, dtype=torch.float64)


def check(total: Tensor, vote: Vote, num_ranks: int, shares: list[int]) -> None:
    """Refuse a loss that is not the same kind of per-sample mean or sum on every rank.

    Raises
    ------
    RefusedError
        On every rank at once, as every rank has the same ``total``.
    """
    mean, total_sum, unknown = total[:3].tolist()
    if not unknown and not (mean and total_sum):
        _check_constants(total, num_ranks, shares)
        return
    reason = vote.kind.reason or "on another rank it is neither a mean nor a sum over the samples"
    if mean and total_sum:
        reason = "it is a mean over the samples on some ranks and a sum on others"
    raise RefusedError(
        f"This loss cannot be split over the ranks: {reason}. No parameter was changed. Use --split model: "
        "every rank then computes the loss of the whole batch. If you know it to be a per-sample mean or "
        "sum, say --reduction mean or --reduction sum."
    )


def _check_constants(total: Tensor, num_ranks: int, shares: list[int]) -> None:
    rows = total[_HEAD + MAX_SCALARS :].view(num_ranks, _ROW).tolist()
    given = [
        (row[1 : 1 + int(row[0])], share) for row, share in zip(rows, shares, strict=True) if row[0] >= 0
    ]
    if len(given) < 2 or find_disagreement([r for r, _ in given], [s for _, s in given]) is None:
        return
    raise RefusedError(
        "This loss cannot be split over the ranks: a number in it differs between the ranks and does not "
        "follow their shares of the batch (a count of masked samples, for example). No parameter was "
        "changed. Use --split model: every rank then computes the loss of the whole batch."
    )


def wishes(total: Tensor) -> tuple[bool, bool]:
    """Return whether some rank knows of newcomers, and of ranks that leave; the same on every rank."""
    new, leaves = total[_WISHES : _WISHES + 2].tolist()
    return bool(new), bool(leaves)


def is_held(total: Tensor) -> bool:
    """Return whether shares must stay on some rank; the same on every rank."""
    return bool(total[_HELD])


def speeds(total: Tensor, num_ranks: int) -> list[float]:
    """Return each rank's speed, as it has told; the same on every rank."""
    found: list[float] = total[_HEAD + MAX_SCALARS :].view(num_ranks, _ROW)[:, -2].tolist()
    return found


def arrivals(total: Tensor, num_ranks: int) -> list[float]:
    """Return when each rank arrived at its last step, as it has told."""
    found: list[float] = total[_HEAD + MAX_SCALARS :].view(num_ranks, _ROW)[:, -1].tolist()
    return found


def global_values(total: Tensor, vote: Vote) -> list[tuple[Tensor, float]]:
    """Return each of this rank's numbers with its value over the whole batch; others stay as they are."""
    num_global, *values = total[_SAMPLES : _HEAD + len(vote.scalars)].tolist()
    found = []
    for (scalar, kind), value in zip(vote.scalars, values, strict=True):
        if kind.name == "mean" and num_global:
            found.append((scalar, value / num_global))
        elif kind.name == "sum":
            found.append((scalar, value))
    return found
