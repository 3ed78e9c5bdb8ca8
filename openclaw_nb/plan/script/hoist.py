"""A call of a function whose body is to run in its place, at the left margin: may it be, and what changes in it.

    main()   ──>   the body of main, with `return` and parameters made into assignments

A strategy has to see the model and the optimizer before the loop begins, so a `main()` that builds and trains must be
taken apart. What would mean something else then is refused. Knows Python's scopes; does not know strategies.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator
from dataclasses import dataclass

from openclaw_nb.plan.script.text import Edit

EXIT_NAME = "_openclaw_exit"
"""The variable that holds what a program that was cut ends with."""

_VALUE = "_openclaw_value"
_EXITS = frozenset({"exit", "quit"})


@dataclass(frozen=True)
class Sink:
    """What becomes of a value that a function returns.

    ``before`` stands before it; ``exits`` says that the program ends with it.
    """

    before: str
    exits: bool = False


DROPPED = Sink(f"{_VALUE} = ")
EXITS = Sink(f"{EXIT_NAME} = ", exits=True)


@dataclass(frozen=True)
class Hoisted:
    """A function's body in place of its call: the parameters' assignment, if there are any, and what is changed."""

    function: ast.FunctionDef
    parameters: str
    edits: tuple[Edit, ...]
    sink: Sink


class CannotHoist(Exception):
    """The body would mean something else in place of the call; the text says why, without an end."""


def called(statement: ast.stmt, around: Sink) -> tuple[ast.Call, Sink] | None:
    """Return the call that a statement consists of, and what becomes of its value; None for other statements.

    Parameters
    ----------
    statement : ast.stmt
        The statement.
    around : Sink
        What becomes of the value if it is a ``return``.
    """
    match statement:
        case ast.Expr(value=ast.Call(func=func, args=[ast.Call() as inner], keywords=[])) if _is_exit(func):
            return inner, EXITS
        case ast.Raise(exc=ast.Call(func=ast.Name(id="SystemExit"), args=[ast.Call() as inner])):
            return inner, EXITS
        case ast.Expr(value=ast.Call() as call):
            return call, DROPPED
        case ast.Assign(targets=[target], value=ast.Call() as call):
            return call, Sink(f"{ast.unparse(target)} = ")
        case ast.Return(value=ast.Call() as call):
            return call, around
    return None


def hoist(call: ast.Call, function: ast.FunctionDef, sink: Sink, *, is_last: bool) -> Hoisted:
    """Return how a function's body takes the place of its call.

    Parameters
    ----------
    call : ast.Call
        The call.
    function : ast.FunctionDef
        What it calls, at the program's top level.
    sink : Sink
        What becomes of its value.
    is_last : bool
        Whether the program ends with the call, so that a ``return`` in the midst may end it.

    Raises
    ------
    CannotHoist
        When it cannot.
    """
    if function.decorator_list:
        raise CannotHoist(f"{function.name}() has a decorator (line {function.decorator_list[0].lineno})")
    edits: list[Edit] = []
    for node in _own(function):
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)):
            raise CannotHoist(f"{function.name}() is a generator or a coroutine (line {node.lineno})")
        if isinstance(node, ast.Return):
            edits += _returned(node, function, sink, is_last=is_last)
    for node in ast.walk(function):
        if isinstance(node, ast.Nonlocal):
            edits.append(Edit(node.lineno, node.col_offset, node.col_offset + len("nonlocal"), "global"))
    return Hoisted(function, _bound(call, function), tuple(edits), sink)


def _returned(node: ast.Return, function: ast.FunctionDef, sink: Sink, *, is_last: bool) -> Iterator[Edit]:
    """Yield what makes a ``return`` an assignment, or the program's end."""
    start, end = node.col_offset, node.col_offset + len("return")
    is_tail = node is function.body[-1]
    if not is_tail and not is_last:
        raise CannotHoist(
            f"{function.name}() returns early (line {node.lineno}), and there is more behind its call"
        )
    if node.value is None:
        yield Edit(node.lineno, start, end, "pass" if is_tail else "raise SystemExit")
        return
    closing = node.end_lineno or node.lineno, node.end_col_offset or end  # behind brackets around the value
    opening, end_of_value = "(", ")"
    if is_tail and (is_last or not sink.exits):
        opening = f"{sink.before}("
    elif sink.exits:
        opening = "raise SystemExit("
    else:
        opening, end_of_value = "raise SystemExit((", ", None)[1])"
    yield Edit(node.lineno, start, end, opening)
    yield Edit(closing[0], closing[1], closing[1], end_of_value)


def _own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function's own scope."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


def _bound(call: ast.Call, function: ast.FunctionDef) -> str:
    """Write the assignment of a call's arguments to the function's parameters, as Python itself matches them."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    rest = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    names = [each.arg for each in (*every, *rest)]
    if not names:
        return ""
    for each in (*every, *rest):
        each.annotation = None  # a lambda has none
    listed = ", ".join(names) + ","
    given = ", ".join(map(ast.unparse, (*call.args, *call.keywords)))
    return f"{listed} = (lambda {ast.unparse(arguments)}: ({listed}))({given})"


def last_exit(statement: ast.stmt) -> list[Edit]:
    """Return what makes of a program's last statement, ``sys.exit(x)``, an assignment; nothing for others.

    A rank that exits earlier than the others would end them, whatever they still have to write.
    """
    match statement:
        case ast.Expr(value=ast.Call(func=func, args=[_], keywords=[])) if _is_exit(func):
            pass
        case ast.Raise(
            exc=ast.Call(func=ast.Name(id="SystemExit") as func, args=[_], keywords=[]), cause=None
        ):
            pass
        case _:
            return []
    return [Edit(statement.lineno, statement.col_offset, func.end_col_offset or 0, EXITS.before)]


def _is_exit(func: ast.expr) -> bool:
    match func:
        case ast.Attribute(value=ast.Name(id="sys"), attr="exit"):
            return True
        case ast.Name(id=name):
            return name in _EXITS
    return False


# ------------------------------------------------------------------------------------------------ names


class Scopes:
    """Which names a program's functions bind, and which they read from the module or from Python.

    Parameters
    ----------
    source : str
        The program.
    """

    def __init__(self, source: str) -> None:
        self._top = symtable.symtable(source, "<script>", "exec")

    def bound_by(self, function: ast.FunctionDef) -> set[str]:
        """Return the names that are a function's own: parameters and what it binds."""
        table = self._table(function)
        return {each.get_name() for each in table.get_symbols() if each.is_local() or each.is_parameter()}

    def read_outside(self, function: ast.FunctionDef) -> set[str]:
        """Return the names that functions other than this one read from the module, or that are Python's."""
        return self._read(self._top, self._table(function), at_top=True)

    def _table(self, function: ast.FunctionDef) -> symtable.SymbolTable:
        return next(
            each
            for each in self._top.get_children()
            if each.get_name() == function.name and each.get_lineno() == function.lineno
        )

    def _read(self, table: symtable.SymbolTable, but: symtable.SymbolTable, *, at_top: bool) -> set[str]:
        found = set()
        if not at_top:
            found = {
                each.get_name() for each in table.get_symbols() if each.is_global() and each.is_referenced()
            }
        for child in table.get_children():
            if child.get_id() != but.get_id():
                found |= self._read(child, but, at_top=False)
        return found


def names_read(statements: list[ast.stmt]) -> set[str]:
    """Return the names that statements read, but for Python's own."""
    return {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    } - set(vars(builtins))


def same_arguments(call: ast.Call, function: ast.FunctionDef) -> set[str]:
    """Return the parameters that get the variable of their own name."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    given = [*zip(names, call.args, strict=False), *((each.arg, each.value) for each in call.keywords)]
    return {name for name, value in given if name and isinstance(value, ast.Name) and value.id == name}
