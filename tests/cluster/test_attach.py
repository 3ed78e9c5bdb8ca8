"""A cluster changes hands: from one process to another, by detaching, or because its owner was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openclaw_nb.cluster.files import read_notes
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.ownership import end_processes, processes_of
from openclaw_nb.core.errors import (
    AlreadyStartedError,
    ClusterError,
    StartError,
    UnknownNameError,
    UsageError,
)

pytestmark = pytest.mark.cluster

HANG_SECONDS = 60.0

OWNER = """
import sys
from openclaw_nb.cluster.devices import Device
from openclaw_nb.cluster.master import MasterNode
master = MasterNode(name="shared", lease_seconds={lease})
master.start()
master.start_workers([Device(f"CPU-{{i}}", "cpu", i, "") for i in range(2)])
master.run_cell("x = [rank + 41]").wait()
{then}
"""
DETACH = "master.detach()"
WAIT = "print(flush=True)\nimport time; time.sleep(600)"
RUN = 'master.run_cell("import time\\nfor second in range(600): time.sleep(0.1)")\n' + DETACH


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of clusters of its own; whatever is left there at the end is ended."""
    monkeypatch.setenv("OPENCLAW_RUNTIME_DIR", str(tmp_path))
    yield tmp_path
    for note in read_notes():
        end_processes(note["cluster_id"], grace_seconds=0)


def own(then: str, lease: float = 0.0, *, killed: bool = False) -> subprocess.Popen[bytes]:
    """Let another process start a cluster, and wait until it has ended or printed a line."""
    script = textwrap.dedent(OWNER).format(lease=lease, then=then)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline()
    process.stdout.close()
    if then is WAIT and line:
        return process
    assert process.wait(HANG_SECONDS) == (-signal.SIGKILL if killed else 0), (
        "the owner could not start its cluster"
    )
    return process


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check_works(master: MasterNode) -> None:
    """The variables are there, the group works, and in the end nothing is left."""
    assert [master.pull(["x"], rank)["x"] for rank in range(2)] == [[41], [42]]
    result = master.run_cell(
        "import torch\nt = torch.tensor([x[0]])\ndist.all_reduce(t)\ntotal = t.item()"
    ).wait(60)
    assert result is not None
    assert result.ok
    assert master.pull(["total"])["total"] == 83
    assert all(worker.pid for worker in master.workers)
    cluster_id = master.cluster_id
    assert master.stop() > 0
    assert processes_of(cluster_id) == []
    assert read_notes() == []


def test_a_detached_cluster_is_taken_up(runtime: Path) -> None:
    own(DETACH)
    (note,) = read_notes()
    assert (note["detached"], note["runs"]) == (True, True)
    with pytest.raises(AlreadyStartedError, match="attach shared"):
        MasterNode(name="shared").start()
    check_works(MasterNode.attach())


def test_a_cluster_waits_for_its_lease_when_its_owner_is_killed(runtime: Path) -> None:
    owner = own(WAIT, lease=60.0)
    with pytest.raises(AlreadyStartedError, match=f"belongs to process {owner.pid}"):
        MasterNode.attach("shared")
    owner.send_signal(signal.SIGKILL)
    owner.wait(HANG_SECONDS)
    check_works(MasterNode.attach("shared"))


def test_a_cluster_that_nobody_claims_ends_with_its_lease(runtime: Path) -> None:
    owner = own(WAIT, lease=1.0)
    (note,) = read_notes()
    owner.send_signal(signal.SIGKILL)
    owner.wait(HANG_SECONDS)
    until(lambda: not processes_of(note["cluster_id"]))
    until(lambda: not read_notes())


def test_the_new_owner_is_watched_over_as_the_first_was(runtime: Path) -> None:
    own(DETACH)
    (note,) = read_notes()
    script = "from openclaw_nb.cluster.master import MasterNode\nMasterNode.attach()\nimport os; os._exit(1)"
    assert subprocess.run([sys.executable, "-c", script], timeout=HANG_SECONDS).returncode == 1
    until(lambda: not processes_of(note["cluster_id"]))


def test_a_cell_that_still_runs_can_be_stopped(runtime: Path) -> None:
    own(RUN)
    master = MasterNode.attach()
    with pytest.raises(ClusterError, match="still inside an earlier cell"):
        master.run_cell("1")
    assert master.interrupt()
    until(lambda: not any(worker.busy_with for worker in master.workers))
    assert 0 < master.pull(["second"])["second"] < 599
    check_works(master)


def test_a_worker_that_died_meanwhile_is_replaced(runtime: Path) -> None:
    own(DETACH)
    first, *_ = (
        p.pid for p in processes_of(read_notes()[0]["cluster_id"]) if "openclaw_nb.engine" in p.command
    )
    os.kill(first, signal.SIGKILL)
    master = MasterNode.attach()
    result = master.run_cell(
        "import torch\nt = torch.ones(1)\ndist.all_reduce(t)\nassert t.item() == 2"
    ).wait(60)
    assert result is not None
    assert result.ok
    assert any("new process" in note for note in master.take_notes())
    master.stop()


def test_an_owner_that_is_killed_while_it_detaches_leaves_the_cluster(runtime: Path) -> None:
    """From the moment in which the guardian is let go, whatever is still to be done."""
    own("master._guardian.detach(); import os; os.kill(os.getpid(), 9)", killed=True)
    check_works(MasterNode.attach())


def test_a_run_that_is_followed_ends_when_its_cluster_is_left(runtime: Path) -> None:
    own(DETACH)
    master = MasterNode.attach()
    run = master.run_cell("import time\nfor second in range(600): time.sleep(0.1)")
    until(lambda: bool(run.who_waits_where()))
    master.detach()
    result = run.wait(HANG_SECONDS)
    assert result is not None
    assert "detached" in result.cause
    assert result.busy == (0, 1)
    master = MasterNode.attach()
    until(lambda: all(worker.busy_with for worker in master.workers))
    assert master.interrupt()
    until(lambda: not any(worker.busy_with for worker in master.workers))
    check_works(master)


def test_an_attach_that_fails_can_be_tried_again(runtime: Path) -> None:
    own(DETACH)
    state = runtime / "shared" / "state.json"
    kept = state.read_text()
    state.unlink()
    with pytest.raises(UsageError, match="never started to its end"):
        MasterNode.attach()
    state.write_text(kept)
    files = runtime / "shared" / "security" / "cluster-shared.json"
    cluster = files.read_text()
    files.unlink()
    with pytest.raises(StartError, match="controller is gone"):
        MasterNode.attach()
    (note,) = read_notes()
    assert (note["detached"], note["runs"]) == (True, True)
    files.write_text(cluster)
    check_works(MasterNode.attach())


def test_what_cannot_be_attached_says_why(runtime: Path) -> None:
    with pytest.raises(UsageError, match="No cluster waits for an owner"):
        MasterNode.attach()
    own(DETACH)
    with pytest.raises(UnknownNameError, match="Did you mean 'shared'"):
        MasterNode.attach("shred")
    path = runtime / "shared" / "openclaw-cluster.json"
    note = json.loads(path.read_text())
    path.write_text(json.dumps({**note, "version": "0.0.1"}))
    with pytest.raises(UsageError, match=r"started by version 0\.0\.1"):
        MasterNode.attach()
    path.write_text(json.dumps(note))
    MasterNode.attach().stop()
