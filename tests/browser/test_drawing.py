"""The panel's own script, alone in a page: whatever changes, it shows what the kernel has drawn last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import ARGUMENTS, CHROMIUM

import openclaw_nb.notebook
from openclaw_nb.cluster.status import DeviceStatus
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.notebook.panel_html import PanelView, Picture, draw
from openclaw_nb.notebook.panel_widget import PanelWidget
from openclaw_nb.protocol.messages import Measured

SCRIPT = Path(openclaw_nb.notebook.__file__).with_name("panel.js")
TOLD = ("head", "devices", "measured", "changes")
# What the script is given by anywidget: a model with its values and listeners.
MODEL = """async source => {
  const { default: widget } = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  const values = { head: "", devices: "", measured: "", changes: {}, run: "", blocking: false, kernel_id: "" };
  const listeners = new Map();
  const model = {
    get: (name) => values[name],
    on: (event, listener) => listeners.set(event, listener),
    off: () => {},
    send: () => {},
  };
  window.show = (told, drawn) => {
    Object.assign(values, told);
    Object.keys(told).forEach((name) => listeners.get(`change:${name}`)());
    const shown = [...document.querySelectorAll(".oc-panel > div:not(.oc-buttons)")];
    return drawn.map((html, place) => {
      const wanted = document.createElement("div");
      wanted.innerHTML = html;
      return shown[place].isEqualNode(wanted) ? "" : shown[place].innerHTML;
    });
  };
  const el = document.createElement("div");
  document.body.append(el);
  widget.render({ model, el });
}"""


@pytest.fixture
def page() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        page = browser.new_page()
        page.evaluate(MODEL, SCRIPT.read_text("utf-8"))
        yield page
        browser.close()


def device(number: int, **changes: Any) -> DeviceStatus:
    values: dict[str, Any] = {
        "id": f"CPU-{number}",
        "worker": f"worker-{number}",
        "host": "node-a",
        "name": "a processor",
        "state": "busy",
        "utilisation": 37.4,
        "memory_used": 2**30,
        "memory_total": 2**32,
        "temperature": None,
        "power": None,
        "pid": 4711,
        "work": "",
        "seen": 0.0,
    }
    return DeviceStatus(**{**values, **changes})


class Front:
    """A page that is told what the widget would send."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.told: list[dict[str, Any]] = []
        self._widget = PanelWidget()
        self._widget.observe(lambda change: self._changed.update({change.name: change.new}), list(TOLD))
        self._changed: dict[str, Any] = {}

    def take(self, picture: Picture) -> dict[str, Any]:
        """Let the widget show a picture; return what it would send."""
        self._changed = {}
        self._widget.show(picture, blocking=False)
        return self._changed

    def shown(self, picture: Picture) -> list[str]:
        """Show a picture; return the parts of the page that differ from it."""
        return self.show(self.take(picture), picture)

    def show(self, told: dict[str, Any], picture: Picture) -> list[str]:
        """Tell the page; return the parts of it that differ from a picture."""
        drawn = [picture.head, picture.devices, picture.measured]
        found = self.page.evaluate("([told, drawn]) => window.show(told, drawn)", [told, drawn])
        return [part for part in found if part]


def test_every_picture_is_shown_as_it_was_drawn(page: Any) -> None:
    monitor, front = Monitor(lambda: 0.0), Front(page)
    hostile = ['<img src=x onerror="1">', "a > b & c &amp; \"d\" 'e'", "plain", "", "–"]
    for number in range(40):
        for worker in range(2):
            told = Measured(
                worker=worker,
                run_id="run-1",
                seq=number + 1,
                at=number + 1,
                steps=1,
                samples=64,
                loss=1.0 / (number + 1),
                seconds={"compute": 0.5, "wait": 0.01 * number},
            )
            monitor.take(told)
        words = hostile[number % len(hostile)]
        # A worker leaves and comes back, and what runs ends: the structure changes, too.
        workers = [
            device(n, work=words, utilisation=number, state=("idle", "busy")[n])
            for n in range(1 + number % 3 // 2)
        ]
        view = PanelView(
            at=float(number),
            name=f"c{number} {words}",
            doing=words,
            devices=tuple(workers),
            history=monitor.latest() if number % 7 else None,
            running=number % 5 > 0,
            note=words if number % 4 == 0 else "",
        )
        assert front.shown(draw(view)) == []


def pictures(*utilisations: float) -> list[Picture]:
    return [
        draw(PanelView(name="c", devices=(device(0, utilisation=u, work=f"step {u}"),))) for u in utilisations
    ]


def test_no_node_is_made_where_texts_and_values_differ(page: Any) -> None:
    front, (first, second) = Front(page), pictures(10, 90)
    assert front.shown(first) == []
    nodes = "[...document.querySelectorAll('.oc-panel *')]"
    page.evaluate(f"window.before = {nodes}")
    told = front.take(second)
    assert list(told) == ["changes"]
    assert front.show(told, second) == []
    assert page.evaluate(f"{nodes}.every((node, place) => node === window.before[place])")
    assert page.evaluate("document.querySelector('.oc-bar span').style.width") == "90%"


def test_a_page_that_missed_all_but_the_newest_shows_it(page: Any) -> None:
    front, (first, second) = Front(page), pictures(10, 90)
    assert front.shown(first) == []
    assert front.shown(second) == []
    # The worker went, and came back just as it was at first.
    missed = front.take(draw(PanelView(name="c")))
    newest = front.take(first)
    assert missed["devices"] == ""
    assert front.show(missed | newest, first) == []
