"""Training speed when one of two workers is three times slower: batches shared out equally, and by measured speed.

The slow worker sleeps at each step until its work has taken three times as long (`MasterNode.set_slowdown`), so that
this shows on two equal cores. The peer is the equal split, which is as fast as the slow worker lets it be.

The limit is the sum of the two workers' speeds, taken in two ways: in cells on each worker alone, with the same global
batch, and as what each has worked off per second of its own work while both ran, balanced. In the first nobody shares
caches and memory with anybody, so that it is out of reach by as much as two cores disturb each other.

In a turn: an equal cell; `balance_load()`, by what was measured there; a balanced cell; each worker alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from _common import NUM_WORKERS, Row, report, take_turns, use_environment
from data_parallel import _LOADER, _LOOP, CNN, Job

from openclaw_nb.cluster.devices import list_devices
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.protocol.messages import StrategySpec

_FACTOR = 3.0
_ROUNDS = 8
_JOB = Job(CNN.replace("batch_size = 64", "batch_size = 128"), 128, steps=24, warm_up=4)
_STRATEGY = StrategySpec(name="data_parallel")


class Uneven:
    """Two workers, the second of which is slow."""

    def __init__(self, master: MasterNode) -> None:
        self._master = master
        self.shares: list[float] = []
        self.sums: list[float] = []
        self.run(_JOB.setup + _LOADER, None, None)
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
        return (_JOB.steps - _JOB.warm_up) * _JOB.batch_size / seconds

    def equal(self) -> float:
        self._master.share_equally()
        return self.speed()

    def balanced(self) -> float:
        """Balance by what the equal cell before has shown."""
        fast, _ = self._master.balance_load()
        self.shares.append(fast.share)
        speed = self.speed()
        self.sums.append(sum(each.samples_per_second for each in self._master.balance_load()))
        return speed

    def limit(self) -> float:
        return sum(self.speed([rank]) for rank in range(NUM_WORKERS))


def main() -> None:
    use_environment()
    with MasterNode() as master:
        master.start_workers(list_devices()[:NUM_WORKERS])
        uneven = Uneven(master)
        sides = {"equal": uneven.equal, "balanced": uneven.balanced, "limit": uneven.limit}
        take_turns(sides, 1)
        uneven.shares.clear()
        uneven.sums.clear()
        speeds = take_turns(sides, _ROUNDS)
    unit, equal, balanced, limit = "samples/s", speeds["equal"], speeds["balanced"], speeds["limit"]
    rows = [
        Row("balanced, beside both alone", unit, balanced, limit, "both alone", ">= 0.95x"),
        Row("balanced, beside both speeds then", unit, balanced, uneven.sums, "sum of speeds", ">= 0.95x"),
        Row("balanced, beside equal shares", unit, balanced, equal, "equal shares"),
        Row("equal shares, beside both alone", unit, equal, limit, "both alone"),
        Row("the fast worker's share of each batch", "of 1", uneven.shares),
    ]
    report("balance", rows)


if __name__ == "__main__":
    main()
