"""A cell that shows more than anybody reads: bounded on the worker, in the kernel, and on the way to the front end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

pytestmark = pytest.mark.cluster

SERVER_BYTES_PER_SECOND = 1_000_000  # beyond it, Jupyter's server drops what a kernel sends
MEMORY = "import psutil\nmemory = psutil.Process().memory_info().rss"
LINES = "for i in range(200_000): print('line', i)"
DISPLAYS = "from IPython.display import display, HTML\nfor i in range(2000): display(HTML(f'{rank} {i}' + 'x' * 5000))"
RETURNS = "for i in range(200_000): print(f'\\rstep {i}', end='')"


class Kernel:
    """A kernel with a cluster; counts what each cell sends to the front end."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def run(self, source: str) -> tuple[int, str]:
        """Run a cell; return the bytes that it sent and its last text."""
        request, num_bytes, text = self.client.execute(source), 0, ""
        while True:
            message = self.client.get_iopub_msg(timeout=90)
            num_bytes += len(json.dumps(message["content"], default=str))
            content: dict[str, Any] = message["content"]
            assert message["msg_type"] != "error", content["traceback"]
            text = content.get("data", {}).get("text/plain", text)
            text = content.get("text", text)
            if content.get("execution_state") == "idle" and message["parent_header"].get("msg_id") == request:
                return num_bytes, text

    def worker_memory(self) -> int:
        self.run(f"%%openclaw_parallel -t 0\n{MEMORY}")
        self.run("%openclaw pull memory")
        return int(self.run("memory")[1])


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    started = Kernel()
    started.run("%load_ext openclaw_nb\n%openclaw start -n 2 --oversubscribe")
    yield started
    started.run("%openclaw stop")
    started.client.stop_channels()
    started.manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("source", [LINES, DISPLAYS, RETURNS], ids=["lines", "displays", "returns"])
def test_a_flood_is_bounded_everywhere(kernel: Kernel, source: str) -> None:
    before = kernel.worker_memory()
    num_bytes, _ = kernel.run(f"%%openclaw_parallel\n{source}")
    assert num_bytes < 3 * SERVER_BYTES_PER_SECOND  # the server looks at three seconds together
    kernel.run(f"%%openclaw_parallel --background run\n{source}")
    num_bytes, _ = kernel.run("done = run.wait()")
    assert num_bytes < 10_000  # a background cell sends nothing
    assert int(kernel.run("len(run.output)")[1]) < 1_500_000
    assert kernel.worker_memory() - before < 40_000_000


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
