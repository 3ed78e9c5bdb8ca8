"""FSDP's collectives on the step engine's own group, where the ranks of one host can tell cheaply that they agree.

A group that a cell uses compares each call by a collective of its own, which costs as much as a small layer's. Here the
ranks compare by a short message on the way that they share (`Ranks.shortcut`), and then make the call.

Knows FSDP's interfaces for collectives; does not know what is gathered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from openclaw_nb.core.errors import MismatchError
from openclaw_nb.engine.group.collectives import signature
from openclaw_nb.engine.group.ranks import Ranks


class _Compared:
    """What both kinds of calls share.

    Parameters
    ----------
    ranks : Ranks
        The ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _compare(self, call: str) -> None:
        rows = self._ranks.gather_bytes(hashlib.blake2b(call.encode(), digest_size=16).digest())
        if len(set(rows)) > 1:
            raise MismatchError(
                f"The ranks disagree about a collective of the sharded model: rank {self._ranks.rank} calls {call}. "
                "Every rank must call the model, and use the same layers of it, as often as the others."
            )


class ComparedAllGather(_Compared, AllGather):
    """Gathers a layer's parameters."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Gather; FSDP waits by itself when ``async_op``."""
        self._compare(signature("all_gather_into_tensor", [input_tensor]))
        work = self._ranks.group.all_gather_single(output_tensor, input_tensor)
        return work if async_op else work.wait() and None


class ComparedReduceScatter(_Compared, ReduceScatter):
    """Reduces a layer's gradients into shards."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce; see `ComparedAllGather`."""
        self._compare(signature("reduce_scatter_tensor", [input_tensor]))
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        work = self._ranks.group.reduce_scatter_single(output_tensor, input_tensor, options)
        return work if async_op else work.wait() and None
