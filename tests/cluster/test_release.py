"""When one rank cannot go on, all others are free within 2 s, keep their variables, and the next cell works.

A cut is an operation that all ranks repeat, and a cause that strikes one of them at a random moment. The
short version runs each operation with some cause; ``make soak`` runs 200 cuts.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch

from openclaw_nb.cluster.run import CellRun, RunResult
from openclaw_nb.core.errors import UsageError, WorkerDiedError
from openclaw_nb.protocol.messages import Failed, Locate, StrategySpec

from .conftest import HANG_SECONDS, Lab, kill, single_device
from .test_data_parallel import LOOP, SETUP, STATE

pytestmark = pytest.mark.cluster
FREE_SECONDS = 2.0

OPERATIONS = {
    "all_reduce": "dist.all_reduce(torch.ones(1000))",
    "all_reduce of 16 MB": "dist.all_reduce(torch.ones(4_000_000))",
    "barrier": "dist.barrier()",
    "broadcast": "dist.broadcast(torch.ones(1000), 0)",
    "all_gather": "dist.all_gather([torch.empty(100) for _ in range(world_size)], torch.ones(100))",
    "send and recv": (
        "dist.send(torch.ones(10), (rank + 1) % world_size) if rank % 2 == 0 "
        "else dist.recv(torch.empty(10), rank - 1)"
    ),
    "objects": "dist.all_gather_object([None] * world_size, {'rank': rank})",
    "DDP backward": "ddp(torch.ones(4, 20)).sum().backward()",
}
SETUP_DDP = """
import torch, os, time, random, signal
if dist.get_world_size() > 1:
    layers = [torch.nn.Linear(20, 20) for _ in range(4)]
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
kept = 41 + rank
"""
CAUSES = {
    "raise": "raise ValueError('planted')",
    "exit": "os._exit(7)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "stop button": "pass",
}


def cell(operation: str, cause: str, culprit: int, after: float) -> str:
    strike = CAUSES[cause]
    return f"""
begin = time.monotonic()
while True:
    {operation}
    if rank == {culprit} and time.monotonic() - begin > {after}:
        {strike}
"""


def finish(run: CellRun) -> RunResult:
    result = run.wait(HANG_SECONDS)
    assert result is not None, f"the cell hangs: {run.who_waits_where()}"
    return result


def cut(lab: Lab, operation: str, cause: str, after: float) -> RunResult:
    """Make one cut and check that everyone is free and the cause is named."""
    culprit = random.randrange(lab.master.world_size)
    run = lab.master.run_cell(cell(operation, cause, culprit, after))
    if cause == "stop button":
        time.sleep(after)
        run.interrupt()
    result = finish(run)
    assert not result.busy, f"still inside: {result.busy} {result.table}"
    assert result.release_seconds <= FREE_SECONDS
    if cause == "raise":
        assert result.first == culprit
        assert result.failures[culprit].error_type == "ValueError"
        assert all(f.consequence for r, f in result.failures.items() if r != culprit)
    elif cause == "stop button":
        assert result.interrupted
    else:
        assert result.died == (culprit,)
    return result


def check_next_cell(lab: Lab, survivors: bool = True) -> None:
    """The next cell works on every rank, and the one after trains as a single device does."""
    lab.good(SETUP)
    result = lab.run(LOOP + STATE, strategy=StrategySpec(name="data_parallel"))
    assert result.ok, result.failures
    expected = single_device(SETUP, LOOP + STATE)
    for name, value in expected["state"].items():
        torch.testing.assert_close(lab.pull("state")[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rank_raises(lab: Lab, operation: str) -> None:
    lab.good(SETUP_DDP)
    cut(lab, OPERATIONS[operation], "raise", 0.05)
    lab.good("assert kept == 41 + rank")


@pytest.mark.parametrize("operation", ["all_reduce", "barrier", "send and recv", "DDP backward"])
def test_the_stop_button(lab: Lab, operation: str) -> None:
    lab.good(SETUP_DDP)
    cut(lab, OPERATIONS[operation], "stop button", 0.2)
    lab.good("assert kept == 41 + rank")


@pytest.mark.parametrize(("operation", "cause"), [("all_reduce of 16 MB", "kill"), ("DDP backward", "exit")])
def test_a_rank_dies(pair: Lab, operation: str, cause: str) -> None:
    pair.good(SETUP_DDP)
    result = cut(pair, OPERATIONS[operation], cause, 0.1)
    survivor = 1 - result.died[0]
    pair.good(f"assert rank != {survivor} or kept == 41 + rank")
    check_next_cell(pair)


def test_a_rank_dies_in_a_training_cell(pair: Lab) -> None:
    pair.good(SETUP)
    strike = "\n        if rank == 1 and len(losses) == 3: import os; os._exit(1)\n"
    result = pair.run(LOOP + strike, strategy=StrategySpec(name="data_parallel"))
    assert result.died == (1,)
    assert result.release_seconds <= FREE_SECONDS
    pair.good("assert rank != 0 or len(losses) >= 3")
    check_next_cell(pair)


def test_a_rank_raises_in_a_training_cell(lab: Lab) -> None:
    lab.good(SETUP)
    strike = "\n        if rank == 2 and len(losses) == 3: raise ValueError('planted')\n"
    result = lab.run(LOOP + strike, strategy=StrategySpec(name="data_parallel"))
    assert result.first == 2
    assert result.release_seconds <= FREE_SECONDS
    lab.good("assert len(losses) >= 3 and not model._forward_hooks")
    check_next_cell(lab)


def test_ranks_that_disagree_are_told_both_calls(lab: Lab) -> None:
    import_torch = "import torch\n"
    for source, texts in {
        "dist.all_reduce(torch.ones(3 + (rank == 1)))": (
            "rank 0 calls all_reduce(float32[3]",
            "rank 1 calls all_reduce(float32[4]",
        ),
        "dist.barrier() if rank else dist.broadcast(torch.ones(2), 0)": ("broadcast(float32[2]", "barrier()"),
        "dist.all_reduce(torch.ones(2, dtype=torch.float64 if rank == 3 else torch.float32))": (
            "float64[2]",
            "float32[2]",
        ),
    }.items():
        result = lab.run(import_torch + source)
        assert result.failures[result.first].error_type == "MismatchError", result
        assert len(result.failures) == lab.master.world_size
        assert all(text in f.message for f in result.failures.values() for text in texts)
        lab.good("dist.barrier()")


def test_messages_that_do_not_fit_are_told_both_calls(lab: Lab) -> None:
    source = (
        "import torch\nif rank == 0: dist.send(torch.ones(3), 1)\nif rank == 1: dist.recv(torch.ones(5), 0)"
    )
    result = lab.run(source)
    assert result.failures[1].error_type == "MismatchError"
    assert "send(float32[3], dst=1)" in result.failures[1].message
    assert "recv(float32[5], src=0)" in result.failures[1].message
    lab.good("dist.barrier()")


def test_messages_arrive_in_order_and_from_any_rank(lab: Lab) -> None:
    lab.good("""
import torch
right, left = (rank + 1) % world_size, (rank - 1) % world_size
sent = [dist.isend(torch.full((2,), 10.0 * rank + i), right) for i in range(5)]
got = [torch.empty(2) for _ in range(5)]
for work in [dist.irecv(t, left) for t in got] + sent:
    work.wait()
assert [t[0].item() for t in got] == [10.0 * left + i for i in range(5)]
if rank == 0:
    box = torch.empty(1)
    sources = sorted(dist.recv(box) for _ in range(world_size - 1))
    assert sources == list(range(1, world_size)), sources
else:
    dist.send(torch.ones(1), 0)
""")


def test_a_rank_that_leaves_early_or_does_not_take_part(lab: Lab) -> None:
    result = lab.run("if rank != 2: dist.barrier()")
    assert "rank 2 has finished the cell" in result.cause
    assert "barrier()" in result.cause
    result = lab.run("dist.barrier()", targets=[0, 1])
    assert "does not run this cell" in result.cause
    lab.good("dist.barrier()")


def test_a_rank_is_seen_to_wait_after_a_beat_that_failed(lab: Lab) -> None:
    """As when the memory has run out for a moment."""
    lab.good("""
import time
from openclaw_nb.engine.outbox import Outbox
def fail(*_):
    raise MemoryError
publish, Outbox.publish = Outbox.publish, fail
time.sleep(1.3)
Outbox.publish = publish
""")
    result = lab.run("if rank != 2: dist.barrier()")
    assert "rank 2 has finished the cell" in result.cause


def test_ranks_that_wait_for_each_other(lab: Lab) -> None:
    result = lab.run("import torch\ndist.recv(torch.ones(1), (1 if rank < 2 else 5) - rank)")
    assert "wait for each other" in result.cause
    assert {row[0] for row in result.table} == {0, 1, 2, 3}
    lab.good("dist.barrier()")


def test_a_rank_that_is_only_slow_is_no_cause(lab: Lab) -> None:
    lab.good("import time\ntime.sleep(3.5 if rank == 0 else 0)\ndist.barrier()")
    # Rank 0 waits for rank 1 for two seconds; both leave, and rank 1 ends its cell while rank 0 computes on.
    lab.good("if rank == 1: time.sleep(2.2)\ndist.barrier()\nif rank == 0: time.sleep(2)")


def test_a_rank_that_is_slower_than_allowed_is_named_and_the_others_are_free(lab: Lab) -> None:
    lab.master.set_timeout(communication=30, computation=1.5)
    try:
        started = time.monotonic()
        result = lab.run("import time\nkept = rank\nif rank == 1:\n    time.sleep(50)\ndist.barrier()")
        assert time.monotonic() - started < 10
        assert "1.5 s that set_timeout allows (computation)" in result.cause
        assert "rank 1 computes, line 4" in result.cause
        assert any("waits in barrier()" in row[1] for row in result.table)
        lab.good("dist.barrier()\nassert kept == rank")
        lab.good("import time\ntime.sleep(2.5)")  # nobody waits for anybody
    finally:
        lab.master.set_timeout(None, None)


def test_ranks_that_wait_together_for_too_long_are_told_which_key_allows_more(pair: Lab) -> None:
    """Each waits for a message that the other never sends, as when the network stands still."""
    pair.master.set_timeout(communication=1.0, computation=None)
    try:
        result = pair.run("import torch\nkept = rank\ndist.recv(torch.ones(1), 1 - rank)")
        assert result.cause.startswith("all ranks wait for longer than the 1 s that set_timeout allows")
        assert "allow more, by parallel.timeout or master.set_timeout(communication=...)" in result.cause
        pair.good("dist.barrier()\nassert kept == rank")
    finally:
        pair.master.set_timeout(None, None)


@pytest.mark.parametrize("limit", [0, -1, float("nan"), "5", True])
def test_a_limit_that_is_none_is_refused(lab: Lab, limit: Any) -> None:
    with pytest.raises(UsageError, match="number of seconds above 0, or None"):
        lab.master.set_timeout(computation=limit)


def test_python_code_that_waits_in_nothing_ends_too(lab: Lab) -> None:
    result = lab.run("import time\nif rank == 0: raise KeyError('x')\nfor _ in range(300): time.sleep(0.1)")
    assert result.first == 0
    assert result.release_seconds <= FREE_SECONDS
    assert not result.busy


def test_awaiting_cells_end_too(lab: Lab) -> None:
    lab.good("import asyncio\nawait asyncio.sleep(0.01)\ndone = rank")
    result = lab.run("if rank == 0: raise KeyError('x')\nawait asyncio.sleep(60)")
    assert result.first == 0
    assert result.release_seconds <= FREE_SECONDS


def test_a_rank_in_native_code_is_named_and_rejoins(lab: Lab) -> None:
    """sum() over a range holds the interpreter: nothing in the process can run until it returns."""
    run = lab.master.run_cell("if rank == 1: sum(range(250_000_000))\nelse: raise ValueError('planted')")
    result = finish(run)
    assert result.busy == (1,)
    assert result.seconds < 6
    deadline = time.monotonic() + 60
    while lab.master.workers[1].busy_with and time.monotonic() < deadline:
        time.sleep(0.2)
    lab.good("dist.barrier()")


def test_a_stopped_process_is_named_and_rejoins(pair: Lab) -> None:
    pair.good("kept = [rank]")
    run = pair.master.run_cell(
        "import torch, time\nif rank == 1: time.sleep(600)\ndist.all_reduce(torch.ones(1))"
    )
    pid = pair.master.workers[1].pid
    assert pid is not None
    time.sleep(0.3)
    os.kill(pid, signal.SIGSTOP)
    try:
        result = finish(run)
        assert "the process of rank 1 is stopped (SIGSTOP)" in result.cause
        assert result.busy == (1,)
    finally:
        os.kill(pid, signal.SIGCONT)
    pair.good("assert kept == [rank]\ndist.barrier()")


def test_a_worker_that_dies_outside_of_the_cell_is_replaced(pair: Lab) -> None:
    run = pair.master.run_cell("import time\ntime.sleep(1)", targets=[0])
    victim = pair.master.workers[1].pid
    assert victim is not None
    kill(victim)
    assert finish(run).ok
    pair.good("dist.barrier()\nassert world_size == 2")


def test_stop_in_the_first_instant(lab: Lab) -> None:
    for _ in range(5):
        run = lab.master.run_cell("import time\nfor _ in range(100): time.sleep(0.1)")
        run.interrupt()
        assert finish(run).interrupted
        assert run.result is not None
        assert run.result.seconds < FREE_SECONDS


def test_every_collective_can_be_waited_for(lab: Lab) -> None:
    lab.good("""
import torch
ones = torch.ones(world_size)
part = torch.empty(1)
dist.reduce_scatter_tensor(part, ones)
assert part.item() == world_size
dist.reduce_scatter(part, list(ones.split(1)))
gathered = torch.empty(world_size)
dist.all_gather_into_tensor(gathered, torch.full((1,), float(rank)))
assert gathered.tolist() == list(range(world_size))
swapped = torch.empty(world_size)
dist.all_to_all_single(swapped, torch.full((world_size,), float(rank)))
assert swapped.tolist() == list(range(world_size))
dist.reduce(ones, 0)
box = [torch.empty(1) for _ in range(world_size)] if rank == 0 else None
dist.gather(torch.ones(1), box, 0)
dist.scatter(part, list(torch.arange(float(world_size)).split(1)) if rank == 0 else None, 0)
assert part.item() == rank
work = dist.all_reduce(ones, async_op=True)
assert work.wait() and work.is_completed()
""")


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_sub_groups_are_released(lab: Lab, backend: str | None) -> None:
    lab.good(
        f"import torch\nsub = dist.new_group([0, 1, 2, 3], backend={backend!r})\n"
        "dist.all_reduce(torch.ones(2), group=sub)"
    )
    result = lab.run(
        f"sub = dist.new_group([0, 1, 2, 3], backend={backend!r})\n"
        "if rank == 0: raise ValueError('planted')\n"
        "dist.barrier(group=sub)"
    )
    assert result.first == 0
    assert result.release_seconds <= FREE_SECONDS
    lab.good("dist.barrier()")


def test_ranks_in_different_sub_groups_are_released(lab: Lab) -> None:
    """Ranks 0 and 1 have made one group more than the others when all make one together."""
    result = lab.run(
        "import torch\n"
        "pair = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None\n"
        "odd = dist.new_group([1, 3])\n"
        "if rank in (1, 3): dist.all_reduce(torch.ones(1), group=odd)\n"
        "if rank == 1: raise ValueError('planted')\n"
        "if rank == 3: dist.barrier(group=odd)\n"
        "if rank == 0: dist.barrier(group=pair)\n"
        "if rank == 2: dist.barrier()"
    )
    assert result.first == 1
    assert result.release_seconds <= FREE_SECONDS
    lab.good("dist.barrier()")


def kill_while_forming(lab: Lab, after: float) -> None:
    """Kill a worker while the group is being formed; the cluster comes back by itself."""
    victim = random.choice(lab.master.workers)
    assert victim.pid is not None
    timer = threading.Timer(after, os.kill, (victim.pid, signal.SIGKILL))
    timer.start()
    lab.master.reset()
    timer.join()
    time.sleep(0.1)
    lab.good("import torch\nt = torch.ones(1)\ndist.all_reduce(t)\nassert t.item() == world_size")


def test_a_worker_dies_while_the_group_is_formed(pair: Lab) -> None:
    for after in (0.0, 0.01):
        kill_while_forming(pair, after)
    check_next_cell(pair)


def test_a_rank_that_comes_late_to_a_group_that_was_given_up(pair: Lab) -> None:
    """Commands that end waits overtake those that begin them: the rank would wait for ten minutes."""
    members = pair.master._members
    members.epoch += 1
    members.release("another rank died")
    given_up = members._form_command(1, [pair.master.workers[1], pair.master.workers[0]])
    reply = members.door.request(1, given_up).result(HANG_SECONDS)
    assert isinstance(reply, Failed)
    assert "another rank died" in reply.message
    pair.master.reset()
    check_next_cell(pair)


def test_a_request_fails_with_its_worker(pair: Lab) -> None:
    """Also one on the control channel, which a stopped worker does not read."""
    worker = pair.master.workers[1]
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    asked = pair.master._members.door.request_at_once(1, Locate())
    os.kill(worker.pid, signal.SIGKILL)
    assert isinstance(asked.exception(HANG_SECONDS), WorkerDiedError)
    check_next_cell(pair)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_200_cuts(lab: Lab, pair: Lab) -> None:
    """Each operation, cause and size at a random moment; the seed of a failure is in its message."""
    slow: list[float] = []
    for number in range(200):
        random.seed(number)
        target = random.choice([lab, pair])
        operation, cause = random.choice(list(OPERATIONS)), random.choice(list(CAUSES))
        try:
            target.good(SETUP_DDP)
            result = cut(target, OPERATIONS[operation], cause, random.uniform(0, 0.3))
            slow.append(result.release_seconds)
            check_next_cell(target)
            if number % 10 == 0:
                kill_while_forming(target, random.uniform(0, 0.03))
        except AssertionError as error:
            raise AssertionError(f"cut {number}: {operation}, {cause}: {error}") from error
    median = sorted(slow)[len(slow) // 2]
    print(f"\n200 cuts: {len(slow)} free; release median {median:.3f} s, worst {max(slow):.3f} s")  # noqa: T201
