"""Variables travel as one value: what was shared is shared, and functions find the names of their new home."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openclaw_nb.engine.reentry.parcel import pack, unpack

SOURCE = """
import math
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
    def forward(self, x):
        return self.b(self.a(x)) * scale()

def scale():
    return factor * math.pi

def later():
    return not_there_yet

factor = 2.0
model = Net()
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n * factor))
data = torch.arange(100.0)
train, test = data[:80], data[80:]
loss = model(torch.ones(1, 4)).sum()
log = [data, {"model": model}]
_1, _i1, _, own = 3, "x", 4, 5
"""


def sent(source: str, extra: str = "None") -> tuple[dict[str, Any], dict[str, Any], dict[str, str], Any]:
    first: dict[str, Any] = {"__name__": "__main__"}
    exec(source, first)
    parcel = pack(first, {"__name__": 0, "__builtins__": 0, "own": 0}, eval(extra, first))
    second: dict[str, Any] = {"__name__": "__main__"}
    extra_value = unpack(parcel.path, second, {"__name__": 0})
    parcel.close()
    return first, second, parcel.left, extra_value


def test_what_is_shared_stays_shared() -> None:
    first, second, left, extra = sent(SOURCE, "[model, optimizer]")
    assert left == {}
    model, optimizer = second["model"], second["optimizer"]
    assert extra[0] is model
    assert extra[1] is optimizer
    assert model.a.weight is model.b.weight
    assert optimizer.param_groups[0]["params"][0] is model.a.weight
    assert second["scheduler"].optimizer is optimizer
    assert second["log"][0] is second["data"]
    assert second["log"][1]["model"] is model
    assert type(model) is second["Net"]
    second["data"][0] = 7
    assert second["train"][0] == 7, "views see their base"
    assert second["test"].untyped_storage().data_ptr() == second["data"].untyped_storage().data_ptr()
    torch.testing.assert_close(model.a.weight, first["model"].a.weight, rtol=0, atol=0)
    state, twin = first["optimizer"].state_dict()["state"], optimizer.state_dict()["state"]
    torch.testing.assert_close(twin, state, rtol=0, atol=0)
    assert second["loss"].item() == first["loss"].item()


def test_functions_are_at_home_in_their_new_namespace() -> None:
    _, second, _, _ = sent(SOURCE)
    assert second["scale"].__globals__ is second
    second["factor"], second["not_there_yet"] = 0.0, 3
    assert second["scale"]() == 0
    assert second["later"]() == 3
    assert float(second["model"](torch.ones(1, 4)).detach().sum()) == 0, "methods, too"


def test_histories_and_the_workers_own_names_stay() -> None:
    _, second, _, _ = sent(SOURCE)
    assert {"_1", "_i1", "_", "own"}.isdisjoint(second)


def test_what_cannot_travel_is_named_with_the_reason() -> None:
    source = """
import threading
generator = (n for n in range(3))
lock = threading.Lock()
rows = [1, lock]
def use(): return lock
file = open("/dev/null", "w")
fine = [1]
"""
    first, second, left, _ = sent(source)
    first["file"].close()
    assert set(left) == {"generator", "lock", "rows", "use", "file"}
    assert left["generator"].startswith("generator: ")
    assert second["fine"] == [1]


def test_loaders_and_generators_go_on_where_they_are() -> None:
    source = """
import torch
from torch.utils.data import DataLoader, TensorDataset
generator = torch.Generator().manual_seed(5)
loader = DataLoader(TensorDataset(torch.arange(6)), shuffle=True, generator=generator, collate_fn=lambda rows: rows)
list(loader)
"""
    first, second, left, _ = sent(source)
    assert left == {}
    assert second["loader"].generator is second["generator"]
    assert [str(x) for x in second["loader"]] == [str(x) for x in first["loader"]]


def test_an_extra_that_cannot_travel_raises() -> None:
    with pytest.raises(TypeError, match="generator"):
        sent("x = 1", "(n for n in ())")
