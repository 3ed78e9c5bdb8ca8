"""What a person sees in JupyterLab: the panel moves while a cell blocks, its buttons work, and what it showed stays."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab import Notebook, wait_until

# The folder's conftest is no module that can be imported by name.
START, PANEL, BUILD, TRAIN, NEXT, STOP = range(6)
WIDGET = "application/vnd.jupyter.widget-view+json"


def train(notebook: Notebook) -> None:
    """Start the training cell and wait until the panel shows it."""
    notebook.start(TRAIN)
    wait_until(lambda: re.search(r"now [\d.,]+ samples/s", notebook.text(PANEL)) is not None, 60)
    assert notebook.runs(TRAIN)


def until_training(notebook: Notebook) -> None:
    for cell in (START, PANEL, BUILD):
        notebook.run(cell)
    train(notebook)


def button(notebook: Notebook, name: str) -> Any:
    return notebook.output(PANEL).get_by_role("button", name=name)


def moves(notebook: Notebook) -> None:
    """Wait until the panel has changed twice while the training cell keeps the kernel."""
    for _ in range(2):
        before = notebook.text(PANEL)
        wait_until(lambda before=before: notebook.text(PANEL) != before, 20)
    assert notebook.runs(TRAIN)


def violations(notebook: Notebook, selector: str) -> list[str]:
    """What axe-core has to say of a part of the page."""
    package = importlib.util.find_spec("axe_playwright_python")
    assert package is not None
    assert package.origin is not None
    script = Path(package.origin).with_name("axe.min.js").read_text("utf-8")
    # JupyterLab's module loader would take the script for one of its modules.
    notebook.page.evaluate(
        "s => { const d = window.define; window.define = undefined; (0, eval)(s); window.define = d; }",
        script,
    )
    found = notebook.page.evaluate(
        "async selector => (await axe.run(selector)).violations.map(v => `${v.id}: ${v.nodes[0].html}`)",
        selector,
    )
    return list(found)


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["light", "dark"])
def test_the_panel_moves_and_its_button_stops_a_cell(open_lab: Callable[..., Notebook], dark: bool) -> None:
    notebook = open_lab(dark=dark)
    until_training(notebook)
    devices = notebook.output(PANEL).get_by_role("group", name="Devices")
    devices.focus()
    moves(notebook)
    assert devices.evaluate("element => element === document.activeElement"), "a change takes the focus away"
    assert notebook.output(PANEL).locator("svg").count() >= 3
    assert violations(notebook, ".oc-panel") == []
    button(notebook, "Interrupt the cell").click()
    assert notebook.wait(TRAIN, 30) < 10
    assert "CellInterrupted" in notebook.text(TRAIN)
    wait_until(lambda: button(notebook, "Interrupt the cell").count() == 0, 10)
    assert violations(notebook, ".oc-panel") == []
    notebook.run(NEXT)
    assert "steps kept True" in notebook.text(NEXT)
    (shown,) = notebook.saved().cells[PANEL].outputs
    assert WIDGET not in shown.data
    assert "<svg" in shown.data["text/html"]
    assert "the last cell was stopped" in shown.data["text/plain"]


def test_the_notebooks_own_stop_button(open_lab: Callable[..., Notebook]) -> None:
    notebook = open_lab()
    until_training(notebook)
    notebook.page.keyboard.press("Escape")
    notebook.page.keyboard.press("i")
    notebook.page.keyboard.press("i")
    assert notebook.wait(TRAIN, 30) < 10
    assert "CellInterrupted" in notebook.text(TRAIN)
    notebook.run(STOP)
    assert "none is left" in notebook.text(STOP)


@pytest.mark.soak
def test_without_a_widget_manager_it_is_html_that_moves(open_lab: Callable[..., Notebook]) -> None:
    notebook = open_lab(widgets=False)
    until_training(notebook)
    moves(notebook)
    assert button(notebook, "Interrupt the cell").count() == 0


@pytest.mark.parametrize(
    "version", [*(pytest.param(v, marks=pytest.mark.soak) for v in ("6.31.0", "7.3.0")), ""]
)
def test_the_cluster_can_be_stopped_while_a_cell_blocks(
    open_lab: Callable[..., Notebook], tmp_path: Path, version: str
) -> None:
    variables = {"PYTHONPATH": str(install(f"ipykernel=={version}", tmp_path / "kernel"))} if version else {}
    notebook = open_lab(["import ipykernel\nipykernel.__version__"], variables=variables)
    notebook.run(STOP + 1)
    assert version in notebook.text(STOP + 1)
    until_training(notebook)
    button(notebook, "Stop the cluster").click()
    button(notebook, "Really stop?").click()
    assert notebook.wait(TRAIN, 30) < 10
    wait_until(lambda: "The cluster has been stopped" in notebook.text(PANEL), 20)
    notebook.run(NEXT)
    assert "No cluster is running" in notebook.text(NEXT)


def install(requirement: str, folder: Path) -> Path:
    """Install one package, without what it needs, where only one kernel finds it."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(folder),
        requirement,
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{requirement} cannot be had here: {done.stderr[-300:]}")
    return folder
