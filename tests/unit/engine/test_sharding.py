"""What is decided before anything is sharded: layers, refusals, cuts; and objects that stand in for others."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from openclaw_nb.core.errors import RefusedError, UnknownNameError
from openclaw_nb.engine.objects.find import Objects
from openclaw_nb.engine.sharding import checks
from openclaw_nb.engine.sharding.layers import choose_layers
from openclaw_nb.engine.sharding.shards import bounds
from openclaw_nb.engine.sharding.stand_in import StandIn, fill, stand_in


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def test_repeated_blocks_are_found() -> None:
    assert choose_layers(Tower()) == ["blocks.0", "blocks.1", "blocks.2"]
    assert choose_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == []
    large = nn.Sequential(nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 600), nn.Linear(600, 2))
    assert choose_layers(large) == ["0", "2"]


def test_a_block_that_shares_parameters_is_left_to_the_whole() -> None:
    tower = Tower()
    tower.blocks[1].two.weight = tower.blocks[2].two.weight
    assert choose_layers(tower) == ["blocks.0"]
    with pytest.raises(
        RefusedError, match=r"blocks\.1 cannot be a layer .* shares parameters with blocks\.2\.two"
    ):
        choose_layers(tower, ["blocks"])


def test_named_layers() -> None:
    assert choose_layers(Tower(), ["blocks"]) == ["blocks.0", "blocks.1", "blocks.2"]
    assert choose_layers(Tower(), ["Block"]) == ["blocks.0", "blocks.1", "blocks.2"]
    inner_first = choose_layers(Tower(), ["blocks.1", "blocks.1.one"])
    assert inner_first == ["blocks.1.one", "blocks.1"]
    with pytest.raises(UnknownNameError, match="'block'"):
        choose_layers(Tower(), ["block"])


@pytest.mark.parametrize("length", [1, 2, 5, 7, 8, 9])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_cuts_are_those_of_chunk(length: int, num_ranks: int) -> None:
    chunks = [len(c) for c in torch.arange(length).chunk(num_ranks)]
    chunks += [0] * (num_ranks - len(chunks))
    cuts = [bounds(length, num_ranks, rank) for rank in range(num_ranks)]
    assert [high - low for low, high in cuts] == chunks
    assert cuts[-1][1] == length


def objects(model: nn.Module, optimizer: torch.optim.Optimizer) -> Objects:
    nothing: dict[str, str] = {}
    return Objects(
        models={"model": model},
        optimizers={"optimizer": optimizer},
        loaders={},
        schedulers={},
        scalers={},
        aliases=nothing,
        ignored=(),
        built=(),
    )


class OwnStep(torch.optim.SGD):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Do nothing."""


class Renamed(torch.optim.AdamW):
    pass


def test_optimizers_whose_updates_need_the_whole_are_refused() -> None:
    model = Block()
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, Renamed):
        checks.check(objects(model, kind(model.parameters(), lr=0.1)))
    matrices = [model.one.weight, model.two.weight]
    refused = {
        "orthogonalises": torch.optim.Muon(matrices),
        "rows and columns": torch.optim.Adafactor(model.parameters()),
        "scalar products": torch.optim.LBFGS(model.parameters()),
        "OwnStep.*only of torch's own": OwnStep(model.parameters(), lr=0.1),
    }
    for said, optimizer in refused.items():
        with pytest.raises(RefusedError, match=said):
            checks.check(objects(model, optimizer))


def _scalar(model: Block) -> None:
    model.one.scale = nn.Parameter(torch.tensor(1.0))


def _half(model: Block) -> None:
    model.two.half()


def _transposed(model: Block) -> None:
    model.one.weight = nn.Parameter(torch.zeros(4, 3).t())


def _same_memory(model: Block) -> None:
    model.one.weight.data = model.two.weight.data


def _hooked(model: Block) -> None:
    model.one.weight.register_hook(lambda gradient: gradient)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_scalar, "no dimension"),
        (_half, "several dtypes"),
        (_transposed, "not contiguous"),
        (_same_memory, "in the same memory"),
        (_hooked, "hooks of its own"),
    ],
)
def test_parameters_that_cannot_be_sharded_are_refused(change: Callable[[Block], None], said: str) -> None:
    model = Block()
    change(model)
    with pytest.raises(RefusedError, match=said):
        checks.check(objects(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def test_a_parameter_passes_on_what_is_done_with_it_and_comes_back() -> None:
    """Also while the graph of an earlier loss, which holds the parameter, is alive."""
    parameter = nn.Parameter(torch.ones(4))
    kept = (parameter * 2).sum()
    shard = nn.Parameter(torch.full((2,), 3.0))
    stand_in(parameter, shard)
    assert type(parameter) is StandIn
    assert parameter.sum().item() == 6.0
    assert torch.stack([parameter, parameter]).shape == (2, 2)
    shard.grad = torch.ones(2)
    torch.nn.utils.clip_grad_norm_([parameter], 0.5)
    assert shard.grad.norm().item() == pytest.approx(0.5, rel=1e-4)
    parameter.grad = None
    assert shard.grad is None
    fill(parameter, torch.arange(4.0), torch.zeros(4), requires_grad=True)
    assert type(parameter) is nn.Parameter
    assert parameter.sum().item() == 6.0
    assert parameter.grad is not None
    assert type(copy.deepcopy(parameter)) is nn.Parameter
    assert kept.item() == 8.0
