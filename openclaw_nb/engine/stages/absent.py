"""Tensors that are on another rank: their shape is known here, their values are not.

Each rank runs the model's whole forward code. What a layer of another rank has computed is an `Absent` here: code
between the layers may ask for its shape and go on computing with it, which gives absent results. Code that needs a
value is refused. When a value is received after all, as an argument of this rank's first layer, the same object
stands for it.

Where autocast is on, it chooses types of results here as on the other rank.

Knows tensors and torch's functions; does not know layers, ranks or messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.loss.ops import mutates, name_of

_MOST_KNOWN = 4096
_untouched = torch._C.DisableTorchFunctionSubclass
# What it says of its device is what the tensor will say that it stands for.
_ABOUT_DEVICE: dict[str, Callable[[torch.device], Any]] = {
    "device": lambda device: device,
    "is_cpu": lambda device: device.type == "cpu",
    "is_cuda": lambda device: device.type == "cuda",
    "is_meta": lambda device: False,
    "get_device": lambda device: -1 if device.index is None else device.index,
}


class Absent(Tensor):
    """A tensor of another rank. Made by `absent`."""

    _value: Tensor | None
    _device: torch.device
    _origin: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(present, (args, kwargs or {}))
        leaves, layout = tree_flatten((args, kwargs))
        first = next((leaf for leaf in leaves if type(leaf) is Absent), None)
        if first is None:
            return func(*args, **kwargs)
        if (about := _ABOUT_DEVICE.get(name_of(func))) is not None:
            return about(first._device)
        _check(func, args, kwargs, first)
        with _untouched(), torch.no_grad():
            result = _shapes_of(func, leaves, layout, first)
        return tree_map(lambda leaf: _like(leaf, first), result)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        value = present(self)
        return (
            repr(value) if value is not self else f"<{list(self.shape)} of {self._origin}, on another rank>"
        )


def absent(shape: Any, dtype: torch.dtype, device: torch.device, origin: str) -> Absent:
    """Return a tensor whose values are on another rank.

    Parameters
    ----------
    shape, dtype, device
        What it says of itself.
    origin : str
        What has computed it.
    """
    made: Absent = Tensor._make_subclass(Absent, torch.empty(shape, dtype=dtype, device="meta"))
    made._value, made._device, made._origin = None, device, origin
    return made


def present(leaf: Any) -> Any:
    """Return the value of an absent tensor, if it has been received; everything else as it is."""
    return leaf._value if type(leaf) is Absent and leaf._value is not None else leaf


def receive_into(leaf: Any, value: Tensor) -> None:
    """Let an absent tensor stand for a value from now on."""
    if type(leaf) is Absent:
        leaf._value = value


def origin_of(leaf: Any) -> str:
    """Return what has computed a tensor that is absent, else ""."""
    leaf = present(leaf)
    return leaf._origin if type(leaf) is Absent else ""


def _check(func: Any, args: Any, kwargs: Any, first: Absent) -> None:
    """Refuse to write what is absent into what is here: it would be lost."""
    target = args[0] if mutates(func) and args else kwargs.get("out")
    if isinstance(target, Tensor) and type(target) is not Absent:
        raise RefusedError(
            f"{name_of(func)} between the layers writes a value of {first._origin}, which is on another rank, "
            "into a tensor "
            "of this one. Put the code into a layer, or the layers onto one worker (--stages)."
        )


def _needs_value(name: str, first: Absent, error: Exception) -> str:
    return (
        f"Code between the layers calls {name} on a value of {first._origin}, which is on another rank where only its "
        f"shape is known ({str(error).splitlines()[0][:120]}). Put the code into a layer, or the layers onto "
        "one worker "
        "(--stages)."
    )


_known: dict[Any, Any] = {}  # torch takes a millisecond to find some results' shapes


def _shapes_of(func: Any, leaves: list[Any], layout: Any, first: Absent) -> Any:
    """Return a function's result in shapes; the same call is looked at once."""
    mode = _autocasting(first._device.type)
    key: Any = (func, layout, torch.get_default_dtype(), mode, *(_key_of(leaf) for leaf in leaves))
    try:
        return _known[key]
    except TypeError:
        key = None  # an argument that cannot be compared
    except KeyError:
        pass
    leaves = [_to_meta(leaf) for leaf in leaves]
    try:
        result = _call(func, leaves, layout, first._device if mode else None)
    except (RuntimeError, NotImplementedError) as error:
        raise RefusedError(_needs_value(name_of(func), first, error)) from error
    if key is not None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = result
    return result


def _autocasting(kind: str) -> torch.dtype | None:
    """Return what autocast computes in on devices of this kind, if it is on."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _call(func: Any, leaves: list[Any], layout: Any, device: torch.device | None) -> Any:
    """Call a function on shapes; with a device they are taken to be there, as autocast looks at it."""
    if device is None:
        args, kwargs = tree_unflatten(leaves, layout)
        return func(*args, **kwargs)
    with FakeTensorMode() as fake:
        there = [FakeTensor(fake, leaf, device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        there = [device if isinstance(leaf, torch.device) else leaf for leaf in there]
        args, kwargs = tree_unflatten(there, layout)
        result = func(*args, **kwargs)
        return tree_map(lambda t: torch.empty_like(t, device="meta") if isinstance(t, Tensor) else t, result)


def _key_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Tensor, leaf.shape, leaf.dtype, leaf.stride()
    return type(leaf), leaf


def _to_meta(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.as_subclass(Tensor) if type(leaf) is Absent else leaf.detach().to("meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _like(leaf: Any, first: Absent) -> Any:
    if isinstance(leaf, Tensor):
        return absent(leaf.shape, leaf.dtype, first._device, first._origin)
    return leaf
