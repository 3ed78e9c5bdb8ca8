"""The error of a cell that did not end well, as a person should read it.

    RunResult ──> one exception: the first cause as it was drawn on its rank, one line on what it did to the
                  other ranks, and who waited where

Pure: knows how a run ended and the names that the notebook has; does not run or show anything.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TypeVar

from openclaw_nb.cluster.launch import SET_ENDED
from openclaw_nb.cluster.run import RunResult
from openclaw_nb.core import errors
from openclaw_nb.core.errors import (
    CellInterrupted,
    ClusterError,
    GroupError,
    OpenClawError,
    RemoteCellError,
    UsageError,
    WorkerDiedError,
)
from openclaw_nb.core.text import aligned
from openclaw_nb.notebook.merge import label
from openclaw_nb.notebook.targets import Place
from openclaw_nb.protocol.messages import Failed

_ANSI = re.compile(r"\x1b\[[\d;]*m")
_CELL_LINE = re.compile(r"(?:Cell In\[\d+\]|<ipython-input-[^>]*>|<cell>).{0,20}?line (\d+)")
_UNDEFINED = re.compile(r"name '(\w+)' is not defined")
# What the end of a group does to a rank that had no part in the cause.
_AFTERMATH = {"ReleasedError", "KeyboardInterrupt", "CancelledError", "RuntimeError", "DistBackendError"}

ErrorT = TypeVar("ErrorT", bound=OpenClawError)


class CellError(RemoteCellError):
    """A cell raised on a worker.

    Attributes
    ----------
    ranks : tuple of int
        Where the error was raised; the first is the one whose traceback this is.
    error_type : str
        Name of its class on the worker.
    line : int or None
        The cell's line.
    remote_traceback : tuple of str
        As the worker drew it, with colour codes.
    """

    ranks: tuple[int, ...] = ()
    error_type: str = ""
    line: int | None = None
    remote_traceback: tuple[str, ...] = ()


def drawn(error: ErrorT, lines: Sequence[str] | None = None) -> ErrorT:
    """Let IPython show these lines for an error, and no frames of this package; by default its message."""
    shown = list(lines) if lines is not None else [_titled(error)]
    vars(error)["_render_traceback_"] = functools.partial(list, shown)
    return error


def cell_error(
    result: RunResult,
    places: Mapping[int, Place],
    notebook: Mapping[str, object] | None = None,
    *,
    replaced: bool = True,
) -> OpenClawError:
    """Build the error of a run that did not end well.

    Parameters
    ----------
    result : RunResult
        How the run ended; not ``ok``.
    places : mapping of int to Place
        Where each rank of the group is.
    notebook : mapping, optional
        Variables of the notebook, for the advice to push one.
    replaced : bool
        Whether a new process takes the place of a worker that died; if not, one death has ended all.
    """
    if result.left:
        return drawn(ClusterError(result.cause))
    deaths = _deaths(result, places, replaced)
    if result.died and not replaced:  # what the death did to the others is no news: they are gone as well
        result = replace(result, failures={r: f for r, f in result.failures.items() if not f.consequence})
    if result.interrupted:
        return _interrupted(result)
    if result.first is not None:
        return _raised(result, result.first, places, notebook or {}, deaths)
    if result.died:
        return _summed_up(WorkerDiedError, deaths[0], result)
    if result.cause:
        return _summed_up(GroupError, f"{result.cause}. The cell was ended on every rank.", result)
    return _summed_up(GroupError, _cut_off(result), result)


# -------------------------------------------------------------------------------------------- a rank raised


def _raised(
    result: RunResult,
    first: int,
    places: Mapping[int, Place],
    notebook: Mapping[str, object],
    deaths: Sequence[str],
) -> OpenClawError:
    failed = result.failures[first]
    kind = getattr(errors, failed.error_type, None)
    if isinstance(kind, type) and issubclass(kind, UsageError):
        return _refused(kind, failed)
    ranks = [rank for rank, other in result.failures.items() if _same(other, failed)]
    header = f"{_who(ranks, places)} raised"
    around = [*_also_raised(result, ranks), *_released(result, ranks), *deaths, *_still_inside(result)]
    if hint := _push_hint(failed, notebook):
        around.append(hint)
    line = cell_line(failed.traceback)
    at = f" (line {line})" if line else ""
    error = CellError("\n".join([f"{header} {failed.error_type}: {failed.message}{at}", *around]))
    error.ranks = (first, *(rank for rank in ranks if rank != first))
    error.error_type, error.line = failed.error_type, line
    error.remote_traceback = tuple(failed.traceback)
    body = failed.traceback or [f"{failed.error_type}: {failed.message}"]
    return drawn(error, [f"{header}:", *body, *_below([*around, *_table(result)])])


def _below(lines: list[str]) -> list[str]:
    return ["", *lines] if lines else []


def _same(one: Failed, other: Failed) -> bool:
    return (one.error_type, one.message) == (other.error_type, other.message)


def _refused(kind: type[UsageError], failed: Failed) -> OpenClawError:
    """An error that is about what was asked: its message says it, frames would not."""
    line = cell_line(failed.traceback)
    return drawn(kind(failed.message + (f" (line {line})" if line else "")))


def cell_line(traceback: Sequence[str]) -> int | None:
    """Return the cell's line that a drawn traceback names last, or None."""
    found = _CELL_LINE.findall(_ANSI.sub("", "\n".join(traceback)))
    return int(found[-1]) if found else None


def _who(ranks: Sequence[int], places: Mapping[int, Place]) -> str:
    if len(ranks) == 1:
        place = places.get(ranks[0])
        return f"rank {ranks[0]} of {len(places)}" + (f" ({place.device})" if place else "")
    return f"{label(ranks, 2)} of {len(places)}" if len(ranks) < len(places) else label(ranks, 2)


def _also_raised(result: RunResult, ranks: Sequence[int]) -> list[str]:
    others = {rank: failed for rank, failed in result.failures.items() if rank not in ranks}
    return [
        f"rank {rank} raised {failed.error_type}: {failed.message}"
        for rank, failed in others.items()
        if not failed.consequence or failed.error_type not in _AFTERMATH
    ]


def _push_hint(failed: Failed, notebook: Mapping[str, object]) -> str:
    found = _UNDEFINED.search(failed.message) if failed.error_type == "NameError" else None
    if found is None or found[1] not in notebook:
        return ""
    if isinstance(notebook[found[1]], ModuleType):
        return f"`{found[1]}` is imported in the notebook: import it in a cell that runs on the workers, too."
    return f"`{found[1]}` exists in the notebook: %openclaw push {found[1]}"


# ------------------------------------------------------------------------------ what it did to other ranks


def _released(result: RunResult, ranks: Sequence[int]) -> list[str]:
    released = [
        rank
        for rank, failed in result.failures.items()
        if rank not in ranks and failed.consequence and failed.error_type in _AFTERMATH
    ]
    if not released:
        return []
    were = "was" if len(released) == 1 else "were"
    return [f"{label(released, 2)} {were} released after {result.release_seconds:.2f} s; variables kept."]


def _deaths(result: RunResult, places: Mapping[int, Place], replaced: bool) -> list[str]:
    if not result.died:
        return []
    died = result.died if replaced else result.died[:1]
    names = [f"{p.worker} on {p.device}" for rank in died if (p := places.get(rank))]
    where = f" ({', '.join(names)})" if names else ""
    who = f"{label(died, 2)} of {len(places)}{where} died"
    if not replaced:
        return [f"{who}. {SET_ENDED}"]
    if len(died) == 1:
        takes = "A new process takes its place; the variables it had are gone"
    else:
        takes = "New processes take their place; the variables they had are gone"
    return [f"{who}. {takes}: run the cells that build them again, or %openclaw push them."]


def _still_inside(result: RunResult) -> list[str]:
    if not result.busy:
        return []
    where = {rank: f" ({place})" for rank, _, place in result.table if place}
    inside = ", ".join(f"rank {rank}{where.get(rank, '')}" for rank in result.busy)
    be = "is" if len(result.busy) == 1 else "are"
    return [
        f"Still inside the cell {be}: {inside}, probably in native code. Wait: the group is whole again when "
        "it is left. Or %openclaw reset --replace: a new process takes its place, without variables."
    ]


def _table(result: RunResult) -> list[str]:
    """Say who waited where when the cell was ended, if anybody waited."""
    if not any(doing.startswith("waits") for _, doing, _ in result.table):
        return []
    return ["When it was ended:", waiting_text(result.table)]


def waiting_text(rows: Sequence[tuple[int, str, str]]) -> str:
    """Set the rows of a who-waits-where table below each other."""
    return aligned([(f"rank {rank}", doing, line) for rank, doing, line in rows], indent="  ")


# -------------------------------------------------------------------------------------------- nobody raised


def _interrupted(result: RunResult) -> OpenClawError:
    message = f"Stopped after {result.seconds:.1f} s; variables kept."
    if not result.busy:
        return drawn(CellInterrupted(message))
    return _summed_up(CellInterrupted, f"Stopped after {result.seconds:.1f} s.", result)


def _summed_up(kind: type[OpenClawError], message: str, result: RunResult) -> OpenClawError:
    """Build an error of a head line, what became of the ranks, and who waited where."""
    lost = [] if kind is CellInterrupted else _released(result, ())
    lines = [_capital(line) for line in (message, *lost, *_still_inside(result))]
    error = kind(" ".join(lines))
    return drawn(error, [f"{_coloured(kind.__name__)}: {lines[0]}", *lines[1:], *_table(result)])


def _cut_off(result: RunResult) -> str:
    """Say what the ranks themselves say, where nobody ended the cell."""
    told = [f"rank {rank}: {failed.message}" for rank, failed in result.failures.items() if failed.message]
    return "; ".join(["the cell did not end on every rank", *told]) + "."


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _titled(error: BaseException) -> str:
    return f"{_coloured(type(error).__name__)}: {error}"


def _coloured(name: str) -> str:
    return f"\x1b[31m{name}\x1b[39m"
