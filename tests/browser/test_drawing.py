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
from openclaw_nb.protocol.messages import Measured

SCRIPT = Path(openclaw_nb.notebook.__file__).with_name("panel.js")
# What the script is given by anywidget: a model with its values and listeners.
MODEL = """async source => {
  const { default: widget } = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  const values = { head: "", devices: "", measured: "", run: "", blocking: false, kernel_id: "" };
  const listeners = new Map();
  const model = {
    get: (name) => values[name],
    on: (event, listener) => listeners.set(event, listener),
    off: () => {},
    send: () => {},
  };
  window.show = (changes) => {
    Object.assign(values, changes);
    Object.keys(changes).forEach((name) => listeners.get(`change:${name}`)());
    const shown = [...document.querySelectorAll(".oc-panel > div:not(.oc-buttons)")];
    const parts = ["head", "devices", "measured"];
    return parts.map((name, place) => {
      const wanted = document.createElement("div");
      wanted.innerHTML = values[name];
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


def shown(page: Any, picture: Picture) -> list[str]:
    """Show a picture; return the parts that differ from it."""
    return [
        part
        for part in page.evaluate(
            "changes => window.show(changes)",
            {"head": picture.head, "devices": picture.devices, "measured": picture.measured},
        )
        if part
    ]


def test_every_picture_is_shown_as_it_was_drawn(page: Any) -> None:
    monitor = Monitor(lambda: 0.0)
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
        assert shown(page, draw(view)) == []


def test_no_node_is_made_where_texts_and_values_differ(page: Any) -> None:
    first, second = (
        draw(PanelView(name="c", devices=(device(0, utilisation=u, work=f"step {u}"),))) for u in (10, 90)
    )
    assert shown(page, first) == []
    nodes = "[...document.querySelectorAll('.oc-panel *')]"
    page.evaluate(f"window.before = {nodes}")
    assert shown(page, second) == []
    assert page.evaluate(f"{nodes}.every((node, place) => node === window.before[place])")
    assert page.evaluate("document.querySelector('.oc-bar span').style.width") == "90%"
