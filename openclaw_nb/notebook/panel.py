"""The live panel: what the cluster does, drawn again and again, also while a cell blocks the kernel.

    master (devices, what runs) ──┐
    monitor (what was measured) ──┴─> PanelView ──> one display, changed by one thread

Knows when to look and when to stop looking; what it looks like is `panel_html`'s. Only the newest state is
ever drawn: nothing queues up.
"""

from __future__ import annotations

import atexit
import threading
import time
import uuid
from collections.abc import Callable, Hashable
from dataclasses import replace
from enum import Enum
from typing import Any, Protocol

from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.run import CellRun, RunResult
from openclaw_nb.core.errors import NotStartedError
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.notebook.panel_html import PanelView, render_html, render_text

LIVE_SECONDS = 0.5
IDLE_SECONDS = 5.0
REST_SECONDS = 600.0
_DRAWING_SHARE = 0.2  # of the kernel's time, at most

_NO_CLUSTER = "No cluster is running. Start one with %openclaw start."
_NO_RUN = "Nothing has run yet. A cell that begins with %%openclaw_parallel runs on these workers."
_NO_MEASUREMENT = (
    "Samples/s and loss appear when a cell names a strategy: %%openclaw_parallel --strategy data_parallel"
)
_STOPPED = "The cluster has been stopped. These are the last readings."
_RESTING = "Nothing has changed for 10 minutes, so the panel rests. %openclaw panel wakes it."


class Screen(Protocol):
    """A display that can be changed."""

    def show(self, data: dict[str, Any]) -> None:
        """Display a mime bundle in the cell that runs now."""

    def update(self, data: dict[str, Any]) -> None:
        """Change every display that `show` has opened; may come from any thread."""


class Step(Enum):
    """What the panel's thread does next."""

    WAIT = "wait"
    DRAW = "draw"
    REST = "rest"


class Pace:
    """Decides when to draw: twice a second while something runs, seldom when not, at last no more.

    Parameters
    ----------
    now : float
        The clock's time in seconds.
    """

    def __init__(self, now: float) -> None:
        self._changed_at = now
        self._not_before = now
        self._state: Hashable = None
        self._active = False

    def next(self, now: float, state: Hashable, active: bool) -> Step:
        """Say what to do, knowing what there is to show and whether something runs."""
        if active or active != self._active or state != self._state:
            self._changed_at = now
        began_or_ended, self._active, self._state = active != self._active, active, state
        if now - self._changed_at >= REST_SECONDS:
            return Step.REST
        return Step.DRAW if began_or_ended or now >= self._not_before else Step.WAIT

    def drew(self, started: float, ended: float) -> None:
        """Take how long drawing took; a slow one is followed by a longer pause."""
        usual = LIVE_SECONDS if self._active else IDLE_SECONDS
        # A little less than the ticks are apart, so that none is missed by a hair.
        self._not_before = started + max(usual * 0.9, (ended - started) / _DRAWING_SHARE)


class Panel:
    """A live picture of a cluster; display it, or leave it as the last expression of a cell.

    Devices with their readings, what runs, samples/s and loss. It moves while a cell runs, and what it showed
    last stays in the saved notebook. It stops by itself with the cluster, or after 10 minutes without change.

    Parameters
    ----------
    master : MasterNode or None
        The cluster; None when there is none.
    monitor : Monitor
        What strategy cells have measured; whoever owns both lets the master's events reach it.
    screen : Screen, optional
        Where it is shown; the notebook by default.
    clock : callable
        Seconds that only grow.
    """

    def __init__(
        self,
        master: MasterNode | None,
        monitor: Monitor,
        *,
        screen: Screen | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._master = master
        self._monitor = monitor
        self._screen = screen
        self._clock = clock
        self._last = PanelView()
        self._sent: dict[str, Any] = {}
        self._since: tuple[str, float] = ("", 0.0)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()

    # --------------------------------------------------------------------------------------- showing

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.bundle()

    def __repr__(self) -> str:
        return render_text(self.view())

    def _ipython_display_(self) -> None:
        with self._lock:
            if self._screen is None:
                self._screen = NotebookScreen()
            self._sent = self.bundle()
            self._screen.show(self._sent)
            if self._screen_can_change():
                self._start()

    def _screen_can_change(self) -> bool:
        return not isinstance(self._screen, NotebookScreen) or self._screen.live

    def bundle(self) -> dict[str, Any]:
        """Return the panel as it is now, as a mime bundle."""
        view = self.view()
        return {"text/html": render_html(view), "text/plain": render_text(view)}

    def refresh(self) -> bool:
        """Draw the panel anew if it has been displayed and looks different; return whether it did."""
        with self._lock:
            bundle = self.bundle()
            if self._screen is None or bundle == self._sent:
                return False
            self._screen.update(bundle)
            self._sent = bundle
            return True

    # --------------------------------------------------------------------------------------- looking

    def view(self) -> PanelView:
        """Look at the cluster and at what was measured."""
        with self._lock:
            self._last = self._look()
            return self._last

    def _look(self) -> PanelView:
        history = self._monitor.latest()
        try:
            if self._master is None or not self._master.running:
                return self._view_without_cluster()
            run = self._master.last_run
            running = run is not None and run.running
            return PanelView(
                name=self._master.name,
                backend=self._master.backend,
                epoch=self._master.epoch,
                doing=self._doing(run),
                devices=tuple(self._master.get_device_status()),
                history=history,
                running=running and history is not None and run is not None and history.run_id == run.run_id,
                note=_NO_RUN if run is None else _NO_MEASUREMENT if history is None else "",
            )
        except NotStartedError:  # stopped while we looked
            return self._view_without_cluster()

    def _view_without_cluster(self) -> PanelView:
        """Keep what was seen last, so that it stays in the notebook."""
        if not self._last.name:
            return PanelView(note=_NO_CLUSTER, history=self._monitor.latest())
        devices = tuple(replace(device, state="stopped", work="") for device in self._last.devices)
        return replace(
            self._last,
            doing="stopped",
            devices=devices,
            history=self._monitor.latest(),
            running=False,
            note=_STOPPED,
        )

    def _doing(self, run: CellRun | None) -> str:
        if run is None:
            return "idle"
        if run.result is not None:
            return f"idle, {_ended(run.result)}"
        if self._since[0] != run.run_id:
            self._since = (run.run_id, self._clock())
        seconds = self._clock() - self._since[1]
        workers = "1 worker" if len(run.ranks) == 1 else f"{len(run.ranks)} workers"
        return f"a cell runs on {workers} for {seconds:.0f} s"

    # ------------------------------------------------------------------------------------- the thread

    def _start(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._work, args=(self._stop,), name="openclaw-panel", daemon=True
        )
        self._thread.start()
        # Nothing may be sent any more when the kernel closes its sockets.
        atexit.register(self.close)

    def close(self) -> None:
        """Stop drawing; what was drawn last stays."""
        thread = self._thread
        self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    @property
    def live(self) -> bool:
        """Whether it is being drawn again and again."""
        return self._thread is not None and self._thread.is_alive()

    def _work(self, stop: threading.Event) -> None:
        try:
            self._draw_until(stop)
        finally:
            atexit.unregister(self.close)

    def _draw_until(self, stop: threading.Event) -> None:
        pace = Pace(self._clock())
        was_running = False
        while not stop.wait(LIVE_SECONDS):
            running = self._master is not None and self._master.running
            if was_running and not running:
                self.refresh()
                return
            was_running = running
            now = self._clock()
            step = pace.next(now, self._state(), self._active())
            if step is Step.REST:
                self._rest()
                return
            if step is Step.DRAW:
                self.refresh()
                pace.drew(now, self._clock())

    def _rest(self) -> None:
        with self._lock:
            self._last = replace(self._last, note=_RESTING)
            if self._screen is not None:
                self._screen.update(
                    {"text/html": render_html(self._last), "text/plain": render_text(self._last)}
                )

    def _active(self) -> bool:
        run = self._master.last_run if self._master is not None else None
        return run is not None and run.running

    def _state(self) -> Hashable:
        """What tells that something happened; readings that always tremble do not."""
        try:
            if self._master is None or not self._master.running:
                return self._monitor.version
            states = tuple((worker.pid, worker.state) for worker in self._master.workers)
            return self._monitor.version, self._master.epoch, states
        except NotStartedError:
            return self._monitor.version


def _ended(result: RunResult) -> str:
    if result.ok:
        return f"the last cell took {result.seconds:.1f} s"
    if result.interrupted:
        return f"the last cell was stopped after {result.seconds:.1f} s"
    return f"the last cell failed after {result.seconds:.1f} s" + (
        f": {result.cause}" if result.cause else ""
    )


class NotebookScreen:
    """A display of its own in the notebook.

    Keeps the publisher of the moment it is made: a cell that captures its output replaces it for a while, and
    a thread's updates would be caught with it.
    """

    def __init__(self) -> None:
        from IPython.core.interactiveshell import InteractiveShell

        self._shell = InteractiveShell.instance() if InteractiveShell.initialized() else None
        self._publisher = self._shell.display_pub if self._shell is not None else None
        self._display_id = f"openclaw-panel-{uuid.uuid4().hex}"

    @property
    def live(self) -> bool:
        """Whether a display can be changed here: in a kernel, not in a terminal."""
        return getattr(self._shell, "kernel", None) is not None

    def show(self, data: dict[str, Any]) -> None:
        """Display a mime bundle in the cell that runs now."""
        from IPython.display import display

        display(data, raw=True, display_id=self._display_id)

    def update(self, data: dict[str, Any]) -> None:
        """Change the display, wherever it is."""
        if self._publisher is not None:
            self._publisher.publish(
                data=data, metadata={}, transient={"display_id": self._display_id}, update=True
            )
