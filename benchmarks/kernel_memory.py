"""What a running cluster adds to the notebook's kernel: memory, loading time, and whether torch came in.

A fresh Python process plays the kernel: an IPython shell, then ``%load_ext openclaw_nb``, two workers, 50 cells.
The peer is the same with ipyparallel's client and ``%%px``. The memory is the process's own (USS) and its
resident set (RSS), which counts shared libraries too; the workers' processes are not in it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from _common import (
    Row,
    activate_px,
    notebook_shell,
    quiet,
    report,
    run_side,
    side_asked_for,
    start_ipyparallel,
    start_ours,
    take_turns,
)

_ROUNDS = 5
_NUM_CELLS = 50
_MB = 1e6


def memory() -> dict[str, float]:
    import psutil

    info = psutil.Process().memory_full_info()
    return {"uss": info.uss / _MB, "rss": info.rss / _MB}


def added(before: dict[str, float], prefix: str) -> dict[str, float]:
    return {f"{prefix}_{kind}": value - before[kind] for kind, value in memory().items()}


def kernel(start: Callable[[Any], Callable[[], None]], load: str, magic: str) -> dict[str, float]:
    shell = notebook_shell()
    before = memory()
    begin = time.perf_counter()
    shell.run_line_magic("load_ext", load)
    found = {"load_milliseconds": 1000 * (time.perf_counter() - begin), **added(before, "loaded")}
    stop = start(shell)
    found |= added(before, "started")
    for number in range(_NUM_CELLS):
        shell.run_cell_magic(magic, "", f"{number}")
    found |= added(before, "after_cells")
    stop()
    return {**found, "torch_modules": sum(name.split(".")[0] == "torch" for name in sys.modules)}


def ours() -> dict[str, float]:
    def start(shell: Any) -> Callable[[], None]:
        start_ours(shell)
        return lambda: shell.run_line_magic("openclaw", "stop")

    return kernel(start, "openclaw_nb", "openclaw_parallel")


def ipyparallel() -> dict[str, float]:
    def start(shell: Any) -> Callable[[], None]:
        cluster, client = start_ipyparallel()
        activate_px(client)

        def stop() -> None:
            client.close()
            cluster.stop_cluster_sync()

        return stop

    return kernel(start, "ipyparallel", "px")


_SIDES = {"ours": ours, "ipyparallel": ipyparallel}
_ROWS = (
    ("%load_ext", "ms", "load_milliseconds", ""),
    ("USS added by %load_ext", "MB", "loaded_uss", ""),
    ("USS added, 2 workers running", "MB", "started_uss", ""),
    ("USS added, after 50 cells", "MB", "after_cells_uss", "<= 60 MB"),
    ("RSS added, after 50 cells", "MB", "after_cells_rss", "<= 60 MB"),
    ("torch modules in the kernel", "", "torch_modules", "<= 0"),
)


def main() -> None:
    if (side := side_asked_for()) is not None:
        with quiet():
            found = _SIDES[side]()
        print(json.dumps(found))
        return
    samples = take_turns({name: partial(run_side, __file__, name) for name in _SIDES}, _ROUNDS)
    report("kernel_memory", [row(samples, *description) for description in _ROWS])


def row(samples: dict[str, list[dict[str, float]]], what: str, unit: str, key: str, reach: str) -> Row:
    ours, peer = ([found[key] for found in samples[name]] for name in _SIDES)
    return Row(what, unit, ours, peer, "ipyparallel", reach, judged="ours")


if __name__ == "__main__":
    main()
