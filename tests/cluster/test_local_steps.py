"""Local steps on real workers, against the same steps made one worker after the other in this process.

Tolerance: as in `test_data_parallel`, sums of float32 in another order.
"""

from __future__ import annotations

import textwrap

import pytest
import torch

from openclaw_nb.monitor.store import Monitor

from .conftest import Lab, single_device
from .test_data_parallel import LOOP, SETUP, STATE, check, refusal

pytestmark = pytest.mark.cluster

NUM_RANKS = 2

# What local SGD is, written down by itself: each rank has a model and an optimizer, and its part of each batch.
REFERENCE = """
import copy
def factor(num_all, num_own): return 1
ranks = [(m := copy.deepcopy(model), torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)) for _ in range(num_ranks)]
def average(seen):
    total = sum(seen)
    tensors = [
        [*m.parameters(), *(o.state[p]["momentum_buffer"] for p in m.parameters() if "momentum_buffer" in o.state[p])]
        for m, o in ranks
    ]
    with torch.no_grad():
        for group in zip(*tensors):
            mean = sum(t * (n / total) for t, n in zip(group, seen))
            for tensor in group:
                tensor.copy_(mean)
for epoch in range(2):
    seen, steps = [0] * num_ranks, 0
    for x, y in loader:
        for r, (m, o) in enumerate(ranks):
            part = torch.arange(len(x)).tensor_split(num_ranks)[r]
            o.zero_grad()
            (factor(len(x), len(x[part])) * loss_fn(m(x[part]), y[part])).backward()
            o.step()
            seen[r] += len(x[part])
        steps += 1
        if steps % every == 0:
            average(seen)
            seen = [0] * num_ranks
    if sum(seen):
        average(seen)
state = {k: v.detach().clone() for k, v in ranks[0][0].state_dict().items()}
"""


def test_one_step_each_is_single_device_training(lab: Lab) -> None:
    loop = LOOP.replace("losses.append(loss.item())", "losses.append(0.0)")  # the loss is each rank's own
    check(lab, NUM_RANKS, loop=loop, options={"mode": "parameter"})
    check(lab, 3, loop=loop, options={"mode": "parameter"})


@pytest.mark.parametrize("every", [2, 3, 100])
def test_several_steps_each_are_local_sgd(lab: Lab, every: int) -> None:
    options = {"mode": "parameter", "sync_frequency": every}
    result = lab.train(SETUP, LOOP + STATE, NUM_RANKS, options=options)
    assert result.ok, [f"{f.error_type}: {f.message}" for f in result.failures.values()]
    expected = single_device(SETUP + f"num_ranks, every = {NUM_RANKS}, {every}\n", REFERENCE)["state"]
    for rank in range(NUM_RANKS):
        state = lab.pull("state", rank)
        for name, value in expected.items():
            torch.testing.assert_close(
                state[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


# A sum over a part of the batch is that much smaller than over all of it.
OF_A_SUM = REFERENCE.replace("return 1", "return num_all / num_own")
SUM = SETUP.replace("CrossEntropyLoss()", "CrossEntropyLoss(reduction='sum')").replace("lr=0.05", "lr=0.002")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_one_step_each_of_a_sum_is_single_device_training(lab: Lab, num_ranks: int) -> None:
    loop = LOOP.replace("losses.append(loss.item())", "losses.append(0.0)")
    loop = loop.replace("loss.backward()", "(loss + 0.3 * model[0].weight.square().sum()).backward()")
    check(lab, num_ranks, SUM, loop, options={"mode": "parameter"}, reduction="sum")
    check(
        lab,
        num_ranks,
        SUM,
        loop.replace(" + 0.3 * model[0].weight.square().sum()", ""),
        options={"mode": "parameter"},
    )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_several_steps_each_of_a_sum_are_local_sgd(lab: Lab, num_ranks: int) -> None:
    """On three ranks the parts of a batch of 32 are not of the same size."""
    monitor = Monitor()
    forget = lab.master.listen(monitor.take)
    result = lab.train(SUM, LOOP + STATE, num_ranks, options={"mode": "parameter", "sync_frequency": 3})
    forget()
    assert result.ok, [f"{f.error_type}: {f.message}" for f in result.failures.values()]
    reference = OF_A_SUM.replace("lr=0.05", "lr=0.002")
    expected = single_device(SUM + f"num_ranks, every = {num_ranks}, 3\n", reference)["state"]
    for name, value in expected.items():
        torch.testing.assert_close(lab.pull("state", num_ranks - 1)[name], value, rtol=1e-6, atol=1e-6)
    history = monitor.latest()
    assert history is not None
    assert (
        22 * 1.2 < history.loss.y[-1] < 22 * 2.0
    )  # of the whole last batch, whose 22 samples have about ln 5 each


def test_the_kind_of_a_loss_is_told_or_refused(lab: Lab) -> None:
    options = {"mode": "parameter", "sync_frequency": 3}
    mixed = LOOP.replace("loss_fn(model(x), y)", "(out := model(x)).matmul(out.T).logsumexp(1).mean()")
    result = lab.train(SETUP, mixed, NUM_RANKS, options=options)
    assert result.ok
    assert sum("neither a mean nor a sum" in note for note in result.notes) == 1
    other = LOOP.replace(
        "loss_fn(model(x), y)", "loss_fn(model(x), y) if rank else loss_fn(model(x), y) * len(x)"
    )
    result = lab.train(SETUP, other, NUM_RANKS, options=options)
    assert not result.ok
    assert any("not of the same kind on all ranks" in f.message for f in result.failures.values())
    result = lab.train(SUM, LOOP, NUM_RANKS, options={"mode": "parameter", "accumulate": 2})
    assert "need a loss that is a mean over the samples; this one is sum" in refusal(result)


def test_learning_rates_that_came_apart_are_rank_0s_after_the_average(lab: Lab) -> None:
    setup = (
        SETUP + "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)\n"
    )
    loop = LOOP.replace(
        "losses.append(loss.item())",
        "plateau.step(-len(losses) if rank == 0 else len(losses)); losses.append(optimizer.param_groups[0]['lr'])",
    )
    result = lab.train(setup, loop, NUM_RANKS, options={"mode": "parameter", "sync_frequency": 5})
    assert result.ok, [f"{f.error_type}: {f.message}" for f in result.failures.values()]
    assert lab.pull("losses", 0) == [0.05] * 10
    of_a_pass = [0.05, 0.025, 0.0125, 0.00625, 0.003125]  # its metric only grows, except at the first step
    assert lab.pull("losses", 1)[:5] == pytest.approx(of_a_pass)
    assert lab.pull("losses", 1)[5] == pytest.approx(
        0.025
    )  # it was given rank 0's 0.05, and sees a bad step again
    lab.good("lr, num_bad = optimizer.param_groups[0]['lr'], plateau.best", targets=range(NUM_RANKS))
    assert lab.pull("lr", 1) == 0.05
    assert lab.pull("num_bad", 1) == lab.pull("num_bad", 0) == -9
    assert (
        sum("rank 0's state of the schedule is used (plateau, optimizer)" in note for note in result.notes)
        == 1
    )


def test_the_smallest_loss_scale_is_used_after_the_average(lab: Lab) -> None:
    """Rank 1 overflows at its third step: it skips it and halves its scale."""
    setup = SETUP + "scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)\n"
    loop = LOOP.replace(
        "loss.backward()",
        "scaler.scale(loss * (float('inf') if rank and len(losses) == 2 else 1)).backward()",
    )
    loop = loop.replace("optimizer.step()", "scaler.step(optimizer); scaler.update()")
    loop = loop.replace("losses.append(loss.item())", "losses.append(scaler.get_scale())")
    result = lab.train(setup, loop + STATE, NUM_RANKS, options={"mode": "parameter", "sync_frequency": 5})
    assert result.ok, [f"{f.error_type}: {f.message}" for f in result.failures.values()]
    assert lab.pull("losses", 0) == [1024.0] * 5 + [512.0] * 5
    assert lab.pull("losses", 1) == [1024.0] * 2 + [512.0] * 8
    assert torch.equal(lab.pull("state", 0)["0.weight"], lab.pull("state", 1)["0.weight"])
    assert bool(lab.pull("state", 1)["0.weight"].isfinite().all())
    assert sum("the smallest scale of scaler is used" in note for note in result.notes) == 1


def test_accumulated_batches_are_one_local_step(lab: Lab) -> None:
    """Two batches a step are the batches of twice the size; a pass has an odd number of them."""
    options = {"mode": "parameter", "accumulate": 2}
    loop = LOOP.replace("losses.append(loss.item())", "losses.append(0.0)")
    setup = SETUP.replace("shuffle=True", "shuffle=False")
    assert lab.train(setup, loop + STATE, NUM_RANKS, options=options).ok
    doubled = single_device(setup.replace("batch_size=32", "batch_size=64"), loop + STATE)["state"]
    for name, value in lab.pull("state", 1).items():
        torch.testing.assert_close(value, doubled[name], rtol=1e-6, atol=1e-6)


def test_an_evaluation_sees_the_average(lab: Lab) -> None:
    """Both ranks evaluate the same model in the middle of a pass, and go on from there."""
    loop = textwrap.dedent("""
        outputs = []
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            if number == 1:
                before = model[0].weight.detach().clone()
                with torch.no_grad():
                    outputs.append(model(X[:5]))
                saved = {k: v.clone() for k, v in model.state_dict().items()}
    """)
    assert lab.train(SETUP, loop, NUM_RANKS, options={"mode": "parameter", "sync_frequency": 100}).ok
    assert not torch.equal(lab.pull("before", 0), lab.pull("before", 1))
    assert torch.equal(lab.pull("outputs", 0)[0], lab.pull("outputs", 1)[0])
    assert torch.equal(lab.pull("saved", 0)["0.weight"], lab.pull("saved", 1)["0.weight"])


def test_a_batch_norm_keeps_its_own_statistics_until_the_average(lab: Lab) -> None:
    setup = SETUP.replace("nn.Tanh()", "nn.BatchNorm1d(32), nn.Tanh()")
    loop = LOOP + "model.eval()\nwith torch.no_grad(): out = model(X[:7])\n"
    result = lab.train(setup, loop, NUM_RANKS, options={"mode": "parameter", "sync_frequency": 3})
    assert result.ok
    assert any("steps of its own" in note for note in result.notes)
    assert torch.equal(lab.pull("out", 0), lab.pull("out", 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("losses.append(loss.item())", "losses.append(0.0)\n        if rank == 0: model.state_dict()"),
            "different occasions",
        ),
        (("optimizer.step()", "None if rank and not losses else optimizer.step()"), "hold different state"),
    ],
    ids=["state_dict on one rank", "a first step that was skipped"],
)
def test_ranks_that_are_not_at_the_same_average_are_told(
    lab: Lab, change: tuple[str, str], said: str
) -> None:
    options = {"mode": "parameter", "sync_frequency": 1}
    result = lab.train(SETUP, LOOP.replace(*change), NUM_RANKS, options=options)
    assert not result.ok
    assert any(said in failure.message for failure in result.failures.values())


def test_more_batches_than_a_pass_has_are_told(lab: Lab) -> None:
    for options in ({"sync_frequency": 6}, {"mode": "parameter", "sync_frequency": 3, "accumulate": 2}):
        result = lab.train(SETUP, LOOP, NUM_RANKS, options=options)
        assert result.ok
        assert any(
            "6 batches between synchronisations are more than a pass of loader has (5)" in n
            for n in result.notes
        )


def test_bytes_fall_and_drift_grows_with_the_steps_between_averages(lab: Lab) -> None:
    sent, drift = {}, {}
    for every in (1, 5):
        monitor = Monitor()
        forget = lab.master.listen(monitor.take)
        assert lab.train(SETUP, LOOP, NUM_RANKS, options={"mode": "parameter", "sync_frequency": every}).ok
        forget()
        history = monitor.latest()
        assert history is not None
        sent[every] = history.workers[0].num_bytes
        drift[every] = history.workers[0].drift
    assert sent[5] == pytest.approx(sent[1] / 5, rel=0.02)
    assert 0 < drift[1] < drift[5] < 1
