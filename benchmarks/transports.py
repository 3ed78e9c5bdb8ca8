"""The same training cell with its gradients summed by MPI, through shared memory and by gloo.

The model is that of `large_model`. Each way has workers of its own, started by a process of its own that waits while
the others have their turn.
"""

from __future__ import annotations

import os
import sys
from subprocess import PIPE, Popen

from _common import (
    Row,
    end_tree,
    notebook_shell,
    quiet,
    report,
    side_asked_for,
    start_ours,
    start_side,
    take_turns,
    use_environment,
)
from data_parallel import Job, Ours
from large_model import MODEL

_ROUNDS = 8
_START = {
    "mpi": "--backend mpi --communication mpi",
    "shared memory": "--communication auto",
    "gloo": "--communication gloo",
}


def job(num_workers: int) -> Job:
    return Job(MODEL, 32, steps=12, warm_up=3, num_workers=num_workers)


def serve(way: str, num_workers: int) -> None:
    """Run the cell once for each line that comes, and tell how long its counted steps took."""
    shell = notebook_shell()
    with quiet():
        start_ours(shell, num_workers, _START[way])
    try:
        ours = Ours(shell, job(num_workers))
        for _ in sys.stdin:
            with quiet():
                seconds = ours.seconds()
            print(seconds, flush=True)
    finally:
        with quiet():
            shell.run_line_magic("openclaw", "stop")


def seconds_of(server: Popen[str]) -> float:
    assert server.stdin is not None
    assert server.stdout is not None
    print(file=server.stdin, flush=True)
    return float(server.stdout.readline())


def measure(num_workers: int) -> list[Row]:
    servers = {way: start_side(__file__, f"{way},{num_workers}", stdin=PIPE) for way in _START}
    try:
        turns = {way: lambda server=server: seconds_of(server) for way, server in servers.items()}  # type: ignore[misc]
        take_turns(turns, 2)
        seconds = take_turns(turns, _ROUNDS)
    finally:
        for server in servers.values():
            assert server.stdin is not None
            server.stdin.close()
            server.wait(60)
            end_tree(server)
    what, each = f"25 M parameters, {num_workers} workers", job(num_workers)
    counted = (each.steps - each.warm_up) * each.batch_size
    speed = {way: [counted / value for value in values] for way, values in seconds.items()}
    return [
        Row(f"{what}: sums by MPI", "samples/s", speed["mpi"], speed["gloo"], "gloo"),
        Row(f"{what}: sums by MPI", "samples/s", speed["mpi"], speed["shared memory"], "shared memory"),
    ]


def main() -> None:
    use_environment()
    os.environ["OPENCLAW_OVERSUBSCRIBE"] = "1"
    if (side := side_asked_for()) is not None:
        way, num_workers = side.rsplit(",", 1)
        serve(way, int(num_workers))
        return
    report("transports", [row for num_workers in (2, 4) for row in measure(num_workers)])


if __name__ == "__main__":
    main()
