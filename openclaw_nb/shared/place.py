"""Where shared memory lies on this host: two files in the folder of its cluster, found again by the memory's id.

    /dev/shm/openclaw-<cluster>/memory-<id>         the tensors
    /dev/shm/openclaw-<cluster>/memory-<id>.json    what is where (`openclaw_nb.shared.index`)

The folder ends with the cluster, whatever happens to its owner (`openclaw_nb.cluster.guardian`).
Knows names and who they belong to; does not know what the files hold.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from openclaw_nb.core.errors import UsageError, unknown_name

ROOT = Path("/dev/shm")
_NAME = "memory-"
_ID = re.compile(r"[0-9a-f]{16}")


def new_path(folder: str | Path) -> Path:
    """Return a path that nobody can guess for new shared memory in this folder."""
    return Path(folder) / f"{_NAME}{os.urandom(8).hex()}"


def id_of(path: Path) -> str:
    """Return the id of the shared memory at a path."""
    return path.name.removeprefix(_NAME)


def index_of(path: Path) -> Path:
    """Return where the index of the shared memory at a path is."""
    return path.with_name(f"{path.name}.json")


def list_in(folder: str | Path) -> list[Path]:
    """Return the paths of the shared memory in a folder, the oldest first."""
    found = [path for path in Path(folder).glob(f"{_NAME}*") if _ID.fullmatch(id_of(path))]
    return sorted(found, key=lambda path: (_made(path), path.name))


def find(memory_id: str) -> Path:
    """Return the path of this user's shared memory of this id.

    Raises
    ------
    UnknownNameError
        When there is none.
    UsageError
        When it is another user's.
    """
    if isinstance(memory_id, str) and _ID.fullmatch(memory_id):
        for path in ROOT.glob(f"openclaw-*/{_NAME}{memory_id}"):
            if path.stat().st_uid != os.getuid():
                raise UsageError(f"The shared memory {memory_id!r} belongs to another user.")
            return path
    raise unknown_name("shared memory", str(memory_id), (id_of(path) for path in _mine()))


def _mine() -> Iterator[Path]:
    for folder in ROOT.glob("openclaw-*"):
        if os.access(folder, os.R_OK | os.X_OK):  # else it is another user's
            yield from list_in(folder)


def _made(path: Path) -> float:
    try:
        return path.stat().st_ctime
    except OSError:  # removed meanwhile
        return 0.0
