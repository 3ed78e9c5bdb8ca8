"""When a checkpoint is taken, decided from what has been done since the last one.

Pure: what is known between two batches in, one decision out.

    every N steps      due when a multiple of N has been passed
    every S seconds    due S seconds after the last one was taken
    due while the last one is still being written  -> late: taken between the first two batches after that; whatever
                                                       else falls due meanwhile is the same one
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum

from openclaw_nb.core.errors import UsageError

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600}
_TIME = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[smh])")


@dataclass(frozen=True)
class Every:
    """How often checkpoints are taken: by steps, by seconds, or whichever comes first.

    Attributes
    ----------
    steps : int or None
        Every so many steps.
    seconds : float or None
        Every so many seconds.
    """

    steps: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        words = [] if self.steps is None else [str(self.steps)]
        return ",".join(words if self.seconds is None else [*words, seconds_word(self.seconds)])


def seconds_word(seconds: float) -> str:
    """Return seconds as `parse_every` reads them, with every digit and without an exponent."""
    return f"{Decimal(repr(float(seconds))).normalize():f}s"


@dataclass(frozen=True)
class Moment:
    """What is known between two batches.

    Attributes
    ----------
    num_steps : int
        How many steps are done.
    seconds : float
        A clock that only grows.
    is_writing : bool
        Whether the last checkpoint is still being written.
    """

    num_steps: int
    seconds: float
    is_writing: bool = False


class Decision(Enum):
    """What to do about a checkpoint now."""

    NOT_DUE = "not due"
    LATE = "due, but the last one is still being written"
    TAKE = "take it"


def decide(every: Every, last: Moment, now: Moment) -> Decision:
    """Decide whether a checkpoint is taken now.

    Parameters
    ----------
    every : Every
        How often they are wanted.
    last : Moment
        When the last one was taken, or training began.
    now : Moment
        What is known now.
    """
    if now.num_steps == last.num_steps or not _is_due(every, last, now):
        return Decision.NOT_DUE
    return Decision.LATE if now.is_writing else Decision.TAKE


def _is_due(every: Every, last: Moment, now: Moment) -> bool:
    if every.steps is not None and now.num_steps // every.steps > last.num_steps // every.steps:
        return True
    return every.seconds is not None and now.seconds - last.seconds >= every.seconds


def parse_every(given: int | str, what: str) -> Every:
    """Read how often checkpoints are wanted: ``100`` (steps), ``"300s"``, ``"5m"``, or ``"100,300s"`` for both.

    Raises
    ------
    UsageError
        Naming ``what`` was to be read.
    """
    steps: int | None = None
    seconds: float | None = None
    try:
        for word in [] if isinstance(given, bool) else str(given).split(","):
            found = _TIME.fullmatch(word.strip())
            if found:
                seconds = _once(seconds, float(found["number"]) * _UNIT_SECONDS[found["unit"]])
            else:
                steps = int(_once(steps, int(word)))
    except ValueError:
        steps = seconds = None
    if steps is None and seconds is None:
        raise UsageError(
            f"{what} is a number of steps of at least 1 (100), a time (300s, 5m, 1h), or both with a comma between "
            f"(100,300s), not {given!r}."
        )
    return Every(steps, seconds)


def _once(before: float | None, value: float) -> float:
    if before is not None or value <= 0:
        raise ValueError
    return value
