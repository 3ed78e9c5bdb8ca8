"""A plan is made from what is measured on real workers, and leaves the cell's objects as they were."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from openclaw_nb.cluster.planning import Plan, milliseconds
from openclaw_nb.core.errors import RefusedError, RemoteCellError, UsageError
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.notebook import options
from openclaw_nb.notebook.cellrun import CellRequest
from openclaw_nb.notebook.plan import measured_beside
from openclaw_nb.notebook.verbs import HANDLERS, Context
from openclaw_nb.plan.predict.model import Choice, predict
from openclaw_nb.protocol.messages import StrategySpec

from .conftest import HANG_SECONDS, Lab
from .test_data_parallel import LOOP

pytestmark = pytest.mark.cluster

# What each layer takes is known: it sleeps, 2 ms a sample and 6 ms a sample. Adam has two moments a parameter.
SETUP = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
for name in ("x", "y", "losses", "epoch", "loss"):
    globals().pop(name, None)
torch.set_num_threads(1)
class Asleep(nn.Linear):
    def __init__(self, seconds, *sizes):
        super().__init__(*sizes)
        self.seconds = seconds
    def forward(self, x):
        time.sleep(self.seconds * len(x))
        return super().forward(x)
model = nn.Sequential(Asleep(2e-3, 64, 64), nn.ReLU(), Asleep(6e-3, 64, 10))
data = TensorDataset(torch.randn(96, 64), torch.randint(10, (96,)))
loader = DataLoader(data, batch_size=8, shuffle=True)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
before = [p.clone() for p in model.parameters()]
"""
PAIR = [0, 1]
UNCHANGED = """
assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())), "parameters have changed"
assert not optimizer.state, "the optimizer has state"
assert all(p.grad is None for p in model.parameters()), "gradients are left"
assert not model._forward_pre_hooks and not model[0]._forward_hooks, "hooks are left"
assert not optimizer._optimizer_step_post_hooks, "hooks are left"
assert not globals().keys() & {"x", "losses"}, "variables are left"
"""


def plan(lab: Lab, setup: str = SETUP, loop: str = LOOP, **how: Any) -> Plan:
    lab.good(setup, targets=PAIR)
    return lab.master.plan(loop, targets=PAIR, **{"num_steps": 3, **how})


def test_a_plan_knows_the_layers_and_what_two_workers_bring(lab: Lab) -> None:
    made = plan(lab)
    lab.good(UNCHANGED, targets=PAIR)
    profile = made.profile
    first, _, last = profile.layers
    assert [layer.name for layer in profile.layers] == ["0", "1", "2"]
    assert last.seconds / first.seconds == pytest.approx(3, rel=0.2)
    assert first.parameter_bytes == 4 * (64 * 64 + 64)
    assert (first.input_bytes, first.output_bytes) == (4 * 8 * 64, 4 * 8 * 64)
    assert first.saved_bytes == 4 * 8 * 64  # its input, for the gradient of its weight
    assert profile.optimizer_factor == pytest.approx(2, rel=0.01)
    assert (profile.batch_size, sorted(profile.alone)) == (8, [4, 8])
    assert profile.step.model >= 8 * 8e-3
    # Sleeping workers do not disturb each other, and the sleep is in proportion to the samples.
    two = made.of(Choice("data_parallel", data=2))
    assert two.compute_seconds == pytest.approx(profile.step.total / 2, rel=0.35)
    assert profile.link(2).all_reduce.latency_seconds > 0


def verb(lab: Lab, line: str, cells: dict[int, CellRequest]) -> Plan:
    command, name, words = options.split_verb(line)
    assert command is not None
    session: Any = SimpleNamespace(master=lab.master)
    context = Context(session, SimpleNamespace(user_ns={}), in_notebook=False, cells=cells)
    found: Plan = HANDLERS[name](context, command.parse(words))
    return found


def test_the_verb_refuses_what_there_is_no_cell_or_plan_for(lab: Lab) -> None:
    lab.master.last_plan = None
    with pytest.raises(UsageError, match="no plan yet"):
        verb(lab, "plan --last", {})
    with pytest.raises(UsageError, match="No cell has run under a strategy"):
        verb(lab, "plan", {})
    with pytest.raises(UsageError, match=r"Cell 4 has not run under a strategy\. Those that have: 3"):
        verb(lab, "plan --cell 4", {3: CellRequest(LOOP)})
    with pytest.raises(UsageError, match="--memory is a size"):
        verb(lab, "plan --memory much", {3: CellRequest(LOOP)})


def test_a_prediction_stands_beside_what_was_measured(lab: Lab) -> None:
    lab.good(SETUP, targets=PAIR)
    cell = CellRequest(LOOP, 3, PAIR, StrategySpec(name="data_parallel"))
    made = verb(lab, "plan --steps 3", {3: cell})
    lab.good(UNCHANGED, targets=PAIR)
    spec = StrategySpec(name="data_parallel")
    timed = f"begin = time.perf_counter()\n{LOOP}\nseconds = time.perf_counter() - begin\n"
    lab.good(timed, strategy=spec, targets=PAIR)
    seconds = lab.pull("seconds") / 24  # LOOP makes two passes
    predicted = made.take(spec, 2, 8 / seconds)
    assert predicted is not None
    # Half a batch sleeps for 32 ms, whatever else the machine does: benchmarks/plan.py tells how near they come.
    assert predicted.step_seconds >= 4 * 8e-3
    # A sum of all gradients over two workers: each byte goes there and back by halves, with two latencies.
    link = made.profile.link(2).all_reduce
    num_bytes = 4 * (64 * 64 + 64 + 64 * 10 + 10)
    assert predicted.transfer_seconds == pytest.approx(
        2 * link.latency_seconds + num_bytes / link.bytes_per_second
    )
    assert seconds >= 4 * 8e-3
    assert made.measured == {Choice("data_parallel", data=2): pytest.approx(seconds)}
    assert verb(lab, "plan --last", {}) is made
    (row,) = [row for row in made.table.rows if row[:2] == ("data_parallel", "dp 2")]
    assert row[4] == milliseconds(seconds)
    assert made.take(StrategySpec(name="data_parallel", options={"sync_frequency": 3}), 2, 1.0) is None


def test_a_run_is_set_beside_a_plan_of_the_same_cell_only(lab: Lab) -> None:
    made = plan(lab)
    monitor, spec = Monitor(), StrategySpec(name="data_parallel")
    lab.master.listen(monitor.take)
    other = LOOP.replace("range(2)", "range(1)")
    assert other != LOOP
    lab.good(other, strategy=spec, targets=PAIR)
    assert measured_beside(lab.master, monitor, other, spec) == ""
    assert not made.measured
    lab.good(LOOP, strategy=spec, targets=PAIR)
    assert measured_beside(lab.master, monitor, LOOP, spec).startswith("A step took")
    assert [*made.measured] == [Choice("data_parallel", data=2)]


def test_training_that_fits_no_worker_is_split(lab: Lab) -> None:
    # 19,240 bytes of parameters take four times that with gradients and Adam's moments, and layers keep some more.
    made = plan(lab, memory_bytes=77_500)
    assert made.best.choice.strategy in ("model_parallel", "pipeline")
    assert "does not fit one device" in made.ranked[0].reason


def test_a_batch_of_one_sample_can_be_planned_for(lab: Lab) -> None:
    made = plan(lab, SETUP.replace("batch_size=8", "batch_size=1"))
    assert "batches of 1 sample:" in made.table.title
    assert "1 sample cannot be shared" in made.of(Choice("data_parallel", data=2)).problem
    one, two = made.profile.step, made.of(Choice("pipeline", pipeline=2, microbatches=1))
    assert not two.problem
    assert two.transfer_seconds > 0
    assert two.compute_seconds >= 0.9 * one.model  # of one micro-batch one stage works at a time
    lab.good(UNCHANGED, targets=PAIR)


# Layers that every strategy can divide, of parameters only: what is kept for the backward pass is small beside them.
WIDE = """
import contextlib
import gc
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
def held():
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor):
            # A shard's outer tensor has no memory of its own.
            with torch._C.DisableTorchFunctionSubclass(), contextlib.suppress(RuntimeError):
                storage = each.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
for name in ("model", "optimizer", "loss", "x", "y", "before"):
    globals().pop(name, None)
model = nn.Sequential(
    nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)
)
loader = DataLoader(TensorDataset(torch.randn(24, 64), torch.randint(10, (24,))), batch_size=8)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
without = held() - sum(p.nbytes for p in model.parameters())
"""
TRAIN = """
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
taken = held() - without
"""


@pytest.mark.parametrize("name", ["model_parallel", "tensor_parallel", "sharded"])
def test_a_worker_holds_what_was_predicted(lab: Lab, name: str) -> None:
    """Beside what is counted on the worker: between two steps no layer is gathered, and nothing kept for a pass."""
    made = plan(lab, WIDE, TRAIN, num_steps=1)
    layers = tuple(replace(layer, saved_bytes=0) for layer in made.profile.layers)
    axis = {"model_parallel": "pipeline", "tensor_parallel": "tensor", "sharded": "data"}[name]
    predicted = predict(replace(made.profile, layers=layers), Choice(name, **{axis: 2}))
    gathered = 3 * made.profile.parameter_bytes if name == "sharded" else 0
    lab.good(TRAIN, strategy=StrategySpec(name=name), targets=PAIR)
    assert lab.pull("taken") == pytest.approx(predicted.memory_bytes - gathered, rel=0.05)
    lab.good("del loss  # its graph has parts\ntaken = held() - without", targets=PAIR)
    assert lab.pull("taken") == pytest.approx(4 * made.profile.parameter_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("setup", "loop", "words"),
    [
        (SETUP + "lines = iter(range(9))\n", "next(lines)\n" + LOOP, "cannot be put back"),
        (
            SETUP,
            LOOP.replace("in loader", "in [(data.tensors[0][:8], data.tensors[1][:8])] * 9"),
            "DataLoader",
        ),
        (SETUP, LOOP.replace("in loader", "in list(loader)[:2]").replace("range(2)", "range(1)"), "too few"),
    ],
    ids=["a generator", "no loader", "two steps"],
)
def test_cells_that_cannot_be_profiled_are_refused(lab: Lab, setup: str, loop: str, words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        plan(lab, setup, loop)
    lab.good(UNCHANGED, targets=PAIR)


def test_a_rank_that_raises_ends_the_profile_on_all(lab: Lab) -> None:
    began = time.monotonic()
    with pytest.raises(RemoteCellError, match="planted"):
        plan(lab, loop=LOOP + "        if world_size == 2 and rank == 1: raise KeyError('planted')\n")
    assert time.monotonic() - began < HANG_SECONDS / 2
    lab.good(UNCHANGED, targets=PAIR)
