"""Faults that are planted into a strategy cell on request: which, when, into whom, and what is told of it afterwards.

Pure: what is asked for and what was seen in, a step and lines of text out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from openclaw_nb.core.errors import UsageError, unknown_name

FAULTS = {
    "kill": "its process is killed (SIGKILL)",
    "stop": "its process stands still until the cell has ended (SIGSTOP)",
    "slow": "its process stands still for half of the time (SIGSTOP, SIGCONT)",
    "oom": "its process gets no more memory (RLIMIT_AS)",
    "disk-full": "it cannot write its next checkpoint (RLIMIT_FSIZE)",
    "corrupt-checkpoint": "one bit of the newest checkpoint is flipped",
}
ON_CHECKPOINTS = ("disk-full", "corrupt-checkpoint")
_AMONG_STEPS = 50


@dataclass(frozen=True)
class Fault:
    """What is to be planted.

    Attributes
    ----------
    kind : str
        One of `FAULTS`.
    step : int or None
        After which step of the cell; None to draw it.
    seed : int or None
        With what it is drawn.
    worker : str or None
        The id of the worker that it strikes; None for the one with the last rank. Faults of checkpoints strike rank 0,
        which writes them.
    """

    kind: str
    step: int | None = 1
    seed: int | None = None
    worker: str | None = None

    def due_step(self, num_steps: int) -> int:
        """Return after which step it is planted into a cell that has made so many steps."""
        if self.step is not None:
            return self.step
        return num_steps + random.Random(self.seed).randint(1, _AMONG_STEPS)

    def __str__(self) -> str:
        drawn = f"a step among the next {_AMONG_STEPS}, drawn with seed {self.seed}"
        default = (
            "the worker that writes checkpoints" if self.kind in ON_CHECKPOINTS else "the last rank's worker"
        )
        return f"{self.kind} of {self.worker or default} after {drawn if self.step is None else f'step {self.step}'}"


def plan_fault(
    kind: str, *, step: int | None = None, seed: int | None = None, worker: str | None = None
) -> Fault:
    """Check what is asked for; with neither step nor seed, it is planted after the first step.

    Raises
    ------
    UsageError
        For a kind that there is not, numbers that are none, both a step and a seed, or a worker for checkpoints.
    """
    if kind not in FAULTS:
        raise unknown_name("fault", kind, FAULTS)
    for name, number in (("step", step), ("seed", seed)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
            raise UsageError(f"{name}={number!r}: give a whole number, 0 or more.")
    if step is not None and seed is not None:
        raise UsageError(
            f"step={step} and seed={seed}: give the step, or the seed with which one of the next {_AMONG_STEPS} is "
            "drawn."
        )
    if worker is not None and kind in ON_CHECKPOINTS:
        raise UsageError(
            f"{kind} strikes rank 0, which writes the checkpoints: leave out the worker ({worker!r}), or plant another "
            "fault."
        )
    return Fault(kind, 1 if step is None and seed is None else step, seed, worker)


def victim(fault: Fault, workers: Mapping[int, str]) -> int | None:
    """Return the rank that it strikes, of the cell's workers by rank; None when its worker is not there."""
    if fault.worker is None:
        return min(workers) if fault.kind in ON_CHECKPOINTS else max(workers)
    return next((rank for rank, worker in workers.items() if worker == fault.worker), None)


@dataclass(frozen=True)
class Strike:
    """How it was planted: into whom, after which step, how far into the cell, and what more there is to say."""

    who: str
    step: int
    seconds: float
    detail: str = ""


@dataclass(frozen=True)
class Outcome:
    """What came of the cell.

    Attributes
    ----------
    ending : str
        Why it did not end well; "" if it did.
    num_steps : int
        How many steps were told of.
    detected_seconds : float or None
        From the strike until it was known; None when nothing was noticed.
    detected_as : str
        As what.
    went_on : str
        How the others went on; "" when they did not have to, or could not.
    num_repeated : int
        How many batches were repeated.
    changes : tuple of str
        Who joined or left.
    checkpoints : tuple of str
        What was told of checkpoints.
    rates : tuple of float
        Steps a second before the strike and after it; empty when unknown.
    """

    ending: str
    num_steps: int
    detected_seconds: float | None = None
    detected_as: str = ""
    went_on: str = ""
    num_repeated: int = 0
    changes: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class Report:
    """What was planted, and what happened; without a `Strike`, ``why_not`` says why nothing was.

    ``directory`` is where the checkpoints are that it was about.
    """

    fault: Fault
    outcome: Outcome
    strike: Strike | None = None
    why_not: str = ""
    directory: str = ""

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What it says, by subject."""
        outcome = self.outcome
        if self.strike is None:
            return [("planted", f"nothing: {self.why_not}"), ("the cell", _ending(outcome))]
        drawn = "" if self.fault.seed is None else f", drawn with seed {self.fault.seed}"
        rows = [
            (
                "planted",
                f"{self.fault.kind}, {self.strike.who}: {FAULTS[self.fault.kind]}{self.strike.detail}",
            ),
            ("when", f"after step {self.strike.step}{drawn}, {self.strike.seconds:.2f} s into the cell"),
            ("detected", self._detection),
        ]
        if outcome.went_on:
            rows.append(("went on", outcome.went_on))
        rows.append(("steps", _steps(outcome)))
        rows += [("workers", change) for change in outcome.changes]
        rows += [("checkpoints", line) for line in outcome.checkpoints]
        if outcome.rates:
            rows.append(("pace", "{:.1f} steps/s before, {:.1f} after".format(*outcome.rates)))
        return [*rows, ("the cell", _ending(outcome))]

    @property
    def _detection(self) -> str:
        outcome = self.outcome
        if outcome.detected_seconds is not None:
            return f"after {outcome.detected_seconds:.2f} s: {outcome.detected_as}"
        if self.fault.kind == "corrupt-checkpoint":
            return "not by the cell: the bytes of a checkpoint are checked when it is loaded"
        return "not: nothing was noticed"

    def __str__(self) -> str:
        width = max(len(subject) for subject, _ in self.rows)
        return "\n".join(f"{subject.ljust(width)}  {text}" for subject, text in self.rows)


def _steps(outcome: Outcome) -> str:
    batches = "1 batch" if outcome.num_repeated == 1 else f"{outcome.num_repeated} batches"
    if outcome.ending:
        return f"the training ended after {outcome.num_steps}; {batches} repeated"
    return f"{outcome.num_steps} in all, none lost; {batches} repeated"


def _ending(outcome: Outcome) -> str:
    return f"ended: {outcome.ending}" if outcome.ending else "ended well"
