from __future__ import annotations

import json
import subprocess
import sys

import pytest

import openclaw_nb
from openclaw_nb.core.errors import NotStartedError

LOAD = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "openclaw_nb")
table = shell.run_line_magic("openclaw", "devices")
print(json.dumps([len(table), [m for m in ("torch", "ipyparallel", "numpy", "plotly") if m in sys.modules]]))
"""

GUARDIAN = """
import sys
import openclaw_nb.cluster.guardian
names = {name.partition(".")[0] for name in sys.modules}
print(sorted(names - set(sys.stdlib_module_names) - {"openclaw_nb", "__main__"}))
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_every_public_name_is_there_and_sorted() -> None:
    assert openclaw_nb.__all__ == sorted(openclaw_nb.__all__)
    assert all(getattr(openclaw_nb, name) is not None for name in openclaw_nb.__all__)
    assert set(openclaw_nb.__all__) <= set(dir(openclaw_nb))


def test_resizing_needs_a_cluster() -> None:
    with pytest.raises(NotStartedError, match="Start one first"):
        openclaw_nb.resize_workers(2)


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'WorkerPool'"):
        _ = openclaw_nb.WorkerPool


def test_loading_the_extension_imports_nothing_heavy() -> None:
    num_devices, heavy = json.loads(run(LOAD))
    assert num_devices >= 1
    assert heavy == []


def test_the_guardian_needs_the_standard_library_only() -> None:
    # What an editable installation or a coverage tool loads at start is loaded without the guardian, too.
    usual = run("import sys; print(sorted({n.partition('.')[0] for n in sys.modules}))")
    assert set(json.loads(run(GUARDIAN).replace("'", '"'))) <= set(json.loads(usual.replace("'", '"')))
