"""What a cluster is started with, and what cells take from a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openclaw_nb.cluster.devices import Device, choose_devices
from openclaw_nb.config.cells import CellDefaults, cell_defaults
from openclaw_nb.config.load import load
from openclaw_nb.config.settings import Configuration
from openclaw_nb.config.settle import Asked, Settled, check_capabilities, check_threads, settle
from openclaw_nb.core.errors import ConfigurationError, NotStartedError, ResourceError, UsageError
from openclaw_nb.notebook.options import parse_cell, split_line
from openclaw_nb.protocol.placement import SETTINGS
from openclaw_nb.session import OpenClawCluster, Session

CORES = [Device(f"CPU-{i}", "cpu", i, "core") for i in range(4)]
GPUS = [Device(f"GPU-{i}", "gpu", i, "gpu", 16 * 1024**3) for i in range(4)]
GIB = 1024**3


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str) -> Configuration:
    Path("a.yaml").write_text(text)
    return load("a.yaml", {})


def settled(text: str, available: list[Device] = CORES, **asked: Any) -> Settled:
    return settle(read(text), Asked(**asked), available, {"10.0.0.7"})


def test_nothing_configured_is_as_ever() -> None:
    assert settle(Configuration(), Asked(), CORES) == Settled()


def test_what_is_said_wins() -> None:
    text = "parallel: {workers: 2, backend: thread, communication: gloo}"
    assert settled(text) == Settled(2, None, "thread", "gloo", notes=settled(text).notes)
    asked = settled(text, workers=3, backend="local", communication="auto")
    assert (asked.workers, asked.backend, asked.communication) == (3, "local", "auto")


WORKERS = "workers: [{device_id: CPU-2, ip: 127.0.0.1}, {device_id: CPU-0, ip: 10.0.0.7}]\n"


def test_devices_of_the_workers() -> None:
    assert settled(WORKERS).devices == ["CPU-2", "CPU-0"]
    assert settled(f"{WORKERS}parallel: {{workers: 4}}").devices == ["CPU-2", "CPU-0", "CPU-1", "CPU-3"]
    assert settled(WORKERS, workers=1).devices == ["CPU-2"]
    assert settled(WORKERS, devices="CPU-1").devices == "CPU-1"
    with pytest.raises(ResourceError, match="5 workers were asked for, but this machine has 4 cores"):
        settled(f"{WORKERS}parallel: {{workers: 5}}")


def test_devices_beside_the_strategy_are_those_of_the_workers_where_none_are_named() -> None:
    assert settled("strategy: data\ndevices: [CPU-1, CPU-3]").devices == ["CPU-1", "CPU-3"]
    assert settled(f"{WORKERS}strategy: data\ndevices: [CPU-0]").devices == ["CPU-2", "CPU-0"]


def test_not_enabled_is_one_worker_without_a_strategy() -> None:
    text = "parallel: {enabled: false, workers: 4, strategy: data}"
    assert settled(text).workers == 1
    assert settled(text, workers=2).workers == 2
    assert cell_defaults(read(text), ["CPU-0"]).strategy is None


def test_cores_take_the_place_of_gpus() -> None:
    text = "workers: [{device_id: GPU-3}, {device_id: GPU-1}]\nfallback: cpu\nparallel: {backend: cuda}\n"
    found = settled(text)
    assert (found.devices, found.backend) == (["CPU-0", "CPU-1"], "local")
    assert "CPU-0 for GPU-3, CPU-1 for GPU-1" in "\n".join(found.notes)
    assert settled(text, [*GPUS, *CORES]).devices == ["GPU-3", "GPU-1"]
    mapping = "strategy: {name: model, model_layers: [a, b], device_mapping: {a: GPU-1, b: GPU-3}}"
    fields = cell_defaults(read(text + mapping), ["CPU-0", "CPU-1"]).fields_for("model_parallel")
    assert fields["device_mapping"] == {"a": "CPU-1", "b": "CPU-0"}


ONE = "fallback: cpu\nworkers: [{device_id: GPU-0}]\n"


@pytest.mark.parametrize(
    ("text", "asked", "devices"),
    [
        (f"{ONE}parallel: {{workers: 2}}", {}, ["CPU-0", "CPU-1"]),
        (ONE, {"workers": 3}, ["CPU-0", "CPU-1", "CPU-2"]),
        ("fallback: cpu\nworkers: [{device_id: GPU-0}, {device_id: GPU-1}]", {"workers": 1}, ["CPU-0"]),
        ("fallback: cpu\nworkers: [{device_id: GPU-0}, {device_id: CPU-0}]", {}, ["CPU-1", "CPU-0"]),
        ("fallback: cpu\nworkers: [{device_id: CPU-1}, {device_id: GPU-0}]", {}, ["CPU-1", "CPU-0"]),
        ("fallback: cpu\nstrategy: data\ndevices: [GPU-0, CPU-0]", {}, ["CPU-1", "CPU-0"]),
        ("fallback: cpu", {"devices": "GPU-0, gpu-1"}, ["CPU-0", "CPU-1"]),
        ("fallback: cpu", {"devices": "GPU-0"}, ["CPU-0"]),
        ("fallback: cpu", {"devices": ["CPU-0", "GPU-0"]}, ["CPU-0", "CPU-1"]),
        ("fallback: cpu", {"devices": "auto"}, "auto"),
        (ONE, {"devices": "CPU-3"}, "CPU-3"),
    ],
)
def test_every_way_to_name_a_gpu_falls_back(text: str, asked: dict[str, Any], devices: Any) -> None:
    found = settled(text, **asked)
    assert found.devices == devices
    chosen = choose_devices(
        found.workers, found.devices, available=CORES, memory_available_bytes=64 * GIB, oversubscribe=False
    )
    assert found.devices == "auto" or len(chosen) == len(devices if isinstance(devices, list) else [devices])


def test_cells_and_workers_fall_back_to_the_same_cores() -> None:
    found = read(
        "fallback: cpu\nworkers: [{device_id: CPU-0}, {device_id: GPU-1}]\nstrategy: data\ndevices: [GPU-1]"
    )
    start = settle(found, Asked(), CORES)
    assert start.devices == ["CPU-0", "CPU-1"]
    defaults = cell_defaults(found, ["CPU-0", "CPU-1"], ["CPU-0", "CPU-1"], start.replaced)
    assert defaults.fields_for("data_parallel")["devices"] == ("CPU-1",)
    mapping = "{a: GPU-1, b: GPU-3}"
    layers = f"fallback: cpu\nstrategy: {{name: model, model_layers: [a, b], device_mapping: {mapping}}}"
    fields = cell_defaults(read(layers), ["CPU-0", "CPU-1"]).fields_for("model_parallel")
    assert fields["device_mapping"] == {"a": "CPU-0", "b": "CPU-1"}
    assert settled(layers, [*GPUS, *CORES]).replaced == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("master: {host: 0.0.0.0}", "a.yaml, line 1, master.host: 0.0.0.0 is not loopback"),
        (
            "workers: [{device_id: CPU-0, ip: 10.0.0.8}]",
            "a.yaml, line 1, workers[0].ip: 10.0.0.8 is not this host",
        ),
        (
            "parallel: {backend: slurm}",
            "a.yaml, line 1, parallel.backend: the backend slurm starts workers on other",
        ),
    ],
)
def test_what_is_not_built_does_not_start(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settled(text)
    assert said in str(caught.value)


def test_keys_that_do_nothing_yet_are_told() -> None:
    notes = settled("parallel: {task_chunk_size: 5}").notes
    assert [note.partition(": ")[0] for note in notes] == ["a.yaml, line 1, parallel.task_chunk_size"]
    assert all("not applicable yet: " in note for note in notes)


def test_the_environment_of_workers() -> None:
    found = settled(
        "parallel: {omp_threads: 2, rdma: false, log_level: debug, socket_buffer_size: 1MB}"
    ).environment
    assert json.loads(found[SETTINGS]) == {"log_level": "DEBUG", "socket_buffer_size": 1024**2}
    assert {k: v for k, v in found.items() if k != SETTINGS} == {
        "OMP_NUM_THREADS": "2",
        "NCCL_IB_DISABLE": "1",
    }
    over_tcp = settled("parallel: {backend: mpi, mpi_shared_memory: false}").environment
    assert over_tcp == {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}
    assert settled("parallel: {backend: mpi, mpi_shared_memory: true}").environment == {
        "OMPI_MCA_btl": "self,sm"
    }
    assert settled("parallel: {mpi_shared_memory: true}").environment == {}


def test_more_threads_than_cores() -> None:
    found = read("parallel: {hybrid: true, omp_threads: 3}")
    check_threads(found, 2, 6, oversubscribe=False)
    check_threads(found, 2, 4, oversubscribe=True)
    with pytest.raises(
        ResourceError, match=r"a\.yaml, line 1, parallel\.omp_threads: 2 workers × 3 threads = 6, and"
    ):
        check_threads(found, 2, 4, oversubscribe=False)


# ------------------------------------------------------------------------------------------- capabilities


def test_capabilities_limit_communication_and_precision() -> None:
    gloo = "workers: [{device_id: CPU-0, capabilities: [fp32, gloo]}]\n"
    assert settled(gloo).communication == "gloo"
    with pytest.raises(ConfigurationError, match=r"capabilities: gloo leave out nccl, which a\.yaml, line 2"):
        settled(f"{gloo}parallel: {{communication: nccl}}")
    defaults = cell_defaults(read(f"{gloo}strategy: data"), ["CPU-0"])
    assert parse_cell(["-s", "default"], defaults).strategy is not None
    with pytest.raises(
        ConfigurationError, match=r"asks for bf16\. a\.yaml, line 1, capabilities of CPU-0: fp32, gloo"
    ):
        parse_cell(["-s", "data", "--precision", "bf16"], defaults)


def limited(*words: str, rest: str = "") -> str:
    entries = [f"{{device_id: CPU-{i}, capabilities: [{each}]}}" for i, each in enumerate(words)]
    return f"workers: [{', '.join(entries)}]\n{rest}"


@pytest.mark.parametrize(
    ("text", "communication"),
    [
        (limited("nccl, gloo", "gloo"), "gloo"),
        (limited("gloo", "gloo, nccl"), "gloo"),
        (limited("nccl, gloo", "nccl"), "auto"),
        (limited("nccl, gloo", "fp32"), "auto"),  # the second names none, which is no limit
        (limited("mpi", "mpi, nccl", rest="parallel: {backend: mpi}"), "mpi"),
    ],
)
def test_auto_is_what_all_workers_may_use(text: str, communication: str) -> None:
    assert settled(text).communication == communication
    assert settled(text, communication="auto").communication == communication


@pytest.mark.parametrize(
    ("text", "asked", "said"),
    [
        (
            limited("nccl", "gloo"),
            {},
            "CPU-0: nccl; a.yaml, line 1, capabilities of CPU-1: gloo. The workers have no",
        ),
        (limited("mpi", "mpi"), {}, "no communication in common: mpi needs backend: mpi. Say gloo in each"),
        (
            limited("gloo", "nccl, gloo"),
            {"communication": "nccl"},
            "gloo leave out nccl, which --communication (comm",
        ),
        (limited("nccl"), {"communication": "gloo"}, "nccl leave out gloo, which --communication"),
    ],
)
def test_communication_that_a_worker_may_not_use(text: str, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settled(text, **asked)
    assert said in str(caught.value)


def test_capabilities_are_compared_with_the_devices() -> None:
    found = read("workers: [{device_id: GPU-0, capabilities: [nccl, cuda11]}]")
    assert check_capabilities(found, GPUS, GIB) == []
    assert (
        "CPU-0 has no nccl, cuda11: it is no GPU" in check_capabilities(found, CORES, GIB)[0]
    )  # fallen back
    with pytest.raises(ConfigurationError, match="CPU-0 has no nccl"):
        check_capabilities(read("workers: [{device_id: CPU-0, capabilities: [nccl]}]"), CORES, GIB)
    with pytest.raises(ConfigurationError, match="80GB is more than the 16"):
        check_capabilities(read("workers: [{device_id: GPU-0, capabilities: [80GB]}]"), GPUS, GIB)


# -------------------------------------------------------------------------------------------------- cells

BLOCK = """\
strategy: {name: data, sync_frequency: 4, mode: parameter}
checkpoint: {dir: points, interval: 60}
parallel: {fusion_buffer_size: 1MB, memory_pinning: false, gpu_memory_fraction: 0.5}
"""


def options(
    line: str, text: str = BLOCK, devices: tuple[str, ...] = ("CPU-0",), *, trains: bool = False
) -> Any:
    spec = parse_cell(split_line(line), cell_defaults(read(text), devices), trains=trains).strategy
    return None if spec is None else (spec.name, spec.options)


CONFIGURED = {
    "sync_frequency": 4,
    "mode": "parameter",
    "accumulate": 1,
    "fusion_buffer_size": 1024**2,
    "memory_pinning": False,
    "checkpoint": "points",
    "keep": 3,
    "resume": False,
    "checkpoint_every": "60s",
}


def test_a_training_cell_takes_the_configured_strategy() -> None:
    name, found = options("", trains=True)
    assert name == "data_parallel"
    assert {**found, "checkpoint_every": "60s"} == CONFIGURED
    told = parse_cell([], cell_defaults(read(BLOCK), ["CPU-0"]), trains=True).told
    assert (
        told == "Runs under data_parallel (a.yaml, line 1, strategy.name); -s none runs it as a plain cell."
    )


def test_other_cells_are_plain() -> None:
    assert options("") is None
    assert options("-t 0") is None
    assert options("-s none", trains=True) is None
    assert options("", "parallel: {workers: 2}", trains=True) is None
    assert options("-s default")[0] == "data_parallel"
    assert options("--sync-frequency 2")[0] == "data_parallel"
    with pytest.raises(UsageError, match="No strategy is configured"):
        options("-s default", "parallel: {workers: 2}")
    with pytest.raises(UsageError, match="--sync-frequency needs a strategy"):
        options("--sync-frequency 2", "parallel: {workers: 2}")


def test_the_magic_line_wins_option_by_option() -> None:
    _, found = options("--sync-frequency 2 --mode gradient --fusion-buffer-size 2MB", trains=True)
    assert (found["sync_frequency"], found["mode"], found["fusion_buffer_size"]) == (
        2,
        "gradient",
        2 * 1024**2,
    )
    assert found["memory_pinning"] is False
    name, found = options("-s sharded", trains=True)
    assert (name, found["sync_frequency"], found["memory_pinning"]) == ("sharded", 1, False)
    layers = "strategy: {name: model, model_layers: [a, b], device_mapping: {a: CPU-0, b: CPU-1}}"
    _, found = options("--stages a/b", layers, ("CPU-0", "CPU-1"))
    assert found == {"stages": [["a"], ["b"]]}


@pytest.mark.parametrize("line", ["--resume", "--keep 5", "--checkpoint-every 7", "-s data --resume"])
def test_options_of_checkpoints_take_the_configured_directory(line: str) -> None:
    found = options(line, "strategy: data\ncheckpoint: {dir: points}", trains=True)[1]
    assert found["checkpoint"] == "points"
    changed = {
        "--resume": ("resume", True),
        "--keep": ("keep", 5),
        "--checkpoint-every": ("checkpoint_every", "7"),
    }
    key, value = next(changed[word] for word in line.split() if word in changed)
    assert str(found[key]) == str(value)
    with pytest.raises(UsageError, match="--checkpoint-every, --keep and --resume need --checkpoint DIR"):
        options(line, "strategy: data", trains=True)


def test_options_for_gpus_are_set_on_gpus() -> None:
    assert "gpu_memory_fraction" not in options("", trains=True)[1]
    assert options("", devices=("GPU-0",), trains=True)[1]["gpu_memory_fraction"] == 0.5


def test_devices_of_the_strategy_are_the_targets() -> None:
    defaults = cell_defaults(read("strategy: {name: data, devices: [CPU-1]}"), ["CPU-0", "CPU-1"])
    assert parse_cell([], defaults, trains=True).targets == "CPU-1"
    assert parse_cell(["-t", "0"], defaults, trains=True).targets == "0"
    everyone = cell_defaults(read("strategy: {name: data, devices: [CPU-1, CPU-0]}"), ["CPU-0", "CPU-1"])
    assert parse_cell([], everyone, trains=True).targets is None


def test_devices_without_a_strategy_hold_under_every_one_that_a_cell_names() -> None:
    defaults = cell_defaults(read("devices: [CPU-1]\nsync_frequency: 3"), ["CPU-0", "CPU-1"])
    assert parse_cell([], defaults, trains=True).strategy is None
    for name in ("data", "sharded", "pipeline"):
        assert parse_cell(["-s", name], defaults).targets == "CPU-1"
        assert parse_cell(["-s", name, "-t", "0"], defaults).targets == "0"


@pytest.mark.parametrize(
    ("started", "now", "targets"),
    [
        (["CPU-0", "CPU-1"], ["CPU-0"], None),  # all took part, and one was removed
        (["CPU-0", "CPU-1"], ["CPU-0", "CPU-1", "CPU-2"], None),  # all took part, and one was added
        (["CPU-0"], ["CPU-0"], None),  # fewer were asked for than are named
        (["CPU-2", "CPU-3"], ["CPU-2", "CPU-3"], None),  # others were
        (["CPU-0", "CPU-1", "CPU-2"], ["CPU-0", "CPU-1"], "CPU-0,CPU-1"),  # these two alone, from the start
    ],
)
def test_whether_all_take_part_is_decided_at_the_start(
    started: list[str], now: list[str], targets: str | None
) -> None:
    found = read("strategy: {name: data, devices: [CPU-0, CPU-1]}")
    assert parse_cell([], cell_defaults(found, now, started), trains=True).targets == targets


def test_a_cluster_remembers_what_it_was_started_on(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.yaml").write_text("strategy: {name: data, devices: [CPU-0, CPU-1]}")
    workers = [SimpleNamespace(device=device, spare=False) for device in CORES[:2]]
    master = SimpleNamespace(workers=workers, running=True)
    monkeypatch.setattr(Session, "start", lambda *_: master)
    cluster = OpenClawCluster(config_path="a.yaml").start()
    workers.append(SimpleNamespace(device=CORES[2], spare=False))
    assert "devices" not in cluster.cell_defaults.fields_for("data_parallel")
    del workers[0]
    assert "devices" not in cluster.cell_defaults.fields_for("data_parallel")


@pytest.mark.parametrize("text", ["", "strategy: data", "strategy: data\ndevices: [CPU-0]"])
def test_a_cluster_that_does_not_run_says_so(text: str) -> None:
    Path("a.yaml").write_text(text)
    cluster = OpenClawCluster(config_path="a.yaml")
    assert cluster.cell_defaults.strategy == ("data_parallel" if text else None)
    with pytest.raises(NotStartedError):
        cluster.run_cell("x = 1", strategy="data")
    with pytest.raises(NotStartedError):
        cluster.run("another word", print)
    with pytest.raises(NotStartedError):
        cluster.run_cell("x = 1", strategy="another word")


def test_nothing_configured_changes_no_cell() -> None:
    assert parse_cell(["-s", "data"], CellDefaults()) == parse_cell(["-s", "data"])
