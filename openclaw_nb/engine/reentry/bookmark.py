"""Where in its loops a cell is, as a value that a checkpoint can hold, and back.

    mark   at a loop's head: how far the loops around are, and the cell's own variables that the rest of it needs
    find   in another process: the same for `program.enter` and `loops.Loops`, checked against the cell that is there

Only numbers, strings, tensors and containers of them are kept (`checkpoint.tree`), so that nothing has to be unpickled;
other variables have to be there, by the cells that build them. Knows cells, loops and names; does not know files.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openclaw_nb.core.errors import CheckpointError
from openclaw_nb.engine.checkpoint.tree import encode
from openclaw_nb.engine.objects.names import cell_names
from openclaw_nb.engine.reentry import program
from openclaw_nb.engine.reentry.loops import LoopPlace, Loops, Pass
from openclaw_nb.engine.reentry.needs import names_needed

ENDED = {"ended": True}
_OWN = frozenset({program.KEEPER, program.ITEM})


@dataclass(frozen=True)
class Bookmark:
    """Where a cell goes on.

    Attributes
    ----------
    number : int
        The loop that is entered.
    places : dict of int to LoopPlace
        How far it and those around it are.
    names : dict
        Variables of the cell.
    """

    number: int
    places: dict[int, LoopPlace]
    names: dict[str, Any]


def mark(tree: ast.Module, loops: Loops, number: int, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a cell is: at the head of loop ``number``, before its next item."""
    needed = names_needed(program.enter_anew(tree, number)) & cell_names(ast.unparse(tree)).stores
    names, left = {}, {}
    for name in sorted(needed & namespace.keys()):
        try:
            encode(namespace[name], name, {})
        except CheckpointError:
            left[name] = type(namespace[name]).__name__
        else:
            names[name] = copy.copy(namespace[name])
    places = loops.places(program.path_to(tree, number))
    return {
        "shape": shape(tree),
        "number": number,
        "loops": [[each, place.given, list(map(_written, place.passes))] for each, place in places.items()],
        "names": names,
        "left": left,
    }


def _written(one: Pass) -> dict[str, Any]:
    # The pickles are this process's own.
    return {
        "start": pickle.loads(one.start),
        "drawn_from": pickle.loads(one.drawn_from) if one.drawn_from else None,
        "given": one.given,
        "taken": one.taken,
        "is_over": one.is_over,
    }


def find(place: Mapping[str, Any], tree: ast.Module, namespace: Mapping[str, Any]) -> Bookmark:
    """Return where a cell goes on.

    Raises
    ------
    CheckpointError
        When it is another cell, or a variable that it needs is neither kept nor there.
    """
    if place["shape"] != shape(tree):
        raise CheckpointError(
            "The checkpoint was taken in a cell with other statements; only its numbers and strings may have changed. "
            "Run that cell, or leave --resume out."
        )
    number, names = place["number"], place["names"]
    there = namespace.keys() | names.keys() | _OWN
    missing = sorted(names_needed(program.enter_anew(tree, number)) - there)
    if missing:
        listed = ", ".join(f"`{name}`{_kind(name, place['left'])}" for name in missing)
        line = program.loops_of(tree)[number].lineno
        raise CheckpointError(
            f"To go on at the loop in line {line}, the cell needs {listed}, which the checkpoint could not hold. Build "
            "it in a cell of its own, before this one."
        )
    places = {
        each: LoopPlace(given, [_read(one) for one in passes]) for each, given, passes in place["loops"]
    }
    return Bookmark(number, places, names)


def _kind(name: str, left: Mapping[str, str]) -> str:
    return f" ({left[name]})" if name in left else ""


def _read(one: Mapping[str, Any]) -> Pass:
    start = pickle.dumps(one["start"], protocol=5)
    drawn = one.get("drawn_from")  # checkpoints of an older version are without it
    drawn_from = b"" if drawn is None else pickle.dumps(drawn, protocol=5)
    return Pass(start, one["given"], one["taken"], is_over=one["is_over"], drawn_from=drawn_from)


def shape(tree: ast.Module) -> str:
    """Return a digest of a cell's statements, its numbers and strings left out."""
    plain = copy.deepcopy(tree)
    for node in ast.walk(plain):
        if isinstance(node, ast.Constant):
            node.value = None
            node.kind = None
    return hashlib.blake2b(ast.dump(plain).encode(), digest_size=16).hexdigest()
