"""A process group of real gloo backends in one process: each rank is a thread."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from openclaw_nb.engine.group import gloo
from openclaw_nb.engine.group.collectives import ReleasableGroup
from openclaw_nb.engine.group.mesh import Mesh, connect
from openclaw_nb.engine.group.sums import SharedMemory

LIMIT_SECONDS = 20.0
_TAG = uuid.uuid4().hex
_serials = itertools.count()
gc.freeze()  # torch stays: `disband` need not look through it

Body = Callable[[ReleasableGroup], Any]
OnRanks = Callable[..., list[Any]]


def form(size: int, *, compare: bool = False) -> tuple[list[ReleasableGroup], str]:
    """Form a group of ``size`` ranks; return it by rank, with its address."""
    address = gloo.private_address(_TAG, next(_serials))
    store = dist.HashStore()
    groups: list[ReleasableGroup | None] = [None] * size

    def join(rank: int) -> None:
        backend = gloo.create(store, rank, size, timedelta(seconds=LIMIT_SECONDS), address)
        groups[rank] = ReleasableGroup(backend, rank, size, "test", witness=backend if compare else None)

    on_threads([lambda rank=rank: join(rank) for rank in range(size)])  # type: ignore[misc]
    return [group for group in groups if group is not None], address


def connect_ranks(size: int) -> list[Mesh]:
    """Connect ``size`` ranks; return each one's mesh."""
    store = dist.HashStore()
    meshes = on_threads([lambda rank=rank: connect(store, rank, size) for rank in range(size)])  # type: ignore[misc]
    assert all(meshes)
    return meshes


def share_memory(size: int) -> list[SharedMemory | None]:
    """Give ``size`` ranks memory in common; one rank has nobody to share with."""
    if size == 1:
        return [None]
    return on_threads([lambda mesh=mesh: SharedMemory(mesh) for mesh in connect_ranks(size)])  # type: ignore[misc]


def disband(groups: list[ReleasableGroup]) -> None:
    """Drop the backends, here: one whose last reference goes on a thread of its own ends the process."""
    for group in groups:
        group.release("the test is over")
        group.bury()
        del group
    gc.collect()  # hooks and the frames of errors hold groups in cycles
    deadline = time.monotonic() + 1.0
    # One reference is the list's, one is `getrefcount`'s: the rest are callbacks that still run.
    while any(sys.getrefcount(groups[i]) > 2 for i in range(len(groups))) and time.monotonic() < deadline:
        time.sleep(0.001)
    groups.clear()


def on_threads(bodies: list[Callable[[], Any]]) -> list[Any]:
    """Run each body on a thread of its own; return what they returned, or raise what the first raised."""
    results: list[Any] = [None] * len(bodies)
    errors: dict[int, BaseException] = {}

    def run(place: int) -> None:
        try:
            results[place] = bodies[place]()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    for place in sorted(errors):
        raise errors[place]
    return results


@pytest.fixture
def on_ranks() -> OnRanks:
    """Return ``on_ranks(body, size=2, compare=False)``, which lists what ``body(group)`` returns on each rank."""

    def run(body: Body, size: int = 2, *, compare: bool = False) -> list[Any]:
        groups, _ = form(size, compare=compare)
        try:
            return on_threads([lambda group=group: body(group) for group in groups])  # type: ignore[misc]
        finally:
            disband(groups)

    return run
