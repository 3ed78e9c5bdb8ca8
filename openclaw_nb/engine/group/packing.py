"""How a message becomes tensors of bytes that a receiver knows the sizes of, and a message again.

    header, tensors ──pack──> first page (length, header) ──> the rest of the header ──> each tensor's bytes ──unpack──>

Sizes travel in the first page, whose own size is fixed, so that no message meets a receiver that expects another size:
gloo would end the process.

Knows bytes and tensors; does not know ranks, or how what was packed gets to the other side.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PAGE_BYTES = 4096
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Message:
    """What was received: the sender's header, and its tensors on the CPU."""

    header: Any
    tensors: list[Tensor]


def pack(header: Any, tensors: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return what is to be sent, one after the other; it may be the tensors' own memory.

    Parameters
    ----------
    header
        Anything that can be pickled.
    tensors : sequence of Tensor
        Of any shape and dtype, on any device.
    """
    data = pickle.dumps((header, [(tuple(t.shape), t.dtype) for t in tensors]), protocol=5)
    page = bytearray(_PAGE_BYTES)
    page[: _LENGTH.size] = _LENGTH.pack(len(data))
    first = data[: _PAGE_BYTES - _LENGTH.size]
    page[_LENGTH.size : _LENGTH.size + len(first)] = first
    pieces = [torch.frombuffer(page, dtype=torch.uint8)]
    if len(first) < len(data):
        pieces.append(torch.frombuffer(bytearray(data[len(first) :]), dtype=torch.uint8))
    return pieces + [_bytes_of(tensor) for tensor in tensors if tensor.numel()]


def unpack(receive: Callable[[Tensor], None]) -> Message:
    """Return a message of which each piece is received into a tensor of bytes, in order."""
    page = torch.empty(_PAGE_BYTES, dtype=torch.uint8)
    receive(page)
    data = page.numpy().tobytes()
    (length,) = _LENGTH.unpack_from(data)
    data = data[_LENGTH.size : _LENGTH.size + length]
    if len(data) < length:
        rest = torch.empty(length - len(data), dtype=torch.uint8)
        receive(rest)
        data += rest.numpy().tobytes()
    header, layout = pickle.loads(data)
    tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in layout]
    for tensor in tensors:
        if tensor.numel():
            receive(tensor.view(-1).view(torch.uint8))
    return Message(header, tensors)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
