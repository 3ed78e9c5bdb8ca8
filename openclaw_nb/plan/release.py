"""When a running cell must be released, decided from what is known of its ranks.

Pure: observations in, one decision out. A release needs a positive cause; a rank that is only slow is none.

    a rank raised, died, or the person interrupted  -> release the others now
    a rank ended its cell, all others wait          -> they wait for it in vain
    all wait, but not in the same call              -> they wait for each other
    a wait is longer than the person allows          -> whoever computes meanwhile, or the network, is too slow
    released, and out of time                       -> give up on those that are still inside
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

ENDED_SECONDS = 1.0
MISMATCH_SECONDS = 2.0
DEADLINE_SECONDS = 2.0
STOPPED_SECONDS = 1.0
SUB_GROUP = "sub-group"
_ALLOW_LONG = (
    "where the network is only slow, allow more, by parallel.timeout or master.set_timeout(communication=...)"
)
_ALLOW_SLOW = "where that is a long step, allow more, by master.set_timeout(computation=...)"


class Phase(Enum):
    """How far a rank is with the cell."""

    RUNNING = "running"
    DONE = "done"
    RAISED = "raised"
    DIED = "died"
    ABSENT = "absent"


@dataclass(frozen=True)
class RankView:
    """What is known of one rank.

    ``call`` is the collective that it waits in ("" when it computes), ``group`` and ``number`` tell which
    one, ``waiting_seconds`` for how long; ``line`` and ``code`` are the cell's line it is at. ``stopped_seconds`` is
    how long its process has been stopped (SIGSTOP).
    """

    phase: Phase = Phase.RUNNING
    call: str = ""
    group: str = ""
    number: int = 0
    waiting_seconds: float = 0.0
    line: int = 0
    code: str = ""
    error: str = ""
    told_after_end_seconds: float = 0.0
    stopped_seconds: float = 0.0

    def located(
        self,
        *,
        call: str,
        group: str,
        number: int,
        waiting_seconds: float,
        line: int,
        code: str,
        told_after_end_seconds: float = 0.0,
    ) -> RankView:
        """Return this view with a newer place."""
        return replace(
            self,
            call=call,
            group=group,
            number=number,
            waiting_seconds=waiting_seconds,
            line=line,
            code=code,
            told_after_end_seconds=told_after_end_seconds,
        )

    @property
    def place(self) -> str:
        """Where the rank is, in words."""
        at = f", line {self.line}" if self.line else ""
        return f"waits in {self.call}{at}" if self.call else f"computes{at}"


@dataclass(frozen=True)
class Limits:
    """How long ranks may wait in a collective; for ever, unless the person says otherwise.

    Attributes
    ----------
    communication_seconds : float
        For each other: all of them wait.
    computation_seconds : float
        For one that computes.
    """

    communication_seconds: float = math.inf
    computation_seconds: float = math.inf


@dataclass(frozen=True)
class KeepWaiting:
    """Nothing to do."""


@dataclass(frozen=True)
class ReleaseNow:
    """End the cell on every rank that still runs it."""

    cause: str


@dataclass(frozen=True)
class GiveUp:
    """Return to the person although these ranks are still inside."""

    ranks: tuple[int, ...]


Decision = KeepWaiting | ReleaseNow | GiveUp


def decide(
    ranks: Mapping[int, RankView], released_seconds: float | None, limits: Limits | None = None
) -> Decision:
    """Decide what to do about a running cell.

    Parameters
    ----------
    ranks : mapping of int to RankView
        What is known of each rank.
    released_seconds : float or None
        How long ago the cell was released; None if it was not.
    limits : Limits, optional
        How long ranks may wait.
    """
    running = {r: v for r, v in ranks.items() if v.phase is Phase.RUNNING}
    if not running:
        return KeepWaiting()
    if released_seconds is not None:
        return GiveUp(tuple(running)) if released_seconds > DEADLINE_SECONDS else KeepWaiting()
    cause = _failure(ranks) or _stopped(running) or _ended(ranks, running) or _mismatch(running)
    cause = cause or _overdue(running, limits or Limits())
    return ReleaseNow(cause) if cause else KeepWaiting()


def _failure(ranks: Mapping[int, RankView]) -> str:
    for rank, view in ranks.items():
        if view.phase is Phase.DIED:
            return f"rank {rank} died"
        if view.phase is Phase.RAISED:
            return f"rank {rank} raised {view.error}"
    return ""


def stopped_rank(running: Mapping[int, RankView]) -> int | None:
    """Return the rank whose process is stopped while another waits, or None."""
    waiting = {rank for rank, view in running.items() if view.phase is Phase.RUNNING and view.call}
    for rank, view in running.items():
        if view.phase is Phase.RUNNING and view.stopped_seconds > STOPPED_SECONDS and waiting - {rank}:
            return rank
    return None


def _stopped(running: Mapping[int, RankView]) -> str:
    rank = stopped_rank(running)
    if rank is None:
        return ""
    seconds = running[rank].stopped_seconds
    return f"the process of rank {rank} is stopped (SIGSTOP), for {seconds:.1f} s, and others wait"


def _ended(ranks: Mapping[int, RankView], running: Mapping[int, RankView]) -> str:
    over = {rank: view.phase for rank, view in ranks.items() if view.phase in (Phase.DONE, Phase.ABSENT)}
    # What was told before the last rank ended is old news: that end may be what the others waited for.
    waits = all(
        v.call and min(v.waiting_seconds, v.told_after_end_seconds) > ENDED_SECONDS for v in running.values()
    )
    if not over or not waits or _share_a_sub_group(running):
        return ""
    rank, view = next(iter(running.items()))
    other, phase = next(iter(over.items()))
    what = "has finished the cell" if phase is Phase.DONE else "does not run this cell (--targets)"
    return f"rank {other} {what}, but rank {rank} {view.place}"


def _mismatch(running: Mapping[int, RankView]) -> str:
    if len(running) < 2 or not all(v.call and v.waiting_seconds > MISMATCH_SECONDS for v in running.values()):
        return ""
    calls = Counter((v.call, v.group) for v in running.values())
    if 1 not in calls.values():
        return ""  # nobody is alone in a call: slow collectives, of all or of sub-groups
    return "the ranks wait for each other: " + "; ".join(f"rank {r} {v.place}" for r, v in running.items())


def _overdue(running: Mapping[int, RankView], limits: Limits) -> str:
    waiting = {rank: view for rank, view in running.items() if view.call}
    computing = {rank: view for rank, view in running.items() if not view.call}
    if not waiting:
        return ""
    rank, view = max(waiting.items(), key=lambda item: item[1].waiting_seconds)
    if computing and view.waiting_seconds > limits.computation_seconds:
        slow = "; ".join(f"rank {r} {v.place}" for r, v in computing.items())
        allowed = f"longer than the {limits.computation_seconds:g} s that set_timeout allows (computation)"
        return f"rank {rank} {view.place} for {allowed}, while {slow}; {_ALLOW_SLOW}"
    shortest = min(view.waiting_seconds for view in waiting.values())
    if not computing and shortest > limits.communication_seconds:
        allowed = (
            f"longer than the {limits.communication_seconds:g} s that set_timeout allows (communication)"
        )
        places = "; ".join(f"rank {r} {v.place}" for r, v in waiting.items())
        return f"all ranks wait for {allowed}: {places}; {_ALLOW_LONG}"
    return ""


def _share_a_sub_group(running: Mapping[int, RankView]) -> bool:
    """Whether those who run may be at a long transfer among themselves, which needs none that has ended."""
    calls = {(v.call, v.group) for v in running.values()}
    return len(running) > 1 and len(calls) == 1 and next(iter(calls))[1] == SUB_GROUP


def waiting_table(ranks: Mapping[int, RankView]) -> list[tuple[int, str, str]]:
    """Return rows (rank, what it does and for how long, the cell's line) of who waits where."""
    return [
        (rank, _doing(view), f"line {view.line}: {view.code}" if view.line else "")
        for rank, view in ranks.items()
    ]


def _doing(view: RankView) -> str:
    if view.phase is not Phase.RUNNING:
        words = {Phase.DONE: "has finished", Phase.RAISED: f"raised {view.error}", Phase.DIED: "died"}
        return words.get(view.phase, "does not run this cell")
    return f"waits in {view.call} for {view.waiting_seconds:.0f} s" if view.call else "computes"
