"""Mixed precision and memory options on real workers.

A 16-bit run is held against two single-device runs under torch's autocast: the usual one, on whole batches, from which
it may differ by roundings in 16 bits; and one that takes each batch in the same parts and adds up their gradients in
float32, from which it may differ by the order of those sums alone.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from openclaw_nb.core.errors import OpenClawError
from openclaw_nb.engine.checkpoint.catalog import find_newest
from openclaw_nb.notebook.certificate import Certificate
from openclaw_nb.optimization import MixedPrecisionCoordinator
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.session import OpenClawCluster
from openclaw_nb.strategies import DataParallelStrategy

from .conftest import HANG_SECONDS, Lab, single_device
from .test_data_parallel import LOOP, SETUP, STATE, refusal

pytestmark = pytest.mark.cluster

NUM_RANKS = 2
RANKS = list(range(NUM_RANKS))
IN_PARTS = """
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = 0.0
        for xs, ys in zip(x.chunk(2), y.chunk(2)):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(xs)
            part = loss_fn(out.float(), ys) * len(xs) / len(x)
            part.backward()
            loss += part.item()
        optimizer.step()
        losses.append(loss)
"""
AUTOCAST = LOOP.replace(
    "loss = loss_fn(model(x), y)",
    'with torch.autocast("cpu", torch.bfloat16): out = model(x)\n        loss = loss_fn(out.float(), y)',
)


def train(lab: Lab, setup: str, loop: str, strategy: DataParallelStrategy, **cell: Any) -> Any:
    lab.good(setup, targets=RANKS)
    return lab.run(loop, targets=RANKS, strategy=strategy.spec(**cell))


def states(lab: Lab) -> list[dict[str, torch.Tensor]]:
    return [lab.pull("state", rank) for rank in RANKS]


def assert_close(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("split", ["loader", "model"])
def test_bf16_is_single_device_training_under_autocast(lab: Lab, split: str) -> None:
    result = train(lab, SETUP, LOOP + STATE, DataParallelStrategy(precision="bf16"), split=split)
    assert result.ok, [f.message for f in result.failures.values()]
    first, last = states(lab)
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert {value.dtype for value in first.values()} == {torch.float32}
    in_parts = single_device(SETUP, IN_PARTS + STATE)
    # A float32 sum in another order can tip a rounding to 16 bits in a later step, so that a few units of 2**-9 of a
    # step's change may show: steps change parameters by about 1e-2.
    assert_close(first, in_parts["state"], 2e-5)
    assert lab.pull("losses") == pytest.approx(in_parts["losses"], rel=1e-4)
    whole, plain = single_device(SETUP, AUTOCAST + STATE), single_device(SETUP, LOOP + STATE)
    assert_close(first, whole["state"], 2e-3)
    assert not torch.equal(first["0.weight"], plain["state"]["0.weight"])
    with pytest.raises(AssertionError):  # it would show if nothing were computed in 16 bits
        assert_close(plain["state"], in_parts["state"], 2e-5)


OVERFLOW = LOOP.replace(
    "loss = loss_fn",
    "if rank == 1 and len(losses) == 3: x = x * 1e38\n        loss = loss_fn",
).replace(
    "losses.append(loss.item())",
    "losses.append(loss.item())\n        kept.append(model[0].weight.detach().clone())",
)


def test_an_overflow_on_one_rank_skips_the_step_on_all(lab: Lab) -> None:
    """One scale, halved on both ranks; it goes on in the next cell, and is in checkpoints."""
    strategy = DataParallelStrategy(precision="fp16")
    result = train(lab, SETUP + "kept = []\n", OVERFLOW + STATE, strategy)
    assert result.ok, [f.message for f in result.failures.values()]
    for rank in RANKS:
        kept = lab.pull("kept", rank)
        still = [bool(torch.equal(a, b)) for a, b in itertools.pairwise(kept)]
        assert still == [number == 2 for number in range(9)]
    assert all(
        torch.equal(*pair) for pair in zip(states(lab)[0].values(), states(lab)[1].values(), strict=True)
    )
    told = [note for note in result.notes if "skipped" in note]
    assert told == [
        "1 of 10 steps were skipped on all ranks, as a gradient had overflowed; the loss scale is 32768"
    ]
    assert any("used instead of fp16" in note for note in result.notes) is bool(
        not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    )


def test_the_scale_goes_on_in_the_next_cell_and_in_checkpoints(lab: Lab, tmp_path: Path) -> None:
    strategy = DataParallelStrategy(precision="fp16", checkpoint=tmp_path / "run", checkpoint_every=3)
    train(lab, SETUP + "kept = []\n", OVERFLOW, DataParallelStrategy(precision="fp16"))
    result = lab.good(LOOP, targets=RANKS, strategy=strategy.spec())
    assert "0 of 10 steps were skipped on all ranks" in " ".join(result.notes)
    found = find_newest(tmp_path / "run")
    assert found is not None
    scaler = found.state()["scalers"]["loss scale"]["state"]
    assert (scaler["scale"], scaler["_growth_tracker"]) == (32768.0, 6 + 10)
    lab.good(SETUP, targets=RANKS)  # a new model, whose scale would begin at 65536
    resumed = DataParallelStrategy(precision="fp16", checkpoint=tmp_path / "run", resume=True)
    result = lab.good(LOOP.replace("range(2)", "range(3)"), targets=RANKS, strategy=resumed.spec())
    assert "the loss scale is 32768" in " ".join(result.notes) or "end of this cell" in " ".join(result.notes)


@pytest.mark.parametrize(("plant", "split"), [("loss", "loader"), ("loss", "model"), ("gradient", "model")])
def test_a_scaler_of_the_cell_skips_on_all_ranks(lab: Lab, plant: str, split: str) -> None:
    """The overflow is in one rank's pass, or in the gradient that one rank has after the sum."""
    loop = LOOP.replace("loss_fn(model(x), y)", "loss_fn(model(x * bad('loss')), y)")
    loop = loop.replace("loss.backward()", "scaler.scale(loss).backward(); spoil()")
    loop = loop.replace("optimizer.step()", "scaler.step(optimizer); scaler.update()")
    loop = loop.replace("losses.append(loss.item())", "losses.append(scaler.get_scale())")
    setup = SETUP + textwrap.dedent(f"""
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        def bad(where):
            return float("inf") if where == {plant!r} and rank == 1 and len(losses) == 3 else 1.0
        def spoil():
            model[0].weight.grad.mul_(bad("gradient"))
    """)
    result = train(lab, setup, loop + STATE, DataParallelStrategy(precision="fp16"), split=split)
    assert result.ok, [f.message for f in result.failures.values()]
    assert [lab.pull("losses", rank) for rank in RANKS] == [[1024.0] * 3 + [512.0] * 7] * 2
    assert all(
        torch.equal(*pair) for pair in zip(states(lab)[0].values(), states(lab)[1].values(), strict=True)
    )
    lab.good("assert type(scaler) is torch.amp.GradScaler", targets=RANKS)


CONVOLUTION = """
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
X, Y = torch.randn(48, 1, 8, 8), torch.randint(3, (48,))
class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)
    def forward(self, x):
        x = self.norm(self.stem(x)).flatten(2).transpose(1, 2)
        return self.head(self.mix(x, x, x, need_weights=False)[0].mean(1))
model = Vision()
computed = {}
def watch(name):
    inner = getattr(model, name).forward
    def forward(*given, **named):
        computed[name] = torch.is_autocast_enabled("cpu")
        return inner(*given, **named)
    getattr(model, name).forward = forward
for name in ("stem", "norm", "mix", "head"):
    watch(name)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
"""


def test_the_coordinators_layers_and_its_certificate(lab: Lab) -> None:
    coordinator = MixedPrecisionCoordinator(fp16_layers=["conv", "attention"], scaler="dynamic")
    spec = DataParallelStrategy(precision=coordinator).spec()
    lab.good(CONVOLUTION.replace("nn.BatchNorm2d(8)", "nn.Identity()"), targets=RANKS)
    verified = lab.master.run_cell(LOOP, strategy=spec, targets=RANKS, verify_steps=3).wait(HANG_SECONDS)
    assert verified is not None
    assert verified.ok, [f.message for f in verified.failures.values()]
    certificate = Certificate(verified.values[0]["certificate"])
    assert certificate.passed, certificate
    assert "bfloat16" in certificate.reason or "float16" in certificate.reason
    result = lab.good(LOOP, targets=RANKS, strategy=spec)
    assert lab.pull("computed") == {"stem": True, "norm": False, "mix": True, "head": False}
    assert any("2 layers compute in bfloat16: stem, mix" in note for note in result.notes)


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_a_certificate_of_fp16_is_of_the_same_precision_and_scale(lab: Lab, wrong: bool) -> None:
    """A scale that is not taken off again by one rank's engine is found."""
    plant = "from openclaw_nb.engine.precision.scaling import Scaled as scaled\nkept_end = scaled.end\n"
    if wrong:
        plant += (
            "from openclaw_nb.engine.steps.engine import StepEngine\n"
            "scaled.end = lambda self, ps: (kept_end(self, ps),"
            " [p.grad.mul_(1.5) for p in ps if p.grad is not None and StepEngine.is_here])\n"
        )
        plant += "StepEngine.is_here = False\n"
    lab.good(SETUP + plant, targets=RANKS)
    if wrong:  # only under the strategy, not on the single device
        lab.good(
            "kept_install = StepEngine.install\n"
            "def install(self):\n    kept_install(self); StepEngine.is_here = True\n"
            "StepEngine.install = install",
            targets=RANKS,
        )
    spec = DataParallelStrategy(precision="fp16").spec()
    try:
        verified = lab.master.run_cell(LOOP, strategy=spec, targets=RANKS, verify_steps=3).wait(HANG_SECONDS)
    finally:
        undo = "scaled.end = kept_end\n" + "StepEngine.install = kept_install\ndel StepEngine.is_here" * wrong
        lab.good(undo, targets=RANKS)
    assert verified is not None
    assert verified.ok, [f.message for f in verified.failures.values()]
    assert Certificate(verified.values[0]["certificate"]).passed is not wrong


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"precision": MixedPrecisionCoordinator(fp16_layers=["cnov"])}, "No layer is meant by 'cnov'"),
        ({"precision": "fp16", "mode": "parameter", "sync_frequency": 2}, "there is no one loss scale"),
        ({"activation_checkpointing": True}, "has no list of blocks"),
    ],
)
def test_what_cannot_be_is_refused_before_training(lab: Lab, given: dict[str, Any], said: str) -> None:
    result = train(lab, SETUP, LOOP, DataParallelStrategy(**given))
    assert said in refusal(result)
    lab.good("assert 'forward' not in vars(model)", targets=RANKS)


# --------------------------------------------------------------------------------------------------- memory

BLOCKS = """
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
def block():
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
model = nn.Sequential(*(block() for _ in range(8)), nn.Linear(64, 3))
X, Y = torch.randn(4096, 64), torch.randint(3, (4096,))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(X, Y), batch_size=4096)
"""
EXACT = """
import ctypes
libc = ctypes.CDLL(None)
libc.mallopt(-3, 65536)  # M_MMAP_THRESHOLD: what is freed is given back at once, so that the process's size tells
libc.malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")  # the highest mark begins anew
def memory(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024
before = memory("VmRSS")
"""
PEAK = """
losses = []
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
peak = memory("VmHWM") - before
libc.mallopt(-3, 32 * 2**20)
"""


def test_activation_checkpointing_takes_less_memory_for_the_same_result(lab: Lab) -> None:
    """Each rank's 2048 samples make 8 blocks of 2 x 4 MiB and 0.5 MiB; checkpointed, 8 x 0.5 and one block's inside."""
    found = []
    for asked in (False, True):
        strategy = DataParallelStrategy(activation_checkpointing=asked, gpu_memory_fraction=0.7)
        result = train(lab, BLOCKS + EXACT, PEAK + STATE, strategy)
        assert result.ok, [f.message for f in result.failures.values()]
        found.append((lab.pull("state"), lab.pull("losses"), lab.pull("peak")))
    (plain, losses, peak), (again, losses_again, less) = found
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert losses == losses_again
    assert any("gpu_memory_fraction: not applicable: this worker has no GPU" in n for n in result.notes)
    assert any("8 blocks are computed a second time" in note for note in result.notes)
    assert peak > 60
    assert less < 0.6 * peak, (peak, less)


def test_out_of_memory_says_what_used_it_and_what_would_fit(lab: Lab) -> None:
    """The workers' address space is bounded, so that the forward pass really runs out; the next cell works."""
    setup = BLOCKS.replace("4096", "65536").replace("range(8)", "range(24)") + textwrap.dedent("""
        import resource
        taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + 700 * 2**20, resource.RLIM_INFINITY))
    """)
    try:
        result = train(lab, setup, LOOP.replace("range(2)", "range(1)"), DataParallelStrategy())
    finally:
        lab.good(
            "import resource\nresource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)",
            targets=RANKS,
        )
    assert result.first is not None
    failure = result.failures[result.first]
    assert "can't allocate memory" in failure.message
    text = "\n".join(failure.traceback)
    report = text[text.index("Out of memory on rank") :]
    assert "64.0 MiB more were asked for" in report  # 32768 samples x 512 values x 4 bytes
    rows = (line.strip().rsplit("  ", 1) for line in report.splitlines() if line.startswith("  "))
    sizes = {name.strip(): size.split() for name, size in rows}
    number, unit = sizes["parameters"]
    assert unit == "MiB"
    # 24 x (2 x 64 x 512 + 576) x 4 bytes, and those of a model that the `loss` of an earlier cell still holds.
    assert 6.1 <= float(number) < 9
    number, unit = sizes["activations and temporary values (estimate)"]
    assert unit == "MiB"
    assert (
        250 < float(number) < 1000
    )  # what the limit had left for them, and what earlier cells left free in the heap
    reached, total = map(int, re.findall(r"at layer (\d+) of (\d+)", report)[0])
    assert total == 73
    assert 3 <= reached <= 20
    assert "--accumulate" in report
    assert "--activation-checkpointing" in report
    lab.good(SETUP, targets=RANKS)
    assert lab.run(LOOP, targets=RANKS, strategy=StrategySpec(name="data_parallel")).ok


def test_a_script_says_it_in_words() -> None:
    with pytest.raises(OpenClawError, match="Did you mean"):
        OpenClawCluster().run_cell("x = 1", strategy=DataParallelStrategy(precision="fp61"))
