"""Mixed precision in a loop without a strategy: on one device, or on ranks that sum their gradients by themselves.

Knows torch's ``backward``, which it takes over while it is applied; does not know step engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from openclaw_nb.engine.precision.cell import Cast, needs_scale
from openclaw_nb.engine.precision.scale import LossScale, copied, scale_for
from openclaw_nb.engine.precision.scaling import Scaled
from openclaw_nb.engine.steps.window import times
from openclaw_nb.strategies.precision import Precision


@dataclass(frozen=True)
class Applied:
    """What was made of a precision: what is computed in, the scale or None, and lines for the person."""

    dtype: torch.dtype
    scale: LossScale | None
    notes: list[str]


@contextmanager
def single_device(
    precision: Precision,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    *,
    agree: bool = False,
    is_trial: bool = False,
    has_scaler: bool = False,
) -> Iterator[Applied]:
    """Let models compute in a precision, and scale ``loss.backward()``, while the block runs.

    Parameters
    ----------
    precision : Precision
        What is asked for.
    models, optimizers : mapping
        What computes so, and what steps.
    agree : bool
        Whether an overflow on any rank of the process's torch.distributed group skips the step on all.
    is_trial : bool
        Leave the scale that the models are trained with as it is.
    has_scaler : bool
        Whether the code scales by itself.
    """
    cast = Cast(precision, models)
    scale = None
    if needs_scale(precision, cast.dtype) and not has_scaler:
        scale = scale_for(models.values(), precision, cast.device_type)
        scale = copied(scale) if is_trial else scale
    cast.install()
    try:
        if scale is None:
            yield Applied(cast.dtype, None, cast.notes)
        else:
            parameters = {id(p): p for model in models.values() for p in model.parameters()}
            scaled = Scaled(scale, optimizers.values(), _on_any_rank if agree else bool)
            with _scaled_backward(scaled, list(parameters.values())):
                yield Applied(cast.dtype, scale, cast.notes)
    finally:
        cast.remove()


@contextmanager
def _scaled_backward(scaled: Scaled, parameters: list[nn.Parameter]) -> Iterator[None]:
    inner = torch.autograd.backward

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        given = [grad_tensors] * len(roots) if grad_tensors is None else grad_tensors
        each = [given] if isinstance(given, Tensor) else list(given)
        scaled.begin(parameters)
        factor = scaled.factor
        inner(roots, [times(g, root, factor) for g, root in zip(each, roots, strict=True)], *args, **kwargs)
        scaled.end(parameters)

    torch.autograd.backward = backward
    scaled.install()
    try:
        yield
    finally:
        scaled.remove()
        torch.autograd.backward = inner


def _on_any_rank(overflowed: bool) -> bool:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return overflowed
    on_gpu = "nccl" in dist.get_backend()
    found = torch.tensor([float(overflowed)], device="cuda" if on_gpu else "cpu")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)
