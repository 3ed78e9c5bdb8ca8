"""`PipelineScheduler` on real workers, beside a single device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.cluster

# The same on the workers, in a cell, and here.
BUILD = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(20, 12), Block(12), Block(12), Block(12), nn.Flatten(1), nn.Linear(60, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(5)
    batches = [(torch.randint(20, (16, 5), generator=generator), torch.randint(4, (16,), generator=generator))
               for _ in range(4)]
    return model, optimizer, batches
"""
PLACES: dict[str, Any] = {
    "gpipe": {"stages": ["0", "1", "2", "3", "4", "5"]},
    "1f1b": {"stages": ["0", "1", "2", "3", "4", "5"]},
    "zero-bubble": {"stages": ["0", "1", "2", "3", "4", "5"]},
    "interleaved": {
        "stages": ["0", "1", "2", "3", "4", "5"],
        "stage_devices": [f"CPU-{n}" for n in (0, 0, 1, 0, 1, 1)],
    },
}


def built() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(BUILD, "<build>", "exec"), namespace)
    return namespace


def single() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    model, optimizer, batches = built()["build"]()
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def assert_trained(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
    expected, expected_optimizer, expected_losses = single()
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)
    momenta = [expected_optimizer.state[p]["momentum_buffer"] for p in expected.parameters()]
    for mine, theirs in zip(model.parameters(), momenta, strict=True):
        torch.testing.assert_close(optimizer.state[mine]["momentum_buffer"], theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", PLACES)
def test_in_a_cell_every_schedule_trains_as_a_single_device(lab: Any, schedule: str) -> None:
    lab.good(BUILD)
    options = f"schedule={schedule!r}, microbatches=8, **{PLACES[schedule]!r}"
    lab.good(
        "from openclaw_nb import PipelineScheduler\n"
        "model, optimizer, batches = build()\n"
        "identities = [id(p) for p in model.parameters()]\n"
        f"pipeline = PipelineScheduler({options}).bind(model)\n"
        "losses = []\n"
        "for x, y in batches:\n"
        "    optimizer.zero_grad()\n"
        "    losses.append(pipeline.step(x, y, F.cross_entropy))\n"
        "    if losses[-1] is not None: pipeline.clip_grad_norm_(0.5)\n"
        "    optimizer.step()\n"
        "pipeline._optimizer = optimizer\n"
        "pipeline.collect()\n"
        "bubble = pipeline.bubble if losses[-1] is not None else None\n"
        "assert identities == [id(p) for p in model.parameters()]\n"
        "result = dict(model=model, optimizer=optimizer, losses=losses)"
    )
    for rank in (0, 1):
        assert_trained(**lab.pull("result", rank))
    bubble = lab.pull("bubble")
    assert 0 < bubble.theoretical < bubble.measured < 1
