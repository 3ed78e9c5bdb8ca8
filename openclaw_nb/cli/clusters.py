"""Commands that start and end clusters: ``up``, ``down``."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from openclaw_nb.cli._cluster import new_cluster, start
from openclaw_nb.cli._options import add_json
from openclaw_nb.core.errors import UsageError

if TYPE_CHECKING:
    from openclaw_nb.cli._options import Commands
    from openclaw_nb.session import OpenClawCluster


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    from openclaw_nb.cli._options import add_options_of
    from openclaw_nb.notebook.options import VERBS

    up = commands.add_parser(
        "up",
        help="start a cluster that goes on when this command has ended",
        description="Start a cluster that goes on when this command has ended. A notebook takes it up with "
        "%%openclaw attach NAME, a command with --attach NAME; openclaw down ends it.",
    )
    add_options_of(up, VERBS["start"], but=("--lease",))
    up.set_defaults(run=_up)
    down = commands.add_parser("down", help="end a cluster that nobody owns")
    down.add_argument("name", nargs="?", metavar="NAME", help="which; not needed where there is one")
    down.add_argument("--all", action="store_true", help="end every cluster of this user that nobody owns")
    down.set_defaults(run=_down)
    add_json(up, down)


def _up(options: argparse.Namespace) -> str:
    cluster = new_cluster(options, options.name)
    start(cluster)
    try:
        told = _described(cluster)
        notes = cluster.master.take_notes()
        cluster.detach()
    except BaseException:
        if cluster.running:
            cluster.stop()
        raise
    if options.json:
        return json.dumps({**told, "notes": notes}, indent=2)
    workers = ", ".join(f"{each['id']} on {each['device']}" for each in told["workers"])
    name = told["name"]
    return "\n".join(
        [
            f"Cluster {name} runs: {workers}.",
            *notes,
            f"  in a notebook   %openclaw attach {name}",
            f"  for a script    openclaw run --attach {name} --strategy data_parallel train.py",
            f"  to end it       openclaw down {name}",
        ]
    )


def _described(cluster: OpenClawCluster) -> dict[str, Any]:
    master = cluster.master
    return {
        "name": master.name,
        "backend": master.backend,
        "communication": master.communication,
        "workers": [
            {"id": each.id, "device": each.device.id, "pid": each.pid, "spare": each.spare}
            for each in master.workers
        ],
    }


def _down(options: argparse.Namespace) -> str:
    from openclaw_nb.cluster.files import end_abandoned

    ended = {name: end_abandoned(name) for name in _to_end(options)}
    if options.json:
        return json.dumps([{"name": name, "processes": count} for name, count in ended.items()], indent=2)
    if not ended:
        return "No cluster waits for an owner on this host."
    return "\n".join(
        f"Cluster {name} stopped: {count} processes ended, none is left." for name, count in ended.items()
    )


def _to_end(options: argparse.Namespace) -> list[str]:
    from openclaw_nb.cluster.files import read_notes

    if options.name is not None:
        if options.all:
            raise UsageError("Give the name of one cluster, or --all.")
        return [options.name]
    free = [note["name"] for note in read_notes() if note["detached"] or not note["alive"]]
    if len(free) > 1 and not options.all:
        raise UsageError(
            f"Several clusters wait for an owner: {', '.join(free)}. Say which to end, or --all."
        )
    return free
