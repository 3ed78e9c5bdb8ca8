"""Writers that are killed at any moment: the newest valid checkpoint is always there, and right.

Processes write checkpoints one after the other, whose tensor is filled with the number of the step, and keep two. Each
gets SIGKILL at a random moment. The processes are forked by one that has loaded torch and has no threads.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from openclaw_nb.engine.checkpoint.catalog import TENSORS, find_newest
from openclaw_nb.engine.checkpoint.store import Store
from openclaw_nb.engine.checkpoint.tensors import HostBuffer, read_tensors

directory, num_kills, size = Path(sys.argv[1]), int(sys.argv[2]), 300_000
random.seed(int(sys.argv[3]))

def write(first, begun):
    store, buffer = Store(directory), HostBuffer()
    store.open()
    os.write(begun, b"x")
    for step in range(first, first + 1000):
        layout = buffer.fill({"x": torch.full((size,), step, dtype=torch.int32)})
        store.write(step, {TENSORS: [layout.header(), buffer.data()], "state.json": [b"{}"]}, {})
        store.prune(2)

def newest():
    found = find_newest(directory)
    if found is None:
        return 0, ()
    x = read_tensors(found.path / TENSORS, {})["x"]
    assert x.shape == (size,) and bool((x == found.step).all()), (found.step, x.min(), x.max())
    return found.step, found.skipped

told = {"right": 0, "left_over": 0, "skipped": 0, "newest": 0}
for _ in range(num_kills):
    reading, begun = os.pipe()
    child = os.fork()
    if not child:
        write(told["newest"] + 1, begun)
        os._exit(0)
    os.close(begun)
    os.read(reading, 1)
    os.close(reading)
    time.sleep(random.uniform(0, 0.04))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    step, skipped = newest()
    assert step >= told["newest"], (step, told)
    left = [p.name for p in directory.iterdir() if p.name.startswith((".writing", ".removing"))]
    told["right"] += 1
    told["left_over"] += bool(left)
    told["skipped"] += len(skipped)
    told["newest"] = step
store = Store(directory)
store.open()
told["files"] = sorted(p.name for p in directory.iterdir())
print(json.dumps(told))
"""


def kill(directory: Path, num_kills: int, seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(directory), str(num_kills), str(seed)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["right"] == num_kills
    assert told["left_over"] >= num_kills / 8, "the kills came when nothing was being written"
    assert told["skipped"] == 0
    # On a busy machine few are complete before they are killed.
    assert min(2, num_kills // 8) <= sum(name.startswith("step-") for name in told["files"]) <= 3
    assert all(name == ".lock" or name.startswith("step-") for name in told["files"])


def test_killed_writers(tmp_path: Path) -> None:
    kill(tmp_path, 8, seed=1)


@pytest.mark.soak
def test_200_killed_writers(tmp_path: Path) -> None:
    kill(tmp_path, 200, seed=2)
