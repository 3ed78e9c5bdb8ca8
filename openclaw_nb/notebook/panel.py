"""The live panel: what the cluster does, drawn again and again, also while a cell blocks the kernel.

    master (devices, what runs) ──┐
    monitor (what was measured) ──┴─> PanelView ──> one display, changed by one thread

Knows when to look and when to stop looking; what it looks like is `panel_html`'s, and where it is shown
`panel_screen`'s. Only the newest state is ever drawn: nothing queues up.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from enum import Enum
from typing import Any

from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.run import CellRun, RunResult
from openclaw_nb.core.errors import NotStartedError
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.notebook.cellrun import blocks_kernel
from openclaw_nb.notebook.figures import LiveCharts
from openclaw_nb.notebook.panel_html import PanelView, Picture, draw
from openclaw_nb.notebook.panel_screen import NotebookScreen, Screen

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

    def next(self, now: float, state: Hashable, running: bool, watched: bool = True) -> Step:
        """Say what to do, knowing what there is to show, whether something runs, and whether anybody may look."""
        active = running and watched
        if running or active != self._active or state != self._state:
            self._changed_at = now
        began_or_ended, self._active, self._state = active != self._active, active, state
        if now - self._changed_at >= REST_SECONDS:
            return Step.REST
        return Step.DRAW if began_or_ended or now >= self._not_before else Step.WAIT

    def drew(self, started: float, ended: float, interval_seconds: float = LIVE_SECONDS) -> None:
        """Take how long drawing took; a slow one is followed by a longer pause."""
        usual = interval_seconds if self._active else IDLE_SECONDS
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
    interval_seconds : float
        How far apart its pictures are while something runs, at least; may be changed at any time.
    """

    def __init__(
        self,
        master: MasterNode | None,
        monitor: Monitor,
        *,
        screen: Screen | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval_seconds: float = LIVE_SECONDS,
    ) -> None:
        self._master = master
        self._monitor = monitor
        self._screen = screen
        self._clock = clock
        self.interval_seconds = interval_seconds
        self._last = PanelView()
        self._sent: Picture | None = None
        self._charts = LiveCharts()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()

    # --------------------------------------------------------------------------------------- showing

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return dict(self.picture().bundle())

    def __repr__(self) -> str:
        return self.picture().text

    def _ipython_display_(self) -> None:
        with self._lock:
            if self._screen is None:
                self._screen = NotebookScreen(self._act)
            self._sent = self.picture()
            self._screen.show(self._sent)
            if self._screen.live and self._master is not None:
                self._start()

    def picture(self) -> Picture:
        """Return the panel as it is now."""
        return draw(self.view(), self._charts)

    def refresh(self) -> bool:
        """Draw the panel anew if it has been displayed and looks different; return whether it did."""
        with self._lock:
            picture = self.picture()
            if self._screen is None or picture == self._sent:
                return False
            self._screen.update(picture, blocking=blocks_kernel(picture.run_id))
            self._sent = picture
            return True

    def _act(self, what: str, run_id: str) -> None:
        """Carry out what a button asks for; the run that it was pressed for may be over."""
        master = self._master
        if master is None or not master.running:
            return
        if what == "stop":
            master.stop()
        elif master.last_run is not None and master.last_run.run_id == run_id:
            master.last_run.interrupt()

    # --------------------------------------------------------------------------------------- looking

    def view(self) -> PanelView:
        """Look at the cluster and at what was measured."""
        with self._lock:
            self._last = self._look()
            return self._last

    def _look(self) -> PanelView:
        history = self._monitor.latest(worker_curves=False)
        try:
            if self._master is None or not self._master.running:
                return self._view_without_cluster()
            run, run_id = self._master.last_run, self._run_id()
            return PanelView(
                at=time.time(),
                name=self._master.name,
                backend=self._master.communication,
                epoch=self._master.epoch,
                doing=self._doing(run),
                devices=tuple(self._master.get_device_status()),
                history=history,
                running=history is not None and history.run_id == run_id,
                run_id=run_id,
                note=self._master.problem
                or (_NO_RUN if run is None else _NO_MEASUREMENT if history is None else ""),
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
            run_id="",
            note=_STOPPED,
        )

    @staticmethod
    def _doing(run: CellRun | None) -> str:
        if run is None:
            return "idle"
        if run.result is not None:
            return f"idle, {_ended(run.result)}"
        workers = "1 worker" if len(run.ranks) == 1 else f"{len(run.ranks)} workers"
        return f"a cell runs on {workers} for {run.seconds:.0f} s"

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
        while not stop.wait(self.interval_seconds):
            running = self._master is not None and self._master.running
            if was_running and not running:
                self.refresh()
                return
            was_running = running
            now = self._clock()
            step = pace.next(now, self._state(), self._run_id() != "", self._watched())
            if step is Step.REST:
                self._rest()
                return
            if step is Step.DRAW:
                self.refresh()
                pace.drew(now, self._clock(), self.interval_seconds)

    def _rest(self) -> None:
        with self._lock:
            self._last = replace(self._last, note=_RESTING)
            if self._screen is not None:
                self._screen.update(draw(self._last), blocking=False)

    def _run_id(self) -> str:
        run = self._master.last_run if self._master is not None else None
        return run.run_id if run is not None and run.running else ""

    def _watched(self) -> bool:
        """Whether anybody may look: while the kernel is blocked, nothing can tell that it is in sight again."""
        return self._screen is None or self._screen.watched or blocks_kernel(self._run_id())

    def _state(self) -> Hashable:
        """What tells that something happened; readings that always tremble do not."""
        try:
            if self._master is None or not self._master.running:
                return self._monitor.version
            states = tuple((worker.pid, worker.state) for worker in self._master.workers)
            return self._monitor.version, self._master.epoch, self._master.problem, states
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


_newest: Panel | None = None


def panel_of(master: MasterNode | None, monitor: Monitor) -> Panel:
    """Return the panel of a cluster: however often it is displayed, one thread draws it."""
    global _newest
    if _newest is None or _newest._master is not master or master is None:
        _newest = Panel(master, monitor)
    return _newest
