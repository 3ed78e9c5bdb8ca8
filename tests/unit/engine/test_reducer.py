"""Averaged gradients, against closed forms: the loss of rank r is (r + 1) * sum of the parameters.

Its gradient is r + 1 everywhere, so that the average over N ranks is (N + 1) / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from openclaw_nb.core.errors import MismatchError
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.steps.reducer import GradientReducer

from .conftest import OnRanks, disband, form, on_threads, share_memory


@pytest.fixture(params=["backend", "shared memory"])
def on_ranks(request: pytest.FixtureRequest) -> OnRanks:
    """Return ``on_ranks(body, size=2)``, which lists what ``body(ranks)`` returns on each rank."""

    def run(body: Callable[[Ranks], Any], size: int = 2) -> list[Any]:
        groups, _ = form(size)
        shared = share_memory(size) if request.param == "shared memory" else [None] * size
        ranks = [Ranks(*pair) for pair in zip(groups, shared, strict=True)]
        try:
            return on_threads([lambda each=each: body(each) for each in ranks])  # type: ignore[misc]
        finally:
            let_go()
            ranks.clear()
            disband(groups)
            for memory in filter(None, shared):
                memory.close()

    return run


NO_MESSAGE = torch.zeros(1, dtype=torch.float64)


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


_followers: list[GradientReducer] = []


def follow(followed: list[nn.Parameter], ranks: Ranks, **options: int) -> GradientReducer:
    reducer = GradientReducer(followed, ranks, **options)
    _followers.append(reducer)
    return reducer


def let_go() -> None:
    """Remove the reducers' hooks: no garbage collection finds the group through them."""
    while _followers:
        _followers.pop().remove()


def run_pass(reducer: GradientReducer, loss: torch.Tensor, factor: float) -> None:
    reducer.begin(factor, NO_MESSAGE)
    loss.backward()
    reducer.finish()
    reducer.set_gradients()


def values(group: list[nn.Parameter]) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.flatten().tolist() for p in group]


SHAPES = [(3,), (2, 5), (), (200, 100), (40,), (300, 1000), (1, 1)]  # small and large, in turn


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 10_000_000], ids=["one each", "some", "one"])
def test_gradients_are_averaged_whatever_the_buckets(
    on_ranks: OnRanks, num_ranks: int, bucket_bytes: int
) -> None:
    def body(ranks: Ranks) -> list[Any]:
        own = parameters(*SHAPES)
        reducer = follow(own, ranks, message_size=NO_MESSAGE.numel(), bucket_bytes=bucket_bytes)
        for _ in range(2):
            for parameter in own:
                parameter.grad = None
            loss = sum(p.sum() for p in own) * (ranks.rank + 1)
            run_pass(reducer, loss, 1 / num_ranks)
        return values(own)

    expected = [[(num_ranks + 1) / 2] * math.prod(shape) for shape in SHAPES]
    assert on_ranks(body, num_ranks) == [expected] * num_ranks


def test_gradients_accumulate_over_passes_as_on_one_device(on_ranks: OnRanks) -> None:
    def body(ranks: Ranks) -> list[Any]:
        own = parameters((2,), (2,))
        reducer = follow(own, ranks, message_size=NO_MESSAGE.numel(), bucket_bytes=1)
        for scale in (1.0, 10.0, 100.0):
            run_pass(reducer, sum(p.sum() for p in own) * scale * (ranks.rank + 1), 0.5)
        return values(own)

    assert on_ranks(body) == [[[166.5] * 2] * 2] * 2


def test_a_parameter_that_one_rank_used_is_averaged_with_nothing(on_ranks: OnRanks) -> None:
    def body(ranks: Ranks) -> list[Any]:
        own = parameters((2,), (2,), (2,))
        reducer = follow(own, ranks, message_size=NO_MESSAGE.numel())
        run_pass(reducer, own[0].sum() + (own[1].sum() if ranks.rank else 0.0), 0.5)
        return values(own)

    assert on_ranks(body) == [[[1.0, 1.0], [0.5, 0.5], None]] * 2


def test_a_parameter_that_no_rank_used_keeps_the_gradient_that_it_was_given(on_ranks: OnRanks) -> None:
    def body(ranks: Ranks) -> list[Any]:
        own = parameters((2,), (2,))
        own[1].grad = torch.full((2,), 7.0)
        run_pass(follow(own, ranks, message_size=NO_MESSAGE.numel()), own[0].sum(), 0.5)
        return values(own)

    assert on_ranks(body) == [[[1.0, 1.0], [7.0, 7.0]]] * 2


@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float64, 1e-15), (torch.float32, 1e-7), (torch.bfloat16, 1e-15)]
)
def test_the_message_is_summed_with_the_precision_of_its_bucket(
    on_ranks: OnRanks, dtype: torch.dtype, precision: float
) -> None:
    """Gradients of less than float32 leave the message a float64 bucket of its own."""

    def body(ranks: Ranks) -> list[float]:
        own = parameters((2,), dtype=dtype)
        message = torch.tensor([1 / 3, 2.0**20 + ranks.rank], dtype=torch.float64)
        reducer = follow(own, ranks, message_size=2)
        reducer.begin(0.5, message)
        own[0].sum().backward()
        return reducer.finish().tolist()

    for row in on_ranks(body):
        assert row == pytest.approx([2 / 3, 2.0**21 + 1], rel=precision)


def test_types_are_kept_apart_and_frozen_parameters_left_out(on_ranks: OnRanks) -> None:
    def body(ranks: Ranks) -> list[Any]:
        own = [*parameters((2,)), *parameters((2,), dtype=torch.float64), *parameters((2,))]
        own[2].requires_grad_(False)
        reducer = follow(own, ranks, message_size=NO_MESSAGE.numel())
        assert reducer.parameters == own[:2]
        run_pass(reducer, (own[0].sum() + own[1].sum()) * (ranks.rank + 1), 0.5)
        return [own[0].grad.dtype, own[1].grad.dtype, *values(own)]

    assert on_ranks(body) == [[torch.float32, torch.float64, [1.5, 1.5], [1.5, 1.5], None]] * 2


@pytest.mark.parametrize(
    "lay_out",
    [
        lambda t: t,
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.transpose(0, 1),
        lambda t: t.expand(2, 3, 4, 5),
    ],
    ids=["contiguous", "channels last", "transposed", "expanded"],
)
def test_gradients_match_their_parameter_in_place(on_ranks: OnRanks, lay_out: Any) -> None:
    def body(ranks: Ranks) -> None:
        own = nn.Parameter(lay_out(torch.zeros(2, 3, 4, 5)))
        weights = torch.arange(120.0).reshape(own.shape)
        reducer = follow([own], ranks, message_size=NO_MESSAGE.numel())
        run_pass(reducer, (own * weights).sum() * (ranks.rank + 1), 0.5)
        assert own.grad is not None
        assert torch.equal(own.grad, weights * 1.5)
        if own.is_contiguous(memory_format=torch.channels_last):
            assert own.grad.stride() == own.stride()

    on_ranks(body)


def broken_off(reducer: GradientReducer, parameter: nn.Parameter) -> None:
    """Begin a pass whose backward raises."""
    reducer.begin(1.0, NO_MESSAGE)
    reducer.drop_gradients()
    parameter.grad = None


def test_a_pass_that_breaks_off_on_all_ranks_leaves_the_next_one_right(on_ranks: OnRanks) -> None:
    """The slow rank still reads what the fast one sent last, while that one fills what it sends next."""

    def body(ranks: Ranks) -> list[float]:
        own = parameters((100_000,))
        reducer = follow(own, ranks, message_size=1)
        found = []
        for step in range(12):
            own[0].grad = None
            if step % 2:
                broken_off(reducer, own[0])
                continue
            run_pass(reducer, own[0].sum() * (ranks.rank + 1) * 10.0**step, 1.0)
            assert own[0].grad is not None
            found += [float(own[0].grad.min()) / 10.0**step, float(own[0].grad.max()) / 10.0**step]
        return found

    assert on_ranks(body) == [pytest.approx([3.0] * 12)] * 2


def test_sums_of_different_passes_are_not_added_up() -> None:
    """A pass that breaks off on one rank only: through shared memory the ranks would see different sums."""
    groups, _ = form(2)
    memories = share_memory(2)

    def body(ranks: Ranks) -> None:
        own = parameters((10,))
        reducer = follow(own, ranks, message_size=1)
        run_pass(reducer, own[0].sum(), 1.0)
        if ranks.rank == 0:
            broken_off(reducer, own[0])
        with pytest.raises(MismatchError, match="rank 0 in pass 3, rank 1 in pass 2"):
            run_pass(reducer, own[0].sum(), 1.0)

    every = [Ranks(*pair) for pair in zip(groups, memories, strict=True)]
    on_threads([lambda ranks=ranks: body(ranks) for ranks in every])  # type: ignore[misc]
    let_go()
    every.clear()
    disband(groups)
    for memory in filter(None, memories):
        memory.close()


def test_a_gradient_outside_of_an_announced_pass_strays(on_ranks: OnRanks) -> None:
    def body(ranks: Ranks) -> None:
        own = parameters((2,))
        reducer = follow(own, ranks, message_size=NO_MESSAGE.numel())
        run_pass(reducer, own[0].sum(), 1.0)
        assert not reducer.strayed
        own[0].sum().backward()
        assert reducer.strayed

    on_ranks(body, 1)


def test_dropped_gradients_are_none(on_ranks: OnRanks) -> None:
    def body(ranks: Ranks) -> list[Any]:
        own = parameters((2,), (2,))
        reducer = follow(own, ranks, message_size=NO_MESSAGE.numel())
        reducer.begin(1.0, NO_MESSAGE)
        sum(p.sum() for p in own).backward()
        reducer.drop_gradients()
        return values(own)

    assert on_ranks(body, 1) == [[None, None]]


def test_after_removal_gradients_are_tensors_of_their_own_and_nothing_is_followed(on_ranks: OnRanks) -> None:
    def body(ranks: Ranks) -> None:
        own = parameters((2,), (3,))
        reducer = follow(own, ranks, message_size=NO_MESSAGE.numel())
        run_pass(reducer, sum(p.sum() for p in own), 1.0)
        reducer.remove()
        storages = {p.grad.untyped_storage().data_ptr() for p in own}
        assert len(storages) == 2
        assert values(own) == [[1.0] * 2, [1.0] * 3]
        assert not any(p._post_accumulate_grad_hooks for p in own)
        own[0].sum().backward()
        assert not reducer.strayed
        assert values(own) == [[2.0] * 2, [1.0] * 3]

    on_ranks(body, 1)
