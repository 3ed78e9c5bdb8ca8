"""The files of a cluster: its directory, the note that describes it, the folder for variables.

    <jupyter runtime dir>/openclaw/<name>/     profile directory of ipyparallel, mode 0700
        openclaw-cluster.json                  who owns the cluster
    /dev/shm/openclaw-<id>/                    variables on their way (made when first needed)

Knows paths and what is written there; does not know processes beyond whether an owner still lives.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_nb.cluster.guardian import MARKER_FILE
from openclaw_nb.core.errors import AlreadyStartedError, UsageError

_SHARED_MEMORY = Path("/dev/shm")
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

    def _write_note(self, name: str) -> None:
        note = {
            "cluster_id": self.cluster_id,
            "name": name,
            "owner_pid": os.getpid(),
            "owner_started": process_start(os.getpid()),
            "started": time.time(),
        }
        path = Path(self.directory) / MARKER_FILE
        path.touch(mode=0o600)
        path.write_text(json.dumps(note))

    def exchange(self) -> str:
        """Return the folder for variables on their way, in shared memory where there is some."""
        base = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(self.directory)
        folder = base / f"openclaw-{self.cluster_id}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return str(folder)

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(_SHARED_MEMORY / f"openclaw-{self.cluster_id}", ignore_errors=True)


def read_notes() -> list[dict[str, Any]]:
    """Return the note of each cluster of this user, with ``alive`` telling whether its owner runs."""
    notes = []
    for path in sorted(runtime_directory().glob(f"*/{MARKER_FILE}")):
        try:
            note = json.loads(path.read_text())
        except (OSError, ValueError):  # removed or half-written meanwhile
            continue
        start = process_start(note["owner_pid"])
        note["alive"] = start is not None and abs(start - note["owner_started"]) < 1
        note["directory"] = str(path.parent)
        notes.append(note)
    return notes


def _clear_stale(path: Path, name: str) -> None:
    """Remove the directory of a cluster of this name whose owner is gone."""
    note = next((n for n in read_notes() if n["directory"] == str(path)), None)
    if note is not None and note["alive"]:
        raise AlreadyStartedError(f"A cluster named {name!r} runs already (owner pid {note['owner_pid']}).")
    if note is not None:
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        raise UsageError(f"{path} exists and is no cluster's: choose another name, or remove it.")
