"""A cell that shows more than anybody reads: bounded on the worker, in the kernel, and on the way to the front end."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

pytestmark = pytest.mark.cluster

# Beyond this many bytes a second, counted over that many seconds, Jupyter's server drops what a kernel sends.
SERVER_BYTES_PER_SECOND, SERVER_SECONDS = 1_000_000, 3.0
MEMORY = "import psutil\nmemory = psutil.Process().memory_info().rss"
IMPORTED = """
import gc, time
from openclaw_nb.engine.preload import Preload
[preload] = [thing for thing in gc.get_objects() if type(thing) is Preload]
while not preload.is_complete:
    time.sleep(0.05)
"""
LINES = "for i in range(200_000): print('line', i)"
DISPLAYS = "from IPython.display import display, HTML\nfor i in range(2000): display(HTML(f'{rank} {i}' + 'x' * 5000))"
RETURNS = "for i in range(200_000): print(f'\\rstep {i}', end='')"
ONE_LINE = "for i in range(200_000): print('word', i, end=' ')"
FIGURES = """
from IPython.display import display
handle = display({'image/png': 'A' * 1_000_000}, raw=True, display_id=True)
for i in range(40):
    display({'image/png': f'{rank} {i}' + 'A' * 1_000_000}, raw=True)
    handle.update({'image/png': f'{i}' + 'B' * 1_000_000}, raw=True)
print('last')
"""


class Kernel:
    """A kernel with a cluster; counts what each cell sends to the front end."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def run(self, source: str) -> tuple[int, str]:
        """Run a cell; return the most bytes that it sent in three seconds, as the server counts, and its last text."""
        request, worst, text = self.client.execute(source), 0, ""
        recent: deque[tuple[float, int]] = deque()
        while True:
            message = self.client.get_iopub_msg(timeout=90)
            content: dict[str, Any] = message["content"]
            recent.append((time.monotonic(), len(json.dumps(content, default=str))))
            while recent[0][0] < recent[-1][0] - SERVER_SECONDS:
                recent.popleft()
            worst = max(worst, sum(size for _, size in recent))
            assert message["msg_type"] != "error", content["traceback"]
            text = content.get("data", {}).get("text/plain", text)
            text = content.get("text", text)
            if content.get("execution_state") == "idle" and message["parent_header"].get("msg_id") == request:
                return worst, text

    def memory(self) -> tuple[int, int]:
        """Return the resident bytes of worker 0 and of the kernel."""
        self.run(f"%%openclaw_parallel -t 0\n{MEMORY}")
        self.run("%openclaw pull memory")
        worker = int(self.run("memory")[1])
        return worker, int(self.run(f"{MEMORY}\nmemory")[1])


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    started = Kernel()
    started.run("%load_ext openclaw_nb\n%openclaw start -n 2 --oversubscribe")
    # A worker goes on to import what training needs after it is there: 70 MB that no flood has taken.
    started.run(f"%%openclaw_parallel\n{IMPORTED}")
    yield started
    started.run("%openclaw stop")
    started.client.stop_channels()
    started.manager.shutdown_kernel(now=True)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(LINES, id="lines"),
        pytest.param(DISPLAYS, id="displays", marks=pytest.mark.soak),
        pytest.param(FIGURES, id="large figures", marks=pytest.mark.soak),
        pytest.param(RETURNS, id="returns"),
        pytest.param(ONE_LINE, id="one line"),
    ],
)
def test_a_flood_is_bounded_everywhere(kernel: Kernel, source: str) -> None:
    before = kernel.memory()
    worst, _ = kernel.run(f"%%openclaw_parallel\n{source}")
    assert worst < SERVER_SECONDS * SERVER_BYTES_PER_SECOND
    kernel.run(f"%%openclaw_parallel --background run\n{source}")
    worst, _ = kernel.run("done = run.wait()")
    assert worst < 10_000  # a background cell sends nothing
    assert int(kernel.run("len(run.output)")[1]) < 1_500_000
    kernel.run("del run, done")
    worker, own = kernel.memory()
    assert worker - before[0] < 40_000_000
    assert own - before[1] < 60_000_000


def test_the_end_of_a_flood_is_there_and_the_middle_is_counted(kernel: Kernel) -> None:
    kernel.run(f"%%openclaw_parallel --background run\n{LINES}")
    kernel.run("done = run.wait()")
    lines = kernel.run("print(run.output)")[1].splitlines()
    assert lines[:2] == ["[ranks 0-1]", "line 0"]
    assert lines[-1] == "line 199999"
    left_out = re.findall(r"\.\.\. ([\d,]+) lines left out \.\.\.", "\n".join(lines))
    counted = sum(int(number.replace(",", "")) for number in left_out)
    shown = [line for line in lines if re.fullmatch(r"line \d+", line)]
    assert counted + len(shown) in (200_000, 200_001)  # the head may end within a line
