from __future__ import annotations

import math

import pytest

from openclaw_nb.core.errors import UsageError
from openclaw_nb.plan.recovery import check_interval, why_not_elastic
from openclaw_nb.protocol.messages import StrategySpec


def test_data_parallel_is_elastic() -> None:
    assert why_not_elastic(StrategySpec(name="data_parallel")) == ""
    assert why_not_elastic(StrategySpec(name="data_parallel", options={"mode": "gradient"})) == ""


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (StrategySpec(name="data_parallel", split="model"), "--split model"),
        (StrategySpec(name="data_parallel", options={"mode": "parameter"}), "--mode parameter"),
        (StrategySpec(name="pipeline"), "under pipeline"),
        (None, "without a strategy"),
    ],
)
def test_what_is_not_says_why(strategy: StrategySpec | None, said: str) -> None:
    assert said in why_not_elastic(strategy)


def test_intervals_are_seconds() -> None:
    assert check_interval(300) == "300s"
    assert check_interval(0.25) == "0.25s"
    assert check_interval(1e7) == "10000000s"


@pytest.mark.parametrize("given", [0, -1, math.inf, math.nan, "300", True, None])
def test_what_is_no_interval_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match="give a number of seconds above 0, such as 300"):
        check_interval(given)
