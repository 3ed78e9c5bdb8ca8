"""Which names a program reads that it has not surely bound itself before: those it has to be given.

Errs on the side of more: what is bound only in a branch, a loop or a ``try`` does not count as bound after it.

Knows syntax trees; does not know what the names stand for.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def names_needed(tree: ast.Module) -> set[str]:
    """Return the global names that a program must be given; builtins are left out unless it binds them, too."""
    visitor = _Needs()
    visitor.visit(tree)
    return visitor.needed - (set(vars(builtins)) - _stores(tree))


class _Needs(ast.NodeVisitor):
    def __init__(self) -> None:
        self.needed: set[str] = set()
        self._bound: set[str] = set()

    def _read(self, names: Iterable[str]) -> None:
        self.needed.update(set(names) - self._bound)

    def _visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    @contextmanager
    def _branch(self) -> Iterator[None]:
        """Let what is bound inside not count afterwards."""
        before = set(self._bound)
        yield
        self._bound = before

    # ------------------------------------------------------------------------------------ names

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._read([node.id])
        elif isinstance(node.ctx, ast.Store):
            self._bound.add(node.id)
        else:
            self._read([node.id])
            self._bound.discard(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._visit_all([node.value, *node.targets])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._visit_all([node.value, node.target])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._read([node.target.id])
        self._visit_all([node.value, node.target])

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._visit_all([node.value, node.target])

    def visit_alias(self, node: ast.alias) -> None:
        self._bound.add(node.asname or node.name.partition(".")[0])

    # ----------------------------------------------------------------------------------- scopes

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._visit_all(node.decorator_list)
        self._visit_function(node)
        self._bound.add(node.name)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_function(node)

    def _visit_function(self, node: _Function) -> None:
        arguments = node.args
        self._visit_all([*arguments.defaults, *arguments.kw_defaults])
        body = node.body if isinstance(node.body, list) else [node.body]
        own = {argument.arg for argument in ast.walk(arguments) if isinstance(argument, ast.arg)}
        shared = {name for part in body for inner in ast.walk(part) for name in _shared(inner)}
        self._read(_loads(body) - own - (_stores(*body) - shared))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        with self._branch():
            self._visit_all(node.body)
        self._bound.add(node.name)

    def _visit_comprehension(self, node: _Comprehension) -> None:
        targets = _stores(*(generator.target for generator in node.generators))
        self._read(_loads([node]) - targets)
        self._bound |= {inner.target.id for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr)}

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    # ----------------------------------------------------------------------------------- branches

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        before = set(self._bound)
        self._visit_all(node.body)
        after_body, self._bound = self._bound, before
        self._visit_all(node.orelse)
        self._bound &= after_body

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        with self._branch():
            self._visit_all([node.target, *node.body])
        with self._branch():
            self._visit_all(node.orelse)

    visit_AsyncFor = visit_For

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        for part in (node.body, node.orelse):
            with self._branch():
                self._visit_all(part)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        with self._branch():  # it may swallow an error
            for item in node.items:
                self._visit_all([item.context_expr, item.optional_vars])
            self._visit_all(node.body)

    visit_AsyncWith = visit_With

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        with self._branch():
            self._visit_all([*node.body, *node.orelse])
        for handler in node.handlers:
            with self._branch():
                self._visit_all([handler.type])
                self._bound |= {handler.name} if handler.name else set()
                self._visit_all(handler.body)
        self._visit_all(node.finalbody)

    visit_TryStar = visit_Try

    def visit_match_case(self, node: ast.match_case) -> None:
        with self._branch():
            self._bound |= _captures(node.pattern)
            self.generic_visit(node)


def _loads(nodes: Iterable[ast.AST]) -> set[str]:
    found = set()
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
                found.add(inner.id)
            elif isinstance(inner, ast.AugAssign) and isinstance(inner.target, ast.Name):
                found.add(inner.target.id)
    return found


def _shared(node: ast.AST) -> list[str]:
    return node.names if isinstance(node, ast.Global) else []


def _stores(*nodes: ast.AST) -> set[str]:
    found = set()
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                found.add(inner.id)
            elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(inner.name)
    return found


def _captures(pattern: ast.pattern) -> set[str]:
    named = (ast.MatchAs, ast.MatchStar)
    found = {inner.name for inner in ast.walk(pattern) if isinstance(inner, named)}
    found |= {inner.rest for inner in ast.walk(pattern) if isinstance(inner, ast.MatchMapping)}
    return {name for name in found if name}
