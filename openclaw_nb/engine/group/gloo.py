"""Gloo groups whose sockets can be found again and cut.

Gloo offers no way to end a collective that waits for a peer. Each group made here therefore talks over
a loopback address of its own, so that exactly its sockets can be found among the process's descriptors
and shut, which wakes gloo's threads. The receiving side is shut (SHUT_RD) on a duplicate that stays open:
shutting both directions makes gloo forget a half-written send, whose thread then sleeps until the timeout.

Knows gloo and sockets; does not know what a collective is or why it is cut.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from openclaw_nb.engine import settings

NUM_THREADS = 2


def private_address(tag: str, serial: int) -> str:
    """Return a loopback address for one group: the same on each rank, another for each group.

    Parameters
    ----------
    tag : str
        Hexadecimal id of the cluster; keeps two clusters of one host apart.
    serial : int
        Number of the group.
    """
    spread = int(tag[:8] or "0", 16) * 2654435761 + serial * 40503
    return f"127.{64 + spread % 128}.{(spread >> 8) % 254 + 1}.{(spread >> 16) % 254 + 1}"


def create(
    store: dist.Store, rank: int, size: int, timeout: timedelta, address: str
) -> dist.ProcessGroupGloo:
    """Build a gloo backend on ``address``. Blocks until every rank has come."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # the stubs have another name
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._threads = NUM_THREADS
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def size_buffers(address: str) -> tuple[int, int] | None:
    """Give the group's sockets the buffers that are configured; see `openclaw_nb.engine.settings.size_buffers`."""
    if "socket_buffer_size" not in settings.told(os.environ):
        return None
    sockets = list(_sockets_at(address))
    try:
        return settings.size_buffers(sockets, os.environ)
    finally:
        for each in sockets:
            each.close()


class Scissors:
    """Cuts every socket of this process that has one end at an address.

    Parameters
    ----------
    address : str
        The loopback address given to `create`.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._held: dict[int, socket.socket] = {}
        self._lock = threading.Lock()

    def cut(self) -> int:
        """Cut the sockets that are there now; return how many were new.

        Late connections appear after the first cut, so callers repeat this until the group is silent.
        """
        count = 0
        with self._lock:
            for duplicate in _sockets_at(self._address):
                inode = os.fstat(duplicate.fileno()).st_ino
                if inode in self._held:
                    duplicate.close()
                    continue
                self._held[inode] = duplicate
                count += _shut_reading(duplicate)
        return count

    def close(self) -> None:
        """Let go of the duplicates; call when no operation of the group is left."""
        with self._lock:
            for duplicate in self._held.values():
                duplicate.close()
            self._held.clear()


def _shut_reading(sock: socket.socket) -> bool:
    try:
        sock.shutdown(socket.SHUT_RD)
    except OSError:  # not connected (any more): nothing to wake
        return False
    return True


def _sockets_at(address: str) -> Iterator[socket.socket]:
    """Yield a duplicate of each connected socket of this process with one end at ``address``."""
    for name in os.listdir("/proc/self/fd"):
        duplicate = _duplicate(name)
        if duplicate is None:
            continue
        if address in _ends(duplicate):
            yield duplicate
        else:
            duplicate.close()


def _duplicate(name: str) -> socket.socket | None:
    try:
        if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
            return None
        descriptor = os.dup(int(name))
    except OSError:  # closed since it was listed
        return None
    try:
        return socket.socket(fileno=descriptor)
    except OSError:  # its number was given to something else in between
        os.close(descriptor)
        return None


def _ends(sock: socket.socket) -> tuple[str, ...]:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return ()
    try:
        ends = (sock.getsockname()[0], sock.getpeername()[0])
    except OSError:  # a listener, or not connected any more
        return ()
    return tuple(str(end).removeprefix("::ffff:") for end in ends)
