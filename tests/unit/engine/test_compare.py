"""Differences and what is allowed, on records made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openclaw_nb.engine.verify.compare import certificate
from openclaw_nb.engine.verify.records import Step


def record(scale: float = 1.0, noise: float = 0.0, idle: float = 0.0) -> list[Step]:
    gradient = torch.tensor([1.0, -2.0], dtype=torch.float64)
    return [
        Step(
            loss=scale,
            gradients={
                "weight": gradient * scale + noise,
                "idle": torch.full((2,), idle, dtype=torch.float64),
            },
            state={
                "weight": gradient * scale + noise,
                "idle": torch.full((2,), 1.0 + idle, dtype=torch.float64),
            },
        )
    ]


def compare(parallel: list[Step], single: list[Step], exact: list[Step] | None) -> dict[str, Any]:
    return certificate(parallel, single, exact, dtype=torch.float32, num_samples=64, with_loss=True)


def test_rounding_of_the_size_of_single_device_rounding_passes() -> None:
    assert compare(record(noise=2e-6), record(noise=1e-6), record())["parted"] is None
    found = compare(record(noise=1e-4), record(noise=1e-6), record())["parted"]
    assert (found["kind"], found["name"], found["step"]) == ("gradient", "weight", 1)
    assert found["difference"] == pytest.approx(0.99e-4 / 2, rel=1e-3)


@pytest.mark.parametrize(
    "exact", [None, record(scale=3.0)], ids=["no float64", "another computation in float64"]
)
def test_half_as_much_again_is_never_rounding(exact: list[Step] | None) -> None:
    """A run in float64 that drew other random numbers says nothing of rounding, and allows nothing."""
    assert compare(record(scale=1.5), record(), exact)["parted"] is not None


def test_a_parameter_without_influence_is_left_out() -> None:
    """Its gradient is zero in float64 and noise in float32, which an optimizer such as Adam makes a whole step of."""
    exact = record(idle=1e-17)
    assert compare(record(idle=0.1), record(idle=-0.1), exact)["parted"] is None
    assert compare(record(idle=0.1), record(idle=-0.1), None)["parted"] is not None


def test_a_gradient_that_one_side_lacks_is_told() -> None:
    lacking = record()
    del lacking[0].gradients["weight"]
    found = compare(lacking, record(), record())["parted"]
    assert (found["name"], found["difference"]) == ("weight", float("inf"))
