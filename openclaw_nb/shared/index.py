"""What is where in shared memory: a small file beside it, replaced as a whole, so that nobody reads half of a change.

Knows entries and the file; does not know the tensors' bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from openclaw_nb.core.errors import ClusterError
from openclaw_nb.shared.dtypes import ITEM_BYTES
from openclaw_nb.shared.place import id_of, index_of


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One shared tensor.

    Attributes
    ----------
    name, dtype : str
        What it is called, and the type of its values.
    shape : tuple of int
        Its sizes; values are in row-major order.
    start : int
        Where its bytes begin.
    serial : int
        Which of all that have ever been there: a name may be taken again.
    writable : bool
        Whether those who use it may change it; if not, it is sealed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    writable: bool
    start: int = 0
    serial: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def room_bytes(self) -> int:
        """Bytes that it takes: whole pages, as memory is mapped by pages."""
        page = mmap.ALLOCATIONGRANULARITY
        return max(1, -(-self.size_bytes // page)) * page


@dataclass(frozen=True)
class Index:
    """All tensors of some shared memory, by name.

    Attributes
    ----------
    size_bytes : int
        Of the memory.
    devices : tuple of str
        Whose workers may use it.
    entries : dict of str to Entry
        The tensors.
    num_published : int
        How many there have been in all.
    """

    size_bytes: int
    devices: tuple[str, ...]
    entries: dict[str, Entry] = field(default_factory=dict)
    num_published: int = 0

    @property
    def taken(self) -> list[tuple[int, int]]:
        """Start and end of each tensor's room."""
        return [(entry.start, entry.start + entry.room_bytes) for entry in self.entries.values()]

    def with_entry(self, entry: Entry, start: int) -> Index:
        """Return this with one more, which begins at ``start``."""
        numbered = replace(entry, start=start, serial=self.num_published + 1)
        return replace(self, entries={**self.entries, entry.name: numbered}, num_published=numbered.serial)

    def without(self, name: str) -> Index:
        """Return this without one."""
        return replace(self, entries={n: entry for n, entry in self.entries.items() if n != name})


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only one that changes the index of the shared memory at a path.

    Raises
    ------
    ClusterError
        When the memory is gone.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _freed(path) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read(path: Path) -> Index:
    """Return the index of the shared memory at a path.

    Raises
    ------
    ClusterError
        When the memory is gone.
    """
    try:
        data = json.loads(index_of(path).read_bytes())
    except FileNotFoundError:
        raise _freed(path) from None
    entries = {each["name"]: Entry(**{**each, "shape": tuple(each["shape"])}) for each in data["entries"]}
    return Index(data["size_bytes"], tuple(data["devices"]), entries, data["num_published"])


def write(path: Path, index: Index) -> None:
    """Replace the index of the shared memory at a path; only one process at a time may (`locked`).

    Raises
    ------
    ClusterError
        When the memory is gone.
    """
    entries = [asdict(entry) for entry in index.entries.values()]
    data = {**vars(index), "entries": entries}
    new = index_of(path).with_suffix(".new")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(data, file)
        os.replace(new, index_of(path))
    except FileNotFoundError:
        raise _freed(path) from None


def _freed(path: Path) -> ClusterError:
    return ClusterError(
        f"The shared memory {id_of(path)!r} is freed: by its free(), or as its cluster has ended. What was taken from "
        "it before can still be used; make new memory with master.create_shared_memory()."
    )
