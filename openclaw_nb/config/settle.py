"""What a cluster is started with: what was asked for, then what is configured, then what would hold anyway.

    Configuration, Asked, the machine's devices ──> Settled, or a ConfigurationError with the line to change

Pure but for the addresses of this host, which come in as an argument.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count as counted_from

from openclaw_nb.cluster.devices import Device, more_devices
from openclaw_nb.config.settings import Configuration, DeclaredWorker
from openclaw_nb.config.unbuilt import (
    MEMORY_LIMIT,
    REMOTE_MASTER,
    REMOTE_WORKER,
    THREAD_TASKS,
    UNBUILT_BACKENDS,
    UNBUILT_KEYS,
)
from openclaw_nb.core.errors import ConfigurationError, ResourceError
from openclaw_nb.core.text import parse_size, size_text
from openclaw_nb.protocol.placement import SETTINGS

_LOOPBACK = ("localhost", "::1", "")
_COMMUNICATIONS = ("nccl", "gloo", "mpi")
_PRECISIONS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True)
class Asked:
    """What a person has said beside the configuration, which wins over it; None for what was not said."""

    workers: int | None = None
    devices: str | Sequence[str] | None = None
    backend: str | None = None
    communication: str | None = None
    oversubscribe: bool = False


@dataclass(frozen=True)
class Settled:
    """How a cluster is started.

    Attributes
    ----------
    workers, devices : int, sequence of str or None
        As for `openclaw_nb.cluster.devices.choose_devices`.
    backend, communication, host : str
        As for `MasterNode`.
    environment : mapping of str to str
        Variables for each worker.
    replaced : mapping of str to str
        The core in the place of each GPU that is named and not there.
    notes : tuple of str
        What a person should know.
    """

    workers: int | None = None
    devices: str | Sequence[str] | None = None
    backend: str = "local"
    communication: str = "auto"
    host: str = "127.0.0.1"
    environment: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def settle(
    configuration: Configuration, asked: Asked, available: Sequence[Device], addresses: Collection[str] = ()
) -> Settled:
    """Decide what a cluster is started with.

    Parameters
    ----------
    configuration : Configuration
        What is configured, perhaps nothing.
    asked : Asked
        What was said beside it.
    available : sequence of Device
        What the machine has.
    addresses : collection of str
        Addresses and names of this host, beside loopback.

    Raises
    ------
    ConfigurationError
        For what is not built yet, or is not on this machine.
    ResourceError
        When there are fewer devices than workers.
    """
    _refuse_other_hosts(configuration, addresses)
    backend = asked.backend or configuration.value("parallel.backend") or "local"
    if backend in UNBUILT_BACKENDS and asked.backend is None:
        raise ConfigurationError([f"{configuration.place('parallel.backend')}: {UNBUILT_BACKENDS[backend]}."])
    notes = _unbuilt(configuration, backend)
    has_gpu = any(device.kind == "gpu" for device in available)
    replaced = {} if has_gpu else cores_for_gpus(configuration, asked.devices)
    workers, devices, changed = _workers(configuration, asked, available, replaced)
    if configuration.given("fallback") == "cpu" and not has_gpu and (backend == "cuda" or changed):
        backend = "local" if backend == "cuda" else backend
        words = ", ".join(f"{core} for {gpu}" for gpu, core in changed.items())
        notes.append(
            f"fallback: cpu: there is no GPU here, so the workers are on cores ({words or backend})."
        )
    return Settled(
        workers=workers,
        devices=devices,
        backend=backend,
        communication=_communication(configuration, asked.communication, backend),
        host=_host(configuration),
        environment=_environment(configuration, backend),
        replaced=replaced,
        notes=tuple(notes),
    )


def _unbuilt(configuration: Configuration, backend: str) -> list[str]:
    notes = [
        f"{configuration.place(path)}: not applicable yet: {why}."
        for path, why in UNBUILT_KEYS.items()
        if path in configuration.settings
    ]
    if backend == "thread" and configuration.given("parallel.backend") == "thread":
        notes.append(f"{configuration.place('parallel.backend')}: not applicable yet: {THREAD_TASKS}.")
    return notes


def _refuse_other_hosts(configuration: Configuration, addresses: Collection[str]) -> None:
    problems = []
    host = configuration.given("master.host") or ""
    if not is_loopback(host):
        problems.append(
            f"{configuration.place('master.host')}: {host} is not loopback (127.0.0.1): {REMOTE_MASTER}."
        )
    for index, worker in enumerate(configuration.workers):
        if not is_loopback(worker.ip) and worker.ip not in addresses:
            problems.append(
                f"{worker.where}, workers[{index}].ip: {worker.ip} is not this host (127.0.0.1): {REMOTE_WORKER}."
            )
    if problems:
        raise ConfigurationError(problems)


def is_loopback(host: str) -> bool:
    """Return whether an address is this host's, whatever host that is."""
    return host in _LOOPBACK or host.startswith("127.")


def _host(configuration: Configuration) -> str:
    host = configuration.given("master.host") or ""
    return host if host.startswith("127.") else "127.0.0.1"


# ------------------------------------------------------------------------------------- workers and devices


def _workers(
    configuration: Configuration, asked: Asked, available: Sequence[Device], replaced: Mapping[str, str]
) -> tuple[int | None, str | Sequence[str] | None, dict[str, str]]:
    """Return how many workers, on which devices, and those of the replaced GPUs that are among them."""
    if asked.devices is not None:
        named = _ids(asked.devices)
        if changed := _only(named, replaced):
            return asked.workers, [replaced.get(device, device) for device in named], changed
        return asked.workers, asked.devices, {}
    enabled = configuration.value("parallel.enabled") is not False
    configured = configuration.given("parallel.workers") if enabled else 1
    count = configured if asked.workers is None else asked.workers
    named = _configured_ids(configuration)
    if not named:
        return count, None, {}
    named = named[:count]
    changed = _only(named, replaced)
    named = [replaced.get(device, device) for device in named]
    if count is None or count <= len(named):
        return len(named) if count is None else count, named, changed
    further = more_devices(named, count - len(named), available, oversubscribe=asked.oversubscribe)
    return count, [*named, *further], changed


def _only(named: Sequence[str], replaced: Mapping[str, str]) -> dict[str, str]:
    return {device: replaced[device] for device in named if device in replaced}


def _ids(devices: str | Sequence[str]) -> list[str]:
    words = devices.split(",") if isinstance(devices, str) else devices
    return [word.strip().upper() for word in words if word.strip()]


def _configured_ids(configuration: Configuration) -> list[str]:
    """Return the devices on which a configuration wants workers, in order."""
    workers = [worker.device_id for worker in configuration.workers]
    return workers or list(configuration.given("strategy.devices") or ())


def cores_for_gpus(
    configuration: Configuration, devices: str | Sequence[str] | None = None
) -> dict[str, str]:
    """Return the core that takes the place of each GPU that is named, by ``fallback: cpu``, where there is no GPU.

    Each gets the lowest core that is named nowhere beside it and no other has got.

    Parameters
    ----------
    configuration : Configuration
        What is configured: the devices of workers, then those of the strategy and of its layers.
    devices : str or sequence of str, optional
        What was asked for beside it, for a GPU that both name the one that counts.
    """
    if configuration.given("fallback") != "cpu":
        return {}
    configured = [
        *_configured_ids(configuration),
        *(configuration.given("strategy.devices") or ()),
        *_ids(list((configuration.given("strategy.device_mapping") or {}).values())),
    ]
    return _lowest_cores(configured) | _lowest_cores([] if devices is None else _ids(devices))


def _lowest_cores(named: Sequence[str]) -> dict[str, str]:
    free = (core for core in map("CPU-{}".format, counted_from()) if core not in named)
    gpus = dict.fromkeys(device for device in named if device.startswith("GPU-"))
    return {gpu: next(free) for gpu in gpus}


def check_threads(configuration: Configuration, num_workers: int, cores: int, *, oversubscribe: bool) -> None:
    """Refuse more threads than cores.

    Raises
    ------
    ResourceError
        With the numbers.
    """
    threads = configuration.given("parallel.omp_threads")
    if threads is None or oversubscribe or num_workers * threads <= cores:
        return
    raise ResourceError(
        f"{configuration.place('parallel.omp_threads')}: {num_workers} workers × {threads} threads = "
        f"{num_workers * threads}, and this machine has {cores} cores to use. Take fewer workers or threads "
        f"(at most {max(1, cores // num_workers)} each), or let them share cores: --oversubscribe or "
        "OPENCLAW_OVERSUBSCRIBE=1."
    )


# ------------------------------------------------------------------------------------------- environment


def _environment(configuration: Configuration, backend: str) -> dict[str, str]:
    """Return the variables by which settings reach the workers."""
    found: dict[str, str] = {}
    if (threads := configuration.given("parallel.omp_threads")) is not None:
        found["OMP_NUM_THREADS"] = str(threads)
    shared = configuration.given("parallel.mpi_shared_memory")
    if backend == "mpi" and shared is not None:
        found |= {"OMPI_MCA_btl": "self,sm"} if shared else MPI_OVER_TCP
    if (rdma := configuration.given("parallel.rdma")) is not None:
        found["NCCL_IB_DISABLE"] = "0" if rdma else "1"
    told = {
        name: configuration.given(f"parallel.{name}")
        for name in ("socket_buffer_size", "log_level")
        if f"parallel.{name}" in configuration.settings
    }
    return {**found, SETTINGS: json.dumps(told)} if told else found


MPI_OVER_TCP = {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}


# ------------------------------------------------------------------------------------------- capabilities


def _communication(configuration: Configuration, asked: str | None, backend: str) -> str:
    """Return what workers communicate with, within what all of them may use."""
    wanted: str = asked or configuration.value("parallel.communication") or "auto"
    limits = [(worker, _named(worker, _COMMUNICATIONS)) for worker in configuration.workers]
    limits = [(worker, words) for worker, words in limits if words]
    if wanted != "auto":
        place = "--communication (communication=)" if asked else ""
        problems = [
            f"{worker.where}, capabilities: {', '.join(words)} leave out {wanted}, which "
            f"{place or configuration.place('parallel.communication')} asks for."
            for worker, words in limits
            if wanted in _COMMUNICATIONS and wanted not in words
        ]
        if problems:
            raise ConfigurationError(problems)
        return wanted
    common = [word for word in _COMMUNICATIONS if all(word in words for _, words in limits)]
    if "nccl" in common:  # which falls back by itself where there is no GPU
        return wanted
    if "gloo" in common:
        return "gloo"
    if "mpi" in common and backend == "mpi":
        return "mpi"
    told = [
        f"{worker.where}, capabilities of {worker.device_id}: {', '.join(words)}" for worker, words in limits
    ]
    needs = ": mpi needs backend: mpi" if common else ""
    raise ConfigurationError(
        [
            f"{'; '.join(told)}. The workers have no communication in common{needs}. Say gloo in each, or leave it out."
        ]
    )


def _named(worker: DeclaredWorker, words: Sequence[str]) -> list[str]:
    return [word for word in worker.capabilities if word in words]


def allowed_precisions(configuration: Configuration) -> dict[str, DeclaredWorker]:
    """Return the precisions that some worker may not use, with that worker."""
    found: dict[str, DeclaredWorker] = {}
    for worker in configuration.workers:
        words = _named(worker, _PRECISIONS)
        for precision in _PRECISIONS[1:]:
            if words and precision not in words:
                found.setdefault(precision, worker)
    return found


def check_capabilities(
    configuration: Configuration, devices: Sequence[Device], memory_available_bytes: int
) -> list[str]:
    """Compare what workers are said to be able to with the devices that they got; return notes.

    Raises
    ------
    ConfigurationError
        For what a device does not have, unless cores are in the place of GPUs by ``fallback: cpu``.
    """
    problems, notes = [], []
    for index, (worker, device) in enumerate(zip(configuration.workers, devices, strict=False)):
        lacks = [
            word for word in worker.capabilities if device.kind == "cpu" and word.startswith(("nccl", "cuda"))
        ]
        line = f"{worker.where}, workers[{index}].capabilities: {device.id} has no {', '.join(lacks)}: it is no GPU."
        if lacks and worker.device_id != device.id:
            notes.append(line)
        elif lacks:
            problems.append(line)
        for size in (word for word in worker.capabilities if word[0].isdigit()):
            has = device.memory_bytes or memory_available_bytes // max(1, len(devices))
            if parse_size(size, "a capability") > has:
                problems.append(
                    f"{worker.where}, workers[{index}].capabilities: {size} is more than the {size_text(has)} "
                    f"that are there for the worker on {device.id}."
                )
            notes.append(
                f"{worker.where}, workers[{index}].capabilities: {size}: not applicable yet: {MEMORY_LIMIT}."
            )
    if problems:
        raise ConfigurationError(problems)
    return notes
