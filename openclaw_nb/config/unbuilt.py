"""Which keys and words of the configuration are read, checked, and not made real yet, and why: the one list of them.

Whoever builds the feature takes its line away here, and adds what the key sets to `effects`.
"""

from __future__ import annotations

_JOIN = "workers join from this host's own processes only: joining from other hosts is not built yet"

UNBUILT_KEYS: dict[str, str] = {
    "network_interface": f"all sockets are on loopback: {_JOIN}",
    "parallel.task_chunk_size": "the task pool and its `map` are not built yet",
}
"""Keys that are accepted and do nothing yet; `%openclaw config --effective` says so."""

UNBUILT_BACKENDS: dict[str, str] = {
    "ssh": f"the backend ssh starts workers on other hosts: {_JOIN}",
    "slurm": f"the backend slurm starts workers on other hosts: {_JOIN}",
}
"""Words of ``parallel.backend`` with which a cluster cannot be started yet."""

REMOTE_MASTER = _JOIN
"""Why ``master.host`` must be loopback."""

REMOTE_WORKER = _JOIN
"""Why ``workers[].ip`` must be this host."""

THREAD_TASKS = (
    "the part of this backend that runs tasks on threads waits for the task pool, which is not built yet"
)
"""What ``parallel.backend: thread`` lacks."""

MEMORY_LIMIT = "a worker's memory is compared with what there is, but not limited by it yet"
"""What a size among ``workers[].capabilities`` lacks."""
