"""Layers in 16 bits and a scaled loss, in this process.

The right values are those of the same model under `torch.autocast`, and of `torch.amp.GradScaler`.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from openclaw_nb.core.errors import RefusedError, UsageError
from openclaw_nb.engine.precision import usable
from openclaw_nb.engine.precision.agreement import agree_on_overflow
from openclaw_nb.engine.precision.casting import Casting
from openclaw_nb.engine.precision.cell import Cast
from openclaw_nb.engine.precision.layers import choose_layers
from openclaw_nb.engine.precision.plain import single_device
from openclaw_nb.engine.precision.scale import LossScale, copied, followed, scale_for
from openclaw_nb.engine.precision.scaling import Scaled
from openclaw_nb.optimization import MixedPrecisionCoordinator
from openclaw_nb.strategies.precision import Precision


class Vision(nn.Module):
    """A convolution, an attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x).flatten(2).transpose(1, 2))
        return self.head(self.mix(x, x, x, need_weights=False)[0].mean(1))


def build() -> tuple[Vision, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Vision(), torch.randn(6, 1, 8, 8), torch.randint(3, (6,))


# -------------------------------------------------------------------------------------------- which layers


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["conv"], ["stem"]),
        (["attention"], ["mix"]),
        (["stem", "head.2"], ["stem", "head.2"]),
        (["linear"], ["mix.out_proj", "head.0", "head.2"]),
        (["layernorm"], ["norm"]),
        ([r"head\.\d"], ["head.0", "head.1", "head.2"]),
        (["conv", "stem"], ["stem"]),
    ],
)
def test_layers_are_found_by_name_type_and_pattern(words: list[str], names: list[str]) -> None:
    layers, missing = choose_layers({"model": Vision()}, words)
    assert list(layers) == names
    assert missing == []


def test_a_type_that_the_model_does_not_have_is_told() -> None:
    layers, missing = choose_layers({"model": Vision()}, ["conv", "embedding"])
    assert (list(layers), missing) == (["stem"], ["embedding"])
    assert list(choose_layers({"one": Vision(), "two": Vision()}, ["conv"])[0]) == ["one.stem", "two.stem"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cnov"], r"No layer is meant by 'cnov'. The model has stem \(Conv2d\), norm"),
        (["conv", "decoder.1"], "'decoder.1'"),
        (["embedding"], "'embedding'"),
    ],
)
def test_words_that_mean_nothing_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        choose_layers({"model": Vision()}, words)
    with pytest.raises(UsageError, match="no regular expression"):
        choose_layers({"model": Vision()}, ["head["])


# ------------------------------------------------------------------------------------------------- casting


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_whole_model_is_autocast_and_gives_float32(dtype: torch.dtype) -> None:
    model, x, y = build()
    with torch.autocast("cpu", dtype):
        right = model(x)
    assert right.dtype is dtype
    nn.functional.cross_entropy(right.float(), y).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    casting = Casting({"model": model}, dtype, "cpu")
    casting.install()
    out = model(x)
    nn.functional.cross_entropy(out, y).backward()
    casting.remove()
    assert out.dtype is torch.float32
    assert torch.equal(out, right.float())
    assert all(torch.equal(p.grad, wanted) for p, wanted in zip(model.parameters(), gradients, strict=True))
    assert (
        {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    )


def test_named_layers_alone_compute_in_16_bits() -> None:
    model, x, _ = build()
    plain, inside = model(x), {}
    cast = Cast(Precision("bf16", ["conv", "attention"]), {"model": model})
    assert cast.dtype is torch.bfloat16
    assert "2 layers compute in bfloat16: stem, mix" in cast.notes
    cast.install()
    handles = [
        module.register_forward_hook(lambda m, a, o, n=name: inside.__setitem__(n, o))
        for name, module in model.named_modules()
    ]
    out = model(x)
    cast.remove()
    for handle in handles:
        handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        stem = model.stem(x)
    assert torch.equal(inside["stem"], stem.float())
    assert all(o.dtype is torch.float32 for name, o in inside.items() if name != "mix")
    assert cast.idle() == []
    assert not torch.equal(out, plain)
    torch.testing.assert_close(out, plain, rtol=0.05, atol=0.02)
    assert torch.equal(model(x), plain)


def test_a_layer_that_is_never_called_is_told() -> None:
    model, x, _ = build()
    cast = Cast(Precision("bf16", ["linear"]), {"model": model})
    cast.install()
    model(x)
    cast.remove()
    assert "float32: mix.out_proj" in cast.idle()[0]  # its weight is used by the attention itself


def test_an_interrupt_leaves_no_autocast_and_copies_are_plain() -> None:
    model, x, _ = build()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    casting = Casting({"model": model}, torch.bfloat16, "cpu")
    casting.install()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), Vision.forward(twin, x))
        twin.stem.weight.data.zero_()
        assert not torch.equal(twin(x), model(x))
    handle = model.head.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    assert not torch.is_autocast_enabled("cpu")
    handle.remove()
    casting.remove()
    assert "forward" not in vars(model)


def test_a_cpu_without_float16_takes_bfloat16_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usable, "has_float16", lambda device: False)
    cast = Cast(Precision("fp16"), {"model": Vision()})
    assert cast.dtype is torch.bfloat16
    assert cast.notes[0].startswith("bfloat16 is used instead of fp16: float16 is emulated on this CPU")
    monkeypatch.setattr(usable, "has_float16", lambda device: True)
    assert Cast(Precision("fp16"), {"model": Vision()}).dtype is torch.float16
    with pytest.raises(RefusedError, match=r"model.stem.weight is bfloat16: mixed precision keeps float32"):
        Cast(Precision("fp16"), {"model": Vision().bfloat16()})


# --------------------------------------------------------------------------------------------- the scale


def test_the_scale_follows_as_torchs_does() -> None:
    """Held against torch.amp.GradScaler over steps that overflow and steps that do not."""
    torchs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    ours = torchs.state_dict()
    for overflows in [False, False, True, False, False, False, False, True, True, False]:
        torchs.scale(torch.zeros(()))
        weight.grad = torch.full((1,), float("inf") if overflows else 1.0)
        torchs.step(optimizer)
        torchs.update()
        ours = followed(ours, overflowed=overflows)
        assert ours == torchs.state_dict()


def test_scales_are_kept_with_the_model_and_copied_for_trials() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    scale = scale_for([model], Precision("fp16"), "cpu")
    scale.take(overflowed=True)
    assert scale_for([model], Precision("fp16"), "cpu") is scale
    assert scale_for([other], Precision("fp16"), "cpu") is not scale
    twin = copied(scale)
    twin.take(overflowed=True)
    assert (scale.get_scale(), twin.get_scale()) == (2.0**15, 2.0**14)
    assert pickle.loads(pickle.dumps(scale)).get_scale() == 2.0**15
    fixed = scale_for([model], Precision("fp16", scaler=8), "cpu")
    fixed.take(overflowed=True)
    assert fixed.get_scale() == copied(fixed).get_scale() == 8.0


def train(scaled: Scaled | None, plants: set[int], *, accumulate: bool = False) -> tuple[list[float], float]:
    """Take six steps by hand; without ``scaled``, torch's scaler makes them. Return the parameters and the scale."""
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torchs = torch.amp.GradScaler("cpu", init_scale=256.0)
    if scaled is not None:
        scaled._optimizers = [optimizer]
        scaled.install()
    for step in range(6):
        for part in range(2 if accumulate else 1):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + part))
            loss = model(x).square().mean()
            if step in plants and part == 0:
                loss = loss * float("inf")
            if scaled is None:
                torchs.scale(loss).backward()
            else:
                parameters = list(model.parameters())
                scaled.begin(parameters)
                loss.backward(torch.tensor(scaled.factor))
                scaled.end(parameters)
        if scaled is None:
            torchs.step(optimizer)
            torchs.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    scale = torchs if scaled is None else scaled.scale
    assert scale is not None
    return [v for p in model.parameters() for v in p.detach().flatten().tolist()], scale.get_scale()


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_step_with_an_overflow_is_skipped(accumulate: bool) -> None:
    """Also one to whose gradients another batch was added afterwards; as torch's own scaler does."""
    scale = LossScale("cpu")
    scale.load_state_dict(scale.state_dict() | {"scale": 256.0})
    ours, ended = train(Scaled(scale, []), {2, 4}, accumulate=accumulate)
    right, torchs = train(None, {2, 4}, accumulate=accumulate)
    assert ours == right
    assert ended == torchs == 64.0
    assert scale.num_skipped == 2


@pytest.mark.parametrize("own", [False, True])
def test_an_overflow_on_one_rank_is_one_on_all(own: bool) -> None:
    """The other rank's gradients are finite."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def other_overflows(row: torch.Tensor) -> torch.Tensor:
        return torch.stack([row, torch.ones_like(row)])

    if own:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        undo = agree_on_overflow(scaler, other_overflows)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        undo()
        assert type(scaler) is torch.amp.GradScaler
        assert scaler.get_scale() == 4.0
    else:
        scaled = Scaled(LossScale("cpu"), [optimizer], agree=lambda overflowed: True)
        scaled.install()
        scaled.begin([weight])
        weight.sum().backward(torch.tensor(scaled.factor))
        scaled.end([weight])
        optimizer.step()
    assert torch.equal(weight, torch.ones(2))


def test_a_coordinator_in_a_plain_loop() -> None:
    """Conv and attention in 16 bits; the loop is as it would be without."""
    model, x, y = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    coordinator = MixedPrecisionCoordinator(devices=["CPU-0"], fp16_layers=["conv", "attention"])
    losses = []
    with coordinator.applied_to(model, optimizer, environment={"OPENCLAW_DEVICE": "CPU-0"}) as scale:
        for step in range(8):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y) * (float("inf") if step == 3 else 1.0)
            before = model.stem.weight.detach().clone()
            loss.backward()
            optimizer.step()
            assert torch.equal(before, model.stem.weight) is (step == 3)
            losses.append(loss.item())
        assert scale.get_scale() == 2.0**15
    assert losses[-1] < losses[0]
    with coordinator.applied_to(model, environment={"OPENCLAW_DEVICE": "CPU-7"}) as scale:
        assert scale is None
        assert "forward" not in vars(model.stem)


def test_gradients_are_those_without_a_scale() -> None:
    """A power of two is exact: in float32 the scale changes no bit."""
    model, x, y = build()
    nn.functional.cross_entropy(model(x), y).backward()
    right = [p.grad for p in model.parameters()]
    model.zero_grad()
    with single_device(Precision("bf16", ["norm"]), {"model": model}, {}) as applied:
        assert applied.scale is None
    with single_device(Precision("fp16", ["head.1"]), {"model": model}, {}):  # a ReLU, which autocast leaves
        nn.functional.cross_entropy(model(x), y).backward()
    assert all(torch.equal(p.grad, wanted) for p, wanted in zip(model.parameters(), right, strict=True))
