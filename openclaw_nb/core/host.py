"""What this process may use of its host: cores and memory, within the limits of its container; who has a port.

Reads ``/proc`` and control groups of both versions; knows nothing of workers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """Return how many cores this process may keep busy.

    Parameters
    ----------
    root : Path
        Where ``proc`` and ``sys`` are looked for.

    Returns
    -------
    int
        The cores of its affinity, no more than the whole cores of its container's CPU quota, at least 1.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for level in _cgroup_levels("cpu", root) if (quota := _cpu_quota(level)) is not None]
    return max(1, min([affinity, *map(int, quotas)]))


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Return how much memory new processes can take: the host's, no more than the container has left."""
    left = [limit - used for limit, used in _memory_limits(root)]
    return max(0, min([int(psutil.virtual_memory().available), *left]))


def total_memory_bytes(root: Path = _ROOT) -> int:
    """Return the memory of the host, or the container's limit where that is smaller."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _memory_limits(root))])


def listening_pids(port: int) -> list[int | None]:
    """Return the processes that listen on a TCP port of this host, None for another user's; none when not known."""
    try:
        sockets = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return []
    return [
        each.pid
        for each in sockets
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
    ]


def _cgroup_levels(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders that limit this process, its own first, for both versions of control groups."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if names else "")
        # In a container the path may be the host's and not exist here: then the folders above it count.
        folder = base if ".." in path else base / path.lstrip("/")
        yield from (level for level in (folder, *folder.parents) if level.is_relative_to(base))


def _cpu_quota(level: Path) -> float | None:
    words = text_of(level / "cpu.max").split() or [
        text_of(level / "cpu.cfs_quota_us").strip(),
        text_of(level / "cpu.cfs_period_us").strip(),
    ]
    quota, period = (number_in(word) for word in words[:2])
    return quota / period if quota is not None and quota > 0 and period else None


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use in bytes of each level that has a limit; pages that can be dropped do not count."""
    for level in _cgroup_levels("memory", root):
        for limit_file, used_file, droppable in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = number_in(text_of(level / limit_file)), number_in(text_of(level / used_file))
            if limit is not None and used is not None:
                statistics = dict(line.split() for line in text_of(level / "memory.stat").splitlines())
                yield int(limit), int(used) - int(statistics.get(droppable, 0))


def text_of(path: Path) -> str:
    """Return a file's text; "" when it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def number_in(word: str) -> float | None:
    """Read a number; None for ``max``, ``[N/A]``, ``[Not Supported]`` and an empty word."""
    try:
        return float(word)
    except ValueError:
        return None
