"""A worker that somebody else than the cluster has started ends with the process that started it.

However that process ends: it is watched by a handle that no other process can get the number of. Knows a pid and a
start time, which `openclaw_nb.protocol.placement.LEASH` carries; does not know who that is.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import MutableMapping

from openclaw_nb.protocol.placement import LEASH


def hold(environment: MutableMapping[str, str]) -> threading.Thread | None:
    """Begin to watch, if there is somebody to watch; what this worker starts is not told of it."""
    words = environment.pop(LEASH, "").split()
    if not words:
        return None
    thread = threading.Thread(
        target=_follow, args=(int(words[0]), words[1]), name="openclaw-leash", daemon=True
    )
    thread.start()
    return thread


def _follow(pid: int, started: str) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(0)
    if _start_of(pid) == started:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
    # At once: a cell may hold the main thread for as long as it likes.
    os._exit(0)


def _start_of(pid: int) -> str:
    """Return the start time in ticks since the host booted, as a worker is told it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""
