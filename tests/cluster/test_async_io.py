"""Loaders that load ahead, or not, as the configuration says, whatever they were made with."""

from __future__ import annotations

import pytest
import torch

from openclaw_nb.monitor.store import Monitor
from openclaw_nb.strategies import DataParallelStrategy

from .conftest import Lab, single_device

pytestmark = pytest.mark.cluster

SETUP = """
import os, time, torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

def collate(rows):
    time.sleep(0.03)
    x, y = default_collate(rows)
    return x, y, os.getpid()

torch.manual_seed(3)
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(80, 8), torch.randint(3, (80,)))
loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate, num_workers={num_workers})
"""
LOOP = """
loaded_by = set()
for epoch in range(1):
    for x, y, by in loader:
        loaded_by.add(by)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
elsewhere = os.getpid() not in loaded_by
weight = model.weight.detach().clone()
"""


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    found: torch.Tensor = single_device(SETUP.format(num_workers=0), LOOP)["weight"]
    return found


@pytest.mark.parametrize(("num_workers", "async_io"), [(0, True), (1, False), (0, None)])
def test_who_loads_and_the_result_stays(
    lab: Lab, expected: torch.Tensor, num_workers: int, async_io: bool | None
) -> None:
    monitor = Monitor()
    forget = lab.master.listen(monitor.take)
    lab.good(SETUP.format(num_workers=num_workers), targets=[0, 1])
    lab.good(LOOP, targets=[0, 1], strategy=DataParallelStrategy(async_io=async_io).spec())
    forget()
    assert lab.pull("elsewhere") == (async_io is True)
    torch.testing.assert_close(lab.pull("weight"), expected)
    history = monitor.latest()
    assert history is not None
    if not async_io:
        assert history.workers[0].seconds["data"] >= 10 * 0.03
