"""Commands that look at this host: ``list-devices``, ``list``."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from openclaw_nb.cli._options import add_json
from openclaw_nb.core.text import aligned, size_text

if TYPE_CHECKING:
    from openclaw_nb.cli._options import Commands


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    devices = commands.add_parser("list-devices", help="show what this machine can run workers on")
    devices.set_defaults(run=_list_devices)
    clusters = commands.add_parser("list", help="show the clusters of this user on this host")
    clusters.set_defaults(run=_list)
    add_json(devices, clusters)


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


def _owner_state(note: dict[str, Any]) -> str:
    if note["detached"]:
        return "has detached"
    return "runs" if note["alive"] else "is gone"
