"""Memory that the notebook and the workers share: published once, seen by all, gone with the cluster."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from openclaw_nb.core.errors import ResourceError, UnknownNameError, UsageError

from .conftest import Lab

pytestmark = pytest.mark.cluster


def test_the_notebook_publishes_and_the_workers_take_without_a_copy(pair: Lab) -> None:
    memory = pair.master.create_shared_memory(size_gb=0.01, devices=["CPU-0", "CPU-1"])
    images = np.random.default_rng(0).normal(size=(1000, 128)).astype(np.float32)
    memory.put("images", images)
    memory.put("sums", np.zeros(2), writable=True)
    pair.master.push({"memory": memory, "memory_id": memory.id})
    pair.good(
        "import openclaw_nb, torch\n"
        "images = openclaw_nb.attach_shared_memory(memory_id).tensor('images')\n"
        "before = images.sum(dtype=torch.float64).item()\n"
        "memory.tensor('sums')[rank] = before\n"
        "memory.put(f'from {rank}', images[rank])"
    )
    # Every worker wrote into the same memory, and the notebook sees it.
    assert memory.array("sums").tolist() == [pair.pull("before", rank) for rank in (0, 1)]
    assert memory.array("sums")[0] == pytest.approx(images.sum(dtype=np.float64), rel=1e-12)
    for rank in (0, 1):
        np.testing.assert_array_equal(memory.array(f"from {rank}"), images[rank])
    worker = psutil.Process(pair.master.workers[0].pid)
    assert any(memory.id in mapped.path for mapped in worker.memory_maps(grouped=False))
    memory.free()


def test_a_worker_that_dies_takes_nothing_with_it(pair: Lab) -> None:
    memory = pair.master.create_shared_memory(0.001)
    memory.put("x", [1.0, 2.0], writable=True)
    pair.master.push({"memory": memory})
    died = pair.run(
        "import os\nx = memory.tensor('x')\nif rank == 1:\n    x += 1\n    os.kill(os.getpid(), 9)"
    )
    assert not died.ok
    assert memory.array("x").tolist() == [2.0, 3.0]
    pair.master.push({"memory": memory})
    pair.good("again = memory.tensor('x').tolist()")
    assert pair.pull("again", 1) == [2.0, 3.0]
    memory.free()


def test_bad_input_takes_nothing(pair: Lab) -> None:
    folder = Path(f"/dev/shm/openclaw-{pair.master.cluster_id}")
    before = sorted(folder.glob("memory-*"))
    with pytest.raises(ResourceError, match=r"Shared memory of 16384\.0 TiB: of .* are free"):
        pair.master.create_shared_memory(2.0**24)
    with pytest.raises(UsageError, match="size_gb=-1"):
        pair.master.create_shared_memory(-1)
    with pytest.raises(UnknownNameError, match="GPU-7"):
        pair.master.create_shared_memory(0.001, devices=["GPU-7"])
    assert sorted(folder.glob("memory-*")) == before
    only = pair.master.create_shared_memory(0.001, devices=["CPU-0"])
    pair.master.push({"memory_id": only.id})
    result = pair.run("import openclaw_nb\nopenclaw_nb.attach_shared_memory(memory_id)")
    assert {rank: failure.error_type for rank, failure in result.failures.items()} == {1: "UsageError"}
    only.free()
