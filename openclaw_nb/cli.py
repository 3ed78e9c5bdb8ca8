"""The command line: ``openclaw``, also called ``openclaw-cli``.

Exit codes are 0, 1 (failed) and 2 (not understood). Parses, calls, prints; everything else is below.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from openclaw_nb._version import __version__
from openclaw_nb.core.errors import OpenClawError, UsageError
from openclaw_nb.core.text import aligned, size_text

_FAILED = 1
_NOT_UNDERSTOOD = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return _NOT_UNDERSTOOD
    try:
        print(options.run(options))
    except UsageError as error:
        print(f"openclaw: {error}", file=sys.stderr)
        return _NOT_UNDERSTOOD
    except OpenClawError as error:
        print(f"openclaw: {error}", file=sys.stderr)
        return _FAILED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openclaw",
        description="Run PyTorch notebook cells on several devices: the parts beside notebooks.",
    )
    parser.add_argument("--version", action="version", version=f"openclaw-nb {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    devices = commands.add_parser("list-devices", help="show what this machine can run workers on")
    devices.set_defaults(run=_list_devices)
    clusters = commands.add_parser("list", help="show the clusters of this user on this host")
    clusters.set_defaults(run=_list)
    config = commands.add_parser("config", help="check a configuration file and show what each key sets")
    config.add_argument("files", nargs="*", default=["openclaw_config.yaml"], help="openclaw_config.yaml")
    config.add_argument(
        "--effective", action="store_true", help="is known to the notebook: %%openclaw config"
    )
    config.set_defaults(run=_config)
    init = commands.add_parser("init", help="write a configuration file with every key explained")
    init.add_argument("path", nargs="?", default="openclaw_config.yaml", help="openclaw_config.yaml")
    init.add_argument("--force", action="store_true", help="replace a file that is there")
    init.set_defaults(run=_init)
    for command in (devices, clusters, config):
        command.add_argument("--json", action="store_true", help="for a program to read")
    return parser


def _list_devices(options: argparse.Namespace) -> str:
    from openclaw_nb.cluster.devices import list_devices

    devices = list_devices()
    if options.json:
        return json.dumps([asdict(device) for device in devices], indent=2)
    return aligned(
        [
            ("device", "name", "own memory"),
            *((device.id, device.name, size_text(device.memory_bytes)) for device in devices),
        ]
    )


def _list(options: argparse.Namespace) -> str:
    from openclaw_nb.cluster.files import read_notes

    notes = read_notes()
    if options.json:
        return json.dumps(notes, indent=2)
    if not notes:
        return "No cluster runs on this host."
    rows = ((note["name"], str(note["owner_pid"]), _owner_state(note)) for note in notes)
    return aligned([("name", "owner", "owner's process"), *rows])


def _config(options: argparse.Namespace) -> str:
    from openclaw_nb.config.effects import effects_table
    from openclaw_nb.config.load import load

    if options.effective:
        raise UsageError(
            "What took effect is known where the cluster was started: %openclaw config --effective in its notebook, "
            "or OpenClawCluster.effective_configuration() in its script. Without --effective a file is checked."
        )
    table = effects_table(load(options.files, os.environ), None)
    return json.dumps([asdict(each) for each in table], indent=2) if options.json else repr(table)


def _init(options: argparse.Namespace) -> str:
    from openclaw_nb.config.template import write_template

    path = write_template(options.path, overwrite=options.force)
    return f"Written: {path}. Change what you need, then: OpenClawCluster(config_path={str(path)!r}).start()"


def _owner_state(note: dict[str, Any]) -> str:
    if note["detached"]:
        return "has detached"
    return "runs" if note["alive"] else "is gone"
