"""A benchmark's report: as a table, as JSON, as a page of HTML; read again, and two of them compared.

Knows numbers and how they are shown; does not know how they were measured.
"""

from __future__ import annotations

import html
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from openclaw_nb._version import __version__
from openclaw_nb.core.errors import UsageError
from openclaw_nb.core.table import Table
from openclaw_nb.core.text import counted
from openclaw_nb.plan.speed import PLAIN, Change, Result, compared

_FORMAT = "openclaw-benchmark-1"
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px system-ui, sans-serif; margin: 2em; }}
th, td {{ padding: 0.25em 1em 0.25em 0; }}
meter {{ width: 12em; }}
</style>
</head>
<body>
<h1>{title}</h1>
{table}
<h2>Efficiency</h2>
{bars}
</body>
</html>
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured of one program, and where.

    Attributes
    ----------
    program : str
        Its file.
    results : list of Result
        By setting and number of workers.
    repeat : int
        How often each was run.
    place : mapping of str to str
        What it was measured on, and with.
    """

    program: str
    results: list[Result]
    repeat: int = 1
    place: Mapping[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether any setting could not be measured."""
        return any(each.error for each in self.results)


def place_of(devices: Sequence[str]) -> dict[str, str]:
    """Return what is measured on, and with."""
    from importlib.metadata import version

    return {
        "openclaw_nb": __version__,
        "torch": version("torch"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "devices": ", ".join(devices),
    }


def as_json(report: Report) -> str:
    """Write a report for programs, and for `read`."""
    return json.dumps({"format": _FORMAT, **asdict(report)}, indent=2)


def as_table(report: Report) -> Table:
    """Write a report for people."""
    rows = tuple(_row(each) for each in report.results)
    columns = ("setting", "workers", "samples/s", "p50 ms", "p99 ms", "speed-up", "efficiency")
    errors = [
        f"{each.setting} on {counted(each.workers, 'worker')}: {each.error}"
        for each in report.results
        if each.error
    ]
    title = f"{report.program}, each setting run {counted(report.repeat, 'time')}"
    where = ", ".join(f"{name} {value}" for name, value in report.place.items())
    notes = (*errors, f"Speed-up is over {PLAIN!r}; p50 and p99 are those of a step. {where}")
    return Table(title, columns, rows, tuple(report.results), notes)


def as_page(report: Report) -> str:
    """Write a report as a page of its own, which loads nothing."""
    bars = "".join(
        f"<div><meter min='0' max='1' value='{min(each.efficiency, 1.0):.3f}'></meter> "
        f"{html.escape(each.setting)} on {counted(each.workers, 'worker')}: {each.efficiency:.0%}</div>\n"
        for each in report.results
        if each.efficiency is not None
    )
    title = html.escape(f"Benchmark of {report.program}")
    return _PAGE.format(title=title, table=as_table(report)._repr_html_(), bars=bars)


def check_writable(path: str) -> Path:
    """Return the file that a report is to be written to.

    Raises
    ------
    UsageError
        When it is neither JSON nor HTML, or its folder is not there.
    """
    file = Path(path)
    if file.suffix not in (".json", ".html"):
        raise UsageError(f"--output {path}: a report is written as .json or .html.")
    if not file.parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {file.parent}.")
    return file


def write(report: Report, file: Path) -> None:
    """Write a report in the format that the file's name says.

    Raises
    ------
    UsageError
        When it cannot be written.
    """
    text = as_page(report) if file.suffix == ".html" else as_json(report) + "\n"
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}.") from None


def read(path: str) -> Report:
    """Read a report that was written as JSON.

    Raises
    ------
    UsageError
        When it is not there, or is no such report.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise UsageError(f"{path} is no report of openclaw benchmark --output {Path(path).stem}.json.")
    names = {each.name for each in fields(Result)}
    try:
        results = [Result(**{name: each[name] for name in names & set(each)}) for each in found["results"]]
        return Report(program=found["program"], results=results, repeat=found["repeat"], place=found["place"])
    except (KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is a damaged report: measure again.") from None


def comparison(before: Report, after: Report) -> Table:
    """Compare two reports for people."""
    changes = compared(before.results, after.results)
    rows = tuple(_changed_row(each) for each in changes)
    columns = ("setting", "workers", "samples/s before", "after", "×", "p50 ×", "p99 ×")
    notes = tuple(_differences(before, after))
    return Table(f"{before.program} before, {after.program} after", columns, rows, tuple(changes), notes)


def comparison_json(before: Report, after: Report) -> str:
    """Compare two reports for programs: ``rate``, ``p50`` and ``p99`` are after divided by before."""
    return json.dumps([asdict(each) for each in compared(before.results, after.results)], indent=2)


def _differences(before: Report, after: Report) -> list[str]:
    """Say what else is different, since it may be the reason."""
    names = [*before.place, *(name for name in after.place if name not in before.place)]
    return [
        f"{name} is not the same: {before.place.get(name, '-')} before, {after.place.get(name, '-')} after"
        for name in names
        if before.place.get(name) != after.place.get(name)
    ]


def _row(result: Result) -> tuple[str, ...]:
    numbers = (
        _number(result.samples_per_second, ",.0f"),
        _number(result.p50_ms, ".2f"),
        _number(result.p99_ms, ".2f"),
        _number(result.speedup, ".2f"),
        _number(result.efficiency, ".0%"),
    )
    return result.setting, str(result.workers), *numbers


def _changed_row(change: Change) -> tuple[str, ...]:
    rates = (_rate(change.before), _rate(change.after))
    ratios = (change.rate, change.p50, change.p99)
    return change.setting, str(change.workers), *rates, *(_number(each, ".2f") for each in ratios)


def _rate(result: Result | None) -> str:
    return _number(None if result is None else result.samples_per_second, ",.0f")


def _number(value: Any, how: str) -> str:
    return "-" if value is None else format(value, how)
