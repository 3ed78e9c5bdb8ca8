"""Certificates of cells that are right, and of cells that were made wrong on purpose."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from openclaw_nb.core.errors import UsageError
from openclaw_nb.notebook.certificate import Certificate
from openclaw_nb.protocol.messages import StrategySpec

from .conftest import Lab
from .test_data_parallel import CNN, LOOP, SETUP, TRANSFORMER, refusal

pytestmark = pytest.mark.cluster

NUM_RANKS = 2


def verify(lab: Lab, setup: str, loop: str = LOOP, num_steps: int = 4, **fields: Any) -> Certificate:
    """Build the objects and verify the loop; what it may change must be as before."""
    lab.good(textwrap.dedent(setup), targets=range(NUM_RANKS))
    look = "random_before = torch.get_rng_state(), sorted(k for k in globals() if not k.startswith('_'))\n"
    lab.good(
        "before = [t.clone() for t in model.state_dict().values()]\n" + 2 * look, targets=range(NUM_RANKS)
    )
    result = lab.master.run_cell(
        textwrap.dedent(loop),
        strategy=StrategySpec(name="data_parallel", **fields),
        targets=range(NUM_RANKS),
        verify_steps=num_steps,
    ).wait(60)
    assert result is not None
    assert result.ok, [f"{f.error_type}: {f.message}" for f in result.failures.values()]
    lab.good(
        "assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values()))\n"
        "assert torch.equal(random_before[0], torch.get_rng_state())\n"
        "assert random_before[1] == sorted(k for k in globals() if not k.startswith('_')), random_before[1]\n"
        "assert not optimizer.state and all(p.grad is None for p in model.parameters())\n"
        "assert model.training and not model._forward_pre_hooks\n",
        targets=range(NUM_RANKS),
    )
    assert not any(value.get("entries") for value in result.values.values())
    return Certificate(result.values[0]["certificate"])


@pytest.mark.parametrize("setup", [SETUP, CNN, TRANSFORMER], ids=["mlp", "cnn-batchnorm", "transformer-tied"])
def test_a_right_cell_passes(lab: Lab, setup: str) -> None:
    certificate = verify(lab, setup)
    assert certificate.passed, certificate
    assert len(certificate.rows) == 4
    for row in certificate.rows:
        assert max(row["loss"], row["state"]) < 1e-5
        # A bias before a BatchNorm has no gradient but rounding.
        assert row["gradient"] < (1e-2 if setup is CNN else 1e-5)
    assert "float64" in certificate.reason


def test_a_wrong_weight_fails(lab: Lab) -> None:
    """Uneven slices weighted as if they were even: a batch of 17 has 8 and 9 samples."""
    plant = "from openclaw_nb.engine.steps.engine import StepEngine\nkept = StepEngine._weight_of\n"
    plant += "StepEngine._weight_of = lambda self, kind: 1.0\n"
    try:
        certificate = verify(lab, SETUP.replace("batch_size=32", "batch_size=17") + plant)
    finally:
        lab.good(
            "from openclaw_nb.engine.steps.engine import StepEngine\nStepEngine._weight_of = kept",
            targets=range(NUM_RANKS),
        )
    assert not certificate.passed
    assert certificate.parted is not None
    assert (certificate.parted["step"], certificate.parted["kind"]) == (1, "gradient")


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        # Each is planted under the strategy alone: the single-device run on rank 0 does not see it.
        (
            "reducer.set_gradients = lambda self: (kept(self), [p.grad.mul_(2) for p in self.parameters])",
            "gradient",
        ),
        ("reducer.set_gradients = lambda self: (kept(self), self.parameters[0].grad.zero_())", "gradient"),
        (
            "reducer.set_gradients = lambda self: (kept(self), self.parameters[2].grad.mul_(1.001))",
            "gradient",
        ),
        ("reducer.set_gradients = lambda self: (kept(self), self.parameters[1].grad.add_(rank))", "ranks"),
    ],
    ids=["twice the gradient", "a skipped parameter", "a thousandth too much", "a rank of its own"],
)
def test_planted_faults_in_the_gradients_fail(lab: Lab, fault: str, kind: str) -> None:
    plant = "from openclaw_nb.engine.steps.reducer import GradientReducer as reducer\nkept = reducer.set_gradients\n"
    try:
        certificate = verify(lab, SETUP + plant + fault + "\n")
    finally:
        lab.good("reducer.set_gradients = kept", targets=range(NUM_RANKS))
    assert certificate.parted is not None
    assert certificate.parted["kind"] == kind
    assert certificate.parted["step"] == 1
    assert repr(certificate).startswith("FAILED")


def test_a_rank_with_other_data_fails(lab: Lab) -> None:
    certificate = verify(lab, SETUP + "if rank == 1: loader.dataset.tensors[0].add_(0.01)\n")
    assert certificate.parted is not None
    assert certificate.parted["step"] == 1


def test_buffers_that_are_not_synchronised_fail(lab: Lab) -> None:
    certificate = verify(lab, CNN, sync_batchnorm=False)
    assert not certificate.passed


def test_several_batches_a_step_equal_a_larger_batch(lab: Lab) -> None:
    certificate = verify(lab, SETUP, options={"sync_frequency": 3})
    assert certificate.passed, certificate
    assert any("3 batches at once" in note for note in certificate.notes)


def test_a_number_of_steps_that_is_none_is_refused_before_anything_runs(lab: Lab) -> None:
    spec = StrategySpec(name="data_parallel")
    with pytest.raises(UsageError, match="verify_steps is -1 with a strategy"):
        lab.master.run_cell("ran = True", strategy=spec, targets=range(NUM_RANKS), verify_steps=-1)
    with pytest.raises(UsageError, match="verify_steps is 3 with no strategy"):
        lab.master.run_cell("ran = True", targets=range(NUM_RANKS), verify_steps=3)
    lab.good("assert 'ran' not in globals()", targets=range(NUM_RANKS))


def test_more_steps_than_the_cell_has(lab: Lab) -> None:
    """Two epochs of 150 samples in batches of 32 are ten steps."""
    certificate = verify(lab, SETUP, num_steps=50)
    assert certificate.passed, certificate
    assert len(certificate.rows) == 10
    assert "the cell has no more steps" in certificate.notes


def test_dropout_is_switched_off_and_said(lab: Lab) -> None:
    certificate = verify(lab, SETUP.replace("nn.Tanh()", "nn.Dropout(0.5), nn.Tanh()"))
    assert certificate.passed, certificate
    assert "dropout was switched off" in certificate.notes
    lab.good("assert model[1].p == 0.5", targets=range(NUM_RANKS))


def refused(lab: Lab, setup: str, loop: str, **fields: Any) -> str:
    """Verify a cell that is refused; return why."""
    lab.good(setup, targets=range(NUM_RANKS))
    result = lab.master.run_cell(
        loop, strategy=StrategySpec(name="data_parallel", **fields), targets=range(NUM_RANKS), verify_steps=3
    ).wait(60)
    assert result is not None
    lab.good("assert not optimizer.state and not model._forward_pre_hooks", targets=range(NUM_RANKS))
    return refusal(result)


@pytest.mark.parametrize(
    ("forward", "call"),
    [
        ("F.dropout(x, 0.5, self.training)", "torch.nn.functional.dropout"),
        ("x + 0.01 * torch.rand_like(x)", "torch.rand_like"),
        ("x + x.new_empty(x.shape).normal_()", "torch.Tensor.normal_"),
        ("x * torch.distributions.Bernoulli(torch.tensor(0.5)).sample(x.shape)", "torch.bernoulli"),
    ],
)
def test_a_model_that_draws_by_itself_is_refused_by_layer_and_call(lab: Lab, forward: str, call: str) -> None:
    noisy = f"""
    import torch, torch.nn as nn, torch.nn.functional as F
    class Noisy(nn.Module):
        def forward(self, x):
            return {forward}
    """
    setup = textwrap.dedent(noisy) + SETUP.replace("nn.Tanh()", "Noisy(), nn.Tanh()")
    said = refused(lab, setup, LOOP)
    assert f"model.1 draws random numbers while it runs ({call} in `return {forward}`)" in said
    lab.good("assert not model[1]._forward_hooks", targets=range(NUM_RANKS))


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        (
            "0.1 * torch.randn_like(x)",
            "from torch under the strategy than on a single device (torch.randn_like in",
        ),
        ("0.1 * torch.tensor(np.random.rand(len(x), 1)).float()", "from numpy.random under the strategy"),
        ("0.1 * torch.tensor([[random.random()] for _ in x])", "from random under the strategy"),
    ],
    ids=["torch", "numpy", "python"],
)
def test_a_cell_that_draws_for_each_sample_is_not_called_wrong(lab: Lab, noise: str, said: str) -> None:
    loop = "import random, numpy as np\n" + LOOP.replace("model(x)", f"model(x + {noise})")
    assert said in refused(lab, SETUP, loop)
    if "torch.randn" in noise:  # every rank draws for the whole batch there
        assert verify(lab, SETUP, loop, split="model").passed


def test_numbers_that_are_drawn_for_a_batch_are_the_same_and_compared(lab: Lab) -> None:
    loop = "import random\n" + LOOP.replace(
        "model(x)", "model(x * (1 + random.random() + torch.rand(()).item()))"
    )
    assert verify(lab, SETUP, loop).passed


TWO_OPTIMIZERS = """
first, second = list(model.parameters())[:2], list(model.parameters())[2:]
optimizer = torch.optim.SGD(first, lr=0.1)
other = torch.optim.SGD(second, lr=0.1)
"""


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_every_optimizer_of_the_last_step_is_compared(lab: Lab, wrong: bool) -> None:
    """Under the strategy alone, the second optimizer of the only step takes another learning rate."""
    loop = LOOP.replace("optimizer.step()", "optimizer.step(); other.step()")
    plant = "from openclaw_nb.engine.steps.reducer import GradientReducer as reducer\nkept = reducer.set_gradients\n"
    fault = "reducer.set_gradients = lambda self: (kept(self), other.param_groups[0].update(lr=0.2))\n"
    try:
        certificate = verify(
            lab, SETUP + TWO_OPTIMIZERS + plant + (fault if wrong else ""), loop, num_steps=1
        )
    finally:
        lab.good("reducer.set_gradients = kept", targets=range(NUM_RANKS))
    assert certificate.passed is not wrong, certificate
    if wrong:
        assert certificate.parted is not None
        assert certificate.parted["kind"] == "state"


def test_without_a_float64_run_the_certificate_says_why(lab: Lab) -> None:
    loop = LOOP.replace("model(x)", "only_single(model(x))")
    setup = (
        SETUP
        + """
    def only_single(y):
        assert y.dtype == torch.float32, "float32 only"
        return y
    """
    )
    certificate = verify(lab, textwrap.dedent(SETUP) + textwrap.dedent(setup.removeprefix(SETUP)), loop)
    assert certificate.passed, certificate
    assert any("float32 only" in note for note in certificate.notes)
    assert "units in the last place" in certificate.reason


def in_16_bits(setup: str, dtype: str) -> tuple[str, str]:
    """Return the cells with parameters and computation in a dtype of 16 bits."""
    setup += (
        f"model.to(torch.{dtype})\noptimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)\n"
    )
    return setup, LOOP.replace("model(x)", f"model(x.to(torch.{dtype})).float()")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("fault", "data"),
    [
        ("", ""),
        ("[p.grad.mul_(2) for p in self.parameters]", ""),
        ("[p.grad.mul_(0.5) for p in self.parameters]", ""),
        ("self.parameters[0].grad.zero_()", ""),
        ("", "if rank == 1: X.copy_(X.roll(1, dims=0))\n"),
    ],
    ids=["right", "twice the gradient", "half of it", "a skipped parameter", "a rank with other data"],
)
def test_faults_show_in_16_bits_too(lab: Lab, dtype: str, fault: str, data: str) -> None:
    plant = "from openclaw_nb.engine.steps.reducer import GradientReducer as reducer\nkept = reducer.set_gradients\n"
    if fault:
        plant += f"reducer.set_gradients = lambda self: (kept(self), {fault})\n"
    setup, loop = in_16_bits(SETUP, dtype)
    try:
        certificate = verify(lab, setup + data + plant, loop)
    finally:
        lab.good("reducer.set_gradients = kept", targets=range(NUM_RANKS))
    assert certificate.passed is not bool(fault or data), certificate
    assert dtype in certificate.reason
    if not certificate.passed:
        assert certificate.parted is not None
        assert certificate.parted["step"] == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_right_model_with_batchnorm_passes_in_16_bits(lab: Lab, dtype: str) -> None:
    """Values near a kink of ReLU and max-pooling fall to either side: gradients differ by several percent."""
    setup, loop = in_16_bits(CNN, dtype)
    assert verify(lab, setup, loop).passed
    assert not verify(lab, setup, loop, sync_batchnorm=False).passed


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_autocast_is_compared_as_what_it_computes_in(lab: Lab, wrong: bool) -> None:
    loop = LOOP.replace(
        "    loss = loss_fn(model(x), y)",
        "    with torch.autocast('cpu', torch.bfloat16): out = model(x)\n        loss = loss_fn(out.float(), y)",
    )
    plant = "from openclaw_nb.engine.steps.reducer import GradientReducer as reducer\nkept = reducer.set_gradients\n"
    if wrong:
        plant += (
            "reducer.set_gradients = lambda self: (kept(self), [p.grad.mul_(1.5) for p in self.parameters])\n"
        )
    try:
        certificate = verify(lab, SETUP + plant, loop)
    finally:
        lab.good("reducer.set_gradients = kept", targets=range(NUM_RANKS))
    assert "bfloat16" in certificate.reason
    assert certificate.passed is not wrong, certificate


def test_a_model_inside_of_an_object_is_verified_and_put_back(lab: Lab) -> None:
    """The class comes from a module, so that nothing but the strategy's own search finds the model in it."""
    setup = SETUP.replace("nn.Tanh()", "nn.Dropout(0.5), nn.Tanh()") + textwrap.dedent("""
        import argparse
        holder = argparse.Namespace(model=model, optimizer=optimizer)
        kept = [t.clone() for t in model.state_dict().values()]
        del model, optimizer
    """)
    lab.good(setup, targets=range(NUM_RANKS))
    loop = LOOP.replace("model(x)", "holder.model(x)").replace("optimizer.", "holder.optimizer.")
    result = lab.master.run_cell(
        loop, strategy=StrategySpec(name="data_parallel"), targets=range(NUM_RANKS), verify_steps=3
    ).wait(60)
    assert result is not None
    assert result.ok, [f"{f.error_type}: {f.message}" for f in result.failures.values()]
    certificate = Certificate(result.values[0]["certificate"])
    assert certificate.passed, certificate
    assert "dropout was switched off" in certificate.notes
    assert "float64" in certificate.reason
    lab.good(
        "model, optimizer = holder.model, holder.optimizer\n"
        "assert all(torch.equal(a, b) for a, b in zip(kept, model.state_dict().values()))\n"
        "assert model[1].p == 0.5 and not optimizer.state",
        targets=range(NUM_RANKS),
    )


def test_state_of_classes_functions_and_slots_is_put_back_and_the_rest_is_named(lab: Lab) -> None:
    setup = SETUP + textwrap.dedent("""
        import sqlite3, collections
        class Meter:
            __slots__ = ("seen",)
            made = 0
            def __init__(self): self.seen = 0; Meter.made += 1
        def note(value, history=[]):
            history.append(value); note.calls = len(history)
        meter, box = Meter(), collections.UserDict(seen=[])
        trainer = type("Trainer", (), {})()
        trainer.log = sqlite3.connect(":memory:", check_same_thread=False)
    """)
    more = "        meter.seen += 1; Meter(); note(1); box['seen'].append(1); trainer.log.total_changes\n"
    certificate = verify(lab, setup, LOOP + more)
    assert certificate.passed
    assert any("trainer.log (sqlite3.Connection)" in note for note in certificate.notes)
    lab.good(
        "assert (meter.seen, Meter.made, note.__defaults__, vars(note), box) == (0, 1, ([],), {}, {'seen': []})",
        targets=range(NUM_RANKS),
    )


def test_a_cell_that_is_too_large_is_refused_with_the_sizes(lab: Lab) -> None:
    setup = SETUP + textwrap.dedent("""
        import numpy as np, tempfile
        file = tempfile.NamedTemporaryFile()
        X = torch.from_numpy(np.memmap(file.name, dtype="float32", mode="w+", shape=(2**36, 12)))
    """)
    assert "X 3.0 TiB" in refused(lab, setup, LOOP + "        X[0] = 1\n")
    assert "for what the steps are compared by" in refused_steps(lab, 10**9)
    assert verify(lab, setup).passed  # a cell that does not use it; the loader has the first X
    lab.good("del X; file.close()", targets=range(NUM_RANKS))


def refused_steps(lab: Lab, num_steps: int) -> str:
    lab.good(SETUP, targets=range(NUM_RANKS))
    spec = StrategySpec(name="data_parallel")
    result = lab.master.run_cell(LOOP, strategy=spec, targets=range(NUM_RANKS), verify_steps=num_steps).wait(
        60
    )
    assert result is not None
    return refusal(result)


def test_own_state_is_put_back(lab: Lab) -> None:
    """Lists, counters and objects of the cell's own classes are as they were."""
    setup = SETUP + textwrap.dedent("""
        class Trainer:
            def __init__(self): self.seen, self.history = 0, []
        trainer, table = Trainer(), {'a': [1]}
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    """)
    loop = (
        LOOP
        + "        trainer.seen += 1; trainer.history.append(1); table['a'].append(2); scheduler.step()\n"
    )
    assert verify(lab, setup, loop).passed
    lab.good(
        "assert (trainer.seen, trainer.history, table) == (0, [], {'a': [1]})\n"
        "assert scheduler.last_epoch == 0 and optimizer.param_groups[0]['lr'] == 0.05",
        targets=range(NUM_RANKS),
    )


@pytest.mark.parametrize(
    ("setup", "loop", "options", "said"),
    [
        (
            "numbers = (i for i in range(9))\n",
            LOOP + "        next(numbers)\n",
            {},
            "'numbers' is a generator",
        ),
        ("", LOOP, {"mode": "parameter"}, "another method than single-device training"),
        ("", LOOP.replace("optimizer.step()", "1 / 0"), {}, "on a single device it raised ZeroDivisionError"),
        ("", "loss_fn(model(X), Y).backward()\n", {}, "on a single device it made no optimizer step"),
    ],
    ids=["a generator", "local steps", "an error", "no step"],
)
def test_what_cannot_be_verified_says_why(
    lab: Lab, setup: str, loop: str, options: dict[str, Any], said: str
) -> None:
    lab.good(SETUP + setup, targets=range(NUM_RANKS))
    result = lab.master.run_cell(
        loop,
        strategy=StrategySpec(name="data_parallel", options=options),
        targets=range(NUM_RANKS),
        verify_steps=3,
    ).wait(60)
    assert result is not None
    assert said in refusal(result)
    lab.good("assert not optimizer.state and torch.get_num_threads() == 1", targets=range(NUM_RANKS))
