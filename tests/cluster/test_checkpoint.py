"""Checkpoints of real workers: what is in them is what one device has after as many steps.

The right values are those of the same cells in this process; tolerances are those of `test_data_parallel`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from openclaw_nb.cluster.run import RunResult
from openclaw_nb.engine.checkpoint.catalog import find_newest, listed
from openclaw_nb.engine.checkpoint.load import load, load_into
from openclaw_nb.engine.objects.find import find_objects
from openclaw_nb.protocol.messages import StrategySpec

from .conftest import Lab, single_device
from .test_data_parallel import CNN, SETUP, SGD_TOLERANCE, STATE, refusal
from .test_recovery import STRIKE

pytestmark = pytest.mark.cluster

SCHEDULED = SETUP + "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)\n"
LOOP = """
history = []
for epoch in range({num_passes}):
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        history.append([t.detach().clone() for t in model.state_dict().values()])
"""


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=SGD_TOLERANCE, atol=SGD_TOLERANCE)


def alone(folder: Path) -> Path:
    """Return a directory that holds only this checkpoint."""
    place = folder.parent.with_name(f"only-{folder.name}")
    place.mkdir()
    (place / folder.name).symlink_to(folder)
    return place


WAYS: list[dict[str, Any]] = [{}, {"split": "model"}, {"options": {"mode": "parameter"}}]


@pytest.mark.parametrize("way", WAYS, ids=["loader", "model", "parameter"])
def test_each_holds_the_state_of_a_single_device(lab: Lab, tmp_path: Path, way: dict[str, Any]) -> None:
    directory = tmp_path / "run"
    options = {"checkpoint": str(directory), "checkpoint_every": "3", "keep": 9, **way.get("options", {})}
    result = lab.train(SCHEDULED, LOOP.format(num_passes=2), 3, **way | {"options": options})
    assert result.ok, [f"{f.error_type}: {f.message}" for f in result.failures.values()]
    told = next(note for note in result.notes if "checkpoint" in note)
    assert f"checkpoints written to {directory}; the newest is step-00000010" in told
    expected = single_device(SCHEDULED, LOOP.format(num_passes=2))
    steps = [step for step, _ in listed(directory)]
    assert steps[0] == 10
    assert steps[-1] == 3
    for step, folder in listed(directory):  # on a slow disk those between may come late
        fresh = single_device(SCHEDULED, "")
        found = load(alone(folder), **{name: fresh[name] for name in ("model", "optimizer", "scheduler")})
        assert found.about["world_size"] == 3
        close(list(fresh["model"].state_dict().values()), expected["history"][step - 1])
        assert fresh["scheduler"].last_epoch == step
    state = expected["optimizer"].state_dict()
    newest = single_device(SCHEDULED, "")
    load(directory, model=newest["model"], optimizer=newest["optimizer"])
    close(newest["optimizer"].state_dict()["state"], state["state"])
    assert newest["optimizer"].state_dict()["param_groups"] == state["param_groups"]


def test_a_single_device_goes_on_from_the_end_of_a_pass(lab: Lab, tmp_path: Path) -> None:
    """Random numbers too: the next pass has the permutation of the undisturbed run."""
    options = {"checkpoint": str(tmp_path), "checkpoint_every": "5"}
    assert lab.train(SCHEDULED, LOOP.format(num_passes=1), 2, options=options).ok
    fresh = single_device(SCHEDULED, "torch.manual_seed(99)")
    source = LOOP.format(num_passes=1)
    found = find_newest(tmp_path)
    assert found is not None
    load_into(find_objects(source, fresh), found)
    exec(source, fresh)
    close(fresh["history"][-1], single_device(SCHEDULED, LOOP.format(num_passes=2))["history"][-1])


def test_batchnorm_statistics_of_the_whole_batch_are_in_it(lab: Lab, tmp_path: Path) -> None:
    options = {"checkpoint": str(tmp_path), "checkpoint_every": "4"}
    loop = LOOP.format(num_passes=1).replace("scheduler.step()", "")
    assert lab.train(CNN, loop, 2, options=options).ok
    expected, fresh = single_device(CNN, loop), single_device(CNN, "")
    load(tmp_path, model=fresh["model"])
    close(list(fresh["model"].state_dict().values()), expected["history"][-1])


def test_rank_0_dies_and_the_next_one_writes(pair: Lab, tmp_path: Path) -> None:
    pair.master.enable_auto_recovery(max_retries=3)
    try:
        pair.good(SCHEDULED)
        loop = LOOP.format(num_passes=2).replace(
            "loss.backward()", 'strike("", len(history)); loss.backward()'
        )
        spec = StrategySpec(
            name="data_parallel", options={"checkpoint": str(tmp_path), "checkpoint_every": "3", "keep": 9}
        )
        result = pair.run(STRIKE.format(place="", counts={7: 0}) + loop, strategy=spec)
    finally:
        pair.master.enable_auto_recovery(max_retries=0)
    assert result.ok, result.cause
    steps = [step for step, _ in listed(tmp_path)]
    assert (steps[0], steps[-1]) == (10, 3)  # what rank 0 was writing when it died may be missing
    assert not [note for note in result.notes if "not written" in note]
    fresh = single_device(SCHEDULED, "")
    load(tmp_path, model=fresh["model"])
    expected = single_device(SCHEDULED, LOOP.format(num_passes=2))
    close(list(fresh["model"].state_dict().values()), expected["history"][-1])


def test_a_place_that_cannot_be_is_refused_before_training(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = lab.train(SETUP, "model(X)", 2, options={"checkpoint": str(tmp_path / "file")})
    kinds = {failure.error_type for failure in result.failures.values()}
    assert "CheckpointError" in kinds
    assert kinds <= {"CheckpointError", "ReleasedError"}
    assert result.first is not None
    assert "as a file has that name" in result.failures[result.first].message


def test_a_scheduler_that_the_cell_builds_is_refused(lab: Lab, tmp_path: Path) -> None:
    loop = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n" + LOOP.format(num_passes=1)
    result = lab.train(SETUP, loop, 2, options={"checkpoint": str(tmp_path)})
    assert "build the scheduler" in refusal(result)


def test_a_trial_writes_none(lab: Lab, tmp_path: Path) -> None:
    spec = StrategySpec(name="data_parallel", options={"checkpoint": str(tmp_path), "checkpoint_every": "1"})
    lab.good(SCHEDULED, targets=[0, 1])
    lab.good(LOOP.format(num_passes=1) + STATE, targets=[0, 1], strategy=spec, verify_steps=2)
    assert list(tmp_path.iterdir()) == []


# What is interrupted, by an error planted where only the first run comes to, and gone on with by fresh workers.
CELLS = {
    "two loops": """
rates, number = [], 0
for epoch in range(3):
    for x, y in loader:
        stop_here(epoch, number)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        number += 1
    scheduler.step()
    rates.append(scheduler.get_last_lr()[0])
""",
    "enumerate, and a name that is not kept": """
number = 0
for epoch in range(3):
    log = print
    for i, (x, y) in enumerate(loader):
        stop_here(epoch, number)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        if i == 2: scheduler.step()
        number += 1
""",
    "a function an epoch": """
number = 0
def train_epoch(epoch):
    global number
    for x, y in loader:
        stop_here(epoch, number)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        number += 1
for epoch in range(3):
    train_epoch(epoch)
    scheduler.step()
""",
}
SETTING = (
    SCHEDULED
    + """
stop = {stop!r}
def stop_here(epoch, number):
    if number == stop:
        raise KeyError("planted")
"""
)


@pytest.mark.parametrize(
    ("cell", "first", "then"), [("two loops", 3, 2), ("enumerate, and a name that is not kept", 2, 4)]
)
def test_a_cell_goes_on_in_its_midst_with_other_workers(
    lab: Lab, tmp_path: Path, cell: str, first: int, then: int
) -> None:
    options = {"checkpoint": str(tmp_path), "checkpoint_every": "2", "resume": True}
    broken = lab.train(SETTING.format(stop=7), CELLS[cell] + STATE, first, options=options)
    assert any(failure.error_type == "KeyError" for failure in broken.failures.values())
    newest = max(step.name for step in tmp_path.glob("step-????????"))
    # Every second step, but for those that a slow disk was too late for; from whichever it is, the rest is right.
    assert "step-00000001" < newest <= "step-00000007"
    # Everything is built anew, as in a new kernel; what the cell had bound is gone.
    result = lab.train("%reset -f\n" + SETTING.format(stop=None), CELLS[cell] + STATE, then, options=options)
    assert result.ok, [f"{f.error_type}: {f.message}" for f in result.failures.values()]
    assert f"the training goes on from {newest}" in "\n".join(result.notes)
    expected = single_device(SETTING.format(stop=None), CELLS[cell] + STATE)
    for rank in range(then):
        close(lab.pull("state", rank), expected["state"])
        assert lab.pull("number", rank) == expected["number"]
    if "rates" in expected:
        assert lab.pull("rates") == expected["rates"]


def test_a_loop_in_a_function_is_gone_on_from_the_next_of_its_calls(lab: Lab, tmp_path: Path) -> None:
    options = {"checkpoint": str(tmp_path), "checkpoint_every": "2", "resume": True}
    cell = CELLS["a function an epoch"] + STATE
    assert not lab.train(SETTING.format(stop=8), cell, 2, options=options).ok
    result = lab.train("%reset -f\n" + SETTING.format(stop=None), cell, 2, options=options)
    assert result.ok, [f"{f.error_type}: {f.message}" for f in result.failures.values()]
    assert "the training goes on from step-00000005" in "\n".join(result.notes)
    close(lab.pull("state"), single_device(SETTING.format(stop=None), cell)["state"])


def refused(result: RunResult) -> str:
    assert result.first is not None
    failure = result.failures[result.first]
    assert failure.error_type == "CheckpointError"
    return failure.message


def test_what_cannot_be_gone_on_from_says_why(lab: Lab, tmp_path: Path) -> None:
    options = {"checkpoint": str(tmp_path), "checkpoint_every": "2", "resume": True}
    cell = CELLS["two loops"]
    begun = lab.train(SETTING.format(stop=7), cell, 2, options=options)
    said = [note for failure in begun.failures.values() for note in failure.value["notes"]]
    assert "there is no checkpoint in" in "\n".join(said)
    other = lab.train(
        SETTING.format(stop=None), cell.replace("number += 1", "number += 2; print(1)"), 2, options=options
    )
    assert "a cell with other statements" in refused(other)
    smaller = lab.train(
        SETTING.format(stop=None).replace("32)", "16)").replace("(32", "(16"), cell, 2, options=options
    )
    assert "0.weight is a parameter of shape [32, 12]" in refused(smaller)
    assert lab.train(SETTING.format(stop=None), cell, 2, options=options).ok
    before = single_device(SETTING.format(stop=None), cell + STATE)["state"]
    again = lab.train(SETTING.format(stop=None), cell, 2, options=options)
    assert again.ok, "the end of the cell is a place to go on from, too"
    close(lab.pull("model").state_dict(), before)
