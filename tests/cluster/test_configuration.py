"""Keys of a configuration on real workers: each is read back from the worker's own process."""

from __future__ import annotations

import os
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from openclaw_nb.config.effects import Effect
from openclaw_nb.doctor.consult import consult
from openclaw_nb.doctor.findings import OK, WARN
from openclaw_nb.notebook.options import parse_cell
from openclaw_nb.session import OpenClawCluster, current_session

from .conftest import single_device

FILE = """\
master: {host: 127.0.0.1, port: 0, log_level: WARNING, metrics_port: 0}
strategy: data
sync_frequency: 2
checkpoint: {dir: CHECKPOINTS, interval: 600}
parallel:
  backend: local
  workers: 2
  communication: nccl
  hybrid: true
  omp_threads: 2
  fusion_buffer_size: 1MB
  timeout: 45
  socket_buffer_size: 64KB
  log_level: ERROR
  gpu_memory_fraction: 0.5
  mpi_shared_memory: true
  rdma: false
  async_io: true
"""
TRAINING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=8)
"""
LOOP = """
for x, y in loader:
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
"""
DOCUMENT = """\
master:
  host: "127.0.0.1"
  port: 50051
  log_level: "INFO"
workers:
  - device_id: "GPU-0"
    ip: "127.0.0.1"
    capabilities: ["fp16", "nccl"]
  - device_id: "GPU-1"
    ip: "127.0.0.1"
    capabilities: ["fp16", "cuda11"]
strategy:
  name: "hybrid_parallel"
  data_parallel_degree: 2
  model_parallel_degree: 1
checkpoint:
  dir: "./checkpoints"
  interval: 300
fallback: cpu
"""


def effective(cluster: OpenClawCluster) -> dict[str, Effect]:
    return {effect.key: effect for effect in cluster.effective_configuration()}


# Before the others: a process has one cluster at a time.
@pytest.mark.cluster
@pytest.mark.soak
@pytest.mark.skipif(
    shutil.which("nvidia-smi") is not None, reason="falls back to cores where there is no GPU"
)
def test_the_document_with_this_host_in_place_of_others(tmp_path: Path) -> None:
    file = tmp_path / "openclaw_config.yaml"
    file.write_text(DOCUMENT)
    with OpenClawCluster(config_path=file) as cluster:
        assert [worker.device.id for worker in cluster.master.workers] == ["CPU-0", "CPU-1"]
        assert cluster.run_cell(TRAINING).wait(60).ok  # type: ignore[union-attr]
        result = cluster.run_cell(LOOP, strategy="default").wait(60)
        assert result is not None
        assert result.ok, result.failures
        found = effective(cluster)
        assert found["strategy.data_parallel_degree"].workers == ("worker-0", "worker-1")
        assert found["checkpoint.dir"].sets.startswith(
            "not applicable: the default strategy, hybrid_parallel,"
        )
        assert "CPU-0 for GPU-0, CPU-1 for GPU-1" in "\n".join(cluster.master.take_notes())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenClawCluster]:
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    folder = tmp_path_factory.mktemp("configured")
    file = folder / "openclaw_config.yaml"
    file.write_text(FILE.replace("CHECKPOINTS", str(folder / "checkpoints")))
    with OpenClawCluster(config_path=file) as running:
        yield running
    current_session().metrics.stop()


@pytest.mark.cluster
def test_keys_take_effect_on_the_workers(cluster: OpenClawCluster) -> None:
    seen = (
        "import torch\nfrom traitlets.config import Application\n"
        "threads, level = torch.get_num_threads(), Application.instance().log_level"
    )
    assert cluster.run_cell(seen).wait(60).ok  # type: ignore[union-attr]
    both = ("worker-0", "worker-1")

    found = effective(cluster)

    assert [cluster.master.pull(["threads", "level"], rank) for rank in (0, 1)] == [
        {"threads": 2, "level": 40}
    ] * 2
    for key in (
        "parallel.omp_threads",
        "parallel.log_level",
        "parallel.workers",
        "parallel.backend",
        "master.host",
    ):
        assert found[key].workers == both, found[key]
    assert found["parallel.socket_buffer_size"].workers == both, found["parallel.socket_buffer_size"]
    assert cluster.master.limits.communication_seconds == 45
    directory = Path(cluster.master._files.directory)  # type: ignore[union-attr]
    logs = {path.name.partition("-")[0]: path.read_text() for path in directory.glob("log/ip*.log")}
    assert "INFO" not in logs["ipengine"] + logs["ipcontroller"]
    assert "queue::" not in logs["ipcontroller"]  # what it writes of each request, unless told to keep quiet
    assert found["parallel.timeout"].took == found["master.log_level"].took == "the master"
    assert found["parallel.omp_threads"].where.endswith("openclaw_config.yaml, line 10")
    assert "gloo" in found["parallel.communication"].sets
    assert found["parallel.communication"].took.startswith("not taken: NCCL needs a GPU")
    for key in ("parallel.gpu_memory_fraction", "parallel.mpi_shared_memory", "parallel.rdma"):
        assert found[key].sets.startswith("not applicable: "), found[key]
    port = cluster.master.port
    assert found["master.port"].sets == f"workers of other processes join at port {port}"
    assert found["master.port"].took == "the master"


@pytest.mark.cluster
def test_metrics_are_served_as_configured(cluster: OpenClawCluster) -> None:
    assert effective(cluster)["master.metrics_port"].took == "the master"
    published = current_session().metrics.published
    assert published is not None
    with urllib.request.urlopen(published.url, timeout=60) as answer:
        assert f'openclaw_cluster_info{{cluster="{cluster.master.name}"' in answer.read().decode()


@pytest.mark.cluster
def test_the_doctor_looks_at_the_cluster_that_runs(cluster: OpenClawCluster) -> None:
    found = {each.check: each for each in consult(current_session(), cluster.configuration)}
    assert found["array sum"].state == OK
    assert found["cores"].seen.startswith("2 workers × 2 threads on ")
    assert found["open sockets"].seen.endswith("listen on loopback alone")
    assert (found["nccl"].state, found["nccl"].key) == (WARN, "parallel.communication")


@pytest.mark.cluster
def test_what_could_not_be_had_is_told_once(cluster: OpenClawCluster) -> None:
    notes = "\n".join(cluster.master.take_notes())
    assert notes.count("NCCL was asked for and cannot be used here") == 1
    assert cluster.master.take_notes() == []


@pytest.mark.cluster
def test_cells_take_the_configured_strategy_and_its_options(cluster: OpenClawCluster) -> None:
    assert cluster.run_cell(TRAINING).wait(60).ok  # type: ignore[union-attr]
    asked = parse_cell([], cluster.cell_defaults, trains=True)
    assert asked.strategy is not None

    result = cluster.run_cell(LOOP, strategy="default").wait(60)

    assert result is not None
    assert result.ok, result
    found = effective(cluster)
    for key in (
        *("strategy", "sync_frequency", "parallel.fusion_buffer_size"),
        *("checkpoint.interval", "parallel.async_io"),
    ):
        assert found[key].workers == ("worker-0", "worker-1"), found[key]
    assert "2" in found["sync_frequency"].took
    assert "1.0 MiB" in found["parallel.fusion_buffer_size"].took
    directory = Path(cluster.configuration.given("checkpoint.dir"))
    assert [each.name for each in directory.glob("step-*")] == ["step-00000002"]  # 4 batches, a step every 2
    alone = single_device(TRAINING.replace("batch_size=8", "batch_size=16"), LOOP)["model"]
    trained = cluster.master.pull(["model"])["model"]
    torch.testing.assert_close(
        trained.state_dict(), alone.state_dict(), rtol=1e-6, atol=1e-7
    )  # sums in another order
    assert cluster.run(None, lambda: 1) == [1, 1]
