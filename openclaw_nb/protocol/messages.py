"""The whole wire between the notebook side and the workers, in one file.

Commands are verbs and go to a worker; a reply (``Done`` or ``Failed``) answers each of them; events
are facts that a worker tells on its own. Every message is a frozen dataclass; `codec` turns it into
JSON-ready dictionaries and back. Messages that concern the process group carry its ``epoch``, the
number that grows each time a group is formed, so that what belongs to an older group can be dropped.
A process that is no worker yet asks a master for a place (``Join``); it hears ``Standing`` or ``Refused``.

What travels beside these messages as files (variables) is described in `SendVariables`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PROTOCOL_VERSION = 8


@dataclass(frozen=True, kw_only=True)
class StrategySpec:
    """How a strategy cell is to be run; the options of the cell's first line.

    ``name`` is the strategy's word, ``options`` what only this strategy knows (``sync_frequency``, ...).
    ``model``, ``optimizer`` and ``loader`` are names given explicitly, or None to find them by type.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    optimizer: str | None = None
    loader: str | None = None
    split: str = "loader"
    reduction: str = "auto"
    sync_batchnorm: bool = True


# ---------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, kw_only=True)
class FormGroup:
    """Join the group of this epoch; answered when the group stands."""

    epoch: int
    rank: int
    world_size: int
    store_host: str
    store_port: int
    backend: str
    timeout_seconds: float
    directory: str
    search_path: list[str]


@dataclass(frozen=True, kw_only=True)
class SetPace:
    """Share out the batches of a cell by these speeds, at once when it runs, and slow some workers down.

    Keys are workers' numbers as text. ``speeds`` are in samples per second; who is not in it counts as the mean of the
    others. With ``continuous`` each worker goes on with the speed that it measures. ``slowdowns`` are how many times as
    long a worker's own work is to take.
    """

    run_id: str
    speeds: dict[str, float] = field(default_factory=dict)
    continuous: bool = False
    slowdowns: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """What a cell's profile is to measure: so many steps, with batches divided into so many ``parts``, one by one.

    ``num_sharing`` is how many workers share the host's memory when the cell trains.
    """

    num_steps: int
    parts: list[int]
    num_sharing: int = 1


@dataclass(frozen=True, kw_only=True)
class RunCell:
    """Run one cell's source on this worker.

    With ``verify_steps``, its first steps are only tried, on a single device and under the strategy, and compared.
    With ``profile``, they are only timed, as the plain cell, without the strategy.
    With ``elastic``, it goes on in another group when ranks go or come (`Regroup`). ``pace`` is how it begins.
    """

    run_id: str
    epoch: int
    source: str
    execution_count: int
    strategy: StrategySpec | None = None
    compare_names: bool = False
    verify_steps: int = 0
    elastic: bool = False
    pace: SetPace | None = None
    profile: Profiling | None = None


@dataclass(frozen=True, kw_only=True)
class SendVariables:
    """Write variables as a file on this host, for the notebook to read.

    The file holds one pickle (protocol 5) and its buffers; see `codec.write_variables`.
    """

    names: list[str]
    path: str


@dataclass(frozen=True, kw_only=True)
class ReceiveVariables:
    """Take the variables of a file on this host into the namespace."""

    path: str


@dataclass(frozen=True, kw_only=True)
class LendVariables:
    """Let other workers of this host read all variables that can be sent, until `TakeBackVariables`.

    The reply's ``path`` is where, its ``left`` which names cannot be sent, with the reason.
    """


@dataclass(frozen=True, kw_only=True)
class BorrowVariables:
    """Take all variables that another worker lends at ``path``."""

    path: str


@dataclass(frozen=True, kw_only=True)
class TakeBackVariables:
    """Lend no variables any more."""


@dataclass(frozen=True, kw_only=True)
class DescribeVariables:
    """Say type, size and a digest of variables without sending them."""

    names: list[str]


@dataclass(frozen=True, kw_only=True)
class Complete:
    """Complete Python code against the worker's namespace."""

    code: str
    cursor: int


@dataclass(frozen=True, kw_only=True)
class Release:
    """End the running cell: cut this epoch's collectives, then interrupt what still runs.

    ``grace_seconds`` is how long Python code that waits in no collective may go on before it is interrupted.
    """

    epoch: int
    run_id: str
    cause: str
    grace_seconds: float


@dataclass(frozen=True, kw_only=True)
class Regroup:
    """Go on with the running cell in this group, without the ranks that are gone; the waits in the present one end."""

    run_id: str
    group: FormGroup
    cause: str


@dataclass(frozen=True, kw_only=True)
class Meet:
    """Meet the other ranks at the next head of a loop of the running cell where all can (`AtHead`).

    ``num_ranks`` is how many there are to be, ``num_new`` how many of them wait to come in, ``leaves`` whether some
    leave.
    """

    run_id: str
    num_ranks: int
    num_new: int
    leaves: bool


@dataclass(frozen=True, kw_only=True)
class EnterCell:
    """Join this group, whose other ranks are at a loop's head of this cell, and go on with it from there.

    Answered as `RunCell` is.
    """

    cell: RunCell
    group: FormGroup


@dataclass(frozen=True, kw_only=True)
class Locate:
    """Say at once, also while a cell runs, what the worker is doing and where."""


@dataclass(frozen=True, kw_only=True)
class ListModules:
    """Say at once which modules the worker's variables come from, and where it looks for modules."""


@dataclass(frozen=True, kw_only=True)
class ImportModules:
    """Import these modules in the background, from such a place; meanwhile the worker is not ``warm``.

    Those that cannot be imported are left to whoever needs them.
    """

    names: list[str]
    directory: str
    search_path: list[str]


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Say at once what the newest cell has shown and measured so far, and how it ended if it has.

    Without ``with_output`` only what the cell is, and how it ended.
    """

    with_output: bool = True


Command = (
    FormGroup
    | RunCell
    | SendVariables
    | ReceiveVariables
    | LendVariables
    | BorrowVariables
    | TakeBackVariables
    | DescribeVariables
    | Complete
    | Release
    | Regroup
    | Meet
    | SetPace
    | EnterCell
    | Locate
    | ListModules
    | ImportModules
    | Recall
)

# ----------------------------------------------------------------------------------------- replies


@dataclass(frozen=True, kw_only=True)
class Done:
    """The command was carried out; ``value`` depends on the command."""

    value: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The command could not be carried out, or the cell raised.

    ``consequence`` is True when the error is only what another rank's failure did to this one;
    ``at`` is when it was raised, in seconds of the host's clock that only grows.
    """

    error_type: str
    message: str
    traceback: list[str]
    consequence: bool = False
    interrupted: bool = False
    at: float = 0.0
    value: dict[str, Any] = field(default_factory=dict)


Reply = Done | Failed

# ------------------------------------------------------------------------------------------ events


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a cell showed: a batch of transcript entries, in order.

    Each entry is ``[kind, ...]`` with kind ``stream``, ``display``, ``result``, ``clear`` or ``omit``.
    ``seq`` counts the batches of a run from 1; the reply of the cell says how many there were.
    """

    run_id: str
    worker: int
    seq: int
    entries: list[list[Any]]


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """What a worker is doing while it runs a cell.

    ``call`` is the collective it waits in, or "" when it computes; ``group`` tells groups apart;
    ``number`` counts its collectives, so that progress shows; ``line`` is the cell's line.
    """

    worker: int
    run_id: str
    epoch: int
    call: str
    group: str
    number: int
    seconds: float
    line: int
    code: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One worker's progress in a strategy cell since the last such event.

    ``samples`` are this worker's own, ``loss`` the newest global loss or None, ``seconds`` what its time went to
    (data, compute, wait, transfer), ``num_bytes`` what it gave into reductions, ``drift`` how far its parameters
    were from the average when they were averaged last, relative to it, ``first_nan`` the first step whose loss was not
    finite on this worker's own samples. ``at`` is in seconds of the host's clock that only grows. ``seq`` counts the
    events of a run from 1; one that stands for several (``count``) has the last one's.
    """

    worker: int
    run_id: str
    seq: int
    at: float
    steps: int
    samples: int
    loss: float | None
    seconds: dict[str, float] = field(default_factory=dict)
    num_bytes: int = 0
    drift: float | None = None
    first_nan: int | None = None
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Regrouped:
    """A worker goes on with its cell in a new group.

    ``num_steps`` counts the steps that were complete, ``seconds`` is how long it took here since the group was asked
    for.
    """

    worker: int
    run_id: str
    epoch: int
    world_size: int
    num_steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class AtHead:
    """A worker waits at the head of a loop for the next group (`Meet`, then `Regroup`).

    ``lets_in`` says whether newcomers can come in here; the same on all ranks.
    """

    worker: int
    run_id: str
    epoch: int
    lets_in: bool


Event = Shown | Whereabouts | Measured | Regrouped | AtHead


# ----------------------------------------------------------------------------------------- joining


@dataclass(frozen=True, kw_only=True)
class Join:
    """Take this process's worker into the cluster; asked again, with the same ``ticket``, until it is in.

    ``device`` is what the host has under ``device_id``, or None. Versions come first on both sides: of another
    ``protocol`` nothing else is read.
    """

    protocol: int
    version: str
    python: str
    torch: str
    ticket: str
    host: str
    pid: int
    device_id: str
    device: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Leave:
    """The worker of this ticket ends now, or has not come up: let it go, from a cell that runs where that can be."""

    protocol: int
    ticket: str


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far a worker has come: ``wait``, ``start`` its engine, ``joined`` or ``left``.

    With ``start`` come its number, the variables of its environment and what an engine must know to connect (the
    content of ipyparallel's file for engines, which holds keys).
    """

    stage: str
    worker: int = -1
    environment: dict[str, str] = field(default_factory=dict)
    connection: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The worker cannot join, and why."""

    reason: str
