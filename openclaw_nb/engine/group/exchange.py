"""Messages of any shape from one rank to another, which do not hold up whoever sends them.

    send ──> lane "to p" ──> first page (length, header) ──> the rest of the header ──> each tensor's bytes
    expect ──> lane "from p", in order ──> Expected.wait: header and tensors

Each pair has a lane, a thread, in each direction, so that a send never waits behind a receive. Sizes travel in the
first page, so that no message meets a receiver that expects another size. Waits are `PendingWork`s and end on
release.

Knows groups, bytes and tensors; does not know what the messages are for.
"""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.group.collectives import PendingWork, ReleasableGroup

_PAGE_BYTES = 4096
_LENGTH = struct.Struct("<Q")
_TAG = 77
# One name for all: ranks that wait in different calls are taken to wait for each other in vain.
_CALL = "a message of another stage"


@dataclass(frozen=True)
class Message:
    """What was received: the sender's header, and its tensors on the CPU."""

    header: Any
    tensors: list[Tensor]


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
        data = pickle.dumps((header, [(tuple(t.shape), t.dtype) for t in tensors]), protocol=5)
        page = bytearray(_PAGE_BYTES)
        page[: _LENGTH.size] = _LENGTH.pack(len(data))
        first = data[: _PAGE_BYTES - _LENGTH.size]
        page[_LENGTH.size : _LENGTH.size + len(first)] = first
        pieces = [torch.frombuffer(page, dtype=torch.uint8)]
        if len(first) < len(data):
            pieces.append(torch.frombuffer(bytearray(data[len(first) :]), dtype=torch.uint8))
        pieces += [_bytes_of(tensor) for tensor in tensors if tensor.numel()]
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
            box.append(_receive(inner, peer))

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


def _receive(inner: Any, peer: int) -> Message:
    page = torch.empty(_PAGE_BYTES, dtype=torch.uint8)
    inner.recv([page], peer, _TAG).wait()
    data = page.numpy().tobytes()
    (length,) = _LENGTH.unpack_from(data)
    data = data[_LENGTH.size : _LENGTH.size + length]
    if len(data) < length:
        rest = torch.empty(length - len(data), dtype=torch.uint8)
        inner.recv([rest], peer, _TAG).wait()
        data += rest.numpy().tobytes()
    header, layout = pickle.loads(data)
    tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in layout]
    for tensor in tensors:
        if tensor.numel():
            inner.recv([tensor.view(-1).view(torch.uint8)], peer, _TAG).wait()
    return Message(header, tensors)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
