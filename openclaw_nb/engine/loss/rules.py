"""Rules that refuse a loss whatever this batch's numbers show, because another batch's would show otherwise.

Knows: losses of torch that divide by what they count, and values that reach a loss beside the model's
outputs. Does not know how a loss is replayed; a loss that passes is still compared numerically (`kind`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from openclaw_nb.engine.loss.ops import Op, RefusedTail, counted_labels, plain_tensors


def refuse_by_rule(ops: list[Op], num_samples: int) -> None:
    """Raise if the last operation's result can be no mean and no sum over the samples.

    Parameters
    ----------
    ops : list of Op
        What the result needs, in order.
    num_samples : int
        Samples that the model outputs were computed on.

    Raises
    ------
    RefusedTail
        With the reason.
    """
    shape = ops[-1].shape
    if shape is None or shape.numel() != 1:
        raise RefusedTail(f"the loss has shape {tuple(shape or ())}; it must be a single number")
    for op in ops:
        _refuse_output(op, num_samples)
        _refuse_counted(op)
    _refuse_inner(ops)
    _refuse_parts(ops, num_samples)
    _refuse_counts(ops, num_samples)


def _refuse_output(op: Op, num_samples: int) -> None:
    if op.value is None:
        return
    if op.value.dim() == 0:
        raise RefusedTail("the model returns the loss itself, so what it does with the batch cannot be seen")
    if op.value.shape[0] == 0 or op.value.shape[0] % num_samples:
        shape = tuple(op.value.shape)
        raise RefusedTail(
            f"a model output of shape {shape} has no first dimension of the {num_samples} samples"
        )


def _refuse_counted(op: Op) -> None:
    counted = counted_labels(op)
    if counted is None:
        return
    labels, ignored, weighted = counted
    if weighted:
        raise RefusedTail(
            "class weights with reduction='mean' divide by the weights of the labels in the batch"
        )
    if ignored != -100:
        raise RefusedTail(f"ignore_index={ignored} with reduction='mean' divides by the labels not ignored")
    if bool((labels == ignored).any()):
        raise RefusedTail(
            "labels of ignore_index are in the batch, and reduction='mean' divides by the others"
        )


def _refuse_inner(ops: list[Op]) -> None:
    """Refuse a loss that reads inside the model beside its outputs: that gradient would not be rescaled."""
    parts = [t for t in plain_tensors(ops) if t.requires_grad and t.grad_fn is not None]
    if not parts:
        return
    model = _graph(op.node for op in ops if op.value is not None)
    if not model.isdisjoint(_graph(part.grad_fn for part in parts)):
        raise RefusedTail(
            "part of the loss is read inside the model, or made by a function that is not followed"
        )


def _refuse_parts(ops: list[Op], num_samples: int) -> None:
    """Refuse samples that went through a part of the model alone: their gradient would not be weighted."""
    inner = [t for t in plain_tensors(ops) if t.requires_grad and t.grad_fn is not None and t.dim()]
    if any(t.shape[0] and t.shape[0] % num_samples == 0 for t in inner):
        raise RefusedTail("samples reach the loss through a part of the model that was called by itself")


def _graph(nodes: Iterable[Any]) -> set[Any]:
    """Autograd nodes below some, parameters left out (a regulariser may share those)."""
    found: set[Any] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found and "AccumulateGrad" not in node.name():
            found.add(node)
            waiting.extend(below for below, _ in node.next_functions)
    return found


def _refuse_counts(ops: list[Op], num_samples: int) -> None:
    """Refuse a 0-dim tensor that is a count or a sum over a batch tensor, such as ``mask.sum()``."""
    plain = [t for t in plain_tensors(ops) if not t.requires_grad and not t.is_complex()]
    numbers = [t for t in plain if t.dim() == 0]
    batch = [t for t in plain if t.dim() and t.numel() and t.shape[0] % num_samples == 0]
    if any(_is_count(number, tensor) for number in numbers for tensor in batch):
        raise RefusedTail("the loss is scaled by a number that was counted in the batch (such as mask.sum())")


def _is_count(number: Tensor, tensor: Tensor) -> bool:
    counts = [float(tensor.double().sum()), float(tensor.count_nonzero())]
    if not tensor.is_floating_point():
        of_each = tensor.unique(return_counts=True)[1][:1000]
        counts += (
            tensor.numel() - of_each
        ).tolist()  # all labels but one, such as those that are not padding
        if number.dtype is torch.int64:  # a weight is seldom an integer tensor, a count always
            counts += of_each.tolist()
    return any(abs(count) > 1 and math.isclose(float(number), count, rel_tol=1e-6) for count in counts)
