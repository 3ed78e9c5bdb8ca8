"""Keyed messages between the ranks of a pipeline, taken in whatever order they are needed.

    send ──> gloo, not waited for ──> the peer's receiving thread ──> inbox ──> take(key) / take_any

A header of fixed size says how large the message is, so that no receive meets another size. Each peer has a thread that
receives from it all the time, so that whoever sends is never held up, and what is needed next is mostly there already.
Waits end when the group is released.

Knows groups, bytes and tensors; does not know what the messages are for.
"""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from openclaw_nb.core.errors import GroupError, RefusedError, ReleasedError
from openclaw_nb.engine.group.collectives import PendingWork, ReleasableGroup

Key = tuple[int, int, int]

# One name for all: ranks that wait in different calls are taken to wait for each other in vain.
_CALL = "a message of the pipeline"
_HEADER = 16
_MAX_DIMS = 8
_PICKLED, _CLOSED = -1, -2
_FIRST_TAG, _NUM_TAGS = 1 << 18, 1 << 16  # between those of people and those of their messages' letters
_LOOK_SECONDS = 0.05
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
# By group, how many there were among the same ranks: only those count them alike.
_numbers: WeakKeyDictionary[Any, dict[tuple[int, ...], itertools.count[int]]] = WeakKeyDictionary()


def current_group() -> ReleasableGroup:
    """Return the group of the workers' cells.

    Raises
    ------
    GroupError
        Outside of a cell on workers.
    RefusedError
        For a group over NCCL.
    """
    group = c10d._get_default_group() if c10d.is_initialized() else None
    if not isinstance(group, ReleasableGroup):
        raise GroupError("A pipeline runs on the workers of a cluster: there is no group of workers here.")
    if group.inner.name() != "gloo":
        raise RefusedError(
            "A pipeline's messages go by gloo. Start the workers with %openclaw start --communication gloo."
        )
    return group


def devices_of_ranks(group: ReleasableGroup) -> list[str]:
    """Return each rank's device, on every rank; all of them call it."""
    devices: list[str] = [""] * group.size()
    dist.all_gather_object(devices, os.environ["OPENCLAW_DEVICE"])
    return devices


class Mail:
    """Messages with some peers, for as long as a ``with`` lasts; every peer opens its own, with this rank in it.

    Parameters
    ----------
    group : ReleasableGroup
        The ranks.
    peers : sequence of int
        Whom this rank sends to or receives from.
    """

    def __init__(self, group: ReleasableGroup, peers: Sequence[int]) -> None:
        self._group = group
        self._peers = sorted({*peers} - {group.rank()})
        among = tuple(sorted({*peers, group.rank()}))
        number = next(_numbers.setdefault(group, {}).setdefault(among, itertools.count()))
        self._tag = _FIRST_TAG + number % _NUM_TAGS
        self._inbox: dict[tuple[int, Key], deque[Any]] = {}
        self._changed = threading.Condition()
        self._receiving: list[PendingWork] = []
        self._sent: queue.SimpleQueue[tuple[Any, Tensor] | None] = queue.SimpleQueue()

    def __enter__(self) -> Mail:
        for peer in self._peers:
            self._receiving.append(self._apart(partial(self._receive_all, peer)))
        self._sending = self._apart(self._wait_for_all_sent)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._sent.put(None)
            return  # the peers are freed by the group's release, and this tag is not used again
        for peer in self._peers:
            self._send_header(peer, (0, 0, 0), _CLOSED, ())
        self._sent.put(None)
        for work in [self._sending, *self._receiving]:
            work.wait()

    def send(self, peer: int, key: Key, value: Any) -> None:
        """Begin to send a tensor, or anything that can be pickled; a tensor must stay as it is until the end."""
        if isinstance(value, Tensor):
            plain = value.detach().cpu().contiguous()
            self._send_header(peer, key, _DTYPES.index(plain.dtype), plain.shape)
            if plain.numel():
                self._give(peer, plain.view(-1).view(torch.uint8))
            return
        data = pickle.dumps(value, protocol=5)
        self._send_header(peer, key, _PICKLED, (len(data),))
        self._give(peer, torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def take(self, peer: int, key: Key) -> Any:
        """Return the next message of this key from a peer, when it is there."""
        return self.take_any([(peer, key)])[1]

    def take_any(self, wanted: Sequence[tuple[int, Key]]) -> tuple[int, Any]:
        """Return the first message that is there of several, with its place among ``wanted``; earlier places first.

        Raises
        ------
        ReleasedError
            When the group was released meanwhile.
        """
        found = self._look(wanted)
        if found is None:
            with self._group.board.waiting(_CALL):
                found = self._await(lambda: self._look(wanted))
        return found

    def has(self, peer: int, key: Key) -> bool:
        """Whether such a message is there."""
        return bool(self._inbox.get((peer, key)))

    def _look(self, wanted: Sequence[tuple[int, Key]]) -> tuple[int, Any] | None:
        with self._changed:
            for place, each in enumerate(wanted):
                if waiting := self._inbox.get(each):
                    return place, waiting.popleft()
        return None

    def _await(self, look: Callable[[], tuple[int, Any] | None]) -> tuple[int, Any]:
        while True:
            with self._changed:
                if (found := look()) is not None:
                    return found
                self._changed.wait(_LOOK_SECONDS)
            for work in self._receiving:
                if (error := work.exception()) is not None:
                    raise error
            if self._group.released:
                raise ReleasedError("the group was released")

    # ------------------------------------------------------------------------------------- over the group

    def _apart(self, action: Callable[[], Any]) -> PendingWork:
        return self._group.start_beside(_CALL, action)

    def _send_header(self, peer: int, key: Key, code: int, shape: Sequence[int]) -> None:
        if len(shape) > _MAX_DIMS:
            raise RefusedError(
                f"A tensor between stages has at most {_MAX_DIMS} dimensions, not {len(shape)}."
            )
        values = [*key, code, len(shape), *shape]
        self._give(peer, torch.tensor(values + [0] * (_HEADER - len(values)), dtype=torch.int64))

    def _give(self, peer: int, tensor: Tensor) -> None:
        if self._group.released:
            raise ReleasedError("the group was released")
        self._sent.put((self._group.inner.send([tensor], peer, self._tag), tensor))

    def _wait_for_all_sent(self) -> None:
        """Hold what is under way, no longer: the memory of activations counts."""
        while (sent := self._sent.get()) is not None:
            sent[0].wait()
            del sent

    def _receive_all(self, peer: int) -> None:
        inner = self._group.inner
        while True:
            header = torch.empty(_HEADER, dtype=torch.int64)
            inner.recv([header], peer, self._tag).wait()
            a, b, c, code, dims, *sizes = header.tolist()
            if code == _CLOSED:
                return
            pickled = code == _PICKLED
            value: Any = torch.empty(sizes[:dims], dtype=torch.uint8 if pickled else _DTYPES[code])
            if value.numel():
                inner.recv([value.view(-1).view(torch.uint8)], peer, self._tag).wait()
            if pickled:
                value = pickle.loads(value.numpy().tobytes())
            with self._changed:
                self._inbox.setdefault((peer, (a, b, c)), deque()).append(value)
                self._changed.notify_all()
