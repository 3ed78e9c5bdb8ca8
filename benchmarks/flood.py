"""A cell that prints a million lines: what reaches the front end, and what stays in memory.

A real kernel is driven as a front end drives it, and what it sends is weighed: Jupyter's server drops what goes beyond
1 MB/s over three seconds. The peer is the same cell without workers.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from _common import Row, report, use_environment
from jupyter_client.manager import start_new_kernel

_LINES = "for i in range(1_000_000): print('line', i)"
_MEMORY = "import psutil\nmemory = psutil.Process().memory_info().rss"
_SERVER_SECONDS = 3.0


@dataclass
class Weighed:
    """What one cell sent: seconds until its end, bytes in all, and at most in a second, over three seconds."""

    seconds: float
    num_bytes: int
    worst: float
    text: str


class Kernel:
    """A kernel, its client, and a scale."""

    def __init__(self) -> None:
        self._manager, self._client = start_new_kernel(kernel_name="python3")

    def run(self, source: str) -> Weighed:
        """Run a cell and weigh what comes."""
        begun, request = time.monotonic(), self._client.execute(source)
        recent: deque[tuple[float, int]] = deque()
        total, worst, text = 0, 0, ""
        while True:
            message = self._client.get_iopub_msg(timeout=300)
            now, content = time.monotonic(), message["content"]
            size = len(json.dumps(content, default=str))
            recent.append((now, size))
            while recent[0][0] < now - _SERVER_SECONDS:
                recent.popleft()
            total, worst = total + size, max(worst, sum(size for _, size in recent))
            text = content.get("data", {}).get("text/plain", text)
            if content.get("execution_state") == "idle" and message["parent_header"].get("msg_id") == request:
                return Weighed(now - begun, total, worst / _SERVER_SECONDS, text)

    def memory(self) -> tuple[float, float]:
        """Return the resident megabytes of worker 0 and of the kernel."""
        self.run(f"%%openclaw_parallel -t 0\n{_MEMORY}")
        self.run("%openclaw pull memory")
        worker = float(self.run("memory").text)
        return worker / 1e6, float(self.run(f"{_MEMORY}\nmemory").text) / 1e6

    def end(self) -> None:
        """End it."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


def main() -> None:
    use_environment()
    kernel = Kernel()
    kernel.run("%load_ext openclaw_nb\n%openclaw start -n 2 --oversubscribe")
    before = kernel.memory()
    shown = kernel.run(f"%%openclaw_parallel\n{_LINES}")
    begun = kernel.run(f"%%openclaw_parallel --background run\n{_LINES}")
    waited = kernel.run("done = run.wait()")
    read = kernel.run("output = run.output")
    after = kernel.memory()
    kernel.run("%openclaw stop")
    plain = kernel.run(_LINES)
    kernel.end()
    value: dict[str, Any] = {"judged": "value"}
    rows = [
        Row(
            "a million lines on two workers, to the cell's end",
            "s",
            [shown.seconds],
            [plain.seconds],
            "one kernel",
        ),
        Row("the most in a second, shown", "kB", [shown.worst / 1e3], [plain.worst / 1e3], "one kernel"),
        Row("shown in all", "kB", [shown.num_bytes / 1e3], [plain.num_bytes / 1e3], "one kernel"),
        Row("the most in a second, in the background", "kB", [max(begun.worst, waited.worst) / 1e3], **value),
        Row("reading `run.output`", "s", [read.seconds]),
        Row("worker's memory, added by both cells", "MB", [after[0] - before[0]]),
        Row("kernel's memory, added by both cells", "MB", [after[1] - before[1]]),
    ]
    report("flood", rows)


if __name__ == "__main__":
    main()
