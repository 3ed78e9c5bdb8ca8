"""What a check has found, and the report of all of them.

Pure: what is looked at is the checks' business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from openclaw_nb.core.table import Table

OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "-"
_WORST = (FAIL, WARN, OK, SKIP)


@dataclass(frozen=True)
class Finding:
    """What one check has found.

    Attributes
    ----------
    check : str
        What was looked at.
    state : str
        ``"ok"``, ``"warn"`` (works, but not well or not for long), ``"fail"`` or ``"-"`` (does not apply here).
    seen : str
        What was tried, and what was seen.
    todo : str
        What to do about it; "" where nothing is to be done.
    key : str
        The key of the configuration to change, where there is one.
    """

    check: str
    state: str
    seen: str
    todo: str = ""
    key: str = ""


Check = Callable[[], Iterable[Finding]]


def examine(checks: Iterable[tuple[str, Check]]) -> list[Finding]:
    """Make checks, each under its name; one that fails itself is a finding, and no reason to leave out the others."""
    found: list[Finding] = []
    for name, check in checks:
        try:
            found += check()
        except Exception as error:  # noqa: BLE001 - it is told as what this check has found
            todo = "This check itself went wrong: what it looks at is not known. Look at the others first."
            found.append(Finding(name, WARN, f"{type(error).__name__}: {error}", todo))
    return found


def report(findings: Iterable[Finding], about: str) -> Table:
    """Return findings as a table; its records are the findings."""
    records = tuple(findings)
    counts = {state: sum(each.state == state for each in records) for state in _WORST}
    told = ", ".join(f"{counts[state]} {state}" for state in (OK, WARN, FAIL))
    rows = tuple((each.check, _loud(each.state), each.seen) for each in records)
    todos = tuple(f"  {each.check}: {each.todo}" for each in records if each.todo)
    notes = ("", "What to do:", *todos) if todos else ()
    return Table(f"Checked {about}: {told}", ("check", "", "seen"), rows, records, notes)


def _loud(state: str) -> str:
    return state.upper() if state == FAIL else state


def failed(findings: Iterable[Finding]) -> bool:
    """Return whether anything does not work."""
    return any(each.state == FAIL for each in findings)


def as_dictionaries(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return findings for a program to read."""
    return [asdict(each) for each in findings]
