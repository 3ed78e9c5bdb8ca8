"""The command ``profile``: where the time of a script's training goes, by worker, and what to change.

program ──> Running ──> what each training has measured ──> plan.load, plan.advice ──> table, JSON
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from openclaw_nb.cli._cluster import cluster_for
from openclaw_nb.cli._options import add_json
from openclaw_nb.cli.run import add_program_options

if TYPE_CHECKING:
    from openclaw_nb.cli._options import Commands
    from openclaw_nb.cli.program import Step
    from openclaw_nb.cluster.master import MasterNode
    from openclaw_nb.core.table import Table
    from openclaw_nb.monitor.store import RunHistory
    from openclaw_nb.plan.advice import Situation

_EPILOG = """\
load        the worker's loading and computing, where that of the mean worker is 1
data …      the part of its time that went to loading batches, computing, waiting for other workers, and transfer

The script's own arguments stand behind two dashes, and it decides the exit code, as with openclaw run."""


def add_to(commands: Commands) -> None:
    """Add the command."""
    profile = commands.add_parser(
        "profile",
        help="run a script and tell where its time goes, by worker, and what to change",
        description="Run a training script, or a notebook, as openclaw run does, and tell then where the time of each "
        "training went, how evenly the work was shared out, and which key of the configuration to change.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_program_options(profile)
    profile.set_defaults(run=_profile)
    add_json(profile)


@dataclass(frozen=True)
class _Seen:
    """One training: its line, what it has measured, with which settings, and the workers' devices."""

    line: int
    history: RunHistory
    situation: Situation
    devices: Mapping[int, str]


class _Profiler:
    """Keeps what each training has measured; a `Watcher`."""

    def __init__(self) -> None:
        self.seen: list[_Seen] = []

    def before(self, master: MasterNode, ranks: Sequence[int]) -> None:
        """Nothing is to be prepared."""

    def after(self, master: MasterNode, ranks: Sequence[int], step: Step, history: RunHistory | None) -> None:
        """Keep it, with the settings that the workers have now."""
        from openclaw_nb.doctor.runs import situation_of

        if history is not None:
            devices = {each.number: each.device.id for each in master.workers}
            self.seen.append(_Seen(step.line, history, situation_of(master, history), devices))


def _profile(options: argparse.Namespace) -> int:
    from openclaw_nb.cli._running import Running, read_asked
    from openclaw_nb.core.errors import UsageError

    if options.strategy == "none":
        raise UsageError("Only what runs under a strategy is measured: --strategy data_parallel, for one.")
    asked, profiler = read_asked(options), _Profiler()
    output = sys.stderr if options.json else sys.stdout
    with cluster_for(options) as cluster:
        ended = Running(cluster, asked, output, sys.stderr, watcher=profiler).run()
    if options.json:
        told = {
            "exit_code": ended.code,
            "error": ended.error,
            "trainings": [_record(each) for each in profiler.seen],
        }
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        sys.stdout.writelines(f"\n{_table(each)}\n" for each in profiler.seen)
    return ended.code


def _record(seen: _Seen) -> dict[str, Any]:
    from openclaw_nb.plan.advice import advise
    from openclaw_nb.plan.load import load_of

    load, history = load_of(seen.situation.workers), seen.history
    return {
        "line": seen.line,
        "strategy": seen.situation.strategy,
        "steps": history.steps,
        "samples": history.samples,
        "seconds": round(history.seconds, 3),
        "samples_per_second": history.mean_rate,
        "skew": load.skew,
        "efficiency": load.efficiency,
        "communication": load.communication,
        "split": dict(load.split),
        "workers": [
            {
                "id": f"worker-{each.worker}",
                "device": seen.devices.get(each.worker),
                "steps": each.steps,
                "samples": measured.samples,
                "work_seconds": each.work_seconds,
                "load": each.load,
                "split": dict(each.split),
            }
            for each, measured in zip(load.workers, history.workers, strict=True)
        ],
        "advice": [asdict(each) for each in advise(seen.situation)],
    }


def _table(seen: _Seen) -> Table:
    from openclaw_nb.core.table import Table
    from openclaw_nb.core.text import counted
    from openclaw_nb.plan.load import PARTS

    told = _record(seen)
    rate = "" if told["samples_per_second"] is None else f", {told['samples_per_second']:,.0f} samples/s"
    title = (
        f"Line {seen.line}, {told['strategy']} on {counted(len(told['workers']), 'worker')}: "
        f"{counted(told['steps'], 'step')}, {counted(told['samples'], 'sample')} in {told['seconds']:.1f} s{rate}"
    )
    rows = tuple(
        (
            each["id"],
            each["device"] or "-",
            str(each["samples"]),
            f"{each['load']:.2f}",
            *(_percent(each["split"].get(part)) for part in PARTS),
        )
        for each in told["workers"]
    )
    columns = ("worker", "device", "samples", "load", *PARTS)
    return Table(title, columns, rows, tuple(told["workers"]), tuple(_notes(told)))


def _notes(told: Mapping[str, Any]) -> list[str]:
    """Say how even the work was, what working together cost, and what to change."""
    if told["efficiency"] is None:
        return ["The training was too short for its time to be measured."]
    notes = [
        f"skew {told['skew']:.2f}: the worker with most work has {_percent(told['skew'] - 1)} more than the mean",
        f"efficiency {_percent(told['efficiency'])}: waiting and transfer take {_percent(told['communication'])}",
    ]
    changes = [f"to change: {each['key']}. {each['seen']}: {each['change']}." for each in told["advice"]]
    return notes + (changes or ["There is little to win: no cause takes a noticeable part of the time."])


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
