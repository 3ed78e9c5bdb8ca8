"""Sharded data parallel on real workers gives what one device gives, and leaves plain objects however a cell ends.

The right values are those of the same cells run in this process on one device; tolerances are those of
`test_data_parallel`, for twenty steps instead of ten.
"""

from __future__ import annotations

import textwrap
import time
from typing import Any

import pytest
import torch

from openclaw_nb.cluster.run import RunResult
from openclaw_nb.notebook.certificate import Certificate
from openclaw_nb.protocol.messages import StrategySpec

from .conftest import HANG_SECONDS, Lab, single_device
from .test_data_parallel import CNN, SETUP, STATE, refusal
from .test_data_parallel import TRANSFORMER as ONE_LAYER
from .test_release import FREE_SECONDS

pytestmark = pytest.mark.cluster

TRANSFORMER = ONE_LAYER.replace("TransformerEncoder(layer, 1,", "TransformerEncoder(layer, 2,")
LOOP = """
losses = []
while len(losses) < 20:
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
SGD = "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)"
TOLERANCE = 3e-6
AFTER = """
assert ids == [id(p) for p in model.parameters()]
assert {type(p) for p in model.parameters()} == {nn.Parameter} and type(model) is kind
assert [g["params"] for g in optimizer.param_groups] == [list(model.parameters())]
assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
assert not any("fsdp" in str(key).lower() for m in model.modules() for key in vars(m))
after = {k: v.detach().clone() for k, v in model.state_dict().items()}
states = optimizer.state_dict()["state"].values()
momenta = [[v.clone() for k, v in sorted(s.items()) if torch.is_tensor(v)] for s in states]
"""


def sharded(**fields: Any) -> StrategySpec:
    return StrategySpec(name="sharded", **fields)


def train(lab: Lab, num_workers: int, setup: str, loops: list[tuple[str, StrategySpec]]) -> RunResult:
    """Run the cells under their strategies; afterwards the objects are the plain ones that there were."""
    ranks = list(range(num_workers))
    lab.good(setup + "\nids, kind = [id(p) for p in model.parameters()], type(model)", targets=ranks)
    for loop, spec in loops:
        result = lab.run(loop, targets=ranks, strategy=spec)
        assert result.ok, [f"{f.error_type}: {f.message}" for f in result.failures.values()]
    lab.good(AFTER, targets=ranks)
    return result


def check(
    lab: Lab,
    num_workers: int,
    setup: str,
    loop: str = LOOP,
    tolerance: float = TOLERANCE,
    *,
    loops: list[tuple[str, StrategySpec]] | None = None,
    **fields: Any,
) -> RunResult:
    """Compare losses, parameters, buffers and optimizer state with those of a single device."""
    result = train(lab, num_workers, setup, loops or [(loop + STATE, sharded(**fields))])
    expected = single_device(setup, "\n".join(loop for loop, _ in loops) if loops else loop + STATE)
    momenta = [
        [v for _, v in sorted(s.items()) if torch.is_tensor(v)]
        for s in expected["optimizer"].state_dict()["state"].values()
    ]
    for rank in {0, num_workers - 1}:
        for name, value in expected["model"].state_dict().items():
            for states in ("state", "after"):
                found = lab.pull(states, rank)[name]
                torch.testing.assert_close(
                    found, value, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
                )
        torch.testing.assert_close(lab.pull("momenta", rank), momenta, rtol=1e-4, atol=10 * tolerance)
        assert lab.pull("losses", rank) == pytest.approx(expected["losses"], rel=1e-5, abs=1e-6)
    return result


@pytest.mark.parametrize("num_workers", [2, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize("setup", [SETUP, CNN, TRANSFORMER], ids=["mlp", "cnn-batchnorm", "transformer-tied"])
def test_sgd_with_momentum_equals_single_device(lab: Lab, setup: str, num_workers: int) -> None:
    result = check(lab, num_workers, setup)
    assert any(f"holds 1/{num_workers} of" in note for note in result.notes)


@pytest.mark.parametrize("num_workers", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_adamw_equals_single_device(lab: Lab, num_workers: int) -> None:
    """Without the attention's bias of the keys, whose gradient is rounding alone, which AdamW makes steps of."""
    setup = TRANSFORMER.replace(SGD, "torch.optim.AdamW(model.parameters(), lr=1e-3)")
    setup = setup.replace("dropout=0.0,", "dropout=0.0, bias=False,")
    check(lab, num_workers, setup, tolerance=1e-4)


def test_a_chain_with_data_parallel_equals_single_device(lab: Lab) -> None:
    setup = SETUP + "\nscheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)\nlosses = []"
    part = LOOP.replace("losses = []", "").replace("while len(losses) < 20:", "for epoch in range(2):")
    part += "    scheduler.step()\n" + STATE
    plain = StrategySpec(name="data_parallel")
    check(lab, 3, setup, loops=[(part, plain), (part, sharded()), (part, plain)])


WAYS = {
    "clip, evaluation and a best state": """
        import copy
        norms, losses, best = [], [], None
        parameters = list(model.parameters())
        for epoch in range(4):
            model.train()
            for x, y in loader:
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.3).item())
                optimizer.step()
                losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                losses.append(loss_fn(model(X), Y).item())
            if epoch == 1:
                best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        losses += norms
        model.load_state_dict(best[0])
        optimizer.load_state_dict(best[1])
        with torch.no_grad():
            losses.append(loss_fn(model(X), Y).item())
    """,
    "frozen halves, clipped values": """
        losses = []
        for epoch in range(3):
            for number, (x, y) in enumerate(loader):
                model[0].requires_grad_(number % 2 == 0)
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
                losses.append(sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
                optimizer.step()
        model.requires_grad_(True)
    """,
    "gradients added up by hand": """
        losses = []
        for epoch in range(3):
            for number, (x, y) in enumerate(loader):
                loss = loss_fn(model(x), y) / 2
                loss.backward()
                losses.append(loss.item())
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_ways_to_train(pair: Lab, way: str) -> None:
    check(pair, 2, SETUP, textwrap.dedent(way))


def test_several_batches_a_step_and_a_sum(pair: Lab) -> None:
    """A window of 3 batches of 32 is a batch of 96; the last of each pass has 54."""
    train(pair, 2, SETUP, [(LOOP + STATE, sharded(options={"accumulate": 3}))])
    larger = SETUP.replace("batch_size=32", "batch_size=96")
    expected = single_device(larger, LOOP.replace("< 20", "< 8") + STATE)
    for name, value in expected["state"].items():
        torch.testing.assert_close(pair.pull("after", 1)[name], value, rtol=TOLERANCE, atol=TOLERANCE)


def test_an_overflow_on_one_rank_skips_the_step_on_all(pair: Lab) -> None:
    loop = """
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
losses, scales = [], []
for number, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    if number == 1 and globals().get("rank", 0) == 0:
        out = out * torch.where(torch.arange(len(out)) == 0, torch.inf, 1.0)[:, None]
    loss = loss_fn(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scales.append(scaler.get_scale())
"""
    train(pair, 2, SETUP, [(loop, sharded(reduction="mean"))])
    assert pair.pull("scales", 0)[:3] == pair.pull("scales", 1)[:3] == [8.0, 4.0, 4.0]
    for one, other in zip(pair.pull("after", 0).values(), pair.pull("after", 1).values(), strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)


def test_a_rank_that_raises_frees_the_others_and_training_is_kept(pair: Lab) -> None:
    done = "        losses.append(loss.item())\n"
    raises = "        if len(losses) == 7 and globals().get('rank') == 1: raise OSError('here')\n"
    loop = LOOP.replace(done, done + raises)
    pair.good(SETUP + "\nids, kind = [id(p) for p in model.parameters()], type(model)")
    began = time.monotonic()
    result = pair.run(loop, strategy=sharded())
    assert time.monotonic() - began < 10
    assert not result.ok
    assert {f.error_type for f in result.failures.values()} == {"OSError", "ReleasedError"}
    pair.good(AFTER)
    single = LOOP.replace("< 20", "< 7").replace(done, done + "        if len(losses) == 7: break\n")
    expected = single_device(SETUP, single)
    for rank in (0, 1):
        for name, value in expected["model"].state_dict().items():
            torch.testing.assert_close(pair.pull("after", rank)[name], value, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_death_frees_the_others_and_they_have_the_state_from_before(pair: Lab) -> None:
    warm = LOOP.replace("< 20", "< 5")
    loop = "import os, signal\n" + LOOP.replace(
        "        loss.backward()",
        "        if len(losses) == 8 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n        loss.backward()",
    )
    pair.good(SETUP + "\nids, kind = [id(p) for p in model.parameters()], type(model)")
    pair.good(warm, strategy=sharded())
    pair.good(
        "import copy\nbefore = [p.detach().clone() for p in model.parameters()]\n"
        "state = copy.deepcopy(optimizer.state_dict())"
    )
    result = pair.run(loop, strategy=sharded())
    assert not result.ok
    assert "the state from before it is put back" in " ".join(result.notes)
    assert result.release_seconds <= FREE_SECONDS
    pair.good(AFTER, targets=[0])
    pair.good(
        "assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))\n"
        "now = optimizer.state_dict()['state']\n"
        "assert all(torch.equal(now[i]['momentum_buffer'], s['momentum_buffer']) for i, s in state['state'].items())",
        targets=[0],
    )


def verify(lab: Lab, setup: str) -> Certificate:
    lab.good(setup, targets=[0, 1])
    run = lab.master.run_cell(LOOP, strategy=sharded(), targets=[0, 1], verify_steps=3)
    result = run.wait(HANG_SECONDS)
    assert result is not None
    assert result.ok, [f"{f.error_type}: {f.message}" for f in result.failures.values()]
    lab.good(
        "assert {type(p) for p in model.parameters()} == {nn.Parameter} and not optimizer.state",
        targets=[0, 1],
    )
    return Certificate(result.values[0]["certificate"])


def test_the_certificate_and_a_shard_that_is_lost(pair: Lab) -> None:
    assert verify(pair, TRANSFORMER).passed
    plant = """
from openclaw_nb.engine.steps.sharded import ShardedReducer
kept = ShardedReducer.set_gradients
def lose(self):
    kept(self)
    if rank == 1: self.parameters[3].grad.to_local().zero_()
ShardedReducer.set_gradients = lose
"""
    try:
        certificate = verify(pair, TRANSFORMER + plant)
    finally:
        pair.good("ShardedReducer.set_gradients = kept")
    assert certificate.parted is not None
    assert (certificate.parted["step"], certificate.parted["kind"]) == (1, "gradient")


def test_what_cannot_be_sharded_is_refused_and_nothing_changes(pair: Lab) -> None:
    muon = SETUP.replace(SGD, "torch.optim.Muon([model[0].weight, model[2].weight], lr=0.01)")
    cases = {
        muon: "orthogonalises",
        SETUP.replace(SGD, "torch.optim.Adafactor(model.parameters())"): "rows and columns",
    }
    for setup, said in cases.items():
        pair.good(setup)
        assert said in refusal(pair.run(LOOP, strategy=sharded()))
    term = "sum(p.pow(2).sum() for p in model.parameters())"
    penalty = LOOP.replace("loss_fn(model(x), y)", f"loss_fn(model(x), y) + {term}")
    pair.good(TRANSFORMER + "before = [p.detach().clone() for p in model.parameters()]")
    assert "weight_decay" in refusal(pair.run(penalty, strategy=sharded()))
    result = pair.run(LOOP, strategy=sharded(options={"shard_layers": ["trunk"]}))
    assert "no layer 'trunk'" in next(iter(result.failures.values())).message
    pair.good("assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))")
    pair.good("assert {type(p) for p in model.parameters()} == {nn.Parameter} and not optimizer.state")
