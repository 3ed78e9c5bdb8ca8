"""What may be written after ``%openclaw`` and ``%%openclaw_parallel``, and what it means.

    words of a line ──> Command (its arguments, declared once) ──> Parsed options, or a UsageError
                                   └──> help text, and what Tab completes

Knows the grammar; does not know a cluster, nor what verbs do. Nothing is printed and nothing exits.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from openclaw_nb.cluster.launch import BACKENDS, COMMUNICATIONS
from openclaw_nb.config.cells import CellDefaults
from openclaw_nb.config.template import FILE_NAME
from openclaw_nb.core.errors import UsageError, unknown_name
from openclaw_nb.notebook.strategy_options import describe, refuse_others
from openclaw_nb.plan.chaos import FAULTS
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.strategies import STRATEGIES, canonical_strategy
from openclaw_nb.strategies.data_parallel import MODES
from openclaw_nb.strategies.pipeline import SCHEDULES
from openclaw_nb.strategies.precision import PRECISIONS


@dataclass(frozen=True)
class Argument:
    """One option or positional argument of a command.

    Attributes
    ----------
    names : tuple of str
        ``("-n", "--workers")``, or ``("names",)`` for a positional one.
    help : str
        One line.
    values : str or tuple of str
        The kind of thing that Tab completes (``"device"``, ``"target"``, ``"notebook variable"``, ...), or
        all values that are allowed.
    settings : mapping
        What argparse is told beside.
    """

    names: tuple[str, ...]
    help: str
    values: str | tuple[str, ...] = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_option(self) -> bool:
        """Whether it begins with a dash."""
        return self.names[0].startswith("-")

    @property
    def takes_value(self) -> bool:
        """Whether a value follows."""
        return self.settings.get("action") != "store_true"


@dataclass(frozen=True)
class Command:
    """A verb of ``%openclaw``, or the cell magic: what it is called and what it takes."""

    prog: str
    summary: str
    arguments: tuple[Argument, ...] = ()

    @property
    def option_names(self) -> list[str]:
        """Every option that may be written."""
        return [name for a in self.arguments if a.is_option for name in a.names] + ["--help"]

    def help(self) -> str:
        """Return the help text."""
        return _parser(self).format_help()

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Turn words into options.

        Raises
        ------
        UsageError
            Saying what is wrong with which of them.
        """
        options, rest = _parser(self).parse_known_intermixed_args(list(words))
        for word in rest:
            if word.startswith("-"):
                raise unknown_name(f"{self.prog} option", word.partition("=")[0], self.option_names)
            raise UsageError(f"{self.prog} does not take {word!r}. See {self.prog} --help.")
        for argument in self.arguments:
            self._check_choice(argument, getattr(options, _attribute(argument)))
        return options

    def _check_choice(self, argument: Argument, value: Any) -> None:
        if isinstance(argument.values, tuple) and value is not None and value not in argument.values:
            raise unknown_name(f"{argument.names[-1]} value", value, argument.values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}. See {self.prog} --help.")


_parsers: dict[str, argparse.ArgumentParser] = {}


def _parser(command: Command) -> argparse.ArgumentParser:
    """Return the command's parser; making one takes a millisecond, which each cell would wait for."""
    if command.prog not in _parsers:
        _parsers[command.prog] = _new_parser(command)
    return _parsers[command.prog]


def _new_parser(command: Command) -> argparse.ArgumentParser:
    parser = _Parser(prog=command.prog, description=command.summary, add_help=False, allow_abbrev=False)
    for argument in command.arguments:
        settings = dict(argument.settings)
        if isinstance(argument.values, tuple) and argument.is_option:
            settings.setdefault("metavar", "|".join(argument.values))
        parser.add_argument(*argument.names, help=argument.help, **settings)
    parser.add_argument("--help", action="store_true", help="show this")
    return parser


def _attribute(argument: Argument) -> str:
    chosen = argument.settings.get("dest") or next(
        (name for name in argument.names if name.startswith("--")), argument.names[0]
    )
    return str(chosen).lstrip("-").replace("-", "_")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a whole number from 0 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def _part(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a part above 0 and up to 1")


def _interval(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.1 <= float(text) <= 60:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 60")


def split_line(line: str) -> list[str]:
    """Split a magic's line into words, as a shell does.

    Raises
    ------
    UsageError
        If a quotation is not closed.
    """
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line.strip()!r} cannot be read: {error}.") from None


# ------------------------------------------------------------------------------------------------- the verbs

_TARGETS = Argument(
    ("-t", "--targets"),
    "ranks (0,1 or 0-2), worker ids (worker-1) or devices (CPU-1); all by default",
    "target",
    {"metavar": "WHERE"},
)
_LEASE = Argument(
    ("--lease",),
    "how long the workers wait for %%openclaw attach when the kernel ends without stop or detach (0)",
    settings={"type": _count, "metavar": "SECONDS"},
)
_FLAG: Mapping[str, Any] = {"action": "store_true"}
_NAME: Mapping[str, Any] = {"metavar": "NAME"}

VERBS: dict[str, Command] = {
    verb: Command(f"%openclaw {verb}", summary, arguments)
    for verb, summary, arguments in (
        (
            "start",
            "Start a cluster: one worker a device, joined in a process group.",
            (
                Argument(
                    ("-n", "--workers"),
                    "how many workers; by default one a GPU, or as many as cores and memory allow",
                    "count",
                    {"type": _count, "metavar": "N"},
                ),
                Argument(
                    ("--spares",),
                    "how many more workers wait, to take the place of one that dies in a cell (0)",
                    settings={"type": _whole, "metavar": "S", "default": 0},
                ),
                Argument(
                    ("--devices",), "ids such as GPU-0,GPU-1 or CPU-0, or auto", "device", {"metavar": "IDS"}
                ),
                Argument(
                    ("--config",),
                    "a configuration file; what else is said here wins over it. May be given several times",
                    "file",
                    {"metavar": "FILE", "action": "append"},
                ),
                Argument(
                    ("--backend",),
                    "how workers are started: a process a device, core or GPU, or all by one mpiexec (local)",
                    tuple(BACKENDS),
                ),
                Argument(
                    ("--communication",),
                    "what the workers communicate with (auto); mpi needs --backend mpi",
                    COMMUNICATIONS,
                ),
                Argument(
                    ("--port",),
                    "where workers join that other processes start; 0 for a free port (50051, or a free one)",
                    settings={"type": _whole, "metavar": "P"},
                ),
                Argument(("--name",), "the cluster's name", settings={"metavar": "NAME"}),
                _LEASE,
                Argument(
                    ("--oversubscribe",), "allow more workers than devices, or little memory", "", _FLAG
                ),
            ),
        ),
        (
            "config",
            "Show a configuration key by key: value, where it comes from, what it sets.",
            (
                Argument(
                    ("files",),
                    "files to look at; the running cluster's configuration when not given",
                    "file",
                    {"nargs": "*"},
                ),
                Argument(
                    ("--effective",),
                    "show what it has set in the running cluster, worker by worker",
                    "",
                    _FLAG,
                ),
            ),
        ),
        (
            "init",
            "Write a configuration file with every key explained.",
            (
                Argument(
                    ("path",), "where (openclaw_config.yaml)", "file", {"nargs": "?", "default": FILE_NAME}
                ),
                Argument(("--force",), "replace a file that is there", "", _FLAG),
            ),
        ),
        ("status", "Show the workers, their devices and what runs on them.", ()),
        ("devices", "Show what this machine can run workers on.", ()),
        (
            "panel",
            "Show the live panel.",
            (
                Argument(
                    ("--every",),
                    "how far apart its pictures are while a cell runs, from 0.1 to 60 (0.5)",
                    settings={"type": _interval, "metavar": "SECONDS", "default": 0.5},
                ),
            ),
        ),
        (
            "verify",
            "Try a cell's first steps on one device and under its strategy, and compare; nothing is changed.",
            (
                Argument(("-s", "--strategy"), "another strategy than the cell's", "strategy", _NAME),
                Argument(
                    ("--steps",),
                    "how many steps (5)",
                    settings={"type": _count, "metavar": "K", "default": 5},
                ),
                Argument(
                    ("--cell",),
                    "the number of the cell; the last strategy cell when not given",
                    settings={"type": _count, "metavar": "N"},
                ),
            ),
        ),
        (
            "plan",
            "Predict a cell's step time, memory and efficiency under each strategy, from a short profile of it.",
            (
                Argument(
                    ("--steps",),
                    "how many steps are timed each time (8)",
                    settings={"type": _count, "metavar": "K", "default": 8},
                ),
                Argument(
                    ("--cell",),
                    "the number of the cell; the last strategy cell when not given",
                    settings={"type": _count, "metavar": "N"},
                ),
                Argument(
                    ("--memory",),
                    "plan for workers that may use so much, such as 8GB (what they have)",
                    settings={"metavar": "SIZE"},
                ),
                Argument(("--last",), "show the last plan again, with what was measured since", "", _FLAG),
            ),
        ),
        ("plot", "Show the figures of the last strategy cell, and return them.", ()),
        (
            "metrics",
            "Serve device status, throughput and synchronisation to Prometheus, and write a dashboard for Grafana.",
            (
                Argument(
                    ("--port",),
                    "where; 0 takes one that is free (9464, or one that is free)",
                    settings={"type": _port, "metavar": "P"},
                ),
                Argument(
                    ("--host",),
                    "the address to listen on (127.0.0.1); any other than loopback asks for a token",
                    settings={"metavar": "H"},
                ),
                Argument(
                    ("--dashboard",), "write Grafana's dashboard into a file", "file", {"metavar": "FILE"}
                ),
                Argument(("--scrape-config",), "show what Prometheus is to be told", "", _FLAG),
                Argument(("--off",), "serve no more", "", _FLAG),
            ),
        ),
        (
            "doctor",
            "Check this host, its network and the cluster, and say what to do about each trouble.",
            (
                Argument(
                    ("-n", "--workers"),
                    "for how many workers; those of the configuration when not given",
                    "count",
                    {"type": _count, "metavar": "N"},
                ),
                Argument(
                    ("--config",),
                    "a configuration file to check the host for",
                    "file",
                    {"metavar": "FILE", "action": "append"},
                ),
                Argument(
                    ("--reach",),
                    "try a connection, as telnet does: 192.168.1.100:50051",
                    settings={"metavar": "HOST:PORT"},
                ),
                Argument(
                    ("--no-start",),
                    "start no workers for an array sum where no cluster runs",
                    "",
                    _FLAG,
                ),
            ),
        ),
        (
            "auto",
            "Let plain cells run on the workers, without a magic on their first line.",
            (Argument(("switch",), "on or off", ("on", "off")),),
        ),
        (
            "stop",
            "End the cluster: every process it started.",
            (
                Argument(
                    ("name",),
                    "another cluster, which nobody owns",
                    "cluster",
                    {"nargs": "?", "default": None},
                ),
            ),
        ),
        (
            "attach",
            "Take up a cluster that runs without an owner, with its variables.",
            (
                Argument(
                    ("name",),
                    "which; not needed where there is one",
                    "cluster",
                    {"nargs": "?", "default": None},
                ),
                _LEASE,
            ),
        ),
        ("detach", "Leave the cluster running when the notebook ends.", ()),
        ("list", "Show the clusters on this host.", ()),
        (
            "push",
            "Copy variables of the notebook to the workers.",
            (
                Argument(("names",), "variables of the notebook", "notebook variable", {"nargs": "*"}),
                _TARGETS,
            ),
        ),
        (
            "pull",
            "Bring variables of the workers into the notebook, under the same names.",
            (
                Argument(("names",), "variables of the workers", "worker variable", {"nargs": "*"}),
                Argument(
                    ("--from",),
                    "the rank to take them from (0), or all for a list by rank",
                    "rank",
                    {"dest": "source", "metavar": "RANK|all"},
                ),
                Argument(("--reduce",), "combine the values of all ranks", ("sum", "mean")),
            ),
        ),
        (
            "resize",
            "Add workers, or remove the last ones; a data-parallel cell that runs goes on.",
            (
                Argument(
                    ("workers",),
                    "how many there are to be",
                    "count",
                    {"type": _count},
                ),
            ),
        ),
        (
            "add",
            "Start more workers; a data-parallel cell that runs takes them in.",
            (
                Argument(
                    ("where",),
                    "how many, or on which devices: 2, or CPU-2,CPU-3",
                    "free device",
                ),
            ),
        ),
        (
            "remove",
            "End a worker; a data-parallel cell that runs lets it go and loses nothing.",
            (Argument(("worker",), "its id, or its device's", "worker"),),
        ),
        (
            "recover",
            "Let data-parallel cells go on when a worker dies, from the next cell on.",
            (
                Argument(("switch",), "on or off", ("on", "off")),
                Argument(
                    ("--every",),
                    "how far apart checkpoints are in cells with --checkpoint that do not say it (300)",
                    settings={"type": _seconds, "metavar": "SECONDS", "default": 300.0},
                ),
                Argument(
                    ("--retries",),
                    "after how many deaths in a row, without a step in between, a cell goes on (3)",
                    settings={"type": _count, "metavar": "R", "default": 3},
                ),
            ),
        ),
        (
            "balance",
            "Give each worker a part of each batch in proportion to its measured speed; the result stays the same.",
            (
                Argument(("--continuous",), "let the shares go on to follow the speeds", "", _FLAG),
                Argument(("--equal",), "share batches equally again", "", _FLAG),
            ),
        ),
        (
            "chaos",
            "Plant one real fault into the strategy cell that runs, or the next one, and report what comes of it.",
            (
                Argument(
                    ("fault",),
                    "what happens; off takes a planted one back, without a word the newest is shown",
                    (*FAULTS, "off"),
                    {"nargs": "?", "default": None},
                ),
                Argument(
                    ("--at",),
                    "after which step of the cell (1)",
                    settings={"type": _whole, "metavar": "STEP"},
                ),
                Argument(
                    ("--random",),
                    "after one of the next 50 steps, drawn with this seed",
                    settings={"type": _whole, "metavar": "SEED"},
                ),
                Argument(
                    ("--worker",),
                    "whom it strikes: an id, or a device; the last rank, rank 0 for checkpoints",
                    "worker",
                    {"metavar": "WORKER"},
                ),
            ),
        ),
        ("interrupt", "Stop what runs on the workers; their variables stay.", ()),
        (
            "reset",
            "Form a fresh process group; the workers' variables stay.",
            (
                Argument(
                    ("--replace",), "start new processes for workers that do not leave their cell", "", _FLAG
                ),
            ),
        ),
    )
}


def overview() -> str:
    """Return the list of verbs."""
    width = max(map(len, VERBS))
    lines = [f"  {verb.ljust(width)}  {command.summary}" for verb, command in VERBS.items()]
    return "\n".join(
        ["%openclaw <verb> [options]", "", *lines, "", "%openclaw <verb> --help shows its options."]
    )


def split_verb(line: str) -> tuple[Command | None, str, list[str]]:
    """Return the command, the verb and the words after it; no command when help on all verbs is asked for.

    Raises
    ------
    UnknownNameError
        If there is no such verb.
    """
    words = split_line(line)
    if not words or words[0] in ("--help", "-h", "help"):
        return None, "", []
    if words[0] not in VERBS:
        raise unknown_name("%openclaw verb", words[0], VERBS)
    return VERBS[words[0]], words[0], words[1:]


def asks_for_help(words: Sequence[str]) -> bool:
    """Return whether help is asked for, whatever else is written."""
    return "--help" in words or "-h" in words


# --------------------------------------------------------------------------------------------- the cell magic

CELL = Command(
    "%%openclaw_parallel",
    "Run the cell on the workers: as it stands on every rank, or under a strategy.",
    (
        Argument(
            ("-s", "--strategy"),
            f"run the cell's single-device training loop in parallel: {', '.join(STRATEGIES)}; default for the "
            "configured one, none for a plain cell where one is configured",
            "strategy",
            {"metavar": "NAME"},
        ),
        _TARGETS,
        Argument(
            ("--sync-frequency",),
            "synchronise every K-th step",
            settings={"type": _count, "metavar": "K"},
        ),
        Argument(
            ("--mode",),
            "what is synchronised: gradients, with one update for K batches, or parameters, after K updates (gradient)",
            MODES,
        ),
        Argument(
            ("--accumulate",),
            "make one step of A batches, for batches that do not fit into memory",
            settings={"type": _count, "metavar": "A"},
        ),
        Argument(
            ("--fusion-buffer-size",),
            "how many bytes of gradients are reduced at once (25MB)",
            settings={"metavar": "SIZE"},
        ),
        Argument(
            ("--no-memory-pinning",),
            "let loaders pin no memory, to save some of the host's",
            "",
            _FLAG,
        ),
        Argument(
            ("--precision",),
            "what the model's operations compute in (fp32); parameters stay float32, fp16 scales the loss",
            PRECISIONS,
        ),
        Argument(
            ("--fp16-layers",),
            "only these layers compute in 16 bits: names, types or patterns, such as conv,attention,encoder.0",
            settings={"metavar": "LAYERS"},
        ),
        Argument(
            ("--activation-checkpointing",),
            "compute the model's blocks, or these layers, again in the backward pass, in place of keeping them",
            settings={"metavar": "LAYERS", "nargs": "?", "const": True},
        ),
        Argument(("--memory-pooling",), "let a GPU's pool of memory grow in place", "", _FLAG),
        Argument(
            ("--gpu-memory-fraction",),
            "which part of its GPU's memory a worker may take, above 0 and up to 1",
            settings={"type": _part, "metavar": "PART"},
        ),
        Argument(
            ("--checkpoint",),
            "write checkpoints of the training into a directory, the last one at the end",
            "directory",
            {"metavar": "DIR"},
        ),
        Argument(
            ("--checkpoint-every",),
            "how often: steps, a time, or both, whichever comes first: 100, 300s, 5m, 100,300s (300s, or as "
            "%%openclaw recover says)",
            settings={"metavar": "N|TIME"},
        ),
        Argument(("--keep",), "how many checkpoints are kept (3)", settings={"type": _count, "metavar": "K"}),
        Argument(
            ("--resume",),
            "go on from the newest checkpoint, where the cell was; begin when there is none",
            "",
            _FLAG,
        ),
        Argument(
            ("--stages",),
            "model_parallel, pipeline: the model's layers in order, balanced over the workers: "
            "embed,blocks,head; or each "
            "worker's: embed,blocks.0/blocks.1,head. Regular expressions match whole names",
            settings={"metavar": "LAYERS"},
        ),
        Argument(
            ("--microbatches",),
            "pipeline: into how many parts each batch is cut (twice the workers)",
            settings={"type": _count, "metavar": "M"},
        ),
        Argument(
            ("--schedule",),
            "pipeline: in which order micro-batches go forward and back (gpipe)",
            SCHEDULES,
        ),
        Argument(
            ("--shard-layers",),
            "sharded: the layers that are gathered one by one, by name or class, separated by commas (repeated blocks)",
            settings={"metavar": "NAMES"},
        ),
        Argument(
            ("--no-reshard-after-forward",),
            "sharded: keep a layer's parameters from its forward to its backward pass",
            "",
            _FLAG,
        ),
        Argument(
            ("--tp",),
            "share each large layer out among N workers (tensor_parallel: all that take part; hybrid_parallel: 1)",
            settings={"type": _count, "metavar": "N"},
        ),
        Argument(
            ("--dp",),
            "share each batch out among N groups of workers (hybrid_parallel: 1)",
            settings={"type": _count, "metavar": "N"},
        ),
        Argument(
            ("--pp",),
            "cut the model into N stages (hybrid_parallel: 1, the only one so far)",
            settings={"type": _count, "metavar": "N"},
        ),
        Argument(
            ("--tp-plan",),
            "which layers are shared out and how, such as net.0=column,net.2=row; found when not given",
            settings={"metavar": "PLAN"},
        ),
        Argument(("--model",), "the model; found by its type when not given", "worker variable", _NAME),
        Argument(("--optimizer",), "the optimizer", "worker variable", _NAME),
        Argument(("--loader",), "the loader", "worker variable", _NAME),
        Argument(
            ("--split",),
            "what is divided among the ranks: the loader's batches, or the model's input (loader)",
            ("loader", "model"),
        ),
        Argument(
            ("--reduction",),
            "how the loss combines samples (auto: found from the loss)",
            ("auto", "mean", "sum"),
        ),
        Argument(
            ("--background",),
            "return a handle at once and let the cell go on; it is bound to NAME, if one is given",
            settings={"metavar": "NAME", "nargs": "?", "const": ""},
        ),
        Argument(
            ("--verify",),
            "first verify K steps against a single device, and run the cell only if they are equal",
            settings={"type": _count, "metavar": "K"},
        ),
        Argument(("--no-sync-batchnorm",), "let BatchNorm take each rank's own statistics", "", _FLAG),
    ),
)


_OF_ANY_CELL = ("--targets", "--background")


@dataclass(frozen=True)
class CellOptions:
    """What the first line of a cell asks for.

    ``targets`` as written, or None for all ranks; ``verify_steps`` how many are verified before it runs; ``background``
    the name of the handle when it runs in the background, "" for none; ``told`` what a person should know of it.
    """

    strategy: StrategySpec | None = None
    targets: str | None = None
    verify_steps: int = 0
    background: str | None = None
    told: str = ""


_PLAIN, _CONFIGURED = "none", "default"


def parse_cell(
    words: Sequence[str], defaults: CellDefaults | None = None, *, trains: bool = False
) -> CellOptions:
    """Turn the words after ``%%openclaw_parallel`` into options.

    Parameters
    ----------
    words : sequence of str
        The words.
    defaults : CellDefaults, optional
        What is configured; what the words say wins over it.
    trains : bool
        Whether the cell has a training loop: it runs under the configured strategy when it names none.

    Raises
    ------
    UsageError
        If an option does not exist, or needs a strategy and none is named.
    """
    defaults = defaults or CellDefaults()
    if not words and not (trains and defaults.strategy):
        return CellOptions()
    return read_cell(CELL.parse(words), defaults, trains=trains)


def read_cell(given: argparse.Namespace, defaults: CellDefaults, *, trains: bool) -> CellOptions:
    """Turn options that have been parsed, wherever they were written, into what they ask for; see `parse_cell`."""
    told = _choose_strategy(given, defaults, trains=trains)
    if given.background and not given.background.isidentifier():
        raise UsageError(f"--background takes a name for the handle, not {given.background!r}.")
    if given.strategy is None:
        _refuse_without_strategy(given)
        return CellOptions(targets=given.targets, background=given.background)
    name = canonical_strategy(given.strategy)
    for role in ("model", "optimizer", "loader"):
        _check_identifier(role, getattr(given, role))
    has_directory = given.checkpoint is not None or "checkpoint" in defaults.fields_for(name)
    if not has_directory and (given.checkpoint_every or given.keep or given.resume):
        raise UsageError("--checkpoint-every, --keep and --resume need --checkpoint DIR.")
    refuse_others(name, given, [(_attribute(each), each.names[-1]) for each in CELL.arguments])
    strategy = describe(name, given, defaults)
    targets = given.targets or (",".join(strategy.devices) if strategy.devices else None)
    spec = strategy.spec(
        model=given.model,
        optimizer=given.optimizer,
        loader=given.loader,
        split=given.split or "loader",
        reduction=given.reduction or "auto",
        sync_batchnorm=not given.no_sync_batchnorm,
    )
    defaults.check(spec)
    return CellOptions(spec, targets, given.verify or 0, given.background, told)


def _choose_strategy(given: argparse.Namespace, defaults: CellDefaults, *, trains: bool) -> str:
    """Put the configured strategy in, where the cell names none and is one for it; return what to tell of that."""
    if given.strategy == _PLAIN:
        given.strategy = None
        return ""
    if given.strategy == _CONFIGURED:
        if defaults.strategy is None:
            raise UsageError(
                "No strategy is configured: name one, or start with a file that has `strategy: data`."
            )
    elif given.strategy is not None or defaults.strategy is None or not (trains or _asks_for_strategy(given)):
        return ""
    given.strategy = defaults.strategy
    return f"Runs under {defaults.strategy} ({defaults.where}); -s none runs it as a plain cell."


def _asks_for_strategy(given: argparse.Namespace) -> bool:
    return any(True for _ in _of_strategies(given))


def _of_strategies(given: argparse.Namespace) -> Iterator[str]:
    """Yield the options that were given and need a strategy."""
    for argument in CELL.arguments:
        is_given = getattr(given, _attribute(argument)) not in (None, False)
        if is_given and argument.names[-1] not in (*_OF_ANY_CELL, "--strategy"):
            yield argument.names[-1]


def _refuse_without_strategy(given: argparse.Namespace) -> None:
    for option in _of_strategies(given):
        raise UsageError(f"{option} needs a strategy: add --strategy {next(iter(STRATEGIES))}.")


def _check_identifier(option: str, name: str | None) -> None:
    names = [] if name is None else name.split(",")
    if not all(part.isidentifier() for path in names for part in path.strip().split(".")):
        raise UsageError(
            f"--{option} takes names of variables on the workers (model, or gen,disc, or trainer.model), not {name!r}."
        )
