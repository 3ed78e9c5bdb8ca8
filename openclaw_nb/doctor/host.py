"""Checks of this host: what workers need of it, before any is started.

    Wanted (how many workers, which backend) ──> checks ──> findings

Starts nothing but a Python that says what torch can do: the kernel itself never imports it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openclaw_nb.cluster.devices import MEMORY_PER_WORKER_BYTES, list_devices, threads_per_worker
from openclaw_nb.cluster.files import runtime_directory
from openclaw_nb.cluster.mpiexec import find_mpiexec, require_mpi4py
from openclaw_nb.core.errors import UsageError
from openclaw_nb.core.host import available_memory_bytes, usable_cores
from openclaw_nb.core.text import counted, is_set, size_text
from openclaw_nb.doctor.findings import FAIL, OK, SKIP, WARN, Check, Finding

_SHARED_MEMORY = Path("/dev/shm")
_LITTLE_SHARED_MEMORY = 256 * 1024**2
_TORCH_SECONDS = 120
_ASK_TORCH = """
import json, torch, torch.distributed as dist
print(json.dumps({
    "version": torch.__version__, "gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": dist.is_available() and dist.is_nccl_available(),
    "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
}))
"""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the host is to bear.

    Attributes
    ----------
    workers : int or None
        How many; None for as many as fit.
    threads : int or None
        How many each computes with; None where the cores are shared out.
    backend, communication : str
        As for `openclaw_nb.session.OpenClawCluster`.
    interface : str
        The network interface that was named, or "".
    host, port
        Where the master listens for workers, or is to.
    runs : bool
        Whether these workers run already.
    """

    workers: int | None = None
    threads: int | None = None
    backend: str = "local"
    communication: str = "auto"
    interface: str = ""
    host: str = "127.0.0.1"
    port: int = 50051
    runs: bool = False


def checks_of_host(wanted: Wanted) -> list[tuple[str, Check]]:
    """Return the checks, by name."""
    return [
        ("cores", lambda: _cores(wanted)),
        ("memory", lambda: _memory(wanted)),
        ("shared memory", _shared_memory),
        ("files", _files),
        ("torch", lambda: _torch(wanted)),
        ("mpi", lambda: _mpi(wanted)),
    ]


def _cores(wanted: Wanted) -> Iterator[Finding]:
    cores = usable_cores()
    workers = wanted.workers if wanted.workers is not None else cores
    threads = wanted.threads or threads_per_worker(workers, cores)
    gpus = [device for device in list_devices() if device.kind == "gpu"]
    seen = f"{counted(workers, 'worker')} × {counted(threads, 'thread')} on {counted(cores, 'core')} to use"
    on_gpus = gpus and wanted.backend in ("local", "cuda")
    if on_gpus or workers * threads <= cores:
        yield Finding("cores", OK, seen)
        return
    key = "parallel.workers" if workers > cores else "parallel.omp_threads"
    at_most = cores if workers > cores else cores // workers
    todo = (
        f"Take at most {key}: {at_most}. With --oversubscribe workers share cores, and slow each other down."
    )
    may_share = wanted.runs or is_set(os.environ, "OPENCLAW_OVERSUBSCRIBE")
    yield Finding("cores", WARN if may_share else FAIL, seen, todo, key)


def _memory(wanted: Wanted) -> Iterator[Finding]:
    available = available_memory_bytes()
    if wanted.runs:
        yield _memory_left(available)
        return
    workers = wanted.workers or 1
    each = available // workers
    seen = f"{size_text(available)} available, {size_text(each)} for each of {counted(workers, 'worker')}"
    if each >= MEMORY_PER_WORKER_BYTES:
        yield Finding("memory", OK, seen)
        return
    fitting = available // MEMORY_PER_WORKER_BYTES
    todo = f"Each needs {size_text(MEMORY_PER_WORKER_BYTES)}: free memory, or take " + (
        f"at most parallel.workers: {fitting}." if fitting else "a larger machine or container."
    )
    yield Finding("memory", FAIL, seen, todo, "parallel.workers")


def _memory_left(available: int) -> Finding:
    seen = f"{size_text(available)} available beside the workers that run"
    if available >= MEMORY_PER_WORKER_BYTES // 2:
        return Finding("memory", OK, seen)
    todo = "Take smaller batches, or fewer workers (parallel.workers), before a process is ended for want of memory."
    return Finding("memory", WARN, seen, todo, "parallel.workers")


def _shared_memory() -> Iterator[Finding]:
    if not os.access(_SHARED_MEMORY, os.W_OK):
        todo = "Variables go by disk, and gradients by sockets: slower. Mount a tmpfs there (docker run --shm-size=1g)."
        yield Finding("shared memory", WARN, f"{_SHARED_MEMORY} cannot be written", todo)
        return
    usage = shutil.disk_usage(_SHARED_MEMORY)
    seen = f"{size_text(usage.free)} of {size_text(usage.total)} free in {_SHARED_MEMORY}"
    if usage.free >= _LITTLE_SHARED_MEMORY:
        yield Finding("shared memory", OK, seen)
        return
    todo = "Large variables go by disk. Give the container more (docker run --shm-size=1g), or remove what others left."
    yield Finding("shared memory", WARN, seen, todo)


def _files() -> Iterator[Finding]:
    directory = runtime_directory()
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        todo = "Set OPENCLAW_RUNTIME_DIR to a directory that you can write."
        yield Finding("files", FAIL, f"clusters' files cannot be written to {directory}", todo)
        return
    free = shutil.disk_usage(there).free
    state = OK if free >= _LITTLE_SHARED_MEMORY else WARN
    todo = (
        "" if state == OK else "Free space there, or set OPENCLAW_RUNTIME_DIR to a directory on another disk."
    )
    yield Finding("files", state, f"{directory}: {size_text(free)} free", todo)


def _torch(wanted: Wanted) -> Iterator[Finding]:
    """Ask a Python of its own what torch can do."""
    asked = [sys.executable, "-c", _ASK_TORCH]
    done = subprocess.run(asked, check=False, capture_output=True, text=True, timeout=_TORCH_SECONDS)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        todo = f"Workers need it in the same Python, {sys.executable}: pip install torch."
        yield Finding("torch", FAIL, f"torch cannot be imported: {last}", todo)
        return
    told = json.loads(done.stdout.splitlines()[-1])
    yield Finding("torch", OK, f"torch {told['version']}, {counted(told['gpus'], 'GPU')} to use")
    yield from _communication(told, wanted)


def _communication(told: dict[str, object], wanted: Wanted) -> Iterator[Finding]:
    gpus = [device.id for device in list_devices() if device.kind == "gpu"]
    if told["gloo"]:
        yield Finding("gloo", OK, "this torch has it")
    else:
        yield Finding(
            "gloo", FAIL, "this torch is built without it", "Install a build of torch with torch.distributed."
        )
    missing = _why_no_nccl(told, gpus)
    if not missing:
        yield Finding("nccl", OK, f"{told['gpus']} GPUs can use it")
    elif wanted.communication == "nccl" or gpus:
        todo = "Workers use gloo in its place. Take parallel.communication: gloo or auto, or put right what is missing."
        yield Finding("nccl", WARN, missing, todo, "parallel.communication")
    else:
        yield Finding("nccl", SKIP, f"{missing}; workers on cores use gloo and shared memory")


def _why_no_nccl(told: dict[str, object], gpus: list[str]) -> str:
    if not gpus:
        return "nvidia-smi shows no GPU"
    if not told["nccl"]:
        return f"{', '.join(gpus)} are there, but this torch has no NCCL: it is a build for CPUs"
    return (
        ""
        if told["gpus"]
        else f"{', '.join(gpus)} are there, but torch cannot use them (driver, or CUDA_VISIBLE_DEVICES)"
    )


def _mpi(wanted: Wanted) -> Iterator[Finding]:
    is_wanted = "mpi" in (wanted.backend, wanted.communication)
    try:
        seen = find_mpiexec()
        if wanted.communication == "mpi":
            require_mpi4py()
    except UsageError as error:
        if is_wanted:
            todo = "Install it, or take parallel.backend: local."
            yield Finding("mpi", FAIL, str(error), todo, "parallel.backend")
        else:
            yield Finding("mpi", SKIP, "no mpiexec; the backend mpi alone needs it")
        return
    yield Finding("mpi", OK, seen)
    yield from _library_path(is_wanted)


def _library_path(is_wanted: bool) -> Iterator[Finding]:
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    missing = [folder for folder in folders if not os.path.isdir(folder)]
    if missing and is_wanted:
        todo = "Take out of LD_LIBRARY_PATH what is not there: libraries of MPI and CUDA are looked for in it first."
        yield Finding("LD_LIBRARY_PATH", WARN, f"not there: {', '.join(missing)}", todo)
    else:
        seen = os.pathsep.join(folders) or "not set, and not needed: MPI's wheels find their libraries"
        yield Finding("LD_LIBRARY_PATH", OK, seen)
