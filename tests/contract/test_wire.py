"""The wire is frozen: a change of a message is deliberate, shows here, and raises PROTOCOL_VERSION."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openclaw_nb.protocol import codec, messages
from openclaw_nb.protocol.messages import (
    AtHead,
    BorrowVariables,
    Complete,
    DescribeVariables,
    Done,
    EnterCell,
    Failed,
    FormGroup,
    ImportModules,
    Join,
    Leave,
    LendVariables,
    ListModules,
    Locate,
    Measured,
    Meet,
    Profiling,
    Recall,
    ReceiveVariables,
    Refused,
    Regroup,
    Regrouped,
    Release,
    RunCell,
    SendVariables,
    SetPace,
    Shown,
    Standing,
    StrategySpec,
    TakeBackVariables,
    Whereabouts,
)

# Change a line here only together with PROTOCOL_VERSION. Fields with "=" have a default.
VERSION = 8
WIRE = {
    "StrategySpec": "name options= model= optimizer= loader= split= reduction= sync_batchnorm=",
    "FormGroup": (
        "epoch rank world_size store_host store_port backend timeout_seconds directory search_path"
    ),
    "RunCell": "run_id epoch source execution_count strategy= compare_names= verify_steps= elastic= pace= profile=",
    "Profiling": "num_steps parts num_sharing=",
    "SetPace": "run_id speeds= continuous= slowdowns=",
    "SendVariables": "names path",
    "ReceiveVariables": "path",
    "LendVariables": "",
    "BorrowVariables": "path",
    "TakeBackVariables": "",
    "DescribeVariables": "names",
    "Complete": "code cursor",
    "Release": "epoch run_id cause grace_seconds",
    "Regroup": "run_id group cause",
    "Meet": "run_id num_ranks num_new leaves",
    "EnterCell": "cell group",
    "Locate": "",
    "ListModules": "",
    "ImportModules": "names directory search_path",
    "Recall": "with_output=",
    "Done": "value=",
    "Failed": "error_type message traceback consequence= interrupted= at= value=",
    "Shown": "run_id worker seq entries",
    "Whereabouts": "worker run_id epoch call group number seconds line code",
    "Measured": "worker run_id seq at steps samples loss seconds= num_bytes= drift= first_nan= count=",
    "Regrouped": "worker run_id epoch world_size num_steps seconds",
    "AtHead": "worker run_id epoch lets_in",
    "Join": "protocol version python torch ticket host pid device_id device",
    "Leave": "protocol ticket",
    "Standing": "stage worker= environment= connection=",
    "Refused": "reason",
}

SPEC = StrategySpec(
    name="data_parallel",
    options={"sync_frequency": 10},
    model="net",
    optimizer="opt",
    loader="train,test",
    split="model",
    reduction="sum",
    sync_batchnorm=False,
)
FORM = FormGroup(
    epoch=3,
    rank=1,
    world_size=2,
    store_host="127.0.0.1",
    store_port=4711,
    backend="auto",
    timeout_seconds=60.5,
    directory="/home/me/büro",
    search_path=["", "/home/me"],
)
PACE = SetPace(run_id="r-1", speeds={"0": 100.5, "1": 33.5}, continuous=True, slowdowns={"1": 3.0})
PROFILING = Profiling(num_steps=5, parts=[1, 4], num_sharing=4)
EXAMPLES = [
    SPEC,
    FORM,
    RunCell(run_id="r-1", epoch=3, source="print('ä')\n", execution_count=7),
    PACE,
    RunCell(run_id="r-3", epoch=3, source="", execution_count=0, strategy=SPEC, pace=PACE),
    RunCell(run_id="r-2", epoch=3, source="", execution_count=0, strategy=SPEC, compare_names=True),
    SendVariables(names=["x", "y"], path="/dev/shm/a"),
    ReceiveVariables(path="/dev/shm/a"),
    LendVariables(),
    BorrowVariables(path="/proc/7/fd/9"),
    TakeBackVariables(),
    DescribeVariables(names=[]),
    Complete(code="mod", cursor=3),
    Regroup(run_id="r-1", group=FORM, cause="rank 0 died"),
    Release(epoch=3, run_id="r-1", cause="rank 0 died", grace_seconds=0.5),
    Meet(run_id="r-1", num_ranks=3, num_new=1, leaves=False),
    EnterCell(cell=RunCell(run_id="r-1", epoch=3, source="", execution_count=0, strategy=SPEC), group=FORM),
    AtHead(worker=1, run_id="r-1", epoch=3, lets_in=True),
    Join(
        protocol=8,
        version="0.1.0",
        python="3.11",
        torch="2.13.0",
        ticket="t",
        host="node-a",
        pid=7,
        device_id="CPU-1",
        device={"id": "CPU-1", "kind": "cpu", "index": 1, "name": "a core", "memory_bytes": None},
    ),
    Leave(protocol=8, ticket="t"),
    Standing(stage="start", worker=2, environment={"A": "b"}, connection={"key": "k", "registration": 7}),
    Refused(reason="CPU-1 is in use by worker-0."),
    Locate(),
    ListModules(),
    ImportModules(names=["numpy"], directory="/tmp", search_path=["/opt/site"]),
    Recall(with_output=False),
    Done(value={"pid": 12, "names": {"x": "int:1"}, "where": None}),
    Failed(
        error_type="ValueError",
        message="what",
        traceback=["a", "\x1b[31mb"],
        consequence=True,
        interrupted=True,
        at=1.5,
        value={"num_batches": 2},
    ),
    Shown(run_id="r-1", worker=1, seq=2, entries=[["stream", "stdout", "hi\n"], ["clear", True]]),
    Whereabouts(
        worker=0,
        run_id="r-1",
        epoch=3,
        call="barrier()",
        group="default 2",
        number=5,
        seconds=0.25,
        line=4,
        code="dist.barrier()",
    ),
    Regrouped(worker=0, run_id="r-1", epoch=4, world_size=1, num_steps=7, seconds=0.25),
    Measured(
        worker=0, run_id="r-1", seq=1, at=1.5, steps=3, samples=96, loss=None, seconds={"computing": 0.5}
    ),
    PROFILING,
    RunCell(run_id="r-4", epoch=3, source="", execution_count=0, strategy=SPEC, profile=PROFILING),
]


def message_classes() -> dict[str, type]:
    return {
        name: value
        for name, value in vars(messages).items()
        if isinstance(value, type) and value.__module__ == messages.__name__
    }


def has_default(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def described(cls: type) -> str:
    return " ".join(f"{field.name}{'=' * has_default(field)}" for field in dataclasses.fields(cls))


# ------------------------------------------------------------------------------------------ messages


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf"), 0.5, None])
def test_numbers_that_json_does_not_have_arrive(loss: float | None) -> None:
    sent = messages.Measured(worker=0, run_id="a", seq=1, at=0.0, steps=1, samples=1, loss=loss)
    arrived = codec.decode(json.loads(json.dumps(codec.encode(sent), allow_nan=False)))
    assert repr(arrived) == repr(sent)


def test_the_wire_is_the_one_written_here() -> None:
    assert {name: described(cls) for name, cls in message_classes().items()} == WIRE
    assert messages.PROTOCOL_VERSION == VERSION


@pytest.mark.parametrize("cls", message_classes().values(), ids=message_classes())
def test_a_message_is_frozen_and_built_by_keyword(cls: type) -> None:
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert all(field.kw_only for field in dataclasses.fields(cls))


def test_every_message_has_an_example_here() -> None:
    assert {type(message).__name__ for message in EXAMPLES} == set(WIRE)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_json(message: Any) -> None:
    sent = json.dumps(codec.encode(message))

    received = codec.decode(json.loads(sent))

    assert type(received) is type(message)
    assert received == message


def test_the_kind_is_the_name_of_the_class() -> None:
    assert codec.encode(ReceiveVariables(path="a")) == {"kind": "ReceiveVariables", "path": "a"}
    assert codec.encode(EXAMPLES[5])["strategy"]["kind"] == "StrategySpec"


@pytest.mark.parametrize("data", [{"kind": "Explode"}, {"path": "a"}, {"kind": None}, {"kind": "Any"}])
def test_an_unknown_kind_is_a_value_error(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="another protocol version"):
        codec.decode(data)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"kind": "ReceiveVariables"}, "path"),
        ({"kind": "ReceiveVariables", "path": "a", "speed": 3}, "speed"),
        ({"kind": "Complete", "code": "x"}, "cursor"),
    ],
)
def test_wrong_fields_are_a_value_error_that_names_the_field(data: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"{data['kind']} does not fit protocol version {VERSION}.*{field}"):
        codec.decode(data)


def test_decoding_leaves_its_input_as_it_is() -> None:
    data = codec.encode(EXAMPLES[5])
    before = json.dumps(data)
    codec.decode(data)
    assert json.dumps(data) == before


# ----------------------------------------------------------------------------------------- variables


def there_and_back(tmp_path: Path, **variables: Any) -> dict[str, Any]:
    path = str(tmp_path / "variables")
    size = codec.write_variables(path, variables)
    assert size == os.path.getsize(path)
    return codec.read_variables(path)


def test_plain_and_nested_values_come_back_equal(tmp_path: Path) -> None:
    given = {"a": 1, "b": [{"c": (1.5, None, "ä")}, {2, 3}], "d": b"\0\xff"}
    assert there_and_back(tmp_path, **given) == given


def test_arrays_and_tensors_come_back_equal_in_nested_values_too(tmp_path: Path) -> None:
    array = np.arange(300_000, dtype=np.float32).reshape(300, 1000)
    turned = np.asfortranarray(array[:50])
    tensor = torch.arange(6.0).reshape(2, 3)

    back = there_and_back(
        tmp_path, one=array, many={"turned": turned, "again": [array, tensor]}, none=array[:0]
    )

    np.testing.assert_array_equal(back["one"], array)
    np.testing.assert_array_equal(back["many"]["turned"], turned)
    np.testing.assert_array_equal(back["many"]["again"][0], array)
    assert torch.equal(back["many"]["again"][1], tensor)
    assert back["none"].shape == (0, 1000)
    assert back["one"].dtype == np.float32


def test_what_comes_back_owns_its_memory(tmp_path: Path) -> None:
    array = np.zeros(100_000)
    back = there_and_back(tmp_path, array=array)["array"]
    (tmp_path / "variables").unlink()
    back[:] = 1.0
    assert back.flags.writeable
    assert back.sum() == 100_000
    assert array.sum() == 0


def test_a_large_array_is_written_once(tmp_path: Path) -> None:
    array = np.ones(1_000_000)
    size = codec.write_variables(str(tmp_path / "variables"), {"array": array})
    assert array.nbytes <= size < array.nbytes + 10_000


def test_functions_and_classes_of_a_notebook_travel_by_value(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    source = """
offset = 40
def add(x): return x + offset
class Adder:
    step = 2
    def __call__(self, x): return add(x) + self.step
adder = Adder()
"""
    exec(source, namespace)
    back = there_and_back(tmp_path, add=namespace["add"], Adder=namespace["Adder"], adder=namespace["adder"])
    namespace.clear()
    assert back["add"](2) == 42
    assert back["Adder"]()(0) == 42
    assert back["adder"](0) == 42


def test_only_this_user_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "variables"
    previous = os.umask(0)
    try:
        codec.write_variables(str(path), {"secret": 1})
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "variables"
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        codec.write_variables(str(path), {"a": 1})
    assert path.read_text() == "precious"


def test_what_cannot_be_pickled_names_the_variable_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "variables"
    with pytest.raises(TypeError, match=r"'guard' \(lock\) cannot be sent"):
        codec.write_variables(str(path), {"fine": 1, "guard": threading.Lock()})
    assert not path.exists()
