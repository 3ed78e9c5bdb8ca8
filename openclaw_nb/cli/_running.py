"""A program on its way through a cluster's workers: one cell a step, until one does not end well.

Knows programs, cells and how they end; does not know options' grammar, nor who asked.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TextIO

from openclaw_nb.cli.program import Program, Step, read_program
from openclaw_nb.core.errors import CellInterrupted, NotVerifiedError, OpenClawError, UsageError
from openclaw_nb.notebook.cellrun import CellRequest, places_of, run_cell
from openclaw_nb.notebook.live import TextSink
from openclaw_nb.notebook.options import CellOptions, parse_cell, read_cell, split_line
from openclaw_nb.notebook.targets import resolve_targets
from openclaw_nb.notebook.verify import verify
from openclaw_nb.plan.script.hoist import EXIT_NAME
from openclaw_nb.session import current_session

if TYPE_CHECKING:
    from openclaw_nb.cluster.master import MasterNode
    from openclaw_nb.cluster.run import RunResult
    from openclaw_nb.config.cells import CellDefaults
    from openclaw_nb.monitor.store import RunHistory
    from openclaw_nb.session import OpenClawCluster

INTERRUPTED = 130  # as shells say it of a program that SIGINT has ended
_FAILED = 1
_ANSI = re.compile(r"\x1b\[[\d;]*m")
_CELL = re.compile(r"Cell In\[\d+\]")
_SET_UP = """\
import os as _os, sys as _sys, warnings as _warnings
_os.chdir({directory!r})
for _name, _module in list(_sys.modules.items()):
    if _name != "__main__" and _os.path.dirname(getattr(_module, "__file__", None) or "") == {folder!r}:
        del _sys.modules[_name]  # of an earlier run; it may have been edited
_sys.path[:] = [{folder!r}, *(_each for _each in _sys.path if _each != {folder!r})]
_sys.argv = {argv!r}
_warnings.filterwarnings("ignore", "To exit: use")  # IPython's advice at sys.exit
{name} = None
"""


@dataclass(frozen=True)
class Asked:
    """What is to be run, with the options of its strategy and the arguments of the script."""

    program: Program
    given: argparse.Namespace
    arguments: Sequence[str]

    def options_for(self, step: Step, defaults: CellDefaults, part: int = 1) -> CellOptions:
        """Return how a step is run; ``part`` counts those that train."""
        given = argparse.Namespace(**vars(self.given))
        if step.words is not None and (given.strategy is None or not step.trains):
            return parse_cell(split_line(step.words), defaults, trains=step.trains)
        if not step.trains or given.strategy == "none":
            return CellOptions()
        if given.checkpoint is not None and self.program.num_trainings > 1:
            given.checkpoint = os.path.join(given.checkpoint, f"part-{part}")
        options = read_cell(given, defaults, trains=True)
        if options.strategy is None:
            raise UsageError(
                f"{self.program.path.name} trains, and no strategy is named or configured: --strategy data_parallel, "
                "or --strategy none to run it as it is on every worker."
            )
        return options


def read_asked(options: argparse.Namespace) -> Asked:
    """Read the program that a command's options name.

    Raises
    ------
    UsageError
        When it cannot be run as they ask for.
    """
    program = read_program(options.program, whole=options.strategy == "none")
    if not program.num_trainings and options.strategy != "none":
        raise UsageError(
            f"{program.path.name} has no training loop: nothing in it calls .backward(), also not through its "
            "functions and the modules beside it. --strategy none runs it as it is on every worker."
        )
    return Asked(program, options, options.arguments)


@dataclass(frozen=True)
class Training:
    """What a training step has made: ``rate`` is in samples/s, ``loss`` its last."""

    line: int
    strategy: str
    steps: int
    samples: int
    rate: float | None
    loss: float | None


@dataclass
class Ended:
    """How a program ended."""

    code: int
    error: str = ""
    seconds: float = 0.0
    num_workers: int = 0
    trainings: list[Training] = field(default_factory=list)


class _Exit(Exception):
    """The program has ended, with this code."""

    def __init__(self, code: int, error: str = "") -> None:
        super().__init__(error)
        self.code, self.error = code, error


class Watcher(Protocol):
    """Measures what a program trains."""

    def before(self, master: MasterNode, ranks: Sequence[int]) -> None:
        """Take note that these ranks are about to train."""

    def after(self, master: MasterNode, ranks: Sequence[int], step: Step, history: RunHistory | None) -> None:
        """Take note that they have, and how it went; a run without a strategy has no history."""


class Running:
    """Runs a program on a cluster.

    Parameters
    ----------
    cluster : OpenClawCluster
        It runs.
    asked : Asked
        What is run.
    output, told : text file
        Where the ranks' output goes, and what is said of the run.
    watcher : Watcher, optional
        Asked before and after each step that trains.
    ranks : sequence of int, optional
        Who runs it; all when not given.
    """

    def __init__(
        self,
        cluster: OpenClawCluster,
        asked: Asked,
        output: TextIO,
        told: TextIO,
        *,
        watcher: Watcher | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._cluster, self._master, self._asked = cluster, cluster.master, asked
        self._output, self._told = output, told
        self._watcher, self._ranks = watcher, ranks
        self._trainings: list[Training] = []

    def run(self) -> Ended:
        """Run it to its end."""
        started = time.monotonic()
        num_workers = len(self._taking_part())
        if self._asked.given.retries:
            self._master.enable_auto_recovery(max_retries=self._asked.given.retries)
        try:
            for line in self._asked.program.told:
                self._tell(line)
            self._set_up()
            self._run_steps()
            code, error = self._exit_code(), ""
        except _Exit as exit_:
            code, error = exit_.code, exit_.error
        return Ended(code, error, time.monotonic() - started, num_workers, self._trainings)

    def _set_up(self) -> None:
        """Give the workers what a program finds when it is started by itself."""
        path = self._asked.program.path.resolve()
        source = _SET_UP.format(
            directory=str(path.parent) if self._asked.program.is_notebook else os.getcwd(),
            folder=str(path.parent),
            argv=[str(self._asked.program.path), *self._asked.arguments],
            name=EXIT_NAME,
        )
        if not self._asked.program.is_notebook:
            source += f"__file__ = {str(path)!r}\n"
        self._run_cell(CellRequest(source, targets=self._ranks))

    def _run_steps(self) -> None:
        parts = 0
        for step in self._asked.program.steps:
            parts += step.trains
            options = self._asked.options_for(step, self._cluster.cell_defaults, parts)
            targets = [0] if step.once else self._ranks
            if options.targets is not None:
                targets = resolve_targets(options.targets, places_of(self._master))
            request = CellRequest(step.source, step.number, targets, options.strategy)
            if options.verify_steps:
                self._verify(request, options.verify_steps)
            if self._watcher is not None and step.trains:
                self._watcher.before(self._master, self._taking_part())
            try:
                self._run_cell(request)
            finally:
                history = self._history() if options.strategy is not None else None
                if options.strategy is not None and history is not None:
                    self._take_measured(step, options.strategy.name, history)
            if self._watcher is not None and step.trains:
                self._watcher.after(self._master, self._taking_part(), step, history)

    def _taking_part(self) -> Sequence[int]:
        return range(self._master.world_size) if self._ranks is None else self._ranks

    def _verify(self, request: CellRequest, num_steps: int) -> None:
        certificate = verify(self._master, request, num_steps, {})
        self._tell(repr(certificate))
        if not certificate.passed:
            raise NotVerifiedError(f"{certificate.verdict} The training was not run.")

    def _run_cell(self, request: CellRequest) -> None:
        try:
            run_cell(self._master, request, TextSink(self._output), tell=self._tell)
        except CellInterrupted as error:
            self._tell(str(error))
            raise _Exit(INTERRUPTED, str(error)) from None
        except OpenClawError as error:
            run = self._master.last_run if self._master.running else None
            raise self._ended_by(error, None if run is None else run.result) from None

    def _ended_by(self, error: OpenClawError, result: RunResult | None) -> Exception:
        """Return what a failed cell means for the program."""
        first = None if result is None or result.first is None else result.failures[result.first]
        if first is not None and first.error_type == "SystemExit":
            return self._exited(first.message)
        if isinstance(error, UsageError):
            return error
        for line in self._drawn(error):
            self._tell(line)
        return _Exit(_FAILED, str(error))

    def _exited(self, message: str) -> _Exit:
        """Return the end that a script has chosen, as Python understands it."""
        if message in ("", "None"):
            return _Exit(0)
        try:
            return _Exit(int(message) & 0xFF)
        except ValueError:
            self._tell(message)
            return _Exit(_FAILED, message)

    def _exit_code(self) -> int:
        found = self._master.pull([EXIT_NAME])[EXIT_NAME]
        return self._exited(
            "" if found is None else str(int(found) if isinstance(found, bool) else found)
        ).code

    def _drawn(self, error: OpenClawError) -> list[str]:
        """Return an error as the worker drew it, with the script's name in the place of cells' numbers."""
        draw = vars(error).get("_render_traceback_")
        text = "\n".join(draw()) if draw is not None else str(error)
        if not self._told.isatty():
            text = _ANSI.sub("", text)
        if not self._asked.program.is_notebook:
            text = _CELL.sub(f"File {self._asked.program.path}", text)
        return text.split("\n")

    def _history(self) -> RunHistory | None:
        run = self._master.last_run if self._master.running else None
        return None if run is None else current_session().monitor.history(run.run_id)

    def _take_measured(self, step: Step, strategy: str, history: RunHistory) -> None:
        loss = history.loss.y[-1] if len(history.loss) else None
        self._trainings.append(
            Training(step.line, strategy, history.steps, history.samples, history.mean_rate, loss)
        )

    def _tell(self, text: str) -> None:
        self._told.write(f"{text}\n")
        self._told.flush()
