"""Workers that other processes start: they join by the port, take part and leave; strangers are turned away."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from openclaw_nb import MasterNode, WorkerNode
from openclaw_nb.cluster.join import node as node_module
from openclaw_nb.core.errors import JoinError, NotReachedError, ResourceError, UnknownNameError, UsageError
from openclaw_nb.plan.joining import Software

from .conftest import HANG_SECONDS

pytestmark = pytest.mark.cluster

SUM = """
import torch
x = torch.ones(1) * (rank + 1)
torch.distributed.all_reduce(x)
total = x.item()
"""
OPENCLAW = "import sys; from openclaw_nb.cli import main; sys.exit(main())"


@pytest.fixture(scope="module")
def master() -> Iterator[MasterNode]:
    with MasterNode(port=0) as master:
        yield master


@pytest.fixture(scope="module")
def first(master: MasterNode) -> Iterator[WorkerNode]:
    """The worker that is there all the time."""
    worker = WorkerNode("127.0.0.1", master.port, device_id="CPU-0")
    yield worker.connect()
    worker.close()


@contextlib.contextmanager
def other(master: MasterNode, device: str = "CPU-1", **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A worker as it is started from a terminal."""
    command = [
        sys.executable,
        "-c",
        OPENCLAW,
        "worker",
        "--master",
        f"127.0.0.1:{master.port}",
        "--device",
        device,
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def totals(master: MasterNode, num_workers: int) -> list[float]:
    """Let all ranks add their numbers up; return what each has."""
    wait_until(lambda: len([w for w in master.workers if w.alive and not w.removed]) == num_workers)
    master.ensure_ready()
    result = master.run_cell(SUM).wait(HANG_SECONDS)
    assert result is not None
    assert result.ok, result
    return [master.pull(["total"], rank)["total"] for rank in range(master.world_size)]


def test_the_token_is_for_this_user_alone_and_in_no_list_of_processes(
    master: MasterNode, first: WorkerNode
) -> None:
    path = Path(master.token_file)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    token = path.read_text()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            assert token not in " ".join(process.cmdline())
    engine = psutil.Process(first.pid)
    assert token not in "\0".join(engine.environ().values())
    assert token not in repr(first)
    assert token not in "\n".join(master.audit())


def test_they_take_part_and_leave(master: MasterNode, first: WorkerNode) -> None:
    assert totals(master, 1) == [1.0]
    with other(master) as process:
        assert process.stdout is not None
        assert "on CPU-1 has joined" in process.stdout.readline()
        assert totals(master, 2) == [3.0, 3.0]
        states = {each.id: each.state for each in master.get_device_status()}
        assert states == {"CPU-0": "idle", "CPU-1": "idle"}
        process.send_signal(signal.SIGINT)
        process.wait(HANG_SECONDS)
        assert process.returncode == 130
    assert totals(master, 1) == [1.0]
    assert any("left" in line for line in master.audit())


def test_one_that_is_killed_takes_its_engine_with_it(master: MasterNode, first: WorkerNode) -> None:
    with other(master) as process:
        assert process.stdout is not None
        name = process.stdout.readline().split()[0]
        (worker,) = (each for each in master.workers if each.id == name)
        engine = psutil.Process(worker.pid)
        process.kill()
        process.wait()
        engine.wait(HANG_SECONDS)
    assert totals(master, 1) == [1.0]


@pytest.mark.soak
def test_one_that_is_removed_ends_well(master: MasterNode, first: WorkerNode) -> None:
    with other(master) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert totals(master, 2) == [3.0, 3.0]
        master.remove_worker("CPU-1")
        assert process.wait(HANG_SECONDS) == 0
        assert "has left" in process.stdout.read()
    assert totals(master, 1) == [1.0]


def test_a_device_that_is_taken_or_not_there_is_refused(
    master: MasterNode, first: WorkerNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENCLAW_OVERSUBSCRIBE", raising=False)
    with pytest.raises(JoinError, match=r"CPU-0 is in use by worker-\d+\. Give the worker another device"):
        WorkerNode("127.0.0.1", master.port, device_id="CPU-0").connect()
    with pytest.raises(UnknownNameError, match=r"device_id='CPU-999' of WorkerNode"):
        WorkerNode("127.0.0.1", master.port, device_id="CPU-999").connect()
    refused = [line for line in master.audit() if "refused: " in line]
    assert any("CPU-0" in line for line in refused)
    assert any("CPU-999" in line for line in refused)
    assert len([worker for worker in master.workers if worker.alive]) == 1


def test_a_wrong_token_is_refused_and_noted(master: MasterNode, first: WorkerNode) -> None:
    with pytest.raises(JoinError, match="does not know the token"):
        WorkerNode("127.0.0.1", master.port, device_id="CPU-1", token="a" * 43).connect()
    with pytest.raises(UsageError, match="is no join token: it has 5 characters"):
        WorkerNode("127.0.0.1", master.port, device_id="CPU-1", token="wrong")
    wait_until(lambda: any("wrong token" in line for line in master.audit()))


def test_another_version_is_refused(
    master: MasterNode, first: WorkerNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Software(version="0.0.1", protocol="8", python="3.11", torch="1.0")
    monkeypatch.setattr(node_module, "own_software", lambda: older)
    with pytest.raises(JoinError, match=r"run different versions: openclaw_nb 0\.0\.1 and .*torch 1\.0 and"):
        WorkerNode("127.0.0.1", master.port, device_id="CPU-1").connect()
    assert any("different versions" in line for line in master.audit())


def test_a_worker_may_come_before_its_master() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    worker = WorkerNode("127.0.0.1", port, device_id="CPU-0")
    thread = threading.Thread(target=worker.connect)
    thread.start()
    time.sleep(0.5)
    with MasterNode(port=port) as master:
        thread.join(HANG_SECONDS)
        assert worker.state == "joined"
        assert totals(master, 1) == [1.0]
    assert worker.wait(HANG_SECONDS), "it ends with its master"
    worker.close()


def test_where_nobody_listens_is_told() -> None:
    with pytest.raises(NotReachedError, match=r"No master was found on 127\.0\.0\.1:1 in 0\.2 s"):
        WorkerNode("127.0.0.1", 1, device_id="CPU-0", token="a" * 43, wait_seconds=0.2).connect()


def test_a_port_in_use_names_its_holder() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(
            ResourceError, match=rf"Port {port} of 127\.0\.0\.1 is in use by process {os.getpid()} \("
        ):
            MasterNode(port=port).start()


@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_garbage_leaves_no_trace_and_keeps_nobody_out(
    master: MasterNode, first: WorkerNode, number: int
) -> None:
    dice, kernel = random.Random(3), psutil.Process()
    flood(master.port, 100, dice)
    descriptors, memory = kernel.num_fds(), kernel.memory_info().rss
    flood(master.port, number, dice)
    with other(master) as process:
        assert process.stdout is not None
        assert "has joined" in process.stdout.readline()
        assert totals(master, 2) == [3.0, 3.0]
        master.remove_worker("CPU-1")
        process.wait(HANG_SECONDS)
    wait_until(lambda: kernel.num_fds() <= descriptors + 10)
    assert kernel.memory_info().rss - memory < 30 * 2**20
    assert len(master.audit()) < 60


def flood(port: int, number: int, dice: random.Random) -> None:
    """Connect so often, with nothing, noise, or the beginning of what ZeroMQ says, and hang up."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(48)
    for count in range(number):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as stream:
            kind = count % 4
            if kind == 1:
                stream.sendall(dice.randbytes(dice.randrange(1, 2000)))
            elif kind == 2:
                stream.sendall(greeting[: dice.randrange(1, 64)])
            elif kind == 3:
                stream.sendall(greeting + dice.randbytes(dice.randrange(300)))


def test_hosts_and_ports_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="workers of other hosts cannot join yet"):
        MasterNode(host="0.0.0.0")
    with pytest.raises(UsageError, match="workers of other hosts cannot join yet"):
        WorkerNode("192.0.2.1", 50051)
    for port in (-1, 65536, True, "50051", 1.5):
        with pytest.raises(UsageError, match="port="):
            MasterNode(port=port)  # type: ignore[arg-type]
