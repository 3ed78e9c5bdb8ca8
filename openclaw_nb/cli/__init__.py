"""The command line: ``openclaw``, also called ``openclaw-cli``.

Exit codes are 0, 1 (failed), 2 (not understood) and 130 (stopped with Ctrl-C). One module a kind of command: it adds
its parsers, and what they run returns the text to print, or an exit code when it has shown everything by itself.
Parses, calls, prints; everything else is below.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from openclaw_nb._version import __version__
from openclaw_nb.cli import (
    benchmark,
    clusters,
    completion,
    configuration,
    doctor,
    host,
    metrics,
    profile,
    run,
    worker,
)
from openclaw_nb.core.errors import OpenClawError, UsageError

_FAILED = 1
_NOT_UNDERSTOOD = 2
_INTERRUPTED = 130
_KINDS = (host, configuration, clusters, worker, run, profile, benchmark, metrics, doctor, completion)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    parser = _parser()
    completion.answer_tab(parser)
    options = _parse(parser, sys.argv[1:] if arguments is None else arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return _NOT_UNDERSTOOD
    try:
        answer = options.run(options)
        if isinstance(answer, int):
            return answer
        print(answer)
    except KeyboardInterrupt:
        print("openclaw: stopped", file=sys.stderr)
        return _INTERRUPTED
    except UsageError as error:
        print(f"openclaw: {error}", file=sys.stderr)
        return _NOT_UNDERSTOOD
    except OpenClawError as error:
        print(f"openclaw: {error}", file=sys.stderr)
        return _FAILED
    return 0


def _parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Read the options; what stands behind two dashes is for the program that a command runs."""
    place = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:place])
    options.arguments = list(words[place + 1 :])
    if options.arguments and not getattr(options, "takes_arguments", False):
        parser.error(f"{options.command} runs no program: nothing can stand behind two dashes")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openclaw",
        description="Run PyTorch notebook cells on several devices: the parts beside notebooks.",
    )
    parser.add_argument("--version", action="version", version=f"openclaw-nb {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for kind in _KINDS:
        kind.add_to(commands)
    return parser
