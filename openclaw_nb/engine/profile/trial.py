"""A short profile of a cell on this group of workers.

    state taken ─> the plain cell's first steps, all ranks at once, each with a part of the batch ─> state put back
        one worker:      also with smaller batches, then with its layers measured
        several at once: also the links between them

The cell is as it stands: no strategy is hung onto it. What it shows is dropped, what it changes is put back; files that
it writes stay written. Knows the cell's objects and the ranks; does not know what is predicted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.core.host import available_memory_bytes, usable_cores
from openclaw_nb.engine.cell import Outcome
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.objects.find import find_objects
from openclaw_nb.engine.objects.names import cell_names
from openclaw_nb.engine.profile import links
from openclaw_nb.engine.profile.batches import first_parts
from openclaw_nb.engine.profile.clock import WARM_UP, StepClock, as_timing
from openclaw_nb.engine.profile.layers import LayerMeter
from openclaw_nb.engine.verify.records import StepsDone
from openclaw_nb.engine.verify.snapshot import Snapshot
from openclaw_nb.protocol.messages import Profiling, StrategySpec

Run = Callable[[AbstractContextManager[None]], Awaitable[Outcome]]
"""Runs the cell with the context entered last, just around the cell's own code."""


class _CellFailedError(Exception):
    """The cell raised; carries how it ended."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(str(outcome.error))
        self.outcome = outcome


class Profiler:
    """Profiles a cell.

    Parameters
    ----------
    source : str
        The cell.
    spec : StrategySpec
        Which model, optimizer and loader it has; its strategy does not matter.
    asked : Profiling
        What is measured.
    ranks : Ranks
        The ranks.
    namespace : mutable mapping
        The worker's variables.
    run : callable
        Runs the cell as it stands.
    """

    def __init__(
        self,
        source: str,
        spec: StrategySpec,
        asked: Profiling,
        ranks: Ranks,
        namespace: MutableMapping[str, Any],
        run: Run,
    ) -> None:
        self._source, self._asked, self._ranks, self._run = source, asked, ranks, run
        self._namespace = namespace
        found = find_objects(
            source, namespace, model=spec.model, optimizer=spec.optimizer, loader=spec.loader
        )
        if len(found.models) != 1 or len(found.optimizers) != 1:
            raise RefusedError(
                f"A plan is made for one model and one optimizer, and the cell has {len(found.models)} and "
                f"{len(found.optimizers)}. Name one of each, where one alone is trained: --model NAME --optimizer NAME."
            )
        self._model = found.model
        (self._optimizer,) = found.optimizers.values()
        self._held: dict[str, Any] = {**found.models, **found.optimizers, **found.loaders}
        self._held |= {**found.schedulers, **found.scalers}
        self._parameters = list(self._model.parameters())
        self._state_bytes = 0

    async def profile(self) -> tuple[Outcome, dict[str, Any]]:
        """Measure, and put everything back.

        Returns
        -------
        outcome : Outcome
            Without an error when steps were timed.
        report : dict
            ``profile``, on rank 0: ``num_workers``, ``batch_size``, ``timings`` (a dictionary for each number of
            parts: ``num_samples``, and seconds of ``data``, ``model``, ``update``), ``memory_bytes``, ``num_cores``;
            of one worker ``layers``, ``num_batchnorms``, ``optimizer_factor``; of several ``all_reduces``,
            ``group_sums`` and ``messages``, each a short and a long one with bytes and seconds.
        """
        names = set(cell_names(self._source).loads)
        report = self._about()  # before there is a copy of everything
        snapshot = Snapshot(self._namespace, names, self._held, num_sharing=self._ranks.size)
        try:
            await self._take_timings(report, snapshot)
        except _CellFailedError as failed:
            return failed.outcome, {}
        finally:
            snapshot.restore()
        if self._ranks.size > 1:
            self._add_links(report)
        return Outcome(None, []), {"profile": report} if self._ranks.rank == 0 else {}

    async def _take_timings(self, report: dict[str, Any], snapshot: Snapshot) -> None:
        for num_parts in self._asked.parts:
            timing, report["batch_size"] = await self._time(num_parts)
            report["timings"].append(timing)
            snapshot.restore()
        if self._ranks.size == 1:
            report |= await self._measure_layers(report["timings"][0]["model"])

    def _add_links(self, report: dict[str, Any]) -> None:
        size = sum(p.nbytes for p in self._parameters)
        device = self._parameters[0].device
        report["all_reduces"] = links.time_all_reduces(self._ranks, size, device)
        report["group_sums"] = links.time_group_sums(self._ranks, size, device)
        report["messages"] = links.time_messages(self._ranks, size)
        meeting = links.time_meetings(self._ranks)
        for timing in report["timings"]:
            timing["model"] = max(timing["model"] - meeting, 0.0)  # of which each step has had one

    def _about(self) -> dict[str, Any]:
        on_gpu = self._parameters[0].device.type == "cuda"
        if on_gpu:
            memory = torch.cuda.get_device_properties(self._parameters[0].device).total_memory
        else:
            # What the model has already is not available any more, and counts as what a worker needs.
            memory = available_memory_bytes() // max(self._asked.num_sharing, 1) + self._held_bytes()
        return {
            "num_workers": self._ranks.size,
            "timings": [],
            "memory_bytes": memory,
            "num_cores": None if on_gpu else usable_cores(),
        }

    def _held_bytes(self) -> int:
        """Count what parameters, gradients and the optimizer's state take now."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return sum(tensor.nbytes for tensor in (*self._parameters, *gradients)) + self._bytes_of_state()

    def _bytes_of_state(self) -> int:
        return sum(
            value.nbytes
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )

    async def _time(
        self, num_parts: int, meter: AbstractContextManager[None] | None = None
    ) -> tuple[dict[str, float], int]:
        """Run the cell's first steps with a part of each batch; return the slowest rank's phases."""
        ranks = self._ranks
        clock = StepClock(self._model, self._optimizer, self._asked.num_steps, lambda: links.meet(ranks))

        @contextmanager
        def around() -> Any:
            with ExitStack() as stack:
                stack.enter_context(clock.timing())
                if meter is not None:
                    stack.enter_context(meter)
                yield

        with first_parts(num_parts) as sizes:
            outcome = await self._run(around())
        if outcome.error is not None and not isinstance(outcome.error, StepsDone):
            raise _CellFailedError(outcome)
        if not sizes:
            raise RefusedError(
                "A plan divides the batches of a DataLoader, and the cell draws none from one that has them."
            )
        if not clock.num_steps:
            raise RefusedError(
                f"The cell makes too few steps: {WARM_UP} warm up, and at least one more is timed. Plan with more data."
            )
        self._state_bytes = self._bytes_of_state()
        rows = ranks.gather(torch.tensor(clock.phases(), dtype=torch.float64))
        num_samples = -(-max(sizes) // num_parts)
        return as_timing(num_samples, rows.amax(dim=0).tolist()), max(sizes)

    async def _measure_layers(self, model_seconds: float) -> dict[str, Any]:
        meter = LayerMeter(self._model)
        await self._time(1, meter.measuring())
        own = sum(p.nbytes for p in self._parameters)
        return {**meter.report(model_seconds), "optimizer_factor": self._state_bytes / max(own, 1)}
