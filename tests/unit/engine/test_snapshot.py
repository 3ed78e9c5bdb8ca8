"""What a cell may change is put back, in place."""

from __future__ import annotations

import array
import collections
import copy
import functools
import logging
import queue
import random
import re
import sqlite3
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.core.host import available_memory_bytes
from openclaw_nb.engine.verify.snapshot import Snapshot
from openclaw_nb.engine.verify.storage import Copies


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


class Base:
    """Has a slot whose own name is mangled."""

    __slots__ = ("__inner",)

    def __init__(self) -> None:
        self.__inner = [0]

    def change_inner(self) -> None:
        self.__inner.append(1)
        self.__inner = [2]

    def look(self) -> str:
        return repr(self.__inner)


class Slotted(Base):
    """Has no dictionary; one of its slots is empty at first."""

    __slots__ = ("count", "empty", "gone")

    def __init__(self) -> None:
        super().__init__()
        self.count, self.gone = 0, "here"

    def change(self) -> None:
        self.change_inner()
        self.count, self.empty = 5, 1
        del self.gone

    def look(self) -> str:
        return f"{super().look()} {self.count} {self.gone} {hasattr(self, 'empty')}"


class Registered:
    """Counts its objects, and lists them, in the class."""

    count = 0
    made: ClassVar[list[int]] = []

    def __init__(self) -> None:
        type(self).count += 1
        self.made.append(self.count)


class Items(dict[str, int]):
    """A container that holds more than items."""


for each in (Counter, Slotted, Registered, Items):
    each.__module__ = "__main__"


def counting() -> Callable[[], int]:
    """Return a function with a variable around it, an attribute and a default argument that it changes."""
    around = 0

    def count(seen: list[int] = []) -> int:  # noqa: B006 - what is tested
        nonlocal around
        around += 1
        seen.append(around)
        count.calls = len(seen)  # type: ignore[attr-defined]
        return around

    return count


def of_library() -> Any:
    """An object of a class that no notebook has written, with a tensor deep inside."""
    return collections.UserDict(mean=collections.UserList([torch.zeros(2)]))


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
        (Slotted, lambda v: v.change(), lambda v: v.look()),
        (Registered, lambda v: type(v)(), lambda v: repr([v.count, v.made])),
        (
            lambda: Registered,
            lambda v: (v(), setattr(v, "extra", 1)),
            lambda v: repr([v.count, v.made, vars(v).keys()]),
        ),
        (lambda: Items(a=1), lambda v: (v.pop("a"), setattr(v, "more", 2)), lambda v: repr([v, vars(v)])),
        (
            counting,
            lambda v: v(),
            lambda v: repr([v.__closure__[0].cell_contents, v.__defaults__, vars(v)]),
        ),
        (of_library, lambda v: (v["mean"][0].add_(1), v["mean"].append(0), v.pop("mean")), repr),
        (lambda: functools.partial(counting()), lambda v: v(), lambda v: repr(v.func.__defaults__)),
        (lambda: array.array("d", [1, 2]), lambda v: v.append(3), repr),
        (lambda: np.random.RandomState(0), lambda v: v.rand(), lambda v: repr(v.get_state())),
        (
            lambda: np.array([[1], {"a": 2}], dtype=object),
            lambda v: (v[0].append(2), v[1].clear()),
            repr,
        ),
        (
            lambda: torch.zeros(3).to_sparse(),
            lambda v: v.add_(torch.ones(3).to_sparse()),
            lambda v: repr(v.to_dense()),
        ),
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
        "slots",
        "class of an object",
        "class",
        "container with fields",
        "function",
        "object of a library",
        "partial",
        "array of numbers",
        "old numpy generator",
        "array of objects",
        "sparse tensor",
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


def test_one_inside_of_what_the_cell_uses_is_refused_by_its_path() -> None:
    holder = Counter()
    holder.seen = [{"it": iter([1])}]  # type: ignore[list-item]
    Snapshot({"holder": holder}, set()).restore()
    with pytest.raises(RefusedError, match=r"'holder\.seen\.0\.it' is a list_iterator"):
        Snapshot({"holder": holder}, {"holder"})


def test_views_share_a_copy_and_stay_views() -> None:
    whole = torch.arange(1000.0)
    names = {"whole": whole, "part": whole[10:20], "rows": whole.view(10, 100)}
    copies = Copies()
    for name, tensor in names.items():
        copies.add(name, tensor)
    assert sum(size for size, _ in copies.sizes()) == 4000
    snapshot = Snapshot(names, set(names))
    names["part"].data = torch.zeros(3, dtype=torch.float64)
    whole.mul_(2)
    whole.requires_grad_()
    snapshot.restore()
    snapshot.restore()  # as often as is wanted
    assert torch.equal(whole, torch.arange(1000.0))
    assert not whole.requires_grad
    whole[10] = -1.0
    assert names["part"][0] == names["rows"][0, 10] == -1.0


def test_what_is_mapped_for_reading_alone_is_not_written_to(tmp_path: Path) -> None:
    """Writing to it would end the process; a NaN in it equals nothing, itself neither."""
    np.array([1.0, np.nan]).tofile(tmp_path / "data")
    script = (
        "import numpy as np, torch, warnings; warnings.simplefilter('ignore')\n"
        "from openclaw_nb.engine.verify.snapshot import Snapshot\n"
        f"data = torch.from_numpy(np.memmap({str(tmp_path / 'data')!r}, dtype='float64', mode='r'))\n"
        "Snapshot({'data': data}, {'data'}).restore(); print('there')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "there\n", (done.returncode, done.stderr)


@pytest.fixture
def enormous(tmp_path: Path) -> torch.Tensor:
    """A tensor of 4 TB, of which nothing is on the disk or in memory."""
    return torch.from_numpy(np.memmap(tmp_path / "data", dtype="float32", mode="w+", shape=(2**40,)))


def test_more_than_the_memory_is_refused_with_the_sizes(enormous: torch.Tensor) -> None:
    small = torch.zeros(10)
    holder = Counter()
    holder.seen = [enormous]
    with pytest.raises(RefusedError, match=r"takes 4\.0 TiB \(holder\.seen\.0 4\.0 TiB\)"):
        Snapshot({"holder": holder, "small": small}, {"holder", "small"})
    with pytest.raises(RefusedError, match=r"4\.0 TiB for what the steps are compared by"):
        Snapshot({"small": small}, {"small"}, extra_bytes=2**42)
    Snapshot({"small": small}, {"small"}, extra_bytes=available_memory_bytes() // 4, num_sharing=2)
    with pytest.raises(RefusedError, match="free for this worker"):
        Snapshot({"small": small}, {"small"}, extra_bytes=available_memory_bytes() // 4, num_sharing=8)


def test_what_the_cell_cannot_reach_is_not_copied(enormous: torch.Tensor) -> None:
    names: dict[str, Any] = {"data": enormous, "x": torch.zeros(2), "print": print}
    exec("def train(): step()\ndef step(): return x.add_(1)\ndef far(): return data", names)
    snapshot = Snapshot(names, {"train"})
    names["train"]()
    names["data"] = None
    snapshot.restore()
    assert torch.equal(names["x"], torch.zeros(2))  # reached by two functions
    assert names["data"] is enormous
    with pytest.raises(RefusedError, match="data 4"):
        Snapshot(names, {"far"})
    exec("def anything(): return globals()", names)
    with pytest.raises(RefusedError, match="data 4"):
        Snapshot(names, {"anything"})


def test_modules_of_the_person_are_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file beside the notebook: its variables, and those that its functions and classes change."""
    (tmp_path / "beside_the_notebook.py").write_text(
        "count, seen = 0, []\n"
        "class Meter:\n"
        "    made = 0\n"
        "    def __init__(self): self.sum = 0; Meter.made += 1\n"
        "    def add(self, x):\n"
        "        global count\n"
        "        count += 1; seen.append(x); self.sum += x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import beside_the_notebook as beside  # type: ignore[import-not-found]

    meter = beside.Meter()
    for names in ({"meter": meter}, {"beside": beside, "meter": meter}, {"add": meter.add}):
        snapshot = Snapshot(dict(names), set(names))
        meter.add(3)
        beside.Meter()
        snapshot.restore()
        assert (beside.count, beside.seen, meter.sum, beside.Meter.made) == (0, [], 0, 1), names


def test_what_cannot_be_looked_into_is_named() -> None:
    holder = Counter()
    holder.seen = [sqlite3.connect(":memory:"), threading.Lock(), re.compile("a"), torch.float32, object()]  # type: ignore[list-item]
    snapshot = Snapshot({"holder": holder}, {"holder"})
    assert snapshot.unknown == ["holder.seen.0 (sqlite3.Connection)"]


def test_a_tensor_that_cannot_be_copied_is_refused_by_name() -> None:
    broken = torch.zeros(2).as_subclass(type("Broken", (torch.Tensor,), {"clone": _raise}))
    with pytest.raises(RefusedError, match=r"broken \(8 bytes\) cannot be copied.*no clones"):
        Snapshot({"broken": broken}, {"broken"})


def _raise(*_: Any, **__: Any) -> None:
    raise RuntimeError("no clones")


def test_the_machinery_of_the_process_is_left_alone() -> None:
    """A logger reaches streams, threads' locks and all other loggers."""
    logger = logging.getLogger("openclaw.test")
    snapshot = Snapshot({"logger": logger, "box": queue.Queue()}, {"logger", "box"})
    logger.setLevel(logging.CRITICAL)
    snapshot.restore()
    assert logger.level == logging.CRITICAL


def test_deep_lists_are_no_trouble() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    Snapshot({"deep": deep}, {"deep"}).restore()
