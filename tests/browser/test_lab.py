"""What a person sees in JupyterLab: the panel moves while a cell blocks, and the stop button works."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.browser,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        not CHROMIUM.exists(), reason="Chromium is not at /usr/bin/chromium (Debian: apt install chromium)"
    ),
]

CELLS = [
    "%load_ext openclaw_nb\n%openclaw start -n 2",
    "%openclaw panel",
    """%%openclaw_parallel
import time, torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(640, 16), torch.randint(4, (640,))), batch_size=16)
print("built")""",
    """%%openclaw_parallel -s data_parallel
for epoch in range(100):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
    print("epoch", epoch)""",
    "%%openclaw_parallel\nprint('steps kept', model.weight.isfinite().all().item())",
    "%openclaw stop",
]


@pytest.fixture
def lab_page(tmp_path: Path) -> Iterator[Any]:
    """A page with the notebook open in JupyterLab."""
    from playwright.sync_api import sync_playwright

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "work.ipynb")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", f"--port={port}"]
    command += [f"--ServerApp.root_dir={tmp_path}", f"--IdentityProvider.token={token}"]
    environment = {**os.environ, "JUPYTER_CONFIG_DIR": str(tmp_path / "config")}
    with (
        open(tmp_path / "lab.log", "w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment) as server,
    ):
        try:
            wait_until(lambda: is_open(port), 60)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
                page = browser.new_page(viewport={"width": 1200, "height": 1400})
                page.goto(f"http://127.0.0.1:{port}/lab/tree/work.ipynb?token={token}&reset")
                page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
                page.wait_for_selector("#jp-main-statusbar:has-text('| Idle')", timeout=60_000)
                yield page
                browser.close()
        finally:
            server.terminate()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition: Callable[[], bool], seconds: float) -> float:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "it did not happen in time"
        time.sleep(0.05)
    return time.monotonic() - begin


def test_panel_and_stop_button(lab_page: Any) -> None:
    page = lab_page
    cells = page.locator(".jp-CodeCell")

    def start(number: int) -> None:
        """Press Control-Enter until the cell begins: JupyterLab drops it while it still connects."""
        for _ in range(10):
            cells.nth(number).locator(".cm-content").click()
            page.keyboard.press("Control+Enter")
            page.wait_for_timeout(1000)
            if prompt(number) != "[ ]:":
                return

    def prompt(number: int) -> str:
        return str(cells.nth(number).locator(".jp-InputArea-prompt").inner_text())

    def run(number: int) -> None:
        start(number)
        wait_until(lambda: re.fullmatch(r"\[\d+\]:", prompt(number)) is not None, 60)

    def output(number: int) -> str:
        return str(cells.nth(number).locator(".jp-OutputArea-output").all_inner_texts())

    for number in range(3):
        run(number)
    assert "2 workers" in output(0)
    assert "built" in output(2)
    start(3)
    wait_until(lambda: "samples/s" in output(1) and "epoch 0" in output(3), 60)
    assert prompt(3) == "[*]:"
    first = output(1)
    wait_until(lambda: output(1) != first, 10)
    assert prompt(3) == "[*]:"
    assert cells.nth(1).locator("svg").count() >= 2
    page.keyboard.press("Escape")
    page.keyboard.press("i")
    page.keyboard.press("i")
    assert wait_until(lambda: prompt(3) != "[*]:", 30) < 10
    assert "CellInterrupted" in output(3)
    run(4)
    assert "steps kept True" in output(4)
    run(5)
    assert "none is left" in output(5)
