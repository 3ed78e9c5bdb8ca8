"""More workers, and fewer, also while a cell runs.

Knows which workers there are and the cell that runs; does not know how ranks come and go in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from openclaw_nb.cluster.devices import choose_more, list_devices
from openclaw_nb.cluster.membership import Membership
from openclaw_nb.cluster.run import CellRun
from openclaw_nb.cluster.worker import Worker, find_worker
from openclaw_nb.core.errors import UsageError
from openclaw_nb.core.host import available_memory_bytes
from openclaw_nb.core.text import is_set

_POLL_SECONDS = 0.02
_APART_SECONDS = 600.0


class Resizer:
    """Changes the number of workers.

    Parameters
    ----------
    members : Membership
        The workers.
    run : CellRun or None
        The cell that runs, or ran last.
    save : callable
        Keeps which workers there are, for another owner of the cluster.
    times : list of float
        When their number was changed before; added to.
    oversubscribe : bool
        Let them share devices, and start with little memory.
    """

    def __init__(
        self,
        members: Membership,
        run: CellRun | None,
        save: Callable[[], None],
        times: list[float],
        *,
        oversubscribe: bool,
    ) -> None:
        self._members, self._save, self._times = members, save, times
        self._run = run if run is not None and run.running else None
        self._oversubscribe = oversubscribe or is_set(os.environ, "OPENCLAW_OVERSUBSCRIBE")

    def add(self, where: int | str) -> list[Worker]:
        """Start workers; see `MasterNode.add_worker`."""
        members = self._members
        devices = choose_more(
            where,
            [worker.device for worker in members.present],
            available=list_devices(),
            memory_available_bytes=available_memory_bytes(),
            oversubscribe=self._oversubscribe,
        )
        self._warn_of_haste()
        added = members.add(devices)
        self.take_in(added)
        return added

    def take_in(self, added: Sequence[Worker]) -> None:
        """Let workers that are fit for a group take part, in the cell that runs or after it."""
        self._save()
        for worker in added:
            if self._run is not None:
                self._run.offer(worker.number)
        if self._run is None or not self._run.running:
            self._members.mend()

    def remove(self, which: str) -> None:
        """End a worker; see `MasterNode.remove_worker`."""
        members = self._members
        worker = find_worker(members.present, which)
        if members.members == [worker]:
            raise UsageError(f"{worker.id} is the last worker. %openclaw stop ends the cluster.")
        if self._run is not None and worker.number in self._run.ranks.values():
            self._let_leave(worker, self._run)
        self._warn_of_haste()
        if not worker.removed:
            members.remove(worker.number)
        if self._run is None or not self._run.running:
            members.mend()
        self._save()

    def resize(self, num_workers: int) -> list[Worker]:
        """Add or remove workers; see `MasterNode.resize_workers`."""
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
            raise UsageError(
                f"num_workers={num_workers!r}: give a whole number, 1 or more. %openclaw stop ends all of them."
            )
        members = self._members.members
        if num_workers > len(members):
            self.add(num_workers - len(members))
        for worker in reversed(members[num_workers:]):
            self.remove(worker.id)
        return self._members.members

    def _let_leave(self, worker: Worker, run: CellRun) -> None:
        if not run.is_elastic:
            raise UsageError(
                f"{worker.id} runs a cell that needs all its workers. Wait for its end, or %openclaw interrupt it."
            )
        run.dismiss(worker.number)
        while run.running and not worker.removed:
            time.sleep(_POLL_SECONDS)

    def _warn_of_haste(self) -> None:
        now = time.monotonic()
        if self._run is not None and self._times and now - self._times[-1] < _APART_SECONDS:
            self._members.notes.append(
                f"The number of workers changed {now - self._times[-1]:.0f} s ago already. Each change costs a pause: "
                f"leave {_APART_SECONDS / 60:.0f} minutes between them."
            )
        self._times.append(now)
