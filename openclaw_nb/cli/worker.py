"""The command ``worker``: a worker of this process joins a master, and stays until one of them ends."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openclaw_nb.cli._options import Commands

_DESCRIPTION = """\
Start a worker that joins a master of this host over its port, and stay until the worker has left: removed, stopped
with its master, or ended here with Ctrl-C. It may be started before the master."""
_EPILOG = """\
The master's join token is taken from OPENCLAW_TOKEN, from the file that OPENCLAW_TOKEN_FILE names, or from the folder
of this user's cluster that listens there; it is never an argument, which others could read in the list of processes."""


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    worker = commands.add_parser(
        "worker",
        help="start a worker that joins a running master",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    worker.add_argument(
        "--master", default="127.0.0.1:50051", metavar="HOST:PORT", help="where it listens (127.0.0.1:50051)"
    )
    worker.add_argument("--device", required=True, metavar="ID", help="the worker's device, such as CPU-1")
    worker.add_argument(
        "--wait", type=float, default=60.0, metavar="SECONDS", help="how long to look for the master (60)"
    )
    worker.set_defaults(run=_worker)


def _worker(options: argparse.Namespace) -> int:
    from openclaw_nb.cluster.join.node import WorkerNode
    from openclaw_nb.cluster.join.ports import parse_address

    # As Ctrl-C does: the worker leaves before this process ends.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    host, port = parse_address(options.master)
    with WorkerNode(host, port, device_id=options.device, wait_seconds=options.wait) as node:
        _tell(f"{node.id} on {node.device_id} has joined {host}:{port}. Ctrl-C ends it.")
        node.wait()
        _tell(f"{node.id} has left: it was removed, or its master has stopped.")
    return 0


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
