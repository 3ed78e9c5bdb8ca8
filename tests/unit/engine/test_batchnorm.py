"""Ranks are threads that meet in a gather; what is right comes from nn.BatchNorm on the whole batch."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.steps.batchnorm import combine, count_batchnorms, synchronise

SLICES = [[8], [5, 3], [7, 1], [5, 2, 1], [5, 3, 0], [0, 8, 0], [1, 1, 1]]
EXACT = {torch.float64: 1e-12, torch.float32: 2e-5}


class Ranks:
    """Threads that exchange vectors in lockstep, as a blocking collective does."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.num_gathers = 0
        self._rows: list[Tensor | None] = [None] * world_size
        self._barrier = threading.Barrier(world_size, timeout=20)

    def gather(self, rank: int) -> Callable[[Tensor], Tensor]:
        def all_gather(vector: Tensor) -> Tensor:
            assert vector.dim() == 1
            self._rows[rank] = vector.detach().clone()
            self._barrier.wait()
            rows = torch.stack([row for row in self._rows if row is not None])
            self.num_gathers += rank == 0
            self._barrier.wait()
            return rows

        return all_gather

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.world_size) as pool:
            return [done.result() for done in [pool.submit(work, rank) for rank in range(self.world_size)]]


def layer(kind: str, dtype: torch.dtype, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    made: nn.Module = getattr(nn, kind)(3, dtype=dtype, **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def data(kind: str, num_samples: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(2)
    trailing: tuple[int, ...] = {"BatchNorm1d": (), "BatchNorm2d": (2, 3), "BatchNorm3d": (2, 1, 2)}[kind]
    return torch.randn(num_samples, 3, *trailing, dtype=dtype) * 2 + 5


def mean_loss(output: Tensor, like: Tensor) -> Tensor:
    """A loss whose gradient differs between samples and channels; a mean over the samples."""
    target = torch.linspace(-1, 1, like[0].numel(), dtype=like.dtype).view(like[0].shape)
    return (output - target).pow(2).mul(like.sin()).flatten(1).sum(1).mean()


def train_whole(module: nn.Module, batches: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    outputs, input_grads = [], []
    for batch in batches:
        x = batch.clone().requires_grad_()
        out = module(x)
        mean_loss(out, batch).backward()
        assert x.grad is not None
        outputs.append(out.detach())
        input_grads.append(x.grad)
    return outputs, input_grads


def train_sliced(module: nn.Module, batches: list[Tensor], sizes: list[int]) -> list[dict[str, Any]]:
    """Run the same steps on slices, with output gradients scaled by world_size * n / N as the engine does."""
    ranks, starts = Ranks(len(sizes)), [sum(sizes[:rank]) for rank in range(len(sizes))]

    def work(rank: int) -> dict[str, Any]:
        own, size = copy.deepcopy(module), sizes[rank]
        undo = synchronise(own, ranks.gather(rank), lambda: size)
        outputs, input_grads = [], []
        for batch in batches:
            part = batch[starts[rank] :][:size] if size else torch.full_like(batch[:1], 1e3)
            x = part.clone().requires_grad_()
            out = own(x)
            share = ranks.world_size * size / len(batch)
            out.register_hook(lambda grad, share=share: grad * share)
            mean_loss(out, part).backward()
            assert x.grad is not None
            outputs.append(out.detach())
            input_grads.append(x.grad)
        undo()
        return {"module": own, "outputs": outputs, "input_grads": input_grads}

    return ranks.run(work)


def close(actual: Tensor, expected: Tensor) -> None:
    allowed = EXACT[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=allowed, atol=allowed)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
    {"eps": 0.3, "momentum": 0.7},
]


@pytest.mark.parametrize("sizes", SLICES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("kind", ["BatchNorm1d", "BatchNorm2d"])
def test_slices_train_as_the_whole_batch(
    kind: str, dtype: torch.dtype, options: dict[str, Any], sizes: list[int]
) -> None:
    whole = layer(kind, dtype, **options)
    batches = [data(kind, sum(sizes), dtype), data(kind, sum(sizes), dtype) * 0.5 - 1]
    ranks = train_sliced(whole, batches, sizes)

    outputs, input_grads = train_whole(whole, batches)

    world_size = len(sizes)
    for step in range(len(batches)):
        real = [rank for rank in range(world_size) if sizes[rank]]
        close(torch.cat([ranks[rank]["outputs"][step] for rank in real]), outputs[step])
        close(torch.cat([ranks[rank]["input_grads"][step] for rank in real]) / world_size, input_grads[step])
    for name, parameter in whole.named_parameters():
        grads = [rank["module"].get_parameter(name).grad for rank in ranks]
        assert parameter.grad is not None
        close(torch.stack(grads).mean(0), parameter.grad)
    for rank in ranks:
        assert rank["module"].state_dict().keys() == whole.state_dict().keys()
        for name, buffer in whole.named_buffers():
            close(rank["module"].get_buffer(name).to(dtype), buffer.to(dtype))


def test_three_dimensional_batches() -> None:
    whole = layer("BatchNorm3d", torch.float64)
    batch = data("BatchNorm3d", 5, torch.float64)
    ranks = train_sliced(whole, [batch], [3, 2])

    outputs, _ = train_whole(whole, [batch])

    close(torch.cat([rank["outputs"][0] for rank in ranks]), outputs[0])


def test_a_dummy_gives_nothing_and_gets_nothing() -> None:
    batch = data("BatchNorm1d", 4, torch.float64)

    dummy = train_sliced(layer("BatchNorm1d", torch.float64), [batch], [4, 0])[1]

    assert torch.equal(dummy["input_grads"][0], torch.zeros(1, 3, dtype=torch.float64))
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in dummy["module"].parameters())
    assert torch.isfinite(dummy["outputs"][0]).all()


def test_a_dummy_that_is_not_finite_spoils_nothing() -> None:
    ranks = Ranks(2)
    batch = data("BatchNorm1d", 4, torch.float64)
    inputs, reals = [batch, torch.full((1, 3), torch.nan, dtype=torch.float64)], [4, 0]

    modules = [layer("BatchNorm1d", torch.float64) for _ in inputs]  # threads share the random state

    def work(rank: int) -> Tensor:
        synchronise(modules[rank], ranks.gather(rank), lambda: reals[rank])
        output: Tensor = modules[rank](inputs[rank])
        return output

    close(ranks.run(work)[0], layer("BatchNorm1d", torch.float64)(batch))


def test_variance_of_values_far_from_zero_survives() -> None:
    torch.manual_seed(0)
    values = torch.randn(1000, 2) + 10_000
    parts = values.split([600, 400])
    rows = [torch.cat([torch.tensor([len(p)]), p.mean(0), p.var(0, correction=0) * len(p)]) for p in parts]

    moments = combine(torch.stack(rows))

    torch.testing.assert_close(
        moments.variance, values.double().var(0, correction=0).float(), rtol=1e-4, atol=0
    )
    assert moments.num_values == 1000


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    ranks = Ranks(2)
    parts = data("BatchNorm2d", 6, torch.float32).to(dtype).split(3)

    modules = [layer("BatchNorm2d", torch.float32) for _ in parts]  # threads share the random state

    def work(rank: int) -> Tensor:
        synchronise(modules[rank], ranks.gather(rank), lambda: 3)
        x = parts[rank].clone().requires_grad_()
        output: Tensor = modules[rank](x)
        output.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype
        return output

    output = torch.cat(ranks.run(work))

    assert output.dtype == dtype
    expected = layer("BatchNorm2d", torch.float32)(torch.cat(parts).float())
    torch.testing.assert_close(output.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("sizes", [[1], [1, 0]])
def test_a_single_value_per_channel_is_refused_as_by_torch(sizes: list[int]) -> None:
    batch = data("BatchNorm1d", 1, torch.float32)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer("BatchNorm1d", torch.float32)(batch)

    with pytest.raises(ValueError, match="more than 1 value per channel"):
        train_sliced(layer("BatchNorm1d", torch.float32), [batch], sizes)


def test_one_gather_forward_one_backward() -> None:
    ranks = Ranks(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    synchronise(model, ranks.gather(0), lambda: 4)

    loss = model(torch.randn(4, 3)).pow(3).sum()
    forward = ranks.num_gathers
    loss.backward()

    assert (forward, ranks.num_gathers) == (1, 2)


@pytest.mark.parametrize("tracked", [True, False])
def test_evaluation_and_whole_batches_stay_on_their_rank(tracked: bool) -> None:
    module, plain = (layer("BatchNorm1d", torch.float32, track_running_stats=tracked) for _ in range(2))
    batch = data("BatchNorm1d", 4, torch.float32)
    real: list[int | None] = [4]
    synchronise(module, Ranks(3).gather(0), lambda: real[0])  # the gather would wait for two more ranks

    assert torch.equal(module.eval()(batch), plain.eval()(batch))
    real[0] = None
    assert torch.equal(module.train()(batch), plain.train()(batch))
    assert all(
        torch.equal(own, theirs) for own, theirs in zip(module.buffers(), plain.buffers(), strict=True)
    )


def test_undo_leaves_the_module_as_it_was() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3))
    )
    keys, before = list(model.state_dict()), [dict(module.__dict__) for module in model.modules()]

    undo = synchronise(model, Ranks(1).gather(0), lambda: 2)

    assert count_batchnorms(model) == 2
    assert type(model[1]) is nn.BatchNorm2d
    assert list(model.state_dict()) == keys
    assert "forward" in model[1].__dict__
    undo()
    undo()
    assert [list(module.__dict__) for module in model.modules()] == [list(names) for names in before]


def test_a_copy_or_a_pickle_normalises_by_itself() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    synchronise(model, Ranks(2).gather(0), lambda: 4)  # the gather would wait for another rank
    batch = data("BatchNorm1d", 4, torch.float32)
    expected = layer("BatchNorm1d", torch.float32, affine=False)(batch)

    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        close(other(batch), expected)
        close(other[0].running_mean, 0.1 * batch.mean(0))
    assert torch.equal(model[0].running_mean, torch.zeros(3))


def test_a_lazy_module_becomes_a_synchronised_one() -> None:
    model, ranks = nn.Sequential(nn.LazyBatchNorm1d()), Ranks(1)
    synchronise(model, ranks.gather(0), lambda: 4)

    model(data("BatchNorm1d", 4, torch.float32))

    assert type(model[0]) is nn.BatchNorm1d
    assert ranks.num_gathers == 1


def test_a_forward_of_its_own_is_refused() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    model = nn.Sequential(nn.BatchNorm1d(3), Own(3))

    with pytest.raises(RefusedError, match="1 is a Own"):
        synchronise(model, Ranks(1).gather(0), lambda: 2)
    assert "forward" not in model[0].__dict__
