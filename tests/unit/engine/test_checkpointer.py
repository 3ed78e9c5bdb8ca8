"""Checkpoints of a cell as they are taken: when, by whom, and that nothing stops training."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from openclaw_nb.core.errors import CheckpointError, RefusedError
from openclaw_nb.engine.checkpoint.catalog import find_newest, listed
from openclaw_nb.engine.checkpoint.checkpointer import Checkpointer, CheckpointOptions
from openclaw_nb.engine.checkpoint.load import load
from openclaw_nb.engine.checkpoint.store import Store
from openclaw_nb.engine.objects.find import Objects, find_objects
from openclaw_nb.plan.checkpoints import Every


class FakeRanks:
    def __init__(self, rank: int = 0) -> None:
        self.rank, self.size = rank, 2


class SlowStore(Store):
    """A store whose disk is as slow as a test wants it to be."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.may_go_on = threading.Event()

    def write(self, *given: Any) -> Path:
        assert self.may_go_on.wait(10)
        return super().write(*given)


class FullStore(Store):
    """A store whose disk is full for a while."""

    is_full = True

    def write(self, *given: Any) -> Path:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(*given)


class Cell:
    """A cell that trains: its only parameter is the number of steps."""

    def __init__(
        self,
        store: Store,
        every: Every,
        ranks: FakeRanks | None = None,
        keep: int = 9,
        *,
        waits: bool = False,
    ) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.objects = Objects(
            models={"model": self.model},
            optimizers={"optimizer": self.optimizer},
            schedulers={},
            scalers={},
            loaders={},
            aliases={},
            ignored=(),
            built=(),
        )
        self.num_steps, self.seconds = 0, 0.0
        options = CheckpointOptions(store.directory, every, keep, waits)
        given: Any = (self.objects, ranks or FakeRanks(), store, options)
        self.checkpointer = Checkpointer(*given, lambda: self.num_steps, lambda: self.seconds)
        self.checkpointer.open()

    def train(self, num_batches: int, *, settles: bool = True) -> None:
        for _ in range(num_batches):
            self.backward()
            self.optimizer.step()
            self.checkpointer.at_rest()
            if settles and self.checkpointer._writer is not None:
                self.checkpointer._writer.wait()

    def backward(self) -> None:
        self.model.weight.grad = torch.full((1, 1), -1.0)
        self.num_steps += 1
        self.seconds += 1

    def end(self) -> str:
        self.checkpointer.finish()
        self.checkpointer.close()
        return self.checkpointer.note()


def steps_in(directory: Path) -> dict[int, float]:
    """Return for each checkpoint what is in its parameter."""
    found = {}
    for step, folder in reversed(listed(directory)):
        alone = directory.with_name(f"only-{step}")
        shutil.copytree(folder, alone / folder.name)
        model = nn.Linear(1, 1, bias=False)
        load(alone, model=model)
        found[step] = model.weight.item()
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_every_so_many_steps_and_at_the_end(directory: Path) -> None:
    cell = Cell(Store(directory), Every(steps=4))
    cell.train(10)
    assert cell.end() == f"3 checkpoints written to {directory}; the newest is step-00000010"
    assert steps_in(directory) == {4: 4.0, 8: 8.0, 10: 10.0}
    found = find_newest(directory)
    assert found is not None
    assert (found.about["world_size"], found.about["versions"]["torch"]) == (2, torch.__version__)
    assert found.about["models"] == {
        "model": {"weight": {"kind": "parameter", "shape": [1, 1], "dtype": "torch.float32"}}
    }


def test_every_so_many_seconds(directory: Path) -> None:
    cell = Cell(Store(directory), Every(seconds=3), keep=2)
    cell.train(7)
    cell.end()
    assert list(steps_in(directory)) == [6, 7]


def test_a_second_cell_goes_on_counting(directory: Path) -> None:
    first = Cell(Store(directory), Every(steps=5))
    first.train(6)
    first.end()
    second = Cell(Store(directory), Every(steps=5))
    second.train(5)
    assert "numbered on from step-00000006, which was there" in second.end()
    assert list(steps_in(directory)) == [5, 6, 10, 11]


def test_training_goes_on_during_a_write_and_does_not_change_it(directory: Path) -> None:
    store = SlowStore(directory)
    cell = Cell(store, Every(steps=2))
    cell.train(7, settles=False)
    assert listed(directory) == []
    store.may_go_on.set()
    cell.checkpointer._writer.wait()  # type: ignore[union-attr]
    cell.train(1)
    assert steps_in(directory) == {2: 2.0, 8: 8.0}
    assert "; 1 late, as the one before was still being written" in cell.end()


def test_training_waits_for_a_write_where_it_is_to(directory: Path) -> None:
    read = CheckpointOptions.read({"checkpoint": "x", "async_io": False})
    assert read is not None
    assert read.waits
    cell = Cell(Store(directory), Every(steps=1), waits=True)
    for step in range(1, 4):
        cell.train(1, settles=False)
        assert len(listed(directory)) == step, "there when the step is over"
    cell.end()


def test_no_checkpoint_between_backward_and_step(directory: Path) -> None:
    """A cell that adds gradients of several batches up by itself."""
    cell = Cell(Store(directory), Every(steps=1))
    for _ in range(2):
        for _ in range(3):
            cell.backward()
            cell.checkpointer.at_rest()
        cell.train(1)
    cell.end()
    assert steps_in(directory) == {4: 1.0, 8: 2.0}


def test_only_rank_0_writes_and_the_next_one_follows_it(directory: Path) -> None:
    ranks = FakeRanks(rank=1)
    cell = Cell(Store(directory), Every(steps=2), ranks)
    cell.train(5)
    assert not directory.exists()
    ranks.rank = 0
    cell.train(2)
    assert cell.end() == f"2 checkpoints written to {directory}; the newest is step-00000007"
    assert list(steps_in(directory)) == [6, 7]


def test_a_rank_that_is_0_no_more_lets_the_other_write_and_may_be_it_again(directory: Path) -> None:
    ranks = FakeRanks(0), FakeRanks(1)
    cells = [Cell(Store(directory), Every(steps=2), each) for each in ranks]
    for writer in (0, 1, 0):
        for number, each in enumerate(ranks):
            each.rank = int(number != writer)
        for cell in (cells[1 - writer], cells[writer]):
            cell.train(2)
    assert steps_in(directory) == {2: 2.0, 4: 4.0, 6: 6.0}
    assert [cell.end().partition(" to ")[0] for cell in cells] == [
        "2 checkpoints written",
        "1 checkpoint written",
    ]


def test_a_rank_that_writes_none_tells_nothing(directory: Path) -> None:
    cell = Cell(Store(directory), Every(steps=1), FakeRanks(rank=1))
    cell.train(2)
    assert cell.end() == ""


def test_a_full_disk_is_told_and_tried_again(directory: Path) -> None:
    store = FullStore(directory)
    cell = Cell(store, Every(steps=2))
    cell.train(5)
    store.is_full = False
    cell.train(2)
    note = cell.end()
    assert note.startswith(
        f"2 checkpoints written to {directory}; the newest is step-00000007; not written: "
    )
    assert "step-00000002 and 1 more, No space left on device (" in note
    assert " needed, " in note
    assert list(steps_in(directory)) == [6, 7]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("mounting a file system takes root and `mount`")
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("this root may not mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    cell = Cell(Store(small_disk), Every(steps=1))
    with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(1000))
    cell.train(2)
    assert [path.name for path in small_disk.iterdir() if path.name != ".lock"] == ["ballast"]
    (small_disk / "ballast").unlink()
    cell.train(1)
    note = cell.end()
    assert note.startswith(
        f"1 checkpoint written to {small_disk}; the newest is step-00000003; not written: "
    )
    assert "step-00000001 and 1 more, No space left on device (" in note
    assert [step for step, _ in listed(small_disk)] == [3]


def test_a_directory_that_vanishes_is_told(directory: Path) -> None:
    cell = Cell(Store(directory), Every(steps=1))
    cell.train(1)
    shutil.rmtree(directory)
    cell.train(2)
    directory.mkdir()
    cell.train(1)
    note = cell.end()
    assert "not written: step-00000002 and 1 more, No such file or directory (" in note
    assert list(steps_in(directory)) == [4]


def test_an_interrupted_cell_does_not_wait_and_the_next_one_does(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openclaw_nb.engine.checkpoint.checkpointer._PATIENCE_SECONDS", 0.01)
    store = SlowStore(directory)
    cell = Cell(store, Every(steps=1))
    cell.train(1, settles=False)
    cell.checkpointer.close()
    assert "; one is still being written" in cell.checkpointer.note()
    threading.Timer(0.1, store.may_go_on.set).start()
    following = Cell(Store(directory), Every(steps=1))
    following.train(1)
    following.end()
    assert list(steps_in(directory)) == [1, 2]


def refused(make: Callable[[], Any], error: type[Exception], said: str, directory: Path) -> None:
    with pytest.raises(error, match=said):
        make()
    assert not directory.exists()


def test_what_cannot_be_kept_is_refused_before_anything_is_written(directory: Path) -> None:
    namespace: dict[str, Any] = {"torch": torch, "model": nn.Linear(1, 1)}
    namespace["optimizer"] = optimizer = torch.optim.SGD(namespace["model"].parameters())
    ranks: Any = FakeRanks()
    options = CheckpointOptions(directory, Every(steps=1), 3)

    def open_one(source: str) -> None:
        objects = find_objects(source, namespace)
        Checkpointer(objects, ranks, Store(directory), options, lambda: 0).open()

    building = "s = torch.optim.lr_scheduler.StepLR(optimizer, 1)\nmodel(1)"
    refused(
        lambda: open_one(building),
        RefusedError,
        r"build the scheduler .*StepLR.* in a cell of its",
        directory,
    )
    optimizer.param_groups[0]["told"] = object()
    said = r"optimizer\.param_groups\[0\]\.told is a builtins\.object"
    refused(lambda: open_one("optimizer.step(); model(1)"), CheckpointError, said, directory)
