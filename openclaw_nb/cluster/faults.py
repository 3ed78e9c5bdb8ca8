"""The fault that is planted into a cluster's cells: one at a time, into the cell that runs or the next one.

Knows which fault there is, and which cell it is for; what it does is in `chaos`.
"""

from __future__ import annotations

from pathlib import Path

from openclaw_nb.cluster.chaos import Chaos, OwnProcesses
from openclaw_nb.cluster.run import CellRun, RunResult
from openclaw_nb.cluster.worker import Worker
from openclaw_nb.core.errors import UsageError
from openclaw_nb.plan.chaos import Fault, Report
from openclaw_nb.protocol.messages import StrategySpec


class Faults:
    """What is planted into one cluster.

    Attributes
    ----------
    chaos : Chaos or None
        The fault that was planted last, unless it was taken back.
    """

    def __init__(self) -> None:
        self.chaos: Chaos | None = None
        self._is_report_taken = False

    def plant(self, fault: Fault, processes: OwnProcesses) -> Chaos:
        """Keep a fault for the cell that it is armed in, which strikes one of these processes.

        Raises
        ------
        UsageError
            While another one is planted.
        """
        if self.chaos is not None and self.chaos.report is None:
            raise UsageError(
                f"One fault at a time: {self.chaos.fault} is planted already. %openclaw chaos off takes it back."
            )
        self.chaos, self._is_report_taken = Chaos(fault, processes), False
        return self.chaos

    def take_back(self) -> bool:
        """Take the fault back, and what it has stopped or limited; return whether there was one."""
        chaos = self.chaos
        if chaos is None or chaos.report is not None:
            return False
        self.chaos = None
        chaos.put_back()
        return True

    def take_report(self) -> Report | None:
        """Return what came of the fault in the last cell, once; None when none was planted into it."""
        chaos = self.chaos
        if chaos is None or chaos.report is None or self._is_report_taken:
            return None
        self._is_report_taken = True
        return chaos.report

    def arm(self, run: CellRun, strategy: StrategySpec, workers: list[Worker]) -> None:
        """Let the fault, if there is one that waits, strike this cell."""
        chaos = self.chaos
        if chaos is None or chaos.run_id:
            return
        directory = None
        if strategy.options.get("checkpoint"):
            directory = Path(strategy.options["checkpoint"]).expanduser().absolute()
        chaos.begin(
            run.run_id,
            lambda: {rank: workers[number] for rank, number in dict(run.ranks).items()},
            run.num_steps,
            directory,
        )
        if run.result is not None:  # it has ended meanwhile
            chaos.finish(run.result)

    def of(self, run: CellRun | None) -> Chaos | None:
        """Return the fault that is for this cell."""
        chaos = self.chaos
        return chaos if chaos is not None and run is not None and chaos.run_id == run.run_id else None

    def finish(self, run: CellRun | None, result: RunResult) -> None:
        """Take the news that a cell has ended."""
        if (chaos := self.of(run)) is not None:
            chaos.finish(result)

    def died(self, run: CellRun | None, number: int) -> None:
        """Take the news that a worker is gone, or does not answer any more."""
        if (chaos := self.of(run)) is not None:
            chaos.died(number)
