"""Variables of a worker's namespace: send, receive, describe, compare.

Knows values and files; does not know who asks. Large values go through a file on the host (see `codec`).
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from openclaw_nb.core.errors import unknown_name
from openclaw_nb.protocol import codec

_DEPTH = 4


def send(namespace: Mapping[str, Any], names: list[str], path: str) -> dict[str, Any]:
    """Write variables to ``path``; return the size in bytes.

    Raises
    ------
    UnknownNameError
        For a name that the worker has not.
    TypeError
        For a value that cannot be pickled.
    NoRoomError
        When the file does not fit there.
    """
    found = {name: _lookup(namespace, name) for name in names}
    return {"size_bytes": codec.write_variables(path, found)}


def receive(namespace: dict[str, Any], path: str) -> dict[str, Any]:
    """Take the variables of the file at ``path`` into the namespace."""
    values = codec.read_variables(path)
    namespace.update(values)
    return {"names": sorted(values), "size_bytes": os.path.getsize(path)}


def modules_of(namespace: Mapping[str, Any]) -> list[str]:
    """Return the names of the loaded modules that variables are, or that they or their types come from."""
    found: set[str | None] = set()
    for value in list(namespace.values()):
        if isinstance(value, ModuleType):
            found.add(value.__name__)
        else:
            found |= {getattr(value, "__module__", None), type(value).__module__}
    return sorted(
        name for name in found if isinstance(name, str) and name in sys.modules and name != "__main__"
    )


def describe(namespace: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return type, digest and size in bytes of each variable."""
    result = {}
    for name in names:
        value = _lookup(namespace, name)
        result[name] = {"type": type(value).__name__, "digest": digest(value), "size_bytes": size_of(value)}
    return result


def _lookup(namespace: Mapping[str, Any], name: str) -> Any:
    if name not in namespace:
        visible = [n for n in namespace if not n.startswith("_")]
        raise unknown_name("variable on the worker", name, visible)
    return namespace[name]


def digests(namespace: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return a digest of each of these names that is bound, for comparing ranks.

    Tensors and arrays are left out, as a slice of the batch differs by design, and so are values whose
    equality cannot be told (open files, generators, ...).
    """
    values = {name: namespace[name] for name in sorted(names) if name in namespace}
    return {name: text for name, value in values.items() if _raw(value) is None and (text := digest(value))}


def digest(value: Any, depth: int = _DEPTH) -> str:
    """Return a text that is equal for equal values, or "" when equality cannot be told.

    Arrays and tensors count by dtype, shape and bytes; models by their state dict.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return f"{type(value).__name__}:{value!r}"
    if depth == 0 or isinstance(value, type):
        return ""
    if isinstance(value, Mapping):
        parts = sorted(f"{key!r}={digest(item, depth - 1)}" for key, item in value.items())
    elif isinstance(value, set | frozenset):  # the order of strings in a set differs between processes
        parts = sorted(digest(item, depth - 1) for item in value)
    elif isinstance(value, list | tuple):
        parts = [digest(item, depth - 1) for item in value]
    elif (data := _raw(value)) is not None:
        return f"{type(value).__name__}:{data[0]}:{hashlib.blake2b(data[1], digest_size=16).hexdigest()}"
    elif hasattr(value, "state_dict"):
        return digest(value.state_dict(), depth)
    else:
        return ""
    if any(part == "" or part.endswith("=") for part in parts):
        return ""
    return f"{type(value).__name__}:{hashlib.blake2b('|'.join(parts).encode(), digest_size=16).hexdigest()}"


def _raw(value: Any) -> tuple[str, memoryview] | None:
    """Return dtype and shape, and the bytes, of an array or a tensor."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_meta or hasattr(value, "full_tensor"):
            return None  # of a sharded one there is only this rank's part
        plain = value.detach().cpu().contiguous()
        data = plain.view(torch.uint8) if plain.dim() else plain.reshape(1).view(torch.uint8)
        return f"{value.dtype}{list(value.shape)}", memoryview(data.numpy())
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray) and not value.dtype.hasobject:
        plain = numpy.ascontiguousarray(value)
        return f"{value.dtype}{list(value.shape)}", memoryview(plain.reshape(-1).view(numpy.uint8))
    return None


def size_of(value: Any) -> int:
    """Return the size of a value's data in bytes, as far as it is cheap to tell."""
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if hasattr(value, "state_dict"):
        return sum(size_of(item) for item in value.state_dict().values())
    if isinstance(value, Mapping):
        return sum(size_of(item) for item in value.values())
    return sys.getsizeof(value)
