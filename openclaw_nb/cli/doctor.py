"""The command ``doctor``: what may be wrong with this host, its network or its workers, and what to do."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from openclaw_nb.cli._options import add_json

if TYPE_CHECKING:
    from openclaw_nb.cli._options import Commands


def add_to(commands: Commands) -> None:
    """Add the command."""
    doctor = commands.add_parser(
        "doctor",
        help="check this host, its network and an array sum over workers",
        description="Check this host, its network and an array sum over workers that are started for it. Exit code 1 "
        "when anything fails.",
    )
    doctor.add_argument("-n", "--workers", type=int, metavar="N", help="for how many workers")
    doctor.add_argument(
        "--config", action="append", metavar="FILE", help="for what a configuration file asks for"
    )
    doctor.add_argument("--reach", metavar="HOST:PORT", help="try a connection, as telnet does")
    doctor.add_argument("--no-start", action="store_true", help="start no workers")
    doctor.set_defaults(run=_doctor)
    add_json(doctor)


def _doctor(options: argparse.Namespace) -> int:
    from openclaw_nb.config.load import load
    from openclaw_nb.core.errors import UsageError
    from openclaw_nb.doctor.consult import consult, parse_reach
    from openclaw_nb.doctor.findings import as_dictionaries, failed, report
    from openclaw_nb.session import current_session

    if options.workers is not None and options.workers < 1:
        raise UsageError(f"-n {options.workers}: give a number of workers, at least 1.")
    found = consult(
        current_session(),
        load(options.config, os.environ),
        workers=options.workers,
        reach=None if options.reach is None else parse_reach(options.reach),
        starts=not options.no_start,
        tell=lambda what: print(f"openclaw: checking {what}", file=sys.stderr),  # noqa: T201 - progress of a command
    )
    text = json.dumps(as_dictionaries(found), indent=2) if options.json else repr(report(found, "this host"))
    sys.stdout.write(f"{text}\n")
    return int(failed(found))
