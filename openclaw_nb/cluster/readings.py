"""How busy devices are: the readings of GPUs and of workers on cores, taken again and again.

    DeviceReader ─► DeviceReading, None for what cannot be read

GPUs are asked through ``nvidia-smi`` alone. Knows devices by number and workers by process id, nothing else of either.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from openclaw_nb.core.host import number_in, total_memory_bytes

_SMI_SECONDS = 10.0  # without persistence mode the driver wakes up each GPU first
_TREE_AGE_SECONDS = 10.0
_READING_AGE_SECONDS = 0.9  # asked more often, processor time is a few ticks of the clock
_MIB = 1024**2


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
        Seconds that only grow; by it, nothing is read more often than about once a second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._descendants = _Descendants(clock)
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
            if meter is None:
                meter = self._workers[pid] = _WorkerMeter(pid, self._descendants, self._clock)
                self._descendants.look_again()
            return meter.read()
        except (psutil.Error, OSError, ValueError, OverflowError):
            self._workers.pop(pid, None)
            return DeviceReading()

    def read_gpu(self, index: int) -> DeviceReading:
        """Read a GPU by its number in ``nvidia-smi``; one query serves all GPUs."""
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


class _Descendants:
    """The processes that workers have started, such as loader workers, and their memory.

    Looking costs milliseconds, a second's whole share of a panel: so once in a while, for all workers together.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looked_at: float | None = None
        self._children: dict[int, list[psutil.Process]] = {}
        self._memory: dict[psutil.Process, int] = {}

    def look_again(self) -> None:
        """Do not rely on what was seen before."""
        self._looked_at = None

    def of(self, pid: int) -> dict[psutil.Process, int]:
        """Return the descendants of a process with their own memory in bytes."""
        now = self._clock()
        if self._looked_at is None or now - self._looked_at > _TREE_AGE_SECONDS:
            self._looked_at = now
            self._look()
        return {child: self._memory_of(child) for child in self._below(pid)}

    def _look(self) -> None:
        self._children, self._memory = {}, {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                self._children.setdefault(process.ppid(), []).append(process)

    def _below(self, pid: int) -> Iterator[psutil.Process]:
        for child in self._children.get(pid, []):
            yield child
            yield from self._below(child.pid)

    def _memory_of(self, child: psutil.Process) -> int:
        if child not in self._memory:
            self._memory[child] = _own_memory(child)
        return self._memory[child]


class _WorkerMeter:
    """The processor time of one process and its descendants, between two looks."""

    def __init__(self, pid: int, descendants: _Descendants, clock: Callable[[], float]) -> None:
        self._process = psutil.Process(pid)
        self._descendants = descendants
        self._clock = clock
        self._read_at = -math.inf
        self._reading = DeviceReading()
        self._memory_total = total_memory_bytes()
        self._spent: dict[psutil.Process, float] = {}
        self._looked_at: float | None = None

    def read(self) -> DeviceReading:
        """Take a reading, or return the last one while it is new enough."""
        now = self._clock()
        if now - self._read_at > _READING_AGE_SECONDS or self._reading.utilisation_percent is None:
            self._reading, self._read_at = self._read(), now
        return self._reading

    def _read(self) -> DeviceReading:
        own = int(self._process.memory_info().rss)
        if (
            own == 0 or not self._process.is_running()
        ):  # it waits to be reaped, or its number is another's now
            raise psutil.NoSuchProcess(self._process.pid)
        below = self._descendants.of(self._process.pid)
        used = own + sum(below.values())
        busy = self._utilisation([self._process, *below])
        return DeviceReading(busy, used, self._memory_total)

    def _utilisation(self, processes: list[psutil.Process]) -> float | None:
        """Compare with the last look; a child that is new since then spent all of its time since then."""
        now, spent = time.monotonic(), {p: _processor_seconds(p) for p in processes}
        before, looked_at = self._spent, self._looked_at
        self._spent, self._looked_at = spent, now
        if looked_at is None or now <= looked_at:
            return None
        # One that has ended since the processes were looked for has no time left to tell.
        busy = sum(max(0.0, seconds - before.get(process, 0.0)) for process, seconds in spent.items())
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
    rows = query_gpus("index,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw")
    return {
        int(index): DeviceReading(
            number_in(busy), mebibytes(used), mebibytes(total), number_in(temperature), number_in(power)
        )
        for index, busy, used, total, temperature, power in rows
    }


def query_gpus(fields: str) -> list[list[str]]:
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


def mebibytes(word: str) -> int | None:
    """Read a number of MiB as bytes; None for what is no number."""
    number = number_in(word)
    return None if number is None else int(number * _MIB)
