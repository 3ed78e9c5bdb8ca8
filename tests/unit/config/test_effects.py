"""What is said of each key: what it sets and on which workers that was seen, or why nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from openclaw_nb.cluster.devices import Device
from openclaw_nb.config.cells import cell_defaults
from openclaw_nb.config.effects import Effect, Seen, effects, effects_table
from openclaw_nb.config.load import load
from openclaw_nb.config.schema import KEYS
from openclaw_nb.config.settings import Configuration
from openclaw_nb.config.unbuilt import UNBUILT_KEYS
from openclaw_nb.strategies import STRATEGIES

CORES = [Device(f"CPU-{i}", "cpu", i, "core") for i in range(2)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str) -> Configuration:
    Path("a.yaml").write_text(text)
    return load("a.yaml", {})


def report(**told: Any) -> dict[str, Any]:
    plain = {
        "environment": {"OMP_NUM_THREADS": "1"},
        "threads": 1,
        "log_level": "INFO",
        "store_host": "127.0.0.1",
        "transport": "gloo",
        "socket_buffers": None,
        "cell": None,
    }
    return plain | told


def seen(found: Configuration, *reports: Mapping[str, Any], **facts: Any) -> Seen:
    devices = facts.pop("devices", {f"worker-{i}": f"CPU-{i}" for i in range(2)})
    told = dict(zip(devices, reports or (report(), report()), strict=False))
    given: dict[str, Any] = {
        "backend": "local",
        "communication": "gloo",
        "host": "127.0.0.1",
        "port": 50051,
        "controller_log": "",
    }
    given |= {"limit_seconds": 30.0, "devices": devices, "reports": told}
    return Seen(**{**given, "cells": cell_defaults(found, list(devices.values())), **facts})


def effect(text: str, key: str, *reports: Mapping[str, Any], **facts: Any) -> Effect:
    found = read(text)
    return {each.key: each for each in effects(found, seen(found, *reports, **facts))}[key]


def test_every_key_has_an_effect_or_a_reason() -> None:
    found = read(
        "master: {host: 127.0.0.1, port: 1, log_level: INFO, metrics_port: 0}\nstrategy: data\n"
        "fallback: cpu\nnetwork_interface: lo\n"
        "checkpoint: {dir: a, interval: 5}\nparallel: {task_chunk_size: 1, mpi_shared_memory: true, hybrid: true, "
        "omp_threads: 1, async_io: true, sync_interval: 2, memory_pooling: true, socket_buffer_size: 1MB, rdma: true, "
        "log_level: INFO, workers: 2}"
    )
    for facts in (None, seen(found)):
        records = {each.key: each for each in effects(found, facts)}
        assert {path for path in KEYS if path.partition(".")[0] != "strategy"} - {"parallel.strategy"} <= set(
            records
        )
        assert all(each.sets for each in records.values())
        assert all(records[path].sets.startswith("not applicable yet: ") for path in UNBUILT_KEYS)
        assert repr(effects_table(found, facts)).startswith("Configuration: a.yaml\n  key ")


def test_metrics_are_where_they_are_served() -> None:
    text, key = "master: {metrics_port: 9464}", "master.metrics_port"
    assert effect(text, key, metrics_port=9464).took == "the master"
    assert effect(text, key, metrics_port=9465).took.startswith("not taken: another port")
    assert effect(text, key).took.startswith("not taken: metrics are served no more")
    assert "port 1234" in effect("master: {metrics_port: 0}", key, metrics_port=1234).sets


def test_workers_that_differ_are_named() -> None:
    odd = report(threads=4, environment={"OMP_NUM_THREADS": "4"})
    found = effect("parallel: {omp_threads: 1}", "parallel.omp_threads", report(), odd)
    assert found.workers == ("worker-0",)
    assert found.took == "worker-0; worker-1: ('4', 4)"
    silent = effect("parallel: {log_level: INFO}", "parallel.log_level", report())
    assert (silent.workers, silent.took) == (("worker-0",), "worker-0; worker-1 did not answer")


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("gpu_memory_fraction", "0.5", "a core has no memory of its own"),
        ("memory_pooling", "true", "a core has no memory of its own"),
        ("rdma", "true", "gloo in PyTorch's wheels has TCP only"),
        ("mpi_shared_memory", "true", "it is a setting of MPI"),
    ],
)
def test_what_does_not_apply_here_says_why(key: str, value: str, why: str) -> None:
    found = effect(f"parallel: {{{key}: {value}}}", f"parallel.{key}")
    assert found.sets.startswith(f"not applicable: {why}")
    assert found.workers == ()


def test_the_same_keys_where_they_apply() -> None:
    gpus = {"worker-0": "GPU-0"}
    told = report(environment={"NCCL_IB_DISABLE": "1"})
    found = effect("parallel: {rdma: false}", "parallel.rdma", told, devices=gpus)
    assert found.workers == ("worker-0",)
    fraction = effect("parallel: {gpu_memory_fraction: 0.5}", "parallel.gpu_memory_fraction", devices=gpus)
    assert (fraction.sets, fraction.took) == (
        "the default of strategy cells: 0.5",
        "from the next cell on",
    )
    for name in STRATEGIES:
        cell = report(cell={"name": name, "options": {"gpu_memory_fraction": 0.5}})
        fraction = effect(
            "parallel: {gpu_memory_fraction: 0.5}", "parallel.gpu_memory_fraction", cell, devices=gpus
        )
        assert fraction.took == "in the last cell: 0.5 on worker-0"
    told = report(environment={"OMPI_MCA_btl": "self,tcp"}, transport="sums by MPI, dist.* by gloo")
    facts = {"backend": "mpi", "communication": "sums by MPI, dist.* by gloo"}
    shared = effect("parallel: {mpi_shared_memory: false}", "parallel.mpi_shared_memory", told, told, **facts)
    assert (shared.sets, shared.took) == ("OMPI_MCA_btl=self,tcp", "all 2 workers")


def test_what_a_worker_did_not_get_is_no_success() -> None:
    small = report(socket_buffers=(4096, 4096))
    buffers = effect("parallel: {socket_buffer_size: 1MB}", "parallel.socket_buffer_size", small, small)
    assert buffers.workers == ()
    assert "the kernel allows no more" in buffers.took
    count = effect("parallel: {workers: 3}", "parallel.workers")
    assert (count.workers, count.took) == ((), "not taken: there are more or fewer since")
    assert effect("", "parallel.timeout", limit_seconds=5.0).took == "not taken: another limit was set since"


def test_options_of_cells_are_those_of_the_last_one() -> None:
    text = "strategy: data\nparallel: {fusion_buffer_size: 1MB}"
    key = "parallel.fusion_buffer_size"
    assert effect(text, key).took == "from the next cell on"
    took = report(cell={"name": "data_parallel", "options": {"fusion_buffer_size": 1024**2}})
    other = report(cell={"name": "data_parallel", "options": {"fusion_buffer_size": 2048}})
    assert effect(text, key, took, took).took == "in the last cell: 1.0 MiB on all 2 workers"
    assert effect(text, key, other, other).workers == ()
    assert "worker-0: the cell said 2.0 KiB" in effect(text, key, other, other).took
    sharded = "strategy: sharded\nparallel: {fusion_buffer_size: 1MB}"
    assert effect(sharded, key).sets == (
        "not applicable: the default strategy, sharded, does not take it; with -s data_parallel it holds"
    )


def test_an_option_that_is_not_told_is_looked_at_too() -> None:
    text, key = "strategy: {name: data, precision: fp32}", "strategy.precision"
    plain = report(cell={"name": "data_parallel", "options": {}})
    half = report(cell={"name": "data_parallel", "options": {"precision": {"name": "bf16"}}})
    assert effect(text, key, plain, plain).took == "in the last cell: the default on all 2 workers"
    found = effect(text, key, plain, half)
    assert found.workers == ("worker-0",)
    assert found.took == "in the last cell: the default on worker-0; worker-1: the cell said name: bf16"
    wanted = "strategy: {name: data, precision: bf16}"
    assert effect(wanted, key, plain, plain).took.startswith("worker-0: the cell said the default")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("strategy: data\ncheckpoint: {interval: 60}", "checkpoint.interval"),
        ("checkpoint: {interval: 60}", "checkpoint.interval"),
        ("strategy: {name: data, keep: 2}", "strategy.keep"),
    ],
)
def test_checkpoints_without_a_directory_are_not_applicable(text: str, key: str) -> None:
    last = report(cell={"name": "data_parallel", "options": {}})
    why = "not applicable: no checkpoint.dir; with --checkpoint DIR it holds"
    assert effect(text, key, last, last).sets == why
    found = read(text)
    assert {each.key: each.sets for each in effects(found, None)}[key] == why


def test_checkpoints_with_a_directory() -> None:
    text = "strategy: {name: data, keep: 2}\ncheckpoint: {dir: points, interval: 60}"
    for key in ("checkpoint.interval", "strategy.keep"):
        assert effect(text, key).took == "from the next cell on"


def test_devices_say_which_workers_take_part() -> None:
    for text in ("devices: [CPU-1]", "strategy: data\ndevices: [CPU-1]"):
        found = effect(text, "devices")
        assert (found.workers, found.took) == (("worker-1",), "the ranks of the next cell: worker-1")
    everyone = effect("devices: [CPU-0, CPU-1]", "devices")
    assert everyone.took == "the ranks of the next cell: all 2 workers"
    fallen_back = effect("fallback: cpu\ndevices: [GPU-0, GPU-1]", "devices")
    assert fallen_back.took == "the ranks of the next cell: all 2 workers"
    others = effect("devices: [CPU-0, CPU-2]", "devices")
    assert (others.workers, others.took) == ((), "not taken: workers are on other devices, and all take part")


def test_what_was_said_beside_it_is_shown_as_such() -> None:
    found = read("parallel: {workers: 4}").overridden({"parallel.workers": 2, "parallel.backend": None})
    (workers,) = (each for each in effects(found, seen(found)) if each.key == "parallel.workers")
    assert (workers.value, workers.where, workers.took) == (2, "argument", "all 2 workers")


def test_without_a_configuration() -> None:
    table = effects_table(Configuration(), None)
    assert len(table) == 0
    assert "Nothing is configured" in repr(table)
