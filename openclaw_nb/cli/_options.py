"""Options that several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openclaw_nb.notebook.options import Command

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_json(*commands: argparse.ArgumentParser) -> None:
    """Let these commands answer in JSON."""
    for command in commands:
        command.add_argument("--json", action="store_true", help="for a program to read")


def add_options_of(parser: argparse._ActionsContainer, command: Command, but: Collection[str] = ()) -> None:
    """Let a command take the options of a verb or of the cell magic, but for some."""
    for argument in command.arguments:
        if not argument.is_option or argument.names[-1] in but:
            continue
        settings = dict(argument.settings)
        if isinstance(argument.values, tuple):
            settings |= {"choices": argument.values, "metavar": "|".join(argument.values)}
        parser.add_argument(*argument.names, help=argument.help, **settings)
