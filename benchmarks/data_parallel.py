"""Training speed of an unedited cell on two workers, beside DistributedDataParallel by hand under torchrun.

Ours runs the single-device loop below under ``--strategy data_parallel``; the peer is the same loop as a script
with ``DistributedDataParallel`` and a ``DistributedSampler``, started by ``python -m torch.distributed.run``.
Both have the same model, the same samples a rank and step, one thread a process. They take turns: each turn is
one cell, or one pass of the waiting script, of the same number of steps, of which the first ones are not counted.
A third turn is the plain loop in one process with the whole batch, to show what two workers bring.

Where a process's memory happens to lie makes convolutions up to a quarter slower for as long as it lives, so every
few turns all processes are started anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _common import (
    NUM_WORKERS,
    Row,
    end_tree,
    environment,
    notebook_shell,
    quiet,
    report,
    start_ours,
    take_turns,
    use_environment,
)

_GENERATIONS = 5
_ROUNDS = 4
_DEADLINE_SECONDS = 120.0

CNN = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
batch_size = 64
data = TensorDataset(torch.randn(steps * batch_size, 3, 32, 32), torch.randint(10, (steps * batch_size,)))
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Linear(64, 10),
)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
"""

TRANSFORMER = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
batch_size = 32
data = TensorDataset(torch.randint(1000, (steps * batch_size, 32)), torch.randint(10, (steps * batch_size,)))
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(128, 10)
    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)).mean(1))
model = Classifier()
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""

_LOADER = "loader = DataLoader(data, batch_size=batch_size, shuffle=True)\n"

# The cell: what a person has written for one device.
_LOOP = """
step = 0
for x, y in loader:
    if step == warm_up:
        begin = time.perf_counter()
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    step += 1
seconds = time.perf_counter() - begin
"""

# The same by hand, for torchrun. A pass begins when the file of its number appears.
_BY_HAND_HEAD = """
import os, sys
import torch.distributed as dist
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
"""
_BY_HAND_LOADER = """
model = DistributedDataParallel(model)
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=batch_size // size, sampler=sampler)
folder, number = Path(sys.argv[1]), 0
"""
_BY_HAND_PASSES = """
    sampler.set_epoch(number)
{loop}
    if rank == 0:
        (folder / "new").write_text(str(seconds))
        os.replace(folder / "new", folder / f"done-{{number}}")
    number += 1
"""
_BY_HAND_WAIT = """
while True:
    while rank == 0 and not (folder / f"go-{number}").exists():
        time.sleep(0.005)
    dist.barrier()
"""


def indented(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.strip().splitlines())


@dataclass(frozen=True)
class Job:
    """What is trained: the cell that builds it, samples a step, steps a turn, and on how many workers."""

    model: str
    batch_size: int
    steps: int = 30
    warm_up: int = 5
    num_workers: int = NUM_WORKERS

    @property
    def setup(self) -> str:
        """The cell that builds it, with its constants."""
        return f"steps, warm_up = {self.steps}, {self.warm_up}\n{self.model}"


class Torchrun:
    """The script by hand, which waits between its passes."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._folder, self._number = folder, 0
        script = folder / "by_hand.py"
        passes = _BY_HAND_WAIT + _BY_HAND_PASSES.format(loop=indented(_LOOP))
        script.write_text(_BY_HAND_HEAD + job.setup + _BY_HAND_LOADER + passes)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={job.num_workers}", str(script), str(folder)]
        self._process = subprocess.Popen(command, env=environment(), text=True, stdout=subprocess.DEVNULL)

    def seconds(self) -> float:
        """Let it make one pass; return how long the counted steps took."""
        (self._folder / f"go-{self._number}").touch()
        done = self._folder / f"done-{self._number}"
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not done.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("The script under torchrun has not made its pass.")
            time.sleep(0.005)
        self._number += 1
        return float(done.read_text())

    def end(self) -> None:
        end_tree(self._process)


class Ours:
    """The cell on our workers."""

    def __init__(self, shell: Any, job: Job) -> None:
        self._shell, self._job = shell, job
        self.overhead: list[float] = []
        self.cell("", job.setup + _LOADER)

    def cell(self, line: str, source: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._shell.run_cell_magic("openclaw_parallel", line, source)

    def seconds(self) -> float:
        begin = time.perf_counter()
        self.cell("--strategy data_parallel", _LOOP)
        whole = time.perf_counter() - begin
        self._shell.run_line_magic("openclaw", "pull seconds")
        counted = float(self._shell.user_ns["seconds"])
        steps = self._job.steps
        self.overhead.append(1000 * (whole - counted * steps / (steps - self._job.warm_up)))
        return counted


class Alone:
    """The plain loop in one process, with the whole batch."""

    def __init__(self, job: Job, folder: Path) -> None:
        script = folder / "alone.py"
        turns = "import sys\nfor _ in sys.stdin:\n" + indented(_LOOP) + "    print(seconds, flush=True)\n"
        script.write_text(job.setup + _LOADER + turns)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, str(script)], env=environment(), text=True, stdin=pipe, stdout=pipe
        )

    def seconds(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def end(self) -> None:
        end_tree(self._process)


@contextlib.contextmanager
def sides(shell: Any, job: Job) -> Iterator[tuple[Ours, Torchrun, Alone]]:
    with TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        by_hand = Torchrun(job, Path(name))
        stack.callback(by_hand.end)
        alone = Alone(job, Path(name))
        stack.callback(alone.end)
        yield Ours(shell, job), by_hand, alone


@dataclass
class Turns:
    """The samples of one job: seconds of the counted steps of each turn, and milliseconds around the cell's."""

    job: Job
    seconds: dict[str, list[float]] = field(default_factory=dict)
    around: list[float] = field(default_factory=list)

    def take(self, shell: Any, rounds: int = _ROUNDS) -> None:
        """Take turns with fresh processes by hand and alone, and a freshly built model on our workers."""
        with sides(shell, self.job) as (ours, by_hand, alone):
            turns = {"ours": ours.seconds, "torchrun": by_hand.seconds, "alone": alone.seconds}
            take_turns(turns, 2)
            ours.overhead.clear()
            for name, values in take_turns(turns, rounds).items():
                self.seconds.setdefault(name, []).extend(values)
            self.around += ours.overhead

    def rows(self, what: str, reach: str = ">= 0.98x") -> list[Row]:
        counted = self.job.steps - self.job.warm_up
        speed = {
            name: [self.job.batch_size * counted / s for s in values] for name, values in self.seconds.items()
        }
        step = {name: [1000 * s / counted for s in values] for name, values in self.seconds.items()}
        by_hand, alone = "torchrun, DDP", "one process"
        return [
            Row(f"{what}: speed", "samples/s", speed["ours"], speed["torchrun"], by_hand, reach),
            Row(f"{what}: a step", "ms", step["ours"], step["torchrun"], by_hand),
            Row(f"{what}: beside one process", "samples/s", speed["ours"], speed["alone"], alone),
            Row(f"{what}: cell around the steps", "ms", self.around),
        ]


def main() -> None:
    use_environment()
    os.environ["OPENCLAW_OVERSUBSCRIBE"] = "1"
    shell = notebook_shell()
    models = {"small CNN": Turns(Job(CNN, 64)), "small transformer": Turns(Job(TRANSFORMER, 32))}
    for _ in range(_GENERATIONS):
        with quiet():
            start_ours(shell)
        try:
            for turns in models.values():
                turns.take(shell)
        finally:
            with quiet():
                shell.run_line_magic("openclaw", "stop")
    report("data_parallel", [row for what, turns in models.items() for row in turns.rows(what)])


if __name__ == "__main__":
    main()
