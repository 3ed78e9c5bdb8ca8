"""What may go wrong while a cluster changes hands: kills in the middle, other users and versions, parts gone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from openclaw_nb.cluster import files
from openclaw_nb.cluster.files import read_notes
from openclaw_nb.cluster.guardian import locked
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.ownership import create_time, processes_of
from openclaw_nb.core.errors import AlreadyStartedError, StartError, UsageError
from openclaw_nb.session import current_session

from .conftest import kill
from .test_attach import (
    HANG_SECONDS,
    KILL,
    check_and_leave,
    controllers,
    own,
    runtime,
    shared_runtime,
    started,
    until,
    waiting,
)

__all__ = ["runtime", "shared_runtime", "waiting"]

pytestmark = pytest.mark.cluster

# Where a process is killed while it attaches: what it has done by then is undone by nobody.
MOMENTS = {
    "before it looks for the controller": ("openclaw_nb.cluster.ipp.Door.find_controller", 1),
    "before it connects": ("openclaw_nb.cluster.ipp.Door.connect", 1),
    "before it asks for the cell": ("openclaw_nb.cluster.membership.Membership.records", 1),
    "before it mends": ("openclaw_nb.cluster.membership.Membership.mend", 1),
    "before it is watched over": ("openclaw_nb.cluster.guardian.Guardian.start", 1),
}
KILLED = """
import os, pkgutil, signal, time
from openclaw_nb.cluster.master import MasterNode
owner, _, name = "{place}".rpartition(".")
owner, calls, plain = pkgutil.resolve_name(owner), [], pkgutil.resolve_name("{place}")
def killed(*args, **options):
    calls.append(args)
    if len(calls) == {count}:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(*args, **options)
setattr(owner, name, killed)
MasterNode.attach()
time.sleep(600)
"""


@pytest.mark.parametrize(
    "moment",
    [
        "before it mends",
        *(pytest.param(m, marks=pytest.mark.soak) for m in MOMENTS if m != "before it mends"),
    ],
)
def test_a_process_killed_while_it_attaches_leaves_the_cluster_without_a_lease(
    waiting: Path, moment: str
) -> None:
    place, count = MOMENTS[moment]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED.format(place=place, count=count)], timeout=HANG_SECONDS
    )
    assert killed.returncode == -signal.SIGKILL
    time.sleep(1)  # a guardian that was to end the cluster would have begun
    check_and_leave(MasterNode.attach())


@pytest.mark.parametrize("other", [{"version": "0.0.1"}, {"protocol": 2}, {"protocol": None}], ids=repr)
def test_the_cluster_of_another_version_is_left_alone(waiting: Path, other: dict[str, object]) -> None:
    path = waiting / "shared" / "openclaw-cluster.json"
    note = {**json.loads(path.read_text()), **other}
    version = re.escape(str(note["version"]))
    written = json.dumps({name: value for name, value in note.items() if value is not None})
    before = path.read_text()
    path.write_text(written)
    with pytest.raises(UsageError, match=rf"started by version {version}.*protocol.*%openclaw stop shared"):
        MasterNode.attach()
    assert path.read_text() == written
    path.write_text(before)
    check_and_leave(MasterNode.attach())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_the_cluster_of_another_user_is_left_alone(waiting: Path) -> None:
    directory = waiting / "shared"
    written = (directory / "openclaw-cluster.json").read_text()
    uses: list[Callable[[], object]] = [
        lambda: MasterNode.attach("shared"),
        lambda: current_session().stop("shared"),
        MasterNode(name="shared").start,
    ]
    give(directory, 65534)
    try:
        for use in uses:
            with pytest.raises(UsageError, match="belongs to another user"):
                use()
    finally:  # else nobody would find it to end it
        give(directory, 0)
    assert (directory / "openclaw-cluster.json").read_text() == written
    check_and_leave(MasterNode.attach())


def give(directory: Path, user: int) -> None:
    for path in (directory, directory / "openclaw-cluster.json"):
        os.chown(path, user, user)


def test_a_scheduler_that_died_meanwhile_is_told(runtime: Path) -> None:
    """The hub lives, so that all seems well until a message does not arrive."""
    started().detach()
    (note,) = read_notes()
    pid = controllers(note["cluster_id"])[2]
    kill(pid)
    with pytest.raises(StartError, match=rf"controller is gone .*{pid}.*%openclaw stop shared"):
        MasterNode.attach()
    assert current_session().stop("shared") > 0
    assert processes_of(note["cluster_id"]) == []


def test_a_cluster_that_is_attached_to_meanwhile_is_not_ended_by_name(
    waiting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who ends it has seen it without an owner, and then had to wait for the one who attaches."""
    (note,) = read_notes()
    told: list[BaseException] = []
    waits = threading.Event()

    def locked_late(directory: str) -> AbstractContextManager[None]:
        waits.set()
        return locked(directory)

    def end() -> None:
        try:
            current_session().stop("shared")
        except AlreadyStartedError as error:
            told.append(error)

    monkeypatch.setattr(files, "locked", locked_late)
    ender = threading.Thread(target=end)
    with locked(note["directory"]):
        ender.start()
        assert waits.wait(HANG_SECONDS)
        files.ClusterFiles(note["directory"], note["cluster_id"])._write_note("shared")  # as an attach does
    ender.join(HANG_SECONDS)
    assert len(told) == 1
    assert f"belongs to process {os.getpid()}" in str(told[0])
    files.ClusterFiles(note["directory"], note["cluster_id"]).let_go("shared")
    check_and_leave(MasterNode.attach())


@pytest.mark.soak
def test_the_guardian_of_a_cluster_that_is_ended_by_name_ends_too(runtime: Path) -> None:
    own(KILL, lease=600.0, killed=True)
    guardian = json.loads((runtime / "shared" / "guardian.json").read_text())
    assert create_time(guardian["pid"]) == guardian["create_time"]
    assert current_session().stop("shared") > 0
    until(lambda: create_time(guardian["pid"]) != guardian["create_time"])
    assert list(runtime.iterdir()) == []
