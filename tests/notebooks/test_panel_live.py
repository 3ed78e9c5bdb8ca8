from __future__ import annotations

import time
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.cluster

START = """
from openclaw_nb.cluster.devices import Device
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.notebook.panel import Panel

master = MasterNode().start()
master.start_workers([Device(f"CPU-{i}", "cpu", i, "a core") for i in range(2)])
panel = Panel(master, Monitor())
"""
BUSY = "import time\\nend = time.time() + 3\\nwhile time.time() < end: pass"
BLOCKING = f'result = master.run_cell("{BUSY}").wait(60)\nprint("ok", result.ok)'
STOP = """
master.stop()
import time
end = time.time() + 5
while panel.live and time.time() < end: time.sleep(0.05)
print("live", panel.live)
"""
PANEL, RUN, CAPTURED, END = 1, 2, 3, 4


class Watcher(NotebookClient):
    """Runs a notebook and notes each display message with the cell that ran when it came."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[int, str, str | None, str]] = []

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] in ("display_data", "update_display_data"):
            content = msg["content"]
            text = content["data"].get("text/plain", "")
            self.seen.append((cell_index, msg["msg_type"], content["transient"].get("display_id"), text))
        return super().process_message(msg, cell, cell_index)


@pytest.fixture(scope="module")
def watched() -> Watcher:
    captured = f"%%capture caught\n{BLOCKING}"
    last = f"{STOP}print('caught', len(caught.outputs))"
    cells = [nbformat.v4.new_code_cell(source) for source in (START, "panel", BLOCKING, captured, last)]
    client = Watcher(nbformat.v4.new_notebook(cells=cells), timeout=90, kernel_name="python3")
    started = time.monotonic()
    client.execute()
    assert time.monotonic() - started < 90
    return client


def updates(watched: Watcher, cell: int) -> list[str]:
    (display_id,) = [
        shown for index, kind, shown, _ in watched.seen if index == PANEL and kind == "display_data"
    ]
    assert display_id
    wanted = (cell, "update_display_data", display_id)
    return [text for *what, text in watched.seen if tuple(what) == wanted]


def test_it_moves_while_a_cell_blocks_the_kernel(watched: Watcher) -> None:
    texts = updates(watched, RUN)
    assert len(texts) >= 3
    assert sum("a cell runs on 2 workers" in text for text in texts) >= 3
    assert "CPU-1: busy" in texts[-1]


def test_it_moves_while_a_cell_captures_its_output(watched: Watcher) -> None:
    assert len(updates(watched, CAPTURED)) >= 3
    assert "caught 0\n" in _printed(watched, END)


def test_updates_change_the_panel_and_not_the_running_cell(watched: Watcher) -> None:
    outputs = [cell.outputs for cell in watched.nb.cells]
    assert [output.output_type for output in outputs[RUN]] == ["stream"]
    assert _printed(watched, RUN) == "ok True\n"
    assert outputs[CAPTURED] == []
    (shown,) = outputs[PANEL]
    assert shown.data["text/plain"] == watched.seen[-1][-1]


def test_a_program_that_executes_notebooks_gets_no_widget(watched: Watcher) -> None:
    assert "widgets" not in watched.nb.metadata
    assert all(
        "widget-view" not in kind
        for cell in watched.nb.cells
        for o in cell.outputs
        for kind in o.get("data", {})
    )


def test_it_ends_with_the_cluster_and_its_last_readings_stay(watched: Watcher) -> None:
    assert "live False\n" in _printed(watched, END)
    (shown,) = watched.nb.cells[PANEL].outputs
    assert "The cluster has been stopped. These are the last readings." in shown.data["text/html"]
    assert "CPU-0: stopped, utilisation" in shown.data["text/plain"]


def _printed(watched: Watcher, cell: int) -> str:
    return "".join(o.text for o in watched.nb.cells[cell].outputs if o.output_type == "stream")
