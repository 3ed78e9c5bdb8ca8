"""Sums through shared memory, against the sum of the tensors in rank order."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from openclaw_nb.core.errors import MismatchError, ReleasedError
from openclaw_nb.engine.group import sums as module
from openclaw_nb.engine.group.collectives import ReleasableGroup
from openclaw_nb.engine.group.sums import BackendSum, Layout, SharedMemory, SharedSum, make_sums

from .conftest import disband, form, on_threads, share_memory

CPU = torch.device("cpu")


def on_host(body: Callable[[ReleasableGroup, SharedMemory], Any], size: int) -> list[Any]:
    groups, _ = form(size)
    memories = share_memory(size)
    pairs = list(zip(groups, memories, strict=True))
    try:
        return on_threads([lambda pair=pair: body(*pair) for pair in pairs])  # type: ignore[misc]
    finally:
        pairs.clear()
        disband(groups)
        for memory in memories:
            memory.close()


def value(rank: int, step: int, layout: Layout) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(layout.numel, generator=generator).to(layout.dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_are_those_of_the_tensors_in_rank_order(size: int, dtype: torch.dtype) -> None:
    """To the bit, on every rank, for few values and many, over more steps than there are turns."""
    layouts = [Layout(numel, dtype, CPU) for numel in (1, 7, 5000, 100_003)]

    def body(group: ReleasableGroup, memory: SharedMemory) -> None:
        sums = make_sums(group, memory, layouts)
        assert all(isinstance(each, SharedSum) for each in sums)
        for step in range(5):
            works = []
            for each, layout in zip(sums, layouts, strict=True):
                each.inputs[step % 2].copy_(value(group.rank(), step, layout))
                works.append(each.start(step % 2, step))
            for work in works:
                work.wait()
            for each, layout in zip(sums, layouts, strict=True):
                expected = value(0, step, layout)
                for rank in range(1, size):
                    expected = expected + value(rank, step, layout)
                assert torch.equal(each.result, expected)
                each.result.zero_()  # it is the rank's own

    on_host(body, size)


def test_nothing_can_be_summed_too() -> None:
    def body(group: ReleasableGroup, memory: SharedMemory) -> int:
        (each,) = make_sums(group, memory, [Layout(0, torch.float64, CPU)])
        each.start(0, 0).wait()
        return each.result.numel()

    assert on_host(body, 2) == [0, 0]


def test_memory_grows_with_later_layouts() -> None:
    def body(group: ReleasableGroup, memory: SharedMemory) -> list[float]:
        totals = []
        for numel in (10, 1_000_000, 10):
            (each,) = make_sums(group, memory, [Layout(numel, torch.float32, CPU)])
            each.inputs[0].fill_(group.rank() + 1.0)
            each.start(0, 0).wait()
            totals.append(float(each.result.sum()))
        return totals

    assert on_host(body, 2) == [[30.0, 3_000_000.0, 30.0]] * 2


def test_too_little_memory_on_one_rank_leaves_the_backend_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate
    refused: list[int] = []

    def allocate(file: int, start: int, size: int) -> None:
        if not refused:
            refused.append(size)
            raise OSError(28, "No space left on device")
        real(file, start, size)

    monkeypatch.setattr(module.os, "posix_fallocate", allocate)

    def body(group: ReleasableGroup, memory: SharedMemory) -> list[type]:
        kinds = [type(make_sums(group, memory, [Layout(100, torch.float32, CPU)])[0]) for _ in range(2)]
        return kinds

    assert on_host(body, 2) == [[BackendSum, SharedSum]] * 2


@pytest.mark.parametrize("limit", ["FSIZE", "AS"])
def test_a_limit_of_the_process_leaves_the_backend_to_all(limit: str) -> None:
    """What the system refuses is an error, not a signal: files may not be so large, or not be mapped."""
    large, name = [Layout(2**26, torch.float32, CPU)], getattr(resource, f"RLIMIT_{limit}")
    before = resource.getrlimit(name)
    allowed = 2**20 if limit == "FSIZE" else psutil.Process().memory_info().vms + 2**28

    def body(group: ReleasableGroup, memory: SharedMemory) -> list[Any]:
        few = make_sums(group, memory, [Layout(10, torch.float32, CPU)])[0]
        many = memory.lay_out(large)
        few.inputs[0].fill_(1.0)  # it has kept its memory
        few.start(0, 0).wait()
        return [many, float(few.result.sum())]

    resource.setrlimit(name, (allowed, before[1]))
    try:
        assert on_host(body, 2) == [[None, 20.0]] * 2
    finally:
        resource.setrlimit(name, before)
    assert on_host(lambda group, memory: type(make_sums(group, memory, large)[0]), 2) == [SharedSum] * 2


def test_memory_that_one_rank_cannot_map_leaves_the_backend_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = module.mmap.mmap, []

    def map_memory(file: int, size: int) -> Any:
        if not refused:
            refused.append(size)
            raise OSError(12, "Cannot allocate memory")
        return real(file, size)

    monkeypatch.setattr(module.mmap, "mmap", map_memory)

    def body(group: ReleasableGroup, memory: SharedMemory) -> list[type]:
        return [type(make_sums(group, memory, [Layout(100, torch.float32, CPU)])[0]) for _ in range(2)]

    assert on_host(body, 2) == [[BackendSum, SharedSum]] * 2


def test_more_than_a_share_of_the_free_memory_is_not_taken() -> None:
    def body(group: ReleasableGroup, memory: SharedMemory) -> type:
        return type(make_sums(group, memory, [Layout(2**44, torch.uint8, torch.device("meta"))])[0])

    layouts = [Layout(2**44, torch.float32, CPU)]
    assert on_host(lambda group, memory: memory.lay_out(layouts), 2) == [None, None]
    assert on_host(body, 2) == [BackendSum] * 2  # and what is not on the CPU does not go through it at all


def test_ranks_that_sum_different_sizes_are_a_mismatch() -> None:
    def body(group: ReleasableGroup, memory: SharedMemory) -> None:
        with pytest.raises(MismatchError, match="128, 256 bytes by rank"):
            make_sums(group, memory, [Layout(1 + 16 * group.rank(), torch.float32, CPU)])

    on_host(body, 2)


def test_a_released_group_ends_the_wait_for_a_sum() -> None:
    """The rank that waits is free at once, its thread is when the mesh is cut."""

    def body(group: ReleasableGroup, memory: SharedMemory) -> None:
        (each,) = make_sums(group, memory, [Layout(10, torch.float32, CPU)])
        if group.rank() == 0:
            work = each.start(0, 0)
            group.release("told to")
            with pytest.raises(ReleasedError, match="told to"):
                work.wait()
            memory.mesh.cut()

    on_host(body, 2)


def test_a_rank_that_is_gone_ends_the_sum() -> None:
    def body(group: ReleasableGroup, memory: SharedMemory) -> None:
        (each,) = make_sums(group, memory, [Layout(10, torch.float32, CPU)])
        if group.rank() == 1:
            memory.mesh.cut()
            return
        with pytest.raises(ReleasedError, match="connection to another rank is gone"):
            each.start(0, 0).wait()

    on_host(body, 2)
