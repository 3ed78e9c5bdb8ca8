"""The guardian: nothing of a cluster is left when its owner is killed, and nothing is touched otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from openclaw_nb.cluster import guardian as guardian_module
from openclaw_nb.cluster.guardian import MARKER_FILE, Guardian
from openclaw_nb.cluster.ownership import (
    CLUSTER_VARIABLE,
    create_time,
    end_processes,
    new_cluster_id,
    processes_of,
)
from openclaw_nb.core.errors import StartError

ROOT = Path(guardian_module.__file__).parents[2]

# Four workers: a plain one, one with a child, one that ignores SIGTERM, one that is stopped.
OWNER = """
import json, os, signal, subprocess, sys, time
sys.path.append(os.environ["ROOT"])
from openclaw_nb.cluster.guardian import Guardian
cluster_id, directory, lease = sys.argv[1:4]
guardian = Guardian.start(cluster_id, directory, lease_seconds=float(lease))
up = "print('up', flush=True); time.sleep(120)"
codes = [
    "import time; " + up,
    "import subprocess, sys, time; "
    "subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import time; time.sleep(120)']); " + up,
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + up,
    "import time; " + up,
]
workers = [
    subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        env={**os.environ, "OPENCLAW_CLUSTER": cluster_id}, stdout=subprocess.PIPE, start_new_session=True,
    )
    for code in codes
]
for worker in workers:
    worker.stdout.readline()
workers[3].send_signal(signal.SIGSTOP)
forked = 0
if "fork" in sys.argv:
    forked = os.fork()
    if forked == 0:
        time.sleep(120)
        os._exit(0)
print(json.dumps({"guardian": guardian.pid, "forked": forked}), flush=True)
for word in sys.stdin:
    getattr(guardian, word.strip())()
    print("done", flush=True)
"""


class Owner:
    """A process that owns a cluster of four workers and obeys one word a line."""

    def __init__(self, cluster_id: str, directory: Path, lease: float, *extra: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, cluster_id, str(directory), str(lease), *extra],
            env={**os.environ, "ROOT": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.guardian_pid: int = said["guardian"]
        self.forked_pid: int = said["forked"]

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


Own = Callable[..., Owner]


@pytest.fixture
def cluster_id() -> Iterator[str]:
    fresh = new_cluster_id()
    yield fresh
    end_processes(fresh, grace_seconds=0)


@pytest.fixture
def directory(tmp_path: Path, cluster_id: str) -> Path:
    """A cluster's directory with its marker, something in it, and a link to something that is not its own."""
    path = tmp_path / "cluster"
    (path / "security").mkdir(parents=True)
    (path / "security" / "key.json").write_text("{}")
    (path / MARKER_FILE).write_text(json.dumps({"cluster_id": cluster_id, "name": "test"}))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("keep me")
    (path / "link").symlink_to(tmp_path / "elsewhere")
    return path


@pytest.fixture
def own(cluster_id: str, directory: Path) -> Iterator[Own]:
    owners: list[Owner] = []

    def start(*extra: str, lease: float = 0) -> Owner:
        owners.append(Owner(cluster_id, directory, lease, *extra))
        # Four workers and a child of one; a process has no readable environment in the instant of its exec.
        assert wait_until(lambda: len(processes_of(cluster_id)) == 5, 5)
        return owners[-1]

    yield start
    for owner in owners:
        owner.close()


def is_gone(pid: int) -> bool:
    return create_time(pid) is None


def open_files(pid: int) -> set[str]:
    folder = Path(f"/proc/{pid}/fd")
    found = set()
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder, and closed ones
            found.add(os.readlink(entry))
    return found


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "import time; time.sleep(120)"],
        env={**os.environ, CLUSTER_VARIABLE: new_cluster_id()},
    )
    yield process
    process.kill()
    process.wait()


def test_killed_owner_leaves_nothing(
    own: Own, cluster_id: str, directory: Path, stranger: subprocess.Popen[bytes]
) -> None:
    owner = own()
    before = processes_of(cluster_id)
    names = (cluster_id, f"{cluster_id}-batch", new_cluster_id())
    folder, segment, foreign = (Path(f"/dev/shm/openclaw-{name}") for name in names)
    folder.mkdir()
    (folder / "x").write_text("1")
    segment.write_text("1")
    foreign.write_text("1")
    owner.kill()
    assert wait_until(lambda: not processes_of(cluster_id), 5)
    assert wait_until(lambda: is_gone(owner.guardian_pid), 5)
    assert all(is_gone(record.pid) for record in before)
    assert not directory.exists()
    assert [folder.exists(), segment.exists(), foreign.exists()] == [False, False, True]
    foreign.unlink()
    assert (directory.parent / "elsewhere" / "precious").read_text() == "keep me"
    assert stranger.poll() is None


def test_owner_that_ends_by_itself_leaves_nothing(own: Own, cluster_id: str, directory: Path) -> None:
    owner = own()
    assert owner.process.stdin is not None
    owner.process.stdin.close()
    assert wait_until(lambda: not processes_of(cluster_id) and not directory.exists(), 8)


def test_a_forked_child_does_not_stand_in_for_the_owner(own: Own, cluster_id: str, directory: Path) -> None:
    owner = own("fork")
    try:
        pipe = os.readlink(f"/proc/{owner.guardian_pid}/fd/0")
        assert pipe in open_files(owner.process.pid)
        assert wait_until(lambda: pipe not in open_files(owner.forked_pid), 5)
        owner.kill()
        assert wait_until(lambda: not processes_of(cluster_id) and not directory.exists(), 5)
        assert not is_gone(owner.forked_pid)  # it is the person's own, not the cluster's
    finally:
        os.kill(owner.forked_pid, signal.SIGKILL)


def test_detach_leaves_everything(own: Own, cluster_id: str, directory: Path) -> None:
    owner = own()
    before = processes_of(cluster_id)
    owner.tell("detach")
    assert is_gone(owner.guardian_pid)
    owner.kill()
    time.sleep(1)
    assert processes_of(cluster_id) == before
    assert (directory / "security" / "key.json").exists()


def test_dismiss_ends_the_guardian_alone(own: Own, cluster_id: str, directory: Path) -> None:
    owner = own()
    before = processes_of(cluster_id)
    owner.tell("dismiss")
    assert is_gone(owner.guardian_pid)
    owner.tell("dismiss")  # a second time does nothing
    owner.kill()
    time.sleep(0.5)
    assert processes_of(cluster_id) == before
    assert directory.exists()


def test_guardian_survives_interrupt_and_hangup(own: Own, cluster_id: str, directory: Path) -> None:
    owner = own()
    os.kill(owner.guardian_pid, signal.SIGINT)
    os.kill(owner.guardian_pid, signal.SIGHUP)
    time.sleep(0.3)
    assert not is_gone(owner.guardian_pid)
    assert os.getsid(owner.guardian_pid) == owner.guardian_pid
    owner.kill()
    assert wait_until(lambda: not processes_of(cluster_id) and not directory.exists(), 5)


def test_lease_keeps_the_cluster_for_its_time(own: Own, cluster_id: str, directory: Path) -> None:
    owner = own(lease=2)
    owner.kill()
    time.sleep(1)
    assert len(processes_of(cluster_id)) == 5
    assert wait_until(lambda: not processes_of(cluster_id) and not directory.exists(), 6)


def test_a_new_owner_takes_over_within_the_lease(own: Own, cluster_id: str, directory: Path) -> None:
    owner = own(lease=60)
    owner.kill()
    successor = Guardian.start(cluster_id, directory)
    try:
        assert wait_until(lambda: is_gone(owner.guardian_pid), 5)
        assert len(processes_of(cluster_id)) == 5
        assert not is_gone(successor.pid)
    finally:
        successor.dismiss()
    assert not successor.alive
    assert directory.exists()


@pytest.mark.parametrize("marker", [None, "not json", "[]", json.dumps({"cluster_id": "0" * 32})])
def test_a_directory_that_is_not_the_clusters_stays(
    own: Own, cluster_id: str, directory: Path, marker: str | None
) -> None:
    if marker is None:
        (directory / MARKER_FILE).unlink()
    else:
        (directory / MARKER_FILE).write_text(marker)
    owner = own()
    owner.kill()
    assert wait_until(lambda: is_gone(owner.guardian_pid), 5)
    assert processes_of(cluster_id) == []
    assert (directory / "security" / "key.json").exists()


def test_owner_that_died_is_noticed_though_the_pipe_stays_open(
    cluster_id: str, directory: Path, stranger: subprocess.Popen[bytes]
) -> None:
    """This test holds the write end, as a child of the owner would that was forked behind Python's back."""
    charge = {
        "cluster_id": cluster_id,
        "directory": str(directory),
        "lease_seconds": 0,
        "owner_pid": stranger.pid,
        "owner_create_time": create_time(stranger.pid),
    }
    command = [sys.executable, "-m", "openclaw_nb.cluster.guardian"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(charge).encode() + b"\n")
        assert process.stdout.readline() == b"ready\n"
        time.sleep(2.5)
        assert process.poll() is None
        stranger.kill()  # a zombie from here on: dead, though its pid is still taken
        assert process.wait(5) == 0
    assert not directory.exists()


def test_programs_that_the_owner_starts_do_not_get_the_pipe(cluster_id: str, directory: Path) -> None:
    guardian = Guardian.start(cluster_id, directory)
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"], close_fds=False
    )
    try:
        pipe = os.readlink(f"/proc/{guardian.pid}/fd/0")
        wait_until(lambda: "time.sleep" in " ".join(psutil.Process(child.pid).cmdline()), 5)
        assert pipe in open_files(os.getpid())
        assert pipe not in open_files(child.pid)
    finally:
        guardian.dismiss()
        child.kill()
        child.wait()


def test_a_lost_handle_does_not_end_the_cluster(cluster_id: str, directory: Path) -> None:
    pid = Guardian.start(cluster_id, directory).pid
    try:
        time.sleep(0.3)
        assert not is_gone(pid)
        assert directory.exists()
    finally:
        (held,) = (g for g in guardian_module._held if g.pid == pid)
        held.dismiss()
    assert is_gone(pid)


def test_guardian_is_small_and_carries_no_mark(
    cluster_id: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CLUSTER_VARIABLE, cluster_id)  # an owner that is itself a worker
    guardian = Guardian.start(cluster_id, directory)
    try:
        assert processes_of(cluster_id) == []
        assert psutil.Process(guardian.pid).memory_info().rss < 16 * 2**20
    finally:
        guardian.dismiss()


def test_a_killed_guardian_can_still_be_dismissed(cluster_id: str, directory: Path) -> None:
    guardian = Guardian.start(cluster_id, directory)
    os.kill(guardian.pid, signal.SIGKILL)
    assert wait_until(lambda: not guardian.alive, 5)
    guardian.dismiss()
    guardian.detach()
    assert not guardian.alive


def test_a_stopped_guardian_does_not_act_later(
    cluster_id: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guardian = Guardian.start(cluster_id, directory)
    os.kill(guardian.pid, signal.SIGSTOP)
    monkeypatch.setattr(guardian_module, "_READY_SECONDS", 0.3)
    guardian.detach()
    assert is_gone(guardian.pid)
    assert directory.exists()


def test_a_missing_directory_is_said(cluster_id: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="missing' does not exist"):
        Guardian.start(cluster_id, tmp_path / "missing")


def test_a_guardian_that_cannot_start_says_why(cluster_id: str, tmp_path: Path) -> None:
    (tmp_path / "guardian.json").mkdir()  # its claim cannot be written there
    with pytest.raises(StartError, match=r"did not start: .*guardian\.json"):
        Guardian.start(cluster_id, tmp_path)
