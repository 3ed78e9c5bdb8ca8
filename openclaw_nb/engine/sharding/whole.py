"""What a cell reads of a sharded model is whole: ``state_dict()``, norms and other numbers, and what is loaded.

Every rank has to make these calls, as each gives its shards. Knows torch's hooks; does not know how shards are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from openclaw_nb.engine.objects.find import Objects
from openclaw_nb.engine.sharding.shards import shard_like


def whole(value: Any) -> Any:
    """Return a sharded tensor whole, and all else as it is; also inside of dictionaries and lists."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if type(value) is dict:
        return {key: whole(part) for key, part in value.items()}
    if type(value) is list:
        return [whole(part) for part in value]
    return value


def install(objects: Objects) -> list[Callable[[], None]]:
    """Let states be whole, and norms those of whole gradients; return what takes it off again."""
    handles: list[Any] = []
    for model in objects.models.values():
        for module in model.modules():
            handles.append(module.register_state_dict_post_hook(_make_whole))
            handles.append(module.register_load_state_dict_pre_hook(_cut))
    for optimizer in objects.optimizers.values():
        handles.append(optimizer.register_state_dict_post_hook(_make_optimizer_whole))
        handles.append(optimizer.register_load_state_dict_post_hook(_cut_optimizer))
    return [*(handle.remove for handle in handles), _install_norm(), _install_numbers()]


def keep_whole(namespace: MutableMapping[str, Any], names: Iterable[str]) -> None:
    """Let variables that hold sharded tensors, or lists of them, hold whole ones: shards are of no use after the cell.

    Parameters are left out, as they become whole themselves.
    """
    for name in sorted(names):
        value = namespace.get(name)
        if _is_shard(value):
            namespace[name] = whole(value)
        elif isinstance(value, list):
            value[:] = [whole(each) if _is_shard(each) else each for each in value]
        elif isinstance(value, dict):
            value.update({key: whole(each) for key, each in value.items() if _is_shard(each)})


def _is_shard(value: Any) -> bool:
    return isinstance(value, DTensor) and not isinstance(value, nn.Parameter)


def _make_whole(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for key, value in state.items():
        if isinstance(value, DTensor):
            state[key] = value.full_tensor()


def _cut(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    parameters: dict[str, Any] = dict(module._parameters)
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor) and prefix + name in state:
            state[prefix + name] = shard_like(state[prefix + name], parameter)


def _make_optimizer_whole(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": {key: whole(value) for key, value in state["state"].items()}}


def _cut_optimizer(optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, DTensor):
            for key, value in state.items():
                state[key] = shard_like(value, parameter)


def _install_norm() -> Callable[[], None]:
    """Let `clip_grad_norm_` find, and return, the norm of the whole gradients."""
    plain = clip_grad._get_total_norm

    def total_norm(*args: Any, **kwargs: Any) -> Tensor:
        norm: Tensor = whole(plain(*args, **kwargs))
        return norm

    places = [
        (holder, name)
        for holder in (clip_grad, torch.nn.utils)
        for name in ("_get_total_norm", "get_total_norm")
        if hasattr(holder, name)
    ]
    before = [(holder, name, getattr(holder, name)) for holder, name in places]
    for holder, name in places:
        setattr(holder, name, total_norm)

    def undo() -> None:
        for holder, name, function in before:
            setattr(holder, name, function)

    return undo


def _install_numbers() -> Callable[[], None]:
    """Let ``item()``, ``float()``, ``bool()`` and formats of a sharded tensor be of the whole one.

    torch takes the number of this rank's own part, which for a sum or a norm is a wrong one, and says nothing.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    kind: Any = DTensor
    scalar = torch.ops.aten._local_scalar_dense.default
    before = handlers.get(scalar)
    handlers[scalar] = lambda op, args, kwargs: args[0].full_tensor().item()
    kind.__format__ = lambda self, spec: format(self.full_tensor(), spec)

    def undo() -> None:
        handlers.pop(scalar)
        if before is not None:
            handlers[scalar] = before
        del kind.__format__

    return undo
