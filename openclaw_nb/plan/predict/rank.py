"""Which strategy to take: those that can be run by their time, the advice of the field where times are equal.

Data parallel first: it is the simplest, and scales. Another is put before it only when it is faster by more than a
prediction is worth, or when the model does not fit a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openclaw_nb.plan.predict.model import Prediction, choices, predict
from openclaw_nb.plan.predict.profile import Profile

WORTH = 0.05
"""Times that differ by less than this part count as equal."""

_SIMPLEST_FIRST = (
    *("single device", "data_parallel", "sharded", "pipeline"),
    *("tensor_parallel", "model_parallel", "hybrid_parallel"),
)


@dataclass(frozen=True)
class Ranked:
    """A prediction at its place, and why it is there."""

    prediction: Prediction
    reason: str


def rank(profile: Profile, num_workers: int) -> list[Ranked]:
    """Return all choices, the best first; those that cannot be run come last.

    Parameters
    ----------
    profile : Profile
        The cell.
    num_workers : int
        How many workers there are.
    """
    return order([predict(profile, choice) for choice in choices(num_workers, profile.batch_size)])


def order(predictions: Sequence[Prediction]) -> list[Ranked]:
    """Put predictions in order, with a reason each."""
    able = sorted((p for p in predictions if not p.problem), key=_time_then_simplicity)
    for favoured in ("data_parallel", "single device"):
        able = _put_first(able, favoured)
    ordered = [*able, *(p for p in predictions if p.problem)]
    one = next((p for p in predictions if p.choice.num_workers == 1), None)
    return [Ranked(p, _reason(p, able, one)) for p in ordered]


def _time_then_simplicity(prediction: Prediction) -> tuple[float, int]:
    return prediction.step_seconds, _SIMPLEST_FIRST.index(prediction.choice.strategy)


def _put_first(able: list[Prediction], strategy: str) -> list[Prediction]:
    """Put the fastest of a strategy at the top when nothing is faster by more than a prediction is worth."""
    found = next((p for p in able if p.choice.strategy == strategy), None)
    if found is None or found.step_seconds * (1 - WORTH) > able[0].step_seconds:
        return able
    return [found, *(p for p in able if p is not found)]


def _reason(prediction: Prediction, able: Sequence[Prediction], one: Prediction | None) -> str:
    """Say in a few words why a prediction stands where it does."""
    if prediction.problem:
        return prediction.problem
    name = prediction.choice.strategy
    if prediction is able[0]:
        if name == "single device":
            return "no more workers make it faster"
        if one is not None and one.problem:
            return "training does not fit one device, and nothing that fits is faster"
        if name == "data_parallel":
            return "the simplest, and nothing is faster by more than a prediction is worth"
        return (
            f"faster than any simpler one: {able[0].step_seconds / one.step_seconds:.0%} of a single device"
            if (one is not None)
            else "the fastest"
        )
    return _cost(prediction, one)


def _cost(prediction: Prediction, one: Prediction | None) -> str:
    """Name what takes most of what it loses."""
    if prediction.choice.num_workers == 1:
        return "one worker does all"
    idle = prediction.step_seconds * prediction.bubble
    if idle >= prediction.transfer_seconds and idle > 0.1 * prediction.step_seconds:
        return f"stages are idle for {prediction.bubble:.0%} of the time"
    if prediction.transfer_seconds > 0.1 * prediction.step_seconds:
        return f"messages take {prediction.transfer_seconds / prediction.step_seconds:.0%} of the step"
    if one is not None and prediction.step_seconds >= one.step_seconds:
        return "the workers share cores, and gain nothing"
    return f"{prediction.efficiency:.0%} of what so many workers could do"
