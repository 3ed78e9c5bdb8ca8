"""Shared memory: a tensor of 64 MiB published by the notebook, and taken by two workers.

The peer of publishing is a plain copy of as many bytes between two buffers that have been written before; with Ray
installed, `ray.put` of the same array, and `ray.get` in a worker for taking it.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import numpy as np
from _common import (
    NUM_WORKERS,
    Row,
    notebook_shell,
    percentile,
    quiet,
    report,
    start_ours,
    take_turns,
    use_environment,
)

_ROUNDS = 30
_BYTES = 64 * 2**20
_VALUE: dict[str, Any] = {"judged": "value"}

_ATTACH = """
import time
import openclaw_nb
taken = []
for _ in range({rounds}):
    begun = time.perf_counter()
    tensor = openclaw_nb.attach_shared_memory(memory_id).tensor("x")
    taken.append(time.perf_counter() - begun)
"""


class Publisher:
    """Puts one array again and again, under the same name."""

    def __init__(self, memory: Any, array: np.ndarray[Any, Any]) -> None:
        self._memory, self._array = memory, array

    def __call__(self) -> float:
        if "x" in self._memory:
            self._memory.delete("x")
        begun = time.perf_counter()
        self._memory.put("x", self._array)
        return time.perf_counter() - begun


class Copier:
    """Copies the array into a buffer that has all its pages."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array, self._target = array, np.ones_like(array)

    def __call__(self) -> float:
        begun = time.perf_counter()
        np.copyto(self._target, self._array)
        return time.perf_counter() - begun


def _ray_sides(array: np.ndarray[Any, Any]) -> tuple[list[float], list[float]]:
    """Return the seconds that Ray takes to put the array, and to get it in a worker; nothing where it is missing."""
    if importlib.util.find_spec("ray") is None:
        return [], []
    import ray

    ray.init(num_cpus=NUM_WORKERS, include_dashboard=False, logging_level="error")

    @ray.remote
    def taking(reference: list[Any]) -> float:
        begun = time.perf_counter()
        ray.get(reference[0])
        return time.perf_counter() - begun

    put, got = [], []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        reference = ray.put(array)
        put.append(time.perf_counter() - begun)
        got.append(ray.get(taking.remote([reference])))
        del reference
    ray.shutdown()
    return put, got


def main() -> None:
    use_environment()
    array = np.random.default_rng(0).normal(size=_BYTES // 8)
    with quiet():
        shell = notebook_shell()
        start_ours(shell)
        from openclaw_nb.session import current_session

        master = current_session().master
        memory = master.create_shared_memory(2 * _BYTES / 2**30)
        publish, copy = Publisher(memory, array), Copier(array)
        publish(), copy()
        sides = take_turns({"ours": publish, "copy": copy}, _ROUNDS)
        shell.user_ns["memory_id"] = memory.id
        shell.run_line_magic("openclaw", "push memory_id")
        shell.run_cell_magic("openclaw_parallel", "", _ATTACH.format(rounds=_ROUNDS))
        taken = [master.pull(["taken"], rank)["taken"] for rank in range(NUM_WORKERS)]
        shell.run_line_magic("openclaw", "stop")
        ray_put, ray_got = _ray_sides(array)
    attached = [seconds for each in taken for seconds in each]
    rows = [
        Row("put 64 MiB", "s", sides["ours"], sides["copy"], "a copy, warm", "<= 1.67x"),
        Row(
            "attach and take it on a worker, median",
            "s",
            [percentile(attached, 50)],
            reach="<= 0.001",
            **_VALUE,
        ),
        Row("the slowest of these", "s", [max(attached)], **_VALUE),
    ]
    if ray_put:
        rows += [
            Row("put 64 MiB", "s", sides["ours"], ray_put, "ray.put"),
            Row("attach and take it on a worker", "s", attached[:_ROUNDS], ray_got, "ray.get"),
        ]
    report("shared_memory", rows)


if __name__ == "__main__":
    main()
