"""Which models and optimizers no strategy can take, and what to change.

Knows torch's wrappers, lazy parameters, sparse gradients and devices. It does not know how the objects were
found. Each check raises RefusedError; wrappers are told by class name, so that their packages stay unloaded.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from openclaw_nb.core.errors import RefusedError

_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"})


def describe(name: str, module: nn.Module) -> str:
    """Name, class and size of a module, as the messages show it."""
    count = sum(0 if is_lazy(p) else p.numel() for p in module.parameters())
    return f"`{name}` ({type(module).__name__}, {count:,} parameters)"


def check_model(name: str, model: nn.Module) -> None:
    """Refuse a model that cannot be trained in parallel as it is.

    Raises
    ------
    RefusedError
        Without parameters, wrapped already, sharded already, not initialised, with sparse gradients, or on
        several devices.
    """
    if next(model.parameters(), None) is None:
        raise RefusedError(
            f"`{name}` ({type(model).__name__}) has no parameters: name the model that is trained."
        )
    _check_wrappers(name, model)
    _check_lazy(name, model)
    _check_sparse(name, model)
    _check_devices(name, model)


def check_optimizer(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step is no function of one gradient."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RefusedError(
            f"`{name}` is LBFGS, which evaluates the model several times in one step; a strategy gives it "
            "one gradient a step. Use another optimizer, e.g. torch.optim.AdamW."
        )


def _check_wrappers(name: str, model: nn.Module) -> None:
    for inner, module in model.named_modules():
        wrapper = next((cls.__name__ for cls in type(module).__mro__ if _is_wrapper(cls)), None)
        if wrapper is not None:
            where = f"{name}.{inner}" if inner else name
            inside = f" (`{where}.module`)" if "DataParallel" in wrapper else ""
            raise RefusedError(
                f"`{where}` is wrapped for parallel training already ({wrapper}): pass the plain "
                f"model{inside}; the strategy does the wrapping."
            )
    for inner, parameter in model.named_parameters():
        if any(cls.__name__ == "DTensor" for cls in type(parameter).__mro__):
            raise RefusedError(
                f"`{name}.{inner}` is sharded already (DTensor): pass the plain model, the strategy does it."
            )


def _is_wrapper(cls: type) -> bool:
    return cls.__name__ in _WRAPPERS and cls.__module__.startswith("torch.")


def _check_lazy(name: str, model: nn.Module) -> None:
    lazy = [inner for inner, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        raise RefusedError(
            f"`{name}.{lazy[0]}` has no shape yet (a lazy module): run one forward first, e.g. `{name}(x)` "
            "with a small batch in a cell without a strategy, and build the optimizer after it."
        )


def _check_sparse(name: str, model: nn.Module) -> None:
    for inner, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            where = f"{name}.{inner}" if inner else name
            raise RefusedError(
                f"`{where}` is {type(module).__name__}(sparse=True), whose gradients cannot be reduced "
                "with the dense ones: build it with sparse=False."
            )


def _check_devices(name: str, model: nn.Module) -> None:
    tensors = itertools.chain(model.parameters(), model.buffers())
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise RefusedError(
            f"`{name}` lies on several devices ({', '.join(devices)}): move it to one with "
            f"`{name}.to(device)`; to spread layers over devices use the strategy model_parallel."
        )
