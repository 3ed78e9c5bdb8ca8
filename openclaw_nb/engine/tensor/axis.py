"""What the ranks of a tensor-parallel group do together, forward and backward.

    whole   the same tensor on every rank; its gradient is the same on every rank, too
    part    what this rank has of a tensor; its gradient is that of the part, complete

    fan      whole -> whole, for computing on parts: the gradients that come back from each rank are summed
    reduce   summands -> whole: they are summed; the gradient goes to each
    gather   parts -> whole: they are joined; each takes its part of the gradient
    scatter  whole -> part: each takes its own; the gradients are joined

As in Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019
(fan and reduce are its f and g). All waits are those of `Ranks`, and end as they do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.tensor.layout import Layout

_FEW_BYTES = 16 * 1024
_NARROW = (torch.float16, torch.bfloat16)


class TensorAxis:
    """The ranks of a tensor-parallel group, as one of them sees them.

    Parameters
    ----------
    ranks : Ranks
        The group.

    Attributes
    ----------
    is_open : bool
        Whether parameters are taken for what they are here, parts: in optimizers and the step engine.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size
        self.is_open = False
        self._fanned: tuple[Tensor, int, Tensor] | None = None

    @contextlib.contextmanager
    def opened(self, is_open: bool = True) -> Iterator[None]:
        """Take parameters for parts, or not, while the body runs."""
        before, self.is_open = self.is_open, is_open
        try:
            yield
        finally:
            self.is_open = before

    # -------------------------------------------------------------------------------- on plain tensors

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors: the same bits on every rank."""
        if self.size == 1:
            return tensor
        if tensor.nbytes <= _FEW_BYTES:
            rows = self._ranks.gather(tensor)
            total: Tensor = rows.float().sum(0).to(tensor.dtype) if tensor.dtype in _NARROW else rows.sum(0)
            return total
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._ranks.group.allreduce([result]).wait()
        return result

    def rows(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors of one shape, by rank."""
        return tensor.unsqueeze(0) if self.size == 1 else self._ranks.gather(tensor)

    def join(self, part: Tensor, layout: Layout) -> Tensor:
        """Return the whole of which every rank has a part."""
        if self.size == 1:
            return part
        per_block = part.unflatten(layout.dim, (layout.blocks, -1)) if layout.blocks > 1 else part
        dim = layout.dim + (layout.blocks > 1)
        counts = [high - low for low, high in layout.bounds]
        whole = self._gather_along(per_block.movedim(dim, 0), counts).movedim(0, dim)
        return (whole.flatten(layout.dim, dim) if layout.blocks > 1 else whole).contiguous()

    def _gather_along(self, rows: Tensor, counts: list[int]) -> Tensor:
        if len(set(counts)) > 1:
            return self._ranks.gather_rows(rows.detach().contiguous(), counts)
        return self._ranks.gather(rows).flatten(0, 1)

    def part_of(self, whole: Tensor, layout: Layout) -> Tensor:
        """Return this rank's part; a view where it can be."""
        low, high = layout.bounds[self.rank]
        if layout.blocks == 1:
            return whole.narrow(layout.dim, low, high - low)
        blocks: Tensor = whole.unflatten(layout.dim, (layout.blocks, layout.block))
        return blocks.narrow(layout.dim + 1, low, high - low).flatten(layout.dim, layout.dim + 1)

    # -------------------------------------------------------------------------------- with gradients

    def fan(self, whole: Tensor) -> Tensor:
        """Return a whole for computing on parts; several in a row for the same tensor are one."""
        if self.size == 1 or not (whole.requires_grad and torch.is_grad_enabled()):
            return whole
        before = self._fanned
        if before is not None and before[0] is whole and before[1] == whole._version:
            return before[2]
        fanned: Tensor = _Fan.apply(whole, self)  # type: ignore[no-untyped-call]
        self._fanned = whole, whole._version, fanned
        return fanned

    def reduce(self, summand: Tensor) -> Tensor:
        """Return the sum of the ranks' summands."""
        self._fanned = None
        reduced: Tensor = summand if self.size == 1 else _Reduce.apply(summand, self)  # type: ignore[no-untyped-call]
        return reduced

    def gather(self, part: Tensor, layout: Layout) -> Tensor:
        """Return the whole of which every rank has a part."""
        self._fanned = None
        whole: Tensor = part if self.size == 1 else _Gather.apply(part, self, layout)  # type: ignore[no-untyped-call]
        return whole

    def scatter(self, whole: Tensor, layout: Layout) -> Tensor:
        """Return this rank's part of a whole."""
        if not (whole.requires_grad and torch.is_grad_enabled()):
            return self.part_of(whole, layout)
        part: Tensor = _Scatter.apply(whole, self, layout)  # type: ignore[no-untyped-call]
        return part

    def forget(self) -> None:
        """Let go of what the last forward pass has left."""
        self._fanned = None


class _Fan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.sum(gradient), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, axis: TensorAxis) -> Tensor:
        return axis.sum(summand)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: TensorAxis, layout: Layout) -> Tensor:
        ctx.axis, ctx.layout = axis, layout
        return axis.join(part, layout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.part_of(gradient, ctx.layout).contiguous(), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: TensorAxis, layout: Layout) -> Tensor:
        ctx.axis, ctx.layout = axis, layout
        return axis.part_of(whole, layout).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.join(gradient, ctx.layout), None, None
