"""What steps share, and what of it has changed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from openclaw_nb.engine.scheduler.shared import Shared


def test_models_and_optimizers_are_found_and_changes_are_seen() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def load(item: int) -> int:
        return item + 1

    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), torch.zeros(5, 4))

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()

    shared = Shared({"load": load, "forward": forward, "backward": backward})
    assert {id(each) for each in shared.objects} == {id(model), id(optimizer)}
    parameters = len(list(model.parameters()))
    assert [len(numbers) for numbers in shared.reached] == [0, parameters + 3, parameters]

    before = shared.remember(range(len(shared.tensors)))
    loss = forward(torch.randn(5, 3))
    values, gradients = shared.changes(before)
    names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    # torch changes running statistics without a new version.
    assert {names[id(shared.tensors[n])] for n in values} == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    assert not gradients
    before = shared.remember(range(len(shared.tensors)))
    backward(loss)
    values, gradients = shared.changes(before)
    assert {names[id(shared.tensors[n])] for n in values} == {name for name, _ in model.named_parameters()}
    assert len(gradients) == parameters


def test_zeroing_is_seen_where_there_are_no_gradients() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shared = Shared({"zero": lambda item: optimizer.zero_grad()})
    end = shared.watch_zeroing()
    before = shared.remember([0, 1])
    optimizer.zero_grad()
    assert shared.changes(before) == ({}, {0: None, 1: None})
    end()
    assert "zero_grad" not in vars(optimizer)


def test_a_zeroing_of_ones_own_is_called_and_left() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    called = []
    optimizer.zero_grad = own = lambda *args, **kwargs: called.append(1)  # type: ignore[method-assign]
    shared = Shared({"zero": lambda item: optimizer.zero_grad()})
    end = shared.watch_zeroing()
    optimizer.zero_grad()
    end()
    assert called == [1]
    assert vars(optimizer)["zero_grad"] is own
