"""Splitting the model call itself: every rank has the whole batch, computes its rows, and gets all outputs.

For cells whose loss needs the whole batch. Outputs are gathered, so that everything that the cell computes
from them is the single-device value on every rank; the backward pass takes this rank's rows of the gradient.
Knows trees of tensors and rows; does not know losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.loss.record import map_tensors
from openclaw_nb.plan.shares import share_bounds


class _Join(torch.autograd.Function):
    """Gathers rows in the forward pass, takes this rank's rows in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, splitter: BatchSplitter, weight: Callable[[], float]) -> Tensor:
        ctx.weight, ctx.bounds, ctx.num_rows = weight, splitter.own_bounds(rows), rows.shape[0]
        return splitter.gather(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        low, high = ctx.bounds
        own = gradient[low:high] * ctx.weight()
        if own.shape[0] < ctx.num_rows:  # the dummy row of a rank without a share
            own = gradient.new_zeros((ctx.num_rows, *gradient.shape[1:]))
        return own, None, None


class BatchSplitter:
    """Cuts the arguments of a model call into the ranks' rows and joins the outputs.

    Parameters
    ----------
    ranks : Ranks
        The ranks that share each call.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.num_global = 1
        self.num_real = 1

    def split(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with each batch tensor cut to this rank's rows.

        Raises
        ------
        RefusedError
            When no tensor is among the arguments.
        """
        sizes: list[int] = []

        def note(tensor: Tensor) -> Tensor:
            if tensor.dim():
                sizes.append(tensor.shape[0])
            return tensor

        map_tensors(note, (args, kwargs))
        if not sizes:
            raise RefusedError(
                "--split model needs a tensor with the batch in dim 0 among the model's arguments."
            )
        self.num_global = sizes[0]
        low, high = share_bounds(self.num_global, self._ranks.size)[self._ranks.rank]
        self.num_real = high - low
        rows = slice(low, high) if high > low else slice(0, 1)
        cut: tuple[Any, Any] = map_tensors(
            lambda t: t[rows] if t.dim() and t.shape[0] == self.num_global else t, (args, kwargs)
        )
        return cut

    def join(self, output: Any, weight: Callable[[], float]) -> Any:
        """Return the output with every rank's rows, in the order of the whole batch."""
        return map_tensors(lambda t: self._join(t, weight), output)

    def _join(self, tensor: Tensor, weight: Callable[[], float]) -> Tensor:
        if not tensor.dim() or tensor.shape[0] % max(1, self.num_real):
            raise RefusedError(
                "--split model needs outputs with the batch in dim 0; the model returned a tensor of shape "
                f"{list(tensor.shape)}. Compute the loss outside of the model."
            )
        if not tensor.requires_grad:
            return self.gather(tensor)
        joined: Tensor = _Join.apply(tensor, self, weight)  # type: ignore[no-untyped-call]
        return joined

    def own_bounds(self, rows: Tensor) -> tuple[int, int]:
        """Return where this rank's rows lie in the joined tensor."""
        low, high = share_bounds(self.num_global, self._ranks.size)[self._ranks.rank]
        per_sample = rows.shape[0] // max(1, self.num_real)
        return low * per_sample, high * per_sample

    def gather(self, rows: Tensor) -> Tensor:
        """Return the real rows of all ranks."""
        per_sample = rows.shape[0] // max(1, self.num_real)
        shares = share_bounds(self.num_global, self._ranks.size)
        real = rows.detach()[: self.num_real * per_sample]
        return self._ranks.gather_rows(real, [(high - low) * per_sample for low, high in shares])
