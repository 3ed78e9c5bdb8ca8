"""A worker dies in the middle of training: the others go on, and end with the parameters of the undisturbed run.

The right values are those of the same cells on one device. Tolerances are those of `test_data_parallel`: from the
death on the batch is summed in another number of parts, which changes the order of float32 sums and nothing else.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from openclaw_nb.cluster.run import RunResult
from openclaw_nb.core.errors import UsageError
from openclaw_nb.protocol.messages import StrategySpec

from .conftest import HANG_SECONDS, Lab, single_device
from .test_data_parallel import CNN, SETUP, SGD_TOLERANCE, STATE

pytestmark = pytest.mark.cluster

SCHEDULED = (
    SETUP
    + """
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
per_batch = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + 0.01 * n))
"""
)
STRIKE = """
import os, signal
me = globals().get("rank")
def strike(place, count):
    if place == {place!r} and count in {counts!r} and me == {counts!r}[count]:
        os.kill(os.getpid(), signal.SIGKILL)
"""
LOOP = """
losses = []
for epoch in range(3):
    strike("before a pass", epoch)
    for x, y in loader:
        strike("head", len(losses))
        optimizer.zero_grad()
        out = model(x)
        strike("forward", len(losses))
        if out.requires_grad:
            out.register_hook(lambda gradient: strike("in backward", len(losses)))
        loss = loss_fn(out, y)
        loss.backward()
        strike("backward", len(losses))
        optimizer.step()
        strike("step", len(losses))
        per_batch.step()
        losses.append(loss.item())
    strike("after a pass", epoch)
    scheduler.step()
rates = [group["lr"] for group in optimizer.param_groups]
strike("after training", 0)
"""
PLACES = ["head", "forward", "in backward", "backward", "step"]


@pytest.fixture(autouse=True)
def recovering(lab: Lab, pair: Lab) -> Iterator[None]:
    for each in (lab, pair):
        each.master.enable_auto_recovery(max_retries=3)
    yield
    for each in (lab, pair):
        each.master.enable_auto_recovery(max_retries=0)


def train(
    lab: Lab, num_workers: int, place: str, victims: dict[int, int], setup: str, loop: str, **options: Any
) -> RunResult:
    """Train until the end; ``victims`` are killed at ``place``, rank by count."""
    strike = STRIKE.format(place=place, counts=victims)
    ranks = list(range(num_workers))
    lab.good(setup, targets=ranks)
    spec = StrategySpec(name="data_parallel", **options)
    return lab.run(strike + loop + STATE, targets=ranks, strategy=spec)


def expected_state(setup: str, loop: str) -> dict[str, Any]:
    return single_device(setup, STRIKE.format(place="", counts={}) + loop + STATE)


def check(lab: Lab, result: RunResult, expected: dict[str, Any], survivors: list[int]) -> None:
    assert result.ok, (result.cause, [f"{f.error_type}: {f.message}" for f in result.failures.values()])
    for rank in survivors:
        state = lab.pull("state", rank)
        for name, value in expected["state"].items():
            torch.testing.assert_close(
                state[name], value, rtol=SGD_TOLERANCE, atol=SGD_TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
            )
        if "rates" in expected:
            assert lab.pull("rates", rank) == pytest.approx(expected["rates"], rel=1e-12)


FIRST, MIDST, LAST = 0, 7, 14  # of 15 batches
AT = [("head", FIRST), ("forward", MIDST), ("in backward", MIDST), ("step", LAST)]  # all of them: `make soak`


@pytest.mark.parametrize(("place", "count"), AT)
def test_killed_at_any_statement_of_the_loop(pair: Lab, place: str, count: int) -> None:
    result = train(pair, 2, place, {count: 1}, SCHEDULED, LOOP)
    check(pair, result, expected_state(SCHEDULED, LOOP), [0])
    assert [death.rank for death in result.deaths] == [1]
    # A rank that dies before its part of the batch is given leaves the others without this step; later, the news of its
    # death may come before the end of their sum or after it.
    steps = {count} if place in ("head", "forward") else {count, count + 1}
    assert result.deaths[0].num_steps in steps
    assert "rank 1 (worker-1) died" in result.notes[0]


@pytest.mark.parametrize("seconds", [0.01, pytest.param(0.0, marks=pytest.mark.soak)])
def test_killed_while_the_cell_begins(lab: Lab, seconds: float) -> None:
    """The objects of the cell are found, and made equal on all ranks."""
    lab.good(SCHEDULED)
    source = STRIKE.format(place="", counts={}) + LOOP + STATE
    run = lab.master.run_cell(source, strategy=StrategySpec(name="data_parallel"))
    timer = kill_later(lab, 0, seconds)
    result = run.wait(HANG_SECONDS)
    timer.join()
    assert result is not None, f"the cell hangs: {run.who_waits_where()}"
    check(lab, result, expected_state(SCHEDULED, LOOP), [1, 2, 3])


@pytest.mark.parametrize("place", ["before a pass", "after a pass"])
def test_killed_between_passes(pair: Lab, place: str) -> None:
    result = train(pair, 2, place, {1: 0}, SCHEDULED, LOOP)
    check(pair, result, expected_state(SCHEDULED, LOOP), [1])
    assert [death.num_steps for death in result.deaths] == [5 if place == "before a pass" else 10]


@pytest.mark.soak
def test_two_of_four_die_one_after_the_other(lab: Lab) -> None:
    result = train(lab, 4, "forward", {4: 0, 9: 2}, SCHEDULED, LOOP)
    check(lab, result, expected_state(SCHEDULED, LOOP), [1, 3])
    assert [death.num_left for death in result.deaths] == [3, 2]


def test_batchnorm_and_its_statistics(lab: Lab) -> None:
    loop = LOOP.replace("per_batch.step()", "").replace("scheduler.step()", "")
    result = train(lab, 3, "forward", {4: 2}, CNN, loop)
    check(lab, result, expected_state(CNN, loop), [0, 1])
    assert len(result.deaths) == 1


def test_schedulers_and_scalers_that_the_cell_makes(pair: Lab) -> None:
    made = (
        SCHEDULED.removeprefix(SETUP)
        + "scaler = torch.amp.GradScaler('cpu', init_scale=64.0, growth_interval=3)\n"
    )
    loop = made + LOOP.replace("loss.backward()", "scaler.scale(loss).backward()").replace(
        "optimizer.step()", "scaler.step(optimizer); scaler.update()"
    )
    result = train(pair, 2, "in backward", {7: 1}, SETUP, loop + "\nscale = scaler.get_scale()")
    check(pair, result, expected_state(SETUP, loop), [0])
    assert len(result.deaths) == 1
    assert pair.pull("scale") == 64.0 * 2**5


def test_several_batches_a_step_are_repeated_together(pair: Lab) -> None:
    merged = SETUP.replace("batch_size=32", "batch_size=64")
    loop = LOOP.replace("per_batch.step()", "").replace("scheduler.step()", "")
    result = train(pair, 2, "forward", {7: 1}, SETUP, loop, options={"sync_frequency": 2})
    check(pair, result, expected_state(merged, loop), [0])
    assert len(result.deaths) == 1


def test_loaders_with_worker_processes(pair: Lab) -> None:
    setup = SCHEDULED.replace("shuffle=True", "shuffle=True, num_workers=1")
    result = train(pair, 2, "in backward", {6: 1}, setup, LOOP)
    check(pair, result, expected_state(SCHEDULED, LOOP), [0])
    assert len(result.deaths) == 1


def test_an_error_of_the_code_is_not_retried(pair: Lab) -> None:
    pair.good(SETUP)
    loop = "for x, y in loader:\n    loss_fn(model(x), y).backward()\n    if rank == 1: raise ValueError('planted')"
    result = pair.run(loop, strategy=StrategySpec(name="data_parallel"))
    assert result.failures[1].error_type == "ValueError"
    assert not result.deaths


def test_more_deaths_than_allowed_end_the_cell(lab: Lab) -> None:
    lab.master.enable_auto_recovery(max_retries=1)
    result = train(lab, 4, "forward", {3: 1, 4: 2}, SCHEDULED, LOOP)
    assert not result.ok
    assert "died" in result.cause
    lab.good("dist.barrier()")


def test_a_loop_that_is_left_in_a_void_batch_is_refused(pair: Lab) -> None:
    loop = LOOP.replace(
        "losses.append(loss.item())", "losses.append(loss.item())\n        if len(losses) == 3: break"
    )
    result = train(pair, 2, "forward", {2: 1}, SCHEDULED, loop)
    assert result.failures[0].error_type == "RefusedError"
    assert "the loop was left before the batch could be repeated" in result.failures[0].message


def test_a_loop_that_counts_batches_by_itself_is_refused(pair: Lab) -> None:
    """The batch that comes again is one of those that it counts, so that the last one is never drawn."""
    loop = LOOP.replace(
        "for x, y in loader:", "batches = iter(loader)\n    for k in range(len(loader)):"
    ).replace('strike("head", len(losses))', 'x, y = next(batches); strike("head", len(losses))')
    result = train(pair, 2, "forward", {7: 1}, SCHEDULED, loop)
    assert result.failures[0].error_type == "RefusedError"
    assert "the loop was left before the loader had given all" in result.failures[0].message


@pytest.mark.parametrize("count", [-1, 1.5, True, "3"])
def test_bad_counts_are_refused(pair: Lab, count: Any) -> None:
    with pytest.raises(UsageError, match="whole number"):
        pair.master.enable_auto_recovery(max_retries=count)


def kill_later(lab: Lab, rank: int, seconds: float) -> threading.Timer:
    pid = lab.master.workers[rank].pid
    assert pid is not None
    timer = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
    timer.start()
    return timer


def killed_at_random(lab: Lab, num_workers: int, num_deaths: int, dice: random.Random) -> RunResult:
    """Kill workers at moments of a training of about half a second."""
    slow = LOOP.replace("optimizer.zero_grad()", "optimizer.zero_grad(); time.sleep(0.01)")
    setup = SCHEDULED + "\nimport time\n"
    ranks = list(range(num_workers))
    lab.good(setup, targets=ranks)
    victims = dice.sample(ranks, num_deaths)
    source = STRIKE.format(place="", counts={}) + slow + STATE
    run = lab.master.run_cell(source, targets=ranks, strategy=StrategySpec(name="data_parallel"))
    timers = [kill_later(lab, rank, dice.uniform(0.02, 0.5)) for rank in victims]
    result = run.wait(HANG_SECONDS)
    for timer in timers:
        timer.join()
    assert result is not None, f"the cell hangs: {run.who_waits_where()}"
    check(lab, result, expected_state(setup, slow), [rank for rank in ranks if rank not in victims])
    return result


def test_who_comes_too_late_for_the_cell_has_its_variables(pair: Lab) -> None:
    """Functions and aliases among them; its own `rank` stays. The next cell trains on with all."""
    setup = SCHEDULED + "\nfactor, alias = 3, model\ndef scaled(value):\n    return factor * value\n"
    pair.master.take_notes()
    result = train(pair, 2, "step", {LAST: 1}, setup, LOOP)
    assert (len(result.deaths), len(result.joined)) == (1, 0)
    pair.good("assert scaled(rank) == 3 * rank")
    pair.good("assert alias is model\nassert optimizer.param_groups[0]['params'][0] is model[0].weight")
    (note,) = [n for n in pair.master.take_notes() if "came too late" in n]
    assert re.match(r"worker-\d came too late for the cell and has the variables of worker-\d now", note)
    states = [pair.pull("state", rank) for rank in range(2)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(1))
def test_killed_at_a_random_moment(lab: Lab, pair: Lab, seed: int) -> None:
    dice = random.Random(seed)
    killed_at_random(pair, 2, 1, dice)
    killed_at_random(lab, 4, 2, dice)


@pytest.mark.soak
def test_100_kills_at_random_moments(lab: Lab, pair: Lab) -> None:
    dice = random.Random(7)
    for place, count in itertools.product(PLACES, (FIRST, MIDST, LAST)):
        test_killed_at_any_statement_of_the_loop(pair, place, count)
    for seconds in (0.005, 0.02, 0.03, 0.04):
        test_killed_while_the_cell_begins(lab, seconds)
    for number in range(100):
        one = number % 2
        killed_at_random(pair if one else lab, 2 if one else 4, 1, dice)
    for _ in range(30):
        killed_at_random(lab, 4, 2, dice)


@pytest.mark.parametrize("place", ["in backward", pytest.param("backward", marks=pytest.mark.soak)])
def test_a_loss_scale_is_taken_over_with_the_rest(pair: Lab, place: str) -> None:
    """A scale of 2**16 changes no bit of float32, and tanh is left in it: the result is as without."""
    options = {"precision": {"name": "fp16", "layers": ["tanh"], "scaler": "dynamic"}}
    asked = "\nfrom openclaw_nb.engine.precision import scale\nheld = scale._known[model].state_dict()"
    result = train(pair, 2, place, {7: 0}, SCHEDULED, LOOP + asked, options=options)
    check(pair, result, expected_state(SCHEDULED, LOOP), [1])
    held = pair.pull("held", 1)
    assert (held["scale"], held["_growth_tracker"]) == (2.0**16, 15)
