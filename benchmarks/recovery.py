"""A worker dies or is stopped in the midst of training, or the number of workers changes: how long until steps go on.

Ours: a data-parallel cell on two workers and a spare, with recovery on. Rank 1 kills itself (SIGKILL) after a step and
writes down when; the survivor writes down when each step is done, and how many ranks there are then. The peer is the
same loop by hand under torchrun with ``--max-restarts``, which ends all processes and starts them again, from the
checkpoint that rank 0 writes after each step. A run that does not come to its end within 90 s counts as such, and as
90 s where it made no further step.

``--torchft`` adds torchft (``pip install torchft==0.2.0`` first): two replica groups of one process each, on its gloo
group, with its lighthouse and managers in their quickest sensible setting; this script starts anew who dies.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import Row, end_tree, environment, report, run_side, side_asked_for, use_environment

_ROUNDS = 5
_STEPS = 60
_KILL_AT = 20
_DEADLINE_SECONDS = 90.0

MODEL = """
import json, os, signal, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = TensorDataset(torch.randn(64 * 60, 256), torch.randint(10, (64 * 60,)))
"""
SETUP = MODEL + "loader = DataLoader(data, batch_size=64, shuffle=True)\n"
CELL = """
done = []
for x, y in loader:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
    done.append((time.monotonic(), world_size))
    time.sleep(PACE)
    if len(done) == KILL_AT and rank == 1 and FAULT:
        open(PATH, "w").write(repr(time.monotonic()))
        os.kill(os.getpid(), FAULT)
"""
TORCHRUN = (
    MODEL
    + """
import sys
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
folder, kill_at, pace = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
kept, begun = folder + "/state.pt", 0
if os.path.exists(kept):
    state = torch.load(kept)
    begun = state["step"]
    model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
ddp = DistributedDataParallel(model)
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data, shuffle=True))
for number, (x, y) in enumerate(loader, start=1):
    if number <= begun:
        continue
    optimizer.zero_grad()
    loss_fn(ddp(x), y).backward()
    optimizer.step()
    if rank == 0:
        print(json.dumps([time.monotonic(), number]), flush=True)
        torch.save({"step": number, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, kept + ".new")
        os.replace(kept + ".new", kept)
    time.sleep(pace)
    if number == kill_at and rank == 1 and not begun:
        open(folder + "/killed", "w").write(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
"""
)


TORCHFT = (
    MODEL
    + """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
folder, kill_at, pace, replica, begun = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
def load(state):
    model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
def keep():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load, state_dict=keep,
    replica_id=f"replica_{replica}", store_addr="127.0.0.1", store_port=store.port, rank=0, world_size=1,
    timeout=timedelta(seconds=5), hostname="127.0.0.1",
)
ddp, managed = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
loader = DataLoader(data, batch_size=32, shuffle=True)
while manager.current_step() < 400:
    for x, y in loader:
        if manager.current_step() >= 400:
            break
        managed.zero_grad()
        loss_fn(ddp(x), y).backward()
        managed.step()
        if replica == 0:
            print(json.dumps([time.monotonic(), manager.num_participants()]), flush=True)
        time.sleep(pace)
        if manager.current_step() == kill_at and replica == 1 and begun == "first":
            open(folder + "/killed", "w").write(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
manager.shutdown(wait=False)
os._exit(0)
"""
)


def ours() -> dict[str, float]:
    """Return seconds from the kill to the next step, to the first at full size, and so on."""
    from openclaw_nb import MasterNode
    from openclaw_nb.cluster.devices import Device
    from openclaw_nb.strategies import DataParallelStrategy

    devices = [Device(f"CPU-{i}", "cpu", i, "") for i in range(5)]
    spec = DataParallelStrategy().spec()
    with MasterNode(oversubscribe=True) as master:
        master.start_workers(devices[:2], spares=devices[2:3])
        _await_warm(master)
        master.enable_auto_recovery(max_retries=3)
        found = _killed(master, spec)
        master.enable_auto_recovery(max_retries=0)
        found |= _stopped(master, spec)
        found |= _resized(master, spec)
    return found


def _await_warm(master: Any) -> None:
    while not all(worker.warm for worker in master.workers if worker.alive):
        for worker in master.workers:
            master._members._locate(worker)
        time.sleep(0.1)


def _cell(fault: int, path: str = "", pace: float = 0.02) -> str:
    named = {"PACE": pace, "KILL_AT": _KILL_AT, "FAULT": fault, "PATH": path}
    return "\n".join(f"{name} = {value!r}" for name, value in named.items()) + CELL


def _killed(master: Any, spec: Any) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/killed"
        master.run_cell(SETUP).wait(60)
        result = master.run_cell(_cell(int(signal.SIGKILL), path), strategy=spec).wait(_DEADLINE_SECONDS)
        at = float(Path(path).read_text())
    done = master.pull(["done"], 0)["done"]
    after = [(when, size) for when, size in done if when > at]
    return {
        "completed": float(result.ok),
        "next_step": after[0][0] - at,
        "full_size": next(when for when, size in after if size == 2) - at,
    }


def _stopped(master: Any, spec: Any) -> dict[str, float]:
    """Return when the culprit of a stop is known and the others are free."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/stopped"
        master.run_cell(SETUP).wait(60)
        run = master.run_cell(_cell(int(signal.SIGSTOP), path), strategy=spec)
        while not os.path.exists(path) or not Path(path).read_text():
            time.sleep(0.01)
        at = float(Path(path).read_text())
        result = run.wait(_DEADLINE_SECONDS)
        named = time.monotonic() - at - result.release_seconds
    for rank in result.busy:
        os.kill(master.workers[rank].pid, signal.SIGCONT)
    master.run_cell("pass").wait(30)
    return {"stop_named": named, "stop_said": float("is stopped" in result.cause)}


def _resized(master: Any, spec: Any) -> dict[str, float]:
    """Return the longest gap between steps while two become four become two, and the usual one."""
    master.run_cell(SETUP.replace("64 * 60", "64 * 1500")).wait(60)
    run = master.run_cell(_cell(0), strategy=spec)
    time.sleep(1)
    master.add_worker(2)
    while len(run.ranks) < 4:
        time.sleep(0.01)
    time.sleep(1)
    master.resize_workers(2)
    run.wait(_DEADLINE_SECONDS)
    done = master.pull(["done"], 0)["done"]
    gaps: dict[int, float] = {}
    steps = []
    for (before, size), (after, new) in itertools.pairwise(done):
        if size == new:
            steps.append(after - before)
        else:
            gaps[new] = max(gaps.get(new, 0.0), after - before)
    return {"grow": gaps[4], "shrink": gaps[2], "step": sorted(steps)[len(steps) // 2]}


def torchrun() -> dict[str, float]:
    """Return the same for a script under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(TORCHRUN)
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "3",
        ]
        command += ["--standalone", str(script), folder, str(_KILL_AT), "0.02"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, env=environment(), text=True, **pipes)
        hangs = False
        try:
            output, _ = process.communicate(timeout=_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            hangs = True
            end_tree(process)
            output, _ = process.communicate()
        finally:
            end_tree(process)
        at = float((Path(folder) / "killed").read_text())
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    next_step = next((when - at for when, _ in lines if when > at), _DEADLINE_SECONDS)
    return {
        "completed": float(process.returncode == 0 and not hangs),
        "next_step": next_step,
        "full_size": next_step,
    }


def torchft() -> dict[str, float]:
    """Return the same for two replicas under torchft, the dead one started again at once."""
    from torchft.coordination import LighthouseServer

    # A worker counts as dead after a second without a heartbeat (default 5 s); a quorum waits 0.1 s for who is to come.
    house = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=1000
    )
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(TORCHFT)
        variables = environment() | {
            "TORCHFT_LIGHTHOUSE": house.address().replace(socket.gethostname(), "127.0.0.1")
        }

        def start(replica: int, begun: str) -> subprocess.Popen[str]:
            command = [sys.executable, str(script), folder, str(_KILL_AT), "0.02", str(replica), begun]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            return subprocess.Popen(command, env=variables, text=True, **pipes)

        watched, doomed = start(0, "first"), start(1, "first")
        again = None
        try:
            doomed.wait(_DEADLINE_SECONDS)
            again = start(1, "again")
            output, _ = watched.communicate(timeout=_DEADLINE_SECONDS)
            hangs = False
        except subprocess.TimeoutExpired:
            hangs = True
            end_tree(watched)
            output, _ = watched.communicate()
        finally:
            for process in filter(None, (watched, doomed, again)):
                end_tree(process)
            house.shutdown()
        at = float((Path(folder) / "killed").read_text())
    after = [(when, size) for when, size in map(json.loads, output.splitlines()) if when > at]
    late = (at + _DEADLINE_SECONDS, 2)
    return {
        "completed": float(watched.returncode == 0 and not hangs),
        "next_step": next(iter(after), late)[0] - at,
        "full_size": next((entry for entry in after if entry[1] == 2), late)[0] - at,
    }


SIDES = {"ours": ours, "torchrun": torchrun, "torchft": torchft}
_PEERS = {"torchrun": "torchrun --max-restarts", "torchft": "torchft"}
Samples = dict[str, list[dict[str, float]]]


def _row(what: str, unit: str, key: str, samples: Samples, peer: str, reach: str = "") -> Row:
    ours, theirs = ([sample[key] for sample in samples[side]] for side in ("ours", peer))
    return Row(what, unit, ours, theirs, _PEERS[peer], reach, "ours")


def main() -> None:
    sides = [side for side in SIDES if side != "torchft" or "--torchft" in sys.argv]
    samples: Samples = {name: [] for name in sides}
    for _ in range(_ROUNDS):
        for name in sides:
            samples[name].append(run_side(__file__, name, 300.0))
    rows = []
    for peer in sides[1:]:
        rows += [
            _row(
                "kill -9 of a rank to the next step of the other", "s", "next_step", samples, peer, "<= 0.5 s"
            ),
            _row(
                "the same to the first at full size, with a spare", "s", "full_size", samples, peer, "<= 2 s"
            ),
            _row("share of runs that complete", "", "completed", samples, peer, ">= 1"),
        ]
    mine = {key: [sample[key] for sample in samples["ours"]] for key in samples["ours"][0]}
    stopped = "a rank is stopped (SIGSTOP): it is named and the others are free"
    rows += [
        Row(stopped, "s", mine["stop_named"], reach="<= 2 s", judged="ours"),
        Row("two workers become four, ready ones: the gap", "s", mine["grow"], mine["step"], "a step"),
        Row("four become two: the gap", "s", mine["shrink"], mine["step"], "a step"),
    ]
    report("recovery", rows)


if __name__ == "__main__":
    side = side_asked_for()
    if side is None:
        main()
    else:
        use_environment()
        print(json.dumps(SIDES[side]()))
