"""Which processes belong to a cluster, and how they are ended.

Every process of a cluster carries ``OPENCLAW_CLUSTER=<id>`` in its environment, and so does everything
that those processes start. The mark, not a list of pids, says what is ours: it is still there after
the kernel that kept the list has died, and a pid that was given to somebody else does not carry it.

Nothing is signalled before pid, start time and mark have been compared again while a pidfd holds the
process, so that a signal cannot reach a stranger who got the pid in between.

This file knows no launcher, no ipyparallel and no files of a cluster. On Linux it reads ``/proc`` alone,
because the guardian process uses it and must stay small; elsewhere it asks psutil.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from openclaw_nb.core.errors import ClusterError, UsageError

CLUSTER_VARIABLE = "OPENCLAW_CLUSTER"

_HAS_PROC = os.path.exists("/proc/self/environ")
_HAS_PIDFD = hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal")
_POLL_SECONDS = 0.03
_KILL_SECONDS = 5.0  # SIGKILL acts at once; only a process stuck in the operating system outlives this


@dataclass(frozen=True)
class ProcessRecord:
    """One process of a cluster.

    Attributes
    ----------
    pid : int
        Its process id.
    create_time : float
        Start time as `create_time` gives it; with the pid it names one process for good.
    command : str
        Its command line, for people.
    """

    pid: int
    create_time: float
    command: str


def new_cluster_id() -> str:
    """Return a fresh random id of 128 bits, as 32 hexadecimal digits."""
    return os.urandom(16).hex()


def create_time(pid: int) -> float | None:
    """Return when a process was started, to tell it from a later one with the same pid.

    Parameters
    ----------
    pid : int
        The process to ask about.

    Returns
    -------
    float or None
        On Linux seconds after boot, which no change of the clock moves; elsewhere seconds since the epoch.
        None if there is no such process or it has ended and only waits to be reaped.
    """
    return _proc_create_time(pid) if _HAS_PROC else _psutil_create_time(pid)


def record_of(pid: int, cluster_id: str) -> ProcessRecord | None:
    """Return the record of a living process, if it carries the cluster's mark.

    Raises
    ------
    UsageError
        If `cluster_id` is not an id.
    """
    _check_id(cluster_id)
    return _record(pid, cluster_id)


def processes_of(cluster_id: str) -> list[ProcessRecord]:
    """List the living processes that carry a cluster's mark, the calling process left out.

    Parameters
    ----------
    cluster_id : str
        The cluster's id, 32 hexadecimal digits.

    Returns
    -------
    list of ProcessRecord
        In the order of their pids. Stopped processes are in it, ended ones (zombies) are not.

    Raises
    ------
    UsageError
        If `cluster_id` is not an id; an empty one must never match every unmarked process.
    """
    _check_id(cluster_id)
    records = (_record(pid, cluster_id) for pid in _all_pids() if pid != os.getpid())
    return sorted((r for r in records if r is not None), key=lambda r: r.pid)


def end_processes(
    cluster_id: str, *, grace_seconds: float = 3.0, spare: Collection[int] = ()
) -> list[ProcessRecord]:
    """End every process of a cluster, with those that they start meanwhile, and wait until they are gone.

    Parameters
    ----------
    cluster_id : str
        The cluster's id, 32 hexadecimal digits.
    grace_seconds : float
        How long they may take to end on SIGTERM before they get SIGKILL; 0 kills at once.
    spare : collection of int
        Pids to leave alone.

    Returns
    -------
    list of ProcessRecord
        All that were ended, in the order in which they were first signalled.

    Raises
    ------
    ClusterError
        If some could not be ended, with their pids and commands.
    """
    ended: dict[ProcessRecord, None] = {}
    asked: set[ProcessRecord] = set()
    left = _remaining(cluster_id, spare)
    deadline = time.monotonic() + grace_seconds
    while left and time.monotonic() < deadline:
        for record in left:
            # One SIGTERM each, as a second one would cut a clean-up short; one that could not be sent is sent again.
            if record not in asked and send_signal(record, cluster_id, signal.SIGTERM):
                asked.add(record)
        ended.update(dict.fromkeys(left))
        time.sleep(_POLL_SECONDS)
        left = _remaining(cluster_id, spare)
    ended.update(dict.fromkeys(_kill(cluster_id, spare)))
    return list(ended)


def kill(pid: int, cluster_id: str) -> bool:
    """End a process at once (SIGKILL) if it is one of the cluster's; return whether it was."""
    record = record_of(pid, cluster_id)
    return record is not None and send_signal(record, cluster_id, signal.SIGKILL)


def send_signal(record: ProcessRecord, cluster_id: str, number: int) -> bool:
    """Signal a process of a cluster if it is still the one that was recorded.

    Parameters
    ----------
    record : ProcessRecord
        As `processes_of` gave it.
    cluster_id : str
        The cluster that it must belong to.
    number : int
        The signal.

    Returns
    -------
    bool
        Whether the signal was sent; False if the process has ended or the pid is another's now.
    """
    try:
        if not _HAS_PIDFD:
            return _send_checked(record, cluster_id, number, None)
        handle = os.pidfd_open(record.pid)
        try:
            return _send_checked(record, cluster_id, number, handle)
        finally:
            os.close(handle)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # seen again in the next scan, and named in the end


def _send_checked(record: ProcessRecord, cluster_id: str, number: int, handle: int | None) -> bool:
    """Compare pid, start time and mark now, and only then send."""
    now = _record(record.pid, cluster_id)
    if now is None or now.create_time != record.create_time:
        return False
    if handle is None:
        os.kill(record.pid, number)
    else:
        signal.pidfd_send_signal(handle, number)
    return True


def _kill(cluster_id: str, spare: Collection[int]) -> list[ProcessRecord]:
    """SIGKILL until a scan finds nothing: a process may have started another one just before it died."""
    killed: dict[ProcessRecord, None] = {}
    deadline = time.monotonic() + _KILL_SECONDS
    while left := _remaining(cluster_id, spare):
        if time.monotonic() > deadline:
            names = "; ".join(f"pid {r.pid} ({r.command or 'no command line'})" for r in left)
            raise ClusterError(
                f"{len(left)} process(es) of cluster {cluster_id} could not be ended in "
                f"{_KILL_SECONDS:.0f} s of SIGKILL: {names}. They hang in the operating system or belong to "
                "another user; end them by pid, or restart the host."
            )
        for record in left:
            send_signal(record, cluster_id, signal.SIGKILL)
        killed.update(dict.fromkeys(left))
        time.sleep(_POLL_SECONDS)
    return list(killed)


def _remaining(cluster_id: str, spare: Collection[int]) -> list[ProcessRecord]:
    return [record for record in processes_of(cluster_id) if record.pid not in spare]


def _check_id(cluster_id: str) -> None:
    if len(cluster_id) != 32 or not set(cluster_id) <= set("0123456789abcdef"):
        raise UsageError(
            f"{cluster_id!r} is not the id of a cluster: it must be 32 hexadecimal digits, "
            "as new_cluster_id() makes them."
        )


def _all_pids() -> Iterator[int]:
    if _HAS_PROC:
        return (int(name) for name in os.listdir("/proc") if name.isdigit())
    import psutil

    return iter(psutil.pids())


def _record(pid: int, cluster_id: str) -> ProcessRecord | None:
    """Describe a process if it lives and carries the mark."""
    return _proc_record(pid, cluster_id) if _HAS_PROC else _psutil_record(pid, cluster_id)


def _proc_record(pid: int, cluster_id: str) -> ProcessRecord | None:
    mark = f"{CLUSTER_VARIABLE}={cluster_id}".encode()
    if mark not in _read(pid, "environ").split(b"\0"):
        return None
    started = _proc_create_time(pid)
    if started is None:
        return None
    words = _read(pid, "cmdline").rstrip(b"\0").split(b"\0")
    return ProcessRecord(pid, started, b" ".join(words).decode(errors="replace"))


def _proc_create_time(pid: int) -> float | None:
    # The command's name may hold blanks and brackets, so the fields are counted from the last bracket on:
    # the first of them is the state, the twentieth the start time in clock ticks.
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _read(pid: int, name: str) -> bytes:
    """Read a file of ``/proc/<pid>``; empty if the process is gone or belongs to somebody else."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _psutil_record(pid: int, cluster_id: str) -> ProcessRecord | None:
    import psutil

    try:
        process = psutil.Process(pid)
        if process.environ().get(CLUSTER_VARIABLE) != cluster_id:
            return None
        started = _psutil_create_time(pid)
        return None if started is None else ProcessRecord(pid, started, " ".join(process.cmdline()))
    except (psutil.Error, OSError):
        return None


def _psutil_create_time(pid: int) -> float | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except (psutil.Error, OSError):
        return None
