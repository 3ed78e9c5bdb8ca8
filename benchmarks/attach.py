"""Coming back: from the first line of a fresh process to a cluster taken over and its first answered cell.

A process starts two workers and detaches; then fresh processes attach, run a cell, and detach again. There is no peer:
other tools lose the workers with the kernel.
"""

from __future__ import annotations

import json
import os
import tempfile
import time

from _common import Row, notebook_shell, quiet, report, run_side, side_asked_for, start_ours, use_environment

_ROUNDS = 10


def start() -> dict[str, float]:
    """Start the workers and leave them."""
    shell = notebook_shell()
    start_ours(shell)
    shell.run_cell_magic("openclaw_parallel", "", "x = rank + 41")
    shell.run_line_magic("openclaw", "detach")
    return {}


def attach() -> dict[str, float]:
    """Attach as a fresh kernel does, and leave the workers again."""
    begun = time.perf_counter()
    shell = notebook_shell()
    shell.run_line_magic("load_ext", "openclaw_nb")
    ready = time.perf_counter()
    shell.run_line_magic("openclaw", "attach")
    attached = time.perf_counter()
    shell.run_cell_magic("openclaw_parallel", "", "assert x == rank + 41")
    answered = time.perf_counter()
    shell.run_line_magic("openclaw", "detach")
    return {
        "load": ready - begun,
        "attach": attached - ready,
        "cell": answered - attached,
        "all": answered - begun,
    }


def end() -> dict[str, float]:
    """End the workers."""
    shell = notebook_shell()
    shell.run_line_magic("load_ext", "openclaw_nb")
    shell.run_line_magic("openclaw", "attach")
    shell.run_line_magic("openclaw", "stop")
    return {}


def main() -> None:
    use_environment()
    sides = {"start": start, "attach": attach, "end": end}
    if side := side_asked_for():
        with quiet():
            found = sides[side]()
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OPENCLAW_RUNTIME_DIR"] = folder
        run_side(__file__, "start")
        rounds = [run_side(__file__, "attach") for _ in range(_ROUNDS)]
        run_side(__file__, "end")
    parts = {
        "load": "`%load_ext` in a fresh process",
        "attach": "`%openclaw attach`",
        "cell": "the first cell",
    }
    rows = [Row(what, "s", [found[name] for found in rounds]) for name, what in parts.items()]
    whole = [found["all"] for found in rounds]
    report("attach", [*rows, Row("all of it", "s", whole, reach="<= 2", judged="value")])


if __name__ == "__main__":
    main()
