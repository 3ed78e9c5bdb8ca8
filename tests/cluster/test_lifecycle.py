"""After `stop`, after a killed kernel and after a failed start nothing is left: processes, files, memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from openclaw_nb.cluster.files import read_notes, runtime_directory
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.ownership import processes_of
from openclaw_nb.core.errors import AlreadyStartedError, NotStartedError, StartError, UsageError

from .conftest import cpu_devices

pytestmark = pytest.mark.cluster
GONE_SECONDS = 15


def leftovers(cluster_id: str) -> list[str]:
    """Everything of a cluster that can still be found on this machine."""
    found = [f"{record.pid} {record.command}" for record in processes_of(cluster_id)]
    found += [str(path) for path in Path("/dev/shm").glob(f"*{cluster_id}*")]
    found += [note["directory"] for note in read_notes() if note["cluster_id"] == cluster_id]
    return found


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory that nobody else uses."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def left_in(temporary: Path) -> list[str]:
    # torch keeps a cache of its own there.
    return [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


def shared_memory() -> set[str]:
    """What is in shared memory, but for the folders of clusters: another test may run one now, ours are `leftovers`."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("openclaw-")}


def assert_only(memory: set[str]) -> None:
    """Nothing but this stays in shared memory; what a test beside this one has there for a moment goes."""
    deadline = time.monotonic() + GONE_SECONDS
    while not shared_memory() <= memory and time.monotonic() < deadline:
        time.sleep(0.1)
    assert shared_memory() <= memory


def start_and_stop(num_workers: int = 2) -> str:
    master = MasterNode()
    master.start()
    master.start_workers(cpu_devices(num_workers))
    pids = [worker.pid for worker in master.workers]
    result = master.run_cell("import torch\nt = torch.ones(3)\ndist.all_reduce(t)\nt.sum().item()").wait(60)
    assert result is not None
    assert result.ok
    assert {record.pid for record in processes_of(master.cluster_id)} >= set(pids)
    master.create_shared_memory(0.001).put("x", [1.0])
    assert master.stop() >= num_workers
    assert leftovers(master.cluster_id) == []
    return master.cluster_id


def test_stop_leaves_nothing(temporary: Path) -> None:
    memory = shared_memory()
    start_and_stop()
    assert left_in(temporary) == []
    assert_only(memory)


def test_a_killed_kernel_leaves_nothing(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys, time
        from openclaw_nb.cluster.devices import Device
        from openclaw_nb.cluster.master import MasterNode
        master = MasterNode()
        master.start()
        master.start_workers([Device(f"CPU-{i}", "cpu", i, "core") for i in range(2)])
        master.create_shared_memory(0.001).put("x", [1.0])
        master.run_cell("import time\\ntime.sleep(600)")
        print(master.cluster_id, flush=True)
        time.sleep(600)
    """)
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    cluster_id = owner.stdout.readline().strip()
    assert len(processes_of(cluster_id)) > 5
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + GONE_SECONDS
    while leftovers(cluster_id) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert leftovers(cluster_id) == []


def test_stop_while_a_cell_runs() -> None:
    master = MasterNode()
    master.start()
    master.start_workers(cpu_devices(2))
    run = master.run_cell("import time\nwhile True: time.sleep(0.1)")
    time.sleep(0.3)
    master.stop()
    assert run.wait(10) is not None
    assert leftovers(master.cluster_id) == []
    with pytest.raises(NotStartedError, match="%openclaw start"):
        master.run_cell("1")


def test_a_name_is_free_again_when_its_owner_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENCLAW_RUNTIME_DIR", str(tmp_path))
    first = MasterNode(name="mine").start()
    try:
        with pytest.raises(AlreadyStartedError, match="mine"):
            MasterNode(name="mine").start()
        with pytest.raises(AlreadyStartedError):
            first.start()
    finally:
        first.stop()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "openclaw-cluster.json").write_text(
        '{"cluster_id": "0", "name": "mine", "owner_pid": 1, "owner_started": 0.0, "started": 0.0}'
    )
    second = MasterNode(name="mine").start()
    second.stop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["..", "/somewhere/else", "", "a b", "-n"])
def test_a_name_that_is_a_path_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENCLAW_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "precious").touch()
    with pytest.raises(UsageError, match="name"):
        MasterNode(name=name or " ").start()
    assert (tmp_path / "precious").exists()


def test_a_directory_of_somebody_else_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENCLAW_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    with pytest.raises(UsageError, match="another name"):
        MasterNode(name="mine").start()
    assert (tmp_path / "mine" / "precious").exists()


def test_a_directory_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENCLAW_RUNTIME_DIR", "/proc/nowhere")
    with pytest.raises(UsageError, match="OPENCLAW_RUNTIME_DIR"):
        MasterNode().start()


def test_a_worker_that_cannot_import_torch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('a broken installation')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    master = MasterNode()
    master.start()
    with pytest.raises(StartError, match="a broken installation"):
        master.start_workers(cpu_devices(1))
    assert leftovers(master.cluster_id) == []


def test_a_worker_that_ends_at_once_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'openclaw_nb.engine' in ' '.join(sys.orig_argv): sys.exit('the planted end')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    master = MasterNode()
    master.start()
    with pytest.raises(StartError, match="worker-0"):
        master.start_workers(cpu_devices(1))
    assert leftovers(master.cluster_id) == []


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_30_starts_and_stops(temporary: Path) -> None:
    memory = shared_memory()
    ids = [start_and_stop() for _ in range(30)]
    assert [item for cluster_id in ids for item in leftovers(cluster_id)] == []
    assert left_in(temporary) == []
    assert_only(memory)
    assert not runtime_directory().exists() or not any(runtime_directory().glob("*/openclaw-cluster.json"))
