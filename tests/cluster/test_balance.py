"""Batches shared out by measured speed: shares go to where the speeds are, and the result stays that of one device.

One worker is slowed down threefold. Each sample costs two milliseconds of sleep, so that others who use the cores do
little harm. Nothing is timed here: shares are compared with 3 : 1, and parameters with those of the same cells on one
device.

How near to 3 : 1. Of 32 samples, the fast worker has n and the slow one 32 - n; both work equally long when n + c =
3 (32 - n + c), where c is the rest of a step, in the time of one sample. A rest of 0 to 5 ms is c from 0 to 2.5: 24 to
25.25 samples, shares from 0.75 to 0.79. A worker that is disturbed for a while may be taken for 1.3 times as slow as
it is: from 0.70 to 0.84. An equal split is 0.5; a slow-down that counts twice, 0.9.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.run import CellRun, RunResult
from openclaw_nb.core.errors import NotStartedError, UnknownNameError, UsageError
from openclaw_nb.protocol.messages import StrategySpec

from .conftest import HANG_SECONDS, Lab, single_device
from .test_data_parallel import CNN, SETUP, SGD_TOLERANCE, STATE

pytestmark = pytest.mark.cluster

FACTOR = 3.0
LEAST, MOST = 0.70, 0.84
# `sizes` are those of the slices that this rank was given.
WORK = """
import time
sizes = []
def work(x):
    sizes.append(len(x))
    if globals().get("dist") is not None:
        time.sleep(2e-3 * len(x))
"""
# For tests that need other shares, whichever they are.
QUICK = WORK.replace("2e-3", "3e-4")
LOOP = """
losses = []
for epoch in range({epochs}):
    for x, y in loader:
        work(x)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
SPEC = StrategySpec(name="data_parallel")


@pytest.fixture(autouse=True)
def slowed(pair: Lab) -> Iterator[None]:
    """The second of the pair is three times slower than the first."""
    pair.master.set_slowdown("worker-1", FACTOR)
    yield
    pair.master.set_slowdown("worker-1", 1)
    pair.master.share_equally()
    pair.master.enable_auto_recovery(max_retries=0)


def train(pair: Lab, setup: str, loop: str, work: str = WORK, **options: Any) -> RunResult:
    pair.good(setup + work)
    return pair.good(loop + STATE, strategy=StrategySpec(name="data_parallel", **options))


def check(pair: Lab, setup: str, loop: str, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Compare the parameters, and the losses that the cell has read, with those of one device."""
    expected = single_device(setup + WORK, loop + STATE)
    for rank in ranks:
        state = pair.pull("state", rank)
        for name, value in expected["state"].items():
            torch.testing.assert_close(
                state[name], value, rtol=SGD_TOLERANCE, atol=SGD_TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert pair.pull("losses", rank) == pytest.approx(expected["losses"], rel=1e-5)


def fast_part(pair: Lab, num_batches: int) -> float:
    """Return the first worker's part of the samples of its last batches."""
    first, second = (sum(pair.pull("sizes", rank)[-num_batches:]) for rank in (0, 1))
    return first / (first + second)


def measure(pair: Lab) -> None:
    train(pair, SETUP, LOOP.format(epochs=3))


def test_once_for_the_next_cells(pair: Lab) -> None:
    measure(pair)
    assert fast_part(pair, 15) == pytest.approx(0.5, abs=0.01)

    table = pair.master.balance_load()

    fast, slow = table
    assert (fast.worker, fast.rank, slow.worker, slow.rank) == ("worker-0", 0, "worker-1", 1)
    assert LEAST < fast.share < MOST
    assert fast.share + slow.share == pytest.approx(1)
    assert fast.share / slow.share == pytest.approx(fast.samples_per_second / slow.samples_per_second)
    assert "worker-1" in repr(table)
    loop = LOOP.format(epochs=2)
    train(pair, SETUP, loop)
    check(pair, SETUP, loop)
    # 32, 32, 32, 32 and 22 samples: each slice is rounded by less than one sample.
    assert fast_part(pair, 10) == pytest.approx(fast.share, abs=1 / 22)


def test_continuously_in_the_midst_of_a_cell(pair: Lab) -> None:
    pair.master.balance_load(continuous=True)  # before anything is known of this cell
    loop = LOOP.format(epochs=10)
    train(pair, SETUP, loop)
    check(pair, SETUP, loop)
    assert LEAST < fast_part(pair, 10) < MOST


def test_once_in_the_midst_of_a_cell(pair: Lab) -> None:
    loop = LOOP.format(epochs=8)
    pair.good(SETUP + WORK)
    measured: list[int] = []
    forget = pair.master.listen(lambda event: measured.append(event.worker))
    run = pair.master.run_cell(loop + STATE, strategy=SPEC)
    wait_until(lambda: all(measured.count(worker) > 1 for worker in (0, 1)))
    forget()
    table = pair.master.balance_load()
    finished(run)
    check(pair, SETUP, loop)
    sizes = pair.pull("sizes", 0)
    assert sizes[0] == 16
    assert LEAST < table[0].share < MOST
    assert sizes[35] == pytest.approx(32 * table[0].share, abs=1)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def finished(run: CellRun) -> RunResult:
    result = run.wait(HANG_SECONDS)
    assert result is not None, f"the cell hangs: {run.who_waits_where()}"
    assert result.ok, [f"{f.error_type}: {f.message}" for f in result.failures.values()] or result
    return result


UNEVEN = SETUP.replace("torch.randn(150, 12)", "torch.randn(131, 12)").replace("(150,)", "(131,)")
SUM = LOOP.replace("loss_fn(model(x), y)", "F.cross_entropy(model(x), y, reduction='sum') * 0.01")
PENALTY = LOOP.replace(
    "loss_fn(model(x), y)", "loss_fn(model(x), y) + 1e-3 * sum((p ** 2).sum() for p in model.parameters())"
)
TWO_STEPS = LOOP.replace(
    "loss.backward()",
    "loss.backward(); optimizer.step(); optimizer.zero_grad(); loss_fn(model(x), y).backward()",
)
PROCESSES = SETUP.replace("shuffle=True", "shuffle=True, num_workers=1, prefetch_factor=3")
KEPT = PROCESSES.replace("num_workers=1", "num_workers=1, persistent_workers=True")
CELLS = {
    "a last batch of 3": (UNEVEN, LOOP),
    "batchnorm": (CNN, LOOP),
    "a sum": (SETUP, SUM),
    "a penalty": (SETUP, PENALTY),
    "two steps a batch": (SETUP, TWO_STEPS),
    "loader processes": (PROCESSES, LOOP),
    "loader processes that stay": (KEPT, LOOP),
}


@pytest.mark.parametrize(("setup", "loop"), CELLS.values(), ids=CELLS)
def test_the_result_is_that_of_one_device(pair: Lab, setup: str, loop: str) -> None:
    """Shares change after 16 steps, in the midst of a pass, and perhaps again after 32."""
    pair.master.balance_load(continuous=True)
    loop = loop.format(epochs=5)
    train(pair, setup, loop, work=QUICK)
    check(pair, setup, loop)
    assert fast_part(pair, 5) > 0.6


def test_several_batches_a_step(pair: Lab) -> None:
    pair.master.balance_load(continuous=True)
    train(pair, SETUP, LOOP.format(epochs=8), work=QUICK, options={"sync_frequency": 2})
    merged = SETUP.replace("batch_size=32", "batch_size=64")
    expected = single_device(merged + WORK, LOOP.format(epochs=8) + STATE)["state"]
    torch.testing.assert_close(pair.pull("state", 1), expected, rtol=SGD_TOLERANCE, atol=SGD_TOLERANCE)
    assert fast_part(pair, 5) > 0.6


OTHER = """
def loader_of(seed):
    return DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(seed))
loader, other = loader_of(1), loader_of(2)
"""


def test_two_loaders_at_once_keep_their_shares(pair: Lab) -> None:
    """A step is made of batches of both, which must be cut alike."""
    pair.master.balance_load(continuous=True)
    loop = LOOP.replace("for x, y in loader:", "for (x, y), (u, v) in zip(loader, other):").replace(
        "loss_fn(model(x), y)", "loss_fn(model(x), y) + loss_fn(model(u), v)"
    )
    setup, loop = SETUP + OTHER, loop.format(epochs=5)
    train(pair, setup, loop, work=QUICK)
    check(pair, setup, loop)
    assert len(set(pair.pull("sizes", 0)[::5])) == 1, "the first batch of each pass"


@pytest.mark.soak
def test_a_death_and_a_newcomer(pair: Lab) -> None:
    """The slow worker dies after shares have changed; a new process takes its place, and is slow, too."""
    pair.master.enable_auto_recovery(max_retries=3)
    pair.master.balance_load(continuous=True)
    strike = """
import os, signal
me, sizes = globals().get("rank", 0), []
def work(x):
    sizes.append(len(x))
    if globals().get("dist") is None:
        return
    time.sleep(3e-4 * len(x))
    if len(sizes) == 21 and me == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if world_size == 1:
        time.sleep(0.2)
"""
    loop = LOOP.format(epochs=30)
    pair.good(SETUP + WORK)
    last = STATE + "\nplace = rank, world_size\n"
    result = finished(pair.master.run_cell(strike + loop + last, strategy=SPEC))
    assert (len(result.deaths), len(result.joined)) == (1, 1), result.notes
    expected = single_device(SETUP + WORK, loop + STATE)["state"]
    for rank in (0, 1):
        torch.testing.assert_close(pair.pull("state", rank), expected, rtol=SGD_TOLERANCE, atol=SGD_TOLERANCE)
        assert pair.pull("place", rank) == (rank, 2)
    sizes = pair.pull("sizes", 0)
    assert sizes[17] > 20
    assert 32 in sizes
    assert fast_part(pair, 10) > 0.6


def test_it_is_refused_where_it_cannot_be(pair: Lab) -> None:
    with pytest.raises(UnknownNameError, match=r"worker-9.*worker-0, worker-1"):
        pair.master.set_slowdown("worker-9", 2)
    with pytest.raises(UsageError, match=r"factor=0\.5"):
        pair.master.set_slowdown("worker-0", 0.5)
    run = pair.master.run_cell("import time\ntime.sleep(600)")
    with pytest.raises(UsageError, match="does not share its batches out by speed"):
        pair.master.balance_load()
    run.interrupt()
    assert run.wait(HANG_SECONDS) is not None
    with pytest.raises(NotStartedError):
        MasterNode().balance_load()
