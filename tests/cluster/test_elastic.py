"""Workers come into a running training cell and leave it: it ends with the parameters of single-device training.

The loops are written as people write them. In each, a worker dies at one batch and another takes its place (a spare),
or one is added or removed; the right values are those of the same cells on one device, the tolerance that of
`test_data_parallel`: another number of parts changes the order of float32 sums and nothing else.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.run import CellRun, RunResult
from openclaw_nb.core.errors import ResourceError, UnknownNameError, UsageError
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
    lab = Lab(master)
    yield lab
    lab.master.stop()


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


def check(lab: Lab, loop: str, setup: str = SETUP, ranks: Sequence[int] | None = None) -> None:
    """Compare every rank, or some, with the same cells on one device."""
    expected = single_device(setup + pace() + MORE, loop + STATE)["state"]
    for rank in lab.master._members.all_ranks() if ranks is None else ranks:
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


OFTEN = ("enumerate", "a function an epoch")


@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(n, marks=pytest.mark.soak) for n in LOOPS if n not in OFTEN)]
)
def test_a_spare_takes_the_place_of_a_worker_that_dies(spared: Lab, name: str) -> None:
    await_spare(spared)
    result = end(start(spared, LOOPS[name], pace(kill_at=6, victim=1)))
    assert len(result.deaths) == 1
    assert len(result.joined) == 1, result.notes
    assert result.joined[0].num_ranks == 2
    check(spared, LOOPS[name])


def test_rank_0_dies_and_its_successor_gives_the_variables(spared: Lab) -> None:
    await_spare(spared)
    result = end(start(spared, LOOPS["plain"], pace(kill_at=6, victim=0)))
    assert (len(result.deaths), len(result.joined)) == (1, 1), result.notes
    check(spared, LOOPS["plain"])


SHORT = LOOPS["enumerate"].replace("range(8)", "range(3)")


def spare_of(lab: Lab) -> int:
    (pid,) = [worker.pid for worker in lab.master.workers if worker.spare]
    assert pid is not None
    return pid


def test_an_idle_spare_dies_and_the_cell_has_as_many_ranks_as_before(spared: Lab) -> None:
    await_spare(spared)
    run = start(spared, SHORT, pace(kill_at=0, full=1))
    os.kill(spare_of(spared), signal.SIGKILL)
    result = end(run)
    assert (len(result.deaths), len(result.joined), len(run.ranks)) == (0, 0, 2)
    check(spared, SHORT)
    await_spare(spared)


@pytest.mark.parametrize("after", [0.02, pytest.param(0.0, marks=pytest.mark.soak)])
def test_a_spare_dies_on_its_way_in(spared: Lab, after: float) -> None:
    await_spare(spared)
    spare, victim = spare_of(spared), next(w.pid for w in spared.master.workers if not w.spare)
    assert victim is not None
    run = start(spared, SHORT, pace(kill_at=0, full=1))
    time.sleep(0.3)
    os.kill(victim, signal.SIGKILL)
    time.sleep(after)
    os.kill(spare, signal.SIGKILL)
    result = end(run)
    assert len(result.deaths) in (1, 2), "two, if it was in"
    await_spare(spared)
    there = [
        rank for rank, number in spared.master._members.all_ranks().items() if number in run.ranks.values()
    ]
    assert there
    check(spared, SHORT, ranks=there)


@pytest.mark.soak
def test_a_spare_has_imported_beforehand_what_the_variables_come_from(spared: Lab, tmp_path: Path) -> None:
    (tmp_path / "seldom.py").write_text("import time\nimported = time.monotonic()\n")
    spared.good(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport seldom", targets=[0, 1])
    end(start(spared, LOOPS["plain"], pace()))  # the spare imports while it runs
    await_spare(spared)
    began = time.monotonic()
    result = end(start(spared, LOOPS["plain"], pace(kill_at=6, victim=1)))
    assert len(result.joined) == 1, result.notes
    spared.good("imported = seldom.imported\ndel seldom")
    assert max(spared.pull("imported", rank) for rank in range(2)) < began


@pytest.mark.soak
@pytest.mark.parametrize("case", ["batchnorm", "accumulate", "loader processes"])
def test_a_newcomer_takes_part_in(spared: Lab, case: str) -> None:
    await_spare(spared)
    loop, setup, right = LOOPS["plain"].replace("    scheduler.step()\n", ""), SETUP, SETUP
    options: dict[str, Any] = {}
    if case == "batchnorm":
        setup = right = SETUP.replace("nn.Tanh()", "nn.BatchNorm1d(32), nn.Tanh()")
        assert setup != SETUP
    elif case == "accumulate":
        options, right = {"accumulate": 2}, SETUP.replace("batch_size=32", "batch_size=64")
    else:
        setup = SETUP.replace("shuffle=True", "shuffle=True, num_workers=1")
    result = end(start(spared, loop, pace(kill_at=6, victim=1), setup, options=options))
    assert (len(result.deaths), len(result.joined)) == (1, 1), result.notes
    check(spared, loop, right)


def test_a_name_that_cannot_be_sent_is_named_and_the_cell_goes_on(spared: Lab) -> None:
    await_spare(spared)
    loop = """
import os
import random
import signal
import threading
lock = threading.Lock()
for epoch in range(2):
    for x, y in loader:
        pace()
        with lock:
            step(x, y)
"""
    slow = loop.replace("pace()", "pace()").replace("range(2)", "range(3)")
    result = end(start(spared, slow, pace(kill_at=6, victim=1)))
    assert (len(result.deaths), len(result.joined)) == (1, 0)
    (said,) = [note for note in result.notes if "takes part when the cell has ended" in note]
    assert "`lock` (lock: cannot pickle '_thread.lock' object)" in said
    assert "line" in said
    survivors = [rank for rank in spared.master._members.all_ranks() if rank in result.values]
    expected = single_device(SETUP + pace() + MORE, slow + STATE)["state"]
    state = spared.pull("state", survivors[0])
    torch.testing.assert_close(state, expected, rtol=SGD_TOLERANCE, atol=SGD_TOLERANCE)


def test_gradients_that_the_cell_adds_up_by_itself_are_not_repeated(spared: Lab) -> None:
    await_spare(spared)
    loop = """
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        pace()
        loss_fn(model(x), y).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
"""
    spared.good(SETUP + pace() + MORE)
    result = spared.run(pace(kill_at=2, victim=1) + loop, strategy=StrategySpec(name="data_parallel"))
    (failure,) = [f for f in result.failures.values() if not f.consequence]
    assert failure.error_type == "RefusedError"
    assert "use --accumulate instead" in failure.message


def until(condition: Any) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def numbers(lab: Lab) -> list[int]:
    return list(lab.master._members.all_ranks().values())


@pytest.fixture
def resizable() -> Iterator[Lab]:
    master = MasterNode()
    master.start()
    master.start_workers(cpu_devices(2))
    yield Lab(master)
    master.stop()


def test_a_cell_that_runs_grows_and_shrinks_and_its_result_stays(resizable: Lab) -> None:
    """Two become three become one; other requests come meanwhile."""
    lab = resizable
    loop = LOOPS["enumerate"].replace("range(8)", "range(60)").replace("*= 0.9", "*= 0.99")
    run = start(lab, loop, pace(kill_at=0, full=1))
    added = lab.master.add_worker(1)
    assert [worker.id for worker in added] == ["worker-2"]
    until(lambda: len(run.ranks) == 3)
    removals = [
        threading.Thread(target=lab.master.remove_worker, args=(which,)) for which in ("worker-0", "worker-2")
    ]
    for thread in removals:
        thread.start()
    for thread in removals:
        thread.join(HANG_SECONDS)
    assert list(run.ranks.values()) == [1]
    assert run.running, "it goes on with one"
    result = end(run)
    notes = "\n".join(result.notes)
    assert "worker-2 takes part as rank 2" in notes
    assert "rank 0 (worker-0) left" in notes
    check(lab, loop)
    assert any("leave 10 minutes between them" in note for note in lab.master.take_notes())
    assert numbers(lab) == [1]
    with pytest.raises(UsageError, match=r"worker-1 is the last worker"):
        lab.master.remove_worker("worker-1")
    with pytest.raises(UnknownNameError, match=r"GPU-3.*worker-1"):
        lab.master.remove_worker("GPU-3")
    for count in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match="whole number"):
            lab.master.resize_workers(count)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="other hosts cannot join yet"):
        lab.master.add_worker("gpu-server:50051")
    assert [worker.id for worker in lab.master.resize_workers(2)] == ["worker-1", "worker-3"]
    lab.good("import torch\nt = torch.ones(1)\ndist.all_reduce(t)\nassert t.item() == world_size == 2")
    assert "worker-3 is a new process without variables" in "\n".join(lab.master.take_notes())


def test_more_workers_than_there_are_cores_are_refused(
    resizable: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENCLAW_OVERSUBSCRIBE")
    with pytest.raises(ResourceError, match="this machine has"):
        resizable.master.resize_workers(10_000)
    assert numbers(resizable) == [0, 1]


def test_a_cell_that_needs_all_its_workers_keeps_them(resizable: Lab) -> None:
    run = resizable.master.run_cell("import time\ntime.sleep(600)")
    with pytest.raises(UsageError, match="needs all its workers"):
        resizable.master.remove_worker("worker-1")
    run.interrupt()
    assert run.wait(HANG_SECONDS) is not None


@pytest.mark.soak
def test_a_worker_that_is_stopped_is_ended_and_a_spare_takes_its_place(spared: Lab) -> None:
    await_spare(spared)
    prelude = pace(kill_at=6, victim=1).replace("SIGKILL", "SIGSTOP")
    result = end(start(spared, LOOPS["plain"], prelude))
    assert (len(result.deaths), len(result.joined)) == (1, 1), result.notes
    check(spared, LOOPS["plain"])


LEDGER = """
import time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(3)
model = nn.Embedding(203, 1)
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(TensorDataset(torch.arange(203)), batch_size=32, shuffle=True)
"""
ENTRIES = """
for epoch in range(6):
    for i, (sample,) in enumerate(loader):
        optimizer.zero_grad()
        model(sample).sum().backward()
        optimizer.step()
        time.sleep(0.01)
ledger = -model.weight.detach()
"""


def kept_in_a_ledger(lab: Lab, moments: dict[int, float]) -> RunResult:
    """Train a model whose weight of a sample counts how often it was trained; kill ranks at these moments (s)."""
    await_spare(lab)
    lab.good(LEDGER)
    workers = {w.number: w for w in lab.master.workers}
    ranks = list(lab.master._members.all_ranks().values())
    run = lab.master.run_cell(ENTRIES, strategy=StrategySpec(name="data_parallel"))
    timers = []
    for rank, seconds in moments.items():
        pid = workers[ranks[rank]].pid
        assert pid is not None
        timers.append(threading.Timer(seconds, os.kill, (pid, signal.SIGKILL)))
        timers[-1].start()
    result = end(run)
    for timer in timers:
        timer.join()
    for rank in run.ranks:
        there = [r for r, number in lab.master._members.all_ranks().items() if number == run.ranks[rank]]
        ledger = lab.pull("ledger", there[0])
        assert ledger.flatten().tolist() == [6.0] * 203, "each sample once an epoch"
    return result


@pytest.mark.parametrize("seed", range(1))
def test_each_sample_is_trained_once_an_epoch(spared: Lab, seed: int) -> None:
    dice = random.Random(seed)
    result = kept_in_a_ledger(spared, {dice.randrange(2): dice.uniform(0.02, 0.3)})
    assert len(result.deaths) == 1
    assert len(result.joined) == 1


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_100_deaths_are_kept_in_a_ledger(spared: Lab) -> None:
    dice = random.Random(11)
    results = [kept_in_a_ledger(spared, {dice.randrange(2): dice.uniform(0.0, 0.45)}) for _ in range(100)]
    assert sum(len(result.deaths) for result in results) > 50
    assert sum(len(result.joined) for result in results) > 50


@pytest.mark.soak
def test_who_attaches_finds_the_workers_of_a_cell_that_went_on_and_its_settings(spared: Lab) -> None:
    """Roles are those that a death has left, and the next one is gone on after, too."""
    await_spare(spared)
    end(start(spared, LOOPS["plain"], pace(kill_at=6, victim=0)))
    before = [(worker.id, worker.spare) for worker in spared.master.workers]
    name = spared.master.name
    spared.master.detach()
    spared.master = MasterNode.attach(name)
    assert [(worker.id, worker.spare) for worker in spared.master.workers] == before
    await_spare(spared)
    result = end(start(spared, LOOPS["plain"], pace(kill_at=6, victim=1)))
    assert (len(result.deaths), len(result.joined)) == (1, 1), result.notes
    check(spared, LOOPS["plain"])
