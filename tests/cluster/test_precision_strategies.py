"""Mixed precision and activation checkpointing under the strategies that share out more than batches.

A 16-bit run is held against single-device training under torch's autocast, of whole batches or of the parts that the
strategy makes. What may differ, and by how much, is said with each strategy below.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from openclaw_nb.cluster.run import RunResult
from openclaw_nb.notebook.certificate import Certificate
from openclaw_nb.optimization import MixedPrecisionCoordinator
from openclaw_nb.strategies import (
    HybridParallelStrategy,
    ModelParallelStrategy,
    PipelineStrategy,
    ShardedDataParallelStrategy,
    TensorParallelStrategy,
)
from openclaw_nb.strategies.precision import Precision

from .conftest import HANG_SECONDS, Lab, single_device
from .test_data_parallel import LOOP, STATE, refusal
from .test_precision import BLOCKS, EXACT, PEAK

pytestmark = pytest.mark.cluster

# Four blocks, so that each rank has some, and a head that is tied to the embedding.
SETUP = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(2)
torch.set_num_threads(1)
DROP, calls = 0.0, []
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(DROP), nn.Linear(4 * width, width))
    def forward(self, x):
        calls.append(torch.is_autocast_enabled("cpu"))
        B, T, C = x.shape
        q, k, v = (p.view(B, T, self.heads, C // self.heads).transpose(1, 2) for p in self.qkv(self.ln1(x)).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + F.dropout(self.mlp(self.ln2(x)), DROP, self.training)
class Language(nn.Module):
    def __init__(self, vocabulary=24, width=16):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(8, width))
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(4)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, tokens):
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x)
model = Language()
text = torch.randint(24, (80, 9))
def loss_fn(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=16, shuffle=True)
"""
SHORT = LOOP.replace("range(2)", "range(1)")
AUTOCAST = """
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = 0.0
        for xs, ys in zip(x.chunk(PARTS), y.chunk(PARTS)):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(xs)
            part = loss_fn(out.float(), ys) * len(xs) / len(x)
            part.backward()
            loss += part.item()
        optimizer.step()
        losses.append(loss)
"""


@dataclass(frozen=True)
class Case:
    """A strategy, and what its 16-bit run may differ from which single-device run by.

    ``parts`` is into how many parts the single device takes each batch. ``units`` are units of 2**-9, the rounding of
    bfloat16, of the largest change that training has made to any parameter: none where the same operations are made on
    the same values; one where sums of float32 in another order tip a rounding here and there; four where a product's
    summands from two workers, and the gradients of what they compute it from, are each rounded before they are added.
    (Training in float32 is about two apart from training in bfloat16.)
    """

    strategy: type
    options: dict[str, Any]
    num_workers: int
    parts: int
    units: float

    def spec(self, **options: Any) -> Any:
        return self.strategy(**self.options, **options).spec()

    @property
    def ranks(self) -> list[int]:
        return list(range(self.num_workers))


CASES = {
    "sharded": Case(ShardedDataParallelStrategy, {"shard_layers": ("Block",)}, 2, 2, 1),
    "tensor_parallel": Case(TensorParallelStrategy, {}, 2, 1, 4),
    "model_parallel": Case(ModelParallelStrategy, {}, 2, 1, 0),
    "pipeline": Case(PipelineStrategy, {"microbatches": 4}, 2, 4, 1),
    "hybrid_parallel": Case(
        HybridParallelStrategy, {"data_parallel_degree": 2, "tensor_parallel_degree": 2}, 4, 2, 4
    ),
}
every = pytest.mark.parametrize("name", CASES)


def some(*names: str) -> pytest.MarkDecorator:
    """Leave the other strategies to soak."""
    return pytest.mark.parametrize(
        "name", [name if name in names else pytest.param(name, marks=pytest.mark.soak) for name in CASES]
    )


def train(lab: Lab, case: Case, setup: str, loop: str, **options: Any) -> RunResult:
    lab.good(setup, targets=case.ranks)
    return lab.good(loop, targets=case.ranks, strategy=case.spec(**options))


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in other)


@every
def test_bf16_is_single_device_training_under_autocast(lab: Lab, name: str) -> None:
    case = CASES[name]
    train(lab, case, SETUP, LOOP + STATE, precision="bf16")
    first, last = lab.pull("state", 0), lab.pull("state", case.num_workers - 1)
    assert apart(first, last) == 0.0
    assert {value.dtype for value in first.values()} == {torch.float32}
    expected = single_device(SETUP, f"PARTS = {case.parts}" + AUTOCAST + STATE)
    plain = single_device(SETUP, LOOP + STATE)
    begin = single_device(SETUP, STATE)["state"]
    unit = 2**-9 * apart(expected["state"], begin)
    assert apart(first, expected["state"]) <= case.units * unit
    assert lab.pull("losses") == pytest.approx(expected["losses"], rel=case.units * 2**-9)
    assert apart(first, plain["state"]) > 0.2 * unit
    lab.good("assert not any('forward' in vars(m) for m in model.modules())", targets=case.ranks)


@some("sharded", "tensor_parallel", "model_parallel", "pipeline")
def test_blocks_computed_twice_give_the_same_bits(lab: Lab, name: str) -> None:
    """Dropout in them is drawn once; each is called twice a batch, evaluation excepted."""
    case = CASES[name]
    setup = SETUP.replace("DROP, calls = 0.0", "DROP, calls = 0.1")
    found = []
    for asked in (False, True):
        result = train(lab, case, setup, SHORT + STATE, activation_checkpointing=asked)
        counts = [len(lab.pull("calls", rank)) for rank in case.ranks]
        found.append((lab.pull("state"), lab.pull("losses"), counts))
    (plain, losses, once), (again, losses_again, twice) = found
    assert apart(again, plain) == 0.0
    assert losses == losses_again
    num_calls = 5 * case.options.get("microbatches", 1)
    num_own = 2 if name in ("model_parallel", "pipeline") else 4
    assert [b - a for a, b in zip(once, twice, strict=True)] == [num_calls * num_own] * case.num_workers
    assert any("4 blocks are computed a second time" in note for note in result.notes)


PLANTED = """
bad, losses, kept = [1.0], [], []
def spoil(gradient):
    return gradient * bad[0]
if HOOKED:
    model.blocks[3].qkv.weight.register_hook(spoil)
else:
    forward = Language.forward
    Language.forward = lambda self, tokens: forward(self, tokens) * bad[0]
"""
OVERFLOW = """
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        bad[0] = float("inf") if rank == 1 and len(losses) == 3 else 1.0
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        kept.append(sum(value.double().sum().item() for value in model.state_dict().values()))
"""


@some("sharded", "tensor_parallel", "pipeline", "hybrid_parallel")
def test_an_overflow_on_one_rank_skips_the_step_on_all(lab: Lab, name: str) -> None:
    """It is in a gradient of which this rank alone has all or a part; with shards, which are sums, in its output."""
    case = CASES[name]
    options = {"precision": "fp16", "activation_checkpointing": True}
    setup = f"{SETUP}HOOKED = {name != 'sharded'}\n{PLANTED}"
    result = train(lab, case, setup, OVERFLOW + STATE, **options)
    for rank in case.ranks:
        kept = lab.pull("kept", rank)
        assert [a == b for a, b in itertools.pairwise(kept)] == [number == 2 for number in range(9)]
    assert apart(lab.pull("state", 0), lab.pull("state", case.num_workers - 1)) == 0.0
    told = [note for note in result.notes if "skipped" in note]
    assert told == [
        "1 of 10 steps were skipped on all ranks, as a gradient had overflowed; the loss scale is 32768"
    ]
    # The scale goes on in the next cell.
    again = lab.good(SHORT, targets=case.ranks, strategy=case.spec(**options))
    assert "0 of 5 steps were skipped on all ranks" in " ".join(again.notes)
    assert "the loss scale is 32768" in " ".join(again.notes)


@some("tensor_parallel", "pipeline")
def test_a_certificate_holds_in_16_bits(lab: Lab, name: str) -> None:
    case = CASES[name]
    lab.good(SETUP, targets=case.ranks)
    spec = case.spec(precision="bf16", activation_checkpointing="blocks.1")
    verified = lab.master.run_cell(SHORT, strategy=spec, targets=case.ranks, verify_steps=3).wait(
        HANG_SECONDS
    )
    assert verified is not None
    assert verified.ok, [f.message for f in verified.failures.values()]
    certificate = Certificate(verified.values[0]["certificate"])
    assert certificate.passed, certificate
    assert "bfloat16" in certificate.reason


@some("sharded", "pipeline")
def test_the_coordinators_layers_alone_compute_in_16_bits(lab: Lab, name: str) -> None:
    """Whole blocks, also those of other ranks; none of them is said to be idle."""
    case = CASES[name]
    coordinator = MixedPrecisionCoordinator(fp16_layers=[r"blocks\.[13]"])
    result = train(lab, case, SETUP, SHORT, precision=coordinator)
    calls = [call for rank in case.ranks for call in lab.pull("calls", rank)]
    assert sum(calls) * 2 == len(calls)
    said = " ".join(result.notes)
    assert "2 layers compute in" in said
    assert "never called" not in said


def test_accumulated_batches_of_shards_make_one_step_in_16_bits(lab: Lab) -> None:
    """Gradients are scaled together over the batches of a step."""
    case = CASES["sharded"]
    states = []
    for precision in ("bf16", "fp16"):
        lab.good(SETUP, targets=case.ranks)
        strategy = ShardedDataParallelStrategy(precision=precision, accumulate=2)
        lab.good(SHORT + STATE, targets=case.ranks, strategy=strategy.spec())
        states.append(lab.pull("state"))
    begin = single_device(SETUP, STATE)["state"]
    # A power of two as scale changes no rounding in bfloat16, which has the range of float32.
    assert apart(*states) <= 2**-9 * apart(states[0], begin)


@pytest.mark.parametrize("name", ["model_parallel", "pipeline"])
def test_a_block_is_not_cut_where_it_is_computed_twice(lab: Lab, name: str) -> None:
    case = CASES[name]
    stages = [["embed", "place", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3.ln1", "blocks.3.qkv"]]
    stages[1] += ["blocks.3.proj", "blocks.3.ln2", "blocks.3.mlp", "head"]
    lab.good(SETUP, targets=case.ranks)
    result = lab.run(
        SHORT, targets=case.ranks, strategy=case.spec(stages=stages, activation_checkpointing=True)
    )
    said = refusal(result)
    assert "blocks.3 would be computed a second time as a whole" in said
    assert "--activation-checkpointing blocks.3.ln1,blocks.3.qkv" in said
    lab.good("assert not any('forward' in vars(m) for m in model.modules())", targets=case.ranks)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["sharded", "model_parallel", "pipeline"])
def test_blocks_computed_twice_take_less_memory(lab: Lab, name: str) -> None:
    """Each rank's inside of blocks is 64 MiB, as of 8 blocks by 2048 samples, or of 4 by all 4096."""
    case, peaks = replace(CASES[name], options={}), []
    for asked in (False, True):
        train(lab, case, BLOCKS + EXACT, PEAK, activation_checkpointing=asked)
        peaks.append(max(lab.pull("peak", rank) for rank in case.ranks))
    assert peaks[0] > 60
    assert peaks[1] < 0.6 * peaks[0], peaks


@pytest.mark.soak
@every
def test_linear_layers_alone_compute_in_16_bits(lab: Lab, name: str) -> None:
    """Layers that are themselves shared out, or the borders of what each rank has."""
    case = CASES[name]
    coordinator = MixedPrecisionCoordinator(fp16_layers=["linear"])
    result = train(lab, case, SETUP, SHORT + STATE, precision=coordinator)
    assert "17 layers compute in" in " ".join(result.notes)
    assert "never called" not in " ".join(result.notes)
    assert apart(lab.pull("state", 0), lab.pull("state", case.num_workers - 1)) == 0.0
    begin, plain = (single_device(SETUP, loop + STATE)["state"] for loop in ("", SHORT))
    # As far from float32 as 16 bits in the whole model are.
    unit = 2**-9 * apart(plain, begin)
    assert 0.2 * unit < apart(lab.pull("state"), plain) < 8 * unit


@pytest.mark.soak
@every
def test_float16_itself_is_single_device_training_under_autocast(lab: Lab, name: str) -> None:
    """Also where a CPU emulates it. The scale is as large as these gradients bear: below 2**-14 they lose digits."""
    case = CASES[name]
    lab.good(
        "import torch, openclaw_nb.engine.precision.cell as cell\nusable = cell.usable_dtype\n"
        "cell.usable_dtype = lambda name, device: (torch.float16, '')",
        targets=case.ranks,
    )
    try:
        result = train(lab, case, SETUP, LOOP + STATE, precision=Precision("fp16", scaler=16384))
    finally:
        lab.good("cell.usable_dtype = usable", targets=case.ranks)
    skipped = next(note for note in result.notes if "skipped" in note)
    assert "0 of 10 steps" in skipped
    assert apart(lab.pull("state", 0), lab.pull("state", case.num_workers - 1)) == 0.0
    loop = AUTOCAST.replace("bfloat16", "float16").replace("part.backward()", "(part * 16384).backward()")
    loop = loop.replace(
        "        optimizer.step()",
        "        for p in model.parameters(): p.grad /= 16384\n        optimizer.step()",
    )
    expected = single_device(SETUP, f"PARTS = {case.parts}" + loop + STATE)["state"]
    begin = single_device(SETUP, STATE)["state"]
    assert apart(lab.pull("state"), expected) <= case.units * 2**-12 * apart(expected, begin)
