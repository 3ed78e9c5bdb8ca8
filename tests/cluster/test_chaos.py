"""Real faults are planted into training on real workers; the report says what happened, and nothing stays broken.

Two workers and a spare serve all tests, in the order in which they stand.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.ownership import processes_of
from openclaw_nb.cluster.run import RunResult
from openclaw_nb.core.errors import UnknownNameError, UsageError
from openclaw_nb.engine.checkpoint.catalog import find_newest
from openclaw_nb.notebook.resilience import PlantedFault, resilience_table
from openclaw_nb.protocol.messages import StrategySpec

from .conftest import Lab, cpu_devices, single_device
from .test_data_parallel import SETUP, SGD_TOLERANCE, STATE
from .test_elastic import await_spare
from .test_verbs import PACED

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Lab]:
    master = MasterNode()
    master.start()
    master.start_workers(cpu_devices(2), spares=cpu_devices(3)[2:])
    master.enable_auto_recovery(max_retries=3)
    yield Lab(master)
    master.stop()


@pytest.fixture(autouse=True)
def nothing_stays_stopped_or_limited(cluster: Lab) -> Iterator[None]:
    yield
    for record in processes_of(cluster.master.cluster_id):
        assert psutil.Process(record.pid).status() != psutil.STATUS_STOPPED, record
        for which in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
            assert resource.prlimit(record.pid, which) == resource.getrlimit(which), record


def strike(
    cluster: Lab, loop: str, options: dict[str, Any] | None = None, **fault: Any
) -> tuple[RunResult, dict[str, str]]:
    """Train with a fault, and return what its report says, by subject."""
    cluster.good(SETUP)
    chaos = cluster.master.plant(**fault)
    result = cluster.run(loop, strategy=StrategySpec(name="data_parallel", options=options or {}))
    report = chaos.wait(1)
    assert report is not None
    return result, dict(resilience_table(report).rows)


def check_parameters(cluster: Lab, loop: str) -> None:
    expected = single_device(SETUP, loop)["state"]
    for rank in cluster.master._members.all_ranks():
        state = cluster.pull("state", rank)
        torch.testing.assert_close(state, expected, rtol=SGD_TOLERANCE, atol=SGD_TOLERANCE)


@pytest.mark.parametrize("kind", ["kill", pytest.param("stop", marks=pytest.mark.soak)])
def test_training_goes_on_after(cluster: Lab, kind: str) -> None:
    await_spare(cluster)
    before = {worker.id: worker.pid for worker in cluster.master.workers}
    loop = PACED.format(num_passes=8) + STATE
    result, said = strike(cluster, loop, kind=kind, step=4)
    assert result.ok, result.cause
    worker = re.match(rf"{kind}, (worker-\d) \(rank 1, CPU-\d\): its process", said["planted"])
    assert worker is not None, said
    step = int(re.match(r"after step (\d+), ", said["when"])[1])  # type: ignore[index]
    assert 4 <= step <= 4 + 0.25 / 0.05 + 1
    ending = "died" if kind == "kill" else "does not answer, and is taken for dead"
    seconds = float(re.fullmatch(rf"after ([\d.]+) s: {worker[1]} {ending}", said["detected"])[1])  # type: ignore[index]
    assert seconds < (2 if kind == "kill" else 10)
    assert re.fullmatch(r"[\d.]+ s after it was known, with 1 rank, from step \d+", said["went on"])
    assert said["steps"] == "40 in all, none lost; 1 batch repeated"
    assert "takes part as rank 1" in said["workers"]
    assert said["the cell"] == "ended well"
    there = {record.pid for record in processes_of(cluster.master.cluster_id)}
    assert before[worker[1]] not in there, "what was given up does not come back"
    check_parameters(cluster, loop)


def test_a_slow_worker_is_no_cause(cluster: Lab) -> None:
    loop = PACED.format(num_passes=4) + STATE
    result, said = strike(cluster, loop, kind="slow", seed=3)
    assert result.ok
    assert ", drawn with seed 3, " in said["when"]
    assert said["detected"] == "not: nothing was noticed"
    assert re.fullmatch(r"[\d.]+ steps/s before, [\d.]+ after", said["pace"])
    check_parameters(cluster, loop)


def test_a_worker_that_gets_no_memory_ends_the_cell(cluster: Lab) -> None:
    hungry = PACED.format(num_passes=8).replace(
        "time.sleep(0.05)", "time.sleep(0.05); block = bytearray(1 << 26)"
    )
    result, said = strike(cluster, hungry, kind="oom", step=2, worker=cluster.master.workers[1].id)
    assert result.failures[1].error_type == "MemoryError"
    assert re.fullmatch(r"after [\d.]+ s: rank 1 raised MemoryError", said["detected"])
    assert said["the cell"].startswith("ended: rank 1 raised MemoryError")
    cluster.good("block = bytearray(1 << 26)\ndist.barrier()")


def test_a_damaged_checkpoint_is_named(cluster: Lab, tmp_path: Path) -> None:
    options = {"checkpoint": str(tmp_path), "checkpoint_every": "2", "keep": 50}
    result, said = strike(cluster, PACED.format(num_passes=3), options, kind="corrupt-checkpoint", step=5)
    assert result.ok
    name = re.search(r"; (step-\d+)/tensors\.safetensors, byte \d+", said["planted"])[1]  # type: ignore[index]
    assert said["damaged"].startswith(f"{name}, skipped when one is loaded: tensors.safetensors is damaged")
    newest = find_newest(tmp_path)
    assert newest is not None
    assert said["to be loaded"] == newest.path.name == "step-00000015"


def test_a_checkpoint_that_does_not_fit_is_told_and_the_next_one_is_written(
    cluster: Lab, tmp_path: Path
) -> None:
    options = {"checkpoint": str(tmp_path), "checkpoint_every": "2", "keep": 50}
    result, said = strike(cluster, PACED.format(num_passes=4), options, kind="disk-full", step=5)
    assert result.ok
    assert "(rank 0, " in said["planted"]
    assert re.fullmatch(
        r"after [\d.]+ s: a checkpoint could not be written; training went on", said["detected"]
    )
    assert re.search(r"not written: step-\d+, File too large", said["checkpoints"])
    assert said["to be loaded"] == "step-00000020"


def test_a_fault_waits_for_a_cell_that_it_can_strike(cluster: Lab) -> None:
    master = cluster.master
    chaos = master.plant("kill", step=1000)
    assert repr(PlantedFault(chaos)).startswith(
        "To be planted into the next cell with a strategy: kill of the last rank's worker after step 1000."
    )
    cluster.good("1")
    assert chaos.report is None, "a plain cell is none"
    with pytest.raises(UsageError, match="One fault at a time"):
        master.plant("stop")
    cluster.good(SETUP)
    assert cluster.run(PACED.format(num_passes=1), strategy=StrategySpec(name="data_parallel")).ok
    report = master.take_report()
    assert report is not None
    assert master.take_report() is None
    assert report.rows[0] == ("planted", "nothing: the cell ended after step 5, before step 1000")
    assert "Resilience report" in PlantedFault(chaos)._repr_html_()  # type: ignore[operator]
    with pytest.raises(UnknownNameError, match="worker-77"):
        master.plant("kill", worker="worker-77")
    chaos = master.plant("corrupt-checkpoint")
    assert cluster.run(PACED.format(num_passes=1), strategy=StrategySpec(name="data_parallel")).ok
    assert chaos.report is not None
    assert "add --checkpoint DIR" in str(chaos.report)
    master.plant("kill")
    assert master.unplant()
    assert not master.unplant()
    assert cluster.run(PACED.format(num_passes=1), strategy=StrategySpec(name="data_parallel")).ok
