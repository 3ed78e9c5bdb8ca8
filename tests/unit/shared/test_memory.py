"""Shared memory within one process and between two: what is published is what others see."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import pickle
import stat
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from openclaw_nb.core.errors import ClusterError, ResourceError, UnknownNameError, UsageError
from openclaw_nb.shared import SharedMemory, attach_shared_memory
from openclaw_nb.shared.memory import gibibytes

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/openclaw-test-{uuid.uuid4().hex}")
    path.mkdir(mode=0o700)
    yield path
    for each in path.iterdir():
        each.unlink()
    path.rmdir()


@pytest.fixture
def memory(folder: Path) -> SharedMemory:
    return SharedMemory.create(folder, 64 * PAGE)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        np.arange(24)[::-2],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3.5),
        np.zeros((0, 4), np.int8),
        np.array([True, False]),
        np.array([1 + 2j]),
    ],
)
def test_what_is_put_is_what_others_take(memory: SharedMemory, value: np.ndarray[Any, Any]) -> None:
    memory.put("x", value)
    other = attach_shared_memory(memory.id)
    taken = other.array("x")
    assert (taken.dtype, taken.shape) == (value.dtype, value.shape)
    np.testing.assert_array_equal(taken, value)
    torch.testing.assert_close(other.tensor("x"), torch.from_numpy(value.copy()))


def test_torch_types_that_numpy_lacks(memory: SharedMemory) -> None:
    value = torch.randn(5, 7).to(torch.bfloat16)
    memory.put("x", value.T)
    assert torch.equal(attach_shared_memory(memory.id).tensor("x"), value.T)
    with pytest.raises(UsageError, match="bfloat16, which numpy does not have"):
        memory.array("x")


def test_parameters_are_put_without_their_gradients(memory: SharedMemory) -> None:
    layer = torch.nn.Linear(3, 2)
    memory.put("weight", layer.weight)
    assert torch.equal(memory.tensor("weight"), layer.weight.detach())


def test_a_writable_one_is_changed_for_all(memory: SharedMemory) -> None:
    memory.empty("x", (4,), torch.int64)
    array, tensor = memory.array("x"), attach_shared_memory(memory.id).tensor("x")
    assert array.tolist() == [0, 0, 0, 0]
    tensor += 2
    array[0] = 7
    assert tensor.tolist() == array.tolist() == [7, 2, 2, 2]


WRITES = {
    "+=": lambda x: x.__iadd__(1),
    "item": lambda x: x.__setitem__(0, 7),
    "a view": lambda x: x[0].fill_(7),
    "a view of a view": lambda x: x.view(2, 2)[1].zero_(),
    "one of several views": lambda x: x.split(2)[1].mul_(2),
    "out=": lambda x: torch.add(x, 1, out=x),
    "inplace=": lambda x: nn.functional.relu(x, inplace=True),
    "init": nn.init.zeros_,
    "foreach": lambda x: torch._foreach_add_([x], 1),
    "numpy's": lambda x: x.numpy().__setitem__(0, 7),
    "optimizer": lambda x: _step(nn.Parameter(x)),
}


def _step(parameter: torch.Tensor) -> None:
    parameter.sum().backward()
    torch.optim.SGD([parameter], lr=0.1).step()


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_sealed_one_refuses_to_be_written(memory: SharedMemory, write: Callable[[Any], Any]) -> None:
    memory.put("x", -np.ones(4, np.float32))
    tensor = memory.tensor("x")
    with pytest.raises(ValueError, match=r"'x' is sealed.*clone|read-only"):
        write(tensor)
    assert tensor.tolist() == memory.array("x").tolist() == [-1, -1, -1, -1]
    with pytest.raises(ValueError, match="read-only"):
        memory.array("x")[0] = 7


def test_what_comes_of_a_sealed_one_is_ordinary(memory: SharedMemory) -> None:
    memory.put("x", np.arange(12, dtype=np.float32).reshape(6, 2))
    x = memory.tensor("x")
    for ordinary in (
        x.clone(),
        x + 0,
        copy.deepcopy(x),
        pickle.loads(pickle.dumps(x)),
        torch.empty(6, 2).copy_(x),
    ):
        assert type(ordinary) is torch.Tensor
        ordinary += 1
        assert torch.equal(ordinary, x + 1)
    layer = nn.Linear(2, 3)
    batches = DataLoader(TensorDataset(x), batch_size=4)
    layer(next(iter(batches))[0]).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, x[:4].sum(0).expand(3, 2))
    memory.put("y", x)
    assert memory.tensor("y").tolist() == x.tolist()


def test_what_gets_past_the_seal_is_seen_by_nobody_else(memory: SharedMemory) -> None:
    memory.put("x", np.ones(3))
    tensor = memory.tensor("x")
    ctypes.memset(tensor.data_ptr(), 0, 8)
    assert tensor.tolist() == [0, 1, 1]
    assert memory.tensor("x").tolist() == memory.array("x").tolist() == [1, 1, 1]


def test_what_is_in_use_is_not_overwritten_after_its_name_is_gone(memory: SharedMemory) -> None:
    memory.put("x", np.full(40 * PAGE, 1, np.uint8))
    taken = attach_shared_memory(memory.id).array("x")
    memory.delete("x")
    with pytest.raises(ResourceError, match=r"'y' needs .*, less what was deleted and is still in use"):
        memory.put("y", np.full(40 * PAGE, 2, np.uint8))
    memory.put("z", np.full(24 * PAGE, 3, np.uint8))
    assert set(np.unique(taken)) == {1}
    del taken
    gc.collect()
    memory.put("y", np.full(40 * PAGE, 2, np.uint8))
    assert set(np.unique(memory.array("y"))) == {2}
    assert set(np.unique(memory.array("z"))) == {3}


def test_another_process_sees_and_changes_it(memory: SharedMemory) -> None:
    memory.put("x", np.arange(3.0), writable=True)
    code = (
        "import sys, openclaw_nb; m = openclaw_nb.attach_shared_memory(sys.argv[1]); m.array('x')[:] *= 2; "
        "m.put('y', [1, 2]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, memory.id], check=True)
    assert (memory.array("x").tolist(), memory.array("y").tolist()) == ([0, 2, 4], [1, 2])


def test_it_is_this_users_alone_and_all_its_pages_are_there(folder: Path, memory: SharedMemory) -> None:
    for each in folder.iterdir():
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
    (file,) = (each for each in folder.iterdir() if not each.suffix)
    assert file.stat().st_blocks * 512 == memory.size_bytes == 64 * PAGE


def test_after_it_is_freed_only_what_was_taken_is_left(folder: Path, memory: SharedMemory) -> None:
    memory.put("x", np.ones(3))
    taken = memory.array("x")
    memory.free()
    assert list(folder.iterdir()) == []
    assert taken.tolist() == [1, 1, 1]
    assert repr(memory).endswith("freed")
    for use in (lambda: memory.array("x"), lambda: memory.put("y", 1), lambda: len(memory)):
        with pytest.raises(ClusterError, match=f"'{memory.id}' is freed"):
            use()
    with pytest.raises(UnknownNameError, match=memory.id):
        attach_shared_memory(memory.id)
    memory.free()


def test_a_pickle_is_its_id(memory: SharedMemory) -> None:
    memory.put("x", [1.5])
    assert pickle.loads(pickle.dumps(memory)).array("x").tolist() == [1.5]


def test_it_says_what_is_in_it(memory: SharedMemory) -> None:
    memory.put("images", np.zeros((2, 3), np.float32))
    memory.empty("sums", [4], "int64")
    assert repr(memory).splitlines() == [
        f"SharedMemory {memory.id}, 256 KiB, 8.0 KiB in use",
        "  images: float32 [2, 3], 24 B, sealed",
        "  sums: int64 [4], 32 B, writable",
    ]
    assert (list(memory), len(memory), "sums" in memory, "x" in memory) == (
        ["images", "sums"],
        2,
        True,
        False,
    )


def test_bad_input_says_what_to_do(memory: SharedMemory) -> None:
    memory.put("images", [1])
    with pytest.raises(UsageError, match="'images' already"):
        memory.put("images", [2])
    with pytest.raises(UnknownNameError, match="Did you mean 'images'"):
        memory.array("image")
    with pytest.raises(UnknownNameError):
        memory.delete("x")
    with pytest.raises(UsageError, match="object"):
        memory.put("x", np.array([None]))
    with pytest.raises(UnknownNameError, match="float32"):
        memory.empty("x", (2,), "float23")
    with pytest.raises(UsageError, match="whole numbers from 0 on"):
        memory.empty("x", (2, -1))
    with pytest.raises(UsageError, match="give it a name"):
        memory.put("", [1])
    with pytest.raises(UsageError, match=r"on meta.*value\.cpu\(\)"):
        memory.put("x", torch.empty(2, device="meta"))
    assert list(memory) == ["images"]


def test_more_than_the_host_has_is_refused_before_anything_is_written(folder: Path) -> None:
    with pytest.raises(ResourceError, match=r"Shared memory of 1024.0 TiB: of .* only .* are free"):
        SharedMemory.create(folder, 2**50)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf"), "16", True, None])
def test_a_size_is_a_number_above_0(size: Any) -> None:
    with pytest.raises(UsageError, match="size_gb="):
        gibibytes(size)


def test_only_the_workers_of_its_devices_may_attach(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory.create(folder, PAGE, ["CPU-0"])
    monkeypatch.setenv("OPENCLAW_DEVICE", "CPU-0")
    attach_shared_memory(memory.id)
    monkeypatch.setenv("OPENCLAW_DEVICE", "CPU-1")
    with pytest.raises(UsageError, match="is for CPU-0, and this worker is on CPU-1"):
        attach_shared_memory(memory.id)
