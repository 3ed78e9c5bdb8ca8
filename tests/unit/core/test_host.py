"""Cores and memory that may be used, from files as control groups write them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from openclaw_nb.core import host


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_cores_and_memory_without_container_are_those_of_the_process(tmp_path: Path) -> None:
    assert host.usable_cores(tmp_path) == len(os.sched_getaffinity(0))
    assert host.total_memory_bytes(tmp_path) == psutil.virtual_memory().total


@pytest.mark.parametrize("quota", ["150000 100000", "50000 100000", "100000 100000"])
def test_cpu_quota_counts_whole_cores_and_at_least_one(tmp_path: Path, quota: str) -> None:
    v2 = write(tmp_path / "v2", {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": quota})
    assert host.usable_cores(v2) == 1
    microseconds, period = quota.split()
    v1 = {
        "proc/self/cgroup": "3:cpuset:/\n2:cpu,cpuacct:/docker/x\n1:memory:/m\n0::/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": microseconds + "\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": period + "\n",
    }
    assert host.usable_cores(write(tmp_path / "v1", v1)) == 1


@pytest.mark.parametrize("quota", ["max 100000", "6400000 100000"])
def test_a_wide_quota_leaves_the_affinity(tmp_path: Path, quota: str) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota})
    assert host.usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_memory_is_bounded_by_the_tightest_level_without_droppable_pages(tmp_path: Path) -> None:
    v2 = {
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/pod/memory.max": str(300 * 2**20),
        "sys/fs/cgroup/pod/memory.current": str(100 * 2**20),
        "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {30 * 2**20}\n",
        "sys/fs/cgroup/pod/box/memory.max": "max\n",
        "sys/fs/cgroup/pod/box/memory.current": "5\n",
    }
    write(tmp_path, v2)
    assert host.available_memory_bytes(tmp_path) == 230 * 2**20
    assert host.total_memory_bytes(tmp_path) == 300 * 2**20


def test_memory_limit_of_version_1_where_the_path_is_the_hosts(tmp_path: Path) -> None:
    v1 = {
        "proc/self/cgroup": "4:memory:/docker/not-here\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(200 * 2**20),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(250 * 2**20),
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 7\ntotal_inactive_file 0\n",
    }
    write(tmp_path, v1)
    assert host.total_memory_bytes(tmp_path) == 200 * 2**20
    assert host.available_memory_bytes(tmp_path) == 0
