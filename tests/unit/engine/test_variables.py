"""Variables of a worker: what counts as equal on two ranks, what is sent, what is said of them."""

from __future__ import annotations

import copy
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from openclaw_nb.core.errors import UnknownNameError
from openclaw_nb.engine import variables
from openclaw_nb.engine.variables import digest, digests, modules_of, size_of


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def optimizer(momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model().parameters(), lr=0.1, momentum=momentum)


BASE = np.arange(12.0).reshape(3, 4)
EQUAL: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "number": (1.5, 3.0 / 2),
    "nan": (float("nan"), float("nan")),
    "text": ("ab", "a" + "b"),
    "bytes": (b"ab", bytes([97, 98])),
    "list": ([1, [2, "x"]], [1, [2, "x"]]),
    "dict": ({"a": 1, "b": (2, None)}, {"a": 1, "b": (2, None)}),
    "array": (BASE, BASE.copy()),
    "array in another memory order": (BASE, np.asfortranarray(BASE)),
    "array view": (BASE[:, ::2], BASE[:, ::2].copy()),
    "empty array": (BASE[:0], np.empty((0, 4))),
    "tensor": (torch.ones(2, 3), torch.ones(2, 3)),
    "tensor view": (torch.arange(6.0).view(2, 3).T, torch.arange(6.0).view(2, 3).T.contiguous()),
    "number tensor": (torch.tensor(2.0), torch.tensor(2.0)),
    "half tensor": (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
    "empty tensor": (torch.zeros(0, 2), torch.zeros(0, 2)),
    "tensor with gradient": (torch.ones(2), torch.ones(2, requires_grad=True)),
    "nested": ({"a": [torch.ones(2), {"b": BASE}]}, {"a": [torch.ones(2), {"b": BASE.copy()}]}),
    "model": (model(), model()),
    "model and its copy": (model(), copy.deepcopy(model())),
    "optimizer": (optimizer(), optimizer()),
}
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "numbers": (1, 2),
    "int and bool": (1, True),
    "int and float": (1, 1.0),
    "list and tuple": ([1], (1,)),
    "order": ([1, 2], [2, 1]),
    "nesting": ([1, [2]], [[1], 2]),
    "keys": ({"a": 1}, {"b": 1}),
    "kind of mapping": ({"a": 1}, OrderedDict(a=1)),
    "array values": (BASE, BASE + 1e-15),
    "array shape": (BASE, BASE.reshape(4, 3)),
    "array dtype": (np.zeros(2, np.float32), np.zeros(2, np.int32)),
    "array and tensor": (np.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "tensor values": (torch.zeros(2), torch.tensor([0.0, 1e-40])),
    "tensor shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "empty tensors": (torch.zeros(0, 2), torch.zeros(0, 3)),
    "tensor and parameter": (torch.zeros(2), nn.Parameter(torch.zeros(2))),
    "models": (model(), model(1)),
    "optimizers": (optimizer(), optimizer(0.8)),
    "deep inside": ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}),
}


@pytest.mark.parametrize(("left", "right"), EQUAL.values(), ids=EQUAL)
def test_equal_values_have_equal_digests(left: Any, right: Any) -> None:
    assert digest(left, depth=8) == digest(right, depth=8) != ""


@pytest.mark.parametrize(("left", "right"), DIFFERENT.values(), ids=DIFFERENT)
def test_different_values_have_different_digests(left: Any, right: Any) -> None:
    first, second = digest(left, depth=8), digest(right, depth=8)
    assert "" not in (first, second)
    assert first != second


@pytest.mark.parametrize(
    "value",
    [
        (i for i in range(3)),
        threading.Lock(),
        object(),
        [1, object()],
        {"a": [object()]},
        [[[[[1]]]]],
        np.array([object()]),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
    ],
    ids=["generator", "lock", "object", "in a list", "in a dict", "too deep", "objects", "sparse", "meta"],
)
def test_no_digest_where_equality_cannot_be_told(value: Any) -> None:
    assert digest(value) == ""


def test_a_step_of_training_changes_the_digest_of_model_and_optimizer() -> None:
    net = model()
    trainer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    before = digest(net), digest(trainer, depth=8)
    net(torch.ones(2, 3)).sum().backward()
    trainer.step()
    assert digest(net) != before[0]
    assert digest(trainer, depth=8) != before[1]


def test_names_that_differ_by_design_or_cannot_be_compared_are_left_out() -> None:
    namespace = {"seen": 3, "x": torch.ones(2), "a": BASE, "lock": threading.Lock(), "losses": [1.0]}
    found = digests(namespace, ["seen", "x", "a", "lock", "losses", "unbound"])
    assert found == {"seen": digest(3), "losses": digest([1.0])}


# ------------------------------------------------------------------------------- send, receive, describe


def test_variables_go_from_one_namespace_to_another(tmp_path: Path) -> None:
    path = str(tmp_path / "variables")
    theirs: dict[str, Any] = {"kept": 1, "n": 0}

    sent = variables.send({"n": 5, "t": torch.ones(3), "other": 2}, ["n", "t"], path)
    received = variables.receive(theirs, path)

    assert sent == {"size_bytes": (tmp_path / "variables").stat().st_size}
    assert received == {"names": ["n", "t"], **sent}
    assert sorted(theirs) == ["kept", "n", "t"]
    assert theirs["n"] == 5
    assert torch.equal(theirs["t"], torch.ones(3))


def test_an_unknown_name_says_what_there_is_and_sends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "variables"
    namespace = {"model": 1, "_hidden": 2}
    with pytest.raises(UnknownNameError, match=r"'modle'\. Did you mean 'model'\? Allowed: model\.$"):
        variables.send(namespace, ["model", "modle"], str(path))
    assert not path.exists()
    with pytest.raises(UnknownNameError):
        variables.describe(namespace, ["modle"])


def test_describe() -> None:
    found = variables.describe({"t": torch.zeros(10), "n": 3}, ["t", "n"])
    assert found["t"] == {"type": "Tensor", "digest": digest(torch.zeros(10)), "size_bytes": 40}
    assert (found["n"]["type"], found["n"]["digest"]) == ("int", digest(3))


def test_modules_that_variables_come_from() -> None:
    values = {
        "np": np,
        "model": nn.Sequential(),
        "function": digest,
        "number": 3,
        "made here": type("Mine", (), {})(),
    }
    found = modules_of(values)
    assert {"numpy", "torch.nn.modules.container", "openclaw_nb.engine.variables", "builtins"} <= set(found)
    assert all(name in sys.modules for name in found)
    assert "__main__" not in modules_of({"main": sys.modules["__main__"]})


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [
        (torch.zeros(10, dtype=torch.float64), 80),
        (np.zeros((2, 3), np.int16), 12),
        ({"a": torch.zeros(2), "b": {"c": np.zeros(3)}}, 32),
        (nn.Linear(3, 4), 64),
    ],
    ids=["tensor", "array", "nested", "model"],
)
def test_sizes(value: Any, size_bytes: int) -> None:
    assert size_of(value) == size_bytes
