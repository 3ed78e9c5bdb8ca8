"""How long training waits for a checkpoint, beside torch's own asynchronous one and a copy of as many bytes.

25 million parameters with AdamW (302 MB of state), in one process, after a step each. Measured are the wait alone, and
a checkpoint with the steps that follow while it is written; the rest of the writing is waited for outside of it, so
that each turn is at its best. torch's: `async_save` of `torch.distributed.checkpoint` with its defaults, and with its
stager that keeps memory as ours does. The first two turns, in which memory is made, are not counted.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _common import Row, report, take_turns, use_environment

_ROUNDS, _WARM_UP = 8, 2
_NUM_STEPS = 6
_WIDTHS = (1024, 4096, 4096, 1024, 10)


class Training:
    """A model and its optimizer, and the state of both as torch's checkpoints take it."""

    def __init__(self) -> None:
        import torch
        from torch import nn

        layers = [nn.Linear(*sizes) for sizes in itertools.pairwise(_WIDTHS)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._batch = torch.randn(8, _WIDTHS[0])
        self.num_steps = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._batch).square().mean().backward()
        self.num_steps += 1
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Side:
    """One way to take a checkpoint: `begin` is what training waits for, `end` waits for what is written."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


class Ours(Side):
    def __init__(self, training: Training, directory: Path) -> None:
        from openclaw_nb.engine.checkpoint import state
        from openclaw_nb.engine.checkpoint.checkpointer import Checkpointer, CheckpointOptions
        from openclaw_nb.engine.checkpoint.store import Store
        from openclaw_nb.engine.checkpoint.tensors import Layout
        from openclaw_nb.engine.objects.find import Objects
        from openclaw_nb.plan.checkpoints import Every

        objects = Objects(
            models={"model": training.model},
            optimizers={"optimizer": training.optimizer},
            **{role: {} for role in ("loaders", "schedulers", "scalers", "aliases")},
            ignored=(),
            built=(),
        )
        options = CheckpointOptions(directory, Every(steps=1), 1)
        ranks: Any = SimpleNamespace(rank=0, size=1)
        self.num_bytes = Layout(state.take(objects).tensors).num_bytes
        self._checkpointer = Checkpointer(
            objects, ranks, Store(directory), options, lambda: training.num_steps
        )
        self._checkpointer.open()

    def begin(self) -> None:
        self._checkpointer.at_rest()

    def end(self) -> None:
        writer = self._checkpointer._writer
        assert writer is not None
        writer.wait()
        assert not writer.failures, writer.failures


class Torchs(Side):
    def __init__(self, training: Training, directory: Path, stager: Any = None) -> None:
        self._training, self._directory, self._stager = training, directory, stager

    def begin(self) -> None:
        from torch.distributed.checkpoint import async_save

        state = self._training.state()
        self._future: Any = async_save(
            state, checkpoint_id=self._directory, async_stager=self._stager, no_dist=True
        )

    def end(self) -> None:
        getattr(self._future, "upload_completion", self._future).result()


class Memcpy(Side):
    def __init__(self, num_bytes: int) -> None:
        import torch

        self._source, self._target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))

    def begin(self) -> None:
        self._target.copy_(self._source)


def measured(training: Training, side: Side, num_steps: int) -> Callable[[], float]:
    """Return what measures one checkpoint, with the steps that follow it, in seconds."""

    def measure() -> float:
        training.step()
        begun = time.perf_counter()
        side.begin()
        for _ in range(num_steps):
            training.step()
        seconds = time.perf_counter() - begun
        side.end()
        return seconds

    return measure


def milliseconds(training: Training, sides: dict[str, Side], num_steps: int) -> dict[str, list[float]]:
    turns = {name: measured(training, side, num_steps) for name, side in sides.items()}
    take_turns(turns, _WARM_UP)
    return {name: [1000 * s for s in values] for name, values in take_turns(turns, _ROUNDS).items()}


def main() -> None:
    use_environment()
    import torch
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    training = Training()
    training.step()
    place = Path(tempfile.mkdtemp(prefix="openclaw-benchmark-"))
    on_gpu = torch.cuda.is_available()
    stager = DefaultStager(StagingOptions(on_gpu, not on_gpu, on_gpu, on_gpu))
    try:
        ours = Ours(training, place / "ours")
        both = {"ours": ours, "async_save": Torchs(training, place / "torch")}
        keeping = Torchs(training, place / "keeping", stager)
        waits = milliseconds(training, {**both, "memcpy": Memcpy(ours.num_bytes), "keeping": keeping}, 0)
        steps = milliseconds(training, {**both, "none": Side(), "keeping": keeping}, _NUM_STEPS)
    finally:
        shutil.rmtree(place)
    wait = f"training waits for {ours.num_bytes / 1e6:.0f} MB of state"
    with_steps = f"that and {_NUM_STEPS} steps meanwhile"
    rows = [
        Row(wait, "ms", waits["ours"], waits["memcpy"], "a copy of as many bytes", "<= 1.5x"),
        Row(wait, "ms", waits["ours"], waits["async_save"], "async_save"),
        Row(wait, "ms", waits["ours"], waits["keeping"], "async_save, memory kept"),
        Row(with_steps, "ms", steps["ours"], steps["none"], "the steps alone"),
        Row(with_steps, "ms", steps["ours"], steps["async_save"], "async_save"),
        Row(with_steps, "ms", steps["ours"], steps["keeping"], "async_save, memory kept"),
    ]
    report("checkpoint", rows)


if __name__ == "__main__":
    main()
