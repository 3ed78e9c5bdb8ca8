"""Options that several commands take."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_json(*commands: argparse.ArgumentParser) -> None:
    """Let these commands answer in JSON."""
    for command in commands:
        command.add_argument("--json", action="store_true", help="for a program to read")
