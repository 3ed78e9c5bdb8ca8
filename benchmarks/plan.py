"""What ``%openclaw plan`` predicts of a step's time, beside what the step then takes, for every strategy there is.

In a turn, for each model: a plan on four workers; then the cell under each strategy of the registry, with all degrees
that the plan names for it. A prediction's error is its difference from the measured time, relative to that. With
``--models mlp,cnn`` and ``--rounds 1`` a part of it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections import defaultdict
from typing import Any

from _common import Row, report, use_environment
from data_parallel import _LOADER, _LOOP, CNN, TRANSFORMER, Job

from openclaw_nb.cluster.devices import Device
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.planning import Plan, choice_of
from openclaw_nb.core.errors import OpenClawError
from openclaw_nb.plan.predict.model import Choice
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.strategies import STRATEGIES

_NUM_WORKERS = 4
_MLP = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
batch_size = 256
data = TensorDataset(torch.randn(steps * batch_size, 256), torch.randint(10, (steps * batch_size,)))
model = nn.Sequential(
    nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
    nn.Linear(512, 10),
)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
"""
_JOBS = {
    "mlp": Job(_MLP, 256, steps=24, warm_up=4),
    "cnn": Job(CNN, 64, steps=16, warm_up=4),
    "transformer": Job(TRANSFORMER, 32, steps=16, warm_up=4),
}


class Bench:
    """One model on its workers."""

    def __init__(self, master: MasterNode, job: Job) -> None:
        self._master, self._job = master, job
        self._run(job.setup + _LOADER)

    def _run(self, source: str, **how: Any) -> None:
        result = self._master.run_cell(source, **how).wait()
        if result is None or not result.ok:
            raise RuntimeError(f"The cell has failed: {result}")

    def plan(self) -> Plan:
        return self._master.plan(_LOOP)

    def measure(self, spec: StrategySpec, num_workers: int) -> float:
        """Return the seconds of a step."""
        self._run(_LOOP, strategy=spec, targets=list(range(num_workers)))
        seconds = float(self._master.pull(["seconds"])["seconds"])
        return seconds / (self._job.steps - self._job.warm_up)


def spec_of(choice: Choice, batch_size: int) -> StrategySpec:
    """Return how a choice that can be run is asked for."""
    if choice.num_workers == 1:
        return StrategySpec(name="data_parallel")
    kind = STRATEGIES[choice.strategy]
    words = {
        "data_parallel_degree": choice.data,
        "tensor_parallel_degree": choice.tensor,
        "microbatches": choice.microbatches,
    }
    known = {field.name for field in dataclasses.fields(kind)}
    spec: StrategySpec = kind(**{word: value for word, value in words.items() if word in known}).spec()
    assert choice_of(spec, choice.num_workers, batch_size) == choice
    return spec


def measure(what: str, job: Job, rounds: int, rows: list[Row]) -> list[float]:
    """Add a row for each choice; return how far the plan's pick was from the best, by round."""
    found: dict[Choice, list[tuple[float, float]]] = defaultdict(list)
    picks = []
    with MasterNode(oversubscribe=True) as master:
        master.start_workers([Device(f"CPU-{i}", "cpu", i, "core") for i in range(_NUM_WORKERS)])
        bench = Bench(master, job)
        for _ in range(rounds):
            plan = bench.plan()
            taken = {}
            for ranked in plan.ranked:
                choice = ranked.prediction.choice
                if ranked.prediction.problem:
                    continue
                spec = spec_of(choice, plan.profile.batch_size)
                try:
                    taken[choice] = bench.measure(spec, choice.num_workers)
                except (RuntimeError, OpenClawError) as error:
                    print(f"{what}: {choice.strategy}, {choice.degrees}: {str(error)[:300]}")
                    continue
                found[choice].append((ranked.prediction.step_seconds, taken[choice]))
            pick = next(r.prediction.choice for r in plan.ranked if r.prediction.choice in taken)
            picks.append(taken[pick] / min(taken.values()))
    for choice, pairs in sorted(found.items()):
        predicted, measured = ([1e3 * pair[i] for pair in pairs] for i in (0, 1))
        rows.append(
            Row(f"{what}: {choice.strategy}, {choice.degrees}", "ms", predicted, measured, "measured")
        )
    return picks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(_JOBS))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    use_environment()
    rows: list[Row] = []
    picks: list[float] = []
    for what in given.models.split(","):
        picks += measure(what, _JOBS[what], given.rounds, rows)
    errors = [abs(ratio - 1) for row in rows for ratio in row.ratios]
    each = [statistics.median(abs(ratio - 1) for ratio in row.ratios) for row in rows]
    rows.append(Row("median error, over all of them", "of 1", errors, reach="<= 0.10", judged="ours"))
    rows.append(Row("error a choice, the median of its turns", "of 1", each))
    rows.append(Row("the plan's pick, beside the best measured", "x", picks, reach="<= 1.05", judged="ours"))
    report("plan", rows)


if __name__ == "__main__":
    main()
