"""What the step engine asks of the other ranks, in plain verbs over the group.

Every call here is made by all ranks in the same order. Knows tensors and bytes, not what they mean.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d as dist

from openclaw_nb.core.errors import GroupError
from openclaw_nb.engine.group.collectives import ReleasableGroup, signature
from openclaw_nb.engine.group.sums import BackendSum, Layout, Shortcut, Sum, make_sums

Divide = Callable[[tuple[tuple[int, ...], ...], str], tuple[ReleasableGroup, Shortcut | None]]
"""Makes the group of this rank's part of the ranks."""


class Ranks:
    """The ranks of a strategy cell, or of a part of them.

    Parameters
    ----------
    group : ReleasableGroup
        The step engine's own group.
    shortcut : Shortcut, optional
        Shared memory or MPI, if the ranks have it.
    divide : callable, optional
        Makes groups of parts of the ranks.
    """

    def __init__(
        self, group: ReleasableGroup, shortcut: Shortcut | None = None, divide: Divide | None = None
    ) -> None:
        self._divide = divide
        self.bind(group, shortcut)

    def split(self, parts: Sequence[Sequence[int]], purpose: str) -> Ranks:
        """Return the part of the ranks that this rank is in, as ranks of their own, numbered by their order in it.

        Every rank calls this with the same parts. Waits of a part end as those of the whole do, with it. A part that is
        all ranks has a group of its own, too, so that its calls are not taken for others.

        Parameters
        ----------
        parts : sequence of sequence of int
            Each rank in exactly one of them.
        purpose : str
            Shown where waits are shown. The same parts for the same purpose are the same group.

        Raises
        ------
        ValueError
            When a rank is in none, or in several.
        GroupError
            When these ranks cannot be parted: they are a part themselves, or stand in no worker's group.
        """
        if sorted(rank for part in parts for rank in part) != list(range(self.size)):
            raise ValueError(f"{parts!r} does not have each of {self.size} ranks once.")
        if self._divide is None:
            raise GroupError("These ranks cannot be parted.")
        return Ranks(*self._divide(tuple(tuple(part) for part in parts), purpose))

    def bind(self, group: ReleasableGroup, shortcut: Shortcut | None) -> None:
        """Be the ranks of another group; all that the cell has made of these ranks goes on with it."""
        self.group = group
        self._shortcut = shortcut
        self.short_of_memory = False
        self.rank: int = group.rank()
        self.size: int = group.size()

    @property
    def shortcut(self) -> Shortcut | None:
        """Shared memory or MPI, if the ranks have it."""
        return self._shortcut

    def make_sums(self, layouts: Sequence[Layout]) -> Sequence[Sum]:
        """Return what sums a flat tensor over the ranks, again and again, for each layout."""
        sums = make_sums(self.group, self._shortcut, layouts)
        on_cpu = all(layout.device.type == "cpu" for layout in layouts)
        self.short_of_memory = self._shortcut is not None and on_cpu and isinstance(sums[0], BackendSum)
        return sums

    def gather(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the ranks' vectors as rows, shape [size, k] for vectors of k values."""
        if self.size == 1:
            return vector.detach().unsqueeze(0)
        source = vector.detach().contiguous()
        shortcut = self._shortcut
        if shortcut is not None and 0 < source.nbytes <= shortcut.max_bytes and source.device.type == "cpu":
            return self._gather_through(shortcut, source)
        rows = [torch.empty_like(source) for _ in range(self.size)]
        self.group.allgather([rows], [source]).wait()
        return torch.stack(rows)

    def _gather_through(self, shortcut: Shortcut, source: torch.Tensor) -> torch.Tensor:
        rows: list[bytes] = []
        call = signature("all_gather", [source])
        self.group.start_apart(call, [], lambda: rows.extend(shortcut.exchange(_bytes_of(source)))).wait()
        flat = torch.frombuffer(bytearray(b"".join(rows)), dtype=source.dtype)
        return flat.view(self.size, *source.shape)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the value of rank ``source`` on every rank."""
        if self.size == 1:
            return value
        options = dist.BroadcastOptions()
        options.rootRank = source
        data = pickle.dumps(value, protocol=5) if self.rank == source else b""
        length = torch.tensor([len(data)])
        self.group.broadcast([length], options).wait()
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == source:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.group.broadcast([buffer], options).wait()
        return pickle.loads(buffer.numpy().tobytes())

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``; all must have the same length."""
        rows = self.gather(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return [row.numpy().tobytes() for row in rows]

    def gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return all ranks' rows, concatenated in rank order.

        Parameters
        ----------
        rows : Tensor
            Shape [counts[rank], ...].
        counts : sequence of int
            How many rows each rank has.
        """
        if self.size == 1:
            return rows
        longest = max(counts)
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        self.group.allgather([parts], [padded]).wait()
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.view(-1).view(torch.uint8).numpy().tobytes()
