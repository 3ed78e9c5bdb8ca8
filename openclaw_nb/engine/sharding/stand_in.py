"""What stands in for a parameter while it is sharded, and for a shard afterwards: each passes everything on.

A cell may have parameters in lists of its own (``params = list(model.parameters())``), made before it or in it. Those
from before stay the model's objects, empty for the time; read, changed or clipped, they are what the model's sharded
parameter is. Those that the cell took of the sharded model are, after it, what the plain parameter is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_untouched = torch._C.DisableTorchFunctionSubclass


class StandIn(nn.Parameter):
    """A parameter of which this rank has a shard only."""

    _shard: nn.Parameter

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*_pass_on(args), **_pass_on(dict(kwargs or {})))


class PastShard(DTensor):
    """A shard of a parameter that is whole again."""

    _parameter: nn.Parameter

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*_pass_on(args), **_pass_on(dict(kwargs or {})))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._parameter.__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(self._parameter)


def _pass_on(value: Any) -> Any:
    kind = type(value)
    if kind is StandIn:
        return value._shard
    if kind is PastShard:
        return value._parameter
    if kind is tuple or kind is list:
        return kind([_pass_on(part) for part in value])
    if kind is dict:
        return {key: _pass_on(part) for key, part in value.items()}
    return value


def stand_in(parameter: nn.Parameter, shard: nn.Parameter) -> None:
    """Let a parameter stand for its shard; what it holds is freed."""
    parameter.grad = None
    parameter.data = parameter.data.new_empty(0)
    parameter.__class__ = StandIn
    parameter._shard = shard  # type: ignore[attr-defined]


def fill(parameter: nn.Parameter, value: Tensor, gradient: Tensor | None, *, requires_grad: bool) -> None:
    """Make a parameter a plain one again, with this value and gradient."""
    with _untouched():
        parameter.__class__ = nn.Parameter
        parameter.__dict__.pop("_shard", None)
        parameter.data = value
        parameter.requires_grad_(requires_grad)
        parameter.grad = gradient


def retire(shard: nn.Parameter, parameter: nn.Parameter) -> None:
    """Let a shard that the cell may have kept stand for the whole parameter; what it holds is freed."""
    shard.grad = None
    given: Any = shard
    given._local_tensor = given._local_tensor.new_empty(0)
    given.__class__ = PastShard
    given._parameter = parameter
