"""Averages gradients over the ranks while the backward pass still runs.

    parameter's gradient is ready ──> copied (divided) into its bucket ──> bucket full ──> all-reduce begins
    backward returns ──> what is left goes, all is waited for ──> gradients are set

Buckets follow the order in which gradients appear (last layer first), as in Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training", VLDB 2020. A parameter that no rank used keeps the
gradient it had, as on a single device; which those are travels in the buckets.

Knows gradients and buckets; does not know losses, samples or steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openclaw_nb.engine.group.collectives import PendingWork
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.group.sums import Layout, Sum

BUCKET_BYTES = 25 * 1024 * 1024
# The first bucket is small, so that there is something to send early in the backward pass.
_FIRST_BUCKET_BYTES = 1024 * 1024
_SMALL = 16_384
_untouched = torch._C.DisableTorchFunctionSubclass
_EXACT = (torch.float32, torch.float64)


@dataclass(frozen=True)
class _Parts:
    """Views of a flat tensor: gradients, a use count for each parameter, and room for a message."""

    gradients: list[Tensor]
    counts: Tensor
    message: Tensor


@dataclass
class _Bucket:
    """Parameters whose gradients are summed as one flat tensor, with its inputs of each turn and its result."""

    parameters: list[torch.nn.Parameter]
    sum: Sum
    inputs: list[_Parts]
    result: _Parts
    ready: set[int] = field(default_factory=set)
    work: PendingWork | None = None

    @property
    def is_full(self) -> bool:
        return len(self.ready) == len(self.parameters)


class GradientReducer:
    """Averages the gradients of some parameters.

    ``strayed`` is set when a gradient appears outside of a pass that `begin` announced, ``repeated`` when one
    appears twice in a pass, the second time perhaps after it was sent.

    Parameters
    ----------
    parameters : sequence of Parameter
        Each once; those that need no gradient are left out.
    ranks : Ranks
        Whose gradients are averaged.
    message_size : int
        How many values `begin` is given to sum beside the gradients.
    bucket_bytes : int
        Size of a bucket.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        ranks: Ranks,
        *,
        message_size: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._ranks = ranks
        self._factor = 1.0
        self._enabled = False
        self._launched = self._turn = self._number = 0
        self.strayed = self.repeated = False
        self.parameters = [p for p in parameters if p.requires_grad]
        groups = _fill_buckets(list(reversed(self.parameters)), bucket_bytes)
        self._buckets, self._carrier = _make_buckets(groups, message_size, ranks)
        self._place = {
            id(p): (bucket, i) for bucket in self._buckets for i, p in enumerate(bucket.parameters)
        }
        self._handles = [p.register_post_accumulate_grad_hook(self._on_ready) for p in self.parameters]

    @property
    def num_bytes(self) -> int:
        """Bytes that each rank gives into one reduction; none with a single rank."""
        alone = self._ranks.size == 1
        return 0 if alone else sum(b.sum.result.nbytes for b in self._buckets)

    def begin(self, factor: float, message: Tensor) -> None:
        """Expect a backward pass whose gradients are to be summed, times ``factor``.

        Parameters
        ----------
        factor : float
            What each rank's gradients are multiplied by.
        message : Tensor
            float64, of the size given at construction; `finish` returns its sum over the ranks. It travels with
            the first bucket that is float32 or float64 and so has that precision: an all-reduce of its own
            would cost each step as much as a small model's gradients do.
        """
        self._factor = factor
        self._enabled = True
        self._end_last_pass()
        self._number += 1
        self._carrier.inputs[self._turn].message.copy_(message)

    def _end_last_pass(self) -> None:
        """Wait for what a pass that was broken off has started: no rank may still read what is filled next."""
        for bucket in self._buckets:
            bucket.ready.clear()
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        if (
            self._launched
        ):  # else the present inputs were read by nobody, and another rank may still read the others
            self._turn = (self._turn + 1) % len(self._carrier.inputs)
        self._launched = 0

    def _on_ready(self, parameter: Tensor) -> None:
        if not self._enabled:
            self.strayed = True
            return
        with _untouched():  # a parameter of which only a part is here is this part
            self._take(parameter)

    def _take(self, parameter: Tensor) -> None:
        bucket, place = self._place[id(parameter)]
        self.repeated |= place in bucket.ready
        bucket.ready.add(place)
        if parameter.numel() > _SMALL:
            torch.mul(_gradient(parameter), self._factor, out=bucket.inputs[self._turn].gradients[place])
        if bucket.is_full:
            self._launch_in_order()

    def _launch_in_order(self) -> None:
        """Start full buckets, in the same order on every rank."""
        while self._launched < len(self._buckets) and self._buckets[self._launched].is_full:
            self._launch(self._buckets[self._launched])

    def _launch(self, bucket: _Bucket) -> None:
        parts = bucket.inputs[self._turn]
        self._copy_small(bucket, parts)
        parts.counts.fill_(1.0)
        for i in range(0 if bucket.is_full else len(bucket.parameters)):
            if i not in bucket.ready:
                parts.counts[i] = 0.0
                self._copy_unused(bucket.parameters[i], parts.gradients[i])
        bucket.work = bucket.sum.start(self._turn, self._number)
        self._launched += 1

    def _copy_unused(self, parameter: Tensor, view: Tensor) -> None:
        """Put in what a parameter that this pass did not use has from earlier ones: another rank may use it."""
        if parameter.grad is None:
            view.zero_()
        else:
            torch.mul(parameter.grad, self._factor, out=view)

    def _copy_small(self, bucket: _Bucket, parts: _Parts) -> None:
        """Copy what `_on_ready` left: one call for many small gradients costs less than one each."""
        small = [i for i in bucket.ready if bucket.parameters[i].numel() <= _SMALL]
        if small:
            views = [parts.gradients[i] for i in small]
            torch._foreach_copy_(views, [_gradient(bucket.parameters[i]) for i in small])
            torch._foreach_mul_(views, self._factor)

    def finish(self) -> Tensor:
        """Start what is left, wait for everything; return the message, summed over the ranks."""
        self._enabled = False
        while self._launched < len(self._buckets):
            self._launch(self._buckets[self._launched])
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
        return self._carrier.result.message.double().cpu()

    def set_gradients(self) -> None:
        """Give each parameter that some rank used its averaged gradient."""
        for bucket in self._buckets:
            used = bucket.result.counts.tolist()
            for parameter, view, count in zip(bucket.parameters, bucket.result.gradients, used, strict=True):
                if count:
                    parameter.grad = view

    def drop_gradients(self) -> None:
        """Leave no gradient, so that a following step changes nothing."""
        self._enabled = False
        for parameter in self.parameters:
            parameter.grad = None

    def remove(self) -> None:
        """Take the hooks off; gradients become tensors of their own."""
        for handle in self._handles:
            handle.remove()
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        # A loss that the cell keeps holds this object by its graph; it need not hold the memory.
        self._buckets, self._place = [], {}


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _fill_buckets(
    parameters: Sequence[torch.nn.Parameter], bucket_bytes: int
) -> list[list[torch.nn.Parameter]]:
    buckets: list[list[torch.nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        same = bool(buckets) and _kind(buckets[-1][0]) == _kind(parameter)
        limit = bucket_bytes if len(buckets) > 1 else min(bucket_bytes, _FIRST_BUCKET_BYTES)
        if not same or size >= limit:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets


def _make_buckets(
    groups: list[list[torch.nn.Parameter]], message_size: int, ranks: Ranks
) -> tuple[list[_Bucket], _Bucket]:
    """Return the buckets, and which of them carries the message: the first that is precise enough."""
    exact = [i for i, group in enumerate(groups) if group[0].dtype in _EXACT]
    if not exact:
        groups = [*groups, []]
    carrier = exact[0] if exact else len(groups) - 1
    sizes = [message_size if i == carrier else 0 for i in range(len(groups))]
    sums = ranks.make_sums([_layout(group, size) for group, size in zip(groups, sizes, strict=True)])
    buckets = [_make_bucket(*given) for given in zip(groups, sums, sizes, strict=True)]
    return buckets, buckets[carrier]


def _layout(parameters: list[torch.nn.Parameter], message_size: int) -> Layout:
    dtype, device = _kind(parameters[0]) if parameters else (torch.float64, torch.device("cpu"))
    return Layout(sum(p.numel() + 1 for p in parameters) + message_size, dtype, device)


def _make_bucket(parameters: list[torch.nn.Parameter], total: Sum, message_size: int) -> _Bucket:
    def cut(flat: Tensor) -> _Parts:
        *parts, counts, message = flat.split([*sizes, len(sizes), message_size])
        views = [_view_like(part, parameter) for part, parameter in zip(parts, parameters, strict=True)]
        return _Parts(views, counts, message)

    sizes = [p.numel() for p in parameters]
    return _Bucket(parameters, total, [cut(flat) for flat in total.inputs], cut(total.result))


def _kind(parameter: Tensor) -> tuple[Any, Any]:
    return parameter.dtype, parameter.device


def _view_like(part: Tensor, parameter: Tensor) -> Tensor:
    """View a flat part as the parameter, in the parameter's own memory order where it is dense."""
    if parameter.is_contiguous() or not _is_dense(parameter):
        return part.view(parameter.shape)
    return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())


def _is_dense(tensor: Tensor) -> bool:
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]))
    expected = 1
    for dim in order:
        if tensor.shape[dim] != 1 and tensor.stride(dim) != expected:
            return False
        expected *= tensor.shape[dim]
    return True
