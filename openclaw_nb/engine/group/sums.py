"""Sums flat tensors over the ranks: through shared memory where all are on one host, by MPI (`mpi`), or the backend.

    input of each rank ── in memory that every rank of the host has mapped
        │ all ranks are ready
        ▼
    2 ranks, or few values: each adds everything up itself
    else:                   rank r adds up its r-th part (reduce-scatter), then takes over the others' (all-gather)
        ▼
    result ── the rank's own memory, the same bits on every rank

Inputs take turns (two of them), so that a rank can fill the next while another still reads the last. The memory has no
name (``memfd_create``): whatever happens to the processes, nothing is left, and ``/dev/shm`` may be small.

The two-step form is that of Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from openclaw_nb.core.errors import MismatchError
from openclaw_nb.core.host import available_memory_bytes
from openclaw_nb.engine.group.collectives import PendingWork, ReleasableGroup, signature
from openclaw_nb.engine.group.mesh import MAX_BYTES, Mesh

_NUM_TURNS = 2
_ALIGNMENT = 64  # bytes of a cache line: ranks do not write into each other's
_WHICH = struct.Struct("<QQ")
_REPLY = struct.Struct("<Q?")
_FEW_BYTES = 16 * 1024
# The share of the memory that is free now which all ranks' inputs together may take.
_MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class Layout:
    """A flat tensor to be summed: number of values, their type and device."""

    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in shared memory."""
        size = self.numel * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


class Peers(Protocol):
    """The ranks of a group, for short messages: `openclaw_nb.engine.group.mesh.Mesh` and its like."""

    rank: int
    size: int

    def exchange(self, data: bytes = b"") -> list[bytes]:
        """Give every rank ``data`` and return what each one gave, by rank."""

    def cut(self) -> None:
        """End this rank's waits, now and later."""


class Sum(Protocol):
    """A sum that is made again and again: ``inputs`` are filled in turn, ``result`` is read."""

    result: Tensor

    @property
    def inputs(self) -> Sequence[Tensor]:
        """What this rank gives, by turn."""

    def start(self, turn: int, number: int) -> PendingWork | None:
        """Begin to sum; see `BackendSum.start`."""


class Shortcut(Protocol):
    """A way between the ranks that is better than the backend's, for sums and short messages on the CPU."""

    max_bytes: int

    def exchange(self, data: bytes = b"") -> list[bytes]:
        """Give every rank ``data``, at most ``max_bytes``, and return what each one gave, by rank."""

    def make_sums(self, group: ReleasableGroup, layouts: Sequence[Layout]) -> Sequence[Sum] | None:
        """Return a sum for each layout, or None on every rank, if on some rank it cannot be had."""

    def close(self) -> None:
        """Let go of it, when nobody waits any more."""


class BackendSum:
    """A sum that is made again and again, in place, by the group's backend.

    ``inputs`` are filled in turn, ``result`` is there when what `start` returned has been waited for.

    Parameters
    ----------
    group : ReleasableGroup
        The ranks.
    layout : Layout
        What is summed.
    """

    def __init__(self, group: ReleasableGroup, layout: Layout) -> None:
        self._group = group
        self.result = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
        self.inputs = (self.result,)

    def start(self, turn: int, number: int) -> PendingWork | None:
        """Begin to sum; None when there is nothing to wait for.

        Parameters
        ----------
        turn : int
            Which of ``inputs``.
        number : int
            Of the pass: sums of different passes are not the same sum.
        """
        return self._group.allreduce([self.result]) if self._group.size() > 1 else None


class SharedSum:
    """A sum as `BackendSum`, through shared memory.

    Parameters
    ----------
    group : ReleasableGroup
        Where the call is noted; ends its wait on release.
    mesh : Mesh
        By which the ranks wait for each other.
    place : int
        Of this sum among those that were made together.
    inputs : sequence of sequence of Tensor
        Each turn's input of each rank, ``inputs[turn][rank]``.
    """

    def __init__(
        self, group: ReleasableGroup, mesh: Mesh, place: int, inputs: Sequence[Sequence[Tensor]]
    ) -> None:
        self._group, self._mesh, self._place = group, mesh, place
        self._every = inputs
        self.inputs = [turn[mesh.rank] for turn in inputs]
        self.result = torch.zeros_like(self.inputs[0])
        self._call = signature("all_reduce", [self.result], "sum")
        size = self.result.numel()
        direct = mesh.size == 2 or size * self.result.element_size() <= _FEW_BYTES
        self._bounds = (
            [(0, size)] * mesh.size if direct else _parts(size, mesh.size, self.result.element_size())
        )
        self._direct = direct

    def start(self, turn: int, number: int) -> PendingWork:
        """Begin to sum ``inputs[turn]``; see `BackendSum.start`."""
        inputs = self._every[turn]
        return self._group.start_apart(self._call, [self.result], lambda: self._sum(inputs, number))

    def _sum(self, inputs: Sequence[Tensor], number: int) -> None:
        meet(self._mesh, self._place, number)
        rank = self._mesh.rank
        low, high = self._bounds[rank]
        own = self.result[low:high]
        torch.add(inputs[0][low:high], inputs[1][low:high], out=own)
        for more in inputs[2:]:
            own.add_(more[low:high])
        if self._direct:
            return
        inputs[rank][low:high].copy_(own)
        self._mesh.exchange()
        for source, (low, high) in enumerate(self._bounds):
            if source != rank:
                self.result[low:high].copy_(inputs[source][low:high])


def meet(peers: Peers, place: int, number: int) -> None:
    """Wait until every rank is ready for the sum of this place, of the same pass.

    Raises
    ------
    MismatchError
        When a rank is at another one.
    """
    told = peers.exchange(_WHICH.pack(place, number))
    if len(set(told)) == 1:
        return
    peers.cut()  # nothing that is summed after this would be right
    passes = ", ".join(f"rank {rank} in pass {_WHICH.unpack(each)[1]}" for rank, each in enumerate(told))
    raise MismatchError(
        f"The ranks reduce gradients of different backward passes: {passes}. A rank has skipped a backward(), or "
        "caught an error in the middle of one."
    )


def check_sizes(sizes: Sequence[int]) -> None:
    """Raise a MismatchError unless all ranks' sums have the same size in bytes."""
    if len(set(sizes)) > 1:
        raise MismatchError(
            f"The ranks' gradients differ in size: {', '.join(map(str, sizes))} bytes by rank. "
            "Every rank must train the same parameters."
        )


def _parts(numel: int, count: int, item_bytes: int) -> list[tuple[int, int]]:
    """Cut a range into ``count`` parts whose bounds are on cache lines."""
    line = _ALIGNMENT // item_bytes
    step = -(-numel // (count * line)) * line
    return [(min(i * step, numel), min((i + 1) * step, numel)) for i in range(count)]


class SharedMemory:
    """Memory of every rank of the host, mapped by every rank; grows, and is kept for the group's life.

    Parameters
    ----------
    mesh : Mesh
        The ranks. Only the thread that runs the group's calls may talk on it.
    """

    max_bytes = MAX_BYTES

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._size = 0
        self._maps: list[mmap.mmap] = []
        own = os.memfd_create("openclaw-sums", os.MFD_CLOEXEC)
        try:
            self._files = mesh.share_file(own)
        finally:
            os.close(own)
        self._closer = weakref.finalize(self, _close_files, self._files)

    def exchange(self, data: bytes = b"") -> list[bytes]:
        """Give every rank ``data`` and return what each one gave; see `Mesh.exchange`."""
        return self.mesh.exchange(data)

    def make_sums(self, group: ReleasableGroup, layouts: Sequence[Layout]) -> Sequence[Sum] | None:
        """Return a sum for each layout, or None on every rank if on some rank the memory is too small."""
        placed: list[list[list[list[Tensor]]] | None] = []
        group.start_apart("shared memory", [], lambda: placed.append(self.lay_out(layouts))).wait()
        if placed[0] is None:
            return None
        return [SharedSum(group, self.mesh, place, inputs) for place, inputs in enumerate(placed[0])]

    def lay_out(self, layouts: Sequence[Layout]) -> list[list[list[Tensor]]] | None:
        """Place inputs over whatever was placed before. Every rank calls this with the same layouts.

        Returns
        -------
        list or None
            ``[layout][turn][rank]``; None, on every rank, if on some rank the memory is too small for it.

        Raises
        ------
        MismatchError
            When the ranks' layouts have different sizes.
        """
        total = _NUM_TURNS * sum(layout.num_bytes for layout in layouts)
        can = total <= self._size or self._grow(total)
        replies = [_REPLY.unpack(reply) for reply in self.mesh.exchange(_REPLY.pack(total, can))]
        check_sizes([size for size, _ in replies])
        if not all(able for _, able in replies) or (total > self._size and not self._map(total)):
            os.ftruncate(self._files[self.mesh.rank], self._size)
            return None
        return [[self._place(layout, start) for start in starts] for layout, starts in _starts(layouts)]

    def _map(self, size: int) -> bool:
        """Map every rank's memory; return whether all ranks could, else none has."""
        try:
            maps = [mmap.mmap(file, size) for file in self._files]
        except OSError:  # a limit of the process, such as that of its address space
            maps = []
        if set(self.mesh.exchange(bytes([bool(maps)]))) != {b"\1"}:
            return False
        self._maps, self._size = maps, size
        return True

    def _grow(self, size: int) -> bool:
        if size * self.mesh.size > _MEMORY_SHARE * available_memory_bytes():
            return False
        try:  # written to now, the memory is either there or an error; later it would be a signal
            os.posix_fallocate(self._files[self.mesh.rank], 0, size)
        except OSError:
            return False
        return True

    def _place(self, layout: Layout, start: int) -> list[Tensor]:
        if not layout.numel:
            return [torch.empty(0, dtype=layout.dtype) for _ in range(self.mesh.size)]
        return [
            torch.frombuffer(memory, dtype=layout.dtype, count=layout.numel, offset=start)
            for memory in self._maps
        ]

    def close(self) -> None:
        """Let go of the files and the ranks; the memory goes with the last tensor in it."""
        self.mesh.close()
        self._maps = []
        self._closer()


def _close_files(files: list[int]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            os.close(file)


def _starts(layouts: Sequence[Layout]) -> Iterator[tuple[Layout, list[int]]]:
    start = 0
    for layout in layouts:
        yield layout, [start + turn * layout.num_bytes for turn in range(_NUM_TURNS)]
        start += _NUM_TURNS * layout.num_bytes


def make_sums(group: ReleasableGroup, shortcut: Shortcut | None, layouts: Sequence[Layout]) -> Sequence[Sum]:
    """Return a sum for each layout, through the shortcut where that can be. Every rank calls this alike.

    Parameters
    ----------
    group : ReleasableGroup
        The ranks.
    shortcut : Shortcut or None
        Theirs, if they have one.
    layouts : sequence of Layout
        What is to be summed.
    """
    sums = None
    if shortcut is not None and all(layout.device.type == "cpu" for layout in layouts):
        sums = shortcut.make_sums(group, layouts)
    return sums if sums is not None else [BackendSum(group, layout) for layout in layouts]
