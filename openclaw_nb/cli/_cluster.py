"""The cluster that a command works on: one of its own, which ends with it, or one that goes on afterwards.

Knows which options say so; does not know what the command does with the workers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openclaw_nb.session import OpenClawCluster

# Killed, a command leaves a cluster that is not its own for as long, to be attached to again.
_LEASE_SECONDS = 7 * 24 * 3600.0
_NOT_HERE = ("--name", "--lease")


def add_cluster_options(parser: argparse.ArgumentParser, but: Collection[str] = ()) -> None:
    """Let a command start a cluster, or take one that runs."""
    from openclaw_nb.cli._options import add_options_of
    from openclaw_nb.notebook.options import VERBS

    group = parser.add_argument_group("workers")
    add_options_of(group, VERBS["start"], but=(*_NOT_HERE, *but))
    group.add_argument(
        "--attach",
        metavar="NAME",
        nargs="?",
        const="",
        help="work on a cluster that waits (openclaw up), which goes on afterwards; the only one when no name is given",
    )


def new_cluster(options: argparse.Namespace, name: str | None = None) -> OpenClawCluster:
    """Return the cluster that the options ask for; it is not started."""
    from openclaw_nb.session import OpenClawCluster

    return OpenClawCluster(
        workers=options.workers,
        devices=options.devices,
        name=name,
        backend=options.backend,
        communication=options.communication,
        oversubscribe=options.oversubscribe,
        spares=options.spares,
        config_path=options.config,
    )


def start(cluster: OpenClawCluster) -> None:
    """Start it; a bar in a terminal shows how far that is."""
    from openclaw_nb.notebook.progress import ProgressBar

    if not sys.stderr.isatty():
        cluster.start()
        return
    with ProgressBar("Starting the cluster", in_notebook=False) as bar:
        cluster.start(bar)


@contextmanager
def cluster_for(options: argparse.Namespace) -> Iterator[OpenClawCluster]:
    """Yield a cluster with its workers; afterwards it is ended, or left as it was found.

    Raises
    ------
    UsageError
        When more is asked of a cluster that runs than it is.
    """
    from openclaw_nb.session import OpenClawCluster

    if options.attach is None:
        cluster = new_cluster(options)
        try:
            start(cluster)
            yield cluster
        finally:
            if cluster.running:
                cluster.stop()
        return
    _check_attach(options)
    cluster = OpenClawCluster.attach(options.attach or None, lease_seconds=_LEASE_SECONDS)
    try:
        yield cluster
    finally:
        cluster.detach()


def _check_attach(options: argparse.Namespace) -> None:
    from openclaw_nb.core.errors import UsageError

    for option in ("workers", "devices", "backend", "communication", "spares"):
        if getattr(options, option):
            raise UsageError(
                f"--{option} is decided when a cluster starts: leave it out with --attach, or leave out --attach."
            )
