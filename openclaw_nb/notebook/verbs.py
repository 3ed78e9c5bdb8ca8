"""What each verb of ``%openclaw`` does: one call on the session or its master, and what to show of it.

Knows session and tables; does not know how options are written.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from openclaw_nb.config.cells import CellDefaults
from openclaw_nb.config.effects import effects_table
from openclaw_nb.config.template import write_template
from openclaw_nb.core.errors import NotStartedError, UsageError
from openclaw_nb.core.text import parse_size
from openclaw_nb.notebook import transfer
from openclaw_nb.notebook.cellrun import CellRequest, places_of
from openclaw_nb.notebook.progress import ProgressBar
from openclaw_nb.notebook.resilience import PlantedFault
from openclaw_nb.notebook.tables import Message, Table, cluster_table, device_table, status_table
from openclaw_nb.notebook.targets import resolve_targets
from openclaw_nb.session import OpenClawCluster, Session
from openclaw_nb.strategies import canonical_strategy

if TYPE_CHECKING:
    from openclaw_nb.cluster.master import MasterNode
    from openclaw_nb.cluster.planning import Plan
    from openclaw_nb.metrics.publish import Published
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
        spares=options.spares,
        config_path=options.config,
        port=options.port,
    )
    with context.bar("Starting the cluster") as bar:
        return cluster.start(bar)


def _config(context: Context, options: argparse.Namespace) -> Table:
    cluster = context.session.cluster
    if options.files or cluster is None or not options.effective:
        if options.files:
            return OpenClawCluster(config_path=options.files).effective_configuration()
        if cluster is None and options.effective:
            raise NotStartedError(
                "No cluster is running whose configuration took effect. %openclaw config FILE says what a file would "
                "set; start a cluster with it: %openclaw start --config FILE"
            )
        shown = cluster or OpenClawCluster()
        return effects_table(shown.configuration, None, runs=cluster is not None)
    return cluster.effective_configuration()


def _init(context: Context, options: argparse.Namespace) -> Message:
    path = write_template(options.path, overwrite=options.force)
    return Message(f"Written: {path}. %openclaw start --config {path} starts a cluster with it.")


def _status(context: Context, options: argparse.Namespace) -> Table:
    return status_table(context.session.master)


def _devices(context: Context, options: argparse.Namespace) -> Table:
    from openclaw_nb.cluster.devices import list_devices

    cluster = context.session.cluster
    workers_on: dict[str, list[str]] = {}
    for worker in cluster.master.workers if cluster is not None else ():
        named = f"{worker.id} (spare)" if worker.spare else worker.id
        workers_on.setdefault(worker.device.id, []).append(named)
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
            request = replace(request, strategy=_defaults(context).describe(name, {}).spec())
    return verify(context.session.master, request, options.steps, context.shell.user_ns)


def _defaults(context: Context) -> CellDefaults:
    cluster = context.session.cluster
    return CellDefaults() if cluster is None else cluster.cell_defaults


def _plan(context: Context, options: argparse.Namespace) -> Plan:
    from openclaw_nb.notebook.plan import plan

    master = context.session.master
    if options.last:
        if master.last_plan is None:
            raise UsageError("There is no plan yet: %openclaw plan makes one of the last strategy cell.")
        return master.last_plan
    request = _cell_to_verify(context.cells, options.cell)
    memory = None if options.memory is None else parse_size(options.memory, "--memory")
    with context.bar("Measuring") as bar:
        return plan(master, request, options.steps, context.shell.user_ns, memory, bar)


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


def _metrics(context: Context, options: argparse.Namespace) -> Message | Published:
    from openclaw_nb.notebook.metrics import metrics

    return metrics(context.session.metrics, options)


def _doctor(context: Context, options: argparse.Namespace) -> Table:
    from openclaw_nb.notebook.doctor import doctor

    with context.bar("Checking", _LATE_SECONDS) as bar:
        return doctor(context.session, options, lambda what: bar(0, 1, what))


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


def _resize(context: Context, options: argparse.Namespace) -> Message | Table:
    return _changed(context, lambda master: master.resize_workers(options.workers))


def _add(context: Context, options: argparse.Namespace) -> Message | Table:
    where = int(options.where) if options.where.isdecimal() else options.where
    return _changed(context, lambda master: master.add_worker(where))


def _remove(context: Context, options: argparse.Namespace) -> Message | Table:
    return _changed(context, lambda master: master.remove_worker(options.worker))


def _changed(context: Context, change: Callable[[MasterNode], object]) -> Message | Table:
    """Change the workers, and say what comes of it for the cell that runs, or who is there now."""
    master = context.session.master
    before = {worker.id for worker in master.workers}
    with context.bar("Changing the workers", _LATE_SECONDS) as bar:
        bar(0, 1)
        change(master)
        run = master.last_run
        if run is None or not run.running:
            master.ensure_ready(lambda what: bar(0, 1, what))
            return replace(status_table(master), notes=tuple(master.take_notes()))
    now = {worker.id for worker in master.workers}
    lines = changes_in_run(sorted(now - before), sorted(before - now), is_elastic=run.is_elastic)
    return Message("\n".join([*(lines or ["The workers stay as they are."]), *master.take_notes()]))


def changes_in_run(added: Sequence[str], removed: Sequence[str], *, is_elastic: bool) -> list[str]:
    """Return what workers that were added or removed are for a cell that runs, a line each."""
    when = "at the next head of a loop" if is_elastic else "when the cell has ended: it cannot take it in"
    return [
        *(f"{worker} comes in {when}." for worker in added),
        *(f"{worker} is gone; the cell goes on without it." for worker in removed),
    ]


def _recover(context: Context, options: argparse.Namespace) -> Message:
    master = context.session.master
    if options.switch == "off":
        master.enable_auto_recovery(max_retries=0)
        return Message("From the next cell on, the death of a worker ends its cell.")
    master.enable_auto_recovery(options.every, options.retries)
    deaths = "one death" if options.retries == 1 else f"up to {options.retries} deaths in a row"
    return Message(
        f"From the next cell on, data-parallel cells go on after {deaths}, and those with --checkpoint DIR write one "
        f"every {options.every:g} s where they do not say how often."
    )


def _balance(context: Context, options: argparse.Namespace) -> Message | Table:
    master = context.session.master
    if options.equal:
        master.share_equally()
        return Message("Batches are shared out equally.")
    return master.balance_load(continuous=options.continuous)


def _chaos(context: Context, options: argparse.Namespace) -> Message | PlantedFault:
    master = context.session.master
    if options.fault == "off":
        return Message("Taken back." if master.unplant() else "No fault is planted.")
    if options.fault is not None:
        return PlantedFault(
            master.plant(options.fault, step=options.at, seed=options.random, worker=options.worker)
        )
    if master.chaos is None:
        return Message("No fault is planted. %openclaw chaos --help says which there are.")
    return PlantedFault(master.chaos)


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
    "config": _config,
    "init": _init,
    "status": _status,
    "devices": _devices,
    "panel": _panel,
    "verify": _verify,
    "plan": _plan,
    "plot": _plot,
    "metrics": _metrics,
    "doctor": _doctor,
    "auto": _auto,
    "attach": _attach,
    "detach": _detach,
    "stop": _stop,
    "list": _list,
    "push": _push,
    "pull": _pull,
    "resize": _resize,
    "add": _add,
    "remove": _remove,
    "recover": _recover,
    "balance": _balance,
    "chaos": _chaos,
    "interrupt": _interrupt,
    "reset": _reset,
}
