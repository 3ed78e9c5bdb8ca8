"""What a checkpoint holds, put back into fresh objects: training goes on as if nothing had been.

The right values are those of the undisturbed run in this process, to the last bit, and of the safetensors package.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from openclaw_nb.core.errors import CheckpointError
from openclaw_nb.engine.checkpoint import state
from openclaw_nb.engine.checkpoint.catalog import STATE, TENSORS, Checkpoint, find_newest
from openclaw_nb.engine.checkpoint.load import load, load_into, place_of
from openclaw_nb.engine.checkpoint.store import Store
from openclaw_nb.engine.checkpoint.tensors import HostBuffer, Layout, read_tensors
from openclaw_nb.engine.checkpoint.tree import decode, encode
from openclaw_nb.engine.checkpoint.writer import Job, Writer
from openclaw_nb.engine.objects.find import Objects


class Net(nn.Module):
    def __init__(self, width: int = 6, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.dropout(self.norm(self.embed(x)), 0.2))


def build(seed: int, model: nn.Module | None = None) -> Objects:
    """Return objects as a cell has them; another seed gives other parameters, and other random numbers later."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = model or Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, 0.2 * n))
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 4, 9], 0.5)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, steps], [3])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    generator = torch.Generator().manual_seed(seed)
    data = TensorDataset(torch.arange(40) % 10, torch.arange(40) % 7)
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=generator)
    return Objects(
        models={"net": model},
        optimizers={"optimizer": optimizer},
        schedulers={"scheduler": scheduler, "plateau": plateau},
        scalers={"scaler": torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)},
        loaders={"loader": loader},
        aliases={},
        ignored=(),
        built=(),
    )


def train(objects: Objects, num_passes: int) -> list[float]:
    """Train, drawing random numbers of every kind; return what was drawn and the losses."""
    model, optimizer = objects.models["net"], objects.optimizers["optimizer"]
    scaler, told = objects.scalers["scaler"], []
    for _ in range(num_passes):
        for x, y in objects.loaders["loader"]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            objects.schedulers["scheduler"].step()
            told += [loss.item(), random.random(), float(np.random.rand()), scaler.get_scale()]
        objects.schedulers["plateau"].step(told[-4])
        told.append(optimizer.param_groups[0]["lr"])
    return told


def write(objects: Objects, directory: Path, step: int = 1, place: Any = None) -> Checkpoint:
    """Write a checkpoint as a cell does, and find it."""
    store = Store(directory)
    store.open()
    buffer, writer = HostBuffer(), Writer(store, keep=3)
    content = state.take(objects, place)
    layout = buffer.fill(content.tensors)
    kept = content.state | {"aliases": layout.aliases}
    writer.begin(Job(step, (layout.header(), buffer.data()), kept, {"models": content.models}))
    writer.wait()
    writer.abandon()
    assert not writer.failures
    found = find_newest(directory)
    assert found is not None
    return found


def test_training_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    objects = build(1)
    train(objects, 2)
    place = {"pass": 2, "began": torch.get_rng_state()}
    found = write(objects, tmp_path, place=place)
    expected, states = train(objects, 2), state.take(objects)
    fresh = build(2)
    parameters = list(fresh.models["net"].parameters())
    load_into(fresh, found)
    assert train(fresh, 2) == expected
    assert all(p is q for p, q in zip(parameters, fresh.models["net"].parameters(), strict=True))
    assert fresh.models["net"].head.weight is fresh.models["net"].embed.weight
    mine = state.take(fresh)
    assert all(torch.equal(mine.tensors[name], value) for name, value in states.tensors.items())
    assert mine.state == states.state
    assert place_of(found)["pass"] == 2
    assert torch.equal(place_of(found)["began"], place["began"])


def test_a_file_holds_each_storage_once_and_the_package_reads_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    objects = build(1)
    train(objects, 1)
    found = write(objects, tmp_path)
    tensors = load_file(found.path / TENSORS)
    assert found.state()["aliases"] == {"net.head.weight": "net.embed.weight"}
    assert "net.head.weight" not in tensors
    for name, parameter in objects.models["net"].named_parameters():
        assert torch.equal(tensors[f"net.{name}"], parameter)
    assert {path.name for path in found.path.iterdir()} == {TENSORS, STATE, "manifest.json"}


ALL_DTYPES = [
    torch.bool,
    *(
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.int64,
        torch.uint64,
    ),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def test_all_dtypes_shapes_and_strides(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.randint(0, 2, (3, n % 4)).to(dtype) for n, dtype in enumerate(ALL_DTYPES)}
    tensors |= {"number": torch.tensor(3), "turned": torch.randn(4, 5).T, "part": torch.randn(9)[2:7:2]}
    tensors["last"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    buffer = HostBuffer()
    layout = buffer.fill(tensors)
    path = tmp_path / "t.safetensors"
    path.write_bytes(layout.header() + bytes(buffer.data()))
    found = read_tensors(path, layout.aliases)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].tolist() == tensor.tolist() or tensor.dtype.itemsize == 1


def test_the_memory_is_used_again_and_grows() -> None:
    buffer = HostBuffer()
    one = {"a": torch.randn(100)}
    buffer.fill(one)
    first = buffer.data()
    buffer.fill(one | {"b": torch.ones(2, dtype=torch.float64)})
    assert len(buffer.data()) == 400 + 16
    one["a"].zero_()
    buffer.fill(one)
    assert len(buffer.data()) == len(first) == 400
    assert bytes(buffer.data()) == bytes(400)


def test_more_than_the_host_has_is_refused() -> None:
    vast = torch.empty(1).expand(2**50)
    with pytest.raises(CheckpointError, match=r"no memory for a copy of the state: 4096\.0 TiB needed"):
        HostBuffer().fill({"vast": vast})


VALUES: list[Any] = [
    {"a": [1, 2.5, None, True, "ä"], 3: (1, (2,)), ("x", 1): {5}},
    {"$": "mine"},
    [float("inf"), float("-inf"), 1e-323, 0.1 + 0.2, 2**70],
    Counter({4: 2, 9: 1}),
    {"z": 1, "a": 2},
    b"\x00\xff",
    1 + 2j,
    torch.Size([2, 3]),
    np.float64(1.5),
    np.int32(7),
    {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_as_they_were(value: Any) -> None:
    import json

    tensors: dict[str, torch.Tensor] = {}
    found = decode(json.loads(json.dumps(encode(value, "it", tensors), allow_nan=False)), tensors)
    assert (found, type(found), repr(found)) == (value, type(value), repr(value))


def test_arrays_and_not_a_number_come_back() -> None:
    tensors: dict[str, torch.Tensor] = {}
    found = decode(encode([np.arange(3, dtype=np.uint32), float("nan")], "it", tensors), tensors)
    assert found[0].dtype == np.uint32
    assert found[0].tolist() == [0, 1, 2]
    assert found[1] != found[1]


class Strange:
    pass


def test_what_cannot_be_kept_is_refused_by_its_place() -> None:
    objects = build(1)
    objects.schedulers["plateau"].extra = {"deep": [Strange()]}
    with pytest.raises(
        CheckpointError, match=r"plateau\.extra\.deep\[0\] is a .*\.Strange, which a checkpoint"
    ):
        state.take(objects)
    sparse = nn.Linear(1, 1)
    sparse.register_buffer("s", torch.ones(2, 2).to_sparse())
    with pytest.raises(CheckpointError, match=r"buffer net\.s is a tensor of layout torch.sparse_coo"):
        state.take(build(1, sparse))
    with pytest.raises(CheckpointError, match=r"x is of dtype torch.complex128"):
        Layout({"x": torch.ones(1, dtype=torch.complex128)})


# -------------------------------------------------------------------------------- other objects


class Wide(Net):
    def __init__(self) -> None:
        super().__init__(7)


class Longer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


OTHERS = [
    (
        lambda: build(1, Wide()),
        r"net\.embed\.weight is a parameter of shape \[10, 6\] and torch\.float32 in the",
    ),
    (lambda: build(1, Net().half()), r"and a parameter of shape \[10, 6\] and torch\.float16 in the model"),
    (
        lambda: build(1, Longer()),
        r"The model has parameter net\.more\.weight of shape \[2, 2\], which the check",
    ),
    (
        lambda: build(1, nn.Linear(2, 2)),
        r"The checkpoint has parameter net\.embed\.weight of shape \[10, 6\]",
    ),
]


@pytest.mark.parametrize(("make", "said"), OTHERS)
def test_another_model_is_refused_by_its_first_difference(tmp_path: Path, make: Any, said: str) -> None:
    found = write(build(1), tmp_path)
    other = make()
    before = [p.clone() for p in other.models["net"].parameters()]
    with pytest.raises(CheckpointError, match=said):
        load_into(other, found)
    assert all(torch.equal(p, q) for p, q in zip(before, other.models["net"].parameters(), strict=True))


def test_values_that_differ_do_not_go_into_one_tensor(tmp_path: Path) -> None:
    found = write(build(1, Net(tied=False)), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"net\.head\.weight and net\.embed\.weight are one tensor in the"
    ):
        load(tmp_path, net=Net())
    untied = Net(tied=False)
    load(found.path.parent, net=untied)
    assert not torch.equal(untied.head.weight, untied.embed.weight)


def test_other_optimizers_are_refused(tmp_path: Path) -> None:
    model = Net()
    write(build(1, model), tmp_path)
    with pytest.raises(CheckpointError, match="`o` is a SGD, and a AdamW in the checkpoint"):
        load(tmp_path, m=model, o=torch.optim.SGD(model.parameters(), lr=1.0))
    turned = torch.optim.AdamW(list(model.parameters())[::-1])
    with pytest.raises(
        CheckpointError, match=r"Parameter 0 of group 0 of optimizer `o` is net\.norm\.bias, and"
    ):
        load(tmp_path, m=model, o=turned)
    with pytest.raises(CheckpointError, match=r"groups of \[1\] parameters, and of \[3\] in the checkpoint"):
        load(tmp_path, m=model, o=torch.optim.AdamW([model.embed.weight]))
    with pytest.raises(CheckpointError, match="x is a int: a checkpoint is loaded into models, optimizers"):
        load(tmp_path, x=3)
    with pytest.raises(CheckpointError, match=f"There is no checkpoint in {tmp_path}/none"):
        load(tmp_path / "none", m=model)


def test_one_of_several_goes_by_its_name(tmp_path: Path) -> None:
    objects = build(1)
    write(objects, tmp_path)
    with pytest.raises(
        CheckpointError, match="has the schedulers 'scheduler', 'plateau', and here is the scheduler"
    ):
        load(tmp_path, s=objects.schedulers["plateau"])
    fresh = build(3)
    load(tmp_path, plateau=fresh.schedulers["plateau"])
    assert fresh.schedulers["plateau"].state_dict() == objects.schedulers["plateau"].state_dict()


def test_state_in_float32_of_parameters_in_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    """torch's load_state_dict casts it."""

    def built() -> Objects:
        objects = build(1, Net().bfloat16())
        sgd = torch.optim.SGD(objects.models["net"].parameters(), momentum=0.9)
        return replace(objects, optimizers={"sgd": sgd}, schedulers={})

    objects, fresh = built(), built()
    for p in objects.models["net"].parameters():
        objects.optimizers["sgd"].state[p]["momentum_buffer"] = torch.randn(p.shape)
    load_into(fresh, write(objects, tmp_path))
    states = [list(each.optimizers["sgd"].state.values()) for each in (objects, fresh)]
    for one, other in zip(*states, strict=True):
        assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])
        assert other["momentum_buffer"].dtype == torch.float32
