"""What verbs return: tables and messages that display well as HTML and as plain text.

Knows strings and the records behind them; does not know clusters, except in the three functions that
turn the cluster's records into rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from openclaw_nb.cluster.worker import count_text
from openclaw_nb.core.table import Table
from openclaw_nb.core.text import size_text

if TYPE_CHECKING:
    from openclaw_nb.cluster.devices import Device
    from openclaw_nb.cluster.master import MasterNode
    from openclaw_nb.cluster.status import DeviceStatus

__all__ = ["Message", "Table", "cluster_table", "device_table", "status_table"]


class Message(str):
    """A line of text that is shown as it is, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def status_table(master: MasterNode) -> Table:
    """Return the workers of a cluster, their devices and what runs on them."""
    records = master.get_device_status()
    columns = ("rank", "worker", "device", "state", "pid", "busy", "memory", "does")
    title = f"Cluster {master.name}: {count_text(records)}, {master.communication}, group {master.epoch}"
    if master.backend != "local":
        title += f", backend {master.backend}"
    if master.problem:
        title = f"Cluster {master.name}: {master.problem}"
    return Table(title, columns, tuple(_status_row(r, s) for r, s in _ranked(records)), tuple(records))


def _ranked(records: Sequence[DeviceStatus]) -> Iterator[tuple[str, DeviceStatus]]:
    """Yield each record with its rank; a spare has none."""
    ranks = count()
    for record in records:
        yield "-" if record.spare else str(next(ranks)), record


def _status_row(rank: str, status: DeviceStatus) -> tuple[str, ...]:
    busy = "-" if status.utilisation is None else f"{status.utilisation:.0f} %"
    memory = size_text(status.memory_used)
    if status.memory_used is not None and status.memory_total is not None:
        memory = f"{memory} of {size_text(status.memory_total)}"
    pid = "-" if status.pid is None else str(status.pid)
    return (rank, status.worker, status.id, status.state, pid, busy, memory, status.work)


def device_table(devices: Sequence[Device], workers_on: Mapping[str, Sequence[str]]) -> Table:
    """Return what a machine can run workers on, and which workers are there."""
    rows = (
        (d.id, d.name, size_text(d.memory_bytes), ", ".join(workers_on.get(d.id, ())) or "-") for d in devices
    )
    return Table(
        "Devices of this machine", ("device", "name", "own memory", "worker"), tuple(rows), tuple(devices)
    )


def cluster_table(notes: Sequence[Mapping[str, Any]], own_pid: int) -> Table:
    """Return the clusters on this host."""
    if not notes:
        return Table("No cluster runs on this host.", (), ())
    rows = tuple((note["name"], _owner(note, own_pid)) for note in notes)
    return Table("Clusters of this user on this host", ("name", "owner"), rows, tuple(notes))


def _owner(note: Mapping[str, Any], own_pid: int) -> str:
    if not note["runs"]:
        return "ended"
    if note["detached"] or not note["alive"]:
        return "none: %openclaw attach takes it up"
    return "this notebook" if note["owner_pid"] == own_pid else f"pid {note['owner_pid']}"
