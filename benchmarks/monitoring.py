"""What watching costs: the same strategy cell with its measuring and telling switched off.

Off means that nothing is told to the notebook and no clock is read; the cell, the workers and the sums are the same.
The two take turns within the same processes.
"""

from __future__ import annotations

import os

from _common import Row, notebook_shell, quiet, report, start_ours, take_turns, use_environment
from data_parallel import CNN, Job, Ours

_ROUNDS = 25

_SWITCH = """
import openclaw_nb.engine.steps.measure as measure
from openclaw_nb.engine.steps.clock import StepClock

class NoClock(StepClock):
    def fetching(self, batches): return iter(batches)
    def arrive(self): pass
    def leave(self): pass
    def tell(self): return -1.0
    def settle(self, arrivals): pass
    def take(self): return {}

class NoPublisher(measure.SilentPublisher):
    def __init__(self, *given):
        super().__init__(*given)
        self.clock = NoClock()
    def batch(self, num_samples): pass
    def step(self, loss, own, num_bytes): pass

kept = measure.Publisher
"""


def main() -> None:
    use_environment()
    os.environ["OPENCLAW_OVERSUBSCRIBE"] = "1"
    shell = notebook_shell()
    with quiet():
        start_ours(shell)
    job = Job(CNN, 64)
    ours = Ours(shell, job)
    ours.cell("", _SWITCH)

    def seconds(publisher: str) -> float:
        ours.cell("", f"measure.Publisher = {publisher}")
        return ours.seconds()

    turns = {"on": lambda: seconds("kept"), "off": lambda: seconds("NoPublisher")}
    take_turns(turns, 2)
    found = take_turns(turns, _ROUNDS)
    step = {name: [1000 * s / (job.steps - job.warm_up) for s in values] for name, values in found.items()}
    with quiet():
        shell.run_line_magic("openclaw", "stop")
    report("monitoring", [Row("a step, watched", "ms", step["on"], step["off"], "not watched", "<= 1.01x")])


if __name__ == "__main__":
    main()
