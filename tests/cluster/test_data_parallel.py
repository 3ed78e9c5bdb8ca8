"""Data parallel on real workers gives what one device gives.

The right values are those of the same two cells run in this process on one device. Tolerances: a sum of
float32 gradients in another order differs by a few units in the last place (1.2e-7 of values around 1); two
epochs of SGD carry that to below 1e-6. AdamW divides by the root of squared gradients, so that a rounding of
a gradient near zero can show in full as a step: 1e-4 of a step of 1e-3 a batch is allowed there.
"""

from __future__ import annotations

import textwrap

import pytest
import torch

from openclaw_nb.cluster.run import RunResult
from openclaw_nb.protocol.messages import StrategySpec

from .conftest import Lab, single_device

pytestmark = pytest.mark.cluster

SETUP = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
X = torch.randn(150, 12)
Y = torch.randint(5, (150,))
Z = torch.randn(150, 5)
model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 5))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
"""
LOOP = """
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
STATE = "\nstate = {k: v.detach().clone() for k, v in model.state_dict().items()}\n"
SGD_TOLERANCE = 1e-6


def check(
    lab: Lab,
    num_workers: int,
    setup: str = SETUP,
    loop: str = LOOP,
    tolerance: float = SGD_TOLERANCE,
    **options: object,
) -> dict[str, object]:
    """Train both ways; compare the parameters and the losses, on the first and the last rank."""
    loop = loop + STATE
    result = lab.train(setup, loop, num_workers, **options)
    assert result.ok, [f"{f.error_type}: {f.message}" for f in result.failures.values()]
    expected = single_device(setup, loop)
    for rank in {0, num_workers - 1}:
        state = lab.pull("state", rank)
        for name, value in expected["state"].items():
            torch.testing.assert_close(
                state[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
            )
        losses = lab.pull("losses", rank)
        assert losses == pytest.approx(expected["losses"], rel=max(tolerance, 1e-5), abs=1e-6)
    return expected


def refusal(result: RunResult) -> str:
    """Return why a cell was refused. A rank that is slower in saying so may be released before it does."""
    kinds = {failure.error_type for failure in result.failures.values()}
    assert kinds <= {"RefusedError", "ReleasedError"}, kinds
    assert result.first is not None
    return result.failures[result.first].message


CNN = """
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(1)
torch.set_num_threads(1)
X = torch.randn(70, 1, 8, 8)
Y = torch.randint(4, (70,))
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4),
)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True)
"""
TRANSFORMER = """
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(2)
torch.set_num_threads(1)
class Tied(nn.Module):
    def __init__(self, vocabulary=20, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))
model = Tied()
text = torch.randint(20, (50, 9))
def loss_fn(logits, tokens):
    B, T, V = logits.shape
    return nn.functional.cross_entropy(logits.view(B * T, V), tokens.reshape(B * T))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=8, shuffle=True)
"""


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("setup", [SETUP, CNN, TRANSFORMER], ids=["mlp", "cnn-batchnorm", "transformer-tied"])
def test_sgd_with_momentum_equals_single_device(lab: Lab, setup: str, num_workers: int) -> None:
    check(lab, num_workers, setup)


@pytest.mark.parametrize("num_workers", [2, 4])
def test_adamw_equals_single_device(lab: Lab, num_workers: int) -> None:
    setup = SETUP.replace(
        "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
        "torch.optim.AdamW(model.parameters(), lr=1e-3)",
    )
    check(lab, num_workers, setup, tolerance=1e-5)


LOSSES = {
    "ce-sum": "F.cross_entropy(out, y, reduction='sum') * 0.01",
    "ce-smoothed": "F.cross_entropy(out, y, label_smoothing=0.1)",
    "nll": "F.nll_loss(F.log_softmax(out, 1), y)",
    "mse": "F.mse_loss(out, F.one_hot(y, 5).float())",
    "mse-sum": "F.mse_loss(out, F.one_hot(y, 5).float(), reduction='sum') / 100",
    "l1": "(out - F.one_hot(y, 5)).abs().mean()",
    "huber": "F.huber_loss(out, F.one_hot(y, 5).float())",
    "bce": "F.binary_cross_entropy_with_logits(out, F.one_hot(y, 5).float())",
    "kl-batchmean": (
        "F.kl_div(F.log_softmax(out, 1), torch.softmax(F.one_hot(y, 5).float(), 1), reduction='batchmean')"
    ),
    "manual-sum-over-len": "(out - F.one_hot(y, 5)).pow(2).sum() / len(x)",
    "none-then-mean": "F.cross_entropy(out, y, reduction='none').mean()",
    "with-penalty": "F.cross_entropy(out, y) + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())",
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_losses_and_reductions(lab: Lab, loss: str) -> None:
    loop = LOOP.replace("loss_fn(model(x), y)", "None\n        out = model(x)\n        loss = " + loss)
    check(lab, 3, loop=loop)


def test_a_planted_wrong_weight_fails(lab: Lab) -> None:
    """With 1/world instead of the share of samples, the uneven tail shows (150 = 4 x 32 + 22, 3 ranks)."""
    wrong = """
from openclaw_nb.engine.steps.engine import StepEngine
if not hasattr(StepEngine, "_right"): StepEngine._right = StepEngine._weight_of
StepEngine._weight_of = lambda self, kind: 1.0
"""
    lab.good(wrong)
    try:
        with pytest.raises(AssertionError):
            check(lab, 3)
    finally:
        lab.good("StepEngine._weight_of = StepEngine._right")
    check(lab, 3)


def loop_of(body: str) -> str:
    return "losses = []\n" + textwrap.dedent(body)


_TWO_AT_ONCE = """
        for epoch in range(3):
            for (x, y), (u, v) in zip(loader, OTHER):
                optimizer.zero_grad()
                loss = loss_fn(model(x), y) + loss_fn(model(u), v)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    """
# Of loaders that are begun together each has drawn a number before the first of them draws its batches.
WAYS = {
    "two loaders at once": "        other = DataLoader(loader.dataset, batch_size=32, shuffle=True)\n"
    + _TWO_AT_ONCE.replace("OTHER", "other"),
    "a loader with itself": _TWO_AT_ONCE.replace("OTHER", "loader"),
    "halves in turn": """
        for epoch in range(2):
            for number, (x, y) in enumerate(loader):
                model[0].requires_grad_(number % 2 == 0)
                model[2].requires_grad_(number % 2 == 1)  # as many tensors as the other
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    """,
    "in a function": """
        def train(epochs):
            for _ in range(epochs):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = loss_fn(model(x), y)
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
        train(2)
    """,
    "trainer class": """
        class Trainer:
            def __init__(self, model, optimizer):
                self.model, self.optimizer = model, optimizer
            def step(self, x, y):
                self.optimizer.zero_grad(set_to_none=False)
                loss = loss_fn(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                return loss.item()
        trainer = Trainer(model, optimizer)
        for epoch in range(2):
            for i, (x, y) in enumerate(loader):
                losses.append(trainer.step(x, y))
    """,
    "clip, scheduler, evaluation": """
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        for epoch in range(2):
            model.train()
            for x, y in loader:
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                held_out = DataLoader(TensorDataset(X, Y), 64)
                total = sum(loss_fn(model(x), y).item() * len(x) for x, y in held_out)
            losses.append(total / len(X))
    """,
    "accumulation by the user": """
        for epoch in range(2):
            optimizer.zero_grad()
            for i, (x, y) in enumerate(loader):
                loss = loss_fn(model(x), y) / 2
                loss.backward()
                losses.append(loss.item())
                if i % 2 == 1 or i == len(loader) - 1:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
    "two optimizers": """
        for epoch in range(2):
            for x, y in loader:
                model.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                second.step()
                losses.append(loss.item())
    """,
    "grad scaler": """
        for epoch in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.item())
    """,
    "break and a second pass": """
        for epoch in range(3):
            for i, (x, y) in enumerate(loader):
                if i == 3:
                    break
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    """,
    "a branch without some parameters": """
        for epoch in range(2):
            for i, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                model.use_second = i % 2 == 0
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    """,
    "training in evaluation mode": """
        model.eval()
        for epoch in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    """,
    "accumulation over branches": """
        for epoch in range(2):
            for i, (x, y) in enumerate(loader):
                model.use_second = i % 2 == 0
                loss = loss_fn(model(x), y)
                loss.backward()
                losses.append(loss.item())
                if i % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
    """,
    "frozen and thawed": """
        for epoch in range(2):
            for p in model[0].parameters():
                p.requires_grad_(epoch > 0)
            for x, y in loader:
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    """,
}
EXTRA = {
    "a branch without some parameters": SETUP.replace(
        "model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 5))",
        """class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 5), nn.Linear(12, 5)
        self.use_second = True
    def forward(self, x):
        return self.second(x) if self.use_second else self.first(x)
model = Two()""",
    ),
    "two optimizers": SETUP.replace(
        "optimizer = torch.optim.SGD(model.parameters()", "optimizer = torch.optim.SGD(model[0].parameters()"
    )
    + "second = torch.optim.SGD(model[2].parameters(), lr=0.02)\n",
    "grad scaler": SETUP + "scaler = torch.amp.GradScaler('cpu')\n",
    "clip, scheduler, evaluation": SETUP.replace("shuffle=True", "shuffle=True, num_workers=0"),
}


@pytest.mark.parametrize("way", WAYS)
def test_loops_as_people_write_them(lab: Lab, way: str) -> None:
    check(lab, 3, EXTRA.get(way, SETUP), loop_of(WAYS[way]))


LOADERS = {
    "two worker processes": (
        "DataLoader(TensorDataset(X, Y), 32, shuffle=True, num_workers=2, persistent_workers=True)"
    ),
    "own generator": (
        "DataLoader(TensorDataset(X, Y), 32, shuffle=True, generator=torch.Generator().manual_seed(7))"
    ),
    "custom batch sampler": (
        "DataLoader(TensorDataset(X, Y),"
        " batch_sampler=[[i, (i * 7) % 150, (i + 3) % 150] for i in range(20)])"
    ),
    "weighted sampler": (
        "DataLoader(TensorDataset(X, Y), batch_size=25,"
        " sampler=torch.utils.data.WeightedRandomSampler(torch.rand(150), 100))"
    ),
    "one-sample tail": "DataLoader(TensorDataset(X[:129], Y[:129]), batch_size=32)",
    "own collate": (
        "DataLoader(TensorDataset(X, Y), 32,"
        " collate_fn=lambda rows: tuple(torch.stack(column) for column in zip(*rows)))"
    ),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_loaders(lab: Lab, loader: str) -> None:
    setup = SETUP.replace("DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)", LOADERS[loader])
    check(lab, 4, setup)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_sync_frequency_equals_a_batch_of_k_times_the_size(lab: Lab, num_workers: int) -> None:
    """The boundary is every third batch and the last of each pass: 5 batches a pass make 2 steps."""
    setup = (
        SETUP.replace(", shuffle=True", "")
        + "scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)\n"
    )
    step = "optimizer.step()\n        scheduler.step()"
    loop = LOOP.replace("optimizer.step()", step) + STATE
    result = lab.train(setup, loop, num_workers, options={"sync_frequency": 3})
    assert result.ok, result.failures
    expected = single_device(setup.replace("batch_size=32", "batch_size=96"), loop)
    state = lab.pull("state")
    for name, value in expected["state"].items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6)


WHOLE_BATCH = {
    "ignore_index": "F.cross_entropy(out, torch.where(y == 0, -100, y))",
    "class weights": "F.cross_entropy(out, y, weight=torch.tensor([1., 2., 3., 4., 5.]))",
    "contrastive": "F.cross_entropy(out @ out.T / 4, torch.arange(len(x)))",
}


@pytest.mark.parametrize("loss", WHOLE_BATCH)
def test_losses_of_the_whole_batch(lab: Lab, loss: str) -> None:
    """Refused by default before a parameter changes; right under --split model."""
    loop = LOOP.replace(
        "loss_fn(model(x), y)", "None\n        out = model(x)\n        loss = " + WHOLE_BATCH[loss]
    )
    before = single_device(SETUP, STATE)["state"]
    result = lab.train(SETUP, loop, 3)
    assert "--split model" in refusal(result)
    lab.good(STATE, targets=[0, 1, 2])
    for name, value in before.items():
        assert torch.equal(lab.pull("state")[name], value)
    check(lab, 3, loop=loop, split="model")


def test_split_model_without_a_loader(lab: Lab) -> None:
    loop = """
losses = []
for i in range(12):
    z = torch.randn(20, 12)
    optimizer.zero_grad()
    loss = (model(z) - 1).pow(2).mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
    check(lab, 3, loop=loop, split="model")


def test_objects_are_plain_again(lab: Lab) -> None:
    probe = """
import pickle, copy
probe = [type(model).__name__, len(model._forward_hooks), len(model._forward_pre_hooks),
         list(model.state_dict()),
         "step" in vars(optimizer), torch.autograd.backward.__module__, DataLoader.__iter__.__module__,
         type(copy.deepcopy(model)).__name__, len(pickle.dumps(optimizer.state_dict())) > 0,
         [type(p.grad) for p in model.parameters()][0].__name__]
"""
    lab.train(SETUP, LOOP, 2)
    lab.good(probe, targets=[0, 1])
    expected = single_device(SETUP + LOOP, probe)["probe"]
    assert lab.pull("probe") == expected


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            ("loss.backward()", "loss.backward()\n        loss_fn(model(x), y).backward()"),
            "one backward() only",
        ),
        (("optimizer.zero_grad()", "pass"), "gradients must be cleared"),
    ],
    ids=["two backwards", "no zero_grad"],
)
def test_sync_frequency_refuses_what_it_cannot_count(lab: Lab, change: tuple[str, str], text: str) -> None:
    result = lab.train(SETUP, LOOP.replace(*change), 2, options={"sync_frequency": 2})
    assert text in refusal(result)


def test_sync_frequency_with_batches_that_are_skipped(lab: Lab) -> None:
    """A batch without a backward pass is in no step: the others are weighted among themselves."""
    loop = LOOP.replace(
        "    for x, y in loader:",
        "    for number, (x, y) in enumerate(loader):\n        if number == 1: continue",
    )
    loop = loop.replace("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)")
    setup = SETUP.replace("shuffle=True", "shuffle=False")
    assert lab.train(setup, loop + STATE, 2, options={"sync_frequency": 2}).ok
    # The batches of a pass are 0 (1), 2 3, 4: batch 0 goes on into the second window.
    merged = """
    for epoch in range(2):
        for part in (torch.cat([torch.arange(0, 32), torch.arange(64, 128)]), torch.arange(128, 150)):
            optimizer.zero_grad()
            loss_fn(model(X[part]), Y[part]).backward()
            optimizer.step()
    """
    expected = single_device(setup, textwrap.dedent(merged) + STATE)["state"]
    for name, value in lab.pull("state", 1).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)


def test_sync_frequency_refuses_a_sum(lab: Lab) -> None:
    loop = LOOP.replace("loss_fn(model(x), y)", "F.cross_entropy(model(x), y, reduction='sum')")
    result = lab.train(SETUP, loop, 2, options={"sync_frequency": 2})
    assert "mean over the samples" in refusal(result)


def test_a_cell_that_defines_classes_and_sets(lab: Lab) -> None:
    loop = LOOP + "class Late(nn.Module): pass\nkinds = {'a', 'b', 'c'}\n"
    result = lab.train(SETUP, loop, 2)
    assert result.ok
    assert "kinds" not in result.differing_names


def test_names_that_differ_between_ranks_are_told(lab: Lab) -> None:
    loop = LOOP.replace(
        "losses.append(loss.item())", "seen = seen + len(x) if 'seen' in globals() else len(x)"
    )
    result = lab.train(SETUP + "globals().pop('seen', None)\n", loop, 2)
    assert result.ok
    assert result.differing_names == ["seen"] or result.differing_names == []
    uneven = lab.train(
        SETUP.replace("X = torch.randn(150, 12)", "X = torch.randn(151, 12)")
        .replace("(150,)", "(151,)")
        .replace("150, 5", "151, 5")
        + "globals().pop('seen', None)\n",
        loop,
        2,
    )
    assert uneven.ok
    assert "seen" in " ".join(uneven.notes)


def test_a_different_start_is_made_common_and_told(lab: Lab) -> None:
    lab.good(SETUP, targets=[0, 1])
    lab.good("with torch.no_grad():\n    model[0].weight += rank", targets=[0, 1])
    from openclaw_nb.protocol.messages import StrategySpec

    result = lab.good(LOOP + STATE, targets=[0, 1], strategy=StrategySpec(name="data_parallel"))
    assert any("model" in note and "rank 1" in note for note in result.notes)
    expected = single_device(SETUP, LOOP + STATE)
    for name, value in expected["state"].items():
        torch.testing.assert_close(lab.pull("state", 1)[name], value, rtol=1e-6, atol=1e-6)


REFUSED = {
    "no model": ("globals().pop('model'); globals().pop('optimizer')", LOOP, "no model"),
    "two models": (
        "other = nn.Linear(12, 5)\noptimizer.add_param_group({'params': other.parameters()})",
        LOOP.replace("model(x)", "model(x) + other(x)"),
        "--model",
    ),
    "create_graph": ("", LOOP.replace("loss.backward()", "loss.backward(create_graph=True)"), "create_graph"),
    "lbfgs": ("optimizer = torch.optim.LBFGS(model.parameters())", LOOP, "LBFGS"),
    "no loader": (
        "",
        "losses = []\nloss = loss_fn(model(X), Y)\nloss.backward()\noptimizer.step()",
        "--split model",
    ),
    "batch smaller than the workers": (
        "loader = DataLoader(TensorDataset(X, Y), batch_size=1)",
        LOOP,
        "batch_size=1",
    ),
    "redefined model": ("", "model = nn.Linear(12, 5)\n" + LOOP, "cell of its own"),
    "a part of the model": (
        "",
        LOOP.replace("model(x)", "model[2](torch.zeros(len(x), 32)) + model(x)"),
        "part of the model",
    ),
    "only a part of the model": (
        "",
        LOOP.replace("model(x)", "model[2](torch.zeros(len(x), 32))"),
        "called by itself",
    ),
    "the model returns its loss": (
        "class Own(nn.Module):\n    def __init__(self, net):\n        super().__init__(); self.net = net\n"
        "    def forward(self, x, y): return F.cross_entropy(self.net(x), y)\nmodel = Own(model)",
        LOOP.replace("loss_fn(model(x), y)", "model(x, y)"),
        "returns the loss itself",
    ),
    "dropout after the model": ("", LOOP.replace("model(x)", "F.dropout(model(x))"), "--split model"),
    "iterable dataset": (
        "class Stream(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self): return iter(zip(X, Y))\n"
        "loader = DataLoader(Stream(), 32)",
        LOOP,
        "--split model",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused(lab: Lab, case: str) -> None:
    extra, loop, text = REFUSED[case]
    result = lab.train(SETUP + extra, loop, 2)
    assert text.lower() in refusal(result).lower()
    check(lab, 2)


@pytest.mark.parametrize("options", [{}, {"sync_frequency": 2}], ids=["every batch", "every second batch"])
def test_a_checkpoint_that_the_cell_writes_holds_plain_state(lab: Lab, options: dict[str, int]) -> None:
    setup = SETUP + "import io\nscheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
    loop = LOOP + "file = io.BytesIO(); torch.save([scheduler.state_dict(), optimizer.state_dict()], file)\n"
    lab.good(setup + "keys = set(scheduler.state_dict())", targets=range(2))
    spec = StrategySpec(name="data_parallel", options=options)
    lab.good(loop, targets=range(2), strategy=spec)
    lab.good(
        "file.seek(0); assert set(torch.load(file)[0]) == keys\n"
        "assert type(scheduler) is torch.optim.lr_scheduler.StepLR",
        targets=range(2),
    )
