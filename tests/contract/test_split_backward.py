"""What is used of torch's split of a backward pass, which is not public."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from openclaw_nb.engine.scheduler.backward import Pass


class Mixed(nn.Module):
    """Weights that branch off at several places, one used twice, one without use, and a view at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.gain, self.place = nn.Parameter(torch.ones(6)), nn.Parameter(torch.randn(4, 6))
        self.idle = nn.Parameter(torch.ones(3))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.gain + self.place
        x = self.norm(x + self.second(F.gelu(self.first(x))))
        return (self.first(x) * self.gain).transpose(0, 1)


@pytest.mark.parametrize("from_outside", [True, False], ids=["middle", "first stage"])
@pytest.mark.parametrize("frozen", [False, True])
def test_input_first_and_weights_later_is_the_whole_backward(from_outside: bool, frozen: bool) -> None:
    torch.manual_seed(0)
    model = Mixed().requires_grad_(not frozen)
    value, gradient = torch.randn(4, 6), torch.randn(6, 4)

    def run(split: bool) -> list[torch.Tensor | None]:
        model.zero_grad()
        came_back = None
        for _ in range(2):  # gradients add up over micro-batches
            x = value.clone().requires_grad_(from_outside)
            way = Pass(x, model(x), list(model.parameters()))
            if split:
                came_back = way.inputs(gradient)
                way.weights()
            else:
                came_back = way.whole(gradient)
        return [came_back, *(p.grad for p in model.parameters())]

    for whole, cut in zip(run(split=False), run(split=True), strict=True):
        if whole is None:
            assert cut is None
        else:
            torch.testing.assert_close(cut, whole, rtol=1e-6, atol=1e-6)
