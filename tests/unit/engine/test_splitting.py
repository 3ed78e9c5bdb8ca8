"""A model call split over the ranks gives every rank the whole batch's output, and its own rows' gradient.

The right values are those of the same call on the whole batch in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.group.collectives import ReleasableGroup
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.steps.splitting import BatchSplitter

from .conftest import OnRanks

BATCH = torch.arange(10.0).reshape(5, 2)


def split_call(group: ReleasableGroup, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    splitter = BatchSplitter(Ranks(group))
    own_args, own_kwargs = splitter.split(args, kwargs)
    return splitter.join(model(*own_args, **own_kwargs), lambda: 1.0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5])
def test_the_output_is_the_whole_batchs(on_ranks: OnRanks, num_ranks: int, num_rows: int) -> None:
    batch = BATCH[:num_rows]
    outputs = on_ranks(lambda group: split_call(group, lambda x: x * 3 + 1, batch), num_ranks)
    assert all(torch.equal(output, batch * 3 + 1) for output in outputs)


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(5, [(5, 2, 2), (5, 2, 2), (5, 1, 1)]), (2, [(2, 1, 1), (2, 1, 1), (2, 0, 1)])],
    ids=["uneven", "fewer samples than ranks"],
)
def test_shares(on_ranks: OnRanks, num_rows: int, expected: list[tuple[int, int, int]]) -> None:
    """A rank without a share computes on one sample that does not count."""

    def body(group: ReleasableGroup) -> tuple[int, int, int]:
        splitter = BatchSplitter(Ranks(group))
        ((own,), _) = splitter.split((BATCH[:num_rows],), {})
        return splitter.num_global, splitter.num_real, len(own)

    assert on_ranks(body, 3) == expected


def test_only_what_has_the_batchs_length_is_cut(on_ranks: OnRanks) -> None:
    def body(group: ReleasableGroup) -> list[Any]:
        splitter = BatchSplitter(Ranks(group))
        table, scale = torch.zeros(7, 2), torch.tensor(2.0)
        args = (BATCH, [BATCH[:, 0], "word"], table)
        (own, (column, word), kept), named = splitter.split(args, {"mask": {"a": BATCH > 3}, "scale": scale})
        assert kept is table
        assert named["scale"] is scale
        return [own.shape, column.shape, word, named["mask"]["a"].shape]

    first, second = on_ranks(body)
    assert first == [(3, 2), (3,), "word", (3, 2)]
    assert second == [(2, 2), (2,), "word", (2, 2)]


def test_every_tensor_of_the_output_is_joined_also_with_several_rows_a_sample(on_ranks: OnRanks) -> None:
    def model(x: torch.Tensor) -> dict[str, Any]:
        return {"each": x.reshape(-1, 1), "pair": (x.sum(1), x.argmax(1))}

    whole = model(BATCH)
    for output in on_ranks(lambda group: split_call(group, model, BATCH), 3):
        assert torch.equal(output["each"], whole["each"])
        assert torch.equal(output["pair"][0], whole["pair"][0])
        assert torch.equal(output["pair"][1], whole["pair"][1])


@pytest.mark.parametrize("num_rows", [2, 5])
def test_the_ranks_gradients_add_up_to_the_whole_batchs(on_ranks: OnRanks, num_rows: int) -> None:
    """The loss mixes the rows; each rank takes back the gradient of its rows, times the weight."""
    batch = BATCH[:num_rows]

    def gradient(call: Callable[[Callable[..., Any]], torch.Tensor]) -> torch.Tensor:
        weight = torch.tensor([[1.0, 2.0], [-1.0, 0.5]], requires_grad=True)
        output = call(lambda x: x @ weight)
        (output @ output.T).pow(2).mean().backward()
        assert weight.grad is not None
        return weight.grad

    def body(group: ReleasableGroup) -> torch.Tensor:
        def call(model: Callable[..., Any]) -> torch.Tensor:
            splitter = BatchSplitter(Ranks(group))
            (own,), _ = splitter.split((batch,), {})
            joined: torch.Tensor = splitter.join(model(own), lambda: 0.5)
            return joined

        return gradient(call)

    parts = on_ranks(body, 3)
    whole = gradient(lambda model: model(batch))
    torch.testing.assert_close(sum(parts), whole * 0.5)
    if num_rows < 3:
        assert torch.equal(parts[2], torch.zeros(2, 2))


@pytest.mark.parametrize("given", [(), (3, "word"), (torch.tensor(1.0),)])
def test_a_call_without_a_batch_is_refused(on_ranks: OnRanks, given: tuple[Any, ...]) -> None:
    def body(group: ReleasableGroup) -> None:
        with pytest.raises(RefusedError, match="batch in dim 0 among the model's arguments"):
            BatchSplitter(Ranks(group)).split(given, {})

    on_ranks(body, 1)


@pytest.mark.parametrize("output", [torch.tensor(1.0), torch.zeros(3, 4)], ids=["a number", "other rows"])
def test_an_output_without_the_batch_is_refused(on_ranks: OnRanks, output: torch.Tensor) -> None:
    def body(group: ReleasableGroup) -> None:
        splitter = BatchSplitter(Ranks(group))
        splitter.split((BATCH[:4],), {})
        with pytest.raises(RefusedError, match=r"returned a tensor of shape \[.*Compute the loss outside"):
            splitter.join(output, lambda: 1.0)

    on_ranks(body)
