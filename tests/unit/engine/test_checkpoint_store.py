"""Checkpoints in a directory: all or nothing, the newest valid one wins, and what is damaged is named."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openclaw_nb.core.errors import CheckpointError
from openclaw_nb.engine.checkpoint import owner
from openclaw_nb.engine.checkpoint.catalog import find_newest, listed
from openclaw_nb.engine.checkpoint.store import Store

PIECES = [b"begin", b"x" * 5000, memoryview(b"end")]
CONTENT = {"tensors.safetensors": PIECES, "state.json": [b'{"place": null}']}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store(tmp_path / "deep" / "run")
    found.open()
    yield found
    found.close()


def names(store: Store) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir() if path.name != ".lock")


def test_what_was_written_is_found(store: Store) -> None:
    store.write(7, CONTENT, {"world_size": 3})
    found = find_newest(store.directory)
    assert found is not None
    assert (found.step, found.path.name, found.about["world_size"], found.skipped) == (
        7,
        "step-00000007",
        3,
        (),
    )
    assert (found.path / "tensors.safetensors").read_bytes() == b"begin" + b"x" * 5000 + b"end"
    assert found.state() == {"place": None}
    assert names(store) == ["step-00000007"]


def test_there_may_be_none(tmp_path: Path) -> None:
    assert find_newest(tmp_path) is None
    assert find_newest(tmp_path / "nowhere") is None


def test_the_newest_are_kept(store: Store) -> None:
    for step in (3, 100_000_000, 20):
        store.write(step, CONTENT, {})
    assert [step for step, _ in listed(store.directory)] == [100_000_000, 20, 3]
    store.prune(2)
    assert names(store) == ["step-00000020", "step-100000000"]


def test_damaged_ones_do_not_count_among_those_that_are_kept(store: Store) -> None:
    for step in (1, 2, 3, 4):
        store.write(step, CONTENT, {})
    (store.directory / "step-00000003" / "state.json").unlink()
    store.prune(2)
    assert names(store) == ["step-00000002", "step-00000003", "step-00000004"]


def test_the_last_whole_one_is_never_removed(store: Store) -> None:
    for step in (1, 2, 3):
        store.write(step, CONTENT, {})
    for step in (2, 3):
        (store.directory / f"step-{step:08d}" / "manifest.json").unlink()
    store.prune(1)
    found = find_newest(store.directory)
    assert found is not None
    assert found.step == 1


def test_one_of_the_same_step_is_replaced(store: Store) -> None:
    store.write(1, CONTENT, {"turn": 1})
    store.write(1, CONTENT, {"turn": 2})
    found = find_newest(store.directory)
    assert found is not None
    assert found.about["turn"] == 2
    assert names(store) == ["step-00000001"]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xff not json")


def other_format(path: Path) -> None:
    from openclaw_nb.engine.checkpoint import manifest

    content = json.loads(path.read_bytes()) | {"format": 99}
    del content["sha256"]
    path.write_text(json.dumps(content | {"sha256": manifest._digest(content)}))


DAMAGES = [
    (
        "tensors.safetensors",
        lambda p: flip(p, 2000),
        "tensors.safetensors is damaged: its SHA-256 is another",
    ),
    ("state.json", lambda p: flip(p, 3), "state.json is damaged: its SHA-256 is another"),
    (
        "tensors.safetensors",
        lambda p: os.truncate(p, 10),
        "tensors.safetensors has 10 bytes, not 5008",
    ),
    ("tensors.safetensors", lambda p: p.write_bytes(p.read_bytes() + b"x"), "has 5009 bytes, not 5008"),
    ("state.json", Path.unlink, "state.json is missing"),
    ("manifest.json", Path.unlink, "manifest.json is missing"),
    ("manifest.json", garbage, "manifest.json cannot be read"),
    ("manifest.json", lambda p: p.write_text("[]"), "manifest.json is not one of a checkpoint"),
    ("manifest.json", lambda p: os.truncate(p, 30), "manifest.json cannot be read"),
    ("manifest.json", lambda p: os.truncate(p, 0), "manifest.json cannot be read"),
    ("manifest.json", lambda p: p.write_text(p.read_text().replace('"turn": 2', '"turn": 3')), "is damaged"),
    ("manifest.json", other_format, "it has format 99, and this version reads 1"),
]


@pytest.mark.parametrize(("name", "damage", "reason"), DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_it_wins(
    store: Store, name: str, damage: object, reason: str
) -> None:
    store.write(1, CONTENT, {"turn": 1})
    store.write(2, CONTENT, {"turn": 2})
    damage(store.directory / "step-00000002" / name)  # type: ignore[operator]
    found = find_newest(store.directory)
    assert found is not None
    assert found.about["turn"] == 1
    assert len(found.skipped) == 1
    assert found.skipped[0].startswith("step-00000002: ")
    assert reason in found.skipped[0]


def test_every_flipped_bit_of_every_file_is_noticed(store: Store) -> None:
    small = {"tensors.safetensors": [b"tensors"], "state.json": [b"{}"]}
    folder = store.write(1, small, {})
    for path in folder.iterdir():
        whole = path.read_bytes()
        for at in range(len(whole)):
            flip(path, at)
            with pytest.raises(CheckpointError, match="step-00000001"):
                find_newest(store.directory)
            path.write_bytes(whole)
    assert find_newest(store.directory) is not None


def test_when_none_is_valid_all_are_named(store: Store) -> None:
    for step in (1, 2):
        (store.write(step, CONTENT, {}) / "state.json").unlink()
    store.directory.joinpath("step-00000002").rename(store.directory / "step-00000003")
    with pytest.raises(CheckpointError, match=r"step-00000003: its manifest is one of step 2.*step-00000001"):
        find_newest(store.directory)


# ---------------------------------------------------------------------------------- what cannot be


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            CheckpointError, match=r"as a file has that name or part of it\. Give a directory"
        ):
            Store(directory).open()


def test_a_directory_that_cannot_be_written_to() -> None:
    with pytest.raises(CheckpointError, match=r"/proc/self/run cannot be made \(.*\)\. Give one"):
        Store(Path("/proc/self/run")).open()
    with pytest.raises(CheckpointError, match=r"/proc/self cannot be written to \(.*\)\. Give another"):
        Store(Path("/proc/self")).open()


def test_one_writer_a_directory(store: Store) -> None:
    with pytest.raises(CheckpointError, match=f"written to .* by another process .*pid {os.getpid()}"):
        Store(store.directory).open()
    said = subprocess.run(
        [sys.executable, "-c", _OTHER, str(store.directory)], capture_output=True, text=True, check=True
    ).stdout
    assert f"by another process (pid {os.getpid()} on " in said
    store.close()
    said = subprocess.run(
        [sys.executable, "-c", _OTHER, str(store.directory)], capture_output=True, text=True, check=True
    ).stdout
    assert said == ""


_OTHER = """
import sys
from pathlib import Path
from openclaw_nb.engine.checkpoint.store import Store
try:
    Store(Path(sys.argv[1])).open()
except ValueError as error:
    print(error)
"""


# --------------------------------------------------------------------------------------- left-overs


def test_what_a_gone_writer_left_is_removed_and_nothing_else(store: Store) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    host, pid, start = owner._host(), os.getpid(), owner._start_time(os.getppid())
    left = [f".writing-{host}-{gone.pid}-1-step-00000001", f".removing-{host}-{pid}-1-step-00000001"]
    kept = [
        f".writing-{'0' * 12}-{gone.pid}-1-step-00000001",  # of another host
        f".writing-{host}-{os.getppid()}-{start}-step-00000001",  # lives
        "notes.txt",
        ".writing-by-hand",
    ]
    for name in [*left, *kept]:
        (store.directory / name).mkdir()
    store.close()
    store.open()
    assert names(store) == sorted(kept)


def test_nothing_is_left_of_a_write_that_fails(store: Store) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        store.write(1, {"tensors.safetensors": pieces()}, {})
    assert names(store) == []


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_nothing_is_left_of_a_file_that_is_too_large(store: Store) -> None:
    store.write(1, CONTENT, {})
    with files_of_at_most(2000), pytest.raises(OSError, match="File too large"):
        store.write(2, CONTENT, {})
    assert names(store) == ["step-00000001"]
    store.write(2, CONTENT, {})
    assert find_newest(store.directory).step == 2  # type: ignore[union-attr]


def test_a_directory_that_vanishes_and_comes_back(store: Store) -> None:
    store.write(1, CONTENT, {})
    shutil.rmtree(store.directory)
    with pytest.raises(FileNotFoundError):
        store.write(2, CONTENT, {})
    store.directory.mkdir()
    store.write(3, CONTENT, {})
    assert names(store) == ["step-00000003"]
    with pytest.raises(CheckpointError, match="by another process"):
        Store(store.directory).open()
