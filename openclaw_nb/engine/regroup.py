"""How a running cell gets to its next group: asked for on the control thread, joined on the main thread.

Knows the worker's group and the messages; does not know what the ranks do in a group.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from openclaw_nb.core.errors import GroupError, ReleasedError
from openclaw_nb.engine.outbox import Outbox
from openclaw_nb.plan.wishes import Wishes
from openclaw_nb.protocol.messages import AtHead, Meet, Regroup, Regrouped

if TYPE_CHECKING:
    from openclaw_nb.engine.group.ranks import Ranks
    from openclaw_nb.engine.group.service import GroupService

# A death is known at once, or after some seconds of missed heartbeats.
_PATIENCE_SECONDS = 60.0


class CellRegrouper:
    """The groups that one cell is to go on in.

    Parameters
    ----------
    service : GroupService
        The worker's group.
    outbox : Outbox
        Where it is told that the cell goes on.
    worker : int
        This worker's number.
    run_id : str
        The cell.
    on_joined : callable
        Called on the main thread when this worker has joined a group.

    Attributes
    ----------
    wishes : Wishes
        Who is to come and go.
    """

    def __init__(
        self,
        service: GroupService,
        outbox: Outbox,
        worker: int,
        run_id: str,
        on_joined: Callable[[], None],
    ) -> None:
        self._service, self._outbox, self._on_joined = service, outbox, on_joined
        self.wishes = Wishes()
        self._worker, self._run_id = worker, run_id
        self._asked: queue.SimpleQueue[tuple[Regroup, float] | None] = queue.SimpleQueue()
        self._next: tuple[Regroup, float] | None = None

    # ------------------------------------------------------------------------------- control thread

    def ask(self, command: Regroup) -> None:
        """Take the next group, and end all waits in the present one."""
        if command.group.epoch <= self._service.epoch:
            return
        self._asked.put((command, time.monotonic()))
        self._service.release(command.cause)

    def ask_to_meet(self, command: Meet) -> None:
        """Take note of who is to come and go."""
        self.wishes = Wishes(command.num_ranks, command.num_new, command.leaves)

    def end(self) -> None:
        """Let the cell end: there is no next group."""
        self._asked.put(None)

    # ---------------------------------------------------------------------------------- main thread

    def wait(self) -> bool:
        """Wait until the next group is asked for; return False when the cell is to end instead.

        It ends, too, when none is asked for in time: then nobody died, and the ranks cannot reach each other.
        """
        try:
            self._next = self._asked.get(timeout=_PATIENCE_SECONDS)
        except queue.Empty:
            return False
        while self._next is not None and not self._asked.empty():  # only the newest counts
            self._next = self._asked.get()
        return self._next is not None

    def join(self, ranks: Ranks) -> None:
        """Join the group that was asked for last, and let ``ranks`` be its ranks."""
        self._form()
        assert self._service.internal is not None
        ranks.bind(self._service.internal, self._service.shortcut)

    def _form(self) -> None:
        assert self._next is not None
        self._service.form(self._next[0].group)
        self._on_joined()

    def join_first(self) -> None:
        """Join, as a newcomer, the first group that can be formed.

        Raises
        ------
        ReleasedError
            When the cell ends before.
        """
        while self.wait():
            try:
                self._form()
            except (ReleasedError, GroupError):
                continue
            return
        raise ReleasedError("the cell was ended before the newcomer was let in")

    def arrive(self, *, lets_in: bool) -> None:
        """Tell that this rank waits at a loop's head for the next group."""
        self.wishes = Wishes()
        self._outbox.drain()  # what a rank that leaves has shown comes before it is gone
        place = AtHead(worker=self._worker, run_id=self._run_id, epoch=self._service.epoch, lets_in=lets_in)
        self._outbox.publish(place)

    def tell(self, num_steps: int) -> None:
        """Tell that the ranks go on, after so many steps."""
        assert self._next is not None
        command, asked_at = self._next
        self._outbox.publish(
            Regrouped(
                worker=self._worker,
                run_id=self._run_id,
                epoch=command.group.epoch,
                world_size=command.group.world_size,
                num_steps=num_steps,
                seconds=time.monotonic() - asked_at,
            )
        )
