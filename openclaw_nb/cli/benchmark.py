"""The command ``benchmark``: how fast a script trains, by setting and number of workers; two reports compared."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from openclaw_nb.cli._cluster import add_cluster_options, cluster_for
from openclaw_nb.cli._options import add_json
from openclaw_nb.core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from openclaw_nb.cli._options import Commands
    from openclaw_nb.cli._report import Report
    from openclaw_nb.cli.program import Program
    from openclaw_nb.session import OpenClawCluster

_MOST_REPEATS = 100
_EPILOG = """\
openclaw benchmark train.py -n 1,2,4 -s data_parallel -s "data_parallel --sync-frequency 4" -o report.json
openclaw benchmark --compare old.json report.json

The program is run once a setting and number of workers, in turn, on the workers of one cluster, and once as it is on
one of them: speed-up and efficiency are over that. A step is one step() of an optimizer; what comes before the end of
a training's first step is not counted. The script's own arguments stand behind two dashes.

Exit codes: 0; 1 when a setting could not be measured; 2 when it is not understood; 130 when stopped with Ctrl-C."""


def add_to(commands: Commands) -> None:
    """Add the command."""
    benchmark = commands.add_parser(
        "benchmark",
        help="measure throughput, latency and speed-up of a script by setting and number of workers",
        description="Measure how fast a training script, or a notebook, is under several settings and on several "
        "numbers of workers: throughput, latency of a step, speed-up and efficiency.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmark.add_argument("program", metavar="SCRIPT|NOTEBOOK", nargs="?", help="a .py or an .ipynb")
    benchmark.add_argument(
        "-s",
        "--strategy",
        action="append",
        default=[],
        metavar="SETTING",
        help="a strategy, with its options in quotes where it has some; several are measured beside each other",
    )
    benchmark.add_argument(
        "-n", "--workers", metavar="N,N,…", help="on how many workers; all that there are when not given"
    )
    benchmark.add_argument(
        "--repeat", type=int, default=1, metavar="R", help="how often each is run (1); medians are told"
    )
    benchmark.add_argument(
        "-o",
        "--output",
        action="append",
        default=[],
        metavar="FILE",
        help="also write the report, as .json or .html",
    )
    benchmark.add_argument(
        "--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="compare two .json reports"
    )
    add_cluster_options(benchmark, but=("--workers", "--spares"))
    benchmark.set_defaults(run=_benchmark, takes_arguments=True, spares=0)
    add_json(benchmark)


def _benchmark(options: argparse.Namespace) -> str | int:
    if options.compare is not None:
        return _compare(options)
    if options.program is None:
        raise UsageError("Give a script or a notebook to measure, or --compare BEFORE AFTER.")
    return _measure(options)


def _compare(options: argparse.Namespace) -> str:
    from openclaw_nb.cli import _report

    if options.program is not None:
        raise UsageError("--compare takes two reports, and measures nothing: leave the script out.")
    before, after = map(_report.read, options.compare)
    return _report.comparison_json(before, after) if options.json else repr(_report.comparison(before, after))


def _measure(options: argparse.Namespace) -> int:
    from openclaw_nb.cli import _report
    from openclaw_nb.cli.program import read_program

    files = [_report.check_writable(path) for path in options.output]
    if not 1 <= options.repeat <= _MOST_REPEATS:
        raise UsageError(f"--repeat {options.repeat}: give a number from 1 to {_MOST_REPEATS}.")
    counts = _read_counts(options.workers)
    program = read_program(options.program)
    if not program.num_trainings:
        raise UsageError(f"{program.path.name} has no training loop, whose speed could be measured.")
    report = _report_of(options, program, counts)
    for file in files:
        _report.write(report, file)
    _show(report, files, as_json=options.json)
    return int(report.failed)


def _show(report: Report, files: list[Path], *, as_json: bool) -> None:
    from openclaw_nb.cli import _report

    text = _report.as_json(report) if as_json else repr(_report.as_table(report))
    sys.stdout.write(f"{text}\n")
    for file in files:
        _tell(f"wrote {file}")


def _report_of(options: argparse.Namespace, program: Program, counts: list[int]) -> Report:
    from openclaw_nb.cli._benchmark import Benchmark, read_settings
    from openclaw_nb.cli._report import Report, place_of

    options.workers = max(counts, default=None) if options.attach is None else None
    _check_settings(options)
    with cluster_for(options) as cluster:
        settings = read_settings(options.strategy, cluster.cell_defaults)
        counts = _fitting(counts, cluster)
        devices = [worker.device.id for worker in cluster.master.workers]
        results = Benchmark(cluster, program, options.arguments, _tell).measure(
            settings, counts, options.repeat
        )
    return Report(program=program.path.name, results=results, repeat=options.repeat, place=place_of(devices))


def _check_settings(options: argparse.Namespace) -> None:
    """Refuse settings that are not understood before anything is started."""
    from openclaw_nb.cli._benchmark import read_settings
    from openclaw_nb.cli._cluster import new_cluster

    if options.attach is None or options.strategy:
        read_settings(options.strategy, new_cluster(options).cell_defaults)


def _fitting(counts: list[int], cluster: OpenClawCluster) -> list[int]:
    there = cluster.master.world_size
    if max(counts, default=0) > there:
        raise UsageError(f"-n {max(counts)}: the cluster {cluster.master.name} has {there} workers.")
    return counts or [there]


def _read_counts(text: str | None) -> list[int]:
    if text is None:
        return []
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"-n {text}: give numbers of workers, such as 1,2,4.")
    return sorted({int(word) for word in words})


def _tell(text: str) -> None:
    sys.stderr.write(f"openclaw: {text}\n")
    sys.stderr.flush()
