"""Messages and sums between ranks that mpiexec has started, through MPI, with an end to every wait.

    all ranks meet ── a short all-gather; who waits for it sleeps more and more
        │ all have come
        ▼
    the call itself ── takes as long as the data does, so that it is asked after without sleeping

All calls are non-blocking and asked after from Python, so that `Channel.cut` ends a wait from any thread. Ranks are
not cut in the same instant, so a call that has begun is carried on for a moment after a cut: once all have met, it
ends on all of them. One that does not, because a rank never came or stands still, is given up for good: its buffers are
kept, as MPI may still write to them, and so is its communicator, which nobody uses again.

Each epoch has a communicator of its own. mpi4py is imported by `start`, which is called where MPI is asked for and
nowhere else. Knows MPI and tensors; does not know cells or what is summed.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from openclaw_nb.core.errors import GroupError, MismatchError
from openclaw_nb.engine.group.collectives import PendingWork, ReleasableGroup, signature
from openclaw_nb.engine.group.sums import Layout, Sum, check_sizes, meet

_HEADER = struct.Struct("<QQ")  # number of the message, bytes that follow
_FRAME_BYTES = 64
_SIZE = struct.Struct("<Q")
_NUM_TAGS = 32_768  # every MPI has as many
_LINGER_SECONDS = 2.0
# Waiting for a rank: for how long it is asked again at once, then which part of the time waited is slept, and at most.
_SPIN_SECONDS = 0.0002
_SLEEP_SHARE = 0.125
_LONGEST_SLEEP_SECONDS = 0.001
# A call for which nobody is late is asked after at once, unless it takes so long that a rank must stand still.
_TRANSFER_SPIN_SECONDS = 0.5
_SUMMED_BY_MPI = (torch.float32, torch.float64, torch.int32, torch.int64)

_given_up: list[Any] = []  # requests with their buffers and communicators


def start() -> Any:
    """Return mpi4py's module with MPI initialised for calls from several threads. All workers of the set call this.

    Raises
    ------
    GroupError
        When there is no usable MPI.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI

        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    except (ImportError, RuntimeError) as error:
        raise GroupError(f"mpi4py cannot be used on this worker: {error}") from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise GroupError(
            "MPI was initialised without support for threads (MPI_THREAD_MULTIPLE), which the sums need: by a cell "
            "that imported mpi4py with other settings, or by an MPI that was built without it."
        )
    return MPI


def join(store: dist.Store, rank: int, size: int, epoch: int) -> Channel:
    """Make a communicator of this epoch's ranks. Every one of them calls this.

    Raises
    ------
    GroupError
        When there is no usable MPI, or mpiexec and mpi4py belong to different ones.
    """
    # Initialising MPI waits for all ranks and lets no other thread run meanwhile: nobody begins before all are there.
    store.set(f"rank-{rank}", "here")
    for other in range(size):
        store.get(f"rank-{other}")
    mpi = start()
    world = mpi.COMM_WORLD
    store.set(f"world-rank-{rank}", str(world.Get_rank()))
    # Making a communicator blocks: all ranks are awaited in the store first.
    members = [int(store.get(f"world-rank-{other}")) for other in range(size)]
    if len(set(members)) < size:
        raise GroupError(
            "Each rank is alone in its MPI: the mpiexec that has started the workers and the library that mpi4py "
            f"found ({mpi.Get_library_version().split(',')[0]}) do not belong together. Install both from one source."
        )
    return Channel(world.Create_group(world.Get_group().Incl(members), epoch % _NUM_TAGS))


class Channel:
    """The ranks of one epoch, by MPI.

    Only the thread that runs the group's calls may talk on it; `cut` may be called from any.

    Parameters
    ----------
    communicator : mpi4py.MPI.Intracomm
        Nobody else's.
    """

    max_bytes = 2**31 - 1  # MPI counts with an int

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()
        self._count = 0
        self._cut_at: float | None = None
        self._used_up = False

    def exchange(self, data: bytes = b"") -> list[bytes]:
        """Give every rank ``data`` and return what each one gave, by rank. Waits for all of them.

        Parameters
        ----------
        data : bytes
            Of the same length on every rank.

        Raises
        ------
        ConnectionError
            After `cut`.
        MismatchError
            When another rank gives another length, or is at another exchange.
        """
        self._check_whole()
        self._count += 1
        header = _HEADER.pack(self._count, len(data))
        fits = len(header) + len(data) <= _FRAME_BYTES
        frame = header + data if fits else header
        frames = self._gather(frame.ljust(_FRAME_BYTES, b"\0"), _SPIN_SECONDS)
        self._compare([_HEADER.unpack_from(each) for each in frames])
        if fits:
            given = [each[len(header) : len(header) + len(data)] for each in frames]
        else:
            given = self._gather(data, _TRANSFER_SPIN_SECONDS)
        return given

    def _check_whole(self) -> None:
        if self._cut_at is not None:
            raise _lost()

    def _compare(self, headers: Sequence[tuple[int, ...]]) -> None:
        mine = headers[self.rank]
        for rank, header in enumerate(headers):
            if header != mine:
                self.cut()
                raise MismatchError(
                    f"Rank {rank} gives {header[1]} bytes as message {header[0]}, rank {self.rank} gives {mine[1]} as "
                    f"message {mine[0]}. Every rank must make the same calls in the same order."
                )

    def _gather(self, data: bytes, spin_seconds: float) -> list[bytes]:
        own = np.frombuffer(data, np.uint8)
        every = np.empty((self.size, len(data)), np.uint8)
        self._await(self._communicator.Iallgather(own, every), (own, every), spin_seconds)
        return [row.tobytes() for row in every]

    def add_up(self, source: Tensor, result: Tensor) -> None:
        """Put the sum of all ranks' ``source`` into ``result``. All ranks have just met (`exchange`)."""
        if result.dtype not in _SUMMED_BY_MPI:
            wide = torch.empty(result.shape, dtype=torch.float32)
            self.add_up(source.float(), wide)
            result.copy_(wide)
            return
        own, total = source.numpy(), result.numpy()
        self._await(self._communicator.Iallreduce(own, total), (own, total), _TRANSFER_SPIN_SECONDS)

    def _await(self, request: Any, buffers: tuple[Any, ...], spin_seconds: float) -> None:
        began = time.monotonic()
        while not request.Test():
            now = time.monotonic()
            if self._cut_at is not None and now - self._cut_at > _LINGER_SECONDS:
                self._used_up = True
                _given_up.append((self._communicator, request, buffers))
                raise _lost()
            if now - began < spin_seconds:
                os.sched_yield()
            else:
                time.sleep(min((now - began) * _SLEEP_SHARE, _LONGEST_SLEEP_SECONDS))

    def make_sums(self, group: ReleasableGroup, layouts: Sequence[Layout]) -> Sequence[Sum]:
        """Return a sum for each layout; see `openclaw_nb.engine.group.sums.make_sums`."""
        total = sum(layout.num_bytes for layout in layouts)

        def compare() -> None:
            check_sizes([_SIZE.unpack(each)[0] for each in self.exchange(_SIZE.pack(total))])

        group.start_apart("all_gather(sizes)", [], compare).wait()
        return [MpiSum(group, self, place, layout) for place, layout in enumerate(layouts)]

    def cut(self) -> None:
        """End this rank's waits, now and later. Callable from any thread, again and again."""
        if self._cut_at is None:
            self._cut_at = time.monotonic()

    def close(self) -> None:
        """Let go of the communicator, when nobody waits on it any more."""
        if not self._used_up:
            self._communicator.Free()


class MpiSum:
    """A sum as `openclaw_nb.engine.group.sums.BackendSum`, by MPI.

    Parameters
    ----------
    group : ReleasableGroup
        Where the call is noted; ends its wait on release.
    channel : Channel
        The ranks.
    place : int
        Of this sum among those that were made together.
    layout : Layout
        What is summed, on the CPU.
    """

    def __init__(self, group: ReleasableGroup, channel: Channel, place: int, layout: Layout) -> None:
        self._group, self._channel, self._place = group, channel, place
        self.result = torch.zeros(layout.numel, dtype=layout.dtype)
        # Apart from the result: in place, MPI takes twice as long.
        self.inputs = (torch.zeros_like(self.result),)
        self._call = signature("all_reduce", [self.result], "sum")

    def start(self, turn: int, number: int) -> PendingWork:
        """Begin to sum; see `openclaw_nb.engine.group.sums.BackendSum.start`."""
        return self._group.start_apart(self._call, [self.result], lambda: self._sum(number))

    def _sum(self, number: int) -> None:
        meet(self._channel, self._place, number)
        self._channel.add_up(self.inputs[0], self.result)


def _lost() -> ConnectionResetError:
    return ConnectionResetError("Connection reset by peer")
