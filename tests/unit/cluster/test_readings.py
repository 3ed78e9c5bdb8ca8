"""Readings of real processes, held against what the operating system says of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from openclaw_nb.cluster import readings
from openclaw_nb.cluster.readings import DeviceReader, DeviceReading
from openclaw_nb.core.host import total_memory_bytes

Start = Callable[[str], int]


@pytest.fixture
def python() -> Iterator[Start]:
    """Start Python programs that say ``up`` when they are; all are killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process.pid

    yield start
    for process in started:
        os.killpg(process.pid, 9)  # its own session, so that its children are meant too
        process.communicate()


IDLE = "import time; print('up', flush=True); time.sleep(60)"
BUSY_CHILD = """
import os, time
if os.fork() == 0:
    while True: pass
print("up", flush=True); time.sleep(60)
"""


def test_first_reading_has_no_utilisation_and_idle_is_near_zero(python: Start) -> None:
    reader, pid = DeviceReader(), python(IDLE)
    assert reader.read_cpu_worker(pid).utilisation_percent is None
    time.sleep(0.3)
    assert reader.read_cpu_worker(pid).utilisation_percent == pytest.approx(0, abs=5)


def test_utilisation_is_that_of_the_children_too(python: Start) -> None:
    reader, pid = DeviceReader(), python(BUSY_CHILD)
    (child,) = psutil.Process(pid).children()
    reader.read_cpu_worker(pid)
    started, before = time.monotonic(), child.cpu_times().user
    time.sleep(1.0)
    percent = reader.read_cpu_worker(pid).utilisation_percent
    spent = 100 * (child.cpu_times().user - before) / (time.monotonic() - started)
    assert percent is not None
    assert spent > 5
    assert percent == pytest.approx(spent, abs=10)


def test_utilisation_stays_within_one_core(python: Start) -> None:
    pid = python(BUSY_CHILD.replace("if os.fork() == 0:", "if os.fork() == 0 or os.fork() == 0:"))
    percent = readings.read_cpu_worker(pid, interval_seconds=0.5).utilisation_percent
    assert percent is not None
    assert 5 < percent <= 100


def test_memory_counts_a_childs_own_pages_and_shared_ones_once(python: Start) -> None:
    code = """
import os, time
shared = bytearray(os.urandom(1) * (120 << 20))
ready, written = os.pipe()
if os.fork() == 0:
    own = bytearray(os.urandom(1) * (60 << 20))
    os.write(written, b"x"); time.sleep(60)
os.read(ready, 1)
print("up", flush=True); time.sleep(60)
"""
    reading = readings.read_cpu_worker(python(code))
    assert reading.memory_used_bytes is not None
    # 120 MiB in both, 60 MiB in the child alone; the interpreters take some 15 MiB. Counted twice: over 300.
    assert 180 * 2**20 < reading.memory_used_bytes < 230 * 2**20
    assert reading.memory_total_bytes == total_memory_bytes()


def test_a_process_that_ended_has_no_readings() -> None:
    ended = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    reader = DeviceReader()
    reader.read_cpu_worker(ended.pid)
    ended.wait()
    assert reader.read_cpu_worker(ended.pid) == DeviceReading()
    assert reader.read_cpu_worker(-3) == DeviceReading()
    assert reader.read_cpu_worker(2**70) == DeviceReading()


def test_a_zombie_has_no_readings() -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as zombie:
        while psutil.Process(zombie.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert DeviceReader().read_cpu_worker(zombie.pid) == DeviceReading()


def test_a_child_that_has_ended_takes_no_time_back(python: Start) -> None:
    reaped = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    reader, pid = DeviceReader(), python(reaped + BUSY_CHILD)
    (child,) = psutil.Process(pid).children()
    reader.read_cpu_worker(pid)
    time.sleep(0.3)
    reader.read_cpu_worker(pid)
    child.kill()
    child.wait(5)
    time.sleep(1)  # more often, nothing is read
    percent = reader.read_cpu_worker(pid).utilisation_percent
    assert percent is not None
    assert 0 <= percent <= 100


def test_children_are_looked_for_once_in_a_while(python: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [100.0], []
    reader, pid = DeviceReader(clock=lambda: now[0]), python(BUSY_CHILD)
    found = psutil.process_iter
    monkeypatch.setattr(psutil, "process_iter", lambda: looks.append(now[0]) or found())
    for now[0] in (100.0, 101.0, 109.0, 110.5, 111.0):
        reader.read_cpu_worker(pid)
    assert looks == [100.0, 110.5]
