"""The command ``completion``, and what a shell asks when Tab is pressed."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openclaw_nb.cli._options import Commands

_SHELLS = ("bash", "zsh", "fish")
_NAMES = ["openclaw", "openclaw-cli"]
_EPILOG = """\
bash, in ~/.bashrc:                  eval "$(openclaw completion bash)"
zsh, in ~/.zshrc, after compinit:    eval "$(openclaw completion zsh)"
fish:                                openclaw completion fish > ~/.config/fish/completions/openclaw.fish"""


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    completion = commands.add_parser(
        "completion",
        help="print what lets a shell complete these commands with Tab",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", choices=_SHELLS, metavar="|".join(_SHELLS), help="which shell")
    completion.set_defaults(run=_completion)


def answer_tab(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks how a line may go on, and end; return at once when none does."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)


def _completion(options: argparse.Namespace) -> str:
    from argcomplete.shell_integration import shellcode

    return shellcode(_NAMES, shell=options.shell).rstrip()
