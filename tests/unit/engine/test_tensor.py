"""Models whose layers are shared out over ranks that are threads, against the same model on one device.

Tolerance: partial sums of float64 in another order differ by some units in the last place, 2e-16 of values around 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from openclaw_nb.core.errors import RefusedError, UsageError
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.tensor.axis import TensorAxis
from openclaw_nb.engine.tensor.find import Entry, Plan, find_plan, try_out
from openclaw_nb.engine.tensor.functions import join_for_functions
from openclaw_nb.engine.tensor.shards import Shards, check_optimizer
from openclaw_nb.engine.tensor.split import Split, SplitParameter

from .conftest import OnRanks

TOLERANCE = 1e-12


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 3)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x + self.second(F.dropout(F.gelu(self.first(x)), 0.2, self.training))))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8, bias=False), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x) * self.scale)


class Attention(nn.Module):
    """As people write it: one projection, cut into three, heads by view."""

    def __init__(self, width: int = 12, heads: int = 3, by_view: bool = False, plain: bool = False) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.by_view, self.plain = by_view, plain

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        if self.by_view:
            q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = (
                part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
                for part in self.qkv(x).split(C, dim=2)
            )
        if self.plain:
            scores = q @ k.transpose(-2, -1) * (C // self.heads) ** -0.5
            scores = scores.masked_fill(torch.ones(T, T).tril() == 0, float("-inf"))
            y = F.dropout(F.softmax(scores, dim=-1), 0.1, self.training) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 2)).transpose(-3, -2) for each in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2))


class Encoder(nn.Module):
    def __init__(self, batch_first: bool = True, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            8, 4, 16, dropout=0.1, batch_first=batch_first, norm_first=norm_first, activation="gelu"
        )
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1 if self.body.layers[0].self_attn.batch_first else 0]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        return self.body(x, mask=mask, is_causal=True)


class Cross(nn.Module):
    """Weights that are returned, padding, other keys than queries."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.1, kdim=8, vdim=8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        out, weights = self.attend(x, x.flip(1), x * 2, key_padding_mask=padding)
        return torch.cat([out, weights], dim=-1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6, padding_idx=2), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed((x[..., 0] * 3).long().clamp(-5, 5) + 5).tanh())


class Odd(nn.Module):
    """Functions without a rule, in place, views that do not fit: all of it must still be right."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = F.layer_norm(h, (10,)) + h.cumsum(-1) * 0.1
        g = self.first(x)
        g += 1.0
        g[..., 3] = 0.5
        g = torch.relu_(g.clone())
        h = (
            h * g.mean(-1, keepdim=True)
            + g.reshape(-1, 4, 5).flatten(1).view(-1, 20).chunk(2, 1)[0].sum()
            + g.norm()
        )
        return self.second(h.sin().roll(1, -1)) + torch.einsum("...i,ji->...j", g, self.second.weight)


def drop(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Stand in for F.dropout: ranks are threads here, and share one stream of random numbers."""
    if has_torch_function_unary(input):
        return handle_torch_function(drop, (input,), input, p=p, training=training, inplace=inplace)
    kept = (torch.arange(input.numel()) * 7919 % 1009).view(input.shape) >= 1009 * p
    return input * kept / (1 - p) if training else input


drop.__name__ = "dropout"


@pytest.fixture(autouse=True)
def same_dropout_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "dropout", drop)


def double(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = make().double()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and "need_weights" not in vars(module):
            module.dropout = 0.1 if isinstance(model, Cross) else 0.0
    return model


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, axis: TensorAxis | None
) -> list[float]:
    seen = []
    for step in range(3):
        loss = whole_of(model(x * (1 + step / 10))).pow(2).mean()
        loss = loss + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
        optimizer.zero_grad(set_to_none=step != 1)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with axis.opened() if axis is not None else contextlib.nullcontext():
            optimizer.step()
        seen += [loss.item(), norm.item()]
    return seen


def whole_of(out: Tensor) -> Tensor:
    return out.full_tensor() if isinstance(out, Split) else out


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (Mlp, (4, 6)),
    "gated": (Gated, (4, 6)),
    "attention, one projection": (Attention, (2, 5, 12)),
    "attention by views": (lambda: Attention(by_view=True), (2, 5, 12)),
    "attention by softmax": (lambda: Attention(plain=True), (2, 5, 12)),
    "attention, separate projections": (Separate, (2, 5, 8)),
    "encoder": (Encoder, (2, 5, 8)),
    "encoder, sequence first": (lambda: Encoder(batch_first=False, norm_first=True), (5, 2, 8)),
    "attention with weights and padding": (Cross, (2, 5, 8)),
    "tied": (Tied, (3, 4, 2)),
    "odd": (Odd, (4, 6)),
}
PLANS: dict[str, dict[str, str] | None] = {
    "tied": {"embed": "row", "head": "column"},
    "odd": {"first": "column", "second": "row"},
}
SHARED: dict[str, Plan] = {
    "mlp": {"first": Entry("column"), "second": Entry("row")},
    "gated": {"gate": Entry("column"), "up": Entry("column"), "down": Entry("row")},
    "attention, one projection": {"qkv": Entry("column", 4, 3), "proj": Entry("row", 4)},
    "attention by views": {"qkv": Entry("column", 4, 3), "proj": Entry("row", 4)},
    "attention by softmax": {"qkv": Entry("column", 4, 3), "proj": Entry("row", 4)},
    "attention, separate projections": {
        **{name: Entry("column", 2) for name in "qkv"},
        "o": Entry("row", 2),
    },
    "encoder": {
        f"body.layers.{i}.{name}": entry
        for i in range(2)
        for name, entry in {
            "self_attn": Entry("heads", 2, 3),
            "linear1": Entry("column"),
            "linear2": Entry("row"),
        }.items()
    },
    "attention with weights and padding": {"attend": Entry("heads", 4, 3)},
    "tied": {"embed": Entry("row"), "head": Entry("column")},
    "odd": {"first": Entry("column"), "second": Entry("row")},
}
SHARED["encoder, sequence first"] = SHARED["encoder"]


# Three ranks have parts of different sizes, of features and of heads.
UNEVEN = ["attention, one projection", "tied"]


@pytest.mark.parametrize(("name", "num_ranks"), [*((n, 2) for n in MODELS), *((n, 3) for n in UNEVEN)])
def test_training_equals_a_single_device(on_ranks: OnRanks, name: str, num_ranks: int) -> None:
    make, shape = MODELS[name]
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    single = double(make)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.05, momentum=0.9)
    expected = train(single, optimizer, x, None)
    starts = [double(make) for _ in range(num_ranks)]

    def body(group: Any) -> None:
        model, axis = starts[group.rank()], TensorAxis(Ranks(group))
        optimizers = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)}
        before = {id(p): p.data_ptr() for p in model.parameters()}
        plan = find_plan(model, try_out(model, (x,), {}), num_ranks, PLANS.get(name))
        assert plan == SHARED[name]
        shards = Shards(axis, optimizers)
        shards.take(model, plan)
        own, every = shards.num_bytes
        assert own < every
        seen = train(model, optimizers["optimizer"], x, axis)
        assert seen == pytest.approx(expected, rel=1e-9)
        state = optimizers["optimizer"].state[
            next(p for p in model.parameters() if type(p) is SplitParameter)
        ]
        assert state["momentum_buffer"].numel() < every
        shards.put(shards.join(axis))
        assert {id(p): p.data_ptr() for p in model.parameters()} == before
        assert all(type(p) is nn.Parameter for p in model.parameters())
        compare(model, single, optimizers["optimizer"], optimizer)

    on_ranks(body, num_ranks)


def compare(
    model: nn.Module, single: nn.Module, one: torch.optim.Optimizer, other: torch.optim.Optimizer
) -> None:
    for (key, mine), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=TOLERANCE, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}"
        )
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=TOLERANCE)
        momenta = (each[p]["momentum_buffer"] for each, p in ((one.state, mine), (other.state, theirs)))
        torch.testing.assert_close(*momenta, rtol=1e-9, atol=TOLERANCE)


def test_a_model_without_a_plan_says_what_was_looked_at() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    with pytest.raises(RefusedError) as refused:
        find_plan(model, try_out(model, (torch.zeros(2, 6),), {}), 2)
    said = str(refused.value)
    assert "No tensor-parallel plan is known for this model on 2 workers" in said
    assert "of the types LayerNorm, Linear" in said
    assert "0: Linear alone, of 24 values: too small" in said
    assert "--tp-plan net.0=column,net.2=row" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"frist": "column"}, "There is no layer to share out 'frist'. Did you mean 'first'"),
        ({"norm": "row"}, "The plan makes norm row: LayerNorm is no nn.Linear"),
        ({"out": "column"}, r"its weight of shape \[3, 6\] cannot be shared out among 4 workers"),
        ({"first": "heads"}, "Linear is shared out by 'column' or 'row'"),
        ({"(": "row"}, "no name and no regular expression"),
    ],
)
def test_plans_that_cannot_be(given: dict[str, str], said: str) -> None:
    model = Mlp()
    with pytest.raises(UsageError, match=said):
        find_plan(model, try_out(model, (torch.zeros(2, 6),), {}), 4, given)


def test_a_weight_that_would_be_shared_out_in_two_ways() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    trial = try_out(model, (torch.zeros(2, 6),), {})
    with pytest.raises(UsageError, match="a parameter of 0 and 2 would be shared out in two ways"):
        find_plan(model, trial, 2, {"0": "column", "2": "row"})


def test_names_may_be_regular_expressions() -> None:
    model = nn.ModuleDict({name: Mlp() for name in "ab"})
    model.forward = lambda x: model["b"](F.pad(model["a"](x), (0, 3)))  # type: ignore[method-assign]
    plan = find_plan(
        model, try_out(model, (torch.zeros(2, 6),), {}), 2, {r"[ab]\.first": "column", r"[ab]\.second": "row"}
    )
    assert plan == {f"{name}.{key}": entry for key, entry in SHARED["mlp"].items() for name in "ab"}


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * gradient * x**2


def test_a_function_of_the_cells_own_gets_wholes_and_gives_gradients(on_ranks: OnRanks) -> None:
    """Of y = (w x)^3 with w = 2 and x = 1: the gradient is 3 (w x)^2 x = 12."""

    def body(group: Any) -> None:
        model, axis = nn.Linear(1, 4, bias=False), TensorAxis(Ranks(group))
        nn.init.constant_(model.weight, 2.0)
        Shards(axis, {}).take(model, {"": Entry("column")})
        Cube.apply(model(torch.ones(1, 1))).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.flatten().tolist() == [12.0] * 4

    undo = join_for_functions()
    try:
        on_ranks(body, 2)
    finally:
        undo()
    assert Cube.apply(torch.tensor(2.0)) == 8


def test_optimizers_that_may_need_a_whole_parameter_are_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(4, 4))]

    class Own(torch.optim.SGD):
        pass

    for refused in (Own(parameters), torch.optim.Adafactor(parameters)):
        with pytest.raises(
            RefusedError, match=f"is {type(refused).__name__}, which is not known to update each element"
        ):
            check_optimizer("optimizer", refused)
    for kind in (torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        check_optimizer("optimizer", kind(parameters))
