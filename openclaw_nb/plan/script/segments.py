"""Cuts a script into what runs as it stands and the statements that train, in the order in which they run.

    import …; def train …        ─┐
    def main():                   │
        model = …; optimizer = … ─┴─> plain      lines keep their numbers
        for epoch in …: train(…) ───> trains
        save(…)                  ───> plain
    if __name__ == "__main__":
        main()

A strategy needs the model, optimizer and loaders to exist when the training begins: so each training statement is a
piece of its own, and functions such as `main` that build and train are taken apart. Pure: text in, pieces out; does not
know workers or files.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from openclaw_nb.core.errors import UsageError
from openclaw_nb.plan.script.hoist import (
    DROPPED,
    CannotHoist,
    Hoisted,
    Scopes,
    Sink,
    called,
    hoist,
    last_exit,
    names_read,
    same_arguments,
)
from openclaw_nb.plan.script.text import Lines, ProgramText, joined
from openclaw_nb.plan.script.training import Training

_ENOUGH = 16  # functions that call each other in a circle end here


@dataclass(frozen=True)
class Segment:
    """A piece of a program.

    Attributes
    ----------
    source : str
        Its code, at the line numbers of the program.
    line : int
        Its first line.
    trains : bool
        Whether it is to run under the strategy.
    """

    source: str
    line: int
    trains: bool = False


@dataclass
class _Piece:
    lines: Lines
    trains: bool


@dataclass(frozen=True)
class _Frame:
    """A body that is walked: what is changed in it, and what runs after it."""

    hoisted: Hoisted | None = None
    after: Sequence[ast.stmt] = ()
    depth: int = 0

    @property
    def sink(self) -> Sink:
        return DROPPED if self.hoisted is None else self.hoisted.sink


def cut_script(source: str, name: str, beside: Mapping[str, str] | None = None) -> list[Segment]:
    """Cut a script.

    Parameters
    ----------
    source : str
        The script.
    name : str
        Its name, for messages.
    beside : mapping of str to str, optional
        Source of the modules that it imports and that are the person's own, by the name that it is imported under.

    Returns
    -------
    list of Segment
        In the order in which they run.

    Raises
    ------
    SyntaxError
        When it is no Python.
    UsageError
        When it trains in a way that no strategy can take part in.
    """
    tree = ast.parse(source)
    trees = [tree, *map(ast.parse, (beside or {}).values())]
    modules = frozenset(beside or {})
    training = Training(trees, modules, _foreign(tree, modules))
    return _Cutter(source, tree, name, training).cut()


def cut_cell(source: str, name: str, training: Training) -> list[Segment]:
    """Cut a notebook's cell; functions that it calls stay whole. See `cut_script`."""
    return _Cutter(source, ast.parse(source), name, training, takes_apart=False).cut()


@dataclass
class _Cutter:
    source: str
    tree: ast.Module
    name: str
    training: Training
    takes_apart: bool = True
    _pieces: list[_Piece] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._text = ProgramText(self.source)
        self._scopes = Scopes(self.source)
        self._functions = {each.name: each for each in self.tree.body if isinstance(each, ast.FunctionDef)}

    def cut(self) -> list[Segment]:
        self._walk(self.tree.body, _Frame())
        merged = list(_merged(self._pieces))
        return [Segment(joined(each.lines), min(each.lines), each.trains) for each in merged]

    def _walk(self, body: list[ast.stmt], frame: _Frame) -> None:
        groups = list(_by_lines(body))
        for place, group in enumerate(groups):
            rest = [each for later in groups[place + 1 :] for each in later]
            inside = _Frame(frame.hoisted, [*rest, *frame.after], frame.depth)
            if len(group) == 1 and (guarded := _guarded(group[0])):
                self._walk(guarded, inside)
            elif len(group) != 1 or not self._take_apart(group[0], inside):
                self._add(group, inside)

    def _add(self, group: list[ast.stmt], frame: _Frame) -> None:
        trains = any(map(self.training.trains, group))
        if trains and any(map(self.training.builds, group)):
            raise UsageError(self._builds_itself(group[0]))
        edits = [
            *(frame.hoisted.edits if frame.hoisted else ()),
            *([] if frame.after else last_exit(group[-1])),
        ]
        self._pieces.append(_Piece(self._text.cut(group, edits), trains))

    def _take_apart(self, statement: ast.stmt, frame: _Frame) -> bool:
        """Put the body of a function that builds and trains in the place of its call, if this is one."""
        found = called(statement, frame.sink) if self.takes_apart and frame.depth < _ENOUGH else None
        if found is None or not isinstance(found[0].func, ast.Name):
            return False
        call, sink = found
        function = self._functions.get(found[0].func.id)
        if function is None or not any(map(self.training.trains, function.body)):
            return False
        must = any(map(self.training.builds, function.body)) or not (call.args or call.keywords)
        if not must and not self._uses_its_own(function):
            return False
        try:
            self._check_names(call, function, frame.after)
            hoisted = hoist(call, function, sink, is_last=not frame.after)
        except CannotHoist as why:
            if any(map(self.training.builds, function.body)):
                raise UsageError(self._cannot(statement, function, str(why))) from None
            return False
        if hoisted.parameters:
            self._pieces.append(_Piece({function.lineno: hoisted.parameters}, False))
        self._walk(function.body, _Frame(hoisted, frame.after, frame.depth + 1))
        return True

    def _uses_its_own(self, function: ast.FunctionDef) -> bool:
        """Whether its training reads what it has made by itself."""
        trains = [each for each in function.body if self.training.trains(each)]
        made = {
            target.id
            for each in function.body
            if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)
            for target in each.targets
            if isinstance(target, ast.Name)
        }
        return bool(names_read(trains) & made)

    def _check_names(self, call: ast.Call, function: ast.FunctionDef, after: Sequence[ast.stmt]) -> None:
        own = self._scopes.bound_by(function) - same_arguments(call, function)
        others = self._scopes.read_outside(function) | names_read(list(after))
        if both := sorted(own & others):
            raise CannotHoist(
                f"`{both[0]}` is a variable of {function.name}() and means something else outside of it: give one of "
                "them another name"
            )

    def _cannot(self, statement: ast.stmt, function: ast.FunctionDef, why: str) -> str:
        return (
            f"{self.name}, line {statement.lineno}: {function.name}() builds the optimizer and trains, so its body has "
            f"to run in place of this call, and that cannot be: {why}."
        )

    def _builds_itself(self, statement: ast.stmt) -> str:
        return (
            f"{self.name}, line {statement.lineno}: this statement builds the optimizer and trains with it, and a "
            "strategy has to see model and optimizer before the training begins. Build them in a statement of their "
            "own above it."
        )


def _by_lines(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Yield statements, those that share a line together."""
    group: list[ast.stmt] = []
    for statement in body:
        if group and statement.lineno > (group[-1].end_lineno or 0):
            yield group
            group = []
        group.append(statement)
    if group:
        yield group


def _merged(pieces: Sequence[_Piece]) -> Iterator[_Piece]:
    """Yield pieces, neighbours that run as they stand as one where their lines are in order."""
    before: _Piece | None = None
    for piece in pieces:
        in_order = before is not None and max(before.lines) < min(piece.lines)
        if before is not None and in_order and not (before.trains or piece.trains):
            before = _Piece({**before.lines, **piece.lines}, False)
            continue
        if before is not None:
            yield before
        before = piece
    if before is not None:
        yield before


def _guarded(statement: ast.stmt) -> list[ast.stmt]:
    """Return what stands under ``if __name__ == "__main__":``; nothing for other statements."""
    match statement:
        case ast.If(
            test=ast.Compare(
                left=ast.Name(id="__name__"), ops=[ast.Eq()], comparators=[ast.Constant(value="__main__")]
            ),
            orelse=[],
        ):
            return statement.body
    return []


def _foreign(tree: ast.Module, modules: frozenset[str]) -> frozenset[str]:
    """Return the names of imported modules that are not among the person's own."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname or each.name.partition(".")[0] for each in node.names}
    return frozenset(found - modules)
