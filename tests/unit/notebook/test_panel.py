from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.status import DeviceStatus
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.notebook.panel import IDLE_SECONDS, LIVE_SECONDS, REST_SECONDS, Pace, Panel, Step, panel_of
from openclaw_nb.notebook.panel_html import PanelView, Picture, draw, memory_text, percent_text, render_text
from openclaw_nb.notebook.panel_screen import NotebookScreen
from openclaw_nb.protocol.messages import Measured

GIB = 1024**3


def device(number: int = 0, **changes: Any) -> DeviceStatus:
    values: dict[str, Any] = {
        "id": f"CPU-{number}",
        "worker": f"worker-{number}",
        "host": "node-a",
        "name": "a processor",
        "state": "busy",
        "utilisation": 37.4,
        "memory_used": GIB,
        "memory_total": 4 * GIB,
        "temperature": None,
        "power": None,
        "pid": 4711,
        "work": "waits in all_reduce for 3 s",
        "seen": 0.0,
    }
    return DeviceStatus(**{**values, **changes})


def measured(num_workers: int = 2) -> Monitor:
    monitor = Monitor(lambda: 0.0)
    for n in range(1, 11):
        for worker in range(num_workers):
            size = 64 * (worker + 1)
            monitor.take(
                Measured(worker=worker, run_id="run-1", seq=n, at=n, steps=1, samples=size, loss=2.0 / n)
            )
    return monitor


def view(**changes: Any) -> PanelView:
    values: dict[str, Any] = {"name": "cluster-1", "backend": "gloo", "epoch": 3, "doing": "idle"}
    return PanelView(**{**values, **changes})


def draw_html(view: PanelView) -> str:
    return draw(view).html


def cells(text: str) -> list[list[str]]:
    """The words of each row of the table."""
    rows = re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)
    return [[re.sub("<.*?>", "", c) for c in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in rows]


class Recorder:
    """A screen that remembers what it was given."""

    live = True
    watched = True

    def __init__(self) -> None:
        self.shown: list[Picture] = []
        self.updates: list[Picture] = []

    def show(self, picture: Picture) -> None:
        self.shown.append(picture)

    def update(self, picture: Picture, *, blocking: bool) -> None:
        self.updates.append(picture)


# ---------------------------------------------------------------------------------------- the picture


def test_the_table_shows_each_device_with_its_samples_a_second() -> None:
    drawn = draw_html(view(devices=(device(0), device(1)), history=measured().latest(), running=True))
    assert cells(drawn) == [
        ["device", "state", "utilisation", "memory", "samples/s", "doing", "last seen", "pid"],
        ["CPU-0", "busy", "37 %", "1.0 GiB of 4.0 GiB", "64", "waits in all_reduce for 3 s", "now", "4711"],
        ["CPU-1", "busy", "37 %", "1.0 GiB of 4.0 GiB", "128", "waits in all_reduce for 3 s", "now", "4711"],
    ]
    assert re.findall(r'style="width:(\d+)%"', drawn) == ["37", "25", "37", "25"]
    assert "now <strong>192 samples/s</strong>" in drawn


def test_a_worker_that_never_reports_is_shown_and_the_others_count() -> None:
    monitor = measured(1)
    drawn = view(devices=(device(0), device(1)), history=monitor.latest(), running=True)
    assert [row[4] for row in cells(draw_html(drawn))] == ["samples/s", "64", "–"]
    assert "10 steps, 640 samples, 64 samples/s (1 worker)" in draw(drawn).text
    assert monitor.latest().straggler is None  # type: ignore[union-attr]


def test_readings_that_do_not_exist_are_dashes() -> None:
    unknown = device(utilisation=None, memory_used=None, memory_total=None, pid=None, work="", state="dead")
    assert cells(draw_html(view(devices=(unknown,))))[1] == ["CPU-0", "dead", "–", "–", "–", "–", "now", "–"]
    assert render_text(view(devices=(unknown,))).splitlines()[1] == (
        "CPU-0: dead, utilisation –, memory –, – samples/s, –, pid –"
    )


def test_a_worker_that_tells_nothing_was_last_seen_long_ago() -> None:
    rows = cells(draw_html(view(at=1000.0, devices=(device(0, seen=999.0), device(1, seen=930.0)))))
    assert [row[6] for row in rows] == ["last seen", "now", "70 s ago"]


def test_temperature_shows_where_any_device_tells_it() -> None:
    rows = cells(draw_html(view(devices=(device(0, temperature=61.4), device(1)))))
    assert [row[4] for row in rows] == ["temperature", "61 °C", "–"]


def test_sizes_and_shares_in_words() -> None:
    assert percent_text(99.6) == "100 %"
    assert memory_text(device(memory_total=None)) == "1.0 GiB of –"


def test_what_comes_from_outside_is_escaped() -> None:
    evil = "<script>alert('\"1')</script>"
    strange = device(id=evil, name=evil, worker=evil, host=evil, state=evil, work=evil)
    drawn = draw_html(view(name=evil, backend=evil, doing=evil, note=evil, devices=(strange,)))
    assert "<script" not in drawn
    assert "alert('" not in drawn


def test_headers_and_pictures_have_names_for_screen_readers() -> None:
    drawn = draw_html(view(devices=(device(),), history=measured().latest()))
    assert re.findall(r"<th (?!scope=)", drawn) == []
    pictures = re.findall(r"<svg[^>]*>", drawn)
    assert len(pictures) == 2
    assert all('role="img"' in p and 'aria-label="' in p for p in pictures)
    assert not re.search(r"<script|https?:|url\(|@import|\son\w+=", drawn)


def test_the_text_says_the_same() -> None:
    text = render_text(view(devices=(device(work="computes"),), history=measured(1).latest(), note="A note."))
    assert text.splitlines() == [
        "cluster-1, gloo group, epoch 3, idle",
        "CPU-0: busy, utilisation 37 %, memory 1.0 GiB of 4.0 GiB, 64 samples/s, computes, pid 4711",
        "10 steps, 640 samples, 64 samples/s (1 worker), loss 2.00 → 0.20",
        "A note.",
    ]


def test_an_update_of_many_devices_stays_small() -> None:
    # Jupyter's server drops what a kernel sends beyond 1 MB/s.
    drawn = draw_html(view(devices=tuple(device(n) for n in range(64)), history=measured(64).latest()))
    assert len(drawn) / LIVE_SECONDS < 200_000


# ------------------------------------------------------------------------------------------- the panel


@pytest.mark.parametrize("master", [None, MasterNode()])
def test_an_empty_panel_says_why(master: MasterNode | None) -> None:
    panel = Panel(master, Monitor())
    assert repr(panel) == "No cluster is running. Start one with %openclaw start."
    assert "No cluster is running" in panel.picture().html


def test_what_was_measured_shows_without_a_cluster() -> None:
    assert "10 steps, 640 samples" in repr(Panel(None, measured(1)))


@pytest.fixture
def displayed() -> Iterator[tuple[Panel, Recorder, Monitor]]:
    recorder, monitor = Recorder(), Monitor()
    panel = Panel(MasterNode(), monitor, screen=recorder)
    panel._ipython_display_()
    yield panel, recorder, monitor
    panel.close()


def test_a_displayed_panel_follows_what_is_measured(displayed: tuple[Panel, Recorder, Monitor]) -> None:
    panel, recorder, monitor = displayed
    assert panel.live
    assert len(recorder.shown) == 1
    monitor.take(Measured(worker=0, run_id="run-1", seq=1, at=1.0, steps=1, samples=64, loss=None))
    assert panel.refresh() is True
    assert panel.refresh() is False  # nothing new
    assert [("1 step, 64 samples" in picture.text) for picture in recorder.updates] == [True]


def test_one_thread_draws_however_often_it_is_displayed(displayed: tuple[Panel, Recorder, Monitor]) -> None:
    panel, recorder, _ = displayed
    thread = panel._thread
    panel._ipython_display_()
    assert panel._thread is thread
    assert len(recorder.shown) == 2
    panel.close()
    assert not panel.live
    panel._ipython_display_()
    assert panel.live


def test_a_cluster_has_one_panel() -> None:
    master, other = MasterNode(), MasterNode()
    assert panel_of(master, Monitor()) is panel_of(master, Monitor())
    assert panel_of(master, Monitor()) is not panel_of(other, Monitor())


def test_it_rests_when_nothing_changes_and_says_so() -> None:
    now = [0.0]
    recorder = Recorder()
    panel = Panel(MasterNode(), Monitor(), screen=recorder, clock=lambda: now[0])
    panel._ipython_display_()
    now[0] = REST_SECONDS + 1  # the thread may have begun before or after this
    deadline = time.monotonic() + 5
    while panel.live and time.monotonic() < deadline:
        now[0] += REST_SECONDS
        time.sleep(0.05)
    assert not panel.live
    assert recorder.updates[-1].text.endswith("%openclaw panel wakes it.")


def test_a_terminal_shows_it_once() -> None:
    assert NotebookScreen(lambda what, run_id: None).live is False


# -------------------------------------------------------------------------------------------- the pace


def test_twice_a_second_while_something_runs_seldom_when_not() -> None:
    assert _draws(active=True, seconds=10.0) == pytest.approx(10.0 / LIVE_SECONDS, abs=1)
    assert _draws(active=False, seconds=20.0) == pytest.approx(20.0 / IDLE_SECONDS, abs=1)


def _draws(*, active: bool, seconds: float, cost: float = 0.0) -> int:
    pace, count = Pace(0.0), 0
    for tick in range(1, int(seconds / LIVE_SECONDS) + 1):
        now = tick * LIVE_SECONDS
        if pace.next(now, "same", active) is Step.DRAW:
            pace.drew(now, now + cost)
            count += 1
    return count


def test_slow_drawing_takes_a_fifth_of_the_time_at_most() -> None:
    assert _draws(active=True, seconds=60.0, cost=1.0) * 1.0 <= 60.0 / 5 + 1


def test_a_run_that_begins_or_ends_is_drawn_at_once() -> None:
    pace = Pace(0.0)
    pace.next(0.5, "a", False)
    pace.drew(0.5, 0.5)
    assert pace.next(1.0, "a", False) is Step.WAIT
    assert pace.next(1.5, "a", True) is Step.DRAW
    pace.drew(1.5, 1.5)
    assert pace.next(1.6, "a", True) is Step.WAIT
    assert pace.next(1.7, "a", False) is Step.DRAW


def test_out_of_sight_it_is_drawn_seldom_and_does_not_rest_while_something_runs() -> None:
    pace = Pace(0.0)
    pace.next(0.0, "a", True)
    pace.drew(0.0, 0.0)
    assert pace.next(0.5, "a", True, watched=False) is Step.DRAW  # it has just gone
    pace.drew(0.5, 0.5)
    assert pace.next(1.0, "a", True, watched=False) is Step.WAIT
    assert pace.next(0.5 + IDLE_SECONDS, "a", True, watched=False) is Step.DRAW
    assert pace.next(2 * REST_SECONDS, "a", True, watched=False) is not Step.REST


def test_it_rests_after_ten_minutes_without_change() -> None:
    pace = Pace(0.0)
    pace.next(0.0, "a", False)
    assert pace.next(REST_SECONDS - 1, "a", False) is Step.DRAW
    assert pace.next(REST_SECONDS, "a", False) is Step.REST
    assert pace.next(REST_SECONDS, "b", False) is not Step.REST
    assert pace.next(5 * REST_SECONDS, "b", True) is Step.DRAW
    assert REST_SECONDS == 600
