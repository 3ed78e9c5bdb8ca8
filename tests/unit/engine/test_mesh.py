"""Messages between ranks, each rank a thread with real sockets."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from openclaw_nb.core.errors import MismatchError
from openclaw_nb.engine.group import mesh as module
from openclaw_nb.engine.group.mesh import MAX_BYTES, Mesh, connect

from .conftest import connect_ranks, on_threads


def close(meshes: list[Mesh]) -> None:
    for mesh in meshes:
        mesh.close()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_rank_gets_what_every_rank_gave(size: int) -> None:
    meshes = connect_ranks(size)

    def talk(mesh: Mesh) -> list[list[bytes]]:
        return [mesh.exchange(bytes([mesh.rank, turn]) * (MAX_BYTES // 2)) for turn in range(3)]

    given = on_threads([lambda mesh=mesh: talk(mesh) for mesh in meshes])  # type: ignore[misc]
    expected = [[bytes([rank, turn]) * (MAX_BYTES // 2) for rank in range(size)] for turn in range(3)]
    assert given == [expected] * size
    close(meshes)


def test_a_message_that_is_too_long_is_refused() -> None:
    meshes = connect_ranks(2)
    with pytest.raises(ValueError, match="do not fit"):
        meshes[0].exchange(bytes(MAX_BYTES + 1))
    close(meshes)


def test_messages_of_different_length_are_a_mismatch() -> None:
    meshes = connect_ranks(2)

    def talk(mesh: Mesh) -> None:
        with pytest.raises(
            MismatchError, match=f"Rank {1 - mesh.rank} gives {2 - mesh.rank} bytes as message 1"
        ):
            mesh.exchange(bytes(mesh.rank + 1))

    on_threads([lambda mesh=mesh: talk(mesh) for mesh in meshes])  # type: ignore[misc]
    close(meshes)


@pytest.mark.parametrize("cut_own", [True, False], ids=["its own end is cut", "the other rank is gone"])
def test_a_wait_ends(cut_own: bool) -> None:
    meshes = connect_ranks(2)
    threading.Timer(0.2, meshes[0].cut if cut_own else meshes[1].close).start()
    with pytest.raises(ConnectionError):
        meshes[0].exchange(b"x")
    with pytest.raises(ConnectionError):
        meshes[0].exchange(b"x")
    close(meshes)


def test_files_are_shared(tmp_path: Path) -> None:
    meshes = connect_ranks(3)

    def share(mesh: Mesh) -> list[bytes]:
        path = tmp_path / str(mesh.rank)
        path.write_text(f"of rank {mesh.rank}")
        own = os.open(path, os.O_RDONLY)
        files = mesh.share_file(own)
        os.close(own)
        mesh.exchange()
        return [os.pread(file, 100, 0) for file in files]

    given = on_threads([lambda mesh=mesh: share(mesh) for mesh in meshes])  # type: ignore[misc]
    assert given == [[b"of rank 0", b"of rank 1", b"of rank 2"]] * 3
    close(meshes)


def test_ranks_of_different_hosts_are_not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter(["one", "two"])
    monkeypatch.setattr(module, "_host", lambda: next(hosts))
    store = dist.HashStore()
    assert on_threads([lambda rank=rank: connect(store, rank, 2) for rank in range(2)]) == [None, None]  # type: ignore[misc]


def test_a_stranger_without_the_secret_is_turned_away() -> None:
    store = dist.HashStore()

    def intrude() -> bytes:
        name = store.get("name-0").decode().split(" ", 1)[1]
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0{name}")
            stranger.sendall(bytes(24))
            return stranger.recv(1)

    def join_late() -> Mesh | None:
        time.sleep(0.3)
        return connect(store, 1, 2)

    first, second, heard = on_threads([lambda: connect(store, 0, 2), join_late, intrude])
    assert heard == b""
    assert on_threads([lambda: first.exchange(b"a"), lambda: second.exchange(b"b")]) == [[b"a", b"b"]] * 2
    close([first, second])
