"""Model parallel and pipeline on real workers give what one device gives.

The right values are those of the same two cells run in this process on one device. Model parallel makes the same
operations on the same values, also for dropout, so it is compared to the bit. A pipeline cuts the batch: matrix
products over parts of it sum in another order, which SGD carries to less than 1e-6 in two epochs.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from openclaw_nb.cluster.run import RunResult
from openclaw_nb.notebook.certificate import Certificate
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.strategies import ModelParallelStrategy, PipelineStrategy

from .conftest import Lab, single_device
from .test_data_parallel import CNN, LOOP, SETUP, STATE, refusal

pytestmark = pytest.mark.cluster
FREE_SECONDS = 2.0

LANGUAGE_MODEL = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(2)
torch.set_num_threads(1)
DROP = 0.1
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, dropout=DROP)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop = nn.Dropout(DROP)
    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.drop(self.attention(h, h, h, attn_mask=mask, need_weights=False)[0])
        return x + self.mlp(self.norm2(x))
class LanguageModel(nn.Module):
    def __init__(self, vocabulary=20, width=16, length=12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(1, length, width) * 0.02)
        self.drop = nn.Dropout(DROP)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, tokens):
        B, T = tokens.shape
        x = self.drop(self.embed(tokens) + self.position[:, :T])
        mask = torch.triu(torch.ones(T, T, dtype=torch.bool, device=x.device), 1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))
model = LanguageModel()
text = torch.randint(20, (43, 9))
def loss_fn(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=8, shuffle=True)
identities = [id(p) for p in model.parameters()]
"""
FULL_LOOP = """
losses = []
for epoch in range(4):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        losses.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(loss.item())
    scheduler.step()
    model.eval()
    with torch.no_grad():
        losses.append(sum(loss_fn(model(x), y).item() for x, y in loader))
    losses.append(float(sum(p.detach().pow(2).sum() for p in model.parameters())))
    losses.append(float(sum(p.grad.abs().max() for p in model.parameters())))
    losses.append(float(sum(v.double().sum() for v in model.state_dict().values())))
    kept = optimizer.state_dict()["state"]
    losses.append(float(sum(s["momentum_buffer"].sum() for s in kept.values())) + len(kept))
"""
PLAIN = """
assert identities == [id(p) for p in model.parameters()]
assert all(type(t) in (torch.Tensor, nn.Parameter) for t in [*model.parameters(), *model.buffers()])
assert not any("forward" in m.__dict__ or m._forward_pre_hooks or m._forward_hooks for m in model.modules())
assert all(type(p.grad) is torch.Tensor for p in model.parameters()) and len(optimizer.state) == len(identities)
"""

KEPT = """
for n, kept in optimizer.state_dict()["state"].items():
    state[f"momentum {n}"] = kept["momentum_buffer"].clone()
state["random"] = torch.get_rng_state()
"""


def train(lab: Lab, num_workers: int, setup: str, loop: str, spec: StrategySpec) -> RunResult:
    ranks = list(range(num_workers))
    lab.good(setup, targets=ranks)
    return lab.run(loop, targets=ranks, strategy=spec)


def check(
    lab: Lab, num_workers: int, setup: str, loop: str, spec: StrategySpec, tolerance: float = 0.0
) -> RunResult:
    """Train both ways; compare parameters, buffers, momentum, random numbers and losses on all ranks."""
    loop += STATE + KEPT
    result = train(lab, num_workers, setup, loop, spec)
    assert result.ok, [f"{f.error_type}: {f.message}" for f in result.failures.values()]
    expected = single_device(setup, loop)
    for rank in range(num_workers):
        after = "{k: v.detach().clone() for k, v in model.state_dict().items()}"
        lab.good(
            f"after = {after}\nassert all(torch.equal(v, state[k]) for k, v in after.items())", targets=[rank]
        )
        state = lab.pull("state", rank)
        assert state.keys() == expected["state"].keys()
        for name, value in expected["state"].items():
            torch.testing.assert_close(
                state[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
            )
        assert lab.pull("losses", rank) == pytest.approx(
            expected["losses"], rel=10 * tolerance, abs=10 * tolerance
        )
    return result


@pytest.mark.parametrize("num_workers", [2, 4])
def test_model_parallel_equals_single_device_to_the_bit(lab: Lab, num_workers: int) -> None:
    """A language model with tied weights and dropout; clipped, scheduled, evaluated, and looked at in the loop."""
    result = check(lab, num_workers, LANGUAGE_MODEL, FULL_LOOP, ModelParallelStrategy().spec())
    lab.good(PLAIN, targets=range(num_workers))
    notes = "\n".join(result.values[0]["notes"])
    assert f"embed.weight is used on ranks 0, {num_workers - 1}" in notes
    assert "rank 0 has embed" in notes


OWN_ARITHMETIC = """
losses = []
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
average = [p.detach().clone() for p in model.parameters()]
for epoch in range(2):
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad(set_to_none=False)
        penalty = 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
        loss = loss_fn(model(x), y) + penalty
        if number == 3: loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        losses.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.02, norm_type=float("inf"))))
        scaler.step(optimizer)
        scaler.update()
        losses.append(scaler.get_scale())
        with torch.no_grad():
            for a, p in zip(average, model.parameters()):
                a.mul_(0.9).add_(p, alpha=0.1)
            model.head.weight.clamp_(-1.5, 1.5)
    losses.append(float(sum(a.double().sum() for a in average)))
losses = [value for value in losses if value == value and abs(value) < 1e30]
"""


def test_what_the_cell_makes_of_parameters_and_gradients_itself(lab: Lab) -> None:
    """A penalty that counts tied weights once, one loss scale, moving averages, parameters that are written to."""
    check(lab, 2, LANGUAGE_MODEL, OWN_ARITHMETIC, ModelParallelStrategy().spec(), tolerance=1e-6)


def test_layers_on_devices_of_ones_choice_and_back(lab: Lab) -> None:
    """Layers change the device and come back to it; BatchNorm takes the whole batch, once."""
    mapping = {"0": "CPU-1", "1": "CPU-1", "[45]": "CPU-0", "8": "CPU-1"}
    check(lab, 2, CNN, LOOP, ModelParallelStrategy(device_mapping=mapping).spec())


def test_a_pipeline_equals_single_device_with_uneven_microbatches(lab: Lab) -> None:
    """Batches of 8 and of 3 samples in 3 micro-batches, over 4 workers: 3, 3, 2 and 1, 1, 1."""
    setup = LANGUAGE_MODEL.replace("DROP = 0.1", "DROP = 0.0")
    check(lab, 4, setup, FULL_LOOP, PipelineStrategy(microbatches=3).spec(), tolerance=1e-6)


def test_the_next_strategy_goes_on_from_what_this_one_has_trained(lab: Lab) -> None:
    """Model parallel, data parallel, pipeline: momentum is kept over all of them."""
    lab.good(SETUP, targets=[0, 1])
    losses = []
    for spec in (
        ModelParallelStrategy().spec(),
        StrategySpec(name="data_parallel"),
        PipelineStrategy().spec(),
    ):
        lab.good(LOOP, targets=[0, 1], strategy=spec)
        losses += lab.pull("losses")
    expected = single_device(SETUP + "every = []\n", 3 * (LOOP + "every += losses") + STATE)
    assert losses == pytest.approx(expected["every"], rel=1e-5)
    lab.good(STATE, targets=[0, 1])
    for name, value in lab.pull("state", 1).items():
        torch.testing.assert_close(value, expected["state"][name], rtol=1e-6, atol=1e-6)


SKIP = """
class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 5)
    def forward(self, x):
        first = self.a(x)
        return self.c(self.b(first.tanh()) + first)
model = Skip()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""
LATE = """
plain = type(model).forward
def forward(x):
    y = plain(model, x)
    return y * float(model[0].weight.sum())
model.forward = forward
"""
REFUSED = {
    "a layer by itself": (
        SETUP,
        LOOP.replace("model(x)", "model[2](model[0](x))"),
        ModelParallelStrategy(),
        "0 was called by itself",
    ),
    "a layer twice": (
        SETUP + "model.forward = lambda x: model[2](model[1](model[0](x + 0 * model[0](x)[:, :12])))\n",
        LOOP,
        ModelParallelStrategy(),
        "calls 0 where 2 is due",
    ),
    "a skip connection": (
        SETUP + SKIP,
        LOOP,
        ModelParallelStrategy(stages=[["a"], ["b", "c"]]),
        "c on rank 1 needs a value of a",
    ),
    "a value of another rank": (
        SETUP + LATE,
        LOOP,
        ModelParallelStrategy(),
        "on a value of 0.weight, which is on another rank",
    ),
    "create_graph": (
        SETUP,
        LOOP.replace("backward()", "backward(create_graph=True)"),
        ModelParallelStrategy(),
        "create_graph=True is not supported",
    ),
    "a second backward": (
        SETUP,
        LOOP.replace("loss.backward()", "loss.backward(retain_graph=True); loss.backward()"),
        ModelParallelStrategy(),
        "runs a second time through one call",
    ),
    "ranks with other labels": (
        SETUP,
        LOOP.replace("model(x), y", "model(x), (y + rank) % 5"),
        ModelParallelStrategy(),
        "different losses: ",
    ),
    "outputs without samples": (
        SETUP + "plain = type(model).forward\nmodel.forward = lambda x: plain(model, x).mean()\n",
        LOOP.replace("loss_fn(model(x), y)", "model(x)"),
        PipelineStrategy(),
        "must have the samples in dim 0",
    ),
}


@pytest.mark.parametrize(("setup", "loop", "strategy", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_done_is_refused_before_a_parameter_changes(
    pair: Lab, setup: str, loop: str, strategy: Any, said: str
) -> None:
    pair.good(setup + "before = [p.detach().clone() for p in model.parameters()]\n")
    assert said in refusal(pair.run(loop, strategy=strategy.spec()))
    pair.good(
        "assert all(torch.equal(p, q) and type(p) is nn.Parameter for p, q in zip(model.parameters(), before))\n"
        "assert not any('forward' in m.__dict__ for m in model.modules() if m is not model)"
    )


STATES = "[s['momentum_buffer'].clone() for s in optimizer.state.values()]"


def verify(lab: Lab, setup: str, spec: StrategySpec) -> Certificate:
    """Verify a loop whose optimizer has a state already; it must be as before."""
    lab.good(setup, targets=[0, 1])
    lab.good(f"model(text[:4, :-1]).sum().backward()\noptimizer.step()\nbefore = {STATES}", targets=[0, 1])
    run = lab.master.run_cell(LOOP, strategy=spec, targets=[0, 1], verify_steps=3)
    result = run.wait(60)
    assert result is not None
    assert result.ok, [f"{f.error_type}: {f.message}" for f in result.failures.values()]
    lab.good(f"assert all(torch.equal(a, b) for a, b in zip(before, {STATES}, strict=True))", targets=[0, 1])
    return Certificate(result.values[0]["certificate"])


@pytest.mark.parametrize("strategy", [ModelParallelStrategy(), PipelineStrategy(microbatches=3)])
def test_a_right_cell_passes_its_certificate(lab: Lab, strategy: Any) -> None:
    certificate = verify(lab, LANGUAGE_MODEL, strategy.spec())
    assert certificate.passed, certificate
    assert len(certificate.rows) == 3


FAULTS = {
    "a micro-batch counted twice": (
        "call.ModelCall",
        "_part_of",
        "lambda self, gradient, at, part: kept(self, gradient, at, part) * (1 + (part == 0))",
    ),
    "a micro-batch left out": (
        "call.ModelCall",
        "go_back",
        "lambda self, gradients: (self._passes.__setitem__(1, self._passes[0]), kept(self, gradients))",
    ),
    "untied weights": ("shared", "add_up", "lambda holdings, exchange, waiting, aside: None"),
    "a dropped layer": (
        "route.Route",
        "_forward_of",
        "lambda self, at, plain: kept(self, at, (lambda x, *_: x) if at == 2 else plain)",
    ),
}


@pytest.mark.parametrize(("where", "name", "fault"), FAULTS.values(), ids=FAULTS.keys())
def test_planted_faults_fail_the_certificate(lab: Lab, where: str, name: str, fault: str) -> None:
    module = where.partition(".")[0]
    place = f"from openclaw_nb.engine.stages import {module}\nplace = {where}\n"
    try:
        plant = f"kept = place.{name}\nplace.{name} = {fault}\n"
        certificate = verify(lab, LANGUAGE_MODEL + place + plant, PipelineStrategy(microbatches=2).spec())
    finally:
        lab.good(f"{place}place.{name} = kept", targets=[0, 1])
    assert certificate.parted is not None
    assert certificate.parted["step"] == 1


CAUSES = {
    "raise": "raise ValueError('planted')",
    "kill": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "stop button": "import time; time.sleep(60)",
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_others_are_free_within_two_seconds_and_have_what_was_trained(
    pair: Lab, cause: str, tmp_path: Path
) -> None:
    """The last stage fails in the midst of a forward pass; layers that were trained on one rank get to the other."""
    pair.good(LANGUAGE_MODEL + "start = model.embed.weight.detach().clone()\n")
    loop = f"""
import pathlib
calls = 0
def fail(*_):
    global calls
    calls += 1
    if calls == 3:
        pathlib.Path({str(tmp_path / "there")!r}).touch()
        {CAUSES[cause]}
if rank == 1: model.norm.register_forward_pre_hook(fail)
{FULL_LOOP}
"""
    run = pair.master.run_cell(loop, strategy=ModelParallelStrategy().spec())
    if cause == "stop button":
        while not (tmp_path / "there").exists():
            time.sleep(0.05)
        pressed = time.monotonic()
        run.interrupt()
    result = run.wait(60)
    assert result is not None
    assert not result.ok
    if cause == "stop button":
        assert time.monotonic() - pressed < FREE_SECONDS
    elif cause == "raise":
        assert result.failures[1].error_type == "ValueError"
        assert abs(result.failures[0].at - result.failures[1].at) < FREE_SECONDS
    if cause == "kill":
        pair.good("assert rank == 1 or not torch.equal(model.embed.weight, start)")
        return
    assert "exchanged before the next cell" in result.failures[0].value["notes"][-1]
    pair.good("sums = [float(p.double().sum()) for p in model.parameters()], len(optimizer.state)")
    assert pair.pull("sums", 0) == pair.pull("sums", 1)
    pair.good("assert not torch.equal(model.embed.weight, start) and len(optimizer.state) == len(identities)")
