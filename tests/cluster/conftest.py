"""One cluster of four workers serves all tests of a session that only need workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from openclaw_nb.cluster.devices import Device
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.ownership import create_time
from openclaw_nb.cluster.run import RunResult
from openclaw_nb.protocol.messages import StrategySpec

HANG_SECONDS = 60


def cpu_devices(count: int) -> list[Device]:
    return [Device(f"CPU-{i}", "cpu", i, "test core") for i in range(count)]


def kill(pid: int) -> None:
    """Kill a process and wait until it is gone: on a busy machine it lives for a while after it was told to end."""
    started = create_time(pid)
    assert started is not None
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + HANG_SECONDS
    while create_time(pid) == started:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@dataclass
class Lab:
    """A running cluster, with the verbs that tests need."""

    master: MasterNode

    def run(self, source: str, **options: Any) -> RunResult:
        run = self.master.run_cell(source, **options)
        result = run.wait(HANG_SECONDS)
        assert result is not None, f"the cell hangs: {run.who_waits_where()}"
        return result

    def good(self, source: str, **options: Any) -> RunResult:
        result = self.run(source, **options)
        assert result.ok, [f"{r}: {f.error_type}: {f.message}" for r, f in result.failures.items()] or result
        return result

    def train(self, setup: str, loop: str, num_workers: int, **options: Any) -> RunResult:
        ranks = list(range(num_workers))
        self.good(setup, targets=ranks)
        return self.run(loop, targets=ranks, strategy=StrategySpec(name="data_parallel", **options))

    def pull(self, name: str, rank: int = 0) -> Any:
        return self.master.pull([name], rank)[name]


def a_lab(num_workers: int) -> Iterator[Lab]:
    # Under this variable ipykernel does not capture what is written to file descriptors.
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    master = MasterNode()
    master.start()
    master.start_workers(cpu_devices(num_workers))
    yield Lab(master)
    master.stop()


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    torch.set_num_threads(1)
    yield from a_lab(4)


@pytest.fixture(scope="session")
def pair() -> Iterator[Lab]:
    """Two workers, for tests that may break them."""
    yield from a_lab(2)


def single_device(setup: str, loop: str) -> dict[str, Any]:
    """Run the same two cells in this process, as a person does on one device."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(setup, "<setup>", "exec"), namespace)
    exec(compile(loop, "<loop>", "exec"), namespace)
    return namespace
