"""What may be asked of precision and memory, and what workers are then told."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from openclaw_nb.core.errors import UsageError
from openclaw_nb.optimization import MixedPrecisionCoordinator
from openclaw_nb.strategies import STRATEGIES, DataParallelStrategy
from openclaw_nb.strategies.memory import Memory
from openclaw_nb.strategies.precision import Precision, read_precision

COORDINATOR = """
import sys
from openclaw_nb.optimization import MixedPrecisionCoordinator
coordinator = MixedPrecisionCoordinator(
    devices=["GPU-0", "GPU-1"],
    fp16_layers=["conv", "attention"],
    scaler="dynamic"
)
print([m for m in ("torch", "ipyparallel") if m in sys.modules], coordinator.devices)
"""


def test_the_coordinator_is_described_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", COORDINATOR], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] ('GPU-0', 'GPU-1')"


def test_a_strategy_takes_words_and_coordinators() -> None:
    assert "precision" not in DataParallelStrategy().spec().options
    told = DataParallelStrategy(precision="bf16").spec().options
    assert told["precision"] == {"name": "bf16", "layers": None, "scaler": "dynamic"}
    coordinator = MixedPrecisionCoordinator(["CPU-1"], ["conv", "head"], 1024)
    strategy = DataParallelStrategy(precision=coordinator)
    assert strategy.devices == ("CPU-1",)
    assert strategy.spec().options["precision"] == {
        "name": "fp16",
        "layers": ["conv", "head"],
        "scaler": 1024.0,
    }
    assert Precision.told(strategy.spec().options) == read_precision(coordinator)
    assert DataParallelStrategy(devices=["CPU-0"], precision=coordinator).devices == ["CPU-0"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_takes_them_and_checks_them(name: str) -> None:
    strategy = STRATEGIES[name]
    assert not strategy().spec().options.keys() & {"precision", "activation_checkpointing"}
    coordinator = MixedPrecisionCoordinator(["CPU-1", "CPU-2"], ["conv"])
    described = strategy(precision=coordinator, activation_checkpointing=True)
    told = described.spec().options
    assert Precision.told(told) == read_precision(coordinator)
    assert Memory.told(told) == Memory(True)
    assert described.devices == ("CPU-1", "CPU-2")
    with pytest.raises(UsageError, match="Did you mean 'bf16'"):
        strategy(precision="bf61")
    with pytest.raises(UsageError, match="words for layers"):
        strategy(activation_checkpointing=[])


def test_workers_are_told_of_memory() -> None:
    told = DataParallelStrategy(
        activation_checkpointing="encoder.0", memory_pooling=True, gpu_memory_fraction=0.7
    ).spec()
    wanted = {
        "activation_checkpointing": ["encoder.0"],
        "memory_pooling": True,
        "gpu_memory_fraction": 0.7,
    }
    assert told.options | wanted == told.options
    assert Memory.told(told.options) == Memory(("encoder.0",), True, 0.7)
    assert Memory(activation_checkpointing=True).options() == {"activation_checkpointing": True}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"precision": "fp17"}, "Did you mean 'fp16'"),
        ({"precision": 16}, "one of fp32, bf16, fp16, or a MixedPrecisionCoordinator, not 16"),
        ({"gpu_memory_fraction": 1.5}, "above 0 and up to 1, not 1.5"),
        ({"gpu_memory_fraction": True}, "not True"),
        ({"memory_pooling": 1}, "memory_pooling is True or False, not 1"),
        ({"activation_checkpointing": []}, "words for layers"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        DataParallelStrategy(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fp16_layers": []}, "Layers are named by words"),
        ({"fp16_layers": ["conv", 3]}, "Layers are named by words"),
        ({"scaler": "dynamical"}, "scaler is 'dynamic', 'none' or a factor above 0"),
        ({"scaler": -1}, "scaler is 'dynamic', 'none' or a factor above 0"),
        ({"devices": "GPU-0"}, "devices is a list of ids"),
    ],
)
def test_a_coordinator_that_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        MixedPrecisionCoordinator(**given)
    with pytest.raises(UsageError, match="Layers in fp32"):
        Precision("fp32", ["conv"])
