"""A plan of a cell: its profile taken part by part on the workers, what follows from it, and what was then measured.

    one worker ── the whole batch, then smaller ones, then the layers ─┐
    2, ..., all workers at once ── each with its part; the links ──────┴─> Profile ─> rank ─> Plan ─> table

Knows runs of cells and tables; what is measured is the workers' business, what follows from it that of `plan/predict`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from openclaw_nb.cluster.run import RunResult
from openclaw_nb.core.errors import RefusedError, RemoteCellError
from openclaw_nb.core.table import Table
from openclaw_nb.core.text import size_text
from openclaw_nb.plan.predict.model import Choice, Prediction, divisors
from openclaw_nb.plan.predict.profile import Profile, read_profile
from openclaw_nb.plan.predict.rank import Ranked, rank
from openclaw_nb.protocol.messages import Profiling, StrategySpec
from openclaw_nb.strategies import STRATEGIES

PROFILED_STEPS = 8
"""How many steps are timed each time when nothing else is said."""

RunProfile = Callable[[Sequence[int], Profiling], RunResult]
"""Runs one part of a profile on these ranks."""

_COLUMNS = (
    *("strategy", "degrees", "workers", "step", "measured", "samples/s", "efficiency", "idle"),
    *("memory a worker", "why"),
)


class Plan:
    """What each strategy would cost a cell, the best first.

    Attributes
    ----------
    ranked : list of Ranked
        The predictions, in order, with a reason each.
    profile : Profile
        What they were made from.
    measured : dict of Choice to float
        Seconds of a step, of what has run since.
    """

    def __init__(self, ranked: Sequence[Ranked], profile: Profile) -> None:
        self.ranked, self.profile = list(ranked), profile
        self.measured: dict[Choice, float] = {}

    @property
    def best(self) -> Prediction:
        """What to take."""
        return self.ranked[0].prediction

    def of(self, choice: Choice) -> Prediction:
        """Return the prediction of a choice.

        Raises
        ------
        KeyError
            When it is none of the plan's.
        """
        for each in self.ranked:
            if each.prediction.choice == choice:
                return each.prediction
        raise KeyError(choice)

    def take(self, strategy: StrategySpec, num_workers: int, samples_per_second: float) -> Prediction | None:
        """Take what a run under a strategy has measured; return what had been predicted, if it was.

        Parameters
        ----------
        strategy : StrategySpec
            What it ran under.
        num_workers : int
            On how many workers.
        samples_per_second : float
            Of all workers together.
        """
        choice = choice_of(strategy, num_workers)
        if choice is None or not any(each.prediction.choice == choice for each in self.ranked):
            return None
        self.measured[choice] = self.profile.batch_size / samples_per_second
        return self.of(choice)

    @property
    def table(self) -> Table:
        """The plan as a table; its records are `ranked`."""
        best = self.best.choice
        return Table(
            f"Plan for batches of {self.profile.batch_size} samples: {best.strategy}, {best.degrees}",
            _COLUMNS,
            tuple(self._row(each) for each in self.ranked),
            tuple(self.ranked),
            self._notes(),
        )

    def _row(self, ranked: Ranked) -> tuple[str, ...]:
        prediction = ranked.prediction
        choice = prediction.choice
        named = choice.strategy, choice.degrees, str(choice.num_workers)
        if prediction.step_seconds == float("inf"):
            return (*named, *["-"] * 6, ranked.reason)
        return (
            *named,
            milliseconds(prediction.step_seconds),
            self._measured_text(choice),
            f"{self.profile.batch_size / prediction.step_seconds:,.0f}",
            f"{prediction.efficiency:.0%}",
            f"{prediction.bubble:.0%}" if choice.pipeline > 1 else "-",
            size_text(prediction.memory_bytes),
            ranked.reason,
        )

    def _measured_text(self, choice: Choice) -> str:
        if choice in self.measured:
            return milliseconds(self.measured[choice])
        can_run = choice.num_workers == 1 or choice.strategy in STRATEGIES
        return "-" if can_run else "not measured here"

    def _notes(self) -> tuple[str, ...]:
        profile = self.profile
        shared = [
            f"{profile.contention(count):.2f} times as long on {count} workers at once"
            for count in sorted(profile.together)
        ]
        notes = [f"Forward and backward take {', '.join(shared)}."] if shared else []
        named = {ranked.prediction.choice.strategy for ranked in self.ranked}
        if listed := ", ".join(sorted(named - {"single device", *STRATEGIES})):
            notes.append(f"Predicted only, as this version does not run them: {listed}.")
        notes.append("Measured is what has run since; all else is predicted. A step is one global batch.")
        return tuple(notes)

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def milliseconds(seconds: float) -> str:
    """Write a step's time."""
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def choice_of(strategy: StrategySpec, num_workers: int) -> Choice | None:
    """Return the choice that a run was, or None where its options make it another training."""
    options = strategy.options
    if options.get("mode") == "parameter" or int(options.get("sync_frequency") or 1) > 1:
        return None
    if int(options.get("accumulate") or 1) > 1 or strategy.split == "model":
        return None
    if num_workers == 1:
        return Choice("single device")
    name, parts = strategy.name, int(options.get("microbatches") or 1)
    if name in ("data_parallel", "sharded"):
        return Choice(name, data=num_workers)
    if name == "tensor_parallel":
        return Choice(name, tensor=num_workers)
    if name in ("pipeline", "model_parallel"):
        return Choice(name, pipeline=num_workers, microbatches=parts)
    data, pipeline, tensor = (int(options.get(word) or 1) for word in ("dp", "pp", "tp"))
    return Choice(name, data, pipeline, tensor, parts)


def measure_profile(run: RunProfile, ranks: Sequence[int], num_steps: int) -> Profile:
    """Profile a cell on one of the ranks, then on several at once.

    Parameters
    ----------
    run : callable
        Runs one part on some ranks.
    ranks : sequence of int
        All that there are.
    num_steps : int
        How many steps are timed each time.
    """
    counts = divisors(len(ranks))

    def measured(num_workers: int, parts: list[int]) -> dict[str, Any]:
        asked = Profiling(num_steps=num_steps, parts=parts, num_sharing=len(ranks))
        found: dict[str, Any] = run(ranks[:num_workers], asked).values[0]["profile"]
        return found

    alone = measured(1, [1, *([counts[-1]] if len(ranks) > 1 else [])])
    return read_profile(
        alone, [measured(count, [count]) for count in counts[1:] if count <= alone["batch_size"]]
    )


def make_plan(profile: Profile, num_workers: int, memory_bytes: int | None = None) -> Plan:
    """Return the plan that follows from a profile.

    Parameters
    ----------
    profile : Profile
        Of the cell.
    num_workers : int
        How many there are.
    memory_bytes : int, optional
        What a worker may use, in place of what it has.
    """
    if memory_bytes is not None:
        profile = replace(profile, memory_bytes=memory_bytes)
    return Plan(rank(profile, num_workers), profile)


def ended_well(result: RunResult | None) -> RunResult:
    """Return the result of a run.

    Raises
    ------
    RefusedError
        When the cell cannot be tried.
    RemoteCellError
        When it failed otherwise.
    """
    assert result is not None  # it was waited for without a limit
    if result.ok:
        return result
    failure = None if result.first is None else result.failures[result.first]
    if failure is None:
        raise RemoteCellError(f"The cell could not be profiled: {result.cause or 'a worker has died'}.")
    if failure.error_type == RefusedError.__name__:
        raise RefusedError(failure.message)
    raise RemoteCellError(f"The cell could not be profiled: {failure.error_type}: {failure.message}")
