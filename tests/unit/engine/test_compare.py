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


def compare(
    parallel: list[Step], single: list[Step], exact: list[Step] | None, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    return certificate(parallel, single, exact, dtype=dtype, num_samples=64, with_loss=True)


def test_rounding_of_the_size_of_single_device_rounding_passes() -> None:
    assert compare(record(noise=2e-6), record(noise=1e-6), record())["parted"] is None
    found = compare(record(noise=1e-4), record(noise=1e-6), record())["parted"]
    assert (found["kind"], found["name"], found["step"]) == ("gradient", "weight", 1)
    size = (0.5 * (1.0**2 + 2.0**2)) ** 0.5  # the root mean square of the gradient
    assert found["difference"] == pytest.approx(0.99e-4 / size, rel=1e-3)


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


def part_idle(noise: float, others: float = 1.0) -> list[Step]:
    """A bias of which the middle has no influence, as that of an attention's keys."""
    gradient = torch.tensor([others, noise, others], dtype=torch.float64)
    return [Step(loss=1.0, gradients={"bias": gradient}, state={"bias": gradient.sign()})]


def test_of_a_parameter_the_values_without_influence_are_left_out() -> None:
    exact = part_idle(1e-17)
    assert compare(part_idle(-1e-8), part_idle(1e-8), exact)["parted"] is None
    found = compare(part_idle(-1e-8, others=1.1), part_idle(1e-8), exact)["parted"]
    assert (found["kind"], found["name"]) == ("gradient", "bias")


def test_values_that_are_zero_in_all_runs_are_compared() -> None:
    """As an embedding's rows that no sample names: there is no noise that would excuse a difference."""
    found = compare(part_idle(0.5), part_idle(0.0), part_idle(0.0))["parted"]
    assert found["name"] == "bias"


def test_a_gradient_that_one_side_lacks_is_told() -> None:
    lacking = record()
    del lacking[0].gradients["weight"]
    found = compare(lacking, record(), record())["parted"]
    assert (found["name"], found["difference"]) == ("weight", float("inf"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_half_and_twice_never_pass(dtype: torch.dtype) -> None:
    rounding = torch.finfo(dtype).eps
    for scale in (0.5, 2.0):
        for exact in (record(), None):
            assert compare(record(scale), record(noise=rounding), exact, dtype)["parted"] is not None
    assert compare(record(noise=-rounding), record(noise=rounding), record(), dtype)["parted"] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_where_rounding_hides_faults_nothing_is_compared(dtype: torch.dtype) -> None:
    """The second step is noise on a single device: a difference says nothing then, and no difference neither."""
    noisy = record() + record(noise=0.5)
    report = compare(record() + record(scale=2.0), noisy, record() + record(), dtype)
    assert report["parted"] is None
    assert [row["step"] for row in report["rows"]] == [1]
    assert "from step 2 on rounding" in report["blurred"]
    assert "the gradient of weight" in report["blurred"]


def test_a_float64_run_of_another_computation_is_not_used_and_this_is_said() -> None:
    report = compare(record(), record(), record(scale=3.0))
    assert "something else" in report["no_exact"]
    assert "root of 64 summed samples" in report["reason"]
    assert report["parted"] is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_training_that_is_not_finite_is_not_compared_from_there_on(value: float) -> None:
    report = compare(
        record() + record(noise=value), record() + record(noise=value), record() + record(noise=value)
    )
    assert report["parted"] is None
    assert len(report["rows"]) == 1
    assert "step 2 on training is not finite" in report["blurred"]
    alone = compare(record() + record(noise=value), record() + record(), record() + record())
    assert alone["parted"]["step"] == 2
