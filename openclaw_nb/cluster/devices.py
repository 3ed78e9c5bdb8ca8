"""What a machine has to run workers on, which of it each worker gets, and how busy it is.

GPUs are known through ``nvidia-smi`` alone: no torch and no CUDA, which must never start in the kernel.
Cores and memory are those that this process may use, so affinity and container limits count.

    list_devices() ─► choose_devices(n, "auto" | "GPU-0,GPU-1") ─► one Device a worker
    DeviceReader   ─► DeviceReading, again and again, None for what cannot be read

`choose_devices` decides from its arguments alone. This file does not pin, start or know workers.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import psutil

from openclaw_nb.core.errors import ResourceError, UnknownNameError, UsageError, unknown_name
from openclaw_nb.core.host import number_in, text_of, total_memory_bytes, usable_cores

MEMORY_PER_WORKER_BYTES = 2 * 1024**3
"""Host memory that a worker with torch and a small model needs."""

_SMI_SECONDS = 10.0  # without persistence mode the driver wakes up each GPU first
_READING_AGE_SECONDS = 0.5
_MIB = 1024**2
_GIB = 1024**3


@dataclass(frozen=True)
class Device:
    """Something that one worker runs on.

    Attributes
    ----------
    id : str
        ``"GPU-0"``, ``"CPU-1"``.
    kind : str
        ``"gpu"`` or ``"cpu"``.
    index : int
        For a GPU its number in ``nvidia-smi`` (PCI bus order), for a core a running number from 0.
    name : str
        The model, for people.
    memory_bytes : int or None
        The GPU's own memory; None for a core, which has none, and where the driver does not say.
    """

    id: str
    kind: str
    index: int
    name: str
    memory_bytes: int | None = None


# ------------------------------------------------------------------------------------------ what there is


def list_devices() -> list[Device]:
    """List the GPUs that ``nvidia-smi`` and ``CUDA_VISIBLE_DEVICES`` show, then a device per usable core."""
    return [*_list_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")), *_list_cores()]


def threads_per_worker(num_workers: int, cores: int) -> int:
    """Return how many compute threads each worker gets so that together they do not exceed the cores."""
    return max(1, cores // max(1, num_workers))


def _list_gpus(visible: str | None) -> list[Device]:
    rows = _query_gpus("index,uuid,name,memory.total")
    gpus = {}
    for index, uuid, name, memory in rows:
        gpus[uuid] = Device(f"GPU-{index}", "gpu", int(index), name, _mebibytes(memory))
    return list(gpus.values()) if visible is None else list(_visible_gpus(gpus, visible))


def _visible_gpus(gpus: dict[str, Device], visible: str) -> Iterator[Device]:
    """Yield what ``CUDA_VISIBLE_DEVICES`` leaves; as in CUDA, an entry that fits none hides all after it."""
    for entry in (word.strip() for word in visible.split(",")):
        fits = [g for uuid, g in gpus.items() if entry == str(g.index) or (entry and uuid.startswith(entry))]
        if len(fits) != 1:
            return
        yield fits[0]


def _list_cores() -> list[Device]:
    name = _cpu_name()
    return [Device(f"CPU-{index}", "cpu", index, name) for index in range(usable_cores())]


def _cpu_name() -> str:
    for line in text_of(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"


# ----------------------------------------------------------------------------------- who gets which of them


def choose_devices(
    num_workers: int | None,
    devices: str | Sequence[str] | None,
    *,
    available: Sequence[Device],
    memory_available_bytes: int,
    oversubscribe: bool = False,
) -> list[Device]:
    """Decide which device each worker gets.

    Parameters
    ----------
    num_workers : int or None
        How many workers; None takes every GPU, or as many cores as the memory allows (at least one).
    devices : str, sequence of str or None
        ``"auto"`` or None for the GPUs, or the cores where there is no GPU; otherwise ids: ``"GPU-0,GPU-1"``.
    available : sequence of Device
        What the machine has.
    memory_available_bytes : int
        Host memory that new processes can take.
    oversubscribe : bool
        Let workers share devices, and start with less than 2 GiB a worker.

    Returns
    -------
    list of Device
        One per worker, in the order of ranks.

    Raises
    ------
    UsageError
        If the number is no count, or differs from the number of ids given.
    UnknownNameError
        If an id does not exist on this machine.
    ResourceError
        If there are more workers than devices, an id comes twice, or memory is short.
    """
    if not available:
        raise ResourceError("This machine shows no device to run a worker on.")
    _check_count(num_workers)
    named = _named_ids(devices)
    if named is not None:
        chosen = _explicit(named, num_workers, available, oversubscribe)
    else:
        chosen = _automatic(num_workers, available, memory_available_bytes, oversubscribe)
    nobody_asked = named is None and num_workers is None and len(chosen) == 1
    if not oversubscribe and not nobody_asked:
        _check_memory(len(chosen), memory_available_bytes)
    return chosen


def _check_count(num_workers: int | None) -> None:
    if num_workers is None:
        return
    if isinstance(num_workers, bool) or not isinstance(num_workers, int):
        raise UsageError(f"The number of workers must be a whole number, not {num_workers!r}.")
    if num_workers < 1:
        raise UsageError(f"The number of workers must be at least 1, not {num_workers}.")


def _named_ids(devices: str | Sequence[str] | None) -> list[str] | None:
    """Return the ids that were named, or None for an automatic choice."""
    if devices is None:
        return None
    words = devices.split(",") if isinstance(devices, str) else list(devices)
    ids = [word.strip().upper() for word in words if word.strip()]
    if not ids:
        raise UsageError("The list of devices is empty: name ids such as GPU-0,GPU-1 or CPU-0, or say auto.")
    return None if ids == ["AUTO"] else ids


def _explicit(
    ids: list[str], num_workers: int | None, available: Sequence[Device], oversubscribe: bool
) -> list[Device]:
    known = {device.id: device for device in available}
    for device_id in ids:
        if device_id not in known:
            raise _unknown_device(device_id, available)
    if num_workers is not None and num_workers != len(ids):
        raise UsageError(
            f"{num_workers} workers were asked for, but the list of devices names {len(ids)} "
            f"({', '.join(ids)}), and each worker gets one. Leave out the number, or name as many devices."
        )
    doubled = sorted({device_id for device_id in ids if ids.count(device_id) > 1})
    if doubled and not oversubscribe:
        raise ResourceError(
            f"Named more than once: {', '.join(doubled)}. Each worker gets a device of its own; "
            "to let workers share one, say --oversubscribe or set OPENCLAW_OVERSUBSCRIBE=1."
        )
    return [known[device_id] for device_id in ids]


def _unknown_device(device_id: str, available: Sequence[Device]) -> UnknownNameError:
    if device_id.startswith("GPU-") and not any(device.kind == "gpu" for device in available):
        cores = ",".join(device.id for device in available[:2])
        return UnknownNameError(
            f"There is no device {device_id!r}: nvidia-smi shows no GPU on this machine. To fall back to "
            f"its cores, say `--devices auto` or `--devices {cores}`, or write `fallback: cpu` in the "
            "configuration."
        )
    return unknown_name("device", device_id, [device.id for device in available])


def _automatic(
    num_workers: int | None, available: Sequence[Device], memory_available_bytes: int, oversubscribe: bool
) -> list[Device]:
    pool = [device for device in available if device.kind == "gpu"] or list(available)
    if num_workers is None:
        fitting = max(1, memory_available_bytes // MEMORY_PER_WORKER_BYTES)
        return pool if pool[0].kind == "gpu" else pool[:fitting]
    if num_workers > len(pool) and not oversubscribe:
        raise _too_many(num_workers, pool)
    return list(islice(cycle(pool), num_workers))


def _too_many(num_workers: int, pool: Sequence[Device]) -> ResourceError:
    what = "GPUs" if pool[0].kind == "gpu" else "cores"
    return ResourceError(
        f"{num_workers} workers were asked for, but this machine has {len(pool)} {what} to use. "
        f"Ask for at most {len(pool)}, or let them share {what}: "
        "--oversubscribe or OPENCLAW_OVERSUBSCRIBE=1."
    )


def _check_memory(num_workers: int, memory_available_bytes: int) -> None:
    each = memory_available_bytes / num_workers
    if each >= MEMORY_PER_WORKER_BYTES:
        return
    fitting = memory_available_bytes // MEMORY_PER_WORKER_BYTES
    advice = f"Ask for at most {fitting}, free memory" if fitting else "Free memory"
    raise ResourceError(
        f"{num_workers} workers would have {each / _GIB:.1f} GiB of memory each "
        f"({memory_available_bytes / _GIB:.1f} GiB are available), and each needs "
        f"{MEMORY_PER_WORKER_BYTES / _GIB:.0f} GiB. {advice}, or start all the same: "
        "--oversubscribe or OPENCLAW_OVERSUBSCRIBE=1."
    )


# ------------------------------------------------------------------------------------------ how busy they are


@dataclass(frozen=True)
class DeviceReading:
    """What could be measured of a device; None for what cannot.

    Attributes
    ----------
    utilisation_percent : float or None
        0 to 100: of a GPU, or of one core for a worker on a core.
    memory_used_bytes, memory_total_bytes : int or None
        The GPU's memory; for a worker on a core its own and its children's, and the host's or container's.
    temperature_celsius, power_watts : float or None
        Of a GPU.
    """

    utilisation_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None


class DeviceReader:
    """Takes readings again and again; utilisation is that of the time since the last one. Never raises.

    Parameters
    ----------
    clock : callable
        Seconds that only grow; ``nvidia-smi`` is asked at most twice a second by it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._workers: dict[int, _WorkerMeter] = {}
        self._gpus: dict[int, DeviceReading] = {}
        self._gpus_read_at: float | None = None

    def read_cpu_worker(self, pid: int) -> DeviceReading:
        """Read a worker's process with its children (data loader workers, say).

        Parameters
        ----------
        pid : int
            The worker's process id.

        Returns
        -------
        DeviceReading
            Its utilisation is None at the first call for a process, for there is nothing to compare with.
        """
        try:
            meter = self._workers.get(pid)
            if meter is None or not meter.is_running():
                meter = self._workers[pid] = _WorkerMeter(pid)
            return meter.read()
        except (psutil.Error, OSError, ValueError, OverflowError):
            self._workers.pop(pid, None)
            return DeviceReading()

    def read_gpu(self, index: int) -> DeviceReading:
        """Read a GPU by its number in ``nvidia-smi``; one query serves all GPUs for half a second."""
        now = self._clock()
        if self._gpus_read_at is None or now - self._gpus_read_at > _READING_AGE_SECONDS:
            self._gpus, self._gpus_read_at = _read_gpus(), now
        return self._gpus.get(index, DeviceReading())


def read_cpu_worker(pid: int, interval_seconds: float = 0.1) -> DeviceReading:
    """Read a worker's process once, watching it for a moment; for repeated readings use `DeviceReader`."""
    reader = DeviceReader()
    reader.read_cpu_worker(pid)
    time.sleep(interval_seconds)
    return reader.read_cpu_worker(pid)


def read_gpu(index: int) -> DeviceReading:
    """Read a GPU once by its number in ``nvidia-smi``."""
    return DeviceReader().read_gpu(index)


class _WorkerMeter:
    """The processor time of one process and its children, between two looks."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._spent: dict[psutil.Process, float] = {}
        self._looked_at: float | None = None

    def is_running(self) -> bool:
        return bool(self._process.is_running())

    def read(self) -> DeviceReading:
        if self._process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.ZombieProcess(self._process.pid)
        children = self._process.children(recursive=True)
        used = int(self._process.memory_info().rss) + sum(map(_own_memory, children))
        busy = self._utilisation([self._process, *children])
        return DeviceReading(busy, used, total_memory_bytes())

    def _utilisation(self, processes: list[psutil.Process]) -> float | None:
        """Compare with the last look; a child that is new since then spent all of its time since then."""
        now, spent = time.monotonic(), {p: _processor_seconds(p) for p in processes}
        before, looked_at = self._spent, self._looked_at
        self._spent, self._looked_at = spent, now
        if looked_at is None or now <= looked_at:
            return None
        busy = sum(seconds - before.get(process, 0.0) for process, seconds in spent.items())
        return min(100.0, 100.0 * busy / (now - looked_at))


def _processor_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
        return float(times.user + times.system)
    except psutil.Error:
        return 0.0  # a child that has just ended


def _own_memory(child: psutil.Process) -> int:
    """Memory that a child does not share: a forked loader shows its parent's pages as resident too."""
    try:
        return int(child.memory_full_info().uss)
    except (psutil.Error, OSError):
        return 0


def _read_gpus() -> dict[int, DeviceReading]:
    rows = _query_gpus("index,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw")
    return {
        int(index): DeviceReading(
            number_in(busy), _mebibytes(used), _mebibytes(total), number_in(temperature), number_in(power)
        )
        for index, busy, used, total, temperature, power in rows
    }


def _query_gpus(fields: str) -> list[list[str]]:
    """Ask ``nvidia-smi``; no rows where it is not there, fails, hangs or answers something else."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, check=False, capture_output=True, text=True, errors="replace", timeout=_SMI_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[word.strip() for word in line.split(",")] for line in answer.stdout.splitlines()]
    good = [row for row in rows if len(row) == fields.count(",") + 1 and row[0].isdigit()]
    return good if answer.returncode == 0 else []


def _mebibytes(word: str) -> int | None:
    number = number_in(word)
    return None if number is None else int(number * _MIB)
