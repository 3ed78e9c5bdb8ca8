from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from openclaw_nb.core.errors import UsageError
from openclaw_nb.notebook.difference import difference
from openclaw_nb.notebook.transfer import reduce


def layer(bias: float) -> torch.nn.Module:
    made = torch.nn.Linear(2, 1)
    with torch.no_grad():
        made.weight.fill_(1.0)
        made.bias.fill_(bias)
    return made


@pytest.mark.parametrize(
    ("left", "right", "amount"),
    [
        (1, 3, 2.0),
        (1.5, 1, 0.5),
        (True, False, 1.0),
        (3 + 4j, 0, 5.0),
        (np.array([1, 2]), np.array([1, 5]), 3.0),
        (np.array([True]), np.array([False]), 1.0),
        (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([1.0, 4.0], dtype=torch.bfloat16), 2.0),
        (torch.tensor(2), torch.tensor(2), 0.0),
        (torch.tensor([1j]), torch.tensor([-1j]), 2.0),
        (np.array([]), np.array([]), 0.0),
        ([1, "a"], [1.25, "a"], 0.25),
        ({"a": 1, "b": (2,)}, {"a": 1, "b": (5,)}, 3.0),
        (layer(0.0), layer(0.5), 0.5),
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (math.nan, 1.0, math.inf),
        ([1], [1, 2], None),
        ({"a": 1}, {"b": 1}, None),
        (np.zeros(2), np.zeros(3), None),
        ("a", "b", None),
        (1, "a", None),
        (object(), object(), None),
    ],
)
def test_difference(left: Any, right: Any, amount: float | None) -> None:
    assert difference(left, right) == amount
    assert difference(right, left) == amount


def test_sum_and_mean() -> None:
    assert reduce("n", [1, 2, 6], "sum") == 9
    assert reduce("n", [1, 2, 6], "mean") == 3.0
    assert reduce("t", [torch.tensor([1, 2]), torch.tensor([3, 5])], "mean").tolist() == [2.0, 3.5]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["a", "b"], "'x' is a str: only numbers, arrays and tensors have a sum"),
        ([np.zeros(2), np.zeros(3)], "another shape on each rank ([2], [3])"),
        ([np.zeros(1), 1.0], "another shape on each rank"),
    ],
)
def test_what_has_no_sum(values: list[Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        reduce("x", values, "sum")
    assert said in str(caught.value)
