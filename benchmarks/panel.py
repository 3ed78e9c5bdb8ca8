"""What watching costs in the browser: the panel beside plotly's FigureWidget with the same traces.

JupyterLab in Chromium; eight workers that sleep, and what they would tell made up here, so that both sides draw the
same numbers at the same pace. Processor time is the kernel's, the server's and the browser's together, less what the
same three take in the same page when nothing is drawn.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from _common import ROOT, Row, percentile, report, use_environment

sys.path.insert(0, str(ROOT / "tools"))
from lab import Lab, Notebook, wait_until

_ROUNDS = 3
_TURNS = 2
_SECONDS = 20.0
_LONG_SECONDS = 60.0
_SETTLING_SECONDS = 15.0  # JupyterLab goes on loading after it shows a notebook

_SET_UP = """
%load_ext openclaw_nb
%openclaw start -n 8 --oversubscribe
import json, os, threading, time, tracemalloc
import plotly.graph_objects as go
from openclaw_nb.notebook.figures import plotly_specification
from openclaw_nb.notebook.panel import panel_of
from openclaw_nb.protocol.messages import Measured
from openclaw_nb.session import current_session

master, monitor = current_session().master, current_session().monitor

class Feed:
    "Tells what eight workers would; the loss is the time at which it was told."
    def __init__(self):
        self.seq, self.at, self.on = 0, 0.0, False
    def tell(self, seconds):
        self.seq += 1
        self.at += seconds
        for worker in range(8):
            spent = {"data": 0.1, "compute": 0.6, "wait": 0.02 * worker, "transfer": 0.1}
            monitor.take(Measured(worker=worker, run_id=master.last_run.run_id, seq=self.seq, at=self.at, steps=5,
                                  samples=320 + worker, loss=time.time() % 1000, seconds=spent, num_bytes=4096))
    def fill(self, seconds, every=0.5):
        for _ in range(int(seconds / every)):
            self.tell(every)
    def begin(self, every):
        self.on = True
        self.thread = threading.Thread(target=self._work, args=(every,), daemon=True)
        self.thread.start()
    def _work(self, every):
        while self.on:
            self.tell(every)
            time.sleep(every)
    def end(self):
        self.on = False
        self.thread.join()

class Peer:
    "The same traces in a FigureWidget, changed by one thread."
    def __init__(self):
        found = self.look()
        self.figure = go.FigureWidget(data=found["data"], layout=found["layout"])
        self.on = False
    def look(self):
        found = plotly_specification(monitor.latest())
        found["data"] = [t for t in found["data"] if t["type"] == "bar" or not t["name"].startswith("worker")]
        return found
    def begin(self, every):
        self.on = True
        self.thread = threading.Thread(target=self._work, args=(every,), daemon=True)
        self.thread.start()
    def _work(self, every):
        while self.on:
            begun = time.monotonic()
            with self.figure.batch_update():
                for trace, new in zip(self.figure.data, self.look()["data"]):
                    trace.x, trace.y = new["x"], new["y"]
            time.sleep(max(0.0, every - (time.monotonic() - begun)))
    def end(self):
        self.on = False
        self.thread.join()

feed = Feed()
"""
_SLEEP = "%%openclaw_parallel --background sleeping\nimport time\ntime.sleep(7200)"
_HOUR = """
tracemalloc.start()
before = tracemalloc.get_traced_memory()[0]
feed.fill(3600)
hour = tracemalloc.get_traced_memory()[0] - before
feed.fill(3600)
two = tracemalloc.get_traced_memory()[0] - before
tracemalloc.stop()
print(json.dumps([os.getpid(), hour, two]))
"""
_PANEL = "panel = panel_of(master, monitor)\npanel.interval_seconds = {every}\nfeed.begin({every})\npanel"
_PANEL_END = "feed.end(); panel.close()"
_PEER = "peer = Peer()\nfeed.begin({every})\npeer.begin({every})\npeer.figure"
_PEER_END = "peer.end(); feed.end()"
_BLOCK = "time.sleep({seconds})"
_STOP = "%openclaw stop"
_CELLS = [_SET_UP, _SLEEP, _HOUR]

_OURS_FIRST = ".oc-panel svg polyline"
_PEER_FIRST = ".js-plotly-plot .scatterlayer path.js-line"

_WATCH_FIRST = """selector => {
  window.__begun = Date.now(); window.__first = 0;
  const look = () => { if (!window.__first && document.querySelector(selector)) window.__first = Date.now(); };
  new MutationObserver(look).observe(document.body, {subtree: true, childList: true, attributes: true});
}"""
_WATCH_OURS = """() => {
  window.__lags = [];
  let last = "";
  new MutationObserver(() => {
    const found = (document.querySelector(".oc-panel")?.textContent ?? "").match(/→ ([\\d.]+)/);
    if (!found || found[1] === last) return;
    last = found[1];
    const lag = (Date.now() / 1000) % 1000 - parseFloat(last);
    window.__lags.push(lag < -500 ? lag + 1000 : lag);
  }).observe(document.querySelector(".jp-Notebook"), {subtree: true, childList: true, characterData: true});
}"""
_WATCH_PEER = """() => {
  window.__lags = [];
  document.querySelector(".js-plotly-plot").on("plotly_afterplot", () => window.__lags.push(0));
}"""


@dataclass(frozen=True)
class Side:
    """One of the two: the cells that begin and end it, and how its drawings are seen."""

    begin: str
    end: str
    first: str
    watch: str


_VALUE: dict[str, Any] = {"judged": "value"}
_OURS = Side(_PANEL, _PANEL_END, _OURS_FIRST, _WATCH_OURS)
_THEIRS = Side(_PEER, _PEER_END, _PEER_FIRST, _WATCH_PEER)


class Processes:
    """The three that take part in drawing."""

    def __init__(self, lab: Lab, kernel: int) -> None:
        browser = [p for p in psutil.Process().children(recursive=True) if "chrom" in p.name()]
        self._groups = {
            "kernel": [psutil.Process(kernel)],
            "server": [psutil.Process(lab.process.pid)],
            "browser": browser,
        }

    def seconds(self) -> dict[str, float]:
        """Return the processor time that each has taken."""
        return {name: sum(_cpu(p) for p in group) for name, group in self._groups.items()}

    def during(self, seconds: float) -> dict[str, float]:
        """Return how much of a core each takes, now."""
        before, begun = self.seconds(), time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - begun
        return {name: (now - before[name]) / passed for name, now in self.seconds().items()}


def _cpu(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


class Bench:
    """A notebook whose kernel holds the workers and the history."""

    def __init__(self, lab: Lab, page: Any) -> None:
        self._lab, self._page = lab, page
        notebook = lab.open(page, _CELLS)
        for number in range(3):
            notebook.run(number, 180)
        import json

        self.kernel, self.hour, self.two_hours = json.loads(notebook.text(2).strip())

    def _fresh(self, *cells: str) -> Notebook:
        """Open the page anew, on the same kernel."""
        return self._lab.open(self._page, cells)

    def opening(self, side: Side) -> float:
        """Return the seconds from starting the cell to the first point, in a page that has shown nothing yet."""
        notebook = self._fresh(side.begin.format(every=0.5), side.end)
        self._page.evaluate(_WATCH_FIRST, side.first)
        notebook.start(0)
        wait_until(lambda: self._page.evaluate("window.__first") > 0, 60)
        seconds = self._page.evaluate("(window.__first - window.__begun) / 1000")
        notebook.run(1)
        return float(seconds)

    def cost(self, side: Side, every: float) -> dict[str, float]:
        """Return the milliseconds of processor time an update takes: kernel, server, browser and their sum."""
        notebook = self._fresh(side.begin.format(every=every), side.end)
        processes = Processes(self._lab, self.kernel)
        notebook.run(0)
        self._page.wait_for_selector(side.first, state="attached")
        time.sleep(_SETTLING_SECONDS)
        self._page.evaluate(side.watch)
        busy = processes.during(_SECONDS)
        updates = len(self._page.evaluate("window.__lags"))
        notebook.run(1)
        time.sleep(3)
        idle = processes.during(_SECONDS)
        found = {name: 1000 * _SECONDS * (busy[name] - idle[name]) / max(1, updates) for name in busy}
        return {**found, "all": sum(found.values()), "updates": float(updates)}

    def lags(self, every: float, seconds: float) -> tuple[list[float], float]:
        """Return each drawing's lag behind the moment that it shows, while a cell blocks, and how many came late."""
        notebook = self._fresh(_PANEL.format(every=every), _BLOCK.format(seconds=seconds + 5), _PANEL_END)
        notebook.run(0)
        self._page.wait_for_selector(_OURS_FIRST, state="attached")
        time.sleep(2)
        notebook.start(1)
        self._page.evaluate(_WATCH_OURS)
        time.sleep(seconds)
        lags: list[float] = self._page.evaluate("window.__lags")
        notebook.wait(1, 60)
        notebook.run(2)
        drawn = len(self._page.evaluate("window.__lags"))
        time.sleep(1.5)
        return lags, len(self._page.evaluate("window.__lags")) - drawn

    def share(self, every: float, seconds: float) -> tuple[float, float]:
        """Return how much of a core the kernel takes with the panel, and without it."""
        notebook = self._fresh(_PANEL.format(every=every), _PANEL_END)
        processes = Processes(self._lab, self.kernel)
        notebook.run(0)
        time.sleep(_SETTLING_SECONDS)
        busy = processes.during(seconds)["kernel"]
        notebook.run(1)
        time.sleep(3)
        return busy, processes.during(seconds)["kernel"]

    def stop(self) -> None:
        """End the workers."""
        self._fresh(_STOP).run(0)


def _in_turns(measure: Callable[[Side], Any], rounds: int) -> tuple[list[Any], list[Any]]:
    found: Mapping[str, list[Any]] = {"ours": [], "peer": []}
    for _ in range(rounds):
        found["ours"].append(measure(_OURS))
        found["peer"].append(measure(_THEIRS))
    return found["ours"], found["peer"]


def _costs(bench: Bench, every: float) -> tuple[list[Row], dict[str, Any]]:
    ours, peer = _in_turns(lambda side: bench.cost(side, every), _TURNS)
    row = Row(
        f"an update, {1 / every:.0f} Hz",
        "ms of CPU",
        [found["all"] for found in ours],
        [found["all"] for found in peer],
        "FigureWidget",
        "<= 0.2x",
    )
    return [row], {"ours": ours, "peer": peer}


def main() -> None:
    use_environment()
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(Path(folder)) as lab,
        lab.page() as page,
    ):
        bench = Bench(lab, page)
        opened, peer_opened = _in_turns(bench.opening, _ROUNDS)
        slow, slow_parts = _costs(bench, 0.5)
        fast, fast_parts = _costs(bench, 0.1)
        lags, late = bench.lags(0.1, _LONG_SECONDS)
        busy, idle = bench.share(0.5, _LONG_SECONDS / 2)
        bench.stop()
    quiet = f"idle: {100 * idle:.2f} %, taken off"
    two_hours = f"two hours: {bench.two_hours / 1e6:.2f} MB"
    rows = [
        Row("from the cell to the first point", "s", opened, peer_opened, "FigureWidget", "<= 0.2x"),
        *slow,
        *fast,
        Row(
            f"{len(lags)} drawings at 10 Hz: lag, median",
            "s",
            [percentile(lags, 50)],
            reach="<= 0.2",
            **_VALUE,
        ),
        Row("the worst lag", "s", [max(lags)], reach="<= 1", **_VALUE),
        Row("drawings after the last was asked for", "", [late], reach="<= 0", **_VALUE),
        Row(
            "kernel, panel at 2 Hz", "% of a core", [100 * (busy - idle)], reach="<= 1", **_VALUE, note=quiet
        ),
        Row("an hour of history of 8 workers", "MB", [bench.hour / 1e6], note=two_hours),
    ]
    report("panel", rows, parts={"2 Hz": slow_parts, "10 Hz": fast_parts})


if __name__ == "__main__":
    main()
