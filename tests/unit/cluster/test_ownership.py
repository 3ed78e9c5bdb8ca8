"""Ownership: the processes that carry a cluster's mark are found and ended, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from openclaw_nb.cluster import ownership
from openclaw_nb.cluster.ownership import (
    CLUSTER_VARIABLE,
    ProcessRecord,
    create_time,
    end_processes,
    new_cluster_id,
    processes_of,
)
from openclaw_nb.core.errors import ClusterError, UsageError

Start = Callable[..., "subprocess.Popen[bytes]"]

IDLE = "import time; print('up', flush=True); time.sleep(60)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + IDLE
PARENT = """
import subprocess, sys, time
command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(command, start_new_session=True)
print("up", child.pid, flush=True); time.sleep(60)
"""
# On SIGTERM it starts another process and ends itself: the newcomer must not be overlooked.
HYDRA = """
import os, signal, sys, time
def again(*_):
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.setsid(); time.sleep(60)
    os._exit(0)
signal.signal(signal.SIGTERM, again)
print("up", flush=True); time.sleep(60)
"""


@pytest.fixture
def cluster_id() -> Iterator[str]:
    fresh = new_cluster_id()
    yield fresh
    end_processes(fresh, grace_seconds=0)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start Python programs with a mark, or without one; what is left is killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start_one(code: str, mark: str | None) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name != CLUSTER_VARIABLE}
        if mark is not None:
            environment[CLUSTER_VARIABLE] = mark
        command = [sys.executable, "-I", "-S", "-c", code]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"up")
        return process

    yield start_one
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def pids(records: list[ProcessRecord]) -> set[int]:
    return {record.pid for record in records}


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_ids_are_128_random_bits() -> None:
    first, second = new_cluster_id(), new_cluster_id()
    assert first != second
    assert 0 <= int(first, 16) < 2**128
    assert len(first) == 32


def test_marked_processes_are_found_with_their_children(start: Start, cluster_id: str) -> None:
    parent = start(PARENT, cluster_id)
    start(IDLE, new_other := new_cluster_id())
    start(IDLE, None)
    found = processes_of(cluster_id)
    assert pids(found) == {parent.pid, *(child.pid for child in psutil.Process(parent.pid).children())}
    assert len(found) == 2
    assert all("time.sleep(60)" in record.command for record in found)
    assert len(end_processes(new_other, grace_seconds=0)) == 1


def test_the_calling_process_is_left_out(cluster_id: str) -> None:
    code = (
        "import sys; sys.path.append(sys.argv[1]); from openclaw_nb.cluster.ownership import processes_of; "
        "print(processes_of(sys.argv[2]))"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(ownership.__file__))))
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, root, cluster_id],
        env={**os.environ, CLUSTER_VARIABLE: cluster_id},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == "[]"


def test_zombies_are_left_out_and_have_no_create_time(start: Start, cluster_id: str) -> None:
    process = start(IDLE, cluster_id)
    assert create_time(process.pid) is not None
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    assert processes_of(cluster_id) == []
    assert create_time(process.pid) is None


def test_create_time_is_the_start_and_survives_odd_names(start: Start) -> None:
    rename = "open('/proc/self/comm', 'w').write('a) R (b 1 2')\n"
    process = start(rename + IDLE, None)
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    started = create_time(process.pid)
    assert started is not None
    assert booted + started == pytest.approx(psutil.Process(process.pid).create_time(), abs=1.5)
    assert create_time(process.pid) == started
    assert create_time(2**30) is None


def test_all_are_ended_also_the_stopped_and_the_deaf(start: Start, cluster_id: str) -> None:
    idle, deaf, stopped, parent = (start(code, cluster_id) for code in (IDLE, DEAF, IDLE, PARENT))
    stranger, other_mark = start(IDLE, None), start(IDLE, new_cluster_id())
    os.kill(stopped.pid, signal.SIGSTOP)
    before = processes_of(cluster_id)
    assert len(before) == 5
    ended = end_processes(cluster_id, grace_seconds=3.0)  # enough for the idle ones on a busy machine
    assert set(ended) == set(before)
    assert processes_of(cluster_id) == []
    assert all(is_gone(record.pid) for record in before)
    assert [p.wait() for p in (idle, deaf, stopped, parent)] == [-15, -9, -9, -15]
    assert stranger.poll() is None
    assert other_mark.poll() is None


def test_without_grace_all_are_killed_at_once(start: Start, cluster_id: str) -> None:
    process = start(IDLE, cluster_id)
    assert pids(end_processes(cluster_id, grace_seconds=0)) == {process.pid}
    assert process.wait() == -signal.SIGKILL


def test_grace_ends_when_all_have_ended(start: Start, cluster_id: str) -> None:
    start(IDLE, cluster_id)
    started = time.monotonic()
    end_processes(cluster_id, grace_seconds=30)
    assert time.monotonic() - started < 10


def test_processes_that_start_meanwhile_are_ended_too(start: Start, cluster_id: str) -> None:
    hydra = start(HYDRA, cluster_id)
    ended = end_processes(cluster_id, grace_seconds=3.0)  # enough for the idle ones on a busy machine
    assert len(ended) == 2
    assert ended[0].pid == hydra.pid
    assert processes_of(cluster_id) == []
    assert all(is_gone(record.pid) for record in ended)


def test_the_spared_live_on(start: Start, cluster_id: str) -> None:
    one, two = start(IDLE, cluster_id), start(IDLE, cluster_id)
    assert pids(end_processes(cluster_id, grace_seconds=5, spare=[one.pid])) == {two.pid}
    assert one.poll() is None


def test_nothing_to_end_is_no_error(cluster_id: str) -> None:
    assert end_processes(cluster_id) == []


@pytest.mark.parametrize("use_pidfd", [True, False])
def test_a_pid_that_is_another_process_now_is_not_signalled(
    start: Start, cluster_id: str, monkeypatch: pytest.MonkeyPatch, use_pidfd: bool
) -> None:
    monkeypatch.setattr(ownership, "_HAS_PIDFD", use_pidfd and ownership._HAS_PIDFD)
    marked, stranger = start(IDLE, cluster_id), start(IDLE, None)
    (record,) = processes_of(cluster_id)
    later = ProcessRecord(marked.pid, record.create_time + 1, record.command)
    foreign = ProcessRecord(stranger.pid, create_time(stranger.pid) or 0.0, "")
    assert not ownership.send_signal(later, cluster_id, signal.SIGKILL)
    assert not ownership.send_signal(foreign, cluster_id, signal.SIGKILL)
    assert not ownership.send_signal(record, new_cluster_id(), signal.SIGKILL)
    assert marked.poll() is None
    assert stranger.poll() is None
    assert ownership.send_signal(record, cluster_id, signal.SIGKILL)
    assert marked.wait() == -signal.SIGKILL
    assert not ownership.send_signal(record, cluster_id, signal.SIGKILL)


def test_what_cannot_be_ended_is_named(
    start: Start, cluster_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A signal that does nothing stands for a process that hangs in the operating system.
    process = start(IDLE, cluster_id)
    monkeypatch.setattr(ownership, "send_signal", lambda *_: False)
    monkeypatch.setattr(ownership, "_KILL_SECONDS", 0.1)
    with pytest.raises(ClusterError, match=rf"1 process.*{cluster_id}.*pid {process.pid} \(.*time\.sleep"):
        end_processes(cluster_id, grace_seconds=0)
    monkeypatch.undo()


@pytest.mark.parametrize("bad", ["", "0" * 31, "g" * 32, "A" * 32, "../" + "0" * 29])
def test_what_is_no_id_matches_nothing(bad: str) -> None:
    with pytest.raises(UsageError, match="32 hexadecimal digits"):
        processes_of(bad)
    with pytest.raises(UsageError, match="32 hexadecimal digits"):
        end_processes(bad)


def test_psutil_finds_and_ends_the_same(
    start: Start, cluster_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(IDLE, cluster_id)
    by_proc = processes_of(cluster_id)
    monkeypatch.setattr(ownership, "_HAS_PROC", False)
    monkeypatch.setattr(ownership, "_HAS_PIDFD", False)
    (record,) = processes_of(cluster_id)
    assert (record.pid, record.command) == (by_proc[0].pid, by_proc[0].command)
    assert record.create_time == create_time(process.pid) == psutil.Process(process.pid).create_time()
    end_processes(cluster_id, grace_seconds=5)
    assert process.wait() == -signal.SIGTERM
    assert create_time(process.pid) is None
