"""One cell of the notebook, from its source to the last output: what `%%openclaw_parallel` does.

    source ──> checked here ──> MasterNode.run_cell ──> CellRun ──> LiveOutput
                                      stop button ──────┘  └──> cell_error

Blocks until the run is over and draws only in the calling thread. Knows runs and outputs; does not know
options or magics.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.run import CellRun, Output, RunResult
from openclaw_nb.notebook.failure import cell_error, waiting_text
from openclaw_nb.notebook.live import LiveOutput, SlotSink, TextSink
from openclaw_nb.notebook.resilience import resilience_table
from openclaw_nb.notebook.targets import Place
from openclaw_nb.protocol.messages import Measured, Profiling, StrategySpec

_TICK_SECONDS = 0.1
_FIRST_DRAWING_SECONDS = 0.1
_SHOW_WAITING_SECONDS = 3.0

_followed: CellRun | None = None  # the run that keeps the main thread, until its stop button is pressed


@dataclass(frozen=True)
class CellRequest:
    """A cell to run: its source as the workers get it, and where and how."""

    source: str
    execution_count: int = 0
    targets: Sequence[int] | None = None
    strategy: StrategySpec | None = None
    verify_steps: int = 0
    profile: Profiling | None = None


@dataclass(frozen=True)
class Prepared:
    """A run that has begun: the places of its ranks, where its output goes, the cell's number.

    ``replaced`` tells whether a worker that dies is.
    """

    run: CellRun
    places: Mapping[int, Place]
    output: LiveOutput
    number: int
    replaced: bool = True


def prepare(master: MasterNode, request: CellRequest, sink: SlotSink | TextSink) -> Prepared:
    """Begin a cell on the workers.

    Raises
    ------
    OpenClawError
        When it cannot begin.
    """
    places = _places_in_run(places_of(master), request)
    output = LiveOutput(len(places), _shown_ranks(places, request), sink)
    run = _begin(master, request, output)
    return Prepared(run, places, output, request.execution_count, master.replaces_workers)


def run_cell(
    master: MasterNode,
    request: CellRequest,
    sink: SlotSink | TextSink,
    *,
    tell: Callable[[str], None],
    listener: Callable[[Measured], None] | None = None,
    notebook: Mapping[str, object] | None = None,
) -> RunResult:
    """Run a cell on the workers and show what it shows.

    Parameters
    ----------
    master : MasterNode
        The cluster.
    request : CellRequest
        The cell.
    sink : SlotSink or TextSink
        Where its output is drawn.
    tell : callable
        Shows a line to the person, beside the output.
    listener : callable, optional
        Called with each measurement of a strategy cell.
    notebook : mapping, optional
        Variables of the notebook, for advice.

    Raises
    ------
    OpenClawError
        When the cell did not end well, see `cell_error`; or could not begin.
    """
    begun = prepare(master, request, sink)
    for note in master.take_notes():
        tell(note)
    try:
        with stop_button(begun.run):
            result = watch(begun.run, begun.output, listener)
    finally:
        begun.output.finish()
    for note in [*result.notes, *(master.take_notes() if master.running else [])]:
        tell(note)
    if (report := master.take_report()) is not None:
        tell(repr(resilience_table(report)))
    if not result.ok:
        raise cell_error(result, begun.places, notebook, replaced=begun.replaced)
    return result


def places_of(master: MasterNode) -> dict[int, Place]:
    """Return the worker and the device of each rank."""
    working = (worker for worker in master.workers if not worker.spare)
    return {rank: Place(worker.id, worker.device.id) for rank, worker in enumerate(working)}


def _places_in_run(places: Mapping[int, Place], request: CellRequest) -> dict[int, Place]:
    """Return the places by the ranks that the cell sees: a strategy on some workers counts them from 0."""
    if request.strategy is None or request.targets is None:
        return dict(places)
    return {rank: places[target] for rank, target in enumerate(request.targets)}


def _shown_ranks(places: Mapping[int, Place], request: CellRequest) -> list[int]:
    return list(request.targets) if request.strategy is None and request.targets else list(places)


def _begin(master: MasterNode, request: CellRequest, output: LiveOutput) -> CellRun:
    def on_wait(what: str) -> None:
        output.status(f"waiting: {what}")
        output.refresh()

    before = master.last_run
    try:
        run = master.run_cell(
            request.source,
            targets=request.targets,
            strategy=request.strategy,
            execution_count=request.execution_count,
            verify_steps=request.verify_steps,
            profile=request.profile,
            on_wait=on_wait,
        )
    except BaseException:
        output.finish()
        if master.last_run is not before:  # interrupted in the instant in which the run began
            master.interrupt()
        raise
    output.status(None)
    return run


def watch(run: CellRun, output: LiveOutput, listener: Callable[[Measured], None] | None) -> RunResult:
    """Feed what arrives into the output until the run is over."""
    not_before = time.monotonic() + _FIRST_DRAWING_SECONDS
    while True:
        event = run.next_event(_TICK_SECONDS)
        if event is None and not run.running:
            break
        _take(event, output, listener)
        if (now := time.monotonic()) >= not_before:
            output.status(_waiting(run))
            output.refresh()
            not_before = now + _FIRST_DRAWING_SECONDS
    while (event := run.next_event(0)) is not None:
        _take(event, output, listener)
    result = run.wait()
    assert result is not None
    return result


def _take(
    event: Output | Measured | None, output: LiveOutput, listener: Callable[[Measured], None] | None
) -> None:
    if isinstance(event, Output):
        output.feed(event.rank, event.entry)
    elif isinstance(event, Measured) and listener is not None:
        listener(event)


def _waiting(run: CellRun) -> str | None:
    if run.longest_wait_seconds < _SHOW_WAITING_SECONDS:
        return None
    return waiting_text(run.who_waits_where())


@contextlib.contextmanager
def stop_button(run: CellRun) -> Iterator[None]:
    """While in the ``with`` block, let an interrupt of the kernel stop the run instead of this thread.

    The first interrupt ends the cell on the workers, and the watching goes on until they are out, so that
    nothing is cut in the middle of drawing; a second one raises KeyboardInterrupt here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    global _followed
    pressed = False

    def press(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        run.interrupt()

    previous = signal.signal(signal.SIGINT, press)
    _followed = run
    try:
        yield
    finally:
        _followed = None
        signal.signal(signal.SIGINT, signal.default_int_handler if previous is None else previous)


def blocks_kernel(run_id: str) -> bool:
    """Whether a run keeps the kernel's main thread, so that an interrupt of the kernel is one of the run."""
    return _followed is not None and _followed.run_id == run_id
