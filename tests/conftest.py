"""Settings that every test and every process started by one shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Set before anything imports torch, and inherited by the engines. Tests start up to four workers, also on a
# machine of two cores: with a thread pool each they would mostly wait for each other, and the check that
# refuses more workers than cores would refuse them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENCLAW_OVERSUBSCRIBE"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what starts clusters run in one lane and all else in another: `make test` runs two at once.

    Clusters fill the machine's cores for moments and wait most of the time, so that more than one lane of them would
    only measure how they disturb each other.
    """
    for item in items:
        suite = item.path.relative_to(Path(__file__).parent).parts[0]
        lane = "clusters" if suite == "cluster" else "others"
        item.add_marker(pytest.mark.xdist_group(lane))
