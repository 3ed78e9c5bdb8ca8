"""One rank raises while the other waits in an all-reduce: how long until it is seen, and until all go on.

A process plays the person's notebook: it runs the cell below, then one with an all-reduce over all ranks, and all
that it prints is read here with the time of reading. The error's message holds the time at which it was raised.
Peers: ipyparallel's ``%%px`` on engines with a gloo group formed by hand, and, when asked for with
``--nbdistributed``, nbdistributed's ``%%distributed``. It is left out otherwise because its kernel listens on all
interfaces without authentication and unpickles what comes; it is installed under ``build/`` only. What is not
seen within 20 s counts as not completed; then every process of that trial is ended.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from _common import (
    NUM_WORKERS,
    OUTPUT,
    Row,
    activate_px,
    end_tree,
    form_group_on,
    notebook_shell,
    report,
    side_asked_for,
    start_ipyparallel,
    start_ours,
    start_side,
)

_TRIALS = 3  # in each of our processes
_ROUNDS = 3
_DEADLINE_SECONDS = 20.0
_START_SECONDS = 120.0
_DELAY_SECONDS = 0.3
_NBDISTRIBUTED = OUTPUT / "nbdistributed"

_FAILING = f"""
import time
if rank == 1:
    time.sleep({_DELAY_SECONDS})  # the other one waits by now
    raise ValueError(f"planted at {{time.time()}}")
dist.all_reduce(torch.ones(1))
"""
_NEXT = "import torch; both = torch.ones(1); dist.all_reduce(both); print('sum', both.item())"
_GO, _ENDED, _NEXT_DONE = "== the cell begins", "== the cell has ended", "== the next cell has ended"
_PLANTED = re.compile(r"planted at (\d{9,}\.\d+)")


# --------------------------------------------------------------------------------- the person's process


def ours(shell: Any) -> str:
    start_ours(shell)
    return "openclaw_parallel"


def ipyparallel(shell: Any) -> str:
    _, client = start_ipyparallel()
    activate_px(client)
    form_group_on(client)
    shell.run_cell_magic("px", "", "import torch, torch.distributed as dist\nrank = dist.get_rank()")
    return "px"


def nbdistributed(shell: Any) -> str:
    shell.run_line_magic("load_ext", "nbdistributed")
    shell.run_line_magic("dist_init", f"-n {NUM_WORKERS}")
    manager = shell.find_cell_magic("distributed").__self__._comm_manager
    deadline = time.monotonic() + _START_SECONDS
    while True:  # a cell that is sent before the workers have connected is lost
        try:
            manager.send_to_all("get_status", {}, timeout=1.0)
        except TimeoutError:
            if time.monotonic() > deadline:
                raise
        else:
            return "distributed"


_SIDES: dict[str, Callable[[Any], str]] = {
    "ours": ours,
    "ipyparallel": ipyparallel,
    "nbdistributed": nbdistributed,
}


def play(side: str) -> None:
    shell = notebook_shell()
    magic = _SIDES[side](shell)
    shell.run_cell(f"%%{magic}\n{_NEXT}")
    for _ in range(_TRIALS if side == "ours" else 1):
        print(_GO, flush=True)
        shell.run_cell(f"%%{magic}\n{_FAILING}")
        print(_ENDED, flush=True)
        shell.run_cell(f"%%{magic}\n{_NEXT}")
        print(_NEXT_DONE, flush=True)
    if side == "ours":
        shell.run_line_magic("openclaw", "stop")


# ------------------------------------------------------------------------------------- who watches it


@dataclass
class Trial:
    """Seconds from the raise; None when not seen in time."""

    shown: float | None = None
    ended: float | None = None
    next_done: float | None = None


class Lines:
    """What a process prints, line by line, with the time of reading."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._queue: queue.SimpleQueue[tuple[float, str] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            self._queue.put((time.time(), line))
        self._queue.put(None)

    def until(self, deadline: float) -> Iterator[tuple[float, str]]:
        """Yield lines until ``deadline`` (seconds since the epoch), or the end of what is printed."""
        while (left := deadline - time.time()) > 0:
            try:
                line = self._queue.get(timeout=left)
            except queue.Empty:
                return
            if line is None:
                return
            yield line


def watch(lines: Lines) -> Trial | None:
    """Follow one trial; None when no further one begins."""
    said = []
    for began, line in lines.until(time.time() + _START_SECONDS):
        said.append(line)
        if _GO in line:
            return _follow(lines, began + _DELAY_SECONDS)
        if "stopped" in line:
            return None
    raise RuntimeError("The trial did not begin:\n" + "".join(said[-30:]))


def _follow(lines: Lines, raised: float) -> Trial:
    trial, works = Trial(), False
    for at, line in lines.until(raised + _DEADLINE_SECONDS):
        found = _PLANTED.search(line)
        if found and trial.shown is None:
            raised = float(found[1])
            trial.shown = at - raised
        works |= "sum 2.0" in line
        if _ENDED in line:
            trial.ended = at - raised
        if _NEXT_DONE in line:
            trial.next_done = at - raised if works else None
            break
    return trial


def trials_of(side: str) -> list[Trial]:
    """Run one process of a side to its last trial, or to the first that does not end in time."""
    process = start_side(__file__, side, stderr=subprocess.STDOUT)
    found: list[Trial] = []
    try:
        lines = Lines(process)
        while len(found) < (_TRIALS if side == "ours" else 1):
            trial = watch(lines)
            if trial is None:
                break
            found.append(trial)
            if trial.next_done is None:
                break
        else:
            process.wait(10) if side == "ours" else None
    finally:
        end_tree(process)
    return found


def install_nbdistributed() -> str:
    """Install the peer under ``build/``; return why it could not be had, or "".

    A command that does nothing stands in for ``pkill``, which the package would run on processes by their names.
    """
    if "--nbdistributed" not in sys.argv:
        return "left out; python benchmarks/release.py --nbdistributed runs it (see the file's head)"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    done = subprocess.run(
        [*command, "--target", str(_NBDISTRIBUTED), "nbdistributed==0.1.0"], capture_output=True, text=True
    )
    if done.returncode:
        return f"cannot be installed: {done.stderr.strip().splitlines()[-1]}"
    tools = _NBDISTRIBUTED / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "pkill").write_text("#!/bin/sh\nexit 0\n")
    (tools / "pkill").chmod(0o700)
    # Its workers are started with the `python` that PATH finds.
    os.environ["PATH"] = os.pathsep.join([str(tools), os.path.dirname(sys.executable), os.environ["PATH"]])
    os.environ["PYTHONPATH"] = str(_NBDISTRIBUTED)
    return ""


_ROWS = (
    ("the error is shown", "shown", "<= 0.2 s"),
    ("all ranks are out of the cell", "ended", "<= 2 s"),
    ("the next all-reduce over all ranks is done", "next_done", ""),
)


def rows(mine: list[Trial], theirs: list[Trial], peer: str) -> list[Row]:
    found = []
    for what, key, reach in _ROWS:
        ours, seen = (
            [value for trial in trials if (value := getattr(trial, key)) is not None]
            for trials in (mine, theirs)
        )
        missing = len(theirs) - len(seen)
        note = f">{_DEADLINE_SECONDS:.0f} s, not completed ({missing} of {len(theirs)})" if missing else ""
        found.append(Row(what, "s", ours, seen, peer, reach, judged="ours", note=note))
        if len(ours) < len(mine):
            print(f"{what}: {len(mine) - len(ours)} of {len(mine)} of our trials were not completed")
    return found


def main() -> None:
    if (side := side_asked_for()) is not None:
        play(side)
        return
    why_not = install_nbdistributed()
    peers = ["ipyparallel"] if why_not else ["ipyparallel", "nbdistributed"]
    mine: list[Trial] = []
    theirs: dict[str, list[Trial]] = {name: [] for name in peers}
    for _ in range(_ROUNDS):
        mine += trials_of("ours")
        for name in peers:
            theirs[name] += trials_of(name)
    labels = {"ipyparallel": "%%px", "nbdistributed": "nbdistributed"}
    if why_not:
        print(f"nbdistributed: {why_not}")
    report("release", [row for name in peers for row in rows(mine, theirs[name], labels[name])])


if __name__ == "__main__":
    main()
