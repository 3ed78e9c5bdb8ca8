r"""Unix sockets between all ranks of one host: short messages, and an end to every wait.

    rank 0 ──── rank 1        each pair has one connection; the lower rank listens, the higher one connects
        \\      /
         rank 2

Each rank listens under an abstract name, which leaves no file behind. Whoever connects must run as the same
user and show the secret that the ranks share through their store. A rank that dies closes its ends, which the
others notice at once, unless a child that it has forked still holds them. `Mesh.cut` ends this rank's own waits
from any thread.

Knows sockets and bytes; does not know what the messages are for.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from openclaw_nb.core.errors import MismatchError

MAX_BYTES = 32 * 1024  # far below a socket's buffer: all ranks send before they receive
_LIMIT_SECONDS = 20.0
_GREETING_SECONDS = 5.0
_SECRET_BYTES = 16
_NUMBER = struct.Struct("<Q")
_HEADER = struct.Struct("<QQ")  # number of the message, bytes that follow


class Mesh:
    """The connections of one rank.

    Parameters
    ----------
    rank : int
        This rank.
    peers : dict of int to socket
        Each other rank's connection.
    """

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        self.rank = rank
        self.size = len(peers) + 1
        self._peers = dict(sorted(peers.items()))
        for peer in peers.values():
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * MAX_BYTES)
        self._count = 0

    def exchange(self, data: bytes = b"") -> list[bytes]:
        """Give every rank ``data`` and return what each one gave, by rank. Waits for all of them.

        Parameters
        ----------
        data : bytes
            At most `MAX_BYTES`, of the same length on every rank.

        Raises
        ------
        ConnectionError
            When a rank is gone, or after `cut`.
        MismatchError
            When another rank gave another number of bytes.
        """
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes do not fit into a message of {MAX_BYTES}.")
        self._count += 1
        message = _HEADER.pack(self._count, len(data)) + data
        for peer in self._peers.values():
            peer.sendall(message)
        given = {rank: self._receive(rank, len(data)) for rank in self._peers}
        return [data if rank == self.rank else given[rank] for rank in range(self.size)]

    def _receive(self, rank: int, length: int) -> bytes:
        peer = self._peers[rank]
        header = _HEADER.unpack(receive_exactly(peer, _HEADER.size))
        if header != (self._count, length):
            self.cut()  # what follows in the connection can no longer be read
            raise MismatchError(
                f"Rank {rank} gives {header[1]} bytes as message {header[0]}, rank {self.rank} gives {length} as "
                f"message {self._count}. Every rank must make the same calls in the same order."
            )
        return receive_exactly(peer, length)

    def share_file(self, descriptor: int) -> list[int]:
        """Give every rank an open file and return each one's, by rank, as descriptors to be closed.

        One rank after the other: how many descriptors a user may have under way is limited.
        """
        given: list[int] = []
        try:
            for rank in range(self.size):
                if rank == self.rank:
                    given.append(os.dup(descriptor))
                    for peer in self._peers.values():
                        socket.send_fds(peer, [b"\0"], [descriptor])
                else:
                    given.append(_receive_file(self._peers[rank]))
                self.exchange()
        except BaseException:
            for each in given:
                os.close(each)
            raise
        return given

    def cut(self) -> None:
        """End this rank's waits, now and later; the other ranks notice. Callable from any thread."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # the other end is gone already
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections, when nobody waits on them any more."""
        for peer in self._peers.values():
            peer.close()


def connect(store: dist.Store, rank: int, size: int) -> Mesh | None:
    """Connect this rank with all others, if all are on one host.

    Every rank of the group calls this. Waits for the others in ``store``.

    Returns
    -------
    Mesh or None
        None, on every rank, when some rank is on another host or could not be reached.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"openclaw-{secrets.token_hex(16)}"
        listener.bind(f"\0{name}")
        listener.listen(size)
        listener.settimeout(_LIMIT_SECONDS)
        if rank == 0:
            store.set("secret", secrets.token_hex(_SECRET_BYTES))
        store.set(f"name-{rank}", f"{_host()} {name}")
        names = [store.get(f"name-{other}").decode().split(" ", 1) for other in range(size)]
        secret = bytes.fromhex(store.get("secret").decode())
        peers: dict[int, socket.socket] = {}
        if len({host for host, _ in names}) == 1:
            with contextlib.suppress(OSError):
                peers.update(_dial(rank, [name for _, name in names[:rank]], secret))
                peers.update(_answer(listener, size - 1 - rank, secret))
    store.set(f"connected-{rank}", str(len(peers) == size - 1))
    if all(store.get(f"connected-{other}") == b"True" for other in range(size)):
        return Mesh(rank, peers)
    for peer in peers.values():
        peer.close()
    return None


def _host() -> str:
    """Name this host as far as Unix sockets and memory are shared: one kernel, one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def _dial(rank: int, names: list[str], secret: bytes) -> Iterator[tuple[int, socket.socket]]:
    for other, name in enumerate(names):
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(_LIMIT_SECONDS)
        peer.connect(f"\0{name}")
        if not _is_own_user(peer):
            raise ConnectionError("Another user listens in place of a rank.")
        peer.sendall(secret + _NUMBER.pack(rank))
        peer.settimeout(None)
        yield other, peer


def _answer(listener: socket.socket, count: int, secret: bytes) -> Iterator[tuple[int, socket.socket]]:
    while count:
        peer, _ = listener.accept()
        peer.settimeout(_GREETING_SECONDS)
        greeting = b""
        with contextlib.suppress(OSError):  # a stranger that says nothing, or leaves
            greeting = receive_exactly(peer, _SECRET_BYTES + _NUMBER.size) if _is_own_user(peer) else b""
        if not secrets.compare_digest(greeting[:_SECRET_BYTES], secret):
            peer.close()
            continue
        peer.settimeout(None)
        count -= 1
        yield _NUMBER.unpack(greeting[_SECRET_BYTES:])[0], peer


def _is_own_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.geteuid())


def receive_exactly(peer: socket.socket, length: int) -> bytes:
    """Receive ``length`` bytes.

    Raises
    ------
    ConnectionError
        When the other end closes before.
    """
    parts = bytearray()
    while len(parts) < length:
        part = peer.recv(length - len(parts))
        if not part:
            raise ConnectionResetError("Connection closed by peer")
        parts += part
    return bytes(parts)


def _receive_file(peer: socket.socket) -> int:
    data, descriptors, _, _ = socket.recv_fds(peer, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not data or not descriptors:
        raise ConnectionResetError("Connection closed by peer")
    return descriptors[0]
