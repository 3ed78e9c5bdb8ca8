"""What a machine has to run workers on, and which of it each worker gets.

GPUs are known through ``nvidia-smi`` alone: no torch and no CUDA, which must never start in the kernel.
Cores and memory are those that this process may use, so affinity and container limits count.

    list_devices() ─► choose_devices(n, "auto" | "GPU-0,GPU-1") ─► one Device a worker

`choose_devices` decides from its arguments alone. This file does not pin, start or know workers.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from openclaw_nb.cluster.readings import mebibytes, query_gpus
from openclaw_nb.core.errors import ResourceError, UnknownNameError, UsageError, unknown_name
from openclaw_nb.core.host import text_of, usable_cores

MEMORY_PER_WORKER_BYTES = 2 * 1024**3
"""Host memory that a worker with torch and a small model needs."""

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
    rows = query_gpus("index,uuid,name,memory.total")
    gpus = {}
    for index, uuid, name, memory in rows:
        gpus[uuid] = Device(f"GPU-{index}", "gpu", int(index), name, mebibytes(memory))
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
    num_spares: int = 0,
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
    num_spares : int
        How many more workers wait; each gets a device beside those of the others, of the same kind.

    Returns
    -------
    list of Device
        One per worker, in the order of ranks, then one per spare.

    Raises
    ------
    UsageError
        If a number is no count, or differs from the number of ids given.
    UnknownNameError
        If an id does not exist on this machine.
    ResourceError
        If there are more workers than devices, an id comes twice, or memory is short; spares count, too.
    """
    if not available:
        raise ResourceError("This machine shows no device to run a worker on.")
    _check_count(num_workers)
    _check_spares(num_spares)
    named = _named_ids(devices)
    if named is not None:
        chosen = _explicit(named, num_workers, available, oversubscribe)
    else:
        chosen = _automatic(num_workers, available, memory_available_bytes, oversubscribe, num_spares)
    chosen += _further(num_spares, chosen, available, oversubscribe, num_spares)
    nobody_asked = named is None and num_workers is None and len(chosen) == 1
    if not oversubscribe and not nobody_asked:
        _check_memory(len(chosen), memory_available_bytes, num_spares)
    return chosen


def choose_more(
    where: int | str,
    used: Sequence[Device],
    *,
    available: Sequence[Device],
    memory_available_bytes: int,
    oversubscribe: bool = False,
) -> list[Device]:
    """Decide which devices workers get that are added to others.

    Parameters
    ----------
    where : int or str
        How many, or device ids.
    used : sequence of Device
        Where the others run.
    available, memory_available_bytes, oversubscribe
        As for `choose_devices`.

    Raises
    ------
    UsageError, UnknownNameError, ResourceError
        As `choose_devices`; also for a device that is in use, ``"auto"``, and for the address of another host.
    """
    if isinstance(where, str) and ":" in where:
        raise UsageError(
            f"{where!r}: workers of other hosts cannot join yet. Give a number of workers, or devices of this machine."
        )
    taken = {device.id for device in used}
    if isinstance(where, str):
        if (named := _named_ids(where)) is None:
            raise UsageError(f"{where!r} does not say how many: give a number, or devices of this machine.")
        chosen = _explicit(named, None, available, oversubscribe)
        doubled = [device.id for device in chosen if device.id in taken]
        if doubled and not oversubscribe:
            raise ResourceError(
                f"In use by another worker: {', '.join(doubled)}. Choose others, or say --oversubscribe."
            )
    else:
        _check_count(where)
        chosen = _further(where, used, available, oversubscribe)
    if not oversubscribe:
        _check_memory(len(chosen), memory_available_bytes)
    return chosen


def more_devices(
    ids: Sequence[str], count: int, available: Sequence[Device], *, oversubscribe: bool
) -> list[str]:
    """Return the ids of so many devices beside some, of the same kind as the first that exists.

    Raises
    ------
    ResourceError
        When there are fewer.
    """
    known = {device.id: device for device in available}
    used = [known[each] for each in ids if each in known]
    if not used and any(each.startswith("GPU-") for each in ids):
        return []  # whoever looks at the ids says that there is no GPU
    return [device.id for device in _further(count, used, available, oversubscribe)]


def _further(
    count: int, used: Sequence[Device], available: Sequence[Device], oversubscribe: bool, num_spares: int = 0
) -> list[Device]:
    """Return so many devices beside those that are used, of the same kind."""
    kind = used[0].kind if used else "cpu"
    taken = {device.id for device in used}
    pool = [device for device in available if device.kind == kind]
    free = [device for device in pool if device.id not in taken]
    if count > len(free) and not oversubscribe:
        raise _too_many(len(used) + count, pool, num_spares)
    return [*free, *islice(cycle(pool), count)][:count]


def _check_spares(num_spares: int) -> None:
    if isinstance(num_spares, bool) or not isinstance(num_spares, int) or num_spares < 0:
        raise UsageError(f"The number of spares must be a whole number, 0 or more, not {num_spares!r}.")


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
    num_workers: int | None,
    available: Sequence[Device],
    memory_available_bytes: int,
    oversubscribe: bool,
    num_spares: int = 0,
) -> list[Device]:
    pool = [device for device in available if device.kind == "gpu"] or list(available)
    if num_workers is None:
        fitting = len(pool)
        if pool[0].kind == "cpu":
            fitting = min(fitting, memory_available_bytes // MEMORY_PER_WORKER_BYTES)
        return pool[: max(1, fitting - num_spares)]
    if num_workers + num_spares > len(pool) and not oversubscribe:
        raise _too_many(num_workers + num_spares, pool, num_spares)
    return list(islice(cycle(pool), num_workers))


def _too_many(num_workers: int, pool: Sequence[Device], num_spares: int = 0) -> ResourceError:
    what = "GPUs" if pool[0].kind == "gpu" else "cores"
    return ResourceError(
        f"{_counted(num_workers, num_spares)} were asked for, but this machine has {len(pool)} {what} to use. "
        f"Ask for at most {len(pool)} (-n, or parallel.workers), or let them share {what}: "
        "--oversubscribe or OPENCLAW_OVERSUBSCRIBE=1."
    )


def _counted(num_workers: int, num_spares: int) -> str:
    if not num_spares:
        return f"{num_workers} workers"
    spares = "1 spare counts" if num_spares == 1 else f"{num_spares} spares count"
    return f"{num_workers} workers ({spares}, too)"


def _check_memory(num_workers: int, memory_available_bytes: int, num_spares: int = 0) -> None:
    each = memory_available_bytes / num_workers
    if each >= MEMORY_PER_WORKER_BYTES:
        return
    fitting = memory_available_bytes // MEMORY_PER_WORKER_BYTES
    advice = f"Ask for at most {fitting} (-n, or parallel.workers), free memory" if fitting else "Free memory"
    raise ResourceError(
        f"{_counted(num_workers, num_spares)} would have {each / _GIB:.1f} GiB of memory each "
        f"({memory_available_bytes / _GIB:.1f} GiB are available), and each needs "
        f"{MEMORY_PER_WORKER_BYTES / _GIB:.0f} GiB. {advice}, or start all the same: "
        "--oversubscribe or OPENCLAW_OVERSUBSCRIBE=1."
    )
