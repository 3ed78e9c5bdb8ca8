"""Messages of any shape from one rank to another, which do not hold up whoever sends them.

    send ──> lane "to p" ──> the pieces of a message (`packing`), one after the other
    expect ──> lane "from p", in order ──> Expected.wait: header and tensors

Each pair has a lane, a thread, in each direction, so that a send never waits behind a receive. Waits are
`PendingWork`s and end on release.

Knows groups and messages; does not know what the messages are for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.group.collectives import PendingWork, ReleasableGroup
from openclaw_nb.engine.group.packing import Message, pack, unpack

_TAG = 77
# One name for all: ranks that wait in different calls are taken to wait for each other in vain.
_CALL = "a message of another stage"


class Expected:
    """A message that is on its way."""

    def __init__(self, work: PendingWork, box: list[Message]) -> None:
        self._work, self._box = work, box

    def wait(self) -> Message:
        """Return the message when it is there.

        Raises
        ------
        ReleasedError
            When the group was released meanwhile.
        """
        self._work.wait()
        return self._box[0]


class Exchange:
    """Sends to and receives from the other ranks of a group.

    Parameters
    ----------
    group : ReleasableGroup
        The ranks, over gloo.

    Raises
    ------
    RefusedError
        For a group over NCCL, of which no two threads may use one communicator.
    """

    def __init__(self, group: ReleasableGroup) -> None:
        if group.inner.name() != "gloo":
            raise RefusedError(
                "Stages exchange activations by gloo. Start the workers with %openclaw start --communication gloo."
            )
        self._group = group
        self._sent: deque[PendingWork] = deque()

    def send(self, peer: int, header: Any, tensors: Sequence[Tensor] = ()) -> None:
        """Begin to send; the tensors must stay as they are until `flush` has returned."""
        self._prune()
        pieces = pack(header, tensors)
        inner = self._group.inner

        def give() -> None:
            for piece in pieces:
                inner.send([piece], peer, _TAG).wait()

        self._sent.append(self._group.start_apart(_CALL, [], give, lane=f"to-{peer}"))

    def expect(self, peer: int) -> Expected:
        """Begin to receive the next message of a rank."""
        box: list[Message] = []
        inner = self._group.inner

        def take() -> None:
            box.append(unpack(lambda piece: inner.recv([piece], peer, _TAG).wait()))

        return Expected(self._group.start_apart(_CALL, [], take, lane=f"from-{peer}"), box)

    def receive(self, peer: int) -> Message:
        """Return the next message of a rank."""
        return self.expect(peer).wait()

    def flush(self) -> None:
        """Wait until everything is sent."""
        while self._sent:
            self._sent.popleft().wait()

    def _prune(self) -> None:
        while self._sent and self._sent[0].is_completed():
            self._sent.popleft().wait()
