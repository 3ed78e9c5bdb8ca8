"""Blocks that are computed twice, GPU settings, and what is said when memory runs out.

The right values are those of the same model as it is, and sizes that the test itself has made. What runs out here is a
real allocation.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from openclaw_nb.config.schema import KEYS
from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.cell import Outcome
from openclaw_nb.engine.memory.explain import explained
from openclaw_nb.engine.memory.limits import memory_limited
from openclaw_nb.engine.memory.recompute import Recompute
from openclaw_nb.engine.memory.usage import (
    Baseline,
    is_out_of_memory,
    requested_bytes,
    resident_bytes,
    take_usage,
)
from openclaw_nb.engine.precision.casting import Casting
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.strategies.memory import Memory

MIB = 1024**2


def block(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * width, width))


def build() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(6))), torch.randn(128, 64)


def run(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Return the output, the gradients, and how many bytes the graph kept for the backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(7)
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    size = sum(kept.values())
    out.square().mean().backward()
    return out, [p.grad.clone() for p in model.parameters()], size


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_blocks_computed_twice_give_the_same_and_keep_less(dtype: torch.dtype | None) -> None:
    """With dropout, and with single layers in 16 bits; a block keeps its input, of 64 values, in place of 640."""
    model, x = build()
    casting = Casting({n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}, dtype, "cpu")
    if dtype is not None:
        casting.install()
    out, gradients, size = run(model, x)
    recompute = Recompute({"model": model}, True)
    assert recompute.names == ["0", "1", "2", "3", "4", "5"]
    recompute.install()
    out_again, gradients_again, less = run(model, x)
    assert not torch.is_autocast_enabled("cpu")
    recompute.remove()
    casting.remove()
    assert torch.equal(out, out_again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))
    assert 0 < less < size / 6
    assert not any("forward" in vars(module) for module in model.modules())


def test_which_blocks() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.ModuleDict({"body": nn.TransformerEncoder(layer, 2), "head": nn.Linear(8, 2)})
    assert Recompute({"model": model}, True).names == ["body.layers.0", "body.layers.1"]
    assert Recompute({"model": model}, ["head", r"body.layers.1\b.*"]).names == ["body.layers.1", "head"]
    assert Recompute({"model": model}, False).names == []


@pytest.mark.parametrize(
    ("model", "blocks", "said"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), True, "has no list of blocks .* It has 0, 1"),
        (nn.Sequential(block()), ["conv"], "No layer is meant by 'conv'"),
        (
            nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
            True,
            "0.1 is a BatchNorm layer in a block",
        ),
    ],
)
def test_blocks_that_cannot_be_are_refused(model: nn.Module, blocks: object, said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        Recompute({"model": model}, blocks)  # type: ignore[arg-type]


def test_settings_of_a_gpu_are_told_where_there_is_none() -> None:
    notes: list[str] = []
    with memory_limited(Memory(pooling=True, gpu_fraction=0.5), notes, has_gpu=False):
        pass
    assert [note.split(": ")[:2] for note in notes] == [
        ["memory_pooling", "not applicable"],
        ["gpu_memory_fraction", "not applicable"],
    ]
    with memory_limited(Memory(), notes, has_gpu=False):
        assert len(notes) == 2


def fail(make: Callable[[], object]) -> BaseException:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        make()
    return caught.value


def test_errors_of_memory_are_known_and_say_what_was_asked_for() -> None:
    error = fail(lambda: torch.empty(10**13))
    assert is_out_of_memory(error)
    assert requested_bytes(error) == 4 * 10**13
    error = fail(lambda: np.empty(2**47))
    assert is_out_of_memory(error)
    assert requested_bytes(error) == 2**50
    of_a_gpu = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total ..."
    )
    assert is_out_of_memory(of_a_gpu)
    assert requested_bytes(of_a_gpu) == 20 * MIB
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert requested_bytes(MemoryError()) is None


def test_what_the_memory_holds() -> None:
    """In a new process: memory that other tests have left to the allocator would be used again."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        fresh.submit(check_what_the_memory_holds).result()


def check_what_the_memory_holds() -> None:
    warm = nn.Linear(4, 4)  # the first step imports what takes far more memory than the model here
    warm(torch.ones(1, 4)).sum().backward()
    torch.optim.AdamW(warm.parameters()).step()
    del warm
    error = fail(lambda: torch.empty(10**13))

    def take() -> object:
        return take_usage(error, Baseline(start, start), num_workers=2, in_use=(), on_gpu=False)

    start = resident_bytes()
    before = take()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.ones(5, MIB)
    model(data.view(-1, 1024)[:4]).sum().backward()
    optimizer.step()
    out = model(data.view(-1, 1024))  # keeps 2 activations of 20 MiB a layer, and gives one
    after = take()
    size = 2 * 4 * (1024 * 1024 + 1024)
    assert after.parameters - before.parameters == size
    assert after.gradients - before.gradients == size
    assert after.optimizer - before.optimizer == pytest.approx(2 * size, abs=64)
    assert after.tensors - before.tensors >= 20 * MIB
    assert after.activations == pytest.approx(4 * 20 * MIB, abs=30 * MIB)
    assert after.state - before.state == pytest.approx(4 * size, abs=64)
    assert (after.num_blocks, after.parts_per_block) == (2, 2)
    assert out.requires_grad


def test_the_report_is_below_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OPENCLAW_DEVICE", "CPU-3")
    model = nn.Sequential(nn.Linear(4, 4))
    error = fail(lambda: model(torch.empty(4 * 10**12).view(-1, 4)))
    outcome = Outcome(error, ["the traceback"])
    spec = StrategySpec(name="data_parallel", options={"precision": {"name": "bf16"}})
    found = explained(outcome, spec, Baseline(0, 0), 1, 4).traceback
    assert found[0] == "the traceback"
    assert found[1].startswith("Out of memory on rank 1 (CPU-3): ")
    assert found[1].endswith("; 14.6 TiB more were asked for.")
    assert [line.split("  ")[1] for line in found[2:8]] == [
        "parameters",
        "gradients",
        "optimizer state",
        "activations and temporary values (estimate)",
        "other tensors and arrays, such as data",
        "Python, torch and the rest",
    ]
    assert not any("--precision" in line for line in found)
    assert any("--accumulate 64" in line for line in found)
    (keys,) = [line for line in found if line.startswith("In the configuration: ")]
    assert "strategy.accumulate" in keys
    assert "strategy.precision" not in keys, "it is in use"
    assert all(key in KEYS for key in keys.partition(": ")[2].rstrip(".").split(", "))
    assert error.__traceback__ is None
    other = Outcome(ValueError("no"), [])
    assert explained(other, spec, Baseline(0, 0), 0, 1) is other
