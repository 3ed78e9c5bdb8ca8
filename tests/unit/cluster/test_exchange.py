"""Variables go through a file where it fits, and nothing is left of one that does not."""

from __future__ import annotations

import os
import subprocess
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openclaw_nb.cluster.exchange import Exchange
from openclaw_nb.core.errors import NoRoomError, OpenClawError, UnknownNameError, UsageError
from openclaw_nb.engine import variables
from openclaw_nb.engine.agent import failure
from openclaw_nb.protocol.messages import Command, Done, ReceiveVariables, Reply, SendVariables

MIB = 1024**2


class Workers:
    """Namespaces of workers, and the worker's own functions on them."""

    def __init__(self) -> None:
        self.namespaces: list[dict[str, Any]] = [{}, {}]

    def request(self, worker: int, command: Command) -> Future[Reply]:
        answer: Future[Reply] = Future()
        namespace = self.namespaces[worker]
        try:
            match command:
                case ReceiveVariables():
                    answer.set_result(Done(value=variables.receive(namespace, command.path)))
                case SendVariables():
                    answer.set_result(Done(value=variables.send(namespace, command.names, command.path)))
        except (OpenClawError, TypeError) as error:
            answer.set_result(failure(error, traceback.format_exception(error)))
        return answer

    request_at_once = request


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for 1 MiB, as /dev/shm is in some containers."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def workers() -> Workers:
    return Workers()


def test_there_and_back(workers: Workers, tmp_path: Path) -> None:
    exchange = Exchange(workers, lambda: [str(tmp_path)])
    assert exchange.push([0, 1], {"x": np.arange(10.0)}) > 80
    workers.namespaces[1]["x"] += 1
    np.testing.assert_array_equal(exchange.pull(1, ["x"])["x"], np.arange(10.0) + 1)
    np.testing.assert_array_equal(workers.namespaces[0]["x"], np.arange(10.0))
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_into_shared_memory_goes_to_disk(
    workers: Workers, small: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    exchange = Exchange(workers, lambda: [str(small), str(disk)])
    large = np.arange(4 * MIB // 8)
    exchange.push([0], {"large": large})
    np.testing.assert_array_equal(workers.namespaces[0]["large"], large)
    np.testing.assert_array_equal(exchange.pull(0, ["large"])["large"], large)
    assert list(small.iterdir()) == list(disk.iterdir()) == []


def test_what_fits_nowhere_is_said_and_nothing_is_left(workers: Workers, small: Path) -> None:
    exchange = Exchange(workers, lambda: [str(small)])
    large = np.zeros(4 * MIB // 8)
    with pytest.raises(NoRoomError, match=r"4\.0 MiB are needed in .*small, where less is free.*send less"):
        exchange.push([0], {"large": large})
    workers.namespaces[0] = {"large": large, "small": 1}
    with pytest.raises(NoRoomError, match="are needed in"):
        exchange.pull(0, ["large"])
    assert list(small.iterdir()) == []
    assert exchange.pull(0, ["small"]) == {"small": 1}


def test_what_cannot_be_sent_leaves_nothing(workers: Workers, tmp_path: Path) -> None:
    exchange = Exchange(workers, lambda: [str(tmp_path)])
    with pytest.raises(UsageError, match=r"'lock' .* cannot be sent"):
        exchange.push([0], {"lock": threading.Lock()})
    with pytest.raises(UnknownNameError):
        exchange.pull(0, ["missing"])
    assert list(tmp_path.iterdir()) == []
