"""The cause that is named is the one that was put in; the numbers are those of a sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from openclaw_nb.config.schema import KEYS
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.plan.advice import Situation, advise, efficiency, headline, scaling, shares
from openclaw_nb.protocol.messages import Measured

CALLS = {"balance_load", "num_workers"}


@dataclass
class Load:
    worker: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    steps: int = 10
    num_bytes: int = 0


def run(*splits: tuple[float, float, float, float], **more: Any) -> Situation:
    parts = ("data", "compute", "wait", "transfer")
    num_bytes = more.pop("num_bytes", 0)
    loads = [Load(n, dict(zip(parts, s, strict=True)), num_bytes=num_bytes) for n, s in enumerate(splits)]
    return Situation(workers=loads, **{"num_cores": 8, **more})


GOOD = (5.0, 90.0, 2.0, 3.0)


def test_a_good_run_needs_no_advice() -> None:
    assert advise(run(GOOD, GOOD)) == []
    assert headline(run(GOOD, GOOD)) == ""
    assert advise(run((0, 0, 0, 0), (0, 0, 0, 0))) == []
    assert advise(Situation(workers=())) == []


@pytest.mark.parametrize(
    ("situation", "cause", "key", "said"),
    [
        (
            run((60, 40, 0, 0), options={"async_io": True}),
            "data",
            "num_workers",
            "let more processes load them",
        ),
        (run((60, 40, 0, 0)), "data", "parallel.async_io", "60 % of the time goes to waiting for batches"),
        (
            run((0, 50, 0, 50), (0, 50, 0, 50)),
            "transfer",
            "strategy.sync_frequency",
            "50 % of the time goes",
        ),
        (
            run((0, 50, 0, 50), (0, 50, 0, 50), options={"fusion_buffer_size": 1000}, num_bytes=10 * 4500),
            "transfer",
            "parallel.fusion_buffer_size",
            "in 5 messages a step",
        ),
        (
            run((0, 50, 50, 0), (0, 98, 2, 0)),
            "straggler",
            "balance_load",
            "worker-1 is the slowest, and the other waits 50 %",
        ),
        (
            run((0, 50, 50, 0), (0, 50, 50, 0), (55, 43, 2, 0)),
            "straggler",
            "balance_load",
            "worker-2 is the slowest, at loading",
        ),
        (
            run((0, 60, 40, 0), (0, 60, 40, 0)),
            "wait",
            "strategy.sync_frequency",
            "now one worker, now another",
        ),
        (
            run((0, 50, 50, 0), (0, 90, 10, 0), strategy="model_parallel", takes=()),
            "wait",
            "strategy.name",
            "take strategy.name: pipeline",
        ),
        (
            run((0, 60, 40, 0), (0, 60, 40, 0), strategy="pipeline", takes={"microbatches"}),
            "wait",
            "strategy.microbatches",
            "the stages before and after",
        ),
        (
            run((0, 60, 0, 40), (0, 60, 0, 40), strategy="sharded", takes={"accumulate"}),
            "transfer",
            "strategy.accumulate",
            "40 % of the time goes to transfer",
        ),
        (run((0, 60, 0, 40), (0, 60, 0, 40), takes=()), "transfer", "strategy.name", "take larger batches"),
        (run(GOOD, GOOD, GOOD, num_cores=2), "cores", "parallel.workers", "3 workers share 2 cores"),
        (run(GOOD, GOOD, threads_per_worker=8), "cores", "parallel.omp_threads", "parallel.omp_threads: 4"),
        (
            run(GOOD, GOOD, on_gpus=True, communication="gloo"),
            "nccl",
            "parallel.communication",
            "sums of 2 GPUs go by gloo in place of NCCL",
        ),
    ],
)
def test_the_cause_and_the_key(situation: Situation, cause: str, key: str, said: str) -> None:
    (found,) = advise(situation)
    assert (found.cause, found.key) == (cause, key)
    assert said in str(found)
    assert str(found).endswith(".")
    assert found.key in KEYS or found.key in CALLS, "a key that can be set"
    assert found.key.rpartition(".")[2] in found.change or found.key == "strategy.name"


def test_the_worst_comes_first_with_how_poor_it_is() -> None:
    situation = run((30, 30, 0, 40), (30, 30, 0, 40), num_cores=1)
    assert [each.cause for each in advise(situation)] == ["transfer", "data", "cores"]
    assert efficiency(situation.workers) == pytest.approx(0.6)
    assert headline(situation).startswith(
        "Poor scaling: 2 workers do the work of 1.2. 40 % of the time goes to"
    )


def test_one_worker_scales_by_definition() -> None:
    assert scaling(run((0, 50, 0, 50)).workers) == ""
    assert shares(()) == {}
    assert efficiency(()) is None


def test_histories_are_taken_as_they_are() -> None:
    monitor = Monitor()
    for worker in (0, 1):
        seconds = {"data": 0.0, "compute": 0.5, "wait": 0.0, "transfer": 0.5}
        told = {"worker": worker, "run_id": "a", "seq": 1, "at": 1.0, "steps": 1, "samples": 1, "loss": None}
        monitor.take(Measured(**told, seconds=seconds))
    history = monitor.latest()
    assert history is not None
    (found,) = advise(Situation(workers=history.workers, num_cores=2))
    assert found.cause == "transfer"
