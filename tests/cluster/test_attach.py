"""A cluster changes hands: from one process to another, by detaching, or because its owner was killed.

One cluster waits for an owner in most tests, and waits again when they end; those that end a cluster, or are about the
process that has started it, have one of their own.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openclaw_nb.cluster import membership
from openclaw_nb.cluster.adopted import AdoptedRun
from openclaw_nb.cluster.devices import Device
from openclaw_nb.cluster.files import read_notes
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.ownership import end_processes, processes_of
from openclaw_nb.cluster.run import CellRun, Output
from openclaw_nb.core.errors import (
    AlreadyStartedError,
    ClusterError,
    StartError,
    UnknownNameError,
    UsageError,
)
from openclaw_nb.monitor.store import Curve, Monitor, RunHistory
from openclaw_nb.notebook.failure import cell_error
from openclaw_nb.notebook.panel import Panel
from openclaw_nb.notebook.tables import status_table
from openclaw_nb.session import current_session

from .conftest import kill

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
NEXT_OWNER = """
from openclaw_nb.cluster.master import MasterNode
master = MasterNode.attach(lease_seconds={lease})
{then}
"""
DETACH = "master.detach()"
KILL = "import os; os.kill(os.getpid(), 9)"
WAIT = "print(flush=True)\nimport time; time.sleep(600)"


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of clusters of its own; whatever is left there at the end is ended."""
    monkeypatch.setenv("OPENCLAW_RUNTIME_DIR", str(tmp_path))
    yield tmp_path
    for note in read_notes():
        end_processes(note["cluster_id"], grace_seconds=0)


@pytest.fixture(scope="module")
def shared_runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of the cluster that tests share; in the end it is stopped, and nothing is left."""
    path = tmp_path_factory.mktemp("shared")
    yield path
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENCLAW_RUNTIME_DIR", str(path))
        for note in read_notes():
            assert current_session().stop(note["name"]) > 0
            assert processes_of(note["cluster_id"]) == []
        deadline = time.monotonic() + HANG_SECONDS  # a guardian may still be at it
        while list(path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(path.iterdir()) == []


@pytest.fixture
def waiting(shared_runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a cluster that waits for an owner, and whose workers hold an ``x``; it must be left so."""
    monkeypatch.setenv("OPENCLAW_RUNTIME_DIR", str(shared_runtime))
    if not read_notes():
        own(DETACH)
    yield shared_runtime
    for note in read_notes():
        if not (note["detached"] and note["runs"]):  # the test has failed; the next one must not
            end_processes(note["cluster_id"], grace_seconds=0)
            shutil.rmtree(note["directory"])


def own(
    then: str, lease: float = 0.0, *, killed: bool = False, script: str = OWNER
) -> subprocess.Popen[bytes]:
    """Let another process start a cluster, and wait until it has ended or printed a line."""
    script = textwrap.dedent(script).format(lease=lease, then=then)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline()
    process.stdout.close()
    if then is WAIT and line:
        return process
    assert process.wait(HANG_SECONDS) == (-signal.SIGKILL if killed else 0), (
        "the owner could not do what it was told to"
    )
    return process


def take_over(then: str, lease: float = 0.0, *, killed: bool = False) -> None:
    """Let another process attach to the cluster that waits, and wait until it has ended."""
    own(then, lease, killed=killed, script=NEXT_OWNER)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check_whole(master: MasterNode) -> None:
    """The variables are there, and the group works."""
    assert [master.pull(["x"], rank)["x"] for rank in range(2)] == [[41], [42]]
    result = master.run_cell(
        "import torch\nt = torch.tensor([x[0]])\ndist.all_reduce(t)\ntotal = t.item()"
    ).wait(60)
    assert result is not None
    assert result.ok
    assert master.pull(["total"])["total"] == 83
    assert master.run_cell("del total").wait(60).ok  # type: ignore[union-attr]
    assert all(worker.pid for worker in master.workers)


def check_and_leave(master: MasterNode) -> None:
    """It is whole, and waits for an owner again."""
    check_whole(master)
    master.detach()
    (note,) = read_notes()
    assert (note["detached"], note["runs"]) == (True, True)


def check_works(master: MasterNode) -> None:
    """It is whole, and in the end nothing is left."""
    check_whole(master)
    cluster_id = master.cluster_id
    assert master.stop() > 0
    assert processes_of(cluster_id) == []
    assert read_notes() == []


def test_a_detached_cluster_is_taken_up(waiting: Path) -> None:
    (note,) = read_notes()
    assert (note["detached"], note["runs"]) == (True, True)
    with pytest.raises(AlreadyStartedError, match="attach shared"):
        MasterNode(name="shared").start()
    check_and_leave(MasterNode.attach())


def test_a_cluster_belongs_to_its_owner_and_waits_for_its_lease_when_that_is_killed(runtime: Path) -> None:
    owner = own(WAIT, lease=60.0)
    with pytest.raises(AlreadyStartedError, match=f"belongs to process {owner.pid}"):
        MasterNode.attach("shared")
    with pytest.raises(AlreadyStartedError, match=f"belongs to process {owner.pid}"):
        current_session().stop("shared")
    assert read_notes()[0]["runs"]
    owner.send_signal(signal.SIGKILL)
    owner.wait(HANG_SECONDS)
    check_works(MasterNode.attach("shared"))


LEAVER = """
from openclaw_nb.session import OpenClawCluster
cluster = OpenClawCluster(workers=2, name="shared", lease_seconds={lease}, oversubscribe=True).start()
cluster.run_cell("x = [rank + 41]").wait()
run = cluster.run_cell("import time; time.sleep(1.5); print('slept')")
"""


@pytest.mark.soak
def test_a_lease_begins_when_the_owner_ends_as_it_should(runtime: Path) -> None:
    """A kernel that is restarted, say."""
    subprocess.run([sys.executable, "-c", LEAVER.format(lease=60)], check=True, timeout=HANG_SECONDS)
    master = MasterNode.attach()
    run = master.last_run
    assert run is not None
    result = run.wait(HANG_SECONDS)
    assert result is not None
    assert result.ok
    assert shown(run) == {0: ["slept"], 1: ["slept"]}
    check_works(master)


def test_without_a_lease_nothing_is_left_by_an_owner_that_ends(runtime: Path) -> None:
    subprocess.run([sys.executable, "-c", LEAVER.format(lease=0)], check=True, timeout=HANG_SECONDS)
    assert read_notes() == []


@pytest.mark.soak
def test_a_cluster_that_nobody_claims_ends_with_its_lease(runtime: Path) -> None:
    owner = own(WAIT, lease=1.0)
    (note,) = read_notes()
    owner.send_signal(signal.SIGKILL)
    owner.wait(HANG_SECONDS)
    until(lambda: not processes_of(note["cluster_id"]))
    until(lambda: not read_notes())


def test_a_cell_that_still_runs_can_be_stopped(waiting: Path) -> None:
    take_over('master.run_cell("import time\\nfor second in range(600): time.sleep(0.1)")\n' + DETACH)
    master = MasterNode.attach()
    with pytest.raises(ClusterError, match="A cell is running on the workers"):
        master.run_cell("1")
    assert master.interrupt()
    until(lambda: not any(worker.busy_with for worker in master.workers))
    assert 0 <= master.pull(["second"])["second"] < 599
    check_and_leave(master)


def training(then: str) -> str:
    """An owner's script that begins to train, waits until it has shown something, and goes on as told."""
    return f"""
from openclaw_nb.session import OpenClawCluster
from openclaw_nb.strategies import DataParallelStrategy
master.run_cell({BUILD!r}).wait()
run = master.run_cell({TRAIN!r}, strategy=DataParallelStrategy().spec(), execution_count=7)
while not run.next_event(0.1): pass
import time; time.sleep(1)
{then}"""


BUILD = """
import time, torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(160, 4), torch.randint(2, (160,))), batch_size=16)
"""
TRAIN = """
for epoch in range(10):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        time.sleep(0.06)
    print("epoch", epoch)
"""
EPOCHS = [f"epoch {epoch}" for epoch in range(10)]


def shown(run: CellRun) -> dict[int, list[str]]:
    """All lines that each rank of an ended run has shown."""
    texts: dict[int, str] = {}
    while (event := run.next_event(0.5)) is not None:
        if isinstance(event, Output) and event.entry[0] == "stream":
            texts[event.rank] = texts.get(event.rank, "") + event.entry[2]
    return {rank: text.split("\n")[:-1] for rank, text in texts.items()}


@pytest.mark.parametrize(
    "killed", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["detached", "killed"]
)
def test_a_cell_that_runs_is_followed_to_its_end(waiting: Path, killed: bool) -> None:
    take_over(training(KILL if killed else DETACH), lease=60.0, killed=killed)
    time.sleep(0.5)  # nobody listens meanwhile
    monitor = Monitor()
    master = MasterNode.attach(listener=monitor.take)
    run = master.last_run
    assert isinstance(run, AdoptedRun)
    assert run.running
    assert run.execution_count == 7
    until(lambda: (monitor.latest() or history).steps > 10)
    with pytest.raises(ClusterError, match="A cell is running"):
        master.pull(["epoch"])
    result = run.wait(HANG_SECONDS)
    assert result is not None
    assert result.ok
    assert result.seconds > 3
    assert shown(run) == {0: EPOCHS, 1: EPOCHS}
    found = monitor.history(run.run_id)
    assert found is not None
    assert (found.steps, found.samples, found.lost) == (100, 1600, 0)
    assert [worker.samples for worker in found.workers] == [800, 800]
    assert found.loss.x[-1] == 100
    first, second = (worker.mean_rate for worker in found.workers)
    assert first == pytest.approx(second, rel=0.1)  # they make the same steps
    assert found.mean_rate == pytest.approx(first + second, rel=0.1)
    check_and_leave(master)


history = RunHistory(
    run_id="", steps=0, samples=0, lost=0, seconds=0.0, rate=None, mean_rate=None, loss=Curve(), rates=Curve(),
    workers=(), straggler=None,
)  # fmt: skip


def test_a_cell_that_runs_is_interrupted_as_ones_own(waiting: Path) -> None:
    take_over(training(DETACH))
    master = MasterNode.attach()
    run = master.last_run
    assert run is not None
    until(lambda: any(line for _, _, line in run.who_waits_where()))
    run.interrupt()
    result = run.wait(HANG_SECONDS)
    assert result is not None
    assert result.interrupted
    assert 0 <= master.pull(["epoch"])["epoch"] < 9
    check_and_leave(master)


@pytest.mark.parametrize("fails", [False, True], ids=["well", "badly"])
def test_a_cell_that_ended_meanwhile_says_how(waiting: Path, fails: bool) -> None:
    end = "raise ValueError('at the end')" if fails else "print('the end')"
    source = f"import time; time.sleep(1.5)\n{end}"
    take_over(f"master.run_cell({source!r})\nimport time; time.sleep(0.5)\n{DETACH}")
    time.sleep(2)  # nobody listens when it ends
    master = MasterNode.attach()
    run = master.last_run
    assert run is not None
    result = run.wait(HANG_SECONDS)
    assert result is not None
    assert result.ok is not fails
    assert 1.5 <= result.seconds < 2.5
    if fails:
        assert {failure.message for failure in result.failures.values()} == {"at the end"}
        assert "at the end" in "".join(result.failures[0].traceback)
    else:
        assert shown(run) == {0: ["the end"], 1: ["the end"]}
    check_and_leave(master)


@pytest.mark.soak
def test_a_rank_that_died_meanwhile_releases_the_others(waiting: Path) -> None:
    source = "import time, torch\nif rank == 0: dist.all_reduce(torch.ones(1))\nelse: time.sleep(600)"
    take_over(f"master.run_cell({source!r})\nimport time; time.sleep(1)\n{DETACH}")
    (second,) = [p for p in processes_of(read_notes()[0]["cluster_id"]) if "IPEngine.id=1" in p.command]
    kill(second.pid)
    time.sleep(1)
    master = MasterNode.attach()
    run = master.last_run
    assert run is not None
    result = run.wait(HANG_SECONDS)
    assert result is not None
    assert result.died == (1,)
    assert result.failures[0].consequence
    assert master.run_cell("assert world_size == 2").wait(HANG_SECONDS).ok  # type: ignore[union-attr]
    assert master.pull(["x"])["x"] == [41]
    renew(master)


def test_a_worker_in_native_code_answers_late(waiting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent: list[int] = []
    records = membership.Membership.records

    def looked_at(members: membership.Membership) -> Any:
        silent.extend(worker.number for worker in members.silent)
        return records(members)

    monkeypatch.setattr(membership, "_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(membership.Membership, "records", looked_at)
    source = (
        "if rank == 1:\n    import ctypes\n    ctypes.PyDLL(None).sleep(4)"  # holds the interpreter's lock
    )
    take_over(f"master.run_cell({source!r})\nimport time; time.sleep(0.5)\n{DETACH}")
    master = MasterNode.attach()
    assert silent == [1]
    run = master.last_run
    assert run is not None
    result = run.wait(HANG_SECONDS)
    assert result is not None
    assert result.ok
    check_and_leave(master)


def test_a_forming_that_its_owner_did_not_live_to_end(waiting: Path) -> None:
    """Worker 0 waits in a rendezvous that worker 1 was never asked to."""
    take_over(
        "members = master._members; members.epoch += 1\n"
        "members.door.request(0, members._form_command(0, list(members.workers)))\n"
        "import os, time; time.sleep(0.5); os.kill(os.getpid(), 9)",
        lease=60.0,
        killed=True,
    )
    check_and_leave(MasterNode.attach())


def controllers(cluster_id: str) -> list[int]:
    """The controller's own process, and those of its schedulers."""
    return [p.pid for p in processes_of(cluster_id) if "ipyparallel.controller" in p.command]


def started() -> MasterNode:
    master = MasterNode(name="shared").start()
    master.start_workers([Device(f"CPU-{i}", "cpu", i, "") for i in range(2)])
    master.run_cell("x = [rank + 41]").wait(HANG_SECONDS)
    return master


def renew(master: MasterNode) -> None:
    """Give a worker that is new what the others hold, and leave a cluster as it was found."""
    assert master.run_cell("x = [rank + 41]").wait(HANG_SECONDS).ok  # type: ignore[union-attr]
    check_and_leave(master)


@pytest.mark.parametrize("which", [pytest.param(0, marks=pytest.mark.soak), -1], ids=["hub", "scheduler"])
def test_the_end_of_the_controller_is_told(runtime: Path, which: int) -> None:
    master = started()
    pid = sorted(controllers(master.cluster_id))[which]
    run = master.run_cell("import time; time.sleep(600)")
    time.sleep(0.5)
    kill(pid)
    before = time.monotonic()
    result = run.wait(HANG_SECONDS)
    assert time.monotonic() - before < 10
    assert result is not None
    assert result.left
    what = f"controller \\(process {pid}\\) has ended.*%openclaw stop"
    assert re.search(what, result.cause)
    assert re.search(what, str(cell_error(result, {})))
    assert re.search(what, repr(status_table(master)))
    assert re.search(what, repr(Panel(master, Monitor())))
    uses = [lambda: master.run_cell("1"), lambda: master.pull(["x"]), lambda: master.push({"y": 1})]
    for use in (*uses, master.interrupt, master.reset):
        with pytest.raises(ClusterError, match=what):
            use()
    cluster_id = master.cluster_id
    assert master.stop() > 0
    assert processes_of(cluster_id) == []
    assert read_notes() == []


@pytest.mark.soak
def test_a_cluster_without_its_controller_is_ended_by_name(runtime: Path) -> None:
    started().detach()
    (note,) = read_notes()
    for pid in reversed(controllers(note["cluster_id"])):  # the hub last: it would end the others
        kill(pid)
    with pytest.raises(StartError, match=r"controller is gone .*%openclaw stop shared ends them"):
        MasterNode.attach()
    with pytest.raises(AlreadyStartedError):
        MasterNode(name="shared").start()
    with pytest.raises(UnknownNameError):
        current_session().stop("share")
    assert current_session().stop("shared") >= 2
    assert processes_of(note["cluster_id"]) == []
    assert read_notes() == []
    assert MasterNode(name="shared").start().stop() > 0


CLAIM = """
import sys
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.core.errors import OpenClawError
print("ready", flush=True)
sys.stdin.readline()
try:
    master = MasterNode.attach()
except OpenClawError as error:
    print(type(error).__name__, error, flush=True)
else:
    print("mine", flush=True)
    sys.stdin.readline()
    master.detach()
"""


def test_of_two_that_attach_at_once_one_wins(waiting: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    claimants = [subprocess.Popen([sys.executable, "-c", CLAIM], **pipes) for _ in range(2)]  # type: ignore[call-overload]
    for claimant in claimants:
        assert claimant.stdout.readline() == "ready\n"
    for claimant in claimants:
        claimant.stdin.write("go\n")
        claimant.stdin.flush()
    said = [claimant.stdout.readline() for claimant in claimants]
    for claimant in claimants:
        claimant.communicate("end\n", timeout=HANG_SECONDS)
    assert said.count("mine\n") == 1
    (other,) = [line for line in said if line != "mine\n"]
    assert "AlreadyStartedError" in other or "No cluster waits for an owner" in other
    check_and_leave(MasterNode.attach())


@pytest.mark.parametrize(
    "seconds", [*(pytest.param(s, marks=pytest.mark.soak) for s in (0.0, 0.05, 0.6)), 0.2]
)
def test_a_process_killed_while_it_attaches_leaves_the_cluster(waiting: Path, seconds: float) -> None:
    claimant = subprocess.Popen(
        [sys.executable, "-c", CLAIM.replace("attach()", "attach(lease_seconds=60)")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert claimant.stdin is not None
    assert claimant.stdout is not None
    assert claimant.stdout.readline() == "ready\n"
    claimant.stdin.write("go\n")
    claimant.stdin.flush()
    time.sleep(seconds)
    claimant.kill()
    claimant.communicate()
    check_and_leave(MasterNode.attach())


def test_a_worker_that_died_meanwhile_is_replaced(waiting: Path) -> None:
    first, *_ = (
        p.pid for p in processes_of(read_notes()[0]["cluster_id"]) if "openclaw_nb.engine" in p.command
    )
    kill(first)
    master = MasterNode.attach()
    result = master.run_cell(
        "import torch\nt = torch.ones(1)\ndist.all_reduce(t)\nassert t.item() == 2"
    ).wait(60)
    assert result is not None
    assert result.ok
    assert any("new process" in note for note in master.take_notes())
    renew(master)


def test_an_owner_that_is_killed_while_it_detaches_leaves_the_cluster(waiting: Path) -> None:
    """From the moment in which the guardian is let go, whatever is still to be done."""
    take_over(f"master._guardian.detach(); {KILL}", killed=True)
    check_and_leave(MasterNode.attach())


def test_a_run_that_is_followed_ends_when_its_cluster_is_left(waiting: Path) -> None:
    master = MasterNode.attach()
    run = master.run_cell("import time\nfor second in range(600): time.sleep(0.1)")
    until(lambda: bool(run.who_waits_where()))
    master.detach()
    result = run.wait(HANG_SECONDS)
    assert result is not None
    assert "has left the cluster" in result.cause
    assert result.busy == (0, 1)
    master = MasterNode.attach()
    until(lambda: all(worker.busy_with for worker in master.workers))
    assert master.interrupt()
    until(lambda: not any(worker.busy_with for worker in master.workers))
    check_and_leave(master)


def test_an_attach_that_fails_can_be_tried_again(waiting: Path) -> None:
    state = waiting / "shared" / "state.json"
    kept = state.read_text()
    state.unlink()
    with pytest.raises(UsageError, match="never started to its end"):
        MasterNode.attach()
    state.write_text(kept)
    files = waiting / "shared" / "security" / "cluster-shared.json"
    cluster = files.read_text()
    files.unlink()
    with pytest.raises(StartError, match="controller is gone"):
        MasterNode.attach()
    (note,) = read_notes()
    assert (note["detached"], note["runs"]) == (True, True)
    files.write_text(cluster)
    check_and_leave(MasterNode.attach())


def test_what_cannot_be_attached_says_why(runtime: Path) -> None:
    with pytest.raises(UsageError, match="No cluster waits for an owner"):
        MasterNode.attach()


def test_a_name_that_is_misspelt_is_told(waiting: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'shared'"):
        MasterNode.attach("shred")
    check_and_leave(MasterNode.attach())


def test_the_new_owner_is_watched_over_as_the_first_was(waiting: Path) -> None:
    """Stands last: it ends the cluster that the others share."""
    (note,) = read_notes()
    script = "from openclaw_nb.cluster.master import MasterNode\nMasterNode.attach()\nimport os; os._exit(1)"
    assert subprocess.run([sys.executable, "-c", script], timeout=HANG_SECONDS).returncode == 1
    until(lambda: not processes_of(note["cluster_id"]))
    until(lambda: not read_notes())
