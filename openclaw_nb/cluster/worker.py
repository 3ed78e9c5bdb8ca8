"""A worker as the notebook side knows it: a handle, not the process itself (that is `engine.agent`)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from openclaw_nb.cluster.devices import Device
from openclaw_nb.core.errors import UsageError, unknown_name


@dataclass
class Worker:
    """One worker of the cluster.

    ``number`` is its engine id and its rank order; ``busy_with`` is the run that it has not left although
    the person got the prompt back, or "". ``epoch`` is its group's and ``rank`` its own there when it last said so;
    ``seen`` is when it last told anything, by the clock that only grows. ``warm`` says that its process has imported
    what a strategy cell needs; ``spare`` that it is in no group until another worker dies; ``removed`` that it is
    gone for good; ``guest`` that another process has started it, with which it ends: none can take its place.
    """

    number: int
    device: Device
    alive: bool = False
    pid: int | None = None
    store_port: int = 0
    busy_with: str = ""
    epoch: int = 0
    rank: int = 0
    warm: bool = False
    spare: bool = False
    removed: bool = False
    guest: bool = False
    seen: float = field(default_factory=time.monotonic)

    @property
    def id(self) -> str:
        """The worker's id, e.g. ``worker-0``."""
        return f"worker-{self.number}"

    @property
    def state(self) -> str:
        """``idle``, ``busy``, ``spare``, ``dead`` or, before its process is there, ``joining``."""
        if not self.alive:
            return "joining" if self.guest else "dead"
        if self.spare:
            return "spare"
        return "busy" if self.busy_with else "idle"


def find_worker(workers: Sequence[Worker], which: str) -> Worker:
    """Return the worker of this id, or the one on this device.

    Raises
    ------
    UnknownNameError
        When there is none.
    UsageError
        When several share the device.
    """
    found = [worker for worker in workers if which in (worker.id, worker.device.id)]
    if not found:
        raise unknown_name("worker", str(which), [worker.id for worker in workers])
    if len(found) > 1:
        listed = ", ".join(worker.id for worker in found)
        raise UsageError(f"{which} has several workers: {listed}. Name one of them.")
    return found[0]


class HasSpare(Protocol):
    """A worker, or a record of one."""

    @property
    def spare(self) -> bool:
        """Whether it waits to take another's place."""


def count_text(workers: Iterable[HasSpare]) -> str:
    """Return how many workers there are, such as ``2 workers and 1 spare``."""
    spares = [worker.spare for worker in workers]
    num_spares, num_working = spares.count(True), spares.count(False)
    words = f"{num_working} worker{'s' * (num_working != 1)}"
    return f"{words} and {num_spares} spare{'s' * (num_spares != 1)}" if num_spares else words
