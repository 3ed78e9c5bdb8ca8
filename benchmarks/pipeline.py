"""The bubble of `PipelineScheduler`'s schedules on paced stages, beside torch's own schedules and theory.

A stage sleeps for each micro-batch: 20 ms forward, 20 ms for the input's gradient and 20 ms for the weights', so that
no stage disturbs another on two cores. Beside torch's: the share of a whole step, from barrier to barrier, in which a
device has nothing to sleep for. Beside theory: the share of the time from the first start to the last end in which no
stage is at work, as `PipelineScheduler.bubble` tells it.

    python benchmarks/pipeline.py            2 stages, 8 micro-batches
    python benchmarks/pipeline.py --long     also 4 stages, and 4 and 16 micro-batches
"""

from __future__ import annotations

import sys
from typing import Any

from _common import Row, report, take_turns, use_environment

from openclaw_nb.cluster.devices import Device
from openclaw_nb.cluster.master import MasterNode

_SECONDS = 0.02
_ROUNDS = 3
_SETUP = f"""
import time, torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from openclaw_nb import PipelineScheduler

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        time.sleep(there)
        return x.view_as(x)
    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.back)
        return gradient, None, None

class Paced(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(8))
    def forward(self, x):
        # A path of its own for the weight: its gradient sleeps apart from the input's.
        return Sleep.apply(x, self.seconds, self.seconds) + Sleep.apply(self.weight, 0.0, self.seconds)

torch.set_num_threads(1)
pace = {_SECONDS}
"""
_OURS = """
model = nn.Sequential(*(Paced(pace / {chunks}) for _ in range({stages})))
names = [str(number) for number in range({stages})]
pipeline = PipelineScheduler(names, microbatches={number}, schedule="{schedule}").bind(model)
# All stages have an input's gradient to sleep for, the first as well.
x, y = torch.randn({number}, 8).requires_grad_(), torch.randn({number}, 8)
for _ in range(3):
    dist.barrier()
    begin = time.perf_counter()
    pipeline.step(x, y, F.mse_loss)
    dist.barrier()
    seconds = time.perf_counter() - begin
share = 1 - {number} * 3 * pace / seconds
bubble = pipeline.bubble
"""
_TORCH = """
from torch.distributed import pipelining as pp
from torch.distributed.pipelining import schedules
own = [rank + world_size * chunk for chunk in range({chunks})]
parts = [pp.PipelineStage(Paced(pace / {chunks}), n, {stages}, device) for n in own]
schedule = schedules.{torch}(parts if {chunks} > 1 else parts[0], {number}, loss_fn=F.mse_loss)
x, y = torch.randn({number}, 8).requires_grad_(), torch.randn({number}, 8)
for _ in range(3):
    dist.barrier()
    begin = time.perf_counter()
    last = {{"target": y, "losses": []}} if own[-1] == {stages} - 1 else {{}}
    schedule.step(*([x] if own[0] == 0 else []), **last)
    dist.barrier()
    seconds = time.perf_counter() - begin
share = 1 - {number} * 3 * pace / seconds
"""
_TORCH_NAMES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "",  # torch has it for interleaved stages only
}


def run(master: MasterNode, source: str) -> None:
    result = master.run_cell(source).wait()
    if result is None or not result.ok:
        raise RuntimeError(f"The cell has failed: {result}, {getattr(result, 'failures', None)}")


def measure(master: MasterNode, schedule: str, num_ranks: int, number: int) -> list[Row]:
    chunks = 2 if schedule == "interleaved" else 1
    options: dict[str, Any] = {
        "schedule": schedule,
        "chunks": chunks,
        "stages": chunks * num_ranks,
        "number": number,
        "torch": _TORCH_NAMES[schedule],
    }
    theory: list[float] = []
    measured: list[float] = []

    def ours() -> float:
        run(master, _OURS.format(**options))
        found = master.pull(["bubble", "share"])
        theory.append(100 * found["bubble"].theoretical)
        measured.append(100 * found["bubble"].measured)
        return 100 * float(found["share"])

    def torchs() -> float:
        run(master, _TORCH.format(**options))
        return 100 * float(master.pull(["share"])["share"])

    sides = {"ours": ours, "torch": torchs} if options["torch"] else {"ours": ours}
    found = take_turns(sides, _ROUNDS)
    what = f"{schedule}, {num_ranks} stages, {number} micro-batches"
    beyond = [mine - by_theory for mine, by_theory in zip(measured, theory, strict=True)]
    return [
        Row(
            f"{what}: bubble",
            "%",
            found["ours"],
            found.get("torch", ()),
            "torch's" if "torch" in found else "",
        ),
        Row(f"{what}: above theory ({theory[0]:.1f} %)", "points", beyond, reach="<= 3", judged="ours"),
    ]


def main() -> None:
    use_environment()
    long = "--long" in sys.argv
    rows: list[Row] = []
    for num_ranks in (2, 4) if long else (2,):
        with MasterNode(oversubscribe=True) as master:
            master.start_workers([Device(f"CPU-{n}", "cpu", n, "a core") for n in range(num_ranks)])
            run(master, _SETUP)
            for schedule in _TORCH_NAMES:
                for number in (4, 8, 16) if long else (8,):
                    rows += measure(master, schedule, num_ranks, number)
    report("pipeline", rows)


if __name__ == "__main__":
    main()
