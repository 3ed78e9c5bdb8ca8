"""What the notebook is told of a strategy cell, against what the cell was made to do."""

from __future__ import annotations

import math

import pytest

from openclaw_nb.monitor.store import Monitor, RunHistory
from openclaw_nb.notebook.figures import describe_run

from .conftest import Lab
from .test_data_parallel import LOOP, SETUP

pytestmark = pytest.mark.cluster

NUM_STEPS = 2 * math.ceil(150 / 32)
NUM_PARAMETERS = 12 * 32 + 32 + 32 * 5 + 5


def train(lab: Lab, loop: str, **options: object) -> RunHistory:
    monitor = Monitor()
    forget = lab.master.listen(monitor.take)
    try:
        assert lab.train(SETUP, loop, 2, **options).ok
    finally:
        forget()
    history = monitor.latest()
    assert history is not None
    return history


def test_the_others_wait_for_the_rank_that_is_slow(lab: Lab) -> None:
    """Rank 1 sleeps 0.3 s a step: rank 0 waits about that long, and rank 1 has nobody to wait for."""
    history = train(
        lab, "import time\n" + LOOP.replace("loss.backward()", "time.sleep(0.3 * rank); loss.backward()")
    )
    first, second = history.workers
    # The last step's arrivals are told with no further step.
    assert first.seconds["wait"] > 0.8 * 0.3 * (NUM_STEPS - 1)
    assert second.seconds["compute"] > 0.3 * (NUM_STEPS - 1)
    assert second.seconds["wait"] < first.seconds["wait"] / 2
    assert history.straggler is not None
    assert history.straggler.worker == second.worker


def test_time_that_a_loader_takes_is_data(lab: Lab) -> None:
    collate = "lambda rows: (time.sleep(0.03), torch.utils.data.default_collate(rows))[1]"
    slow = f"import time\nloader.collate_fn = {collate}\n"
    history = train(lab, slow + LOOP)
    for worker in history.workers:
        assert worker.seconds["data"] > 0.03 * NUM_STEPS


def test_steps_samples_and_bytes_are_counted(lab: Lab) -> None:
    history = train(lab, LOOP)
    assert (history.steps, history.samples, history.lost) == (NUM_STEPS, 300, 0)
    for worker in history.workers:
        per_step = worker.num_bytes / NUM_STEPS
        assert 4 * NUM_PARAMETERS <= per_step < 4 * NUM_PARAMETERS + 500  # and the message


def test_a_loss_that_is_not_finite_is_told_with_step_and_worker(lab: Lab) -> None:
    broken = "x = x * float('nan') if rank == 1 and len(losses) == 3 else x"
    loop = LOOP.replace("loss = loss_fn", f"{broken}\n        loss = loss_fn")
    history = train(lab, loop)
    assert history.workers[1].first_nan == 4
    assert history.workers[0].first_nan != 4
    said = (
        f"the loss is not finite from step 4 on, first on the samples of worker {history.workers[1].worker}"
    )
    assert said in describe_run(history)


def test_k_batches_a_step_reduce_a_kth_of_the_bytes(lab: Lab) -> None:
    """A pass of five batches has 5, 3 and 1 boundaries with K of 1, 2 and 5."""
    bytes_by_k = {k: train(lab, LOOP, options={"sync_frequency": k}).workers[0].num_bytes for k in (1, 2, 5)}
    assert bytes_by_k[2] == pytest.approx(bytes_by_k[1] * 3 / 5, rel=0.02)
    assert bytes_by_k[5] == pytest.approx(bytes_by_k[1] / 5, rel=0.02)
