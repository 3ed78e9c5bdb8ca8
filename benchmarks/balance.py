"""Training speed when one of two workers is three times slower: batches shared out equally, and by measured speed.

The slow worker sleeps at each step until its work has taken three times as long (`MasterNode.set_slowdown`), so that
this shows on two equal cores. The peer is the equal split, which is as fast as the slow worker lets it be.

The limit is the sum of the two workers' speeds, taken in two ways: in cells on each worker alone, with the same global
batch, and as what each has worked off per second of its own work while both ran, balanced. In the first nobody shares
caches and memory with anybody, so that it is out of reach by as much as two cores disturb each other.

Two models: a small CNN, and one of which each sample costs a millisecond of sleep, so that the workers do not disturb
each other: it shows what the shares themselves leave of the limit.

In a turn: an equal cell; `balance_load()`, by what was measured there; a balanced cell; both once more, as the first
shares are not yet right where a step costs time that does not depend on the samples; each worker alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from _common import NUM_WORKERS, Row, report, take_turns, use_environment
from data_parallel import _LOADER, _LOOP, CNN, Job

from openclaw_nb.cluster.devices import list_devices
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.protocol.messages import StrategySpec

_FACTOR = 3.0
_ROUNDS = 5
_ASLEEP = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
batch_size = 128
data = TensorDataset(torch.randn(steps * batch_size, 32), torch.randint(10, (steps * batch_size,)))
class Asleep(nn.Linear):
    def forward(self, x):
        time.sleep(1e-3 * len(x))
        return super().forward(x)
model = Asleep(32, 10)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
_JOBS = {
    "small CNN": Job(CNN.replace("batch_size = 64", "batch_size = 128"), 128, steps=14, warm_up=4),
    "1 ms a sample": Job(_ASLEEP, 128, steps=14, warm_up=4),
}
_STRATEGY = StrategySpec(name="data_parallel")


class Uneven:
    """Two workers, the second of which is slow."""

    def __init__(self, master: MasterNode, job: Job) -> None:
        self._master, self._job = master, job
        self.shares: list[float] = []
        self.sums: list[float] = []
        self.run(job.setup + _LOADER, None, None)
        master.set_slowdown("worker-1", _FACTOR)

    def run(self, source: str, strategy: StrategySpec | None, targets: Sequence[int] | None) -> None:
        result = self._master.run_cell(source, strategy=strategy, targets=targets).wait()
        if result is None or not result.ok:
            raise RuntimeError(f"The cell has failed: {result}")

    def speed(self, targets: Sequence[int] | None = None) -> float:
        """Run the cell; return samples/s of its counted steps."""
        self.run(_LOOP, _STRATEGY, targets)
        rank = targets[0] if targets else 0
        seconds = float(self._master.pull(["seconds"], rank)["seconds"])
        return (self._job.steps - self._job.warm_up) * self._job.batch_size / seconds

    def equal(self) -> float:
        self._master.share_equally()
        return self.speed()

    def balanced(self) -> float:
        """Balance by what the cell before has shown."""
        fast, _ = self._master.balance_load()
        self.shares.append(fast.share)
        speed = self.speed()
        self.sums.append(sum(each.samples_per_second for each in self._master.balance_load()))
        return speed

    def limit(self) -> float:
        return sum(self.speed([rank]) for rank in range(NUM_WORKERS))


def measure(what: str, job: Job) -> list[Row]:
    with MasterNode() as master:
        master.start_workers(list_devices()[:NUM_WORKERS])
        uneven = Uneven(master, job)
        twice = {"once": uneven.balanced, "again": uneven.balanced}
        sides = {"equal": uneven.equal, **twice, "limit": uneven.limit}
        take_turns(sides, 1)
        uneven.shares.clear()
        uneven.sums.clear()
        speeds = take_turns(sides, _ROUNDS)
    unit, equal, balanced, limit = "samples/s", speeds["equal"], speeds["again"], speeds["limit"]
    return [
        Row(f"{what}: balanced, beside both alone", unit, balanced, limit, "both alone", ">= 0.95x"),
        Row(
            f"{what}: beside both speeds then", unit, balanced, uneven.sums[1::2], "sum of speeds", ">= 0.95x"
        ),
        Row(f"{what}: balanced but once, beside both alone", unit, speeds["once"], limit, "both alone"),
        Row(f"{what}: beside equal shares", unit, balanced, equal, "equal shares"),
        Row(f"{what}: equal shares, beside both alone", unit, equal, limit, "both alone"),
        Row(f"{what}: the fast worker's share", "of 1", uneven.shares[1::2]),
    ]


def main() -> None:
    use_environment()
    report("balance", [row for what, job in _JOBS.items() for row in measure(what, job)])


if __name__ == "__main__":
    main()
