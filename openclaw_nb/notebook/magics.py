"""The magics: a line is parsed, one call is made, what it returns is shown.

    %openclaw <verb> [options]         ──> options ──> verbs
    %%openclaw_parallel [options]      ──> options ──> source ──> cellrun

Knows IPython's shell; everything else is imported when a magic is first used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class

from openclaw_nb.core.errors import NotVerifiedError, OpenClawError, UsageError
from openclaw_nb.notebook import options
from openclaw_nb.notebook.auto import auto_of
from openclaw_nb.notebook.complete import MATCHER, LiveNames, matcher
from openclaw_nb.notebook.tables import Message

if TYPE_CHECKING:
    from openclaw_nb.cluster.master import MasterNode
    from openclaw_nb.monitor.store import Monitor


@magics_class
class OpenClawMagics(Magics):
    """``%openclaw`` and ``%%openclaw_parallel``."""

    shell: Any

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._cells: dict[int, Any] = {}

    @line_magic
    def openclaw(self, line: str) -> Any:
        """Command the cluster: ``%openclaw <verb> [options]``; ``%openclaw --help`` lists the verbs."""
        with _errors_without_frames():
            command, verb, words = options.split_verb(line)
            if command is None:
                return Message(options.overview())
            if options.asks_for_help(words):
                return Message(command.help())
            parsed = command.parse(words)
            from openclaw_nb.notebook.verbs import HANDLERS

            return HANDLERS[verb](self._context(), parsed)

    @line_cell_magic
    def openclaw_parallel(self, line: str, cell: str | None = None) -> Any:
        """Run the cell on the workers; ``%openclaw_parallel --help`` lists the options."""
        with _errors_without_frames():
            words = options.split_line(line)
            if options.asks_for_help(words):
                return Message(options.CELL.help())
            if cell is None or not cell.strip():
                raise UsageError(
                    "There is no code to run: %%openclaw_parallel stands on the first line of a cell, "
                    "with the code below it. %openclaw_parallel --help lists its options."
                )
            return self._run(self._options(words, cell), line, cell)

    def _options(self, words: list[str], cell: str) -> options.CellOptions:
        from openclaw_nb.notebook.source import trains
        from openclaw_nb.session import current_session

        cluster = current_session().cluster
        defaults = None if cluster is None else cluster.cell_defaults
        is_for_default = defaults is not None and defaults.strategy is not None and trains(self.shell, cell)
        return options.parse_cell(words, defaults, trains=is_for_default)

    def _run(self, given: options.CellOptions, line: str, cell: str) -> Any:
        from openclaw_nb.doctor.runs import advice_after
        from openclaw_nb.notebook import cellrun, source
        from openclaw_nb.notebook.plan import measured_beside
        from openclaw_nb.notebook.targets import resolve_targets

        context = self._context()
        master = context.session.master
        targets = None
        if given.targets is not None:
            targets = resolve_targets(given.targets, cellrun.places_of(master))
        number = source.cell_number(self.shell)
        request = cellrun.CellRequest(
            source=source.checked(self.shell, line, cell),
            execution_count=number,
            targets=targets,
            strategy=given.strategy,
        )
        if given.told:
            _tell(given.told)
        if given.strategy is not None:
            self._cells[number] = request
        if given.verify_steps:
            self._verify_first(master, request, given.verify_steps)
        if given.background is not None:
            return self._run_in_background(context, request, given.background)
        try:
            cellrun.run_cell(master, request, self._sink(), tell=_tell, notebook=self.shell.user_ns)
        finally:
            if given.strategy is not None and self._in_notebook:
                _show_figure(context.session.monitor, master)
        monitor = context.session.monitor
        beside = measured_beside(master, monitor, request.source, given.strategy)
        for line in (beside, advice_after(master, monitor) if given.strategy is not None else ""):
            if line:
                _tell(line)
        return None

    def _run_in_background(self, context: Any, request: Any, name: str) -> Any:
        from openclaw_nb.notebook.background import run_in_background

        master, monitor = context.session.master, context.session.monitor
        handle = run_in_background(master, request, monitor, self.shell.user_ns)
        for note in master.take_notes():
            _tell(note)
        if name:
            self.shell.user_ns[name] = handle
        return handle

    def _verify_first(self, master: MasterNode, request: Any, num_steps: int) -> None:
        from IPython.display import display

        from openclaw_nb.notebook.verify import verify

        certificate = verify(master, request, num_steps, self.shell.user_ns)
        display(certificate)
        if not certificate.passed:
            raise NotVerifiedError(f"{certificate.verdict} The cell was not run, and nothing was changed.")

    @property
    def _in_notebook(self) -> bool:
        return hasattr(self.shell, "kernel")

    def _context(self) -> Any:
        from openclaw_nb.notebook.verbs import Context
        from openclaw_nb.session import current_session

        return Context(current_session(), self.shell, self._in_notebook, self._cells)

    def _sink(self) -> Any:
        from openclaw_nb.notebook.live import NotebookSink, TextSink

        return NotebookSink() if self._in_notebook else TextSink(sys.stdout)


@contextmanager
def _errors_without_frames() -> Iterator[None]:
    """Let errors of this package show their message alone, unless they know better how to be drawn."""
    try:
        yield
    except OpenClawError as error:
        from openclaw_nb.notebook.failure import drawn

        if not hasattr(error, "_render_traceback_"):
            drawn(error)
        raise


def _show_figure(monitor: Monitor, master: MasterNode) -> None:
    """Leave a figure of the run in the cell, if it made steps that can be drawn."""
    from openclaw_nb.notebook.figures import show_run

    run = master.last_run
    if run is None:
        return
    monitor.expect(run.run_id, run.ranks.values())
    history = monitor.history(run.run_id)
    if history is not None and history.steps >= 2:
        show_run(history)


def _tell(text: str) -> None:
    from IPython.display import display

    display({"text/plain": text}, raw=True)


# --------------------------------------------------------------------------------------- loading, unloading


def load(shell: Any) -> None:
    """Add the magics, their completion and the cluster's repr to a shell."""
    shell.register_magics(OpenClawMagics)
    matchers = shell.Completer.custom_matchers
    matchers[:] = [m for m in matchers if not _is_ours(m)]
    matchers.append(matcher(LiveNames(shell)))
    for kind, draw in (("text/html", _cluster_html), ("text/plain", _cluster_text)):
        formatter = shell.display_formatter.formatters[kind]
        formatter.for_type_by_name("openclaw_nb.session", "OpenClawCluster", draw)


def unload(shell: Any) -> None:
    """Take away what `load` added."""
    for kind in ("line", "cell"):
        for name in ("openclaw", "openclaw_parallel"):
            shell.magics_manager.magics[kind].pop(name, None)
    matchers = shell.Completer.custom_matchers
    matchers[:] = [m for m in matchers if not _is_ours(m)]
    auto_of(shell).switch(False)


def _is_ours(candidate: Any) -> bool:
    return bool(getattr(candidate, "matcher_identifier", "") == MATCHER)


def _cluster_html(cluster: Any) -> str | None:
    from html import escape

    from openclaw_nb.notebook.background import about
    from openclaw_nb.notebook.tables import status_table

    if not cluster.running:
        return None
    return f"{status_table(cluster.master)._repr_html_()}<div>{escape(about(cluster.cell))}</div>"


def _cluster_text(cluster: Any, printer: Any, cycle: bool) -> None:
    from openclaw_nb.notebook.background import about
    from openclaw_nb.notebook.tables import status_table

    text = f"{status_table(cluster.master)!r}\n{about(cluster.cell)}" if cluster.running else repr(cluster)
    printer.text(text.rstrip())
