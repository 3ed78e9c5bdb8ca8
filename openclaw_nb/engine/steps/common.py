"""Making the ranks' state common when a strategy cell begins: rank 0's wins, a difference is reported."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.objects.find import Objects
from openclaw_nb.engine.steps import randomness
from openclaw_nb.engine.variables import digest


@dataclass(frozen=True)
class _Part:
    """One part of the state: how to digest it, take it and set it."""

    name: str
    digest: Callable[[], bytes]
    take: Callable[[], Any]
    put: Callable[[Any], None]


def make_common(ranks: Ranks, objects: Objects) -> list[str]:
    """Give every rank rank 0's parameters, buffers, optimizer and random state.

    Returns
    -------
    list of str
        One line for each part that differed. Random state is not reported: it differs after any plain cell.
    """
    notes = []
    for part in _parts(objects):
        rows = ranks.gather_bytes(part.digest())
        different = [rank for rank, row in enumerate(rows) if row != rows[0]]
        if not different:
            continue
        value = ranks.broadcast(part.take())
        if ranks.rank:
            part.put(value)
        if part.name:
            named = ", ".join(str(rank) for rank in different)
            notes.append(f"{part.name} differed on rank {named}: rank 0's is used")
    return notes


def common_state(objects: Objects) -> list[Any]:
    """Return what `make_common` makes equal."""
    return [part.take() for part in _parts(objects)]


def take_common(objects: Objects, state: list[Any]) -> None:
    """Take over another rank's `common_state`."""
    for part, value in zip(_parts(objects), state, strict=True):
        part.put(value)


def _parts(objects: Objects) -> list[_Part]:
    parts = [_module_part(name, model) for name, model in objects.models.items()]
    holders: Mapping[str, Any] = {**objects.optimizers, **objects.schedulers, **objects.scalers}
    parts += [_state_part(name, thing) for name, thing in holders.items()]
    generators = [g for loader in objects.loaders.values() for g in randomness.generators_of(loader)]
    parts.append(
        _Part(
            "",
            lambda: _hash(randomness.capture(generators)),
            lambda: randomness.capture(generators),
            lambda data: randomness.restore(data, generators),
        )
    )
    return parts


def _module_part(name: str, model: nn.Module) -> _Part:
    def tensors() -> list[Tensor]:
        return [*model.parameters(), *model.buffers()]

    def put(values: list[Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(tensors(), values, strict=True):
                tensor.copy_(value)

    return _Part(
        f"the state of {name}",
        lambda: _hash("".join(digest(t) for t in tensors()).encode()),
        lambda: [t.detach().cpu() for t in tensors()],
        put,
    )


def _state_part(name: str, thing: Any) -> _Part:
    return _Part(
        f"the state of {name}",
        lambda: _hash(digest(thing.state_dict(), depth=8).encode()),
        thing.state_dict,
        thing.load_state_dict,
    )


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
