"""A program under several settings and on several numbers of workers, in turn, on the workers of one cluster.

    setting × workers ──> Running, whose steps' ends are noted on the workers ──> plan.speed

When steps end is seen by a hook that PyTorch calls after each ``step()`` of any optimizer, so the program is measured
in the same way with a strategy and without one. Does not know how a report looks.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openclaw_nb.cli._running import INTERRUPTED, Asked, Running
from openclaw_nb.core.errors import ClusterError, OpenClawError, UsageError
from openclaw_nb.notebook.options import CELL, read_cell, split_line
from openclaw_nb.plan.speed import PLAIN, Result, Timed, results_of, timed

if TYPE_CHECKING:
    from openclaw_nb.cli.program import Program, Step
    from openclaw_nb.cluster.master import MasterNode
    from openclaw_nb.config.cells import CellDefaults
    from openclaw_nb.monitor.store import RunHistory
    from openclaw_nb.session import OpenClawCluster

_ENDS = "_openclaw_ends"
_NOTE_ENDS = f"""\
def _openclaw_note_ends():
    import time, torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    ends, waits = [], torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    def note(*_):
        waits()
        ends.append(time.perf_counter())
    return ends, register_optimizer_step_post_hook(note)
{_ENDS}, _openclaw_hook = _openclaw_note_ends()
"""
_NO_LONGER = "if '_openclaw_hook' in globals(): _openclaw_hook.remove()"
_LAST_LINES = 3
_NOT_MEASURED = ("targets", "background", "verify", "resume")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """One way to run the program: what it is called, and its options."""

    name: str
    given: argparse.Namespace


def read_settings(lines: Sequence[str], defaults: CellDefaults) -> list[Setting]:
    """Read settings as they stand behind ``--strategy``; without any, the configured one.

    Raises
    ------
    UsageError
        When one is not understood, or cannot be measured.
    """
    found = [_read_setting(line, defaults) for line in lines or [defaults.strategy or ""]]
    names = [each.name for each in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"The setting {twice!r} stands there twice.")
    return found


def _read_setting(line: str, defaults: CellDefaults) -> Setting:
    words = split_line(line)
    if not words:
        raise UsageError("No strategy is named or configured: -s data_parallel, for one.")
    given = CELL.parse(["--strategy", *words])
    for name in _NOT_MEASURED:
        if getattr(given, name):
            raise UsageError(f"--{name} changes what is run, and is not measured: leave it out of {line!r}.")
    if given.strategy == "none":
        raise UsageError(f"The program as it is, on one worker, is measured anyway, as {PLAIN!r}.")
    read_cell(given, defaults, trains=True)
    given.retries = 0
    return Setting(" ".join(words), given)


class Benchmark:
    """Measures a program.

    Parameters
    ----------
    cluster : OpenClawCluster
        It runs, with as many workers as the largest of the counts.
    program : Program
        What is measured.
    arguments : sequence of str
        Its own.
    tell : callable
        Told what is measured next.
    """

    def __init__(
        self, cluster: OpenClawCluster, program: Program, arguments: Sequence[str], tell: Tell
    ) -> None:
        self._cluster, self._program, self._arguments, self._tell = cluster, program, arguments, tell
        plain = CELL.parse(["--strategy", "none"])
        plain.retries = 0
        self._plain = Setting(PLAIN, plain)

    def measure(self, settings: Sequence[Setting], counts: Sequence[int], repeat: int) -> list[Result]:
        """Measure each setting on each number of workers, in turn, ``repeat`` times."""
        cases = [(self._plain, 1), *((each, count) for each in settings for count in counts)]
        runs: dict[tuple[str, int], list[Timed]] = {(each.name, count): [] for each, count in cases}
        errors: dict[tuple[str, int], str] = {}
        for turn in range(repeat):
            for setting, count in cases:
                key = setting.name, count
                if key in errors:
                    continue
                self._tell(f"{setting.name} on {count} of {max(counts)} workers, {turn + 1} of {repeat}")
                try:
                    runs[key].append(self._measure(setting, count))
                except OpenClawError as error:
                    errors[key] = str(error)
                    self._tidy()
        return results_of(runs, errors)

    def _tidy(self) -> None:
        """Make the workers whole again after a program that did not end well."""
        master = self._cluster.master
        master.ensure_ready()
        _run(master, _NO_LONGER, range(master.world_size))

    def _measure(self, setting: Setting, count: int) -> Timed:
        stopwatch, told = _Stopwatch(), io.StringIO()
        ranks = range(count)
        asked = Asked(self._program, setting.given, self._arguments)
        running = Running(self._cluster, asked, io.StringIO(), told, watcher=stopwatch, ranks=ranks)
        ended = running.run()
        if ended.code == INTERRUPTED:
            raise KeyboardInterrupt
        if ended.code:
            said = ended.error or " ".join(told.getvalue().split("\n")[-_LAST_LINES:])
            raise ClusterError(f"The program ended with {ended.code}. {said}".strip())
        if stopwatch.total is None:
            raise ClusterError("No optimizer took two steps in one training: there is no time between them.")
        return stopwatch.total


class _Stopwatch:
    """Times trainings; a `Watcher`."""

    def __init__(self) -> None:
        self.total: Timed | None = None

    def before(self, master: MasterNode, ranks: Sequence[int]) -> None:
        _run(master, _NOTE_ENDS, ranks)

    def after(self, master: MasterNode, ranks: Sequence[int], step: Step, history: RunHistory | None) -> None:
        _run(master, _NO_LONGER, ranks)
        ends = [master.pull([_ENDS], rank)[_ENDS] for rank in ranks]
        found = timed(ends, None if history is None else history.samples)
        if found is not None:
            self.total = found if self.total is None else self.total + found


def _run(master: MasterNode, source: str, ranks: Sequence[int]) -> None:
    result = master.run_cell(source, targets=ranks).wait()
    if result is None or not result.ok:
        raise ClusterError("The workers cannot take the time of steps: openclaw doctor says what is wrong.")
