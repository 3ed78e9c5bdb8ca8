"""What each key has set, as the workers themselves say it: the rows of ``%openclaw config --effective``.

    Configuration, Seen (what master and workers tell) ──> Effect, one a key ──> Table

Pure: nothing is asked for here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openclaw_nb.config.cells import COMMON, CellDefaults
from openclaw_nb.config.kinds import Size
from openclaw_nb.config.schema import KEYS, fields_of
from openclaw_nb.config.settings import Configuration
from openclaw_nb.config.settle import MPI_OVER_TCP, cores_for_gpus, is_loopback
from openclaw_nb.config.unbuilt import (
    MEMORY_LIMIT,
    REMOTE_MASTER,
    REMOTE_WORKER,
    THREAD_TASKS,
    UNBUILT_BACKENDS,
    UNBUILT_KEYS,
)
from openclaw_nb.core.table import Table
from openclaw_nb.core.text import size_text
from openclaw_nb.strategies import STRATEGIES

_NOT_APPLICABLE = "not applicable: "
_NOT_YET = "not applicable yet: "
_COLUMNS = ("key", "value", "from", "sets", "took on")


@dataclass(frozen=True)
class Seen:
    """What a running cluster tells of itself.

    Attributes
    ----------
    backend, communication, host, controller_log : str
        What the master was started with; what the workers' data goes through; how much the controller writes.
    port : int
        Where workers of other processes join.
    limit_seconds : float
        How long ranks may wait together.
    devices : mapping of str to str
        The device of each worker.
    reports : mapping of str to mapping
        What each worker that answered says of its settings (`openclaw_nb.engine.settings.report`).
    cells : CellDefaults
        What holds for cells.
    metrics_port : int or None
        Where metrics are served, if they are.
    """

    backend: str
    communication: str
    host: str
    port: int
    controller_log: str
    limit_seconds: float
    devices: Mapping[str, str]
    reports: Mapping[str, Mapping[str, Any]]
    cells: CellDefaults = field(default_factory=CellDefaults)
    metrics_port: int | None = None

    @property
    def has_gpu(self) -> bool:
        """Whether a worker is on a GPU."""
        return any(device.startswith("GPU-") for device in self.devices.values())


@dataclass(frozen=True)
class Effect:
    """One key: its value, where that comes from, what it sets, and where that was seen.

    Attributes
    ----------
    key, where, sets : str
        The key, the file and line or variable, and what it sets, or why nothing.
    value : object
        The value.
    workers : tuple of str
        The workers on which it took.
    took : str
        Where it was seen, for people.
    """

    key: str
    value: Any
    where: str
    sets: str
    workers: tuple[str, ...] = ()
    took: str = "-"


@dataclass(frozen=True)
class _Outcome:
    sets: str
    workers: tuple[str, ...] = ()
    took: str = "-"


def effects(configuration: Configuration, seen: Seen | None) -> list[Effect]:
    """Return what each key has set, in the order of the schema; those that nobody gave and that have no default not.

    Parameters
    ----------
    configuration : Configuration
        What is configured.
    seen : Seen or None
        What a running cluster tells; None says what would be set.
    """
    found = []
    for path in KEYS:
        value = configuration.value(path)
        if value is None:
            continue
        outcome = _outcome(path, value, configuration, seen)
        setting = configuration.settings.get(path)
        written = path if setting is None else setting.written
        found.append(
            Effect(written, value, configuration.where(path), outcome.sets, outcome.workers, outcome.took)
        )
    return [*found, *_declared(configuration, seen)]


def effects_table(configuration: Configuration, seen: Seen | None, *, runs: bool = False) -> Table:
    """Return `effects` as a table.

    Parameters
    ----------
    configuration, seen
        As for `effects`.
    runs : bool
        Whether a cluster runs from it that was not asked.
    """
    records = effects(configuration, seen)
    rows = tuple((e.key, _shown(e), e.where, e.sets, e.took) for e in records)
    named = {path for path in KEYS if configuration.value(path) is not None}
    rest = ", ".join(path for path in KEYS if path not in named)
    files = ", ".join(configuration.files) or "no file"
    notes = [f"Not given, and nothing set: {rest}."]
    if not configuration:
        notes = ["Nothing is configured: no file was given, and no variable OPENCLAW_… overrides a key."]
    if seen is None and runs:
        notes.insert(
            0, "This is what was asked for; what took effect, and where: %openclaw config --effective"
        )
    elif seen is None:
        notes.insert(0, "No cluster runs from this configuration: this is what it would set.")
    return Table(f"Configuration: {files}", _COLUMNS if rows else (), rows, tuple(records), tuple(notes))


def _shown(effect: Effect) -> str:
    is_size = effect.key in KEYS and isinstance(KEYS[effect.key].kind, Size)
    return size_text(effect.value) if is_size else _text(effect.value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ", ".join(each if isinstance(each, str) else "+".join(each) for each in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {each}" for key, each in value.items())
    return str(value)


def _outcome(path: str, value: Any, configuration: Configuration, seen: Seen | None) -> _Outcome:
    if path in UNBUILT_KEYS:
        return _Outcome(_NOT_YET + UNBUILT_KEYS[path])
    if path.startswith("strategy.") or path in COMMON.values() or path == "parallel.strategy":
        return _of_cells(path, value, configuration, seen)
    key = KEYS[path]
    if seen is None:
        backend = str(configuration.value("parallel.backend"))
        if path == "parallel.backend" and backend in UNBUILT_BACKENDS:
            return _Outcome(_NOT_YET + UNBUILT_BACKENDS[backend])
        if path == "master.host" and not is_loopback(value):
            return _Outcome(f"{_NOT_YET}{REMOTE_MASTER}")
        why = key.elsewhere.get(backend) or (key.elsewhere.get("cpu") if backend == "thread" else None)
        return _Outcome(f"{_NOT_APPLICABLE}{why}" if why else key.sets)
    why = key.elsewhere.get("" if seen.has_gpu else "cpu") or key.elsewhere.get(seen.backend)
    if why:
        return _Outcome(_NOT_APPLICABLE + why)
    return _SEEN[path](value, seen)


# --------------------------------------------------------------------------------------------- of the master


def _on_master(sets: str, *, took: bool, otherwise: str = "") -> _Outcome:
    return _Outcome(sets, took="the master" if took else f"not taken: {otherwise}")


def _host(value: Any, seen: Seen) -> _Outcome:
    return _by_workers(f"listening address {seen.host}", seen, lambda r: r["store_host"], seen.host)


def _controller_log(value: Any, seen: Seen) -> _Outcome:
    sets = f"log level {value} of the controller and of the notebook's logger openclaw_nb"
    return _on_master(
        sets, took=seen.controller_log == value, otherwise=seen.controller_log or "the default level"
    )


def _join_port(value: Any, seen: Seen) -> _Outcome:
    where = f"workers of other processes join at port {seen.port}"
    return _on_master(where, took=value in (0, seen.port), otherwise=f"port {seen.port}")


def _metrics_port(value: Any, seen: Seen) -> _Outcome:
    if seen.metrics_port is None:
        return _Outcome("nothing", took="not taken: metrics are served no more")
    where = f"metrics for Prometheus at port {seen.metrics_port}"
    return _on_master(
        where, took=value in (0, seen.metrics_port), otherwise="another port was asked for since"
    )


def _enabled(value: Any, seen: Seen) -> _Outcome:
    if value:
        return _Outcome("nothing is held back", took="the master")
    return _on_master(
        "one worker, no default strategy",
        took=len(seen.devices) == 1,
        otherwise=f"{len(seen.devices)} workers",
    )


def _backend(value: Any, seen: Seen) -> _Outcome:
    how = {"local": "a process a device", "cuda": "a process a GPU", "mpi": "one mpiexec for all"}
    sets = f"workers started by {seen.backend}: {how.get(seen.backend, 'a process a core')}"
    if value == "thread":
        sets = f"{sets}; {_NOT_YET}{THREAD_TASKS}"
    workers = tuple(seen.devices)
    if seen.backend != value:
        return _Outcome(sets, took=f"not taken: asked for {seen.backend} beside, or fallen back")
    return _Outcome(sets, workers, _listed(workers, seen))


def _workers(value: Any, seen: Seen) -> _Outcome:
    placed = ", ".join(f"{worker} on {device}" for worker, device in seen.devices.items())
    if len(seen.devices) != value:
        return _Outcome(
            f"{len(seen.devices)} workers: {placed}", took="not taken: there are more or fewer since"
        )
    return _Outcome(f"{value} workers: {placed}", tuple(seen.devices), _listed(tuple(seen.devices), seen))


def _communication(value: Any, seen: Seen) -> _Outcome:
    sets = f"process group over {seen.communication}"
    if value == "nccl" and not seen.communication.startswith("nccl"):
        return _Outcome(sets, took="not taken: NCCL needs a GPU on each worker; all ranks agreed on gloo")
    return _by_workers(sets, seen, lambda r: r["transport"], seen.communication)


def _timeout(value: Any, seen: Seen) -> _Outcome:
    sets = f"limit of {seen.limit_seconds:g} s for ranks that wait together, on all workers"
    return _on_master(sets, took=seen.limit_seconds == value, otherwise="another limit was set since")


def _fallback(value: Any, seen: Seen) -> _Outcome:
    cores = tuple(worker for worker, device in seen.devices.items() if device.startswith("CPU-"))
    return _Outcome(
        "cores in the place of GPUs" if not seen.has_gpu else "nothing: there are GPUs",
        cores,
        _listed(cores, seen),
    )


# -------------------------------------------------------------------------------------------- of the workers


def _by_workers(sets: str, seen: Seen, read: Callable[[Mapping[str, Any]], Any], wanted: Any) -> _Outcome:
    """Compare what each worker says with what it was to be."""
    told = {worker: read(report) for worker, report in seen.reports.items()}
    took = tuple(worker for worker, value in told.items() if value == wanted)
    others = [f"{worker}: {value}" for worker, value in told.items() if value != wanted]
    silent = [worker for worker in seen.devices if worker not in told]
    others += [f"{worker} did not answer" for worker in silent]
    return _Outcome(sets, took, "; ".join(filter(None, (_listed(took, seen), *others))) or "-")


def _listed(workers: Sequence[str], seen: Seen) -> str:
    if workers and len(workers) == len(seen.devices) > 1:
        return f"all {len(workers)} workers"
    return ", ".join(workers)


def _threads(value: Any, seen: Seen) -> _Outcome:
    return _by_workers(
        f"OMP_NUM_THREADS={value}, torch.get_num_threads()",
        seen,
        lambda r: (r["environment"].get("OMP_NUM_THREADS"), r["threads"]),
        (str(value), value),
    )


def _hybrid(value: Any, seen: Seen) -> _Outcome:
    threads = sorted({report["threads"] for report in seen.reports.values() if report["threads"]})
    words = " or ".join(map(str, threads)) or "?"
    sets = f"{len(seen.devices)} workers × {words} threads" if value else "one level: workers alone"
    return _Outcome(sets, tuple(seen.reports), _listed(tuple(seen.reports), seen))


def _worker_log(value: Any, seen: Seen) -> _Outcome:
    return _by_workers(f"log level {value} of the worker", seen, lambda r: r["log_level"], value)


def _socket_buffers(value: Any, seen: Seen) -> _Outcome:
    if not seen.reports or all(report["socket_buffers"] is None for report in seen.reports.values()):
        return _Outcome(f"{_NOT_APPLICABLE}there is no gloo socket: one worker has nobody to talk to")
    # Linux doubles what is asked for, and keeps below net.core.wmem_max and rmem_max.
    told = {worker: report["socket_buffers"] for worker, report in seen.reports.items()}
    got = "; ".join(
        f"{worker}: {size_text(each[0])} to send, {size_text(each[1])} to receive"
        for worker, each in told.items()
        if each
    )
    took = tuple(worker for worker, each in told.items() if each and min(each) >= value)
    capped = "" if len(took) == len(told) else " (the kernel allows no more: net.core.wmem_max, rmem_max)"
    return _Outcome("SO_SNDBUF, SO_RCVBUF of gloo's sockets", took, got + capped)


def _shared_memory(value: Any, seen: Seen) -> _Outcome:
    wanted = "self,sm" if value else MPI_OVER_TCP["OMPI_MCA_btl"]
    sets = f"OMPI_MCA_btl={wanted}"
    if "MPI" not in seen.communication:
        sets += "; sums do not go by MPI here (communication: mpi would let them)"
    return _by_workers(sets, seen, lambda r: r["environment"].get("OMPI_MCA_btl"), wanted)


def _rdma(value: Any, seen: Seen) -> _Outcome:
    wanted = "0" if value else "1"
    return _by_workers(
        f"NCCL_IB_DISABLE={wanted}; NCCL takes InfiniBand only between hosts",
        seen,
        lambda r: r["environment"].get("NCCL_IB_DISABLE"),
        wanted,
    )


def _gpu_option(name: str) -> Callable[[Any, Seen], _Outcome]:
    """Return how an option of strategy cells on GPUs is looked at."""
    takers = [each for each in STRATEGIES if name in fields_of(each)]

    def look(value: Any, seen: Seen) -> _Outcome:
        return _in_last_cell(f"the default of strategy cells: {_text(value)}", name, takers, seen)

    return look


_SEEN: dict[str, Callable[[Any, Seen], _Outcome]] = {
    "master.host": _host,
    "master.port": _join_port,
    "master.log_level": _controller_log,
    "master.metrics_port": _metrics_port,
    "parallel.enabled": _enabled,
    "parallel.backend": _backend,
    "parallel.workers": _workers,
    "parallel.communication": _communication,
    "parallel.mpi_shared_memory": _shared_memory,
    "parallel.hybrid": _hybrid,
    "parallel.omp_threads": _threads,
    "parallel.memory_pooling": _gpu_option("memory_pooling"),
    "parallel.gpu_memory_fraction": _gpu_option("gpu_memory_fraction"),
    "parallel.timeout": _timeout,
    "parallel.socket_buffer_size": _socket_buffers,
    "parallel.rdma": _rdma,
    "parallel.log_level": _worker_log,
    "fallback": _fallback,
}


# ---------------------------------------------------------------------------------------------- of the cells

_FIELD_OF = {path: name for name, path in COMMON.items()}


def _of_cells(path: str, value: Any, configuration: Configuration, seen: Seen | None) -> _Outcome:
    """Say which cells a key is for, and what the workers' last strategy cell has had of it."""
    if path in ("strategy.name", "parallel.strategy"):
        return _default_strategy(value, configuration, seen)
    name = _FIELD_OF.get(path) or path.partition(".")[2]
    takers = [each for each in STRATEGIES if name in fields_of(each)]
    default = configuration.strategy
    if path.startswith("strategy.") and default is not None:
        takers = [default.value]
    elif default is not None and default.value not in takers:
        words = (
            f"the default strategy, {default.value}, does not take it; with -s {' or '.join(takers)} it holds"
        )
        return _Outcome(f"{_NOT_APPLICABLE}{words}")
    if name in ("checkpoint_every", "keep") and configuration.value("checkpoint.dir") is None:
        return _Outcome(f"{_NOT_APPLICABLE}no checkpoint.dir; with --checkpoint DIR it holds")
    sets = f"{name} of {', '.join(takers)} cells that do not say it"
    if seen is None:
        return _Outcome(sets)
    if name == "devices":
        cores = {} if seen.has_gpu else cores_for_gpus(configuration)
        return _taking_part(sets, [cores.get(each, each) for each in value], takers[0], seen)
    return _in_last_cell(sets, name, takers, seen)


def _taking_part(sets: str, value: Sequence[str], taker: str, seen: Seen) -> _Outcome:
    """Say which workers take part in the next cell: those that are chosen, or all where that is no choice."""
    devices = seen.cells.fields_for(taker).get("devices", value)
    workers = tuple(worker for worker, device in seen.devices.items() if device in devices)
    if devices is value and len(workers) < len(seen.devices):
        return _Outcome(sets, took="not taken: workers are on other devices, and all take part")
    return _Outcome(sets, workers, f"the ranks of the next cell: {_listed(workers, seen)}")


def _in_last_cell(sets: str, name: str, takers: Sequence[str], seen: Seen) -> _Outcome:
    last = {worker: report["cell"] for worker, report in seen.reports.items() if report["cell"]}
    last = {worker: cell for worker, cell in last.items() if cell["name"] in takers}
    if not last:
        return _Outcome(sets, took="from the next cell on")
    strategy = next(iter(last.values()))["name"]
    described = STRATEGIES[strategy](**seen.cells.fields_for(strategy)).spec()
    wanted = described.options.get(name)  # None for torch's own way, which no worker is told
    took = tuple(worker for worker, cell in last.items() if cell["options"].get(name) == wanted)

    def words(option: Any) -> str:
        if option is None:
            return "the default"
        return size_text(option) if name == "fusion_buffer_size" else _text(option)

    others = [f"{w}: the cell said {words(c['options'].get(name))}" for w, c in last.items() if w not in took]
    said = f"in the last cell: {words(wanted)} on {_listed(took, seen)}" if took else ""
    return _Outcome(sets, took, "; ".join(filter(None, (said, *others))))


def _default_strategy(value: Any, configuration: Configuration, seen: Seen | None) -> _Outcome:
    if configuration.strategy is None:
        return _Outcome(f"{_NOT_APPLICABLE}parallel.enabled is false")
    if configuration.strategy.value != value:
        return _Outcome(f"{_NOT_APPLICABLE}the strategy block says {configuration.strategy.value}")
    sets = f"training cells without -s run under {value}"
    if seen is None:
        return _Outcome(sets)
    ran = tuple(w for w, report in seen.reports.items() if report["cell"] and report["cell"]["name"] == value)
    took = f"the last cell, on {_listed(ran, seen)}" if ran else "from the next cell on"
    return _Outcome(sets, ran, took)


# ------------------------------------------------------------------------------------- the declared workers


def _declared(configuration: Configuration, seen: Seen | None) -> Iterator[Effect]:
    for index, declared in enumerate(configuration.workers):
        worker, device = _nth(index, seen)
        path = f"workers[{index}]"
        took = "-" if seen is None else worker or "not started"
        sets = "the device of a worker" if not device else f"{worker} on {device}"
        workers = (worker,) if worker else ()
        yield Effect(f"{path}.device_id", declared.device_id, declared.where, sets, workers, took)
        if declared.ip:
            here = "this host, where the worker runs"
            is_here = seen is not None or is_loopback(declared.ip)
            sets = here if is_here else f"{_NOT_YET}unless it is this host: {REMOTE_WORKER}"
            yield Effect(f"{path}.ip", declared.ip, declared.where, sets, workers, took)
        if declared.capabilities:
            sets = "what its cells may use, compared with what it has"
            if any(word[0].isdigit() for word in declared.capabilities):
                sets = f"{sets}; a size: {_NOT_YET}{MEMORY_LIMIT}"
            yield Effect(f"{path}.capabilities", declared.capabilities, declared.where, sets, workers, took)


def _nth(index: int, seen: Seen | None) -> tuple[str, str]:
    placed = list(seen.devices.items()) if seen is not None else []
    return placed[index] if index < len(placed) else ("", "")
