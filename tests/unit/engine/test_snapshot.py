"""What a cell may change is put back, in place."""

from __future__ import annotations

import copy
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.verify.snapshot import Snapshot


def trained() -> dict[str, Any]:
    """A model and an optimizer that have made a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    names = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    step(names)
    return names


def step(names: dict[str, Any]) -> None:
    names["optimizer"].zero_grad()
    names["model"](torch.randn(5, 3)).sum().backward()
    names["optimizer"].step()
    names["scheduler"].step()


def test_training_is_put_back_with_every_object_in_its_place() -> None:
    names = trained()
    model, optimizer = names["model"], names["optimizer"]
    group, momentum = optimizer.param_groups[0], optimizer.state[model[0].weight]["exp_avg"]
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict(), names["scheduler"].state_dict()])
    gradient = model[0].weight.grad.clone()
    drawn = torch.get_rng_state()
    snapshot = Snapshot(names, set(names))
    step(names)
    model[2] = nn.Linear(4, 2)
    model[0].requires_grad_(False)
    model.eval()
    model.register_forward_hook(lambda *_: None)
    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    names["new"], names["model"] = 1, None
    snapshot.restore()
    assert names["model"] is model
    assert "new" not in names
    assert optimizer.param_groups == [group]
    assert optimizer.param_groups[0] is group
    assert optimizer.state[model[0].weight]["exp_avg"] is momentum
    after = [model.state_dict(), optimizer.state_dict(), names["scheduler"].state_dict()]
    assert repr(after) == repr(before)
    assert torch.equal(model[0].weight.grad, gradient)
    assert model.training
    assert model[0].weight.requires_grad
    assert not model._forward_hooks
    assert torch.equal(torch.get_rng_state(), drawn)


class Counter:
    """Stands for a class of the notebook's."""

    def __init__(self) -> None:
        self.count, self.seen = 0, [torch.zeros(2)]


Counter.__module__ = "__main__"


@pytest.mark.parametrize(
    ("make", "change", "look"),
    [
        (lambda: [1, [2]], lambda v: (v[1].append(3), v.append(4)), repr),
        (lambda: {"a": {1}}, lambda v: (v["a"].add(2), v.pop("a")), repr),
        (lambda: np.arange(3), lambda v: v.fill(7), repr),
        (lambda: torch.arange(3.0), lambda v: v.add_(1).resize_(5), repr),
        (lambda: torch.zeros(1).expand(4), lambda v: None, repr),
        (
            Counter,
            lambda v: (setattr(v, "count", 5), v.seen[0].add_(1), v.seen.append(0)),
            lambda v: repr(vars(v)),
        ),
        (lambda: types.SimpleNamespace(step=0), lambda v: setattr(v, "step", 9), repr),
        (lambda: np.random.default_rng(0), lambda v: v.random(), lambda v: repr(v.bit_generator.state)),
        (lambda: random.Random(0), lambda v: v.random(), lambda v: repr(v.getstate())),
        (
            lambda: torch.Generator().manual_seed(0),
            lambda v: torch.rand(1, generator=v),
            lambda v: repr(v.get_state().tolist()),
        ),
        (
            lambda: DataLoader(TensorDataset(torch.zeros(4)), shuffle=True, generator=torch.Generator()),
            lambda v: (v.dataset.tensors[0].add_(1), list(v)),
            lambda v: repr([v.dataset.tensors, v.generator.get_state().tolist()]),
        ),
    ],
    ids=[
        "list",
        "dict",
        "array",
        "tensor",
        "expanded tensor",
        "own object",
        "namespace",
        "numpy generator",
        "python generator",
        "torch generator",
        "loader",
    ],
)
def test_a_value_is_put_back(
    make: Callable[[], Any], change: Callable[[Any], Any], look: Callable[[Any], str]
) -> None:
    names = {"_hidden": make()}
    value, before = names["_hidden"], look(names["_hidden"])
    snapshot = Snapshot(names, {"_hidden"})
    change(value)
    snapshot.restore()
    assert names["_hidden"] is value
    assert look(value) == before


@pytest.mark.parametrize(
    "value", [iter([1]), (n for n in ()), enumerate([])], ids=["iterator", "generator", "enumerate"]
)
def test_what_gives_each_value_once_is_refused_where_it_is_used(value: Any) -> None:
    Snapshot({"numbers": value}, set()).restore()
    with pytest.raises(RefusedError, match="'numbers' is a"):
        Snapshot({"numbers": value}, {"numbers"})


def test_deep_lists_are_no_trouble() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    Snapshot({"deep": deep}, set()).restore()
