"""Shared memory as one process sees it: tensors are put under a name by one, and mapped by all others.

    put(name, value) ── one copy into the memory ──► array(name), tensor(name): the same bytes, in any process

The memory is filled with pages when it is made: what is published then costs a copy and no more. Knows numpy, and torch
only where a tensor is asked for.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openclaw_nb.core.errors import ResourceError, UsageError, unknown_name
from openclaw_nb.core.host import available_memory_bytes
from openclaw_nb.core.text import size_text
from openclaw_nb.shared import index as indexes
from openclaw_nb.shared.dtypes import check_numpy_has, dtype_name
from openclaw_nb.shared.index import Entry
from openclaw_nb.shared.place import find, id_of, index_of, new_path
from openclaw_nb.shared.ranges import find_free, largest_gap, open_held

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_DEVICE_VARIABLE = "OPENCLAW_DEVICE"  # of a worker
_ATTEMPTS = 100
_LEFT_BYTES = 2**28  # of the host's memory: with none left, the system would end a process


class SharedMemory:
    """Memory of this host that the notebook and workers share; see `create` and `attach_shared_memory`.

    A pickle of it is its id: sent to a worker, it is attached there. What was taken from it stays valid after `delete`
    and `free`, and until then its place is given to nobody else.

    Attributes
    ----------
    id : str
        By which other processes of this user on this host attach it.
    size_bytes : int
        How much it holds; each tensor takes whole pages.
    devices : tuple of str
        Whose workers may use it; empty when all may.
    """

    def __init__(self, path: Path, *, whole: mmap.mmap | None = None) -> None:
        found = indexes.read(path)
        self._path = path
        self._whole = whole
        self.id = id_of(path)
        self.size_bytes = found.size_bytes
        self.devices = found.devices

    @classmethod
    def create(cls, folder: str | Path, size_bytes: int, devices: Sequence[str] = ()) -> SharedMemory:
        """Make new shared memory in a folder of ``/dev/shm``.

        Parameters
        ----------
        folder : str or Path
            Whose removal frees it.
        size_bytes : int
            How much; all of it is taken at once.
        devices : sequence of str
            Whose workers may use it; all when empty.

        Raises
        ------
        ResourceError
            When the host has less; nothing is written then.
        """
        page = mmap.ALLOCATIONGRANULARITY
        size_bytes = -(-size_bytes // page) * page
        _check_room(Path(folder), size_bytes)
        path = new_path(folder)
        indexes.write(path, indexes.Index(size_bytes, tuple(devices)))
        try:
            return cls(path, whole=_allocate(path, size_bytes))
        except BaseException:
            _remove(path)
            raise

    # ------------------------------------------------------------------------------------------ writing

    def put(self, name: str, value: Any, *, writable: bool = False) -> None:
        """Publish a copy of a tensor.

        Parameters
        ----------
        name : str
            By which others find it.
        value : numpy.ndarray, torch.Tensor or what numpy makes an array of
            On the CPU.
        writable : bool
            Whether those who take it may change it for all; else it is sealed: writing it is an error.

        Raises
        ------
        UsageError
            When the name is taken, or the value has no type that can be shared.
        ResourceError
            When it does not fit.
        ClusterError
            When the memory is freed.
        """
        value = _on_cpu(name, value)
        entry = Entry(name=name, dtype=dtype_name(value.dtype), shape=tuple(value.shape), writable=writable)
        self._publish(entry, value)

    def empty(self, name: str, shape: Sequence[int], dtype: Any = "float32") -> None:
        """Publish a writable tensor of zeros.

        Parameters
        ----------
        name : str
            By which others find it.
        shape : sequence of int
            Its sizes.
        dtype : str, numpy or torch type
            The type of its values.

        Raises
        ------
        UsageError, ResourceError, ClusterError
            As `put`.
        """
        sizes = tuple(shape)
        if not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise UsageError(f"The shape {sizes!r} of {name!r} must be of whole numbers from 0 on.")
        self._publish(Entry(name=name, dtype=dtype_name(dtype), shape=sizes, writable=True), None)

    def delete(self, name: str) -> None:
        """Take a tensor's name away; its room is used again when nobody has it any more.

        Raises
        ------
        UnknownNameError
            When there is none.
        """
        with indexes.locked(self._path):
            found = indexes.read(self._path)
            self._entry(name, found)
            indexes.write(self._path, found.without(name))

    def free(self) -> None:
        """Give the memory back to the host, as soon as nobody has any of it; happens at the cluster's end, too."""
        _remove(self._path)
        if self._whole is not None:
            self._whole.close()
            self._whole = None

    def _publish(self, entry: Entry, value: Any) -> None:
        if not isinstance(entry.name, str) or not entry.name:
            raise UsageError(f"A shared tensor cannot be called {entry.name!r}: give it a name.")
        with indexes.locked(self._path):
            found = indexes.read(self._path)
            if entry.name in found.entries:
                raise UsageError(
                    f"There is a shared tensor {entry.name!r} already: choose another name, or "
                    f"delete({entry.name!r}) first."
                )
            place = find_free(self._path, entry.room_bytes, found.size_bytes, found.taken)
            if place is None:
                raise _no_room(entry, found)
            descriptor, start = place
            try:
                self._fill(descriptor, start, entry, value)
                indexes.write(self._path, found.with_entry(entry, start))
            finally:
                os.close(descriptor)

    def _fill(self, descriptor: int, start: int, entry: Entry, value: Any) -> None:
        if self._whole is not None:
            room = memoryview(self._whole)[start : start + entry.room_bytes]
        else:
            room = memoryview(mmap.mmap(descriptor, entry.room_bytes, offset=start))
        if value is None:
            room[:] = bytes(entry.room_bytes)
        elif _is_torch(value):
            _as_tensor(room, entry).copy_(value)
        else:
            _as_array(room, entry)[...] = value

    # ------------------------------------------------------------------------------------------ reading

    def array(self, name: str) -> NDArray[Any]:
        """Return a tensor as a numpy array, without a copy.

        Raises
        ------
        UnknownNameError
            When there is none of this name.
        UsageError
            When numpy lacks its type.
        ClusterError
            When the memory is freed.
        """
        check_numpy_has(self._entry(name, indexes.read(self._path)).dtype, name)
        entry, descriptor = self._hold(name)
        try:
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if entry.writable else 0)
            mapped = mmap.mmap(descriptor, entry.room_bytes, prot=protection, offset=entry.start)
        finally:
            os.close(descriptor)  # the mapping has its own, and with it the hold
        return _as_array(mapped, entry)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as torch's, without a copy; a sealed one is a `openclaw_nb.shared.sealed.SealedTensor`.

        Raises
        ------
        UnknownNameError
            When there is none of this name.
        ClusterError
            When the memory is freed.
        """
        entry, descriptor = self._hold(name)
        try:
            # A write that gets past `sealed` copies a page; of memory that cannot be written it would end the process.
            kind = mmap.MAP_SHARED if entry.writable else mmap.MAP_PRIVATE
            mapped = mmap.mmap(descriptor, entry.room_bytes, flags=kind, offset=entry.start)
        finally:
            os.close(descriptor)
        tensor = _as_tensor(mapped, entry)
        if entry.writable:
            return tensor
        from openclaw_nb.shared.sealed import seal

        return seal(tensor, name)

    def _hold(self, name: str) -> tuple[Entry, int]:
        """Return what has the name, and a descriptor that keeps its room from being used again."""
        for _ in range(_ATTEMPTS):
            entry = self._entry(name, indexes.read(self._path))
            try:
                descriptor = open_held(self._path, entry.start, entry.room_bytes)
            except (BlockingIOError, FileNotFoundError):
                continue  # deleted, or freed, meanwhile
            if indexes.read(self._path).entries.get(name) == entry:
                return entry, descriptor
            os.close(descriptor)
        raise ResourceError(f"The shared tensor {name!r} is replaced faster than it can be taken. Try again.")

    def _entry(self, name: str, found: indexes.Index) -> Entry:
        if name not in found.entries:
            raise unknown_name("shared tensor", str(name), found.entries)
        return found.entries[name]

    def __contains__(self, name: object) -> bool:
        return name in indexes.read(self._path).entries

    def __iter__(self) -> Iterator[str]:
        return iter(indexes.read(self._path).entries)

    def __len__(self) -> int:
        return len(indexes.read(self._path).entries)

    def __repr__(self) -> str:
        entries = indexes.read(self._path).entries.values() if self._path.exists() else None
        head = f"SharedMemory {self.id}, {size_text(self.size_bytes)}"
        if entries is None:
            return f"{head}, freed"
        used = size_text(sum(entry.room_bytes for entry in entries))
        return "\n".join([f"{head}, {used} in use", *map(_line, entries)])

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return attach_shared_memory, (self.id,)


def attach_shared_memory(memory_id: str) -> SharedMemory:
    """Return shared memory of this host by its id, in any process of its owner: a worker, another kernel.

    Parameters
    ----------
    memory_id : str
        ``.id`` of what ``create_shared_memory`` returned.

    Raises
    ------
    UnknownNameError
        When there is none: it is freed, or of another host.
    UsageError
        When it is another user's, or not for this worker's device.
    """
    memory = SharedMemory(find(memory_id))
    device = os.environ.get(_DEVICE_VARIABLE, "")
    if device and memory.devices and device not in memory.devices:
        raise UsageError(
            f"The shared memory {memory_id!r} is for {', '.join(memory.devices)}, and this worker is on {device}: name "
            "its device in create_shared_memory(devices=...), or leave them out."
        )
    return memory


def gibibytes(size_gb: Any) -> int:
    """Return how many bytes some GiB are.

    Raises
    ------
    UsageError
        When it is no number above 0.
    """
    if isinstance(size_gb, bool) or not isinstance(size_gb, int | float) or not 0 < size_gb < math.inf:
        raise UsageError(f"size_gb={size_gb!r}: give a number of GiB above 0.")
    return math.ceil(size_gb * 2**30)


# ---------------------------------------------------------------------------------------------- the memory


def _check_room(folder: Path, size_bytes: int) -> None:
    """Refuse what the host has not: pages that cannot be had would end the process that touches them."""
    found = os.statvfs(folder)
    memory = max(0, available_memory_bytes() - _LEFT_BYTES)
    free = {"/dev/shm": found.f_bavail * found.f_frsize, "the memory": memory}
    for where, left in free.items():
        if size_bytes > left:
            raise ResourceError(
                f"Shared memory of {size_text(size_bytes)}: of {where} only {size_text(left)} are free. Ask for less"
                + (", or let your administrator enlarge /dev/shm." if where == "/dev/shm" else ".")
            )


def _allocate(path: Path, size_bytes: int) -> mmap.mmap:
    """Make the file with all its pages, and map it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        raise ResourceError(f"Shared memory of {size_text(size_bytes)} cannot be had: {error}") from error
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    for each in (path, index_of(path)):
        with contextlib.suppress(FileNotFoundError):
            each.unlink()


def _no_room(entry: Entry, found: indexes.Index) -> ResourceError:
    largest = size_text(largest_gap(found.taken, found.size_bytes))
    return ResourceError(
        f"The shared tensor {entry.name!r} needs {size_text(entry.room_bytes)}, and the largest free part of the "
        f"memory's {size_text(found.size_bytes)} is {largest}, less what was deleted and is still in use: "
        "delete tensors, or make larger memory."
    )


# ---------------------------------------------------------------------------------------------- values


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _on_cpu(name: str, value: Any) -> Any:
    """Return what can be copied: a tensor or an array."""
    if not _is_torch(value):
        import numpy as np

        return np.asarray(value)
    if value.device.type != "cpu":
        raise UsageError(
            f"{name!r} is on {value.device}: shared memory is the host's. Put value.cpu(), and let those who take it "
            "say .to(device)."
        )
    return value.detach()


def _as_array(buffer: Any, entry: Entry) -> NDArray[Any]:
    import numpy as np

    return np.ndarray(entry.shape, np.dtype(entry.dtype), buffer)


def _as_tensor(buffer: Any, entry: Entry) -> Tensor:
    import torch

    dtype, count = getattr(torch, entry.dtype), math.prod(entry.shape)
    if count == 0:  # torch makes no empty tensor of a buffer
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count).reshape(entry.shape)


def _line(entry: Entry) -> str:
    kind = "writable" if entry.writable else "sealed"
    return f"  {entry.name}: {entry.dtype} {list(entry.shape)}, {size_text(entry.size_bytes)}, {kind}"
