"""What cells show, on every rank: streams, displays, results, pages, bars, floods; and how they are found again."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import HANG_SECONDS, Lab

pytestmark = pytest.mark.cluster


def entries(lab: Lab, source: str, rank: int = 0, **options: Any) -> list[list[Any]]:
    """Run a cell and return what one rank showed."""
    run = lab.master.run_cell(source, **options)
    result = run.wait(HANG_SECONDS)
    assert result is not None
    assert result.ok, [f.message for f in result.failures.values()]
    found = []
    while (event := run.next_event(0)) is not None:
        if getattr(event, "rank", None) == rank:
            found.append(event.entry)
    return found


def text_of(shown: list[list[Any]], name: str = "stdout") -> str:
    return "".join(entry[2] for entry in shown if entry[:2] == ["stream", name])


def test_streams_of_python_c_and_children_land_in_their_cell(lab: Lab) -> None:
    source = """
import os, sys, subprocess
print("python", rank)
print("complaint", file=sys.stderr)
os.system("echo child of rank %d" % rank)
subprocess.run(["sh", "-c", "echo grandchild"])
os.write(1, b"descriptor\\n")
"""
    for rank in range(4):
        shown = entries(lab, source, rank)
        text = text_of(shown)
        assert set(text.split("\n")) >= {
            f"python {rank}",
            f"child of rank {rank}",
            "grandchild",
            "descriptor",
        }
        assert text_of(shown, "stderr") == "complaint\n"


def test_the_last_expression_and_displays(lab: Lab) -> None:
    assert entries(lab, "rank * 10", 3) == [["result", {"text/plain": "30"}, {}]]
    assert entries(lab, "rank * 10;") == []
    assert entries(lab, "x = 5") == []
    shown = entries(lab, "from IPython.display import display, HTML\ndisplay(HTML('<b>bold</b>'))")
    assert shown[0][:2] == [
        "display",
        {"text/plain": "<IPython.core.display.HTML object>", "text/html": "<b>bold</b>"},
    ]
    shown = entries(lab, "h = display('one', display_id=True)\nh.update('two')")
    assert [entry[4] for entry in shown] == [False, True]
    assert shown[0][3] == shown[1][3]
    assert entries(lab, "from IPython.display import clear_output\nclear_output(wait=True)") == [
        ["clear", True]
    ]


def test_pages_bars_shell_and_magics(lab: Lab) -> None:
    assert "number of items" in entries(lab, "len?")[0][1]["text/plain"]
    assert text_of(entries(lab, "!echo from the shell")).strip() == "from the shell"
    assert "Wall time" in text_of(entries(lab, "%%time\nsum(range(10))"))
    bars = entries(lab, "from tqdm.auto import tqdm\nfor _ in tqdm(range(3)): pass")
    assert "3/3" in text_of(bars, "stderr")
    bars = entries(lab, "from tqdm.notebook import trange\nfor _ in trange(4): pass")
    assert "4/4" in text_of(bars, "stderr")


def test_await(lab: Lab) -> None:
    shown = entries(
        lab,
        "import asyncio\nawait asyncio.sleep(0.01)\nprint('awaited')\n(await asyncio.gather(asyncio.sleep(0, 7)))[0]",
    )
    assert text_of(shown) == "awaited\n"
    assert shown[-1] == ["result", {"text/plain": "7"}, {}]


@pytest.mark.soak
def test_a_flood_is_bounded_at_its_source(lab: Lab) -> None:
    shown = entries(lab, "for i in range(300_000): print('line', i)")  # 3.9 MB
    sent = sum(len(str(entry)) for entry in shown)
    assert sent < 1_500_000
    omitted = [entry for entry in shown if entry[0] == "omit"][-1]
    num_head = text_of(shown).count("\n")
    num_tail = omitted[2].count("\n")
    assert num_head + omitted[1] + num_tail == 300_000
    assert omitted[2].endswith("line 299999\n")


def test_output_of_a_thread_that_outlives_its_cell_lands_nowhere(lab: Lab) -> None:
    lab.good("import threading, time\nthreading.Timer(0.3, lambda: print('late')).start()")
    assert text_of(entries(lab, "time.sleep(0.6)\nprint('mine')")) in ("mine\n", "late\nmine\n")


def test_names_that_cells_have(lab: Lab) -> None:
    result = lab.good(
        "import os, sys\nnames = rank, world_size, str(device), dist.get_rank(), os.getcwd(), sys.path[-1]"
    )
    assert result.ok
    import os
    import sys

    assert lab.pull("names", 2) == (2, 4, "cpu", 2, os.getcwd(), lab.pull("names", 0)[5])
    assert set(sys.path) <= set(_worker_path(lab))


def _worker_path(lab: Lab) -> list[str]:
    lab.good("path = list(sys.path)")
    path: list[str] = lab.pull("path")
    return path


def test_errors_name_the_line_of_the_notebooks_cell(lab: Lab) -> None:
    result = lab.run("# line 1\nx = 1\n\nraise ValueError('here')", execution_count=17)
    trace = "\n".join(result.failures[0].traceback)
    assert "In[17]" in trace
    assert "line 4" in trace


def test_big_variables_go_through_one_file(lab: Lab) -> None:
    import numpy as np

    big = np.arange(25_000_000, dtype=np.float64)  # 200 MB
    assert lab.master.push({"big": big}) >= big.nbytes
    lab.good("assert big.sum() == 25_000_000 * 24_999_999 / 2\nbig += rank")
    assert lab.pull("big", 3)[0] == 3
    lab.good("del big")
