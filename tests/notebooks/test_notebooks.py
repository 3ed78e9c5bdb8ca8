"""Every notebook runs to its end, as a person runs it; what it asserts of its numbers stands in its cells."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

pytestmark = [
    pytest.mark.cluster,
    # The client's own sockets: closed by its event loop some time after the kernel is gone.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


# What the others show of them has tests of its own; these are left to `make soak`.
SELDOM = ("02_", "03_", "04_", "06_", "07_", "09_", "10_", "11_", "13_", "14_")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.soak] * path.name.startswith(SELDOM))
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENCLAW_RUNTIME_DIR", str(tmp_path / "runtime"))  # away from others' clusters
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are made, not kept"
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    # One cell of the quickstart fails on purpose, and says so by its tag.
    client.execute()
    assert any(cell.get("outputs") for cell in notebook.cells)
    assert not any((tmp_path / "runtime").iterdir()), "every notebook ends its cluster"
