"""Variables from the notebook to the workers and back, and what to say about them.

    push: notebook ──> every worker
    pull: one rank (and whether the others have the same) | all ranks as a list | all ranks combined

A value that differs between ranks is never passed off as the value of all: which ranks differ is said, and
by how much where that can be told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from openclaw_nb.core.errors import UnknownNameError, UsageError, unknown_name
from openclaw_nb.core.text import size_text
from openclaw_nb.notebook.difference import difference, is_numeric
from openclaw_nb.notebook.merge import label
from openclaw_nb.notebook.tables import Table

DIFFERENCE_LIMIT_BYTES = 256 * 1024**2


class Variables(Protocol):
    """The part of a master that moves variables."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def push(
        self,
        variables: Mapping[str, Any],
        targets: Sequence[int] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Copy variables to ranks; return their size in bytes."""

    def pull(self, names: Sequence[str], rank: int = 0) -> dict[str, Any]:
        """Return variables of a rank."""

    def compare(
        self, names: Sequence[str], targets: Sequence[int] | None = None
    ) -> dict[str, dict[int, dict[str, Any]]]:
        """Return type, digest and size of each variable by rank."""


def push(
    master: Variables,
    names: Sequence[str],
    namespace: Mapping[str, Any],
    targets: Sequence[int] | None,
    progress: Callable[[int, int], None] | None = None,
) -> Table:
    """Copy variables of the notebook to the workers.

    Raises
    ------
    UnknownNameError
        For a name that the notebook does not have; nothing is sent then.
    UsageError
        For a value that cannot be pickled; nothing is sent then.
    """
    if not names:
        raise UsageError("Name the variables to push: %openclaw push x y")
    for name in names:
        if name not in namespace:
            visible = [n for n in namespace if not n.startswith("_")]
            raise unknown_name("variable in the notebook", name, visible)
    values = {name: namespace[name] for name in names}
    size_bytes = master.push(values, targets, progress)
    where = label(list(range(master.world_size)) if targets is None else targets, 2)
    rows = tuple((name, type(value).__name__) for name, value in values.items())
    return Table(f"Pushed {size_text(size_bytes)} to {where}", ("name", "type"), rows, tuple(values))


# ------------------------------------------------------------------------------------------------------ pull


def pull(master: Variables, names: Sequence[str], rank: int) -> tuple[dict[str, Any], Table]:
    """Bring variables of one rank; return them and what to say about the other ranks.

    Raises
    ------
    UnknownNameError
        For a name that the rank does not have.
    UsageError
        For a value that cannot be pickled.
    """
    _require_names(names)
    values = master.pull(names, rank)
    notes = _compare(master, rank, values)
    rows = tuple((name, type(values[name]).__name__, notes[name]) for name in names)
    return values, Table(f"Pulled from rank {rank}", ("name", "type", "other ranks"), rows, tuple(names))


def pull_all(master: Variables, names: Sequence[str]) -> tuple[dict[str, list[Any]], Table]:
    """Bring variables of all ranks as lists by rank."""
    _require_names(names)
    by_rank = [_pull_from(master, names, rank) for rank in range(master.world_size)]
    lists = {name: [values[name] for values in by_rank] for name in names}
    rows = tuple(
        (name, f"list of {len(by_rank)} {type(values[0]).__name__}") for name, values in lists.items()
    )
    return lists, Table("Pulled from every rank, in order of ranks", ("name", "type"), rows, tuple(names))


def pull_reduced(master: Variables, names: Sequence[str], how: str) -> tuple[dict[str, Any], Table]:
    """Bring the sum or the mean of variables over all ranks."""
    lists, _ = pull_all(master, names)
    values = {name: reduce(name, items, how) for name, items in lists.items()}
    rows = tuple((name, type(value).__name__) for name, value in values.items())
    title = f"Pulled the {how} over {master.world_size} ranks"
    return values, Table(title, ("name", "type"), rows, tuple(names))


def _require_names(names: Sequence[str]) -> None:
    if not names:
        raise UsageError("Name the variables to pull: %openclaw pull x y")


def _pull_from(master: Variables, names: Sequence[str], rank: int) -> dict[str, Any]:
    try:
        return master.pull(names, rank)
    except UnknownNameError as error:
        raise UnknownNameError(f"Rank {rank}: {error}") from None


def reduce(name: str, values: Sequence[Any], how: str) -> Any:
    """Return the sum or mean of one variable's values by rank.

    Raises
    ------
    UsageError
        When they are not numbers, arrays or tensors of one shape.
    """
    shapes = {tuple(getattr(value, "shape", ())) for value in values}
    if len(shapes) > 1:
        shown = ", ".join(str(list(getattr(value, "shape", ()))) for value in values)
        raise UsageError(
            f"{name!r} has another shape on each rank ({shown}): it has no {how}. Use --from all."
        )
    if not all(is_numeric(value) for value in values):
        kind = type(values[0]).__name__
        raise UsageError(
            f"{name!r} is a {kind}: only numbers, arrays and tensors have a {how}. Use --from all."
        )
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total / len(values) if how == "mean" else total


# ------------------------------------------------------------------------------------------ what is different


def _compare(master: Variables, rank: int, values: Mapping[str, Any]) -> dict[str, str]:
    """Say of each variable in words how it is on the other ranks."""
    others = [other for other in range(master.world_size) if other != rank]
    if not others:
        return dict.fromkeys(values, "")
    described = _describe(master, list(values))
    return {name: _others(master, name, value, rank, described[name]) for name, value in values.items()}


def _describe(master: Variables, names: Sequence[str]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return what each rank says of each variable; ranks that do not have it are left out."""
    try:
        return master.compare(names)
    except UnknownNameError:
        return {name: _describe_one(master, name) for name in names}


def _describe_one(master: Variables, name: str) -> dict[int, dict[str, Any]]:
    found = {}
    for rank in range(master.world_size):
        with contextlib.suppress(UnknownNameError):
            found[rank] = master.compare([name], [rank])[name][rank]
    return found


def _others(
    master: Variables, name: str, value: Any, rank: int, described: Mapping[int, Mapping[str, Any]]
) -> str:
    missing = [other for other in range(master.world_size) if other not in described]
    notes = [f"missing on {label(missing, 2)}"] if missing else []
    digests = {other: found["digest"] for other, found in described.items()}
    different = [other for other, digest in digests.items() if digest != digests.get(rank)]
    if "" in digests.values():
        notes.append("not compared: whether they are equal cannot be told")
    elif different:
        size_bytes = sum(int(found["size_bytes"]) for found in described.values())
        amount = _amount(master, name, value, different) if size_bytes < DIFFERENCE_LIMIT_BYTES else ""
        notes.append(f"differs on {label(different, 2)}{amount}")
    return "; ".join(notes) or "the same"


def _amount(master: Variables, name: str, value: Any, ranks: Sequence[int]) -> str:
    amounts = [difference(value, master.pull([name], rank)[name]) for rank in ranks]
    known = [amount for amount in amounts if amount is not None]
    # An amount of 0 would say "equal" of values that are not: a difference too small for a float.
    return f" by up to {max(known):.6g}" if len(known) == len(amounts) and max(known) > 0 else ""
