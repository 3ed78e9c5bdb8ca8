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
from openclaw_nb.core.text import counted, size_text
from openclaw_nb.plan.predict.model import Choice, Prediction, divisors
from openclaw_nb.plan.predict.profile import Profile, read_profile
from openclaw_nb.plan.predict.rank import Ranked, rank
from openclaw_nb.protocol.messages import Profiling, StrategySpec

PROFILED_STEPS = 8
"""How many steps are timed each time when nothing else is said."""

RunProfile = Callable[[Sequence[int], Profiling], RunResult]
"""Runs one part of a profile on these ranks."""

_OF_THE_PERSON = (
    *("precision", "activation_checkpointing", "plan", "shard_layers"),
    *("model_layers", "device_mapping", "stages"),
)
"""Options by which layers are cut, computed or gathered in another way than a plan takes them to be."""

_COLUMNS = (
    *("strategy", "degrees", "workers", "step", "measured", "samples/s", "efficiency", "idle"),
    *("memory a worker", "at the end", "why"),
)


class Plan:
    """What each strategy would cost a cell, the best first.

    Attributes
    ----------
    ranked : list of Ranked
        The predictions, in order, with a reason each.
    profile : Profile
        What they were made from.
    source : str
        The cell's.
    measured : dict of Choice to float
        Seconds of a step, of what has run since.
    """

    def __init__(self, ranked: Sequence[Ranked], profile: Profile, source: str = "") -> None:
        self.ranked, self.profile, self.source = list(ranked), profile, source
        self.measured: dict[Choice, float] = {}

    @property
    def best(self) -> Prediction:
        """What to take; its ``problem`` says why not where nothing can be run."""
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
        choice = choice_of(strategy, num_workers, self.profile.batch_size)
        if choice is None or not any(each.prediction.choice == choice for each in self.ranked):
            return None
        self.measured[choice] = self.profile.batch_size / samples_per_second
        return self.of(choice)

    @property
    def table(self) -> Table:
        """The plan as a table; its records are `ranked`."""
        best = self.best
        pick = "nothing can be run" if best.problem else f"{best.choice.strategy}, {best.choice.degrees}"
        return Table(
            f"Plan for batches of {counted(self.profile.batch_size, 'sample')}: {pick}",
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
            return (*named, *["-"] * (len(_COLUMNS) - len(named) - 1), ranked.reason)
        return (
            *named,
            milliseconds(prediction.step_seconds),
            milliseconds(self.measured[choice]) if choice in self.measured else "-",
            f"{self.profile.batch_size / prediction.step_seconds:,.0f}",
            f"{prediction.efficiency:.0%}",
            f"{prediction.bubble:.0%}" if choice.pipeline > 1 else "-",
            size_text(prediction.memory_bytes),
            size_text(prediction.end_bytes),
            ranked.reason,
        )

    def _notes(self) -> tuple[str, ...]:
        profile = self.profile
        shared = [
            f"{profile.contention(count):.2f} times as long on {count} workers at once"
            for count in sorted(profile.together)
        ]
        notes = [f"Forward and backward take {', '.join(shared)}."] if shared else []
        notes.append("Measured is what has run since; all else is predicted. A step is one global batch.")
        if len(self.ranked) > 1:
            notes.append(
                "When a cell ends every worker has the whole trained model, its gradients and optimizer state, under "
                "every strategy."
            )
        return tuple(notes)

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def milliseconds(seconds: float) -> str:
    """Write a step's time."""
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def choice_of(strategy: StrategySpec, num_workers: int, batch_size: int) -> Choice | None:
    """Return the choice that a run was, or None where its options make it another one than those of plans.

    Parameters
    ----------
    strategy : StrategySpec
        What it ran under.
    num_workers : int
        On how many workers.
    batch_size : int
        Samples of a global batch, by which micro-batches are bounded.
    """
    options = strategy.options
    if options.get("mode") == "parameter" or int(options.get("sync_frequency") or 1) > 1:
        return None
    if int(options.get("accumulate") or 1) > 1 or strategy.split == "model":
        return None
    if any(options.get(each) for each in _OF_THE_PERSON) or options.get("reshard_after_forward") is False:
        return None
    if num_workers == 1:
        return Choice("single device")
    name = strategy.name
    if name in ("data_parallel", "sharded"):
        return Choice(name, data=num_workers)
    if name == "tensor_parallel":
        return Choice(name, tensor=num_workers)
    if name == "model_parallel":
        return Choice(name, pipeline=num_workers)
    if name == "pipeline":
        parts = int(options.get("microbatches") or 2 * num_workers)  # as the strategy on the workers has it
        return Choice(name, pipeline=num_workers, microbatches=min(parts, batch_size))
    data, tensor = (int(options.get(f"{axis}_parallel_degree") or 1) for axis in ("data", "tensor"))
    return Choice(name, data=data, tensor=tensor)


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
    # With more workers than samples each has one: what cannot share a batch can still send it through its layers.
    return read_profile(alone, [measured(count, [count]) for count in counts[1:]])


def make_plan(profile: Profile, num_workers: int, memory_bytes: int | None = None, source: str = "") -> Plan:
    """Return the plan that follows from a profile.

    Parameters
    ----------
    profile : Profile
        Of the cell.
    num_workers : int
        How many there are.
    memory_bytes : int, optional
        What a worker may use, in place of what it has.
    source : str
        The cell's.
    """
    if memory_bytes is not None:
        profile = replace(profile, memory_bytes=memory_bytes)
    return Plan(rank(profile, num_workers), profile, source)


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
