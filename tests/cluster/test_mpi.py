"""Workers that one mpiexec has started, and sums by MPI: what local workers promise holds, but for one death.

One set of three serves the tests that leave it whole; those that end one start their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from openclaw_nb.cluster.launch import ports_open_to_others
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.ownership import processes_of
from openclaw_nb.core.errors import ClusterError, StartError, UsageError
from openclaw_nb.protocol.messages import StrategySpec

from .conftest import HANG_SECONDS, Lab, cpu_devices, kill, single_device
from .test_data_parallel import CNN, LOOP, SETUP, STATE, check
from .test_lifecycle import GONE_SECONDS, leftovers, shared_memory
from .test_magics import Notebook
from .test_release import FREE_SECONDS, finish

pytestmark = [
    pytest.mark.cluster,
    # The notebook client's own sockets, as in test_magics.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SLOW_LOOP = """
import time
for step in range(100_000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        {strike}
"""


def a_set(num_workers: int, communication: str = "mpi") -> MasterNode:
    # Under this variable ipykernel does not capture what is written to file descriptors.
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    master = MasterNode(backend="mpi", communication=communication)
    master.start()
    master.start_workers(cpu_devices(num_workers))
    return master


@pytest.fixture(scope="module")
def trio() -> Iterator[Lab]:
    torch.set_num_threads(1)
    master = a_set(3)
    yield Lab(master)
    master.stop()


@pytest.fixture
def pair() -> Iterator[Lab]:
    """Two workers, for a test that breaks them."""
    master = a_set(2)
    yield Lab(master)
    if master.running:
        master.stop()


# ------------------------------------------------------------------------------------------- start and cells


def test_each_rank_is_a_worker_of_its_own(trio: Lab) -> None:
    """Number, device, mark and log are those of a local worker; one mpiexec is the parent of all."""
    trio.good(
        "import os\nmine = (rank, os.environ['OPENCLAW_DEVICE'], os.environ['OPENCLAW_CLUSTER'], os.getppid())"
    )
    told = [trio.pull("mine", rank) for rank in range(3)]
    assert [each[:3] for each in told] == [(r, f"CPU-{r}", trio.master.cluster_id) for r in range(3)]
    assert len({each[3] for each in told}) == 1
    (launcher,) = [r for r in processes_of(trio.master.cluster_id) if r.pid == told[0][3]]
    assert f"-n 3 {sys.executable}" in launcher.command
    assert [worker.pid for worker in trio.master.workers] == [
        child.pid for child in psutil.Process(launcher.pid).children()
    ]


def test_output_goes_to_the_cell_and_logs_are_apart(trio: Lab) -> None:
    result = trio.good("import os\nos.system('echo from a child')\nprint('from rank', rank)")
    for rank, value in result.values.items():
        shown = "".join(text for kind, _, text in value["entries"] if kind == "stream")
        assert "from a child\n" in shown
        assert f"from rank {rank}\n" in shown
    logs = sorted(Path(trio.master._door.directory, "log").glob("ipengine-*-worker-*-mpi.log"))  # type: ignore[union-attr]
    assert len(logs) == 3
    assert all(f"WorkerApp.{rank}." in log.read_text() for rank, log in enumerate(logs))


def test_the_cells_own_collectives_are_made_by_gloo(trio: Lab) -> None:
    trio.good(
        "import torch\nt = torch.full((3,), rank + 1.0)\ndist.all_reduce(t)\nassert t.tolist() == [6.0] * 3"
    )
    assert trio.master.communication == "sums by MPI, dist.* by gloo"


@pytest.mark.soak
def test_auto_shares_memory_and_leaves_mpi_alone() -> None:
    master = a_set(2, "auto")
    try:
        lab = Lab(master)
        assert master.communication == "gloo + shared memory"
        check(lab, 2)
        lab.good("import sys\nassert not any(name.startswith('mpi4py') for name in sys.modules)")
    finally:
        master.stop()


def test_the_kernel_side_does_not_import_mpi4py(trio: Lab) -> None:
    assert trio.master.running
    assert not any(name.startswith("mpi4py") for name in sys.modules)


def test_what_other_hosts_can_reach_is_told(trio: Lab) -> None:
    """The workers listen on loopback alone; mpiexec, which does not, is named with its ports."""
    assert all(ports_open_to_others(worker.pid) == [] for worker in trio.master.workers if worker.pid)
    (worker, *_) = trio.master.workers
    ports = ports_open_to_others(psutil.Process(worker.pid).ppid())
    notes = " ".join(trio.master.take_notes())
    assert all(str(port) in notes for port in ports)
    assert ("every network interface" in notes) == bool(ports)


# ------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("setup", [SETUP, CNN], ids=["mlp", "cnn-batchnorm"])
def test_training_equals_single_device(trio: Lab, setup: str, num_workers: int) -> None:
    """With batches that do not divide evenly: 150 samples by 32, 70 by 16."""
    check(trio, num_workers, setup)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_sync_frequency_equals_a_larger_batch(trio: Lab, num_workers: int) -> None:
    setup = SETUP.replace("shuffle=True", "shuffle=False")
    result = trio.train(setup, LOOP + STATE, num_workers, options={"sync_frequency": 3})
    assert result.ok, result.failures
    expected = single_device(setup.replace("batch_size=32", "batch_size=96"), LOOP + STATE)["state"]
    for rank in range(num_workers):
        for name, value in trio.pull("state", rank).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_averaged_parameters_equal_those_through_shared_memory(trio: Lab, lab: Lab, num_workers: int) -> None:
    options = {"mode": "parameter", "sync_frequency": 2}
    states = []
    for each in (trio, lab):
        result = each.train(SETUP, LOOP + STATE, num_workers, options=options)
        assert result.ok, result.failures
        states.append([each.pull("state", rank) for rank in range(num_workers)])
    for mine, theirs in zip(*states, strict=True):
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(value, states[0][0][name], rtol=0, atol=0)


def test_half_precision_is_summed_too(trio: Lab) -> None:
    """MPI has no bfloat16: it is summed as float32 and rounded once."""
    setup = SETUP.replace("model = ", "X = X.bfloat16()\nmodel = ").replace(
        "optimizer =", "model.bfloat16()\noptimizer ="
    )
    loop = LOOP.replace("loss_fn(model(x), y)", "loss_fn(model(x).float(), y)")
    check(trio, 3, setup, loop, tolerance=0.05)


def test_the_step_clock_goes_on(trio: Lab) -> None:
    """A rank that is slow is waited for, and the others say so."""
    measured = []
    forget = trio.master.listen(measured.append)
    loop = LOOP.replace(
        "optimizer.zero_grad()", "import time; time.sleep(0.02 * (rank == 1)); optimizer.zero_grad()"
    )
    assert trio.train(SETUP, loop, 3).ok
    forget()
    waited = [sum(m.seconds.get("wait", 0.0) for m in measured if m.worker == worker) for worker in range(3)]
    assert waited[0] > 0.05
    assert waited[2] > 0.05
    assert waited[1] < min(waited[0], waited[2]) / 2


# ------------------------------------------------------------------------------------------- release


def check_whole(lab: Lab, num_workers: int) -> None:
    """State is kept, the same processes are there, and the next cells work and train right."""
    lab.good("assert kept == 41 + rank")
    check(lab, num_workers)


def test_the_stop_button_during_a_sum(trio: Lab) -> None:
    pids = [worker.pid for worker in trio.master.workers]
    trio.good(SETUP + "\nkept = 41 + rank")
    run = trio.master.run_cell(SLOW_LOOP.format(strike=""), strategy=StrategySpec(name="data_parallel"))
    time.sleep(1.0)
    run.interrupt()
    result = finish(run)
    assert result.interrupted
    assert not result.busy
    assert result.release_seconds <= FREE_SECONDS
    assert [worker.pid for worker in trio.master.workers] == pids
    check_whole(trio, 3)


def test_ranks_that_wait_in_a_sum_sleep_and_are_released_when_one_raises(trio: Lab) -> None:
    trio.good(SETUP + "\nkept = 41 + rank")
    loop = SLOW_LOOP.format(strike="if step == 2 and rank == 1: time.sleep(2); raise ValueError('planted')")
    run = trio.master.run_cell(loop, strategy=StrategySpec(name="data_parallel"))
    waiting: list[str] = []
    waiter = psutil.Process(trio.master.workers[0].pid)
    busy = []
    while run.running:
        before, began = sum(waiter.cpu_times()[:2]), time.monotonic()
        run.wait(0.5)
        rows = {rank: doing for rank, doing, _ in run.who_waits_where()}
        if (
            run.running
            and rows[0].startswith("waits in all_reduce")
            and rows[2].startswith("waits in all_reduce")
        ):
            waiting.append(rows[1])
            busy.append((sum(waiter.cpu_times()[:2]) - before) / (time.monotonic() - began))
    result = finish(run)
    assert "computes" in waiting
    assert min(busy) < 0.3  # of a core, with everything else that the process does
    assert result.first == 1
    assert result.failures[1].error_type == "ValueError"
    assert all(f.consequence for r, f in result.failures.items() if r != 1)
    assert result.release_seconds <= FREE_SECONDS
    check_whole(trio, 3)


def test_ranks_that_wait_in_different_calls_are_told_both(trio: Lab) -> None:
    trio.good(SETUP + "\nkept = 41 + rank")
    loop = SLOW_LOOP.format(strike="").replace(
        "loss.backward()",
        "(loss.backward() if step < 2 or rank else None)",
    )
    result = trio.run(loop, strategy=StrategySpec(name="data_parallel"))
    assert "rank 0 waits in broadcast" in result.cause
    assert "rank 1 waits in all_reduce" in result.cause
    assert not result.busy
    check_whole(trio, 3)


def test_a_stopped_rank_does_not_hold_the_others(trio: Lab) -> None:
    trio.good(SETUP + "\nkept = 41 + rank")
    run = trio.master.run_cell(SLOW_LOOP.format(strike=""), strategy=StrategySpec(name="data_parallel"))
    time.sleep(0.5)
    stopped = trio.master.workers[2].pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(0.5)
    run.interrupt()
    result = finish(run)
    os.kill(stopped, signal.SIGCONT)
    assert result.busy == (2,)
    check_whole(trio, 3)


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.soak)])
def test_many_releases_leave_it_whole(trio: Lab, count: int) -> None:
    """Each of several groups is cut in the middle of sums of 4 MB; the next one has a communicator of its own."""
    big = SETUP.replace(
        "nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 5)", "nn.Linear(12, 60_000), nn.Linear(60_000, 5)"
    )
    for turn in range(count):
        trio.good(big + "\nkept = 41 + rank")
        run = trio.master.run_cell(SLOW_LOOP.format(strike=""), strategy=StrategySpec(name="data_parallel"))
        time.sleep(0.2 + 0.5 * turn / count)
        run.interrupt()
        result = finish(run)
        assert not result.busy
    check_whole(trio, 3)


def test_replacing_a_worker_is_refused(trio: Lab) -> None:
    with pytest.raises(UsageError, match="One death ends an MPI set"):
        trio.master.reset(replace_busy=True)
    trio.good("assert rank in range(3)")


# ------------------------------------------------------------------------------------------- the end


def test_one_death_ends_the_set_and_the_first_cause_is_told(pair: Lab) -> None:
    pair.good(SETUP)
    result = pair.run(
        SLOW_LOOP.format(
            strike="if step == 2 and rank == 1: import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        ),
        strategy=StrategySpec(name="data_parallel"),
    )
    assert result.died[0] == 1
    assert result.cause == "rank 1 died"
    with pytest.raises(ClusterError, match=r"worker-1 died\. One death ends an MPI set.*openclaw stop"):
        pair.run("1")
    deadline = time.monotonic() + GONE_SECONDS
    while any(worker.alive for worker in pair.master.workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [worker.state for worker in pair.master.workers] == ["dead", "dead"]
    with pytest.raises(ClusterError, match="worker-1 died"):
        pair.master.reset()
    cluster_id = pair.master.cluster_id
    pair.master.stop()
    assert leftovers(cluster_id) == []


def test_what_a_person_sees_from_start_to_a_death_and_on() -> None:
    """In a real kernel: options, table, training, the first cause, what to do, and doing it."""
    notebook = Notebook()
    with notebook.client.setup_kernel():
        notebook.run("%load_ext openclaw_nb")
        refused = notebook.run("%openclaw start -n 2 --communication mpi")
        assert "--backend mpi --communication mpi" in refused.error
        assert (
            "Allowed: cuda, local, mpi, thread" in notebook.run("%openclaw start -n 2 --backend slurm").error
        )
        started = notebook.run("%openclaw start -n 2 --backend mpi --communication mpi --oversubscribe")
        assert started.error == ""
        assert "sums by MPI, dist.* by gloo, group 1, backend mpi" in notebook.run("%openclaw status").text
        assert notebook.run(f"%%openclaw_parallel\n{SETUP}").error == ""
        assert notebook.run(f"%%openclaw_parallel -s data_parallel\n{LOOP}").error == ""
        kill = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
        died = notebook.run(f"%%openclaw_parallel\n{kill}").error
        assert "Rank 1 of 2 (worker-1 on CPU-1) died. One death ends an MPI set" in died
        assert "kept" not in died
        assert "worker-1 died. One death ends an MPI set" in notebook.run("%%openclaw_parallel\n1").error
        assert "stopped" in notebook.run("%openclaw stop").text
        assert notebook.run("%openclaw start -n 2 --backend mpi --oversubscribe").error == ""
        assert "gloo + shared memory" in notebook.run("%openclaw status").text
        notebook.run("%openclaw stop")


@pytest.mark.soak
def test_a_death_between_cells_is_told_by_the_next(pair: Lab) -> None:
    pid = pair.master.workers[0].pid
    assert pid is not None
    kill(pid)
    deadline = time.monotonic() + GONE_SECONDS
    while pair.master.workers[0].alive and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(ClusterError, match=r"worker-0 died\. One death ends an MPI set"):
        pair.run("1")


@pytest.mark.soak
def test_a_rank_that_leaves_without_an_error_ends_the_set_too(pair: Lab) -> None:
    result = pair.run("import os, time\nif rank == 1: os._exit(0)\ntime.sleep(60)")
    assert result.died[0] == 1
    with pytest.raises(ClusterError, match=r"worker-1 died\. One death ends an MPI set"):
        pair.run("1")
    deadline = time.monotonic() + GONE_SECONDS
    while any(worker.alive for worker in pair.master.workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(worker.alive for worker in pair.master.workers)


def test_stop_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    memory = shared_memory()
    master = a_set(2)
    check(Lab(master), 2)
    run = master.run_cell("import time\nwhile True: time.sleep(0.1)")
    time.sleep(0.3)
    master.stop()
    assert run.wait(10) is not None
    assert leftovers(master.cluster_id) == []
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []
    assert shared_memory() <= memory


def test_a_killed_kernel_leaves_nothing() -> None:
    script = (
        "import time\n"
        "from openclaw_nb.cluster.devices import Device\n"
        "from openclaw_nb.cluster.master import MasterNode\n"
        "master = MasterNode(backend='mpi', communication='mpi').start()\n"
        "master.start_workers([Device(f'CPU-{i}', 'cpu', i, 'core') for i in range(2)])\n"
        "print(master.cluster_id, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    cluster_id = owner.stdout.readline().strip()
    assert any("-n 2" in record.command for record in processes_of(cluster_id))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + GONE_SECONDS
    while leftovers(cluster_id) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert leftovers(cluster_id) == []


def test_a_set_can_be_detached_and_taken_up_again() -> None:
    first = a_set(2)
    try:
        Lab(first).good("kept = 41 + rank")
        first.detach()
        second = MasterNode.attach(first.name)
    except BaseException:
        first.stop()
        raise
    try:
        assert second.backend == "mpi"
        assert second.communication.startswith("sums by MPI")
        lab = Lab(second)
        lab.good("assert kept == 41 + rank")
        check(lab, 2)
        assert second.communication == "sums by MPI, dist.* by gloo"
    finally:
        second.stop()
    assert leftovers(first.cluster_id) == []


def test_an_mpiexec_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "mpiexec"
    broken.write_text("#!/bin/sh\necho 'no slots on this planet' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr("openclaw_nb.cluster.launch.find_mpiexec", lambda: str(broken))
    master = MasterNode(backend="mpi").start()
    with pytest.raises(StartError, match="no slots on this planet"):
        master.start_workers(cpu_devices(2))
    assert leftovers(master.cluster_id) == []


def test_a_missing_mpiexec_is_told_before_anything_starts(tmp_path: Path) -> None:
    """In a Python whose folder has no mpiexec, with a path that has none."""
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    script = (
        "import sys\n"
        f"sys.path[:0] = {[path for path in sys.path if path]!r}\n"
        "from openclaw_nb.session import OpenClawCluster\n"
        "from openclaw_nb.cluster.files import read_notes\n"
        "try:\n"
        "    OpenClawCluster(workers=2, backend='mpi', oversubscribe=True).start()\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "assert read_notes() == []\n"
    )
    told = subprocess.run(
        [str(link), "-c", script],
        env={**os.environ, "PATH": str(tmp_path), "OPENCLAW_RUNTIME_DIR": str(tmp_path / "runtime")},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert "mpiexec" in told.stdout, told.stderr
    assert "pip install 'openclaw-nb[mpi]'" in told.stdout
