"""What is known of a cluster as metrics for Prometheus: families of numbers, and their text.

    Snapshot (devices, totals, the newest run) ──> families ──> exposition ──> text, format 0.0.4

Pure: nothing is asked for here. Units are in the names (seconds, bytes, ratio from 0 to 1), what only grows ends in
``_total``, and labels have few values: no run, cell or process is one. The dashboard `grafana.json` beside this file
asks for these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from openclaw_nb.monitor.store import RunHistory, Totals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("idle", "busy", "spare", "dead")
PHASES = ("data", "compute", "wait", "transfer")

Labels = Mapping[str, str]


class DeviceRecord(Protocol):
    """What is read of a worker's device; see `openclaw_nb.cluster.status.DeviceStatus`."""

    @property
    def id(self) -> str:
        """The device."""

    @property
    def worker(self) -> str:
        """The worker's id."""

    @property
    def state(self) -> str:
        """One of `STATES`."""

    @property
    def utilisation(self) -> float | None:
        """In percent."""

    @property
    def memory_used(self) -> int | None:
        """In bytes."""

    @property
    def memory_total(self) -> int | None:
        """In bytes."""

    @property
    def temperature(self) -> float | None:
        """In degrees Celsius."""

    @property
    def power(self) -> float | None:
        """In watts."""

    @property
    def seen(self) -> float:
        """In seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class ClusterFacts:
    """What the cluster is, and whether it can do anything."""

    name: str
    backend: str
    communication: str
    epoch: int
    usable: bool
    computes: bool


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that is told at one moment.

    Attributes
    ----------
    version : str
        Of this package.
    cluster : ClusterFacts or None
        None where no cluster runs.
    devices : sequence of DeviceRecord
        One a worker.
    totals : sequence of Totals
        What each worker has done since this process began.
    newest : RunHistory or None
        The run that began last.
    num_runs : int
        How many runs have begun.
    """

    version: str
    cluster: ClusterFacts | None = None
    devices: Sequence[DeviceRecord] = ()
    totals: Sequence[Totals] = ()
    newest: RunHistory | None = None
    num_runs: int = 0


@dataclass(frozen=True)
class Family:
    """One metric: its name, ``"gauge"`` or ``"counter"``, what it says, and its values by labels."""

    name: str
    kind: str
    help: str
    values: Sequence[tuple[Labels, float]]


def families(snapshot: Snapshot) -> list[Family]:
    """Return the metrics of a moment; those without a value are left out."""
    found = (*_of_cluster(snapshot), *_of_devices(snapshot), *_of_work(snapshot), *_of_newest(snapshot))
    return [family for family in found if family.values]


def _of_cluster(snapshot: Snapshot) -> Iterator[Family]:
    cluster = snapshot.cluster
    yield Family("openclaw_build_info", "gauge", "The version.", [({"version": snapshot.version}, 1)])
    usable, computes = cluster is not None and cluster.usable, cluster is not None and cluster.computes
    yield Family("openclaw_cluster_up", "gauge", "Whether a cluster runs and can be used.", [({}, usable)])
    yield Family("openclaw_cell_running", "gauge", "Whether a cell runs on the workers.", [({}, computes)])
    states = [device.state for device in snapshot.devices]
    counts = [({"state": state}, float(states.count(state))) for state in STATES]
    yield Family("openclaw_workers", "gauge", "How many workers there are, by what they do.", counts)
    if cluster is not None:
        facts = {"cluster": cluster.name, "backend": cluster.backend, "communication": cluster.communication}
        yield Family("openclaw_cluster_info", "gauge", "What the cluster was started with.", [(facts, 1)])
        yield Family(
            "openclaw_group_epoch",
            "gauge",
            "The number of the process group: it grows each time one is formed.",
            [({}, cluster.epoch)],
        )


_DEVICE_GAUGES: tuple[tuple[str, str, Callable[[DeviceRecord], float | None]], ...] = (
    (
        "device_utilisation_ratio",
        "How busy a GPU is, or a worker's core.",
        lambda device: None if device.utilisation is None else device.utilisation / 100,
    ),
    (
        "device_memory_used_bytes",
        "Memory in use: of a GPU, or by a worker on a core and what it has started.",
        lambda device: device.memory_used,
    ),
    (
        "device_memory_size_bytes",
        "The memory of a GPU, or of the host or container of a worker on a core.",
        lambda device: device.memory_total,
    ),
    ("device_temperature_celsius", "The temperature of a GPU.", lambda device: device.temperature),
    ("device_power_watts", "What a GPU draws.", lambda device: device.power),
    (
        "worker_last_seen_timestamp_seconds",
        "When a worker last told what it does.",
        lambda device: device.seen,
    ),
)


def _of_devices(snapshot: Snapshot) -> Iterator[Family]:
    for name, text, read in _DEVICE_GAUGES:
        values = [
            ({"worker": device.worker, "device": device.id}, value)
            for device in snapshot.devices
            if (value := read(device)) is not None
        ]
        yield Family(f"openclaw_{name}", "gauge", text, values)


_WORK_COUNTERS: tuple[tuple[str, str, Callable[[Totals], float]], ...] = (
    ("steps", "Training steps.", lambda worker: worker.steps),
    ("samples", "A worker's own samples.", lambda worker: worker.samples),
    ("reduced_bytes", "What a worker gave into sums with the others.", lambda worker: worker.num_bytes),
    (
        "lost_measurements",
        "Measurements that did not arrive: the other counters lack them.",
        lambda worker: worker.lost,
    ),
)


def _of_work(snapshot: Snapshot) -> Iterator[Family]:
    yield Family("openclaw_runs_total", "counter", "Cells that have trained.", [({}, snapshot.num_runs)])
    for name, text, read in _WORK_COUNTERS:
        values = [(_worker(each.worker), read(each)) for each in snapshot.totals]
        yield Family(f"openclaw_worker_{name}_total", "counter", text, values)
    yield Family(
        "openclaw_worker_step_seconds_total",
        "counter",
        "Time in training steps, by what it went to.",
        [
            ({**_worker(each.worker), "phase": phase}, each.seconds.get(phase, 0.0))
            for each in snapshot.totals
            for phase in PHASES
        ],
    )


def _of_newest(snapshot: Snapshot) -> Iterator[Family]:
    run = snapshot.newest
    if run is None:
        return
    if run.loss:
        yield Family("openclaw_run_loss", "gauge", "The newest global loss.", [({}, run.loss.y[-1])])
    yield Family(
        "openclaw_run_samples_per_second",
        "gauge",
        "Samples a second of a worker in the newest run, over the last two seconds or more.",
        [(_worker(each.worker), each.rate) for each in run.workers if each.rate is not None],
    )
    waited = run.straggler
    yield Family(
        "openclaw_worker_waited_for_ratio",
        "gauge",
        "Which part of their time the others spend waiting for this worker, if it is the slowest.",
        [
            (_worker(each.worker), waited.share if waited and waited.worker == each.worker else 0.0)
            for each in run.workers
        ],
    )
    yield Family(
        "openclaw_worker_parameter_drift_ratio",
        "gauge",
        "How far a worker's parameters were from the average at the last one, with local steps.",
        [(_worker(each.worker), each.drift) for each in run.workers if each.drift is not None],
    )


def _worker(number: int) -> Labels:
    return {"worker": f"worker-{number}"}


# -------------------------------------------------------------------------------------------------- as text


def exposition(found: Iterable[Family]) -> str:
    """Write metrics in Prometheus's text format.

    Examples
    --------
    >>> print(exposition([Family("a_bytes", "gauge", "A size.", [({"of": "x"}, 2)])]), end="")
    # HELP a_bytes A size.
    # TYPE a_bytes gauge
    a_bytes{of="x"} 2
    """
    return "".join(f"{line}\n" for family in found for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {_escaped(family.help)}"
    yield f"# TYPE {family.name} {family.kind}"
    for labels, value in family.values:
        listed = ",".join(f'{name}="{_quoted(word)}"' for name, word in labels.items())
        yield f"{family.name}{{{listed}}} {_number(value)}" if listed else f"{family.name} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')


def _number(value: float) -> str:
    """Write a number as Prometheus reads it: ``NaN``, ``+Inf`` and ``-Inf`` are numbers, too."""
    if isinstance(value, int):
        return str(int(value))  # a truth value as well
    words = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
    return words.get(written := repr(float(value)), written)
