"""Settings that every test and every process started by one shares."""

from __future__ import annotations

import os
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Set before anything imports torch, and inherited by the engines. Tests start up to four workers, also on a
# machine of two cores: with a thread pool each they would mostly wait for each other, and the check that
# refuses more workers than cores would refuse them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENCLAW_OVERSUBSCRIBE"] = "1"


# Tests of real engines in the lane of all else, so that both lanes are of one length.
_WITH_OTHERS = (
    *("pipeline_scheduler", "plan", "precision", "sharded", "stages", "tensor_parallel"),
    *("release", "verbs", "verify"),
)


class Lanes(LoadScopeScheduling):  # type: ignore[misc] # untyped
    """Most of what starts clusters runs in one lane and all else in another.

    Clusters fill the machine's cores for moments and wait most of the time, so that more lanes of them would only
    measure how they disturb each other.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        subject = file.removeprefix("tests/cluster/test_").removesuffix(".py")
        return "clusters" if file.startswith("tests/cluster/") and subject not in _WITH_OTHERS else "others"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Let ``--numprocesses=2`` be two lanes."""
    return Lanes(config, log)
