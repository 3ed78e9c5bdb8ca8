"""BatchNorm over the global batch: each rank holds a slice, the statistics are those of a single device.

Knows: how the moments of slices combine, what the gradient of the combination is, and how a module's own
forward is replaced for the time of a cell (same object, class and state_dict keys). Works on CPU and GPU
alike. Does not know how values travel between ranks: a function that gathers a vector comes in.

Gradients. The engine scales the gradient of each output so that the *average* of the ranks' parameter
gradients is the single-device gradient; every gradient inside a rank is therefore ``world_size`` times that
of a single device. The backward pass is linear in it: with sums over all ranks it gives input gradients in
the same scale, and with sums over the own slice it gives weight and bias gradients whose average over ranks
is the single-device one.

A rank without samples runs the model on a dummy one, so that all ranks meet in the same collectives. The
dummy counts as no sample: it is normalised with the statistics of the others, enters none, and gets no
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from openclaw_nb.core.errors import RefusedError

Gather = Callable[[Tensor], Tensor]


class Moments(NamedTuple):
    """Number of values per channel (0-dim), their mean and their biased variance (both [channels])."""

    num_values: Tensor
    mean: Tensor
    variance: Tensor


def count_batchnorms(model: nn.Module) -> int:
    """Count the BatchNorm modules that `synchronise` would take over."""
    return sum(1 for _ in _batchnorms(model))


def synchronise(model: nn.Module, gather: Gather, num_real: Callable[[], int | None]) -> Callable[[], None]:
    """Let every BatchNorm of a model normalise over the global batch while in training mode.

    Parameters
    ----------
    model : Module
        Its BatchNorm modules get another ``forward``; nothing else of them changes. SyncBatchNorm stays as
        it is.
    gather : callable
        Maps a 1-D tensor of k values to the [world_size, k] tensor of all ranks'. Called by every rank in
        the same order: once per module in the forward pass, once in the backward pass.
    num_real : callable
        How many samples of the current input are real: 0 says that it is one dummy sample. None says that
        the batch is not split, and the module does what it always does.

    Returns
    -------
    callable
        Puts the modules' own ``forward`` back; more than one call does no harm.

    Raises
    ------
    RefusedError
        If a subclass of BatchNorm has a ``forward`` of its own, whose statistics cannot be made global.
    """
    found = list(_batchnorms(model))
    for name, module in found:
        own = type(module).forward
        if own is not _BatchNorm.forward and not isinstance(module, _LazyNormBase):
            raise RefusedError(
                f"{name or 'The model'} is a {type(module).__name__}, a BatchNorm with a forward of its own:"
                " its statistics cannot be taken over the global batch. Use nn.BatchNorm, or --split model."
            )
    replaced = [(module, module.__dict__.get("forward")) for _, module in found]
    for module, _ in replaced:
        module.__dict__["forward"] = _Forward(module, gather, num_real)
    return lambda: _restore(replaced)


def _batchnorms(model: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            yield name, module


def _restore(replaced: list[tuple[_BatchNorm, Any]]) -> None:
    for module, forward in replaced:
        if forward is not None:
            module.__dict__["forward"] = forward
        else:
            module.__dict__.pop("forward", None)


class _Forward:
    """A module's forward for the time of a cell; a copy or pickle of it has its class's."""

    def __init__(self, module: _BatchNorm, gather: Gather, num_real: Callable[[], int | None]) -> None:
        self._module = module
        self._gather = gather
        self._num_real = num_real

    def __call__(self, input: Tensor) -> Tensor:
        real = self._num_real() if self._module.training else None
        if real is None:
            plain: Tensor = type(self._module).forward(self._module, input)
            return plain
        return _normalise_globally(self._module, input, self._gather, is_real=real > 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")


def _normalise_globally(module: _BatchNorm, input: Tensor, gather: Gather, is_real: bool) -> Tensor:
    module._check_input_dim(input)
    moments = combine(gather(_local_moments(input.detach(), is_real)))
    own = input.numel() // input.shape[1]
    if (own < 2 or not is_real) and moments.num_values == 1:  # read only where it may be: a GPU would wait
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)}"
            " and none on the other ranks"
        )
    if module.track_running_stats:
        _update_running(module, moments)
    return _apply(input, module.weight, module.bias, moments, module.eps, gather, is_real)


def _dims(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def _exact(input: Tensor) -> Tensor:
    """Half precision is summed in float32, as torch's own kernels do."""
    return input.float() if input.dtype in (torch.float16, torch.bfloat16) else input


def _local_moments(input: Tensor, is_real: bool) -> Tensor:
    """Count, mean and sum of squared deviations of the slice in one vector; zeros for a dummy."""
    values = _exact(input)
    if not is_real:
        return values.new_zeros(1 + 2 * input.shape[1])
    count = values.numel() // input.shape[1]
    variance, mean = torch.var_mean(values, _dims(input), correction=0)
    return torch.cat([values.new_full((1,), count), mean, variance * count])


def combine(rows: Tensor) -> Moments:
    """Moments of a whole from those of its parts.

    Sums of squares would lose the variance of values far from zero. Deviations from each part's own mean do
    not: M2 = sum_i M2_i + sum_i n_i (mean_i - mean)^2 (Chan, Golub, LeVeque, "Algorithms for Computing the
    Sample Variance", The American Statistician 37, 1983).

    Parameters
    ----------
    rows : Tensor
        [parts, 1 + 2 channels]: count, means and sums of squared deviations of each part.

    Returns
    -------
    Moments
        In the dtype of ``rows``.
    """
    counts, means, deviations = rows[:, :1], *rows[:, 1:].chunk(2, dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    between = (counts * (means - mean).square()).sum(0)
    return Moments(count, mean, (deviations.sum(0) + between) / count)


@torch.no_grad()
def _update_running(module: _BatchNorm, moments: Moments) -> None:
    """Move the running statistics as `nn.BatchNorm` does, towards the global mean and unbiased variance."""
    momentum = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / float(module.num_batches_tracked)
    share = 0.0 if momentum is None else momentum
    unbiased = moments.variance * (moments.num_values / (moments.num_values - 1))
    for running, value in ((module.running_mean, moments.mean), (module.running_var, unbiased)):
        if running is not None:
            running.copy_((1 - share) * running + share * value)


def _apply(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    moments: Moments,
    eps: float,
    gather: Gather,
    is_real: bool,
) -> Tensor:
    output: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        input, weight, bias, moments, eps, gather, is_real
    )
    return output


def _along(vector: Tensor, like: Tensor) -> Tensor:
    """Line a vector up with the channels, dim 1."""
    return vector.view(1, -1, *([1] * (like.dim() - 2)))


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, with all ranks' mean and variance."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: Moments,
        eps: float,
        gather: Gather,
        is_real: bool,
    ) -> Tensor:
        inverse = (moments.variance + eps).rsqrt()
        ctx.save_for_backward(input, weight, moments.mean, inverse, moments.num_values)
        ctx.gather, ctx.is_real = gather, is_real
        scale = inverse if weight is None else inverse * weight
        output = (_exact(input) - _along(moments.mean, input)) * _along(scale, input)
        if bias is not None:
            output += _along(bias, input)
        return output.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse, count = ctx.saved_tensors
        grad = _exact(grad) if ctx.is_real else torch.zeros_like(_exact(grad))
        centred = _exact(input) - _along(mean, input)
        own_sum = grad.sum(_dims(input))
        own_product = (grad * centred).sum(_dims(input))
        grad_input = None
        if ctx.needs_input_grad[0]:
            sums = ctx.gather(torch.cat([own_sum, own_product])).sum(0) / count
            grad_input = _input_gradient(grad, centred, sums, inverse, weight)
            grad_input = (grad_input if ctx.is_real else torch.zeros_like(grad_input)).to(input.dtype)
        grad_weight = (own_product * inverse).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = own_sum.to(weight.dtype) if ctx.needs_input_grad[2] else None
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _input_gradient(
    grad: Tensor, centred: Tensor, sums: Tensor, inverse: Tensor, weight: Tensor | None
) -> Tensor:
    """Give dx = w / s * (dy - mean(dy) - (x - mean) / s^2 * mean(dy (x - mean))) with global means.

    Ioffe and Szegedy, "Batch Normalization", 2015, section 3, with the terms of the mean collected.
    """
    mean_grad, mean_product = sums.chunk(2)
    scale = inverse if weight is None else inverse * weight
    towards = centred * _along(mean_product * inverse.square(), centred)
    return (grad - _along(mean_grad, grad) - towards) * _along(scale, grad)
