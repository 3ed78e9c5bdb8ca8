"""The files of a cluster: its directory, the note that describes it, the folder for variables.

    <jupyter runtime dir>/openclaw/<name>/     profile directory of ipyparallel, mode 0700
        openclaw-cluster.json                  who owns the cluster
        state.json                             what a new owner needs to take it over
        variables/                             variables on their way that do not fit into shared memory
    /dev/shm/openclaw-<id>/                    variables on their way (made when first needed)

Knows paths and what is written there, and of processes only who owns a cluster; `end_abandoned` ends one without owner.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openclaw_nb._version import __version__
from openclaw_nb.cluster.guardian import MARKER_FILE, locked
from openclaw_nb.cluster.ownership import end_processes, processes_of
from openclaw_nb.core.errors import (
    AlreadyStartedError,
    NotStartedError,
    ResourceError,
    UsageError,
    unknown_name,
)
from openclaw_nb.protocol.messages import PROTOCOL_VERSION

_SHARED_MEMORY = Path("/dev/shm")
_STATE_FILE = "state.json"
_VARIABLES_FOLDER = "variables"
_END_GRACE_SECONDS = 2.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def runtime_directory() -> Path:
    """Return where clusters of this user keep their files."""
    from jupyter_core.paths import jupyter_runtime_dir

    return Path(os.environ.get("OPENCLAW_RUNTIME_DIR") or Path(jupyter_runtime_dir()) / "openclaw")


def process_start(pid: int) -> float | None:
    """Return when a process started (seconds since the epoch), or None when it is gone."""
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


@dataclass
class ClusterFiles:
    """The files of one cluster.

    Attributes
    ----------
    directory : str
        Profile directory for ipyparallel.
    cluster_id : str
        Random id of the cluster.
    """

    directory: str
    cluster_id: str
    _removed: bool = field(default=False, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    @classmethod
    def create(cls, cluster_id: str, name: str) -> ClusterFiles:
        """Make the directory and its note.

        Raises
        ------
        AlreadyStartedError
            When a cluster of this name runs.
        UsageError
            When the directory cannot be written.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot name a cluster: use letters, digits, '-', '_' and '.', at most 64."
            )
        path = runtime_directory() / name
        _clear_stale(path, name)
        try:
            path.mkdir(parents=True, mode=0o700)
            files = cls(str(path), cluster_id)
            files._write_note(name)
        except OSError as error:
            raise UsageError(
                f"The cluster's directory {path} cannot be written: {error.strerror}. "
                "Set OPENCLAW_RUNTIME_DIR to a directory that can be."
            ) from error
        return files

    @classmethod
    @contextlib.contextmanager
    def take_over(cls, name: str | None) -> Iterator[tuple[ClusterFiles, dict[str, Any]]]:
        """Make a cluster without an owner this process's; yield its files and what `save_state` has written.

        Nobody else takes or ends it during the ``with`` block. When the block raises, nobody owns the cluster again.

        Parameters
        ----------
        name : str or None
            Which; not needed where there is one.

        Raises
        ------
        UsageError
            When there is none, several, or it belongs to another version of this package.
        AlreadyStartedError
            When another process owns it.
        """
        with _held(_choose(name)) as note:
            _check_version(note)
            files = cls(note["directory"], note["cluster_id"])
            state = _read_state(Path(files.directory), note)
            files._write_note(note["name"])
            try:
                yield files, state
            except BaseException:
                files._write_note(note["name"], detached=True)
                raise

    def _write_note(self, name: str, *, detached: bool = False) -> None:
        note = {
            "cluster_id": self.cluster_id,
            "name": name,
            "version": __version__,
            "protocol": PROTOCOL_VERSION,
            "owner_pid": os.getpid(),
            "owner_started": process_start(os.getpid()),
            "detached": detached,
            "written": time.time(),
        }
        write_private(Path(self.directory) / MARKER_FILE, note)

    def save_state(self, state: dict[str, Any]) -> None:
        """Keep what a new owner needs."""
        write_private(Path(self.directory) / _STATE_FILE, state)

    def let_go(self, name: str) -> None:
        """Note that nobody owns the cluster from now on."""
        with locked(self.directory):
            self._write_note(name, detached=True)

    def exchange(self) -> list[str]:
        """Return folders for variables on their way: in shared memory where there is some, then on disk.

        Raises
        ------
        NotStartedError
            When the cluster's files have been removed.
        """
        folders = [Path(self.directory) / _VARIABLES_FOLDER]
        if os.access(_SHARED_MEMORY, os.W_OK):
            folders.insert(0, self._in_memory)
        self._make(folders)
        return [str(folder) for folder in folders]

    def shared_memory(self) -> Path:
        """Return the folder for shared memory.

        Raises
        ------
        NotStartedError
            When the cluster's files have been removed.
        ResourceError
            When the host has no ``/dev/shm`` that this user may write to.
        """
        if not os.access(_SHARED_MEMORY, os.W_OK):
            raise ResourceError(
                f"Shared memory lies in {_SHARED_MEMORY}, which this user cannot write to here."
            )
        self._make([self._in_memory])
        return self._in_memory

    def _make(self, folders: Iterable[Path]) -> None:
        with self._lock:  # a folder that is made while the cluster ends would stay
            if self._removed:
                raise NotStartedError("The cluster has ended: its files are removed.")
            for folder in folders:
                folder.mkdir(mode=0o700, exist_ok=True)

    def remove(self) -> None:
        """Remove everything."""
        with self._lock:
            self._removed = True
            shutil.rmtree(self.directory, ignore_errors=True)
            shutil.rmtree(self._in_memory, ignore_errors=True)

    @property
    def _in_memory(self) -> Path:
        return _SHARED_MEMORY / f"openclaw-{self.cluster_id}"


def end_abandoned(name: str) -> int:
    """End the processes of a cluster that has no owner, and remove its files; return how many there were.

    Parameters
    ----------
    name : str
        Which.

    Raises
    ------
    UnknownNameError
        When there is none of this name.
    AlreadyStartedError
        When a process that runs owns it.
    """
    with _held(_find(name, read_notes())) as note:
        ended = end_processes(note["cluster_id"], grace_seconds=_END_GRACE_SECONDS)
        ClusterFiles(note["directory"], note["cluster_id"]).remove()
    return len(ended)


def write_private(path: Path, content: dict[str, Any]) -> None:
    """Replace a file as a whole; it is this user's alone."""
    new = path.with_suffix(".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
    os.replace(new, path)


def read_notes() -> list[dict[str, Any]]:
    """Return the note of each cluster of this user.

    ``alive`` tells whether its owner runs, ``runs`` whether any process of it does.
    """
    notes = []
    for path in sorted(runtime_directory().glob(f"*/{MARKER_FILE}")):
        if not _is_mine(path):
            continue
        try:
            note = json.loads(path.read_text())
        except (OSError, ValueError):  # removed or half-written meanwhile
            continue
        start = process_start(note["owner_pid"])
        note["alive"] = start is not None and abs(start - note["owner_started"]) < 1
        note = {"detached": False, "version": "an earlier", "protocol": "an earlier", **note}
        note["runs"] = False
        with contextlib.suppress(UsageError):  # not an id: somebody else has written the file
            note["runs"] = bool(processes_of(note["cluster_id"]))
        note["directory"] = str(path.parent)
        notes.append(note)
    return notes


def _is_mine(path: Path) -> bool:
    """Whether a file or directory is this user's; what somebody else has written is not believed."""
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False


def _check_mine(path: Path) -> None:
    if path.exists() and not _is_mine(path):
        raise UsageError(
            f"The cluster {path.name!r} belongs to another user: only they can attach to it, or end it. "
            "Choose another name for a new one."
        )


@contextlib.contextmanager
def _held(note: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Let nobody else take or end a cluster without an owner; yield its note as it is by then."""
    directory = note["directory"]
    with locked(directory):
        now = next((note for note in read_notes() if note["directory"] == directory), None)
        if now is None or now["cluster_id"] != note["cluster_id"]:
            raise UsageError(f"The cluster {note['name']!r} has just been ended.")
        _check_unowned(now)
        yield now


def _find(name: str, notes: list[dict[str, Any]]) -> dict[str, Any]:
    found = {note["name"]: note for note in notes}
    if name in found:
        return found[name]
    if _NAME.fullmatch(name):
        _check_mine(runtime_directory() / name)
    raise unknown_name("cluster", name, found)


def _choose(name: str | None) -> dict[str, Any]:
    running = [note for note in read_notes() if note["runs"]]
    if name is not None:
        return _find(name, running)
    free = [note for note in running if note["detached"] or not note["alive"]]
    if len(free) != 1:
        what = "Several clusters wait" if free else "No cluster waits"
        names = ", ".join(note["name"] for note in free or running) or "none"
        raise UsageError(f"{what} for an owner. Say which: %openclaw attach NAME. Those that run: {names}.")
    return free[0]


def _read_state(path: Path, note: dict[str, Any]) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((path / _STATE_FILE).read_text())
    except (OSError, ValueError):
        raise UsageError(
            f"The cluster {note['name']!r} was never started to its end, so there is nothing to take up. "
            f"End it (%openclaw stop {note['name']}) and start a new one."
        ) from None
    return state


def _check_unowned(note: dict[str, Any]) -> None:
    if note["alive"] and not note["detached"]:
        raise AlreadyStartedError(
            f"The cluster {note['name']!r} belongs to process {note['owner_pid']}, which is running. Detach it there "
            "(%openclaw detach), or end that notebook's kernel."
        )


def _check_version(note: dict[str, Any]) -> None:
    theirs, ours = (note["version"], note["protocol"]), (__version__, PROTOCOL_VERSION)
    if theirs != ours:
        told = [f"{version} (protocol {protocol})" for version, protocol in (theirs, ours)]
        raise UsageError(
            f"The cluster {note['name']!r} was started by version {told[0]} of openclaw_nb, and this is {told[1]}. "
            f"Use that version, or end the cluster (%openclaw stop {note['name']}) and start a new one."
        )


def _clear_stale(path: Path, name: str) -> None:
    """Remove the directory of a cluster of this name whose owner is gone."""
    _check_mine(path)
    note = next((n for n in read_notes() if n["directory"] == str(path)), None)
    if note is not None and note["alive"] and not note["detached"]:
        raise AlreadyStartedError(f"A cluster named {name!r} runs already (owner pid {note['owner_pid']}).")
    if note is not None and note["runs"]:
        raise AlreadyStartedError(
            f"A cluster named {name!r} runs already: %openclaw attach {name} takes it up, "
            f"%openclaw stop {name} ends it."
        )
    if note is not None:
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        raise UsageError(f"{path} exists and is no cluster's: choose another name, or remove it.")
