"""Which model, optimizers, loaders, schedulers and scalers a strategy cell uses.

Knows torch's types and the rules by which the objects are chosen: by name when the person gave names, else
by type among what the cell can reach. It does not prepare or change anything. A choice that is not plain is
refused, with the candidates and the change to make.

    cell source + namespace --Scene--> paths and objects --rules below--> Objects

An object that a function builds while the cell runs is not there to be found.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.objects.checks import check_model, check_optimizer, describe
from openclaw_nb.engine.objects.names import Build
from openclaw_nb.engine.objects.scene import Scene, plain

_OWN_CELL = "build it in a cell of its own that runs on the workers first"


@dataclass(frozen=True, kw_only=True)
class Objects:
    """What a strategy has to prepare for a cell, by the names that the cell uses.

    Attributes
    ----------
    models : dict of str to nn.Module
        One, unless several were named. A compiled model is given as the module inside.
    optimizers : dict of str to Optimizer
        Those that hold parameters of the models; empty in a cell that only evaluates.
    loaders, schedulers, scalers : dict
        Every DataLoader (or those named), LRScheduler and GradScaler that the cell reaches.
    aliases : dict of str to str
        Other paths to the same objects, to the name used above.
    ignored : tuple of str
        What was found and left alone, one readable line each.
    built : tuple of Build
        Calls by which the cell makes DataLoaders and schedulers of its own; they are not in the above.
    """

    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    loaders: dict[str, DataLoader[Any]]
    schedulers: dict[str, LRScheduler]
    scalers: dict[str, torch.amp.GradScaler]
    aliases: dict[str, str]
    ignored: tuple[str, ...]
    built: tuple[Build, ...]

    @property
    def model(self) -> nn.Module:
        """The single model; RefusedError if several were named."""
        if len(self.models) != 1:
            raise RefusedError(
                f"This strategy takes one model, and the cell has {_described(self.models)}. "
                "Name one: --model NAME."
            )
        return next(iter(self.models.values()))


def find_objects(
    source: str,
    namespace: Mapping[str, object],
    *,
    model: str | None = None,
    optimizer: str | None = None,
    loader: str | None = None,
) -> Objects:
    """Find the objects of a strategy cell before it runs.

    Parameters
    ----------
    source : str
        The cell.
    namespace : mapping of str to object
        The worker's user namespace; functions written in its cells have it as their globals.
    model, optimizer, loader : str, optional
        Names given by the person, several separated by commas, dotted where needed (``trainer.model``).

    Returns
    -------
    Objects

    Raises
    ------
    UnknownNameError
        A given name does not exist.
    RefusedError
        No model, several models, or objects that no strategy can take.
    SyntaxError
        The cell is no Python.
    """
    scene = Scene(source, namespace)
    asked = scene.named(optimizer, Optimizer)
    used = scene.of_type(Optimizer) if asked is None else asked
    models = scene.named(model, nn.Module) or _choose_models(scene, used)
    _check_models(scene, models)
    optimizers, ignored = _split_optimizers(models, used)
    if asked is not None and ignored:
        raise RefusedError(f"{ignored[0]}: name the optimizer that does.")
    _check_optimizers(scene, models, optimizers)
    loaders = _choose_loaders(scene, loader)
    schedulers, strange = _split_schedulers(scene.live(scene.of_type(LRScheduler)), optimizers)
    scalers = scene.live(scene.of_type(torch.amp.GradScaler))
    return Objects(
        models=models,
        optimizers=optimizers,
        loaders=loaders,
        schedulers=schedulers,
        scalers=scalers,
        aliases=scene.aliases({**models, **optimizers, **loaders, **schedulers, **scalers}),
        ignored=(*ignored, *strange),
        built=tuple(scene.built((DataLoader, LRScheduler))),
    )


# ---------------------------------------------------------------------------------------- models


def _choose_models(scene: Scene, optimizers: Mapping[str, Optimizer]) -> dict[str, nn.Module]:
    roots = _roots({name: m for name, m in scene.of_type(nn.Module).items() if _owns_parameters(m)})
    stepped = _stepped(optimizers.values())
    kept = {name: m for name, m in roots.items() if not optimizers or _ids(m.parameters()) & stepped}
    # A name that the cell binds anew counts only when nothing else is there: then it is refused below.
    kept = scene.live(kept) or kept
    if not kept:
        raise RefusedError(_no_model(scene, roots, optimizers))
    if len(kept) > 1:
        raise RefusedError(
            f"The cell uses several models: {_described(kept)}. Say which: --model {next(iter(kept))}, "
            f"or --model {','.join(kept)} for several."
        )
    return kept


def _roots(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Without the models that are part of another one."""
    parts = {id(part) for m in models.values() for part in m.modules() if part is not m}
    return {name: m for name, m in models.items() if id(m) not in parts}


def _check_models(scene: Scene, models: Mapping[str, nn.Module]) -> None:
    for name, model in models.items():
        _check_bound(scene, name, model)
        check_model(name, model)
    whole = _roots(models)
    for name in models:
        if name not in whole:
            raise RefusedError(f"`{name}` is part of another model that was named: name the whole one only.")


def _check_bound(scene: Scene, name: str, value: object) -> None:
    bound = scene.name_of(value)
    if scene.is_stored(bound):
        raise RefusedError(
            f"This cell redefines `{bound.partition('.')[0]}`, so it will not use the `{name}` that is there "
            f"now: {_OWN_CELL}."
        )


def _no_model(scene: Scene, roots: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> str:
    """The message for a cell without a model: what was looked for, where, and what to do."""
    trained = f" that {_listed(optimizers)} trains" if optimizers else ""
    said = [f"No model was found: the cell reaches no nn.Module with parameters{trained}."]
    said.append(f"It reads {_names_read(scene)}.")
    built = [build for build in scene.built((nn.Module, Optimizer), but=(_Loss,)) if build.target]
    if roots:
        said.append(
            f"It does reach {_described(roots)}, of whose parameters {_listed(optimizers)} holds none: run "
            f"the cell that builds the optimizer again, or choose with --model {next(iter(roots))}."
        )
    elif built:
        calls = _listed(f"{build.target} = {build.callee}(...)" for build in built)
        said.append(f"It builds {calls} itself: move that to its own cell, which runs on the workers first.")
    else:
        said.append(
            "Build the model in a cell that runs on the workers first, e.g. %%openclaw_parallel without "
            "--strategy; if it exists only in the notebook: %openclaw push NAME."
        )
    return " ".join(said)


def _names_read(scene: Scene) -> str:
    names = sorted(scene.names.loads - set(vars(builtins)) - scene.names.stores)
    missing = [name for name in names if name not in scene.namespace]
    there = _listed(name for name in names if name in scene.namespace) or "no name that is defined here"
    return f"{there}, and {_listed(missing)}, not defined on this worker" if missing else there


# ------------------------------------------------------------------------------------ optimizers


def _split_optimizers(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> tuple[dict[str, Optimizer], list[str]]:
    """Those that train the models, and a line for each of the others."""
    ours = _parameter_ids(models.values())
    chosen = {name: opt for name, opt in optimizers.items() if _stepped([opt]) & ours}
    others = [name for name in optimizers if name not in chosen]
    return chosen, [f"optimizer `{name}` holds no parameters of {_listed(models)}" for name in others]


def _check_optimizers(
    scene: Scene, models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]
) -> None:
    for name, optimizer in optimizers.items():
        _check_bound(scene, name, optimizer)
        check_optimizer(name, optimizer)
        _check_all_chosen(scene, name, optimizer, models)
    for build in scene.built((Optimizer,)):
        call = f"{build.target} = {build.callee}(...)".removeprefix(" = ")
        raise RefusedError(f"This cell builds its own optimizer (`{call}`): {_OWN_CELL}.")


def _check_all_chosen(scene: Scene, name: str, optimizer: Optimizer, models: Mapping[str, nn.Module]) -> None:
    """Refuse an optimizer that also steps tensors of which no chosen model would reduce the gradient."""
    ours = _parameter_ids(models.values())
    stranger = next((p for p in _parameters_of(optimizer) if id(p) not in ours), None)
    if stranger is None:
        return
    stepped = _stepped([optimizer])
    mine = _listed(key for key, m in models.items() if _ids(m.parameters()) & stepped)
    owner = _owner(scene, stranger)
    if owner is None:
        raise RefusedError(
            f"Optimizer `{name}` holds parameters of {mine} and {_tensor_name(scene, stranger)}, which "
            "belongs to no model: make it an nn.Parameter attribute of the model."
        )
    inside = _ids(owner[1].modules())
    names = [key for key, m in models.items() if id(m) not in inside] + [owner[0]]
    raise RefusedError(
        f"Optimizer `{name}` holds parameters of {mine} and of {describe(*owner)}, which is not chosen: use "
        f"--model {','.join(names)}, or give each model its own optimizer."
    )


def _owner(scene: Scene, parameter: torch.Tensor) -> tuple[str, nn.Module] | None:
    """The outermost known module that owns a parameter, those that the cell reaches first."""
    values = {name: plain(value) for name, value in scene.namespace.items()}
    bound = {name: value for name, value in values.items() if isinstance(value, nn.Module)}
    for modules in (scene.of_type(nn.Module), bound):
        owners = _roots({name: m for name, m in modules.items() if id(parameter) in _ids(m.parameters())})
        if owners:
            return next(iter(owners.items()))
    return None


def _tensor_name(scene: Scene, tensor: torch.Tensor) -> str:
    places = {**scene.namespace, **scene.found}
    name = next((path for path, value in places.items() if value is tensor), None)
    return f"`{name}`" if name else f"a tensor of shape {tuple(tensor.shape)}"


# ------------------------------------------------------------------------- loaders and schedulers


def _choose_loaders(scene: Scene, names: str | None) -> dict[str, DataLoader[Any]]:
    asked = scene.named(names, DataLoader)
    if asked is None:
        return scene.live(scene.of_type(DataLoader))
    for name, loader in asked.items():
        _check_bound(scene, name, loader)
    return asked


def _split_schedulers(
    found: Mapping[str, LRScheduler], optimizers: Mapping[str, Optimizer]
) -> tuple[dict[str, LRScheduler], list[str]]:
    """Schedulers of the chosen optimizers, and a line for each of the others."""
    ours = _ids(optimizers.values())
    chosen = {name: scheduler for name, scheduler in found.items() if id(scheduler.optimizer) in ours}
    others = [name for name in found if name not in chosen]
    return chosen, [f"scheduler `{name}` drives none of the cell's optimizers" for name in others]


# ------------------------------------------------------------------------------------------ small


def _owns_parameters(module: nn.Module) -> bool:
    lists = (nn.ParameterList, nn.ParameterDict)
    return not isinstance(module, lists) and next(module.parameters(), None) is not None


def _ids(values: Iterable[object]) -> set[int]:
    return {id(value) for value in values}


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _parameter_ids(models: Iterable[nn.Module]) -> set[int]:
    return {id(p) for m in models for p in m.parameters()}


def _stepped(optimizers: Iterable[Optimizer]) -> set[int]:
    """Identities of all parameters that these optimizers step."""
    return {id(p) for optimizer in optimizers for p in _parameters_of(optimizer)}


def _described(models: Mapping[str, nn.Module]) -> str:
    return ", ".join(describe(*item) for item in models.items())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
