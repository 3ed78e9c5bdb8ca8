"""The command ``run``: a training script, or a notebook, as it is, under a strategy and with no notebook open.

    program ──> Step, Step, … ──> a cell each on the workers ──> what they show ──> stdout
                                                             └──> how it ended ──> exit code

What the ranks write goes to stdout, and what is said of the run to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from openclaw_nb.cli._cluster import add_cluster_options, cluster_for
from openclaw_nb.cli._options import add_json, add_options_of

if TYPE_CHECKING:
    from openclaw_nb.cli._options import Commands
    from openclaw_nb.cli._running import Ended

_EPILOG = """\
The script's own arguments stand behind two dashes: openclaw run train.py -s data_parallel -n 4 -- --epochs 3

Exit codes: what the script ends with; 1 when it raises or a worker dies; 2 when it cannot be run as asked; 130 when it
is stopped with Ctrl-C."""


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    run = commands.add_parser(
        "run",
        help="run a training script, or a notebook, under a strategy",
        description="Run an unedited single-device training script, or a notebook, on several devices.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_program_options(run)
    run.set_defaults(run=_run)
    add_json(run)


def add_program_options(parser: argparse.ArgumentParser) -> None:
    """Let a command run a program: which, on which workers, and under which strategy."""
    from openclaw_nb.notebook.options import CELL

    parser.add_argument("program", metavar="SCRIPT|NOTEBOOK", help="a .py or an .ipynb")
    add_options_of(parser.add_argument_group("strategy"), CELL, but=("--targets", "--background"))
    add_cluster_options(parser)
    parser.add_argument_group("workers").add_argument(
        "--retries",
        type=int,
        default=0,
        metavar="R",
        help="go on after the death of a worker, up to so many in a row (0); data_parallel",
    )
    parser.set_defaults(takes_arguments=True, targets=None, background=None)


def _run(options: argparse.Namespace) -> int:
    from openclaw_nb.cli._running import Running, read_asked

    asked = read_asked(options)
    output = sys.stderr if options.json else sys.stdout
    with cluster_for(options) as cluster:
        ended = Running(cluster, asked, output, sys.stderr).run()
    if options.json:
        sys.stdout.write(json.dumps(_summary(ended), indent=2) + "\n")
    return ended.code


def _summary(ended: Ended) -> dict[str, object]:
    return {
        "exit_code": ended.code,
        "error": ended.error,
        "seconds": round(ended.seconds, 3),
        "workers": ended.num_workers,
        "trainings": [
            {
                "line": each.line,
                "strategy": each.strategy,
                "steps": each.steps,
                "samples": each.samples,
                "samples_per_second": each.rate,
                "last_loss": each.loss,
            }
            for each in ended.trainings
        ],
    }
