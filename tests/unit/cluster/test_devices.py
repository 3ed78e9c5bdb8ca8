"""Devices: what is found, who gets which, and what readings of real processes say."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from openclaw_nb.cluster import devices, readings
from openclaw_nb.cluster.devices import Device, choose_devices, choose_more
from openclaw_nb.cluster.readings import DeviceReader, DeviceReading
from openclaw_nb.core.errors import ResourceError, UnknownNameError, UsageError
from openclaw_nb.core.host import usable_cores

Start = Callable[[str], int]
GIB = 1024**3
CORES = [Device(f"CPU-{k}", "cpu", k, "core") for k in range(4)]
GPUS = [Device(f"GPU-{k}", "gpu", k, "gpu", 80 * GIB) for k in range(2)]


def choose(
    n: object = None,
    ids: object = None,
    *,
    available: list[Device] | None = None,
    memory: float = 100,
    oversubscribe: bool = False,
    spares: object = 0,
) -> list[str]:
    chosen = choose_devices(
        n,  # type: ignore[arg-type]
        ids,  # type: ignore[arg-type]
        available=CORES if available is None else available,
        memory_available_bytes=int(memory * GIB),
        oversubscribe=oversubscribe,
        num_spares=spares,  # type: ignore[arg-type]
    )
    return [device.id for device in chosen]


# ------------------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize("auto", [None, "auto", " AUTO ", ["auto"]])
def test_automatic_takes_all_gpus_before_cores(auto: object) -> None:
    assert choose(ids=auto, available=[*GPUS, *CORES]) == ["GPU-0", "GPU-1"]
    assert choose(ids=auto) == ["CPU-0", "CPU-1", "CPU-2", "CPU-3"]


@pytest.mark.parametrize(("memory", "count"), [(100, 4), (8, 4), (7.9, 3), (4, 2), (2, 1), (0.5, 1)])
def test_default_number_on_cores_is_what_memory_allows(memory: float, count: int) -> None:
    assert len(choose(memory=memory)) == count


def test_named_devices_come_in_their_order() -> None:
    assert choose(ids="CPU-3, cpu-1") == ["CPU-3", "CPU-1"]
    assert choose(2, ["GPU-1", "CPU-0"], available=[*GPUS, *CORES]) == ["GPU-1", "CPU-0"]


def test_more_workers_than_cores_says_both_numbers_and_the_way_out() -> None:
    with pytest.raises(
        ResourceError,
        match=r"5 workers .* 4 cores .* parallel\.workers.*--oversubscribe.*OPENCLAW_OVERSUBSCRIBE=1",
    ):
        choose(5)
    assert choose(5, oversubscribe=True) == ["CPU-0", "CPU-1", "CPU-2", "CPU-3", "CPU-0"]


def test_more_workers_than_gpus_is_an_error_even_if_cores_are_left() -> None:
    with pytest.raises(ResourceError, match=r"3 workers .* 2 GPUs"):
        choose(3, available=[*GPUS, *CORES])


@pytest.mark.parametrize("ids", [None, "CPU-0,CPU-1,CPU-2"])
def test_short_memory_names_the_amounts(ids: str | None) -> None:
    with pytest.raises(
        ResourceError, match=r"3 workers .* 1\.7 GiB .* \(5\.0 GiB .* 2 GiB.* at most 2 .*parallel\.workers"
    ):
        choose(3, ids, memory=5)
    assert len(choose(3, ids, memory=5, oversubscribe=True)) == 3


def test_one_worker_that_was_asked_for_is_told_of_short_memory_too() -> None:
    with pytest.raises(ResourceError, match=r"0\.5 GiB of memory each .* Free memory"):
        choose(1, memory=0.5)


def test_spares_get_devices_beside_the_others() -> None:
    assert choose(2, spares=1) == ["CPU-0", "CPU-1", "CPU-2"]
    assert choose(ids="CPU-2,CPU-0", spares=2) == ["CPU-2", "CPU-0", "CPU-1", "CPU-3"]
    assert choose(spares=1) == ["CPU-0", "CPU-1", "CPU-2", "CPU-3"], (
        "of all devices the last one is the spare"
    )
    assert choose(1, available=[*GPUS, *CORES], spares=1) == ["GPU-0", "GPU-1"]
    assert choose(4, spares=1, oversubscribe=True)[4] == "CPU-0"


def test_spares_count_too() -> None:
    with pytest.raises(ResourceError, match=r"5 workers \(1 spare counts, too\) .* 4 cores"):
        choose(4, spares=1)
    with pytest.raises(ResourceError, match=r"5 workers \(2 spares count, too\) .* 4 cores"):
        choose(ids="CPU-0,CPU-1,CPU-2", spares=2)
    with pytest.raises(ResourceError, match=r"3 workers \(1 spare counts, too\) would have 1\.7 GiB"):
        choose(2, spares=1, memory=5)
    for spares in (-1, 1.5, True):
        with pytest.raises(UsageError, match="whole number, 0 or more"):
            choose(1, spares=spares)


def test_more_workers_are_a_number_or_devices() -> None:
    with pytest.raises(UsageError, match="'auto' does not say how many"):
        choose_more("auto", CORES[:1], available=CORES, memory_available_bytes=100 * GIB)


def test_number_and_list_must_agree() -> None:
    with pytest.raises(UsageError, match=r"3 workers .* names 2 \(CPU-0, CPU-1\)"):
        choose(3, "CPU-0,CPU-1")


def test_a_device_twice_needs_oversubscribe() -> None:
    with pytest.raises(ResourceError, match=r"more than once: CPU-1\."):
        choose(ids="CPU-1,CPU-0,CPU-1")
    assert choose(ids="CPU-1,CPU-1", oversubscribe=True) == ["CPU-1", "CPU-1"]


def test_gpu_where_there_is_none_says_how_to_fall_back() -> None:
    with pytest.raises(
        UnknownNameError, match=r"GPU-0.*--devices auto.*--devices CPU-0,CPU-1.*fallback: cpu"
    ):
        choose(ids="GPU-0")


@pytest.mark.parametrize("ids", ["CPU-9", "GPU-7", "TPU-0", "0"])
def test_unknown_device_lists_what_there_is(ids: str) -> None:
    with pytest.raises(UnknownNameError, match=f"no device '{ids}'.*CPU-0, CPU-1, .*GPU-0, GPU-1"):
        choose(ids=ids, available=[*GPUS, *CORES])


@pytest.mark.parametrize("n", [0, -1, True, 2.0, "2"])
def test_a_number_of_workers_is_a_count(n: object) -> None:
    with pytest.raises(UsageError, match="number of workers"):
        choose(n)


@pytest.mark.parametrize("ids", ["", " , ", []])
def test_an_empty_list_is_not_automatic(ids: object) -> None:
    with pytest.raises(UsageError, match="empty"):
        choose(ids=ids)


@pytest.mark.parametrize(
    ("workers", "cores", "threads"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (8, 8, 1), (9, 8, 1), (4, 1, 1)]
)
def test_threads_never_exceed_the_cores(workers: int, cores: int, threads: int) -> None:
    assert devices.threads_per_worker(workers, cores) == threads


def test_list_has_a_device_for_each_usable_core() -> None:
    cores = [device for device in devices.list_devices() if device.kind == "cpu"]
    assert [c.id for c in cores] == [f"CPU-{k}" for k in range(usable_cores())]
    assert all(core.name for core in cores)


# ------------------------------------------------------------------------------------------------------ GPUs

SMI = """#!/bin/sh
case "$1" in
--query-gpu=index,uuid,name,memory.total)
  echo "0, GPU-5f0a, NVIDIA H200, 143771"
  echo "1, GPU-77bc, NVIDIA GB10, [N/A]" ;;
--query-gpu=index,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw)
  echo "0, 37, 1024, 143771, 41, 118.52"
  echo "1, [N/A], [N/A], [N/A], [Not Supported], [Unknown Error]" ;;
*) exit 2 ;;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of nvidia-smi, to be written by the test; nothing else is on the path."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "nvidia-smi"


def put(program: Path, text: str) -> None:
    program.write_text(text)
    program.chmod(0o755)


def gpus() -> list[Device]:
    return [device for device in devices.list_devices() if device.kind == "gpu"]


def test_gpus_are_listed_before_cores(smi: Path) -> None:
    put(smi, SMI)
    assert devices.list_devices()[:2] == [
        Device("GPU-0", "gpu", 0, "NVIDIA H200", 143771 * 2**20),
        Device("GPU-1", "gpu", 1, "NVIDIA GB10", None),
    ]


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        ("1", ["GPU-1"]),
        ("1,0", ["GPU-1", "GPU-0"]),
        ("GPU-77", ["GPU-1"]),
        ("0,5,1", ["GPU-0"]),
        ("", []),
        ("-1", []),
        ("GPU-", []),
    ],
)
def test_cuda_visible_devices_is_honoured(
    smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str, ids: list[str]
) -> None:
    put(smi, SMI)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [device.id for device in gpus()] == ids


def test_gpu_readings_have_none_where_the_driver_has_no_number(smi: Path) -> None:
    put(smi, SMI)
    assert readings.read_gpu(0) == DeviceReading(37.0, 1024 * 2**20, 143771 * 2**20, 41.0, 118.52)
    assert readings.read_gpu(1) == DeviceReading()
    assert readings.read_gpu(2) == DeviceReading()


@pytest.mark.parametrize(
    "text", ["#!/bin/sh\necho '0, 1, 2'\n", "#!/bin/sh\necho failed; exit 9\n", "not a program"]
)
def test_a_failing_nvidia_smi_means_no_gpus(smi: Path, text: str) -> None:
    put(smi, text)
    assert gpus() == []
    assert readings.read_gpu(0) == DeviceReading()


def test_no_nvidia_smi_means_no_gpus(smi: Path) -> None:
    assert not smi.exists()
    assert gpus() == []
    assert readings.read_gpu(0) == DeviceReading()


def test_a_hanging_nvidia_smi_is_given_up(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(smi, "#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr(readings, "_SMI_SECONDS", 0.2)
    started = time.monotonic()
    assert gpus() == []
    assert time.monotonic() - started < 10


def test_one_query_serves_all_gpus_for_a_second(smi: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    put(smi, SMI.replace("#!/bin/sh\n", f"#!/bin/sh\necho asked >> {log}\n"))
    now = [100.0]
    reader = DeviceReader(clock=lambda: now[0])
    reader.read_gpu(0)
    reader.read_gpu(1)
    now[0] = 100.8
    reader.read_gpu(0)
    assert log.read_text().count("asked") == 1
    now[0] = 101.0
    assert reader.read_gpu(0).utilisation_percent == 37.0
    assert log.read_text().count("asked") == 2
