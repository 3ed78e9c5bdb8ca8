"""What each worker's device does now: one record a worker."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass

from openclaw_nb.cluster.readings import DeviceReader, DeviceReading
from openclaw_nb.cluster.worker import Worker


@dataclass(frozen=True, kw_only=True)
class DeviceStatus:
    """One worker's device.

    A reading that does not exist on this machine is None. Utilisation is in percent, memory in bytes,
    temperature in degrees Celsius, power in watts. ``seen`` is when the worker last told what it does, in seconds since
    the epoch: one that is stopped, or in native code that lets nothing else run, falls silent. ``spare`` says that
    it waits to take another's place.
    """

    id: str
    worker: str
    host: str
    name: str
    state: str
    utilisation: float | None
    memory_used: int | None
    memory_total: int | None
    temperature: float | None
    power: float | None
    pid: int | None
    work: str
    seen: float
    spare: bool = False


class StatusReader:
    """Reads devices, from any thread; keeps what is needed for readings that are differences in time."""

    def __init__(self) -> None:
        self._reader = DeviceReader()
        self._lock = threading.Lock()

    def _reading(self, worker: Worker) -> DeviceReading:
        with self._lock:  # the panel, a cell and the metrics' endpoint may ask at once
            if worker.device.kind == "gpu":
                return self._reader.read_gpu(worker.device.index)
            return self._reader.read_cpu_worker(worker.pid) if worker.pid else DeviceReading()

    def read(self, worker: Worker, work: str) -> DeviceStatus:
        """Return the record of one worker."""
        reading = self._reading(worker)
        if worker.state == "idle":
            worker.seen = time.monotonic()  # it has nothing to tell, but its process is there
        return DeviceStatus(
            id=worker.device.id,
            worker=worker.id,
            host=socket.gethostname(),
            name=worker.device.name,
            state=worker.state,
            utilisation=reading.utilisation_percent,
            memory_used=reading.memory_used_bytes,
            memory_total=reading.memory_total_bytes,
            temperature=reading.temperature_celsius,
            power=reading.power_watts,
            pid=worker.pid,
            work=work,
            seen=time.time() - (time.monotonic() - worker.seen),  # right also when the host's clock was set
            spare=worker.spare,
        )
