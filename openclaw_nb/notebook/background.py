"""A cell that runs on the workers while the notebook goes on: what ``--background`` returns.

    CellRun ──> one thread ──> LiveOutput ──> MemorySink ──> BackgroundRun (output, progress, wait, interrupt)

Knows runs and outputs; does not know options or magics.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Mapping
from typing import Any

from openclaw_nb.cluster.adopted import AdoptedRun
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.run import CellRun, RunResult
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.notebook.cellrun import CellRequest, Prepared, prepare, watch
from openclaw_nb.notebook.failure import cell_error
from openclaw_nb.notebook.figures import describe_run, rate_text
from openclaw_nb.notebook.live import LiveOutput
from openclaw_nb.notebook.targets import Place

_SHOWN_CHARACTERS = 4000


class MemorySink:
    """Slots that are kept, to be shown when somebody asks."""

    def __init__(self) -> None:
        self.bundles: list[dict[str, Any]] = []

    def show(self, slot: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Open the next slot."""
        self.bundles.append(data)

    def update(self, slot: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Change what an open slot holds."""
        self.bundles[slot] = data

    @property
    def text(self) -> str:
        """All slots as plain text."""
        parts = (bundle.get("text/plain", "") for bundle in list(self.bundles))
        return "\n".join(part for part in parts if part)


class BackgroundRun:
    """A cell that runs, or has run, in the background.

    Parameters
    ----------
    prepared : Prepared
        The run, with the places of its ranks and its output.
    sink : MemorySink
        Where the output goes.
    monitor : Monitor
        What strategy cells measure.
    notebook : mapping
        Variables of the notebook, for advice in errors.

    Examples
    --------
    >>> run = _                                                     # doctest: +SKIP
    >>> run.output, run.running, run.wait(), run.interrupt()        # doctest: +SKIP
    """

    def __init__(
        self, prepared: Prepared, sink: MemorySink, monitor: Monitor, notebook: Mapping[str, object]
    ) -> None:
        self._run: CellRun = prepared.run
        self._prepared, self._sink = prepared, sink
        self._monitor, self._notebook = monitor, notebook
        self._done = threading.Event()
        self._error: Exception | None = None
        threading.Thread(target=self._watch, name="openclaw-background", daemon=True).start()

    def _watch(self) -> None:
        try:
            watch(self._run, self._prepared.output, None)
            self._prepared.output.finish()
        except Exception as error:  # noqa: BLE001 - raised by `wait`; the cell goes on whatever is wrong with its output
            self._error = error
        finally:
            self._run.wait()
            self._done.set()

    @property
    def number(self) -> int:
        """The cell's number in the notebook that began it."""
        return self._prepared.number

    @property
    def running(self) -> bool:
        """Whether it goes on."""
        return not self._done.is_set()

    @property
    def output(self) -> str:
        """What the ranks have shown so far, as text: labelled, equal output once, a flood's middle left out."""
        return self._sink.text

    @property
    def result(self) -> RunResult | None:
        """How it ended, or None while it runs."""
        return self._run.result if self._done.is_set() else None

    def wait(self, timeout: float | None = None) -> RunResult | None:
        """Wait until it has ended.

        Parameters
        ----------
        timeout : float, optional
            Seconds after which None is returned; the cell goes on.

        Returns
        -------
        RunResult or None
            How it ended.

        Raises
        ------
        OpenClawError
            When it did not end well, as the cell itself would have.
        """
        if not self._done.wait(timeout):
            return None
        result = self._run.result
        assert result is not None
        if self._error is not None:
            raise self._error
        if not result.ok:
            prepared = self._prepared
            raise cell_error(result, prepared.places, self._notebook, replaced=prepared.replaced)
        return result

    def interrupt(self) -> None:
        """Stop it; the workers' variables stay."""
        self._run.interrupt()
        self._done.wait(5)

    @property
    def state(self) -> str:
        """What it does or how it ended, in a line."""
        result = self.result
        if result is None:
            return f"runs for {self._run.seconds:.0f} s{self._progress()}"
        if result.ok:
            return f"ended well after {result.seconds:.1f} s"
        if result.left:
            return f"was followed for {result.seconds:.1f} s: {result.cause}"
        if result.interrupted:
            return f"was stopped after {result.seconds:.1f} s"
        first = result.failures[result.first] if result.first is not None else None
        why = f"{first.error_type}: {first.message}" if first is not None else result.cause
        return f"failed after {result.seconds:.1f} s: {why}"

    def _progress(self) -> str:
        history = self._monitor.history(self._run.run_id)
        if history is None:
            return ""
        return f": {describe_run(history, each_worker=False)[0]}, now {rate_text(history.rate)} samples/s"

    def __repr__(self) -> str:
        text = self.output
        if len(text) > _SHOWN_CHARACTERS:
            text = f"…\n{text[-_SHOWN_CHARACTERS:]}"
        return "\n".join(
            [f"<cell {self._prepared.number} in the background {self.state}>", *([text] if text else [])]
        )

    def _repr_html_(self) -> str:
        text = self.output[-_SHOWN_CHARACTERS:]
        shown = f"<pre>{html.escape(text)}</pre>" if text else ""
        return f"<div>Cell {self._prepared.number} in the background {html.escape(self.state)}</div>{shown}"


def run_in_background(
    master: MasterNode, request: CellRequest, monitor: Monitor, notebook: Mapping[str, object]
) -> BackgroundRun:
    """Begin a cell on the workers and return at once.

    Parameters
    ----------
    master : MasterNode
        The cluster.
    request : CellRequest
        The cell.
    monitor : Monitor
        What strategy cells measure.
    notebook : mapping
        Variables of the notebook, for advice in errors.

    Raises
    ------
    OpenClawError
        When it cannot begin.
    """
    sink = MemorySink()
    return BackgroundRun(prepare(master, request, sink), sink, monitor, notebook)


def follow_in_background(
    master: MasterNode, monitor: Monitor, notebook: Mapping[str, object]
) -> BackgroundRun | None:
    """Return a handle of the cell that another notebook has begun on the workers; None when there was none.

    Parameters
    ----------
    master : MasterNode
        A cluster that was attached to.
    monitor : Monitor
        What strategy cells measure.
    notebook : mapping
        Variables of the notebook, for advice in errors.
    """
    run = master.last_run
    if not isinstance(run, AdoptedRun):
        return None
    sink = MemorySink()
    workers = {worker.number: Place(worker.id, worker.device.id) for worker in master.workers}
    places = {rank: workers[number] for rank, number in run.ranks.items()}
    output = LiveOutput(len(places), list(places), sink)
    return BackgroundRun(Prepared(run, places, output, run.execution_count), sink, monitor, notebook)


def about(cell: BackgroundRun | None) -> str:
    """Say of the cell of a cluster that was attached to how far it is and how to get at it; "" when there is none."""
    if cell is None:
        return ""
    how = "its output so far, and its end" if cell.running else "its output"
    return f"Cell {cell.number} {cell.state}. In .cell of this cluster: {how} (.cell.output, .cell.wait())."
