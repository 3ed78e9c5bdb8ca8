"""The state of training as a checkpoint holds it, taken from a cell's objects and put back into them in place.

    take     models by parameter and buffer; optimizers, schedulers, scalers by their state_dict; random numbers
    restore  names, shapes, dtypes and kinds are compared first, and the first difference is told; then everything is
             copied into the tensors that are there, so that parameters stay the same objects and tied ones tied

Random numbers are those of the code outside of the model, which are equal on all ranks; the streams that ranks have of
their own inside the model (dropout) are not kept, nor those of GPUs. Knows objects; does not know files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from openclaw_nb.core.errors import CheckpointError
from openclaw_nb.engine.checkpoint.tensors import check_tensor
from openclaw_nb.engine.checkpoint.tree import decode, encode
from openclaw_nb.engine.objects.find import Objects
from openclaw_nb.engine.steps import randomness

_ROLES = ("optimizers", "schedulers", "scalers")
_PLACE, _RANDOM = "the place", "the random numbers"  # beside the names of objects, which have no spaces


@dataclass(frozen=True)
class Content:
    """The state of training: tensors by name, uncopied; everything else as JSON; what the models are."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    models: dict[str, Any]


def take(objects: Objects, place: Any = None) -> Content:
    """Return the state; tensors are not copied.

    Parameters
    ----------
    objects : Objects
        A cell's objects.
    place : object
        Where in its loops the cell is: numbers, strings, tensors, and containers of them (`tree.encode`).

    Raises
    ------
    CheckpointError
        When something of it cannot be kept, named.
    """
    tensors: dict[str, Tensor] = {}
    models = {name: _describe(name, model, tensors) for name, model in objects.models.items()}
    state: dict[str, Any] = {"place": encode(place, _PLACE, tensors)}
    for role in _ROLES:
        holders: Mapping[str, Any] = getattr(objects, role)
        state[role] = {
            name: {"class": type(holder).__name__, "state": encode(holder.state_dict(), name, tensors)}
            for name, holder in holders.items()
        }
    for name, optimizer in objects.optimizers.items():
        state["optimizers"][name]["parameters"] = _parameter_names(objects.models, optimizer)
    state["random"] = encode(_random_state(objects), _RANDOM, tensors)
    return Content(tensors, state, models)


def restore(
    objects: Objects,
    state: Mapping[str, Any],
    models: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    some: bool = False,
) -> None:
    """Put a state back into objects, in place.

    Parameters
    ----------
    objects : Objects
        Objects like those that the state was taken from; their names may differ where there is one of a kind.
    state, models, tensors : mapping
        As `take` has returned them.
    some : bool
        Whether it is only for those objects that are there; the random numbers are left alone then.

    Raises
    ------
    CheckpointError
        When the objects are others: the first difference is named, and nothing has changed.
    """
    paired_models = _pair("model", objects.models, models, some)
    for (name, model), saved in paired_models:
        _check_model(name, model, models[saved])
        _check_tied(name, model, saved, tensors)
    by_saved_name = {saved: model for (_, model), saved in paired_models}
    holders: list[tuple[Any, Any]] = []
    for role in _ROLES:
        for (name, holder), saved in _pair(role[:-1], getattr(objects, role), state[role], some):
            there = state[role][saved]
            _check_class(name, holder, there["class"])
            if isinstance(holder, Optimizer):
                _check_parameters(name, _parameter_names(by_saved_name, holder), there["parameters"])
            holders.append((holder, decode(there["state"], tensors)))
    numbers = None if some else decode(state["random"], tensors)
    generators = [] if numbers is None else _paired_generators(objects, numbers["generators"])
    with torch.no_grad():
        for saved, model in by_saved_name.items():
            for _, path, tensor in _named_tensors(model):
                tensor.copy_(tensors[f"{saved}.{path}"])
    for holder, values in holders:
        _load(holder, values)
    if numbers is not None:
        drawn_with, states = [pair[0] for pair in generators], [pair[1] for pair in generators]
        randomness.put(numbers | {"generators": states}, drawn_with)


def _pair(
    role: str, mine: Mapping[str, Any], saved: Mapping[str, Any], some: bool
) -> list[tuple[tuple[str, Any], str]]:
    """Return each of my objects with the name that it has in the checkpoint."""
    if len(mine) == len(saved) == 1:
        return [(next(iter(mine.items())), next(iter(saved)))]
    if not (mine.keys() <= saved.keys() if some else mine.keys() == saved.keys()):
        raise CheckpointError(
            f"The checkpoint has {_count(role, saved)}, and here {'is' if len(mine) == 1 else 'are'} "
            f"{_count(role, mine)}. Give objects of the same names."
        )
    return [(item, item[0]) for item in mine.items()]


def _count(role: str, names: Mapping[str, Any]) -> str:
    return f"the {role}{'s' * (len(names) > 1)} {', '.join(map(repr, names))}" if names else f"no {role}"


# ------------------------------------------------------------------------------------------ models


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield kind, name and tensor of all parameters and buffers, tied ones under each of their names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield "parameter", name, parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield "buffer", name, buffer


def _describe(name: str, model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return a model's description and add its tensors."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"{name}{'.' * bool(path)}{path} keeps state of its own (get_extra_state), which a checkpoint does not "
                "hold. Train without --checkpoint."
            )
    described: dict[str, Any] = {}
    for kind, path, tensor in _named_tensors(model):
        check_tensor(f"{kind} {name}.{path}", tensor)
        tensors[f"{name}.{path}"] = tensor.detach()
        described[path] = {"kind": kind, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}
    return described


def _check_model(name: str, model: nn.Module, described: Mapping[str, Any]) -> None:
    mine = {path: (kind, tensor) for kind, path, tensor in _named_tensors(model)}
    for path, there in described.items():
        if path not in mine:
            raise CheckpointError(
                f"The checkpoint has {there['kind']} {name}.{path} of shape {there['shape']}, which the model does not "
                f"have. {_REBUILD}"
            )
        kind, tensor = mine[path]
        here = {"kind": kind, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}
        if here != there:
            raise CheckpointError(
                f"{name}.{path} is a {_words(there)} in the checkpoint, and a {_words(here)} in the model. {_REBUILD}"
            )
    for path, (kind, tensor) in mine.items():
        if path not in described:
            raise CheckpointError(
                f"The model has {kind} {name}.{path} of shape {list(tensor.shape)}, which the checkpoint does not "
                f"have. {_REBUILD}"
            )


_REBUILD = "Build the model as it was when the checkpoint was taken."


def _words(described: Mapping[str, Any]) -> str:
    return f"{described['kind']} of shape {described['shape']} and {described['dtype']}"


def _check_tied(name: str, model: nn.Module, saved: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse different values for names that are one tensor in the model."""
    first: dict[int, str] = {}
    for _, path, tensor in _named_tensors(model):
        other = first.setdefault(id(tensor), path)
        if other != path and not _equal(tensors[f"{saved}.{path}"], tensors[f"{saved}.{other}"]):
            raise CheckpointError(
                f"{name}.{path} and {name}.{other} are one tensor in the model, and have different values in the "
                f"checkpoint. {_REBUILD}"
            )


def _equal(one: Tensor, other: Tensor) -> bool:
    same_kind = one.dtype == other.dtype and one.shape == other.shape
    as_bytes = (each.reshape(-1).view(torch.uint8) for each in (one, other))
    return one is other or (same_kind and torch.equal(*as_bytes))


# -------------------------------------------------------------------- optimizers, schedulers, scalers


def _parameter_names(models: Mapping[str, nn.Module], optimizer: Optimizer) -> list[list[str]]:
    """Return the names of each group's parameters; "" for one that is none of the models'."""
    names: dict[int, str] = {}
    for name, model in models.items():
        for path, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"{name}.{path}")
    return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]


def _check_class(name: str, holder: Any, there: str) -> None:
    here = type(holder).__name__
    if here != there:
        raise CheckpointError(
            f"`{name}` is a {here}, and a {there} in the checkpoint. Build it as it was when the checkpoint was taken."
        )


def _check_parameters(name: str, mine: list[list[str]], saved: list[list[str]]) -> None:
    """Refuse an optimizer that holds other parameters, or in another order: its state goes by their places."""
    if [len(group) for group in mine] != [len(group) for group in saved]:
        raise CheckpointError(
            f"Optimizer `{name}` has groups of {[len(group) for group in mine]} parameters, and of "
            f"{[len(group) for group in saved]} in the checkpoint."
        )
    for number, groups in enumerate(zip(mine, saved, strict=True)):
        for place, (here, there) in enumerate(zip(*groups, strict=True)):
            if here and there and here != there:
                raise CheckpointError(
                    f"Parameter {place} of group {number} of optimizer `{name}` is {here}, and {there} in the "
                    "checkpoint."
                )


def _load(holder: Any, values: dict[str, Any]) -> None:
    holder.load_state_dict(values)
    if isinstance(holder, Optimizer):
        _undo_casts(holder, values["state"])


def _undo_casts(optimizer: Optimizer, saved: Mapping[int, Any]) -> None:
    """Give state its dtype again: torch's load casts it to the parameter's, which may hold less."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in saved.items():
        state = optimizer.state[parameters[number]]
        for key, value in values.items():
            if isinstance(value, Tensor) and state[key].dtype != value.dtype:
                state[key] = value.to(state[key].device, copy=True)


# --------------------------------------------------------------------------------------- random numbers


def _random_state(objects: Objects) -> dict[str, Any]:
    return {
        **randomness.states([]),
        "generators": {
            name: [generator.get_state() for generator in randomness.generators_of(loader)]
            for name, loader in objects.loaders.items()
        },
    }


def _paired_generators(
    objects: Objects, saved: Mapping[str, list[Tensor]]
) -> list[tuple[torch.Generator, Tensor]]:
    found: list[tuple[torch.Generator, Tensor]] = []
    for (name, loader), other in _pair("loader", objects.loaders, saved, some=False):
        mine = randomness.generators_of(loader)
        if len(mine) != len(saved[other]):
            raise CheckpointError(
                f"Loader `{name}` draws with {len(mine)} generators, and with {len(saved[other])} in the checkpoint."
            )
        found += zip(mine, saved[other], strict=True)
    return found
