"""What cannot be sharded with the result of a single device, and why.

Knows torch's optimizers and parameters; does not know ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.objects.find import Objects

# Each value of a parameter is updated from its own gradient and state alone, so that a shard can be updated by itself.
_ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.ASGD),
    torch.optim.Rprop,
)
_WHOLE = {
    "Adafactor": "it keeps means over the rows and columns of a whole parameter",
    "Muon": "it orthogonalises the whole matrix of a parameter's momentum",
    "LBFGS": "it takes scalar products over all parameters, and evaluates the model several times in one step",
    "SparseAdam": "it takes sparse gradients",
}


def check(objects: Objects) -> None:
    """Refuse what cannot be sharded.

    Raises
    ------
    RefusedError
        Nothing has changed then.
    """
    for name, optimizer in objects.optimizers.items():
        check_optimizer(name, optimizer)
    owners: dict[int, str] = {}
    places: dict[int, str] = {}
    for name, model in objects.models.items():
        _check_parameters(name, model)
        for inner, parameter in model.named_parameters():
            path = f"{name}.{inner}"
            if id(parameter) in owners:
                raise RefusedError(
                    f"`{path}` is a parameter of {owners[id(parameter)]} too: models that share parameters cannot be "
                    "sharded one by one. Put them into one module, or use data_parallel."
                )
            owners[id(parameter)] = name
            place = parameter.untyped_storage().data_ptr()
            if place and places.setdefault(place, path) != path:
                raise RefusedError(
                    f"`{path}` and `{places[place]}` are two parameters in the same memory: as shards they would no "
                    "longer be. Let one module's attribute be the other's parameter (`head.weight = embed.weight`)."
                )


def check_optimizer(name: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose update of a shard is not the shard of its update.

    Raises
    ------
    RefusedError
        With the optimizer's name and the reason.
    """
    kind = type(optimizer)
    known = next((each for each in kind.__mro__ if each in _ELEMENTWISE), None)
    if known is not None and _step_of(kind) is _step_of(known):
        return
    reason = _WHOLE.get(kind.__name__) or (
        "only of torch's own optimizers it is known that they update each value by itself"
    )
    raise RefusedError(
        f"`{name}` is {kind.__name__}, which cannot work on shards: {reason}. Use data_parallel, or an optimizer such "
        "as torch.optim.AdamW."
    )


def _step_of(kind: type) -> object:
    step = kind.step  # type: ignore[attr-defined]
    return getattr(step, "__wrapped__", step)


def _check_parameters(name: str, model: nn.Module) -> None:
    parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
    for inner, parameter in parameters.items():
        problem = _problem(parameter)
        if problem:
            raise RefusedError(f"`{name}.{inner}` {problem}. Change it, or use data_parallel.")
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values() if p.requires_grad})
    if len(dtypes) > 1:
        raise RefusedError(
            f"The parameters of `{name}` have several dtypes ({', '.join(dtypes)}), and shards of a layer are gathered "
            f"in one: bring them to one dtype, e.g. `{name}.float()`, or use data_parallel."
        )


def _problem(parameter: nn.Parameter) -> str:
    if type(parameter) is not nn.Parameter:
        return f"is a {type(parameter).__name__}: only plain parameters can be sharded"
    if parameter.dim() == 0:
        return "has no dimension to be sharded along: make it one of shape (1,)"
    if not parameter.is_contiguous():
        return "is not contiguous (channels_last?): only contiguous parameters can be sharded"
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return "has hooks of its own, which a shard would not call"
    return ""
