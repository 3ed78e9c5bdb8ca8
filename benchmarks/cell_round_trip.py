"""How long a trivial cell takes on two workers, from the magic's call to its return.

Ours is ``%%openclaw_parallel``, the peer ipyparallel's ``%%px``, each on a cluster of its own, in one IPython
shell, in turns. One cell shows nothing, the other a value on each worker. The 95th percentile is taken of each
twentieth of the samples, so that it too can be compared turn by turn.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from typing import Any

from _common import (
    Row,
    activate_px,
    notebook_shell,
    percentile,
    quiet,
    report,
    start_ipyparallel,
    start_ours,
    take_turns,
    use_environment,
)

_ROUNDS = 400
_WARM_UP = 20
_BLOCK = 20
_CELLS = {"a cell that shows nothing": "x = 1", "a cell that shows a value": "40 + 2"}


def timed(shell: Any, magic: str, cell: str) -> Callable[[], float]:
    def measure() -> float:
        shown = io.StringIO()
        begin = time.perf_counter()
        with contextlib.redirect_stdout(shown):
            shell.run_cell_magic(magic, "", cell)
        seconds = time.perf_counter() - begin
        if ("42" in shown.getvalue()) != (cell == "40 + 2"):
            raise RuntimeError(f"%%{magic} showed {shown.getvalue()!r} for the cell {cell!r}.")
        return 1000 * seconds

    return measure


def blocks(values: Sequence[float]) -> list[float]:
    """Return the 95th percentile of each block of consecutive samples."""
    return [percentile(values[i : i + _BLOCK], 95) for i in range(0, len(values), _BLOCK)]


def measure(shell: Any) -> list[Row]:
    rows = []
    for what, cell in _CELLS.items():
        sides = {"ours": timed(shell, "openclaw_parallel", cell), "px": timed(shell, "px", cell)}
        take_turns(sides, _WARM_UP)
        samples = take_turns(sides, _ROUNDS)
        ours, peer = samples["ours"], samples["px"]
        rows.append(Row(f"{what}: median", "ms", ours, peer, "%%px", "<= 1.0x"))
        rows.append(Row(f"{what}: p95", "ms", blocks(ours), blocks(peer), "%%px", "<= 1.0x"))
    return rows


def main() -> None:
    use_environment()
    shell = notebook_shell()
    with quiet():
        start_ours(shell)
        cluster, client = start_ipyparallel()
        activate_px(client)
    try:
        rows = measure(shell)
    finally:
        with quiet():
            client.close()
            cluster.stop_cluster_sync()
            shell.run_line_magic("openclaw", "stop")
    report("cell_round_trip", rows)


if __name__ == "__main__":
    main()
