"""Training speed of a model with 25 million parameters on 2 and 4 workers of one CPU host, beside DDP under torchrun.

As `data_parallel`, with a model whose gradients (101 MB) take as long to be summed as to be computed. Four workers
share the cores of a smaller machine, on both sides alike.
"""

from __future__ import annotations

import os

from _common import notebook_shell, quiet, report, start_ours, use_environment
from data_parallel import Job, Turns

_ROUNDS = 3

MODEL = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
batch_size = 32
data = TensorDataset(torch.randn(steps * batch_size, 1024), torch.randint(10, (steps * batch_size,)))
model = nn.Sequential(
    nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.ReLU(),
    nn.Linear(1024, 10),
)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
"""


def main() -> None:
    use_environment()
    os.environ["OPENCLAW_OVERSUBSCRIBE"] = "1"
    shell = notebook_shell()
    rows = []
    for num_workers in (2, 4):
        turns = Turns(Job(MODEL, 32, steps=12, warm_up=3, num_workers=num_workers))
        with quiet():
            start_ours(shell, num_workers)
        try:
            turns.take(shell, _ROUNDS)
        finally:
            with quiet():
                shell.run_line_magic("openclaw", "stop")
        rows += turns.rows(f"25 M parameters, {num_workers} workers", ">= 1.2x")
    report("large_model", rows)


if __name__ == "__main__":
    main()
