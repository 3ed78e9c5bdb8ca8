"""How ranks of one host give each other their shards when a cell ends, however it ends.

Each rank has two files without a name, which every other rank has open too: what was before the cell, written when it
begins, and what is after it. A group that was released, or whose rank died, carries nothing any more; these files do,
also those of a process that is gone. A third one, the board, says how far a rank has come::

    running ──> writing ──> done (with the number of steps that it has made)
                       └──> given up: the state from before the cell is what counts

Knows files and processes; does not know what shards are.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.group.ranks import Ranks

_ROW = struct.Struct("<6q")  # pid, when it started, and descriptors of the three files
_BOARD = struct.Struct("<2q?")
_RUNNING, _WRITING, _DONE, _GIVEN_UP = range(4)
# How long a rank that lives and has not come to the end of the cell is waited for: without it the training is lost.
PATIENCE_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 0.002
_WATCH_SECONDS = 0.05


@dataclass(frozen=True)
class Ended:
    """What came of a cell: every rank's payload, or why the one from before is given, and each rank's steps."""

    payloads: list[Any]
    why_before: str
    num_steps: list[int]


@dataclass(frozen=True)
class _Peer:
    pid: int
    started: int
    before: IO[bytes]
    after: IO[bytes]
    board: IO[bytes]


class HostFiles:
    """The files of one cell. Every rank makes one, at the same place.

    Parameters
    ----------
    ranks : Ranks
        The cell's ranks.

    Raises
    ------
    RefusedError
        On every rank, when some ranks are on different hosts, or files cannot be made.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._rank, self._has_failed = ranks.rank, False
        self._files: list[IO[bytes]] = []
        self._peers: list[_Peer] = []
        self._is_over, self._lock = threading.Event(), threading.Lock()
        self._watcher: threading.Thread | None = None
        self._on_failure: Callable[[str], None] = lambda cause: None
        with contextlib.suppress(OSError):
            self._files += [_new_file() for _ in range(3)]
        numbers = [file.fileno() for file in self._files] if len(self._files) == 3 else [-1, -1, -1]
        own = _ROW.pack(os.getpid(), _start_of(os.getpid()), *numbers, 0)
        if self._files:
            self._post(_RUNNING, 0)
        for row in ranks.gather_bytes(own):
            with contextlib.suppress(OSError):
                self._peers.append(_open(*_ROW.unpack(row)[:5]))
        self._agree(
            ranks,
            len(self._peers) == ranks.size,
            f"The workers cannot give each other files in {tempfile.gettempdir()}, by which shards are put together "
            "when the cell ends: sharded needs workers on one host, and room there (TMPDIR names another directory).",
        )

    def _agree(self, ranks: Ranks, is_well: bool, problem: str) -> None:
        """Refuse on every rank what is not well on one. It also lets no rank go on before all are here."""
        if set(ranks.gather_bytes(bytes([is_well]))) != {b"\1"}:
            self.close()
            raise RefusedError(problem)

    def keep(self, ranks: Ranks, payload: Any) -> None:
        """Write what is before the cell. Every rank calls this.

        Raises
        ------
        RefusedError
            On every rank, when there is no room for it on some.
        """
        try:
            torch.save(payload, self._files[0])
            self._files[0].flush()
            is_well = True
        except (OSError, RuntimeError):  # torch's writer has its own error for a full disk
            is_well = False
        self._agree(
            ranks,
            is_well,
            f"There is no room in {tempfile.gettempdir()} for the state from before the cell, which has to be there "
            "when a worker dies with its shards. Free some, or let TMPDIR name another directory.",
        )

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """Tell when another rank has failed: it waits for this rank's shards, and this rank may wait for it elsewhere.

        Parameters
        ----------
        on_failure : callable
            Called at most once, on a thread of its own, with what happened.
        """
        self._on_failure = on_failure
        self._watcher = threading.Thread(target=self._watch, name="openclaw-shards", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._is_over.wait(_WATCH_SECONDS):
            failed = [rank for rank, peer in enumerate(self._peers) if _read(peer)[2]]
            if failed:
                with self._lock:  # not after `stop_watching`: this rank is at the end too
                    if not self._is_over.is_set():
                        self._on_failure(f"rank {failed[0]} has left the cell with an error")
                return

    def stop_watching(self) -> None:
        """Take note that this rank has come to the end of the cell."""
        with self._lock:
            self._is_over.set()

    def give_up(self) -> None:
        """Tell the others that this rank has nothing for them."""
        self._post(_GIVEN_UP, 0, has_failed=True)

    def exchange(
        self, payload: Any, num_steps: int, *, has_failed: bool, patience_seconds: float = PATIENCE_SECONDS
    ) -> Ended:
        """Give the others what is after the cell, and return what all have given.

        Parameters
        ----------
        payload : object
            Of tensors.
        num_steps : int
            How many optimizer steps this rank has made.
        has_failed : bool
            Whether this rank has left the cell while others may be in it.
        patience_seconds : float
            How long a rank that lives and is still in the cell is waited for.
        """
        self._has_failed = has_failed
        self._post(_WRITING, num_steps)
        try:
            torch.save(payload, self._files[1])
            self._files[1].flush()
        except (OSError, RuntimeError):
            return self._before(
                f"there was no room in {tempfile.gettempdir()} for rank {self._rank}'s shards"
            )
        self._post(_DONE, num_steps)
        why = self._wait(patience_seconds)
        if why:
            return self._before(why)
        return Ended(
            [_load(peer.after) for peer in self._peers], "", [_read(peer)[1] for peer in self._peers]
        )

    def _before(self, why: str) -> Ended:
        self._post(_GIVEN_UP, 0, has_failed=True)
        return Ended([_load(peer.before) for peer in self._peers], why, [])

    def _wait(self, patience_seconds: float) -> str:
        """Wait until every rank is done; return why one will not be."""
        deadline = time.monotonic() + patience_seconds
        while True:
            states = [_read(peer)[0] for peer in self._peers]
            if _GIVEN_UP in states:
                return f"rank {states.index(_GIVEN_UP)} could not give its shards"
            missing = [rank for rank, state in enumerate(states) if state != _DONE]
            if not missing:
                return ""
            for rank in missing:
                if not self._is_alive(rank) and _read(self._peers[rank])[0] != _DONE:
                    return f"rank {rank} is gone, and its shards with it"
            if time.monotonic() > deadline and _RUNNING in states:
                return f"rank {states.index(_RUNNING)} did not come to the end of the cell"
            time.sleep(_LOOK_AGAIN_SECONDS)

    def _is_alive(self, rank: int) -> bool:
        peer = self._peers[rank]
        return _start_of(peer.pid) == peer.started

    def _post(self, state: int, num_steps: int, *, has_failed: bool = False) -> None:
        self._has_failed |= has_failed
        os.pwrite(self._files[2].fileno(), _BOARD.pack(state, num_steps, self._has_failed), 0)

    def close(self) -> None:
        """Let go of the files; they are gone when no rank has them open."""
        self.stop_watching()
        if self._watcher is not None:
            self._watcher.join()  # it reads the files
        files: list[IO[bytes]] = [*self._files]
        for peer in self._peers:
            files += [peer.before, peer.after, peer.board]
        for file in files:
            file.close()


def _new_file() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="openclaw-")


def _open(pid: int, started: int, *numbers: int) -> _Peer:
    if _start_of(pid) != started:
        raise OSError("a process of another host")
    return _Peer(pid, started, *(_reopen(pid, number) for number in numbers))


def _reopen(pid: int, number: int) -> IO[bytes]:
    return open(f"/proc/{pid}/fd/{number}", "rb")


def _start_of(pid: int) -> int:
    """Return when a process started, in the kernel's ticks; 0 when there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def _read(peer: _Peer) -> tuple[int, int, bool]:
    """Return how far a rank has come, its steps, and whether it has failed."""
    state, num_steps, has_failed = _BOARD.unpack(os.pread(peer.board.fileno(), _BOARD.size, 0))
    return state, num_steps, has_failed


def _load(file: IO[bytes]) -> Any:
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu")
