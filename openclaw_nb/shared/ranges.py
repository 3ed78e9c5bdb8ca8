"""Ranges of a file that processes hold: nobody else may write over one for as long as somebody looks at it.

A hold is a lock of the open file description (``F_OFD_SETLK``): it lives in the descriptor, and in the memory that is
mapped through it, and the kernel ends it with the last of them. So no process has to count who uses what, and one
that is killed holds nothing any more.

Knows files and ranges; does not know what is in them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from openclaw_nb.core.errors import ResourceError

_LOCK = struct.Struct("hhqqi4x")  # struct flock, as fcntl(2) has it on 64-bit Linux


def open_held(path: Path, start: int, size: int, *, alone: bool = False) -> int:
    """Open a file and hold one of its ranges; return the descriptor.

    Parameters
    ----------
    path : Path
        The file.
    start, size : int
        The range in bytes.
    alone : bool
        Let nobody else hold any of it.

    Raises
    ------
    BlockingIOError
        When another one holds some of it, and either wants to be alone.
    ResourceError
        When the system has no such locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _set(descriptor, fcntl.F_WRLCK if alone else fcntl.F_RDLCK, start, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def find_free(path: Path, size: int, end: int, taken: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """Hold the first free range of a size alone; return the descriptor and where it starts, or None.

    Whoever calls this keeps others from calling it at the same time.

    Parameters
    ----------
    path : Path
        The file.
    size : int
        How many bytes are needed.
    end : int
        The file's size.
    taken : iterable of (int, int)
        Starts and ends of ranges that are not free, although nobody may hold them.
    """
    for low, high in _gaps(taken, end):
        start = low
        while start + size <= high:
            try:
                return open_held(path, start, size, alone=True), start
            except BlockingIOError:
                start = _end_of_hold(path, start, size)
    return None


def largest_gap(taken: Iterable[tuple[int, int]], end: int) -> int:
    """Return the size of the largest range that is not taken, held or not."""
    return max((high - low for low, high in _gaps(taken, end)), default=0)


def _gaps(taken: Iterable[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    edges = [(0, 0), *sorted(taken), (end, end)]
    return [(low, high) for (_, low), (high, _) in pairwise(edges) if high > low]


def _set(descriptor: int, kind: int, start: int, size: int) -> None:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, start, size, 0))
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise ResourceError(
                "Shared memory needs locks of open files (F_OFD_SETLK, Linux 3.15 or newer), which this system lacks."
            ) from error
        raise


def _end_of_hold(path: Path, start: int, size: int) -> int:
    """Return where the hold that is in the way ends; ``start`` when it has just ended."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, size, 0)
        kind, _, low, length, _ = _LOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))
    finally:
        os.close(descriptor)
    return start if kind == fcntl.F_UNLCK else low + length
