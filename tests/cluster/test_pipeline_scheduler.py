"""`PipelineScheduler` on real workers, beside a single device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from openclaw_nb import PipelineScheduler
from openclaw_nb.core.errors import RefusedError, RemoteCellError

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


def test_from_a_script_it_trains_and_refuses_what_would_differ(lab: Any) -> None:
    namespace = built()
    model, optimizer, batches = namespace["build"]()
    identities = [id(p) for p in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pipeline = PipelineScheduler(
        list("012345"), [f"CPU-{n}" for n in (2, 2, 2, 3, 3, 3)], microbatches=4, cluster=lab.master
    ).bind(model, optimizer, max_norm=0.5)
    x, y = batches[0]
    loss_fn = F.cross_entropy

    def refused(words: str, x: torch.Tensor, y: torch.Tensor, loss: Any = loss_fn) -> None:
        with pytest.raises(RefusedError, match=words):
            pipeline.step(x, y, loss)

    refused("15 samples cannot be cut into 4", x[:15], y[:15])
    refused("as many samples each", x, y[:8])
    holes = y.clone()
    holes[:7] = -100
    refused("neither a mean nor a sum", x, holes, lambda o, y: F.cross_entropy(o, y, ignore_index=-100))
    losses = [pipeline.step(x, y, loss_fn) for x, y in batches]
    refused(r"shape \[8, 5\], and the first one had \[16, 5\]", x[:8], y[:8])
    assert all(
        torch.equal(before[name], value) for name, value in model.state_dict().items()
    )  # so far the workers'
    assert pipeline.collect() is model
    assert identities == [id(p) for p in model.parameters()]
    assert_trained(model, optimizer, losses)
    timeline = pipeline.timeline()
    assert len(timeline) == 2 * 2 * 4
    assert {box.lane for box in timeline} == {"CPU-2", "CPU-3"}
    assert pipeline.bubble.theoretical == pytest.approx(1 / 5)
    assert "<svg" in timeline._repr_html_()


def digits() -> dict[str, Any]:
    """The seed's three steps, over scikit-learn's digits."""
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(1)
    data = load_digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = TensorDataset(torch.tensor(data.data), torch.tensor(data.target))

    def preprocess(batch: Any) -> Any:
        x, y = batch
        return (x.float() / 16 - 0.3), y

    def forward(batch: Any) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        return F.cross_entropy(model(x), y)

    def backward(loss: torch.Tensor) -> float:
        loss.backward()
        optimizer.step()
        return loss.item()

    steps = {"preprocess": preprocess, "forward": forward, "backward": backward}
    loader = DataLoader(dataset, batch_size=64)
    return {"model": model, "optimizer": optimizer, "steps": steps, "loader": loader}


def test_the_steps_of_the_seed_train_as_the_plain_loop(lab: Any) -> None:
    plain = digits()
    preprocess, forward, backward = plain["steps"].values()
    expected = [backward(forward(preprocess(batch))) for batch in plain["loader"]]

    ours = digits()
    pipeline = PipelineScheduler(
        stages=["preprocess", "forward", "backward"],
        stage_devices=["CPU-0", "CPU-1", "CPU-2"],
        cluster=lab.master,
    )
    pipeline.bind(**ours["steps"])
    losses = pipeline.run(ours["loader"], synchronous=True)
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, value in plain["model"].state_dict().items():
        torch.testing.assert_close(
            ours["model"].state_dict()[name],
            value,
            rtol=1e-6,
            atol=1e-7,
            msg=lambda m, name=name: f"{name}: {m}",
        )
    for mine, theirs in zip(ours["model"].parameters(), plain["model"].parameters(), strict=True):
        for key, value in plain["optimizer"].state[theirs].items():
            torch.testing.assert_close(ours["optimizer"].state[mine][key], value, rtol=1e-5, atol=1e-8)
    later = pipeline.run(ours["loader"], synchronous=False)
    assert sum(later) < sum(losses)  # with older weights, it learns nonetheless
    timeline = pipeline.timeline()
    assert {box.part for box in timeline} == {"preprocess", "forward", "backward", "its gradient"}
    assert 0 < pipeline.bubble.theoretical < 1
    pipeline.run(list(ours["loader"])[:2])
    assert [repr(each).split(":")[0] for each in (timeline, pipeline.timeline())] == [
        "not synchronous",
        "synchronous",
    ]
    with pytest.raises(RemoteCellError, match="planted"):
        pipeline.bind(**{**ours["steps"], "forward": _raise}).run(ours["loader"])


def _raise(batch: Any) -> None:
    raise ValueError("planted")


def test_all_ranks_know_what_those_with_stages_do(lab: Any) -> None:
    """Two stages on four workers: the others wait for nobody, and have losses, norm, times and the model as well."""
    lab.good(BUILD)
    lab.good(
        "from openclaw_nb import PipelineScheduler\n"
        "model, optimizer, batches = build()\n"
        "places = [f'CPU-{n}' for n in (0, 0, 1, 1, 1, 1)]\n"
        "pipeline = PipelineScheduler(list('012345'), places, microbatches=8).bind(model)\n"
        "losses, norms = [], []\n"
        "for x, y in batches:\n"
        "    optimizer.zero_grad()\n"
        "    losses.append(pipeline.step(x, y, F.cross_entropy))\n"
        "    norms.append(pipeline.clip_grad_norm_(0.5))\n"
        "    optimizer.step()\n"
        "pipeline._optimizer = optimizer\n"
        "pipeline.collect()\n"
        "result = dict(model=model, optimizer=optimizer, losses=losses)\n"
        "seen = norms, pipeline.bubble, len(pipeline.timeline())"
    )
    for rank in (0, 3):
        assert_trained(**lab.pull("result", rank))
    assert lab.pull("seen", 3) == lab.pull("seen", 0)
    assert lab.pull("seen", 3)[2] == 2 * 2 * 8


def test_what_is_set_in_the_script_holds_on_the_workers(lab: Any) -> None:
    """Learning rates, a loss that reads something else, frozen parameters; a second pipeline beside the first."""
    namespace = built()

    class Weighted:
        weight = 1.0

        def __call__(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.weight * F.cross_entropy(output, y)

    def train(
        step: Any, model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Weighted
    ) -> list[float]:
        losses = []
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for number, (x, y) in enumerate(namespace["build"]()[2]):
            losses.append(step(x, y, loss_fn))
            schedule.step()
            loss_fn.weight = 2.0 + number
            if number == 1:
                model.get_submodule("1").requires_grad_(requires_grad=False)
        return losses

    model, optimizer, _ = namespace["build"]()
    places = [f"CPU-{n}" for n in (0, 0, 0, 1, 1, 1)]
    pipeline = PipelineScheduler(list("012345"), places, 4, cluster=lab.master).bind(model, optimizer)
    other_model = namespace["build"]()[0]
    other = PipelineScheduler(list("012345"), places, 4, cluster=lab.master)
    other.bind(other_model, torch.optim.SGD(other_model.parameters(), lr=1.0))

    def step(x: torch.Tensor, y: torch.Tensor, loss_fn: Weighted) -> float:
        loss = pipeline.step(x, y, loss_fn)
        other.step(x, y, F.cross_entropy)
        return loss

    losses = train(step, model, optimizer, Weighted())
    rate = optimizer.param_groups[0]["lr"]
    pipeline.collect()
    assert optimizer.param_groups[0]["lr"] == rate == 0.1 / 16

    expected, expected_optimizer, _ = namespace["build"]()

    def single_step(x: torch.Tensor, y: torch.Tensor, loss_fn: Weighted) -> float:
        expected_optimizer.zero_grad()
        loss = loss_fn(expected(x), y)
        loss.backward()
        expected_optimizer.step()
        return loss.item()

    assert losses == pytest.approx(train(single_step, expected, expected_optimizer, Weighted()), rel=1e-5)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_steps_hand_on_two_results_of_one_graph(lab: Any) -> None:
    def build() -> tuple[dict[str, Any], nn.Module]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            optimizer.zero_grad()
            hidden = model(x)
            return hidden.mean(), hidden.square().mean()

        def backward(both: tuple[torch.Tensor, torch.Tensor]) -> float:
            loss = both[0] + 2 * both[1]
            loss.backward()
            optimizer.step()
            return loss.item()

        return {"forward": forward, "backward": backward}, model

    items = [torch.randn(5, 3, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    steps, model = build()
    expected = [steps["backward"](steps["forward"](x)) for x in items]
    ours, trained = build()
    pipeline = PipelineScheduler(["forward", "backward"], ["CPU-0", "CPU-1"], cluster=lab.master).bind(**ours)
    assert pipeline.run(items) == pytest.approx(expected, rel=1e-6)
    for mine, theirs in zip(trained.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_a_rank_without_a_step_has_what_was_trained(lab: Any) -> None:
    """Two steps on four workers, in a cell."""
    source = """
import torch
from torch import nn
torch.manual_seed(2)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
items = [torch.randn(5, 3, generator=torch.Generator().manual_seed(n)) for n in range(4)]
def forward(x):
    optimizer.zero_grad()
    return model(x).square().mean()
def backward(loss):
    loss.backward()
    optimizer.step()
    return loss.item()
"""
    plain: dict[str, Any] = {"__name__": "__main__"}
    exec(source + "losses = [backward(forward(x)) for x in items]", plain)
    lab.good(
        "from openclaw_nb import PipelineScheduler\n"
        + source
        + "pipeline = PipelineScheduler(['forward', 'backward']).bind(forward=forward, backward=backward)\n"
        "losses = pipeline.run(items)\n"
        "seen = losses, len(pipeline.timeline()), pipeline.bubble.theoretical\n"
        "weight, momentum = model.weight.detach(), optimizer.state[model.weight]['momentum_buffer']"
    )
    for rank in (1, 3):
        assert lab.pull("seen", rank) == lab.pull("seen", 0)
        assert lab.pull("seen", rank)[0] == pytest.approx(plain["losses"], rel=1e-6)
        torch.testing.assert_close(lab.pull("weight", rank), plain["model"].weight.detach())
        momentum = plain["optimizer"].state[plain["model"].weight]["momentum_buffer"]
        torch.testing.assert_close(lab.pull("momentum", rank), momentum)
