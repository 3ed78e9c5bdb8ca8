from __future__ import annotations

import pytest

from openclaw_nb.core.errors import UnknownNameError, UsageError
from openclaw_nb.notebook import options, verbs
from openclaw_nb.notebook.targets import Place, resolve_targets
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.strategies import DataParallelStrategy


def parse(line: str) -> object:
    command, _, words = options.split_verb(line)
    assert command is not None
    return command.parse(words)


def cell(line: str) -> options.CellOptions:
    return options.parse_cell(options.split_line(line))


def test_every_verb_has_a_handler_and_no_handler_is_without_a_verb() -> None:
    assert set(options.VERBS) == set(verbs.HANDLERS)


def test_start() -> None:
    given = parse(
        "start -n 2 --spares 1 --devices CPU-0,CPU-1 --config a.yaml --config b.yaml --backend mpi "
        "--communication gloo --port 0 --name mine --lease 60 --oversubscribe"
    )
    assert vars(given) == {
        "workers": 2,
        "spares": 1,
        "devices": "CPU-0,CPU-1",
        "config": ["a.yaml", "b.yaml"],
        "backend": "mpi",
        "communication": "gloo",
        "port": 0,
        "name": "mine",
        "lease": 60,
        "oversubscribe": True,
        "help": False,
    }


@pytest.mark.parametrize("line", ["push -t 0 a b", "push a -t 0 b", "push a b --targets=0"])
def test_names_and_options_may_be_mixed(line: str) -> None:
    given = parse(line)
    assert given.names == ["a", "b"]
    assert given.targets == "0"


@pytest.mark.parametrize("line", ["", "  ", "--help", "-h", "help"])
def test_without_a_verb_help_on_all_verbs_is_asked_for(line: str) -> None:
    assert options.split_verb(line)[0] is None
    assert all(f"  {verb} " in options.overview() for verb in options.VERBS)


@pytest.mark.parametrize("verb", options.VERBS)
def test_help_names_every_option(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, _, words = options.split_verb(f"{verb} --help")
    assert command is not None
    assert options.asks_for_help(words)
    assert all(name in command.help() for a in command.arguments for name in a.names)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("strt", "Did you mean 'start'?"),
        ("start --worker 3", "Did you mean '--workers'?"),
        ("start --spare 3", "Did you mean '--spares'?"),
        ("recover of", "Did you mean 'off'?"),
        ("start --communication ncl", "Did you mean 'nccl'?"),
        ("pull a --reduce men", "Did you mean 'mean'?"),
    ],
)
def test_a_name_that_does_not_exist(line: str, said: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        parse(line)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("start -n two", "'two' is not a whole number of at least 1"),
        ("start -n 0", "'0' is not a whole number of at least 1"),
        ("start -n -1", "'-1' is not a whole number of at least 1"),
        ("start -n", "expected one argument"),
        ("start 2", "does not take '2'"),
        ("start --spares=-1", "'-1' is not a whole number, 0 or more"),
        ("resize 0", "'0' is not a whole number of at least 1"),
        ("resize", "required: workers"),
        ("add", "required: where"),
        ("recover on --every 0", "'0' is not a number of seconds above 0"),
        ("recover on --every inf", "'inf' is not a number of seconds above 0"),
        ("recover on --retries 0", "'0' is not a whole number of at least 1"),
        ("status now", "does not take 'now'"),
        ("push 'a", "cannot be read"),
    ],
)
def test_what_cannot_be_understood(line: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line)
    assert said in str(caught.value)


# ------------------------------------------------------------------------------------------------- the cell


def test_a_plain_cell() -> None:
    assert cell("") == options.CellOptions()
    assert cell("-t 0-1") == options.CellOptions(targets="0-1")


def test_a_strategy_cell() -> None:
    batches = "--sync-frequency 10 --mode parameter --fusion-buffer-size 1MB --split model --reduction sum"
    assert cell(f"-s data {batches} --model net --no-sync-batchnorm").strategy == StrategySpec(
        name="data_parallel",
        options={
            "sync_frequency": 10,
            "mode": "parameter",
            "accumulate": 1,
            "fusion_buffer_size": 2**20,
            "memory_pinning": True,
        },
        model="net",
        split="model",
        reduction="sum",
        sync_batchnorm=False,
    )
    frugal = cell("-s data --no-memory-pinning").strategy
    assert frugal is not None
    assert frugal.options["memory_pinning"] is False
    kept = cell("-s data --checkpoint 'my runs/a' --checkpoint-every 100,5m --keep 2").strategy
    assert kept is not None
    assert (
        kept.options | {"checkpoint": "my runs/a", "checkpoint_every": "100,300s", "keep": 2} == kept.options
    )
    saving = cell(
        "-s data --fp16-layers conv,head.0 --activation-checkpointing --memory-pooling --gpu-memory-fraction 0.7"
    ).strategy
    assert saving is not None
    told = {
        "precision": {"name": "fp16", "layers": ["conv", "head.0"], "scaler": "dynamic"},
        "activation_checkpointing": True,
        "memory_pooling": True,
        "gpu_memory_fraction": 0.7,
    }
    assert saving.options | told == saving.options
    named = cell("-s data --precision bf16 --activation-checkpointing body.0,body.1").strategy
    assert (
        named == DataParallelStrategy(precision="bf16", activation_checkpointing=["body.0", "body.1"]).spec()
    )
    for name in ("sharded", "tensor_parallel", "hybrid_parallel", "model_parallel", "pipeline"):
        any_word = cell(f"-s {name} --precision bf16 --activation-checkpointing body").strategy
        assert any_word is not None
        assert any_word.options["precision"]["name"] == "bf16"
        assert any_word.options["activation_checkpointing"] == ["body"]
    assert [cell(line).background for line in ("-t 0", "--background", "--background run")] == [
        None,
        "",
        "run",
    ]
    assert cell("-s data -t 0,1").targets == "0,1"
    assert cell("--strategy data_parallel").strategy == DataParallelStrategy().spec()


def test_cells_of_a_model_in_stages() -> None:
    def asked(line: str) -> object:
        strategy = cell(line).strategy
        assert strategy is not None
        return strategy.name, strategy.options

    assert asked("-s model") == ("model_parallel", {})
    assert asked("-s model --stages embed,head") == ("model_parallel", {"model_layers": ["embed", "head"]})
    assert asked("-s pipeline --stages 'a, b/c' --microbatches 4 --schedule gpipe") == (
        "pipeline",
        {"schedule": "gpipe", "microbatches": 4, "stages": [["a", "b"], ["c"]]},
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-s model --microbatches 4", "--microbatches is no option of model_parallel, but of pipeline"),
        ("-s pipeline --sync-frequency 2", "--sync-frequency is no option of pipeline, but of data_parallel"),
        ("-s pipeline --split model", "--split is no option of pipeline, but of data_parallel"),
        ("-s data --stages a/b", "--stages is no option of data_parallel, but of model_parallel, pipeline"),
        ("-s pipeline --stages a//b", "--stages takes names of layers"),
        ("-s pipeline --schedule 1f2b", "There is no --schedule value '1f2b'"),
        ("-s data_paralel", "There is no strategy 'data_paralel'. Did you mean 'data_parallel'?"),
        ("--strateg data", "Did you mean '--strategy'?"),
        ("-s data --split lodaer", "Did you mean 'loader'?"),
        ("-s data --model a-b", "--model takes names of variables"),
        ("-s data --mode gradients", "Did you mean 'gradient'?"),
        ("-s data --accumulate -1", "'-1' is not a whole number of at least 1"),
        ("-s data --fusion-buffer-size much", "fusion_buffer_size is a size such as '25MB'"),
        ("-s data --sync-frequency 0", "'0' is not a whole number of at least 1"),
        ("--sync-frequency 10", "--sync-frequency needs a strategy"),
        ("--checkpoint run", "--checkpoint needs a strategy"),
        ("-s data --keep 2", "--checkpoint-every, --keep and --resume need --checkpoint DIR"),
        ("-s data --checkpoint-every 5", "--checkpoint-every, --keep and --resume need --checkpoint DIR"),
        ("-s data --checkpoint run --keep 0", "'0' is not a whole number of at least 1"),
        (
            "-s data --checkpoint run --checkpoint-every 0",
            "checkpoint_every is a number of steps of at least 1",
        ),
        ("--background a-b", "--background takes a name for the handle, not 'a-b'"),
        ("--no-memory-pinning", "--no-memory-pinning needs a strategy"),
        ("--precision bf16", "--precision needs a strategy"),
        ("-s data --precision fp17", "Did you mean 'fp16'?"),
        ("-s data --precision fp32 --fp16-layers conv", "Layers in fp32 are what they are"),
        ("-s data --gpu-memory-fraction 1.5", "'1.5' is not a part above 0 and up to 1"),
        ("--no-sync-batchnorm", "--no-sync-batchnorm needs a strategy"),
        ("print(1)", "does not take 'print(1)'"),
    ],
)
def test_a_cell_that_cannot_be_understood(line: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        cell(line)
    assert said in str(caught.value)


# ------------------------------------------------------------------------------------------------- targets

PLACES = {rank: Place(f"worker-{rank}", f"CPU-{rank % 2}") for rank in range(4)}


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0,1", [0, 1]),
        ("1-3", [1, 2, 3]),
        ("worker-2, 0", [0, 2]),
        ("cpu-1", [1, 3]),
        ("CPU-0,2,2", [0, 2]),
    ],
)
def test_targets(text: str, ranks: list[int]) -> None:
    assert resolve_targets(text, PLACES) == ranks


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4", "There is no rank '4'. Allowed: 0, 1, 2, 3."),
        ("2-5", "There is no rank '4'"),
        ("worker-9", "'worker-9'. Did you mean"),
        ("GPU-0", "'GPU-0'"),
        ("2-1", "write 1-2"),
        (",", "names nothing"),
    ],
)
def test_targets_that_do_not_exist(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_targets(text, PLACES)
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["0", "0.09", "61", "-1", "nan", "inf", "often"])
def test_the_panels_interval_has_limits(text: str) -> None:
    with pytest.raises(UsageError, match=r"not a number of seconds from 0\.1 to 60"):
        options.VERBS["panel"].parse(["--every", text])
    assert options.VERBS["panel"].parse(["--every", "0.25"]).every == 0.25
    assert options.VERBS["panel"].parse([]).every == 0.5


@pytest.mark.parametrize("steps", ["0", "-3", "two", "1.5"])
def test_a_trial_has_at_least_one_step(steps: str) -> None:
    with pytest.raises(UsageError, match=f"'{steps}' is not a whole number of at least 1"):
        options.VERBS["verify"].parse([f"--steps={steps}"])
    with pytest.raises(UsageError, match=f"'{steps}' is not a whole number of at least 1"):
        options.parse_cell(["-s", "data_parallel", f"--verify={steps}"])


def test_a_trial_needs_a_strategy_cell() -> None:
    with pytest.raises(UsageError, match=r"No cell has run under a strategy yet\. Run one first"):
        verbs._cell_to_verify({}, None)
    with pytest.raises(UsageError, match="--verify needs a strategy"):
        options.parse_cell(["--verify", "3"])


def test_what_a_running_cell_makes_of_a_change() -> None:
    assert verbs.changes_in_run(["worker-2"], ["worker-0"], is_elastic=True) == [
        "worker-2 comes in at the next head of a loop.",
        "worker-0 is gone; the cell goes on without it.",
    ]
    (line,) = verbs.changes_in_run(["worker-2"], [], is_elastic=False)
    assert "when the cell has ended" in line
