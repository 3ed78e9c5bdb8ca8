"""Sharded data parallel of a deep model on 4 workers of one CPU host, beside a script with FSDP2 under torchrun.

Two figures. Memory: what parameters, gradients and optimizer state take on a worker between two steps, beside a quarter
of what they take unsharded. Throughput: as `data_parallel`, with `fully_shard` on each block in the peer's script.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import (
    ROOT,
    Row,
    end_tree,
    environment,
    free_port,
    notebook_shell,
    quiet,
    report,
    start_ours,
    take_turns,
    use_environment,
)

_ROUNDS = 3
_NUM_WORKERS = 4
_STEPS, _WARM_UP = 8, 2
_BATCH = 32

MODEL = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
model = nn.Sequential(nn.Linear(64, 256), *[Block(256) for _ in range(12)], nn.Linear(256, 10))
loss_fn = nn.CrossEntropyLoss()
"""
DATA = f"""
data = TensorDataset(torch.randn({_STEPS * _BATCH}, 64), torch.randint(10, ({_STEPS * _BATCH},)))
"""
OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
LOOP = f"""
stamps, bytes_of_state = [], []
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    stamps.append(time.perf_counter())
    if len(stamps) == {_STEPS - 1}:
        kept = [p for p in model.parameters()] + [p.grad for p in model.parameters()]
        kept += [v for s in optimizer.state.values() for v in s.values() if v.dim()]
        parts = [getattr(t, "_local_tensor", t) for t in kept]
        storages = {{part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}}
        bytes_of_state.append(sum(storages.values()))
        del kept, parts, storages
rate = {_BATCH} * {_STEPS - 1 - _WARM_UP} / (stamps[{_STEPS - 1}] - stamps[{_WARM_UP}])
"""
TORCHRUN = (
    "import os, torch.distributed as dist\nfrom torch.distributed.fsdp import fully_shard\n"
    "dist.init_process_group('gloo')\nrank, size = dist.get_rank(), dist.get_world_size()\n"
    + MODEL
    + DATA
    + "for block in model[1:-1]: fully_shard(block)\nfully_shard(model)\n"
    + OPTIMIZER
    + f"loader = DataLoader(data, batch_size={_BATCH} // size, sampler=torch.utils.data.DistributedSampler(data))\n"
    + LOOP
    + "if rank == 0: open(os.environ['RATE_FILE'], 'w').write(str(rate))\ndist.destroy_process_group()\n"
)


def ours(shell: Any) -> tuple[float, float, float]:
    """Train in a notebook's cells; return samples/s, and bytes of state unsharded and on a worker."""
    build = MODEL + DATA + OPTIMIZER + f"loader = DataLoader(data, batch_size={_BATCH}, shuffle=True)\n"
    with quiet():
        shell.run_cell_magic("openclaw_parallel", "", build)
        shell.run_cell_magic("openclaw_parallel", "-s sharded", LOOP)
        shell.run_line_magic("openclaw", "pull rate bytes_of_state")
    values = 64 * 256 + 256 + 12 * (2 * 256 + 8 * 256 * 256 + 5 * 256) + 2560 + 10
    return shell.user_ns["rate"], 4.0 * 4 * values, float(shell.user_ns["bytes_of_state"][0])


def theirs() -> float:
    """Train the same model in a script under torchrun; return samples/s."""
    import subprocess

    with tempfile.TemporaryDirectory() as folder:
        script, rate = Path(folder) / "train.py", Path(folder) / "rate"
        script.write_text(TORCHRUN)
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={_NUM_WORKERS}"]
        command += [f"--master-port={free_port()}", str(script)]
        process = subprocess.Popen(command, env={**environment(), "RATE_FILE": str(rate)}, cwd=ROOT)
        try:
            process.wait(timeout=180)
        finally:
            end_tree(process)
        return float(rate.read_text())


def main() -> None:
    use_environment()
    os.environ["OPENCLAW_OVERSUBSCRIBE"] = "1"
    shell = notebook_shell()
    with quiet():
        start_ours(shell, _NUM_WORKERS)
    try:
        taken = take_turns({"ours": lambda: ours(shell), "peer": lambda: (theirs(), 0.0, 0.0)}, _ROUNDS)
    finally:
        with quiet():
            shell.run_line_magic("openclaw", "stop")
    mega = 1024.0 * 1024.0
    what = f"{_NUM_WORKERS} workers, sharded"
    report(
        "sharded",
        [
            Row(
                f"{what}: parameters, gradients, AdamW state a worker",
                "MiB",
                [each[2] / mega for each in taken["ours"]],
                [each[1] / _NUM_WORKERS / mega for each in taken["ours"]],
                "unsharded / 4",
                "<= 1.15x",
            ),
            Row(
                f"{what}: throughput, 6 M parameters",
                "samples/s",
                [each[0] for each in taken["ours"]],
                [each[0] for each in taken["peer"]],
                "FSDP2 under torchrun",
                ">= 0.97x",
            ),
        ],
    )


if __name__ == "__main__":
    main()
