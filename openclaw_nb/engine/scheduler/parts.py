"""The consecutive parts of a model that a person names, checked: together they are the model, and nothing else.

Knows modules; does not know ranks, schedules or messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from openclaw_nb.core.errors import RefusedError, unknown_name

_SAME = 1e-4


class Stage(nn.Module):
    """Parts of a model that run one after the other on one device; the model keeps them too.

    Parameters
    ----------
    names : sequence of str
        The parts' names in the model.
    parts : sequence of Module
        The parts.
    """

    def __init__(self, names: Sequence[str], parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.names = list(names)
        self.parts = nn.ModuleList(parts)

    def forward(self, value: Tensor) -> Tensor:
        """Run the parts in order; each takes and returns one tensor."""
        for name, part in zip(self.names, self.parts, strict=True):
            result = part(value)
            if not isinstance(result, Tensor):
                raise RefusedError(
                    f"The part {name!r} returns {type(result).__name__}: parts of a pipeline take and return one "
                    "tensor. Wrap it in a module that does."
                )
            value = result
        return value


def split(model: nn.Module, stages: Sequence[Sequence[str]]) -> list[Stage]:
    """Return the stages of these parts, by name.

    Raises
    ------
    RefusedError
        For parts that are unknown, named twice or missing, with their names, and for parameters that two stages share.
    """
    found = [_stage(model, names) for names in stages]
    _check_complete(model, found)
    _check_untied(model, found)
    return found


def _stage(model: nn.Module, names: Sequence[str]) -> Stage:
    modules = {name: module for name, module in model.named_modules() if name}
    for name in names:
        if name not in modules:
            raise unknown_name("part of the model", name, modules)
    expanded = [each for name in names for each in _callable_parts(name, modules[name])]
    return Stage([name for name, _ in expanded], [part for _, part in expanded])


def _callable_parts(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A list of modules stands for its members, in order."""
    if isinstance(module, nn.ModuleList):
        for number, child in enumerate(module):
            yield from _callable_parts(f"{name}.{number}", child)
    else:
        yield name, module


def _check_complete(model: nn.Module, stages: Sequence[Stage]) -> None:
    names = [name for stage in stages for name in stage.names]
    double = [
        name
        for name in dict.fromkeys(names)
        if names.count(name) > 1 or any(name.startswith(f"{n}.") for n in names)
    ]
    if double:
        raise RefusedError(
            f"Each part of a model is in one stage: named twice, or inside of another: {_listed(double)}."
        )
    used = {id(tensor) for stage in stages for tensor in [*stage.parameters(), *stage.buffers()]}
    missing = [
        name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if id(tensor) not in used
    ]
    if missing:
        raise RefusedError(
            f"The stages leave out {_listed(missing)}. Name every part of the model, in the order in which they run; "
            "its children are " + _listed([name for name, _ in model.named_children()]) + "."
        )


def _check_untied(model: nn.Module, stages: Sequence[Stage]) -> None:
    owner: dict[int, int] = {}
    names = {id(p): name for name, p in model.named_parameters()}
    for number, stage in enumerate(stages):
        for parameter in stage.parameters():
            first = owner.setdefault(id(parameter), number)
            if first != number:
                raise RefusedError(
                    f"Stages {first} and {number} share the parameter {names[id(parameter)]!r} (tied weights): on two "
                    "devices its copies would part. Put the parts that share it into one stage, or train with "
                    "data_parallel."
                )


def check_equal(model: nn.Module, stages: Sequence[Stage], x: Tensor) -> None:
    """Refuse stages whose results, one after the other, are not the model's.

    Both run once in evaluation mode, where dropout does nothing and statistics stay.
    """
    modes = {module: module.training for module in model.modules()}
    state = torch.random.get_rng_state()
    model.eval()
    try:
        with torch.no_grad():
            whole, value = model(x), x
            for stage in stages:
                value = stage(value)
    finally:
        for module, mode in modes.items():
            module.training = mode
        torch.random.set_rng_state(state)
    same = isinstance(whole, Tensor) and whole.shape == value.shape
    if not same or not torch.allclose(whole.float(), value.float(), rtol=_SAME, atol=_SAME, equal_nan=True):
        named = {name for stage in stages for name in stage.names}
        left = [n for n, m in model.named_modules() if n and not list(m.children()) and not _within(n, named)]
        hint = f" Not named: {_listed(left)}." if left else ""
        raise RefusedError(
            "The stages, one after the other, do not give what model(x) gives: its forward does more than to call "
            f"these parts in this order.{hint} Put what it does between parts into a module, and name that as well."
        )


def _within(name: str, named: set[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in named)


def check_statistics(model: nn.Module, num_microbatches: int) -> None:
    """Refuse BatchNorm in training with several micro-batches: its statistics would not be the batch's."""
    if num_microbatches == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise RefusedError(
                f"{name!r} ({type(module).__name__}) takes statistics of what it sees, which is a micro-batch and not "
                "the batch: the result would differ from a single device's. Take microbatches=1, GroupNorm or "
                "LayerNorm, or train with data_parallel."
            )


def _listed(names: Sequence[Any]) -> str:
    shown = ", ".join(map(repr, names[:8]))
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown or "none"
