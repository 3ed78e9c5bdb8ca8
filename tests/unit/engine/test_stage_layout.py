"""Which rank gets which layer of real models."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.stages.layout import Layout, check_undivided, count_batchnorms, lay_out


class Vision(nn.Module):
    """Layers in lists at two depths, one that only holds numbers, parameters by themselves, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(Tensor(1, 4))
        self.patch = nn.Linear(8, 4)
        self.drop = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.encoder.position = nn.Parameter(Tensor(1, 4))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = nn.Parameter(Tensor(8, 4))
        self.back = nn.Linear(4, 8, bias=False)
        self.back.weight = self.head.weight


def owners(layout: Layout) -> dict[str, int]:
    return {part.name: part.owner for part in layout.parts}


def test_layers_are_found_and_balanced() -> None:
    layout = lay_out(Vision(), 2)
    assert [part.name for part in layout.parts] == [
        "patch",
        "encoder.layers.0",
        "encoder.layers.1",
        "head",
        "back",
    ]
    assert [part.owner for part in layout.parts] == [0, 0, 1, 1, 1]
    homes = {home.name: home.owners for home in layout.homes.values()}
    assert homes["token"] == (0,)
    assert homes["encoder.position"] == (0,)  # used after `patch`
    assert homes["encoder.layers.1.norm1.weight"] == (1,)


class Gpt(nn.Module):
    """Blocks that are mostly an MLP, whose norms are made before what they follow."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            block = nn.Module()
            block.norm, block.mlp = nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))
            self.blocks.append(block)


def test_a_block_is_one_layer_also_when_most_of_it_is_an_mlp() -> None:
    assert [part.name for part in lay_out(Gpt(), 2).parts] == ["embed", "blocks.0", "blocks.1"]


def test_tied_weights_have_several_owners() -> None:
    model = Vision()
    layout = lay_out(model, 2, groups=[["token", "patch", "encoder.*", "head"], ["back"]])
    assert layout.homes[id(model.back.weight)].owners == (0, 1)
    assert [part.name for part in layout.parts][1] == "encoder"


def test_a_parameter_by_itself_goes_with_the_layer_named_before_it() -> None:
    model = Vision()
    layers = ["patch", "encoder.layers", "encoder.position", "token", "head", "back"]
    layout = lay_out(model, 2, layers=layers)
    assert layout.homes[id(model.token)].owners == (owners(layout)["encoder.layers.1"],)


def test_only_layers_of_a_list_are_found_in_a_residual_block() -> None:
    block = nn.Module()
    block.conv, block.down = nn.Conv2d(4, 4, 3), nn.Sequential(nn.Conv2d(4, 4, 1))
    model = nn.Sequential(block, nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    assert owners(lay_out(model, 3)) == {"0": 0, "2": 1, "3": 2}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": ["patch", "head", "back"]}, "encoder.layers.0.self_attn.in_proj_weight"),
        ({"groups": [["token", "patch", "encoder", "head", "back"]]}, "1 stages were named, and 2 workers"),
        ({"layers": [".*", "token"], "ranks_of": {".*": 1, "token": 1}}, "No layer is on rank 0"),
        ({"layers": [".*", "token"], "ranks_of": {"patch": 1}}, "names no device for"),
    ],
)
def test_layouts_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RefusedError, match=said.replace(".", r"\.")):
        lay_out(Vision(), 2, **options)


def test_batchnorms_that_use_the_batch_count() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False))
    assert count_batchnorms(model) == 2
    assert count_batchnorms(model.eval()) == 1


def test_blocks_that_are_computed_twice_stay_whole() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3)))
    model.append(nn.Linear(4, 4))
    assert "0.0" in owners(lay_out(model, 2))
    blocks = {str(at): model[at] for at in range(3)}
    layout = lay_out(model, 2, undivided=list(blocks.values()))
    assert owners(layout) == {"0": 0, "1": 0, "2": 1, "3": 1}
    check_undivided(layout, blocks)
    assert [layout.owner_of(each) for each in (model[1][2], model[3], model)] == [0, 1, None]
    named = lay_out(model, 2, groups=[["0", "1", "2.0"], ["2.2", "3"]])
    with pytest.raises(RefusedError, match=r"2 would be .* 2\.0 \(rank 0\), 2\.2 \(rank 1\)"):
        check_undivided(named, blocks)
