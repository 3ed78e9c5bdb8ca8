"""Kinds of losses come from their definitions; gradients and text from the same code on plain tensors."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openclaw_nb.engine.loss.record import (
    LossKind,
    Recorder,
    Tracked,
    find_disagreement,
    map_tensors,
    untrack_tree,
)

N, C, T = 8, 5, 3
MEAN, SUM, UNKNOWN = LossKind.MEAN, LossKind.SUM, LossKind.UNKNOWN


@dataclass
class Batch:
    """What a cell has at hand: outputs and values of shape [n, C], labels, the parameter behind it all."""

    out: Tensor
    real: Tensor
    labels: Tensor
    mask: Tensor
    weight: nn.Parameter
    n: int

    @property
    def logp(self) -> Tensor:
        return self.out.log_softmax(1)

    @property
    def onehot(self) -> Tensor:
        return F.one_hot(self.labels, self.real.shape[1]).float()


def make(n: int = N, classes: int = C, recorder: Recorder | None = None, seed: int = 0) -> Batch:
    torch.manual_seed(seed)
    x = torch.randn(n, 4)
    weight = nn.Parameter(torch.randn(classes, 4))
    out = F.linear(x, weight)
    labels = torch.randint(0, classes, (n,))
    mask = torch.rand(n, classes) > 0.4
    out = recorder.track(out) if recorder else out
    return Batch(out, torch.rand(n, classes), labels, mask, weight, n)


def kind_of(loss: Callable[[Batch], Tensor], n: int = N, classes: int = C) -> LossKind:
    recorder = Recorder()
    batch = make(n, classes, recorder)
    return recorder.classify(loss(batch), n)


MEANS: dict[str, Callable[[Batch], Tensor]] = {
    "cross entropy": lambda b: nn.CrossEntropyLoss()(b.out, b.labels),
    "label smoothing": lambda b: nn.CrossEntropyLoss(label_smoothing=0.1)(b.out, b.labels),
    "soft labels with class weights": lambda b: F.cross_entropy(
        b.out, b.real, weight=torch.arange(1.0, C + 1)
    ),
    "mse": lambda b: nn.MSELoss()(b.out, b.real),
    "mse, target first": lambda b: F.mse_loss(b.real, b.out),
    "l1": lambda b: nn.L1Loss()(b.out, b.real),
    "smooth l1": lambda b: nn.SmoothL1Loss()(b.out, b.real),
    "huber": lambda b: nn.HuberLoss()(b.out, b.real),
    "bce": lambda b: nn.BCELoss()(b.out.sigmoid(), b.real),
    "bce with logits": lambda b: nn.BCEWithLogitsLoss()(b.out, b.real),
    "bce with pos_weight": lambda b: nn.BCEWithLogitsLoss(pos_weight=torch.arange(1.0, C + 1))(b.out, b.real),
    "nll": lambda b: nn.NLLLoss()(b.logp, b.labels),
    "kl batchmean": lambda b: nn.KLDivLoss(reduction="batchmean")(b.logp, b.real),
    "sum over len": lambda b: (b.out - b.real).pow(2).sum() / len(b.real),
    "sum over size": lambda b: (b.out - b.real).pow(2).sum() / b.out.size(0),
    "sum over numel": lambda b: (b.out - b.real).abs().sum().div(b.out.numel()),
    "times 1 / size": lambda b: (b.out - b.real).pow(2).sum() * (1 / b.out.shape[0]),
    "manual cross entropy": lambda b: -(b.logp * b.onehot).sum(1).mean(),
    "picked by arange": lambda b: -b.logp[torch.arange(b.n), b.labels].mean(),
    "picked by range": lambda b: -b.logp[range(b.n), b.labels].mean(),
    "gathered": lambda b: -b.logp.gather(1, b.labels[:, None]).mean(),
    "regularised": lambda b: F.mse_loss(b.out, b.real) + 0.1 * b.weight.pow(2).sum(),
    "accumulated": lambda b: F.cross_entropy(b.out, b.labels) / 4,
    "accumulated over n": lambda b: F.cross_entropy(b.out, b.labels) / N,
    "scaled": lambda b: torch.amp.GradScaler("cpu").scale(F.cross_entropy(b.out, b.labels)),
    "masked, all counted": lambda b: ((b.out - b.real).pow(2) * b.mask).mean(),
    "weighted 3": lambda b: 3 * F.cross_entropy(b.out, b.labels),
    "weighted in place": lambda b: F.cross_entropy(b.out, b.labels).mul_(0.5).add_(1.0),
    "half precision": lambda b: F.cross_entropy(b.out.half().float(), b.labels),
    "hinge at zero": lambda b: (1 - 1e3 * b.out * b.out.detach().sign()).clamp(min=0).mean(),
    "shape of one": lambda b: F.mse_loss(b.out, b.real).view(1),
}

SUMS: dict[str, Callable[[Batch], Tensor]] = {
    "cross entropy": lambda b: nn.CrossEntropyLoss(reduction="sum")(b.out, b.labels),
    "weighted cross entropy": lambda b: F.cross_entropy(
        b.out, b.labels, torch.arange(1.0, C + 1), reduction="sum", ignore_index=1
    ),
    "mse": lambda b: nn.MSELoss(reduction="sum")(b.out, b.real),
    "l1": lambda b: nn.L1Loss(reduction="sum")(b.out, b.real),
    "smooth l1": lambda b: nn.SmoothL1Loss(reduction="sum")(b.out, b.real),
    "huber": lambda b: nn.HuberLoss(reduction="sum")(b.out, b.real),
    "mean then sum": lambda b: (b.out - b.real).pow(2).mean(1).sum(),
    "over a constant": lambda b: (b.out - b.real).pow(2).sum() / 11,
    "masked": lambda b: (b.out - b.real).pow(2)[b.mask].sum(),
    "filled": lambda b: (b.out * b.real).masked_fill(b.mask, 0.0).sum(),
    "over one constant, times another": lambda b: (b.out - b.real).pow(2).sum() / 7 * 0.25,
}


# With one sample, a factor of 1 / n is a weight of one.
AMBIGUOUS = {"times 1 / size"}


def masked_mean(b: Batch) -> Tensor:
    return ((b.out - b.real).pow(2) * b.mask).sum() / b.mask.sum()


def ignoring(b: Batch) -> Tensor:
    b.labels[2] = -100
    return F.cross_entropy(b.out, b.labels)


def info_nce(b: Batch) -> Tensor:
    return F.cross_entropy(b.out @ b.out.T / 0.1, torch.arange(b.n))


NEITHER: dict[str, tuple[Callable[[Batch], Tensor], str]] = {
    "ignored labels": (ignoring, "ignore_index"),
    "own ignore_index": (lambda b: F.cross_entropy(b.out, b.labels, ignore_index=C), "ignore_index=5"),
    "class weights": (lambda b: nn.CrossEntropyLoss(torch.ones(C))(b.out, b.labels), "class weights"),
    "class weights, nll": (lambda b: F.nll_loss(b.logp, b.labels, torch.ones(C)), "class weights"),
    "contrastive": (lambda b: (b.out @ b.out.T).logsumexp(1).mean(), ""),
    "info nce": (info_nce, ""),
    "dropout": (lambda b: F.dropout(b.out).pow(2).mean(), "dropout draws random numbers"),
    "root": (lambda b: F.mse_loss(b.out, b.real).sqrt(), "neither the mean nor the sum"),
    "batch normalised": (lambda b: (b.out - b.out.mean(0)).pow(2).mean(), "neither"),
    "hardest sample": (lambda b: (b.out - b.real).pow(2).mean(1).max(), "neither"),
    "sum and regulariser": (lambda b: b.out.sum() + b.weight.sum(), "neither"),
    "masked mean": (masked_mean, "counted in the batch"),
    "selected mean": (lambda b: (b.out - b.real).pow(2)[b.mask].mean(), ""),
    "selected mean, all": (lambda b: (b.out - b.real).pow(2)[b.mask | True].mean(), "mask"),
    "not a number": (lambda b: b.out.mean() * float("nan"), "not finite"),
    "several": (lambda b: b.out.pow(2).mean(1), "single number"),
    "times n": (lambda b: F.cross_entropy(b.out, b.labels) * len(b.labels), "multiplied by 8"),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_over_the_samples(name: str) -> None:
    kind = kind_of(MEANS[name])

    assert kind == MEAN, kind.reason


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_the_samples(name: str) -> None:
    kind = kind_of(SUMS[name])

    assert kind == SUM, kind.reason


@pytest.mark.parametrize("name", NEITHER)
def test_losses_that_are_neither_say_why(name: str) -> None:
    loss, reason = NEITHER[name]

    kind = kind_of(loss)

    assert kind == UNKNOWN
    assert reason in kind.reason
    assert kind.reason


@pytest.mark.parametrize("n", [1, 2, 4, 5])
@pytest.mark.parametrize("name", sorted(set(MEANS) - AMBIGUOUS))
def test_means_in_small_batches(name: str, n: int) -> None:
    assert kind_of(MEANS[name], n) == MEAN


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("name", sorted(SUMS))
def test_sums_in_small_batches(name: str, n: int) -> None:
    assert kind_of(SUMS[name], n) == SUM


@pytest.mark.parametrize(
    "name", ["contrastive", "class weights", "own ignore_index", "dropout", "sum and regulariser"]
)
def test_neither_with_a_single_sample(name: str) -> None:
    assert kind_of(NEITHER[name][0], 1) == UNKNOWN


@pytest.mark.parametrize("name", MEANS)
def test_as_many_classes_as_samples(name: str) -> None:
    assert kind_of(MEANS[name], C, C) == MEAN


def test_a_divisor_that_is_a_size_of_the_batch_is_taken_for_it() -> None:
    def loss(b: Batch) -> Tensor:
        return b.out.pow(2).sum() / (N * C)

    assert kind_of(loss) == MEAN
    assert kind_of(loss, N + 1) == SUM


def test_identical_samples_do_not_hide_a_root() -> None:
    recorder = Recorder()
    out = recorder.track(torch.ones(N, C, requires_grad=True) * 2)

    kind = recorder.classify(F.mse_loss(out, torch.zeros(N, C)).sqrt(), N)

    assert kind == UNKNOWN
    assert "for others" in kind.reason


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("n", [1, 2, N])
def test_tokens_in_a_view_with_the_batch_in_it(reduction: str, n: int) -> None:
    recorder = Recorder()
    logits = recorder.track(torch.randn(n, T, C, requires_grad=True) * 1)
    targets = torch.randint(0, C, (n, T))
    batch, length, vocabulary = logits.shape

    loss = F.cross_entropy(
        logits.view(batch * length, vocabulary), targets.view(batch * length), reduction=reduction
    )
    flat = F.cross_entropy(logits.reshape(-1, vocabulary), targets.reshape(-1), reduction=reduction)
    rows = (logits.reshape(batch, -1) ** 2).mean(1)
    per_sample = rows.sum() if reduction == "sum" else rows.mean()

    expected = LossKind(reduction)
    assert [recorder.classify(value, n) for value in (loss, flat, per_sample)] == [expected] * 3


@pytest.mark.parametrize("as_tensor", [True, False])
def test_ctc_with_lengths_in_a_tensor_or_a_tuple(as_tensor: bool) -> None:
    recorder = Recorder()
    logits = recorder.track(torch.randn(N, T, C, requires_grad=True) * 1)
    lengths = (torch.full((N,), T), torch.full((N,), 2)) if as_tensor else ((T,) * N, (2,) * N)

    loss = nn.CTCLoss()(logits.log_softmax(2).transpose(0, 1), torch.randint(1, C, (N, 2)), *lengths)

    assert recorder.classify(loss, N) == MEAN


def test_token_sums_over_tokens_and_samples() -> None:
    recorder = Recorder()
    logits = recorder.track(torch.randn(N, T, C, requires_grad=True) * 1)
    losses = F.cross_entropy(logits.flatten(0, 1), torch.randint(0, C, (N * T,)), reduction="none")

    assert recorder.classify(losses.sum() / (N * T), N) == MEAN
    assert recorder.classify(losses.view(N, T).sum(1).mean(), N) == MEAN
    assert recorder.classify(losses.sum() / T, N) == SUM


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_of_autocast_in_half_precision(dtype: torch.dtype) -> None:
    recorder = Recorder()
    with torch.autocast("cpu", dtype):
        out = recorder.track(F.linear(torch.randn(N, 4), torch.randn(C, 4, requires_grad=True)))
        loss = F.cross_entropy(out, torch.randint(0, C, (N,)))
        kind = recorder.classify(loss, N)

    assert out.dtype == dtype
    assert kind == MEAN


def test_outputs_that_overflow_do_not_refuse() -> None:
    recorder = Recorder()
    out = recorder.track(torch.full((N, C), math.inf, requires_grad=True) * 1)

    assert recorder.classify(F.cross_entropy(out, torch.zeros(N, dtype=torch.int64)), N) == MEAN


def test_several_outputs_in_one_loss() -> None:
    recorder = Recorder()
    first, other = make(recorder=recorder), make(recorder=recorder, seed=1)
    loss = F.cross_entropy(first.out, first.labels) + 0.5 * (first.out - other.out).pow(2).mean()

    assert recorder.classify(loss, N) == MEAN
    assert recorder.classify(loss + other.out.sum(), N) == UNKNOWN


def test_a_large_output_is_judged_by_some_samples() -> None:
    recorder = Recorder()
    out = recorder.track(torch.randn(4, 1_500_000, requires_grad=True) * 1)

    assert recorder.classify(out.pow(2).sum() / 4, 4) == MEAN


def test_a_model_that_returns_its_loss_is_refused() -> None:
    recorder = Recorder()
    loss = recorder.track(torch.randn(N, C, requires_grad=True).pow(2).mean())

    assert "returns the loss itself" in recorder.classify(loss, N).reason
    assert "returns the loss itself" in recorder.classify(loss / 2, N).reason


def test_an_output_without_the_samples_is_refused() -> None:
    recorder = Recorder()
    out = recorder.track(torch.randn(3, N, requires_grad=True) * 1)

    assert "(3, 8)" in recorder.classify(out.mean(), N).reason


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


def test_what_is_computed_out_of_sight_is_refused() -> None:
    recorder = Recorder()
    batch = make(recorder=recorder)
    hidden: Tensor = Square.apply(batch.out)

    assert "can be followed" in recorder.classify(hidden.mean(), N).reason
    assert "not followed" in recorder.classify(batch.out.mean() + hidden.mean(), N).reason


def test_activations_read_beside_the_output_are_refused() -> None:
    recorder = Recorder()
    hidden = torch.randn(N, 4, requires_grad=True) * 2
    out = recorder.track(hidden.tanh())

    assert "inside the model" in recorder.classify(out.mean() + hidden.abs().mean(), N).reason


def test_writes_into_views_are_replayed() -> None:
    recorder = Recorder()
    out = recorder.track(torch.randn(N, C, requires_grad=True) * 1)
    copied = out * 1
    copied[:, 0] = 7.0
    copied[:, 1].mul_(3.0)
    coupled = out * 1
    coupled[:, 0] = out.sum()
    total = torch.zeros(())
    total += F.mse_loss(copied, torch.zeros(N, C), reduction="sum")

    assert recorder.classify(copied.mean(), N) == MEAN
    assert recorder.classify(total, N) == SUM
    assert type(total) is Tracked
    assert recorder.classify(coupled.sum(), N) == UNKNOWN


@pytest.mark.parametrize("name", [*MEANS, *SUMS])
def test_gradients_equal_those_of_plain_tensors(name: str) -> None:
    loss = MEANS.get(name) or SUMS[name]
    plain, tracked = make(), make(recorder=Recorder())

    loss(plain).backward()
    value = loss(tracked)
    value.backward()

    assert type(value) is Tracked
    assert plain.weight.grad is not None
    assert tracked.weight.grad is not None
    assert torch.equal(plain.weight.grad, tracked.weight.grad)


def test_only_what_needs_a_gradient_is_tracked() -> None:
    out = make(recorder=Recorder()).out

    plain = [out.detach(), out.data, out.argmax(1), out > 0, out.max(1).indices, out.shape, out.size(0)]
    with torch.no_grad():
        plain.append(out * 2)

    assert not any(isinstance(value, Tracked) for value in plain)
    assert all(
        type(value) is Tracked
        for value in (out, out.T, out[0], out.max(1).values, *out.unbind(), *out.split(2))
    )
    assert isinstance(out.sum().item(), float)


def test_an_output_without_gradient_stays_as_it_is() -> None:
    out = torch.randn(N, C)

    assert Recorder().track(out) is out


def test_prints_and_formats_as_plain() -> None:
    plain, tracked = make(), make(recorder=Recorder())

    assert repr(tracked.out).startswith("tensor(")
    assert repr(tracked.out * 2) == repr(plain.out * 2)
    assert repr(tracked.out.sum()) == repr(plain.out.sum())
    assert f"{tracked.out.sum():.3f} {tracked.out.sum()}" == f"{plain.out.sum():.3f} {plain.out.sum()}"


def test_copies_and_pickles_are_plain() -> None:
    out = make(recorder=Recorder()).out
    buffer = io.BytesIO()
    torch.save({"loss": out.sum()}, buffer)
    buffer.seek(0)

    copies = [pickle.loads(pickle.dumps(out.sum())), copy.deepcopy(out.sum()), torch.load(buffer)["loss"]]

    assert all(type(value) is Tensor for value in copies)
    assert all(torch.equal(value, out.sum()) for value in copies)
    assert type(out) is Tracked


def test_clear_leaves_plain_tensors_that_are_not_followed() -> None:
    recorder = Recorder()
    out = make(recorder=recorder).out
    loss = out.mean()

    recorder.clear()

    assert type(out) is Tensor
    assert type(loss) is Tensor
    assert type(loss * 2) is Tensor
    assert recorder.scalars(loss) == [loss]
    assert recorder.classify(loss, N) == UNKNOWN
    loss.backward()


def test_a_kept_loss_holds_nothing_after_clear_and_a_dropped_one_before() -> None:
    recorder = Recorder()
    out = make(recorder=recorder).out
    labels, dropped = torch.zeros(N, C), torch.zeros(N, C)
    held, freed = weakref.ref(labels), weakref.ref(dropped)
    loss = (out + labels).mean()
    (out + dropped).mean()
    del out, labels, dropped
    gc.collect()

    assert freed() is None
    assert held() is not None
    recorder.clear()
    assert held() is None
    loss.backward()


def test_evaluation_without_backward_keeps_nothing() -> None:
    recorder = Recorder()
    for _ in range(3000):
        recorder.track(torch.ones(1, 1, requires_grad=True) * 1).sum()

    assert len(recorder._made) <= 1025


def test_scalars_come_in_order_with_their_own_kinds() -> None:
    recorder = Recorder()
    batch = make(recorder=recorder)
    error = F.mse_loss(batch.out, batch.real)
    norm = batch.out.pow(2).sum()
    spread = batch.out.std()
    root = error * 2.5
    F.l1_loss(batch.out, batch.real)  # dropped at once

    found = [(value, recorder.classify(value, N)) for value in recorder.scalars(root)]

    assert [id(value) for value, _ in found] == [id(value) for value in (error, norm, spread, root)]
    assert [kind for _, kind in found] == [MEAN, SUM, UNKNOWN, MEAN]


def test_filled_scalars_read_as_their_global_values() -> None:
    recorder = Recorder()
    batch = make(recorder=recorder)
    loss = F.mse_loss(batch.out, batch.real)
    scaled = loss * 4.0
    scalars = recorder.scalars(scaled)
    recorder.clear()
    scaled.backward()
    for value, number in zip(scalars, (0.5, 2.0), strict=True):
        value.data.fill_(number)

    assert (loss.item(), scaled.item()) == (0.5, 2.0)


def test_signature_tells_code_paths_apart_and_not_sizes() -> None:
    def signature(n: int, **options: Any) -> tuple[str, ...]:
        recorder = Recorder()
        batch = make(n, recorder=recorder)
        return recorder.signature(F.cross_entropy(batch.out.view(n, C), batch.labels, **options) / n)

    assert signature(8) == signature(3) == ("output", "view", "cross_entropy(" + signature(8)[2][14:], "div")
    assert signature(8) != signature(8, reduction="sum")
    assert signature(8) != signature(8, weight=torch.ones(C))


def test_ignored_labels_are_counted() -> None:
    recorder = Recorder()
    batch = make(recorder=recorder)
    batch.labels[:3] = -100

    assert int(recorder.num_ignored(F.cross_entropy(batch.out, batch.labels)) or 0) == 3
    assert recorder.num_ignored(F.cross_entropy(batch.out, batch.labels, reduction="sum")) is None


def test_numbers_computed_from_a_slice_differ_between_ranks() -> None:
    rows, sizes = [], [8, 5]
    for n in sizes:
        recorder = Recorder()
        batch = make(n, recorder=recorder, seed=n)
        error = (batch.out - batch.real).pow(2)
        root = (
            error.sum() / n
            + (error * batch.mask).sum() / batch.mask.sum().item()
            + 0.1 * batch.weight.sum() * 0
        )
        rows.append([value for _, value in recorder.constants(root)])

    assert find_disagreement(rows, sizes) == 1
    assert find_disagreement([[8, 2.0, 0.125], [5, 2.0, 0.2]], sizes) is None
    assert find_disagreement([[2.0], [2.0, 3.0]], sizes) == 1


@dataclass
class Output:
    logits: Tensor
    extra: tuple[Tensor, int]


def test_every_tensor_of_a_returned_tree_is_tracked_and_untracked() -> None:
    recorder = Recorder()
    out = make().out
    named = torch.return_types.max((out, out.argmax()))
    tree = {"a": out, "b": [out, None], "c": Output(out, (out, 3)), "d": "text", "e": named}

    tracked = map_tensors(recorder.track, tree)
    again = untrack_tree(tracked)

    assert type(tree["a"]) is Tensor
    assert all(
        type(t) is Tracked
        for t in (tracked["a"], tracked["b"][0], tracked["c"].logits, tracked["c"].extra[0])
    )
    assert tracked["c"].extra[1] == 3
    assert type(again["c"].extra[0]) is Tensor
    assert recorder.classify(tracked["a"].mean() + tracked["c"].logits.pow(2).mean(), N) == MEAN


def test_the_random_state_of_the_cell_is_not_touched() -> None:
    recorder = Recorder()
    batch = make(recorder=recorder)
    loss = F.dropout(batch.out).mean() + F.mse_loss(batch.out, batch.real)
    before = torch.get_rng_state()

    recorder.classify(loss, N)
    recorder.classify(F.mse_loss(batch.out, batch.real), N)

    assert torch.equal(torch.get_rng_state(), before)
