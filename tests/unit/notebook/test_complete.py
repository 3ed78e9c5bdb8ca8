from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

import openclaw_nb
from openclaw_nb.notebook.complete import Completion, LiveNames, complete_line, line_in_worker_cell
from openclaw_nb.notebook.options import VERBS

NAMES = {
    "device": ["CPU-0", "CPU-1", "auto"],
    "free device": ["CPU-2", "CPU-3"],
    "worker": ["worker-0", "worker-1", "CPU-0", "CPU-1"],
    "target": ["0", "1", "worker-0", "worker-1", "CPU-0", "CPU-1"],
    "rank": ["0", "1", "all"],
    "strategy": ["data_parallel", "data"],
    "count": ["1", "2"],
    "notebook variable": ["batch", "mean", "model"],
    "worker variable": ["loader", "loss", "model"],
}


class SomeNames:
    def of_kind(self, kind: str, prefix: str) -> Iterable[str]:
        return NAMES.get(kind, [])


def complete(line: str) -> tuple[str, list[str]] | None:
    found = complete_line(line, SomeNames())
    return (found.fragment, found.matches) if isinstance(found, Completion) else None


@pytest.mark.parametrize(
    ("line", "fragment", "matches"),
    [
        ("%openclaw ", "", [*VERBS, "--help"]),
        ("%openclaw st", "st", ["start", "status", "stop"]),
        ("x = %openclaw st", "st", ["start", "status", "stop"]),
        ("a, b = %openclaw pan", "pan", ["panel"]),
        ("    %openclaw res", "res", ["resize", "reset"]),
        ("%openclaw resize ", "", ["1", "2"]),
        ("%openclaw add CPU-2,", "", ["CPU-3"]),
        ("%openclaw remove ", "", ["worker-0", "worker-1", "CPU-0", "CPU-1"]),
        ("%openclaw remove c", "c", ["CPU-0", "CPU-1"]),
        ("%openclaw recover ", "", ["on", "off"]),
        ("%openclaw start --d", "--d", ["--devices"]),
        (
            "%openclaw start -n 2 --",
            "--",
            [
                *("--spares", "--devices", "--config", "--backend", "--communication", "--port"),
                *("--name", "--lease", "--oversubscribe", "--help"),
            ],
        ),
        ("%openclaw start --backend ", "", ["local", "thread", "cuda", "mpi"]),
        ("%openclaw start -n ", "", ["1", "2"]),
        ("%openclaw start --devices c", "c", ["CPU-0", "CPU-1"]),
        ("%openclaw start --devices CPU-0,", "", ["CPU-1", "auto"]),
        ("%openclaw start --communication=g", "g", ["gloo"]),
        ("%openclaw push m", "m", ["mean", "model"]),
        ("%openclaw push mean m", "m", ["model"]),
        ("%openclaw push mean --targets worker-0,w", "w", ["worker-1"]),
        ("%openclaw pull lo", "lo", ["loader", "loss"]),
        ("%openclaw pull loss --reduce ", "", ["sum", "mean"]),
        ("%openclaw pull loss --from a", "a", ["all"]),
        ("%openclaw status ", "", ["--help"]),
        ("%%openclaw_parallel --strategy d", "d", ["data_parallel", "data"]),
        ("%%openclaw_parallel -s data --model ", "", ["loader", "loss", "model"]),
        ("%%openclaw_parallel --sync", "--sync", ["--sync-frequency"]),
        ("%openclaw_parallel --he", "--he", ["--help"]),
    ],
)
def test_what_fits(line: str, fragment: str, matches: list[str]) -> None:
    assert complete(line) == (fragment, matches)


@pytest.mark.parametrize("line", ["x = 1", "openclaw st", "%time openclaw", "%openclaw", "'%openclaw st"])
def test_other_lines_are_left_alone(line: str) -> None:
    assert complete(line) is None


def test_the_lines_of_a_cell_that_runs_on_the_workers() -> None:
    cell = "\n%%openclaw_parallel -s data\nx = 1\nmod"
    assert line_in_worker_cell(cell, 1) is None
    assert line_in_worker_cell(cell, 3) == "mod"
    assert line_in_worker_cell("%%time\n%%openclaw_parallel\nmod", 2) == "mod"
    assert line_in_worker_cell("x = 1\n# %%openclaw_parallel\nmod", 2) is None


def test_in_a_shell() -> None:
    shell = InteractiveShell()
    openclaw_nb.load_ipython_extension(shell)
    openclaw_nb.load_ipython_extension(shell)  # a second time changes nothing
    with provisionalcompleter():
        found = list(shell.Completer.completions("y = %openclaw st", 16))
    assert [(c.text, c.start, c.end) for c in found] == [
        ("start", 14, 16),
        ("status", 14, 16),
        ("stop", 14, 16),
    ]
    openclaw_nb.unload_ipython_extension(shell)
    with provisionalcompleter():
        assert "status" not in [c.text for c in shell.Completer.completions("%openclaw st", 12)]
    assert shell.find_line_magic("openclaw") is None


def test_a_directory_of_checkpoints(tmp_path: Path) -> None:
    for name in ("run-1", "run-2", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "run-3").write_text("a file")
    found = complete_line(f"%%openclaw_parallel -s data --checkpoint {tmp_path}/ru", LiveNames(None))
    assert isinstance(found, Completion)
    assert found.matches == [f"{tmp_path}/run-1/", f"{tmp_path}/run-2/"]
