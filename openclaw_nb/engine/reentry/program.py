"""A cell as a program that can be entered at the head of an iteration of one of its loops.

    tree ──> `watch`  each loop of the cell asks the keeper of its loops for its items, under its number
         └─> `enter`  a program that goes on at the head of one loop, inside the iterations of those around it

A loop around the place is kept whole, so that ``break``, ``continue`` and ``else`` do what they did: its first
iteration runs what is left of the body, the others all of it. Only loops of the cell itself count, not those in its
functions and classes.

Knows syntax trees; the keeper at run time is `loops.Loops`.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence

from openclaw_nb.core.errors import RefusedError

KEEPER = "__openclaw_loops__"
ITEM = "__openclaw_item__"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
# What passes its argument's items on, one for one, and does not look into them.
_PASSES_ON = frozenset({"enumerate", "islice", "range", "reversed", "tqdm", "trange", "zip"})
# What is the same when it is evaluated once more.
_LOOKS = frozenset({"count", "items", "keys", "len", "values"})

Loop = ast.For | ast.While


def loops_of(tree: ast.Module) -> list[Loop]:
    """Return the cell's own loops in the order of the text; a loop's number is its place here."""
    return [node for node in _own_nodes(tree) if isinstance(node, Loop)]


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _SCOPES):
            yield child
            yield from _own_nodes(child)


def path_to(tree: ast.Module, number: int) -> list[int]:
    """Return the numbers of the loops around a loop, outermost first, and its own."""
    loops = loops_of(tree)
    target = loops[number]
    return [n for n, loop in enumerate(loops) if loop is target or _repeats(loop, target)]


def _repeats(loop: Loop, target: Loop) -> bool:
    """Whether ``target`` runs in each iteration of ``loop``, not in its ``else``."""
    return any(node is target for child in loop.body for node in (child, *_own_nodes(child)))


def passes_on(loop: Loop) -> bool:
    """Whether a loop's head may be evaluated once more, and items of a loader in it reach the loop one for one.

    A placeholder may then stand for those that are skipped.
    """
    if isinstance(loop, ast.While):
        return True
    for node in ast.walk(loop.iter):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name not in _PASSES_ON | _LOOKS:
                return False
        elif isinstance(node, ast.Lambda | ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp):
            return False
    return True


def values_in_head(loop: Loop) -> list[ast.expr]:
    """Return the names and attributes that a loop's head reads, but for what it calls."""
    return [] if isinstance(loop, ast.While) else list(_values(loop.iter))


def _values(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Name | ast.Attribute):
        yield node
        return
    called = node.func if isinstance(node, ast.Call) else None
    for child in ast.iter_child_nodes(node):
        if child is not called:
            yield from _values(child)


def watch(tree: ast.Module) -> ast.Module:
    """Return the cell with its loops watched."""
    return _finished(_Program(tree).watched(tree.body), tree)


def enter(tree: ast.Module, number: int) -> ast.Module:
    """Return the program that goes on at the head of loop ``number``, with its loops watched.

    Raises
    ------
    RefusedError
        When the loop is where no program can be entered, in an ``except`` block.
    """
    return _finished(_Program(tree).entered(tree.body, path_to(tree, number)), tree)


def enter_anew(tree: ast.Module, number: int) -> ast.Module:
    """Return the program of `enter` for a process in which nothing of the cell has run.

    What the cell imports and defines at its top level, before the loop, comes first.
    """
    entered = enter(tree, number)
    first = loops_of(tree)[path_to(tree, number)[0]].lineno
    made = [node for node in tree.body if isinstance(node, _DEFINES) and node.lineno < first]
    return _finished([*made, *entered.body], tree)


def _finished(body: list[ast.stmt], tree: ast.Module) -> ast.Module:
    return ast.fix_missing_locations(ast.Module(body=body, type_ignores=tree.type_ignores))


class _Program:
    """Makes programs of one cell's statements; what it is given stays as it is."""

    def __init__(self, tree: ast.Module) -> None:
        self._numbers = {id(loop): number for number, loop in enumerate(loops_of(tree))}

    # ------------------------------------------------------------------------------------ watched

    def watched(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        return [self._watched(statement) for statement in statements]

    def _watched(self, statement: ast.stmt) -> ast.stmt:
        """Return a copy in which the loops, at any depth, are watched."""
        loops = [node for node in (statement, *_own_nodes(statement)) if isinstance(node, Loop)]
        if isinstance(statement, _SCOPES) or not loops:
            return statement
        memo: dict[int, object] = {}
        copied = copy.deepcopy(statement, memo)
        for loop in loops:
            twin = memo[id(loop)]
            number = self._numbers[id(loop)]
            if isinstance(twin, ast.For):
                twin.iter = _call("over", number, *_items(twin))
            elif isinstance(twin, ast.While):
                twin.test = _both(_call("again", number), twin.test)
        return copied

    # ------------------------------------------------------------------------------------ entered

    def entered(self, statements: Sequence[ast.stmt], path: Sequence[int]) -> list[ast.stmt]:
        """Return what is left of the statements, from the head of the path's last loop on."""
        for place, statement in enumerate(statements):
            if self._holds(statement, path[0]):
                return [*self._enter(statement, path), *self.watched(statements[place + 1 :])]
        raise AssertionError("the path does not lead through these statements")

    def _holds(self, node: ast.AST, number: int) -> bool:
        return any(self._numbers.get(id(inner)) == number for inner in (node, *_own_nodes(node)))

    def _enter(self, statement: ast.stmt, path: Sequence[int]) -> list[ast.stmt]:
        if isinstance(statement, Loop) and self._numbers[id(statement)] == path[0]:
            return [self._watched(statement) if len(path) == 1 else self._resumed(statement, path)]
        match statement:
            case ast.If(body=body, orelse=orelse):
                return self.entered(body if self._leads(body, path) else orelse, path)
            case ast.Match(cases=cases):
                return self.entered(next(c.body for c in cases if self._leads(c.body, path)), path)
            case ast.With() | ast.AsyncWith():
                return [_with(statement, body=self.entered(statement.body, path))]
            case ast.Try() | ast.TryStar():
                return self._enter_try(statement, path)
            case ast.For(orelse=orelse) | ast.While(orelse=orelse):  # the loop itself is over
                return self.entered(orelse, path)
        raise RefusedError(f"line {statement.lineno} cannot be entered")

    def _leads(self, statements: Sequence[ast.stmt], path: Sequence[int]) -> bool:
        return any(self._holds(statement, path[0]) for statement in statements)

    def _enter_try(self, statement: ast.Try | ast.TryStar, path: Sequence[int]) -> list[ast.stmt]:
        handlers = [self._watched_handler(handler) for handler in statement.handlers]
        last = self.watched(statement.finalbody)
        if self._leads(statement.body, path):
            body, orelse = self.entered(statement.body, path), self.watched(statement.orelse)
            return [_with(statement, body=body, handlers=handlers, orelse=orelse, finalbody=last)]
        if self._leads(statement.orelse, path):
            body = self.entered(statement.orelse, path)
            if not last:
                return body
            return [_with(statement, body=body, handlers=[], orelse=[], finalbody=last)]
        if self._leads(statement.finalbody, path):
            return self.entered(statement.finalbody, path)
        raise RefusedError(
            f"the loop is in an except block, at line {statement.lineno}: its error does not travel"
        )

    def _watched_handler(self, handler: ast.ExceptHandler) -> ast.ExceptHandler:
        twin = copy.copy(handler)
        twin.body = self.watched(handler.body)
        return twin

    def _resumed(self, loop: Loop, path: Sequence[int]) -> ast.stmt:
        """Return the loop, whose first iteration is what is left of the one that is under way."""
        number = path[0]
        rest = self.entered(loop.body, path[1:])
        whole = self.watched(loop.body)
        if isinstance(loop, ast.For):
            whole = [ast.Assign(targets=[loop.target], value=ast.Name(ITEM, ast.Load())), *whole]
        body: list[ast.stmt] = [ast.If(test=_call("is_first", number), body=rest, orelse=whole)]
        orelse = self.watched(loop.orelse)
        found: ast.stmt
        if isinstance(loop, ast.For):
            target = ast.Name(ITEM, ast.Store())
            items = _call("resumed", number, *_items(loop))
            found = ast.For(target=target, iter=items, body=body, orelse=orelse)
        else:
            again = _both(_call("again", number), copy.deepcopy(loop.test))
            test = ast.BoolOp(op=ast.Or(), values=[_call("begins", number), again])
            found = ast.While(test=test, body=body, orelse=orelse)
        return ast.copy_location(found, loop)


def _items(loop: ast.For) -> list[ast.expr]:
    """Return a loop's items and, where its head may be evaluated once more, functions of that and of what it reads."""
    binds = (ast.NamedExpr, ast.Await)
    if not passes_on(loop) or any(isinstance(node, binds) for node in ast.walk(loop.iter)):
        return [copy.deepcopy(loop.iter)]
    values = ast.Tuple([copy.deepcopy(value) for value in values_in_head(loop)], ast.Load())
    return [copy.deepcopy(loop.iter), _later(loop.iter), _later(ast.copy_location(values, loop.iter))]


def _later(value: ast.expr) -> ast.expr:
    none = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.copy_location(ast.Lambda(none, copy.deepcopy(value)), value)


def _call(method: str, number: int, *values: ast.expr) -> ast.expr:
    function = ast.Attribute(ast.Name(KEEPER, ast.Load()), method, ast.Load())
    call = ast.Call(func=function, args=[ast.Constant(number), *values], keywords=[])
    return ast.copy_location(call, values[0]) if values else call


def _both(first: ast.expr, second: ast.expr) -> ast.expr:
    return ast.copy_location(ast.BoolOp(op=ast.And(), values=[first, second]), second)


def _with(statement: ast.stmt, **fields: object) -> ast.stmt:
    """Return a copy with other fields."""
    twin = copy.copy(statement)
    for name, value in fields.items():
        setattr(twin, name, value)
    return twin
