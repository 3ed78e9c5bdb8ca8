"""The end of one of the controller's processes is noticed, and nobody waits for the watch to end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from openclaw_nb.cluster.ipp import _ControllerWatch
from openclaw_nb.cluster.ownership import create_time


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def started(pid: int) -> float:
    found = create_time(pid)
    assert found is not None
    return found


def test_the_end_of_one_of_several_is_told(sleeper: subprocess.Popen[bytes]) -> None:
    told: list[int] = []
    heard = threading.Event()

    def lost(pid: int) -> None:
        told.append(pid)
        heard.set()

    watch = _ControllerWatch([(pid, started(pid)) for pid in (os.getpid(), sleeper.pid)], lost)
    assert not heard.wait(0.1)
    sleeper.kill()
    assert heard.wait(10)
    watch.close()
    assert told == [sleeper.pid]


def test_a_number_that_is_anothers_now_is_an_end() -> None:
    heard = threading.Event()
    watch = _ControllerWatch([(os.getpid(), started(os.getpid()) - 1)], lambda pid: heard.set())
    assert heard.wait(10)
    watch.close()


def test_it_ends_at_once_and_tells_nothing() -> None:
    told: list[int] = []
    watch = _ControllerWatch([(os.getpid(), started(os.getpid()))], told.append)
    before = time.monotonic()
    watch.close()
    watch.close()
    assert time.monotonic() - before < 0.3
    assert not watch._thread.is_alive()
    assert told == []
