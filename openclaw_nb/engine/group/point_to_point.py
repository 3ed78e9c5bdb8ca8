"""Sends and receives that know what the other side expects.

gloo ends the process when a message's size is not the receiver's. So each message is preceded by a letter that
names the call and the tag of the message itself::

    send ──> letter (tag 2 t + 1) ──> message (a tag of its own)
    recv <── letter: same type and size? ── no ──> MismatchError that names both calls, nothing is received
                                       └── yes ──> receive the message under its tag

Letters of one pair and tag arrive in order, and a message has its own tag, so receives may overlap. Knows a
backend's send and recv; does not know how waits end.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch
from torch import Tensor

from openclaw_nb.core.errors import MismatchError

_LETTER_BYTES = 512
_FIRST_MESSAGE_TAG = 1 << 20
_NUM_MESSAGE_TAGS = 1 << 29


class Post:
    """Sends and receives over one backend for CPU tensors.

    Parameters
    ----------
    inner : Backend
        The backend, gloo.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._numbers = itertools.count()

    def send(self, tensors: list[Tensor], call: str, peer: int, tag: int) -> list[Any]:
        """Begin to send a tensor; return the backend's works."""
        own_tag = _FIRST_MESSAGE_TAG + next(self._numbers) % _NUM_MESSAGE_TAGS
        letter = _write_letter(own_tag, call, tensors[0])
        # The letter is kept alive by the returned work's caller until both are done.
        return [
            self._inner.send([letter], peer, 2 * tag + 1),
            self._inner.send(tensors, peer, own_tag),
            letter,
        ]

    def begin_receive(self, peer: int | None, tag: int) -> tuple[Any, Tensor]:
        """Begin to receive a letter; ``peer`` None takes one from any rank."""
        letter = torch.zeros(_LETTER_BYTES, dtype=torch.uint8)
        if peer is None:
            return self._inner.recv_anysource([letter], 2 * tag + 1), letter
        return self._inner.recv([letter], peer, 2 * tag + 1), letter

    def finish_receive(
        self, work: Any, letter: Tensor, tensors: list[Tensor], call: str, peer: int | None
    ) -> int:
        """Wait for the letter and then for its message; return the sender's rank.

        Raises
        ------
        MismatchError
            When the message is not what this side expects.
        """
        work.wait()
        source = work._source_rank() if peer is None else peer
        content = json.loads(letter.numpy().tobytes().rstrip(b"\0"))
        if [content["type"], content["numel"]] != [str(tensors[0].dtype), tensors[0].numel()]:
            raise MismatchError(
                f"The ranks disagree about a message: rank {source} calls {content['call']}; this rank calls {call}. "
                "Both sides must name tensors of the same type and size."
            )
        self._inner.recv(tensors, source, content["tag"]).wait()
        return int(source)


def _write_letter(tag: int, call: str, tensor: Tensor) -> Tensor:
    content = {"tag": tag, "call": call[:200], "type": str(tensor.dtype), "numel": tensor.numel()}
    data = json.dumps(content).encode()
    letter = torch.zeros(_LETTER_BYTES, dtype=torch.uint8)
    letter[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return letter
