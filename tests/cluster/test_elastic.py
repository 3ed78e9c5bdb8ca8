"""Workers come into a running training cell and leave it: it ends with the parameters of single-device training.

The loops are written as people write them. In each, a worker dies at one batch and another takes its place (a spare),
or one is added or removed; the right values are those of the same cells on one device, the tolerance that of
`test_data_parallel`: another number of parts changes the order of float32 sums and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.run import CellRun, RunResult
from openclaw_nb.protocol.messages import StrategySpec

from .conftest import HANG_SECONDS, Lab, cpu_devices, single_device
from .test_data_parallel import SETUP, SGD_TOLERANCE, STATE

pytestmark = pytest.mark.cluster

# The pace gives who is to come in the time for it: nothing is timed.
PACE = """
import os, signal, time
me = globals().get("rank", 0)
num_batches = 0
def pace():
    global num_batches
    num_batches += 1
    if globals().get("dist") is None:
        return
    if num_batches == {kill_at} and me == {victim}:
        os.kill(os.getpid(), signal.SIGKILL)
    if num_batches >= {kill_at} and world_size != {full}:
        time.sleep(0.1)
"""
MORE = """
from tqdm import tqdm
from itertools import islice
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
valid = DataLoader(loader.dataset, batch_size=64)
class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.losses = model, optimizer, []
    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = loss_fn(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
    def fit(self, epochs):
        for epoch in range(epochs):
            self.epoch()
    def epoch(self):
        self.model.train()
        for x, y in loader:
            pace()
            self.step(x, y)
def step(x, y):
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()
def one_epoch():
    total = 0.0
    for x, y in loader:
        pace()
        total += step(x, y)
    return total
def evaluate():
    model.eval()
    with torch.no_grad():
        value = sum(loss_fn(model(x), y).item() for x, y in valid)
    model.train()
    return value
"""
LOOPS = {
    "plain": """
for epoch in range(8):
    for x, y in loader:
        pace()
        step(x, y)
    scheduler.step()
""",
    "enumerate": """
for epoch in range(8):
    for i, (x, y) in enumerate(loader):
        pace()
        step(x, y)
        if i == 3: optimizer.param_groups[0]["lr"] *= 0.9
""",
    "tqdm": """
for epoch in range(8):
    for x, y in tqdm(loader, disable=True):
        pace()
        step(x, y)
""",
    "a function an epoch": """
totals = []
for epoch in range(8):
    totals.append(one_epoch())
    scheduler.step()
""",
    "a trainer, epoch by epoch": """
trainer = Trainer(model, optimizer)
for epoch in range(8):
    trainer.epoch()
""",
    "validation after each pass": """
best = 1e9
for epoch in range(8):
    for x, y in loader:
        pace()
        step(x, y)
    best = min(best, evaluate())
    scheduler.step()
""",
    "validation in the midst of a pass": """
for epoch in range(8):
    for i, (x, y) in enumerate(loader):
        pace()
        step(x, y)
        if i % 3 == 2:
            evaluate()
""",
    "while": """
epoch = 0
while epoch < 8:
    for x, y in loader:
        pace()
        step(x, y)
    epoch += 1
""",
    "with and try": """
from contextlib import nullcontext
try:
    with nullcontext():
        for epoch in range(8):
            with torch.enable_grad():
                for x, y in loader:
                    pace()
                    step(x, y)
finally:
    closed = True
""",
    "early break": """
for epoch in range(20):
    for x, y in loader:
        pace()
        step(x, y)
    if epoch == 7:
        break
else:
    raise AssertionError("never")
""",
    "islice and zip": """
for epoch in range(8):
    for (x, y), k in zip(islice(loader, 4), range(100)):
        pace()
        step(x, y)
""",
    "configurations by name": """
for name, rate in {"slow": 0.01, "fast": 0.02}.items():
    for group in optimizer.param_groups: group["lr"] = rate
    for epoch in range(4):
        for x, y in loader:
            pace()
            step(x, y)
""",
}


@pytest.fixture(scope="module")
def spared() -> Iterator[Lab]:
    """Two workers and a spare; whoever dies is the next spare when a new process has come up."""
    master = MasterNode()
    master.start()
    master.start_workers(cpu_devices(2), spares=cpu_devices(3)[2:])
    master.enable_auto_recovery(max_retries=3)
    yield Lab(master)
    master.stop()


def pace(kill_at: int = -1, victim: int = -1, full: int = 2) -> str:
    return PACE.format(kill_at=kill_at, victim=victim, full=full)


def start(lab: Lab, loop: str, prelude: str, setup: str = SETUP, **options: Any) -> CellRun:
    lab.good(setup + pace() + MORE)
    return lab.master.run_cell(prelude + loop + STATE, strategy=StrategySpec(name="data_parallel", **options))


def end(run: CellRun) -> RunResult:
    result = run.wait(HANG_SECONDS)
    assert result is not None, f"the cell hangs: {run.who_waits_where()}"
    assert result.ok, (result.cause, [f"{f.error_type}: {f.message}" for f in result.failures.values()])
    return result


def check(lab: Lab, loop: str, setup: str = SETUP) -> None:
    """Compare every rank with the same cells on one device."""
    expected = single_device(setup + pace() + MORE, loop + STATE)["state"]
    for rank in lab.master._members.all_ranks():
        state = lab.pull("state", rank)
        for name, value in expected.items():
            torch.testing.assert_close(
                state[name],
                value,
                rtol=SGD_TOLERANCE,
                atol=SGD_TOLERANCE,
                msg=lambda m, n=name, r=rank: f"rank {r}, {n}: {m}",
            )


def await_spare(lab: Lab) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not any(w.spare and w.alive and w.warm for w in lab.master.workers):
        assert time.monotonic() < deadline
        for worker in lab.master.workers:
            if worker.alive and not worker.warm:
                lab.master._members._locate(worker)
        time.sleep(0.05)


@pytest.mark.parametrize("name", LOOPS)
def test_a_spare_takes_the_place_of_a_worker_that_dies(spared: Lab, name: str) -> None:
    await_spare(spared)
    result = end(start(spared, LOOPS[name], pace(kill_at=6, victim=1)))
    assert len(result.deaths) == 1
    assert len(result.joined) == 1, result.notes
    assert result.joined[0].num_ranks == 2
    check(spared, LOOPS[name])
