"""How the processes of workers are started, and what the death of one means: the backends of ``%openclaw start``.

    local   a process a worker; one that died is replaced, all others go on
    thread  the same, on cores alone
    cuda    the same, on GPUs alone
    mpi     one mpiexec starts all; it ends all when one dies, so nothing can be mended

Knows the door and devices; does not know groups or cells.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

from openclaw_nb.cluster.devices import Device, threads_per_worker
from openclaw_nb.cluster.ipp import Door
from openclaw_nb.cluster.mpiexec import find_mpiexec, mpi_environment, require_mpi4py
from openclaw_nb.cluster.worker import Worker
from openclaw_nb.core.errors import UsageError, unknown_name
from openclaw_nb.core.host import usable_cores

COMMUNICATIONS = ("auto", "nccl", "gloo", "mpi")


class Launch(Protocol):
    """One backend, for one cluster.

    Attributes
    ----------
    replaces : bool
        Whether a new process can take the place of one that died.
    only : str
        The kind of devices that its workers run on; "" for any.
    """

    replaces: ClassVar[bool]
    only: ClassVar[str]

    def start(self, workers: Sequence[Worker], num_workers: int) -> None:
        """Start the processes of these workers, of ``num_workers`` in all; they register later."""

    def environment_for(self, worker: Worker, num_workers: int) -> dict[str, str]:
        """Return the variables of a worker that another process starts, of ``num_workers`` in all."""

    def last_words(self, worker: Worker) -> str:
        """Return what the worker's process, and whoever started it, wrote last."""

    def remarks(self) -> list[str]:
        """Return what a person should know about the way the workers were started."""

    def end(self) -> None:
        """End what cannot go on after a death."""


class LocalLaunch:
    """A process a worker.

    Parameters
    ----------
    door : Door
        How to start engines.
    host : str
        Address for the workers' stores.
    memory : callable
        Makes the cluster's folder in shared memory and returns it.
    settings : mapping of str to str
        Further variables for each worker, which win over others.
    """

    replaces: ClassVar[bool] = True
    only: ClassVar[str] = ""

    def __init__(
        self, door: Door, host: str, memory: Callable[[], str], settings: Mapping[str, str] | None = None
    ) -> None:
        self._door, self._host, self._settings = door, host, dict(settings or {})

    def start(self, workers: Sequence[Worker], num_workers: int) -> None:
        """Start a process for each of these workers."""
        for worker in workers:
            self._door.start_engine(worker.number, self._environment(worker, num_workers), self._host)

    def environment_for(self, worker: Worker, num_workers: int) -> dict[str, str]:
        """Return all variables of a worker that another process starts."""
        return self._door.engine_environment(self._environment(worker, num_workers), self._host)

    def _environment(self, worker: Worker, num_workers: int) -> dict[str, str]:
        common = {**_common_environment(num_workers), **self._settings}
        return {**common, **_device_environment(worker.device)}

    def last_words(self, worker: Worker) -> str:
        """Return the end of the worker's log."""
        if worker.guest:
            return "(the process that started it has its log)"
        return self._door.log_tail(f"ipengine-{self._door.cluster_id}-{worker.id}-")

    def remarks(self) -> list[str]:
        """Return nothing: there is nothing to know."""
        return []

    def end(self) -> None:
        """Leave the others: they stand by themselves."""


class ThreadLaunch(LocalLaunch):
    """A process a core, with OpenMP's threads in it, and no GPU."""

    only: ClassVar[str] = "cpu"


class CudaLaunch(LocalLaunch):
    """A process a GPU."""

    only: ClassVar[str] = "gpu"


class MpiLaunch:
    """One mpiexec for all workers, whose numbers are their ranks in MPI.

    Parameters
    ----------
    door, host, memory, settings
        As for `LocalLaunch`.
    """

    replaces: ClassVar[bool] = False
    only: ClassVar[str] = ""

    def __init__(
        self, door: Door, host: str, memory: Callable[[], str], settings: Mapping[str, str] | None = None
    ) -> None:
        self._door, self._host, self._memory, self._settings = door, host, memory, dict(settings or {})

    def start(self, workers: Sequence[Worker], num_workers: int) -> None:
        """Start all workers."""
        assert len(workers) == num_workers, "an MPI set is started as a whole"
        own = mpi_environment(
            self._door.directory, self._memory(), as_root=os.geteuid() == 0, given=os.environ
        )
        self._door.start_engines_by_mpi(
            find_mpiexec(),
            {**own, **_common_environment(num_workers), **self._settings},
            [_device_environment(worker.device) for worker in workers],
            self._host,
        )

    def environment_for(self, worker: Worker, num_workers: int) -> dict[str, str]:
        """Refuse: one mpiexec starts all workers of a set."""
        raise UsageError(f"No worker can join here. {SET_ENDED}")

    def last_words(self, worker: Worker) -> str:
        """Return the end of the worker's log, and of what mpiexec has to say."""
        log = self._door.log_tail(f"ipengine-{self._door.cluster_id}-{worker.id}-")
        return "\n".join(filter(None, (log, self._door.output_of_set(worker.number))))

    def remarks(self) -> list[str]:
        """Say so where mpiexec can be reached from other hosts: Open MPI 5.0 has no setting against it."""
        ports = ", ".join(map(str, ports_open_to_others(self._door.pid_of_set(0))))
        if not ports:
            return []
        own_tcp = "tcp" in self._settings.get("OMPI_MCA_btl", "")
        workers = "and so do the workers (mpi_shared_memory: false)" if own_tcp else "no worker does"
        return [
            f"mpiexec listens on every network interface of this host (port {ports}), for daemons of its own; "
            f"{workers}. Where other hosts can reach this one, close these ports or use the backend local."
        ]

    def end(self) -> None:
        """End what is left of the set: mpiexec takes a rank that leaves without an error for one that is done."""
        self._door.end_sets()


BACKENDS: dict[str, type[LocalLaunch | MpiLaunch]] = {
    "local": LocalLaunch,
    "thread": ThreadLaunch,
    "cuda": CudaLaunch,
    "mpi": MpiLaunch,
}

SET_ENDED = (
    "One death ends an MPI set: the variables of all workers are gone. Start anew: %openclaw stop, then "
    "%openclaw start --backend mpi. With the backend local only the worker that died is replaced."
)


def check_words(backend: str, communication: str) -> None:
    """Check what was asked for against each other.

    Raises
    ------
    UsageError
        If a word is not one of those allowed, or the two do not go together.
    """
    if backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)
    if communication not in COMMUNICATIONS:
        raise unknown_name("communication", communication, COMMUNICATIONS)
    if communication == "mpi" and backend != "mpi":
        raise UsageError(
            f"The communication mpi needs workers started by mpiexec, and the backend {backend} starts them otherwise. "
            "Say both: %openclaw start --backend mpi --communication mpi; or leave the communication out."
        )


def check_installed(backend: str, communication: str) -> None:
    """Raise a UsageError when this machine lacks what the words need."""
    if backend == "mpi":
        find_mpiexec()
    if communication == "mpi":
        require_mpi4py()


def devices_for(backend: str, available: Sequence[Device]) -> list[Device]:
    """Return the devices that a backend's workers can run on.

    Raises
    ------
    UsageError
        When there are none.
    """
    only = BACKENDS[backend].only
    found = [device for device in available if only in ("", device.kind)]
    if not found:
        raise UsageError(
            f"The backend {backend} runs one worker a GPU, and nvidia-smi shows no GPU on this machine. Take the "
            "backend local, or write `fallback: cpu` in the configuration."
        )
    return found


def check_devices(communication: str, devices: Sequence[Device]) -> None:
    """Raise a UsageError when the workers' devices cannot communicate this way."""
    gpus = [device.id for device in devices if device.kind == "gpu"]
    if communication == "mpi" and gpus:
        raise UsageError(
            f"The communication mpi sums tensors in the host's memory, and the workers would be on {', '.join(gpus)}. "
            "Leave it out (auto takes nccl on GPUs), or take cores: --devices CPU-0,CPU-1."
        )


def ports_open_to_others(pid: int) -> list[int]:
    """Return the ports on which a process listens on other addresses than loopback."""
    import psutil

    try:
        sockets = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:  # it is gone
        return []
    listening = [each.laddr for each in sockets if each.status == psutil.CONN_LISTEN]
    return sorted({at.port for at in listening if not at.ip.startswith("127.") and at.ip != "::1"})


def _common_environment(num_workers: int) -> dict[str, str]:
    threads = os.environ.get("OMP_NUM_THREADS") or str(threads_per_worker(num_workers, usable_cores()))
    return {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}


def _device_environment(device: Device) -> dict[str, str]:
    visible = str(device.index) if device.kind == "gpu" else ""
    return {"OPENCLAW_DEVICE": device.id, "CUDA_VISIBLE_DEVICES": visible}
