"""Messages to JSON-ready dictionaries and back, and variables to one file and back.

Knows the message classes; does not know who sends them or over what.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import pickle
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from openclaw_nb.core.errors import NoRoomError
from openclaw_nb.core.text import size_text
from openclaw_nb.protocol import messages

_CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in vars(messages).values()
    if isinstance(cls, type) and dataclasses.is_dataclass(cls)
}
_FLOAT = "float"
_COUNT = struct.Struct("<Q")


def encode(message: Any) -> dict[str, Any]:
    """Turn a message into a dictionary of JSON types, tagged with its kind."""
    body = {f.name: _encode_field(getattr(message, f.name)) for f in dataclasses.fields(message)}
    return {"kind": type(message).__name__, **body}


def _encode_field(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return encode(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(value)}  # JSON has no such numbers, and Jupyter's messages turn them into text
    return value


def decode(data: Mapping[str, Any]) -> Any:
    """Build the message that `encode` made ``data`` from.

    Raises
    ------
    ValueError
        If the kind is unknown or a field is missing or too many: the other side speaks another version.
    """
    body = dict(data)
    kind = body.pop("kind", None)
    cls = _CLASSES.get(str(kind))
    if cls is None:
        raise ValueError(f"Unknown message kind {kind!r}: the other side speaks another protocol version.")
    try:
        return cls(**{key: _decode_field(value) for key, value in body.items()})
    except TypeError as error:
        raise ValueError(
            f"Message {kind} does not fit protocol version {messages.PROTOCOL_VERSION}: {error}"
        ) from None


def _decode_field(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {_FLOAT}:
        return float(value[_FLOAT])
    return decode(value) if str(value.get("kind")) in _CLASSES else value


def write_variables(path: str, variables: Mapping[str, Any]) -> int:
    """Pickle variables into a new file that only this user may read.

    Large arrays and tensors go out of band (pickle protocol 5), so that they are written once, straight
    from their memory. Functions and classes of the notebook travel by value (cloudpickle).

    Returns
    -------
    int
        The file's size in bytes.

    Raises
    ------
    TypeError
        If a value cannot be pickled; the message names the variable.
    NoRoomError
        If the file does not fit there; nothing is left of it.
    """
    import cloudpickle

    buffers: list[pickle.PickleBuffer] = []
    parts: dict[str, bytes] = {}
    for name, value in variables.items():
        try:
            parts[name] = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        except Exception as error:
            # Pickling runs the value's own code: any error of it means the same to the caller.
            raise TypeError(f"{name!r} ({type(value).__name__}) cannot be sent: {error}") from error
    head = pickle.dumps((parts, [memoryview(b).nbytes for b in buffers]), protocol=5)
    try:
        return _write(path, [_COUNT.pack(len(head)), head, *(buffer.raw() for buffer in buffers)])
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        size, folder = sum(memoryview(b).nbytes for b in buffers) + len(head), os.path.dirname(path)
        raise NoRoomError(f"{size_text(size)} are needed in {folder}, where less is free.") from None


def _write(path: str, parts: Iterable[bytes | memoryview]) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        for part in parts:
            file.write(part)
        return file.tell()


def read_variables(path: str) -> dict[str, Any]:
    """Load what `write_variables` wrote; the values own their memory."""
    with open(path, "rb") as file:
        (length,) = _COUNT.unpack(file.read(_COUNT.size))
        parts, sizes = pickle.loads(file.read(length))
        buffers = []
        for size in sizes:
            buffer = bytearray(size)
            file.readinto(buffer)
            buffers.append(buffer)
    rest = iter(buffers)
    return {name: pickle.loads(data, buffers=rest) for name, data in parts.items()}
