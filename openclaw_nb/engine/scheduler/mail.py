"""Keyed messages between the ranks of a pipeline, taken in whatever order they are needed.

    send ──> gloo, not waited for ──> the peer's receiving thread ──> inbox ──> take(key) / take_any

Each peer has a thread that receives from it all the time, so that whoever sends is never held up, and what is needed
next is mostly there already. What ranks do together between two ends of a ``with`` is an exchange, with a name that
tells what it is and how many such there were: each message carries it, and waits show it. So ranks that are in
different exchanges neither take each other's messages nor seem to wait together. Waits end when the group is released.

Knows groups and messages; does not know what the messages are for.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from openclaw_nb.core.errors import GroupError, MismatchError, RefusedError, ReleasedError
from openclaw_nb.engine.group.collectives import PendingWork, ReleasableGroup
from openclaw_nb.engine.group.packing import Message, pack, unpack

Key = tuple[int, int, int]

_FIRST_TAG, _NUM_TAGS = 1 << 18, 1 << 16  # between those of people and those of their messages' letters
_LOOK_SECONDS = 0.05
# By group, how many exchanges there were among the same ranks: only those count them alike.
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
    purpose : str
        What the exchange is, the same on every peer.

    Attributes
    ----------
    name : str
        Of the exchange.
    """

    def __init__(self, group: ReleasableGroup, peers: Sequence[int], purpose: str) -> None:
        self._group = group
        self._rank = group.rank()
        self._peers = sorted({*peers} - {self._rank})
        among = tuple(sorted({*peers, self._rank}))
        number = next(_numbers.setdefault(group, {}).setdefault(among, itertools.count()))
        self._tag = _FIRST_TAG + number % _NUM_TAGS
        self.name = f"{purpose} (exchange {number + 1} of the pipeline on ranks {', '.join(map(str, among))})"
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
        try:
            for peer in self._peers:
                self._give(peer, pack((self.name, None, None)))
        finally:  # what waits for the sent must end, also when the group was released meanwhile
            self._sent.put(None)
        for work in [self._sending, *self._receiving]:
            work.wait()

    def send(self, peer: int, key: Key, value: Any) -> None:
        """Begin to send a tensor, or anything that can be pickled; a tensor must stay as it is until the end."""
        if isinstance(value, Tensor):
            self._give(peer, pack((self.name, key, None), [value]))
        else:
            self._give(peer, pack((self.name, key, value)))

    def gather(self, sources: Sequence[int], key: Key, own: Any) -> list[Any]:
        """Return what each of some ranks gives, in their order; every peer calls this, also those that give nothing."""
        if self._rank in sources:
            for peer in self._peers:
                self.send(peer, key, own)
        return [own if rank == self._rank else self.take(rank, key) for rank in sources]

    def take(self, peer: int, key: Key) -> Any:
        """Return the next message of this key from a peer, when it is there."""
        return self.take_any([(peer, key)])[1]

    def take_any(self, wanted: Sequence[tuple[int, Key]]) -> tuple[int, Any]:
        """Return the first message that is there of several, with its place among ``wanted``; earlier places first.

        Raises
        ------
        ReleasedError
            When the group was released meanwhile.
        MismatchError
            When a peer is in another exchange.
        """
        found = self._look(wanted)
        if found is None:
            with self._group.board.waiting(self.name):
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
        return self._group.start_beside(self.name, action)

    def _give(self, peer: int, pieces: Sequence[Tensor]) -> None:
        if self._group.released:
            raise ReleasedError("the group was released")
        for piece in pieces:
            self._sent.put((self._group.inner.send([piece], peer, self._tag), piece))

    def _wait_for_all_sent(self) -> None:
        """Hold what is under way, no longer: the memory of activations counts."""
        while (sent := self._sent.get()) is not None:
            sent[0].wait()
            del sent

    def _receive_all(self, peer: int) -> None:
        inner = self._group.inner

        def receive(piece: Tensor) -> None:
            inner.recv([piece], peer, self._tag).wait()

        while (found := self._checked(peer, unpack(receive))) is not None:
            key, value = found
            with self._changed:
                self._inbox.setdefault((peer, key), deque()).append(value)
                self._changed.notify_all()

    def _checked(self, peer: int, message: Message) -> tuple[Key, Any] | None:
        """Return a message's key and value; None when it is the last."""
        name, key, value = message.header
        if name != self.name:
            raise MismatchError(
                f"The ranks disagree about what they do: rank {peer} is in {name}, and this rank in {self.name}. "
                "Every rank must make the same calls of a pipeline in the same order."
            )
        if key is None:
            return None
        return key, message.tensors[0] if message.tensors else value
