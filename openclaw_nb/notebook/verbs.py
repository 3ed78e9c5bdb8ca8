"""What each verb of ``%openclaw`` does: one call on the session or its master, and what to show of it.

Knows session and tables; does not know how options are written.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from openclaw_nb.core.errors import UsageError
from openclaw_nb.notebook import transfer
from openclaw_nb.notebook.cellrun import CellRequest, places_of
from openclaw_nb.notebook.progress import ProgressBar
from openclaw_nb.notebook.tables import Message, Table, cluster_table, device_table, status_table
from openclaw_nb.notebook.targets import resolve_targets
from openclaw_nb.session import OpenClawCluster, Session
from openclaw_nb.strategies import STRATEGIES, canonical_strategy

if TYPE_CHECKING:
    from openclaw_nb.notebook.certificate import Certificate
    from openclaw_nb.notebook.figures import RunFigures

_LATE_SECONDS = 0.5


@dataclass(frozen=True)
class Context:
    """What verbs act on: the session, the notebook's shell and kind, and its strategy cells by number."""

    session: Session
    shell: Any
    in_notebook: bool
    cells: Mapping[int, CellRequest] = field(default_factory=dict)

    @property
    def namespace(self) -> dict[str, Any]:
        """The notebook's variables."""
        found: dict[str, Any] = self.shell.user_ns
        return found

    def bar(self, title: str, delay_seconds: float = 0.0) -> ProgressBar:
        """Return a progress bar for this notebook or terminal."""
        return ProgressBar(title, in_notebook=self.in_notebook, delay_seconds=delay_seconds)


def _start(context: Context, options: argparse.Namespace) -> OpenClawCluster:
    cluster = OpenClawCluster(
        workers=options.workers,
        devices=options.devices,
        name=options.name,
        backend=options.backend,
        communication=options.communication,
        oversubscribe=options.oversubscribe,
        lease_seconds=options.lease or 0.0,
    )
    with context.bar("Starting the cluster") as bar:
        return cluster.start(bar)


def _status(context: Context, options: argparse.Namespace) -> Table:
    return status_table(context.session.master)


def _devices(context: Context, options: argparse.Namespace) -> Table:
    from openclaw_nb.cluster.devices import list_devices

    cluster = context.session.cluster
    workers_on: dict[str, list[str]] = {}
    for worker in cluster.master.workers if cluster is not None else ():
        workers_on.setdefault(worker.device.id, []).append(worker.id)
    return device_table(list_devices(), workers_on)


def _panel(context: Context, options: argparse.Namespace) -> Any:
    from openclaw_nb.notebook.panel import panel_of

    cluster = context.session.cluster
    panel = panel_of(cluster.master if cluster is not None else None, context.session.monitor)
    panel.interval_seconds = options.every
    return panel


def _verify(context: Context, options: argparse.Namespace) -> Certificate:
    from openclaw_nb.notebook.verify import verify

    request = _cell_to_verify(context.cells, options.cell)
    if options.strategy is not None:
        name = canonical_strategy(options.strategy)
        if request.strategy is None or request.strategy.name != name:
            request = replace(request, strategy=STRATEGIES[name]().spec())
    return verify(context.session.master, request, options.steps, context.shell.user_ns)


def _cell_to_verify(cells: Mapping[int, CellRequest], number: int | None) -> CellRequest:
    if not cells:
        raise UsageError(
            "No cell has run under a strategy yet. Run one first, or put --verify K on the cell's first line."
        )
    if number is not None and number not in cells:
        listed = ", ".join(map(str, sorted(cells)))
        raise UsageError(f"Cell {number} has not run under a strategy. Those that have: {listed}.")
    return cells[max(cells) if number is None else number]


def _plot(context: Context, options: argparse.Namespace) -> RunFigures:
    from openclaw_nb.notebook.figures import RunFigures

    history = context.session.monitor.latest()
    if history is None:
        raise UsageError(
            "Nothing was measured yet: run a cell with %%openclaw_parallel --strategy data_parallel first."
        )
    return RunFigures(history)


def _auto(context: Context, options: argparse.Namespace) -> Message:
    from openclaw_nb.notebook.auto import auto_of

    if options.switch == "on":
        name = context.session.master.name  # an error when no cluster runs
        auto_of(context.shell).switch(True)
        return Message(f"Plain cells run on the workers of {name} now. %openclaw auto off ends that.")
    auto_of(context.shell).switch(False)
    return Message("Plain cells run in the notebook.")


def _attach(context: Context, options: argparse.Namespace) -> OpenClawCluster:
    from openclaw_nb.notebook.background import follow_in_background

    cluster = OpenClawCluster.attach(options.name, lease_seconds=options.lease or 0.0)
    cluster.cell = follow_in_background(cluster.master, context.session.monitor, context.namespace)
    return cluster


def _detach(context: Context, options: argparse.Namespace) -> Message:
    name = context.session.detach()
    return Message(f"Cluster {name} runs on by itself: %openclaw attach {name} takes it up again.")


def _stop(context: Context, options: argparse.Namespace) -> Message:
    name = options.name or context.session.master.name
    ended = context.session.stop(options.name)
    return Message(f"Cluster {name} stopped: {ended} processes ended, none is left.")


def _list(context: Context, options: argparse.Namespace) -> Table:
    from openclaw_nb.cluster.files import read_notes

    return cluster_table(read_notes(), os.getpid())


def _push(context: Context, options: argparse.Namespace) -> Table:
    master = context.session.master
    targets = resolve_targets(options.targets, places_of(master)) if options.targets is not None else None
    with context.bar("Pushing", _LATE_SECONDS) as bar:
        return transfer.push(master, options.names, context.namespace, targets, bar)


def _pull(context: Context, options: argparse.Namespace) -> Table:
    master = context.session.master
    names = options.names
    values: Mapping[str, Any]
    if options.reduce is not None:
        if options.source not in (None, "all"):
            raise UsageError("--reduce combines all ranks: leave out --from, or say --from all.")
        values, table = transfer.pull_reduced(master, names, options.reduce)
    elif options.source == "all":
        values, table = transfer.pull_all(master, names)
    else:
        values, table = transfer.pull(master, names, _source_rank(context, options.source))
    context.namespace.update(values)
    return table


def _source_rank(context: Context, source: str | None) -> int:
    if source is None:
        return 0
    ranks = resolve_targets(source, places_of(context.session.master))
    if len(ranks) != 1:
        raise UsageError(f"--from takes one rank, or all; {source!r} names {len(ranks)}.")
    return ranks[0]


def _interrupt(context: Context, options: argparse.Namespace) -> Message:
    stopped = context.session.master.interrupt()
    return Message("Stopped; variables kept." if stopped else "Nothing runs on the workers.")


def _reset(context: Context, options: argparse.Namespace) -> Message:
    with context.bar("Forming a fresh group") as bar:
        master = context.session.master
        epoch = master.reset(options.replace, lambda what: bar(0, 1, what))
    notes = master.take_notes() or ["The workers' variables are kept."]
    return Message("\n".join([f"A fresh process group stands (number {epoch}).", *notes]))


HANDLERS: dict[str, Callable[[Context, argparse.Namespace], Any]] = {
    "start": _start,
    "status": _status,
    "devices": _devices,
    "panel": _panel,
    "verify": _verify,
    "plot": _plot,
    "auto": _auto,
    "attach": _attach,
    "detach": _detach,
    "stop": _stop,
    "list": _list,
    "push": _push,
    "pull": _pull,
    "interrupt": _interrupt,
    "reset": _reset,
}
