"""Configurations as files and variables make them: values, what is said of wrong ones, and who wins."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from openclaw_nb.config.load import load
from openclaw_nb.config.schema import KEYS, SECTIONS, WORKER_KEYS, keys_in, variable_names
from openclaw_nb.config.settings import Configuration
from openclaw_nb.config.template import reference, template, write_template
from openclaw_nb.config.unbuilt import UNBUILT_KEYS
from openclaw_nb.core.errors import ConfigurationError, UsageError

FIRST = """\
master:
  host: "192.168.1.100"
  port: 50051
  log_level: "INFO"
workers:
  - device_id: "GPU-0"
    ip: "192.168.1.101"
    capabilities: ["fp16", "nccl"]
  - device_id: "GPU-1"
    ip: "192.168.1.102"
    capabilities: ["fp16", "cuda11"]
strategy:
  name: "hybrid_parallel"
  data_parallel_degree: 2
  model_parallel_degree: 1
checkpoint:
  dir: "./checkpoints"
  interval: 300
"""
SECOND = """\
parallel:
  enabled: true
  backend: "mpi" # or mpi, thread, cuda
  workers: 4
  strategy: "data"
  communication: "nccl"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str | bytes, name: str = "a.yaml", **variables: str) -> Configuration:
    Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
    return load(name, variables)


def problems(text: str | bytes, **variables: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        read(text, **variables)
    return caught.value.problems


def values(found: Configuration) -> dict[str, Any]:
    return {path: setting.value for path, setting in found.settings.items()}


# --------------------------------------------------------------------------------------- what is accepted

FIRST_VALUES = {
    "master.host": "192.168.1.100",
    "master.port": 50051,
    "master.log_level": "INFO",
    "strategy.name": "hybrid_parallel",
    "strategy.data_parallel_degree": 2,
    "strategy.model_parallel_degree": 1,
    "checkpoint.dir": "./checkpoints",
    "checkpoint.interval": 300.0,
}
SECOND_VALUES = {
    "parallel.enabled": True,
    "parallel.backend": "mpi",
    "parallel.workers": 4,
    "parallel.strategy": "data_parallel",
    "parallel.communication": "nccl",
}


def test_the_first_document() -> None:
    found = read(FIRST)
    assert values(found) == FIRST_VALUES
    assert [(w.device_id, w.ip, w.capabilities) for w in found.workers] == [
        ("GPU-0", "192.168.1.101", ("fp16", "nccl")),
        ("GPU-1", "192.168.1.102", ("fp16", "cuda11")),
    ]
    assert found.where("checkpoint.interval") == "a.yaml, line 18"


def test_the_second_document() -> None:
    assert values(read(SECOND)) == SECOND_VALUES


def test_both_documents_in_one_file_and_in_two() -> None:
    Path("first.yaml").write_text(FIRST)
    Path("second.yaml").write_text(SECOND)
    both = FIRST_VALUES | SECOND_VALUES
    assert values(read(FIRST + SECOND)) == both
    found = load(["first.yaml", "second.yaml"], {})
    assert values(found) == both
    assert (found.where("master.host"), found.where("parallel.workers")) == (
        "first.yaml, line 2",
        "second.yaml, line 4",
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("strategy: data", "data_parallel"),
        ("strategy: Model", "model_parallel"),
        ("strategy: {name: hybrid}", "hybrid_parallel"),
        ("parallel: {strategy: pipeline}", "pipeline"),
        ("strategy: data\nparallel: {strategy: data_parallel}", "data_parallel"),
    ],
)
def test_a_strategy_is_a_word_or_a_block(text: str, name: str) -> None:
    strategy = read(text).strategy
    assert strategy is not None
    assert strategy.value == name


def test_keys_beside_a_word() -> None:
    found = read('strategy: "data_parallel"\ndevices: ["GPU-0", "gpu-1"]\nsync_frequency: 10\n')
    assert found.given("strategy.devices") == ("GPU-0", "GPU-1")
    assert found.given("strategy.sync_frequency") == 10
    assert found.place("strategy.devices") == "a.yaml, line 2, devices"


def test_sizes_and_lists_in_either_form() -> None:
    found = read("strategy: {name: data, devices: 'GPU-0, GPU-1'}\nparallel: {fusion_buffer_size: 1.5MB}")
    assert found.given("parallel.fusion_buffer_size") == 1572864
    assert found.given("strategy.devices") == ("GPU-0", "GPU-1")


def test_defaults_hold_with_a_file_only() -> None:
    assert load(None, {}).value("parallel.timeout") is None
    assert load(None, {"OPENCLAW_WORKERS": "2"}).value("parallel.timeout") is None
    assert not load(None, {"HOME": "/", "OPENCLAW_OVERSUBSCRIBE": "1", "OPENCLAW_CLUSTER": "0a"})
    found = read("")
    assert found.value("parallel.timeout") == 30.0
    assert found.value("parallel.gpu_memory_fraction") == 0.7
    assert found.where("parallel.timeout") == "default"


# ------------------------------------------------------------------------------------------- what is wrong

WRONG = {
    "master:\n  prt: 1": "a.yaml, line 2, master.prt: there is no such key in master. Did you mean 'port'? "
    "Allowed: host, port, log_level, metrics_port.",
    "stratgy: data": "a.yaml, line 1, stratgy: there is no such key in a configuration. Did you mean 'strategy'? "
    "Allowed: master, workers, strategy, checkpoint, parallel, devices, sync_frequency, fallback, network_interface.",
    "timeout: 3": "a.yaml, line 1, timeout: there is no such key in a configuration. Did you mean 'parallel.timeout'? "
    "Allowed: master, workers, strategy, checkpoint, parallel, devices, sync_frequency, fallback, network_interface.",
    "parallel:\n  backend: mpy": "a.yaml, line 2, parallel.backend: 'mpy' is none of the allowed words. "
    "Did you mean 'mpi'? Allowed: local, thread, cuda, mpi, ssh, slurm.",
    "parallel:\n  workers: two": "a.yaml, line 2, parallel.workers: 'two' is not a whole number from 1 to 1000000.",
    "parallel:\n  workers: true": "a.yaml, line 2, parallel.workers: true (a boolean) is not a whole number from 1 "
    "to 1000000.",
    "parallel:\n  workers:": "a.yaml, line 2, parallel.workers: nothing (null) is not a whole number from 1 to "
    "1000000.",
    "parallel:\n\n  timeout: .nan": "a.yaml, line 3, parallel.timeout: nan is not a number of seconds above 0 and "
    "up to 2592000.",
    "parallel: {gpu_memory_fraction: 1.5}": "a.yaml, line 1, parallel.gpu_memory_fraction: 1.5 is not a number above "
    "0 and up to 1.",
    "parallel: {hybrid: 'yes'}": "a.yaml, line 1, parallel.hybrid: 'yes' is neither true nor false. Allowed: true, "
    "false.",
    "parallel: {fusion_buffer_size: 5}": "a.yaml, line 1, parallel.fusion_buffer_size: 5 is not a size from 1024 "
    "bytes to 1 TiB, such as 25MB.",
    "parallel: mpi": "a.yaml, line 1, parallel: 'mpi' is not a block of keys: "
    f"{', '.join(keys_in('parallel'))}.",
    "workers: 4": "a.yaml, line 1, workers: here stands a list of devices; how many workers there are is "
    "parallel.workers: 4.",
    "workers:\n- {ip: 127.0.0.1}": "a.yaml, line 2, workers[0]: device_id is missing, such as device_id: GPU-0.",
    "workers:\n- {device_id: GPU0}": "a.yaml, line 2, workers[0].device_id: 'GPU0' is not a device such as GPU-0 or "
    "CPU-1.",
    "workers:\n- device_id: GPU-0\n  capabilites: [fp16]": "a.yaml, line 3, workers[0].capabilites: there is no such "
    "key in workers[0]. Did you mean 'capabilities'? Allowed: device_id, ip, capabilities.",
    "strategy: dta": "a.yaml, line 1, strategy: 'dta' is none of the allowed words. Did you mean 'data'? Allowed: "
    "data_parallel, sharded, tensor_parallel, model_parallel, pipeline, hybrid_parallel, data, hybrid, model, tensor.",
    "strategy: {name: data, microbatches: 3}": "a.yaml, line 1, strategy.microbatches: data_parallel does not take "
    "it. Taken by: pipeline.",
    "strategy: {microbatches: 3}": "a.yaml, line 1, strategy.microbatches: name: is missing in strategy, such as "
    "name: data_parallel.",
    "- a\n- b": "a.yaml, line 1: a configuration is a block of keys (master, workers, strategy, checkpoint, parallel, "
    "devices, sync_frequency, fallback, network_interface), not a list.",
    "parallel:\n  workers: 2\n  workers: 3": "a.yaml, line 3: the key 'workers' stands here twice, first at a.yaml, "
    "line 2.",
    "parallel: [": "a.yaml, line 1: this is not YAML: while parsing a flow node expected the node content, but found "
    "'<stream end>'.",
    "a: !!python/object/apply:os.system ['true']": "a.yaml, line 1: the tag "
    "'tag:yaml.org,2002:python/object/apply:os.system' is not allowed: plain values only.",
    "1: 2": "a.yaml, line 1: a key is a word, not 1.",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_said_with_file_line_key_and_what_is_allowed(text: str) -> None:
    assert problems(text) == [WRONG[text]]


def test_all_problems_are_told_at_once() -> None:
    assert len(problems("master: {prt: 1}\nparallel: {workers: 0, timeout: x}\nstratgy: data")) == 4


def test_files_that_cannot_be_read(folder: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^none\.yaml: there is no such file\. `openclaw init` writes one"
    ):
        load("none.yaml", {})
    with pytest.raises(ConfigurationError, match=r"cannot be read: .*directory"):
        load(folder, {})
    assert problems(b"parallel:\n  backend: \xff") == ["a.yaml, line 2: the file is not UTF-8 text."]
    assert problems(b"a: \x00") == [
        "a.yaml: this is not YAML: unacceptable character #x0000: special characters are not allowed."
    ]


@pytest.mark.parametrize("text", ['!!int ""', '!!int "-"', '!!float ""', '!!bool "maybe"'])
def test_a_tag_that_its_text_does_not_fit(text: str) -> None:
    (problem,) = problems(f"parallel: {{workers: {text}}}")
    assert problem.startswith("a.yaml, line 1: ")
    assert "cannot be read as" in problem


def test_what_would_fill_the_memory_is_refused() -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(8)
    )
    assert "too much, or nested too deeply" in problems(bomb)[0]
    assert "too deeply" in problems("[" * 5000)[0]
    assert "too much, or nested too deeply" in problems("a: &a [*a]")[0]


# ------------------------------------------------------------------------------------- what contradicts itself

CONTRADICTIONS = {
    "parallel: {hybrid: false, omp_threads: 4}": "parallel.omp_threads: 4 threads a worker contradict hybrid: false",
    "parallel: {backend: local, communication: mpi}": "parallel.communication: mpi contradicts backend: local",
    "parallel: {backend: thread, communication: nccl}": "parallel.communication: nccl contradicts backend: thread",
    "strategy: pipeline\nparallel: {strategy: data}": "parallel.strategy: 'data_parallel' contradicts 'pipeline' of "
    "strategy (a.yaml, line 1)",
    "strategy: {name: hybrid, tensor_parallel_degree: 2}\nparallel: {strategy: data}": "parallel.strategy: "
    "'data_parallel' contradicts 'hybrid_parallel'",
    "strategy: {name: data, sync_frequency: 2}\nparallel: {sync_interval: 3}": "strategy.sync_frequency: 2 contradicts "
    "3 of parallel.sync_interval",
    "strategy: data\nsync_frequency: 2\nparallel: {sync_interval: 3}": "contradicts 3 of parallel.sync_interval",
    "strategy: {name: data, sync_frequency: 2}\nsync_frequency: 3": "a.yaml, line 2, sync_frequency: 3 contradicts 2 "
    "of strategy.sync_frequency (a.yaml, line 1). Leave one of them out.",
    "workers: [{device_id: CPU-0}, {device_id: CPU-1}]\nparallel: {workers: 1}": "parallel.workers: 1 contradicts the "
    "2 entries of workers",
    "workers: [{device_id: CPU-0}, {device_id: CPU-0}]": "workers[1].device_id: CPU-0 stands there twice",
    "workers: [{device_id: CPU-0}]\nstrategy: data\ndevices: [CPU-1]": "devices: CPU-1 is none of the devices of "
    "workers: CPU-0",
    "strategy: {name: model, stages: [[a], [b]], model_layers: [a, b]}": "leave model_layers and device_mapping out",
}


@pytest.mark.parametrize("text", CONTRADICTIONS)
def test_what_contradicts_itself_is_refused(text: str) -> None:
    (problem,) = problems(text)
    assert CONTRADICTIONS[text] in problem
    assert problem.startswith("a.yaml, line ")


def test_two_files_that_contradict_each_other() -> None:
    Path("one.yaml").write_text("parallel: {workers: 2}")
    Path("two.yaml").write_text("parallel:\n  workers: 3")
    with pytest.raises(ConfigurationError) as caught:
        load(["one.yaml", "two.yaml"], {})
    assert caught.value.problems == [
        "two.yaml, line 2, parallel.workers: 3 contradicts 2 of parallel.workers (one.yaml, line 1). Leave one of "
        "them out."
    ]


# ---------------------------------------------------------------------------------------------- variables


def test_variables_win_over_the_file() -> None:
    found = read(SECOND, OPENCLAW_PARALLEL_WORKERS="2", OPENCLAW_TIMEOUT="60", OPENCLAW_STRATEGY="pipeline")
    assert found.given("parallel.workers") == 2
    assert found.where("parallel.workers") == "OPENCLAW_PARALLEL_WORKERS"
    assert found.given("parallel.timeout") == 60.0


def test_two_variables_for_one_thing_that_agree() -> None:
    found = read("strategy: model", OPENCLAW_STRATEGY="data", OPENCLAW_PARALLEL_STRATEGY="data_parallel")
    assert found.given("strategy.name") == found.given("parallel.strategy") == "data_parallel"
    assert read("sync_frequency: 9", OPENCLAW_SYNC_INTERVAL="3").given("strategy.sync_frequency") is None


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"OPENCLAW_PARALLEL_WORKRES": "2"},
            "this variable overrides no key. Did you mean 'OPENCLAW_PARALLEL_WORKERS'?",
        ),
        ({"OPENCLAW_WORKERS": "two"}, "OPENCLAW_WORKERS, parallel.workers: 'two' is not a whole number"),
        (
            {"OPENCLAW_WORKERS": "2", "OPENCLAW_PARALLEL_WORKERS": "3"},
            "OPENCLAW_WORKERS, parallel.workers: 2 contradicts 3",
        ),
        ({"OPENCLAW_LOG_LEVEL": "[["}, "OPENCLAW_LOG_LEVEL: '[[' cannot be read."),
        (
            {"OPENCLAW_STRATEGY": "data", "OPENCLAW_PARALLEL_STRATEGY": "pipeline"},
            "OPENCLAW_PARALLEL_STRATEGY, parallel.strategy: 'pipeline' contradicts 'data_parallel' of strategy "
            "(OPENCLAW_STRATEGY)",
        ),
        (
            {"OPENCLAW_SYNC_FREQUENCY": "2", "OPENCLAW_SYNC_INTERVAL": "3"},
            "OPENCLAW_SYNC_FREQUENCY, strategy.sync_frequency: 2 contradicts 3 of parallel.sync_interval "
            "(OPENCLAW_SYNC_INTERVAL)",
        ),
    ],
)
def test_wrong_variables(variables: dict[str, str], said: str) -> None:
    (problem,) = problems("parallel: {hybrid: true}", **variables)
    assert said in problem


def test_no_variable_stands_for_two_keys() -> None:
    names = [name for path in KEYS for name in variable_names(path)]
    assert len(names) == len(set(names))
    assert "OPENCLAW_NETWORK_INTERFACE" in names


# ----------------------------------------------------------------------------------- init and the reference


def test_what_init_writes_loads_unchanged_and_changes_nothing() -> None:
    path = write_template("mine.yaml")
    found = load(path, {})
    assert values(found) == {
        path: KEYS[path].default
        for path in ("parallel.enabled", "parallel.backend", "parallel.communication", "parallel.timeout")
    }
    with pytest.raises(UsageError, match=r"mine\.yaml is there already: .* --force"):
        write_template("mine.yaml")
    write_template("mine.yaml", overwrite=True)


def test_every_line_that_init_comments_out_loads_too() -> None:
    lines = []
    for line in template().splitlines():
        bare = line.replace("# ", "", 1) if line.lstrip().startswith("# ") else line
        is_key = bare.lstrip(" -").partition(":")[0] in {
            *SECTIONS,
            *WORKER_KEYS,
            *(p.rpartition(".")[2] for p in KEYS),
        }
        if is_key and "`" not in line:
            lines.append(bare)
    found = read("\n".join(lines))
    written = {path for path, key in KEYS.items() if key.example is not None}
    assert written <= set(found.settings)
    assert found.workers


def test_the_documentation_has_the_table_of_all_keys() -> None:
    text = (Path(__file__).parents[3] / "docs/configuration.md").read_text()
    assert reference() in text, (
        "docs/configuration.md: put the table of openclaw_nb.config.template.reference() in"
    )
    assert all(why in text for why in UNBUILT_KEYS.values())


def test_reading_a_configuration_imports_neither_torch_nor_ipyparallel() -> None:
    Path("a.yaml").write_text(FIRST)
    code = (
        "import sys\nfrom openclaw_nb.config.load import load\nfrom openclaw_nb.config.effects import effects_table\n"
        "repr(effects_table(load('a.yaml', {}), None))\n"
        "assert not {'torch', 'ipyparallel'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------------------------------- noise

JUNK = (
    *(
        None,
        True,
        -1,
        0,
        10**30,
        0.5,
        float("nan"),
        float("inf"),
        "",
        " ",
        "GPU-0",
        "x" * 200,
        "\U0001f600",
        "1MB",
    ),
    *(
        [],
        [[]],
        ["a"],
        [1],
        [None],
        {},
        {"a": 1},
        {"name": "data"},
        [{"device_id": "GPU-0"}],
        "1e999",
        "9" * 30 + "GB",
    ),
)


def test_no_value_of_any_key_ends_in_another_error() -> None:
    names = [*KEYS, *SECTIONS, "devices", *(f"workers.{name}" for name in WORKER_KEYS)]
    for path in names:
        section, _, name = path.rpartition(".")
        for junk in JUNK:
            block: Any = {section: {name: junk}} if section else {name: junk}
            if section == "workers":
                block = {"workers": [{"device_id": "CPU-0", name: junk}]}
            _loads_or_says_why(yaml.safe_dump(block, allow_unicode=True).encode())


def test_damaged_files_never_end_in_another_error() -> None:
    noise = random.Random(7)
    whole = (FIRST + SECOND).encode()
    pieces = [
        b": ",
        b"- ",
        b"\n  ",
        b"{",
        b"]",
        b"&a ",
        b"*a",
        b"!!int ",
        b"!!bool x",
        b"\xff",
        b"\x00",
        b"'",
        b"<<",
        b"0x",
        b"2026-99-99",
    ]
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(noise.randint(1, 6)):
            at = noise.randrange(len(data))
            data[at : at + noise.randint(0, 9)] = noise.choice([*pieces, bytes([noise.randrange(256)])])
        _loads_or_says_why(bytes(data))


def _loads_or_says_why(data: bytes) -> None:
    try:
        read(data)
    except ConfigurationError as error:
        problems = error.problems
    else:
        return
    assert all("a.yaml" in problem for problem in problems)
