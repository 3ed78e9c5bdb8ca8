"""The cluster from a script, without a notebook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from openclaw_nb import OpenClawCluster
from openclaw_nb.core.errors import AlreadyStartedError, RemoteCellError, ResourceError, UnknownNameError

pytestmark = pytest.mark.cluster


def build() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    data = TensorDataset(torch.randn(50, 6), torch.randint(3, (50,)))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(data, batch_size=16, shuffle=True),
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> tuple[float, torch.Tensor]:
    import torch

    torch.manual_seed(5)
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item(), model[0].weight.detach()


@pytest.mark.parametrize(
    ("communication", "transport"),
    [("auto", "gloo + shared memory"), pytest.param("gloo", "gloo", marks=pytest.mark.soak)],
)
def test_a_function_trains_on_every_rank(communication: str, transport: str) -> None:
    with OpenClawCluster(workers=2, oversubscribe=True, communication=communication) as cluster:
        assert cluster.master is not None
        assert cluster.master.communication == transport
        results = cluster.run("data_parallel", train, **build())
        expected_loss, expected_weight = train(**build())
        for loss, weight in results:
            assert loss == pytest.approx(expected_loss, rel=1e-5)
            torch.testing.assert_close(weight, expected_weight, rtol=1e-6, atol=1e-6)
        with pytest.raises(RemoteCellError, match="planted"):
            cluster.run(None, _raise)
        assert cluster.run(None, _double, number=4) == [8, 8]
        with pytest.raises(AlreadyStartedError, match="runs already"):
            OpenClawCluster(workers=1).start()
        with pytest.raises(UnknownNameError, match="data_parallel"):
            cluster.run("data_paralel", train, **build())
    assert not cluster.running


def _double(number: int) -> int:
    return 2 * number


def _raise() -> None:
    raise ValueError("planted")


def test_what_cannot_be_started_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENCLAW_OVERSUBSCRIBE")
    with pytest.raises(ResourceError, match="10000"):
        OpenClawCluster(workers=10_000).start()
    with pytest.raises(UnknownNameError, match="auto"):
        OpenClawCluster(devices="GPU-7").start()
