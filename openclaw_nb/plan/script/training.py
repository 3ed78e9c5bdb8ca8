"""Which parts of a program train, and which build optimizers, from its source alone.

    trees ──> the functions from which some `.backward()` is reached ──> trains(statement)

A function counts by its simple name wherever it is defined, so that methods and the functions of modules beside the
script are found without running anything. Knows Python's syntax; does not know what runs where.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_PARAMETERS = frozenset({"parameters", "named_parameters"})
_OF_MODELS = frozenset({"train", "eval"})  # what models have too: counts where it is seen whose it is


class Training:
    """What trains and what builds in a program.

    Parameters
    ----------
    trees : iterable of ast.Module
        The program, and the modules that stand beside it.
    modules : frozenset of str
        Names under which the modules beside it are imported.
    foreign : frozenset of str
        Names of imported modules that are not among these: what they are asked to do is not looked into.
    """

    def __init__(
        self,
        trees: Iterable[ast.Module],
        modules: frozenset[str] = frozenset(),
        foreign: frozenset[str] = frozenset(),
    ) -> None:
        self._modules, self._foreign = modules, foreign
        functions: dict[str, list[ast.AST]] = {}
        aliases: dict[str, str] = {}
        self._made_by: dict[str, set[str]] = {}
        self._methods: dict[str, set[str]] = {}
        for node in (node for tree in trees for node in ast.walk(tree)):
            if isinstance(node, _FUNCTION):
                functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ClassDef):
                functions.setdefault(node.name, []).extend(_constructors(node))
                self._methods[node.name] = {each.name for each in node.body if isinstance(each, _FUNCTION)}
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                made_by = _last_name(node.value.func)
                for target in node.targets:
                    self._made_by.setdefault(_last_name(target), set()).add(made_by)
            elif isinstance(node, ast.ImportFrom):
                aliases |= {each.asname: each.name for each in node.names if each.asname}
        functions |= {alias: functions[name] for alias, name in aliases.items() if name in functions}
        self._trainers = self._closure(functions, _goes_back)
        self._builders = self._closure(functions, _builds_optimizer)

    def _closure(
        self, functions: Mapping[str, list[ast.AST]], does: Callable[[ast.AST], bool]
    ) -> frozenset[str]:
        """Return the functions that do something, or call one that does."""
        found = {name for name, bodies in functions.items() if any(map(does, _walk_all(bodies)))}
        while True:
            more = {
                name
                for name, bodies in functions.items()
                if name not in found and any(self._names(node, found) for node in _walk_all(bodies))
            }
            if not more:
                return frozenset(found)
            found |= more

    def trains(self, node: ast.AST) -> bool:
        """Whether it goes back through a model when it is executed."""
        return any(_goes_back(each) or self._names(each, self._trainers) for each in executed(node))

    def builds(self, node: ast.AST) -> bool:
        """Whether it makes an optimizer when it is executed."""
        return any(_builds_optimizer(each) or self._names(each, self._builders) for each in executed(node))

    def _names(self, node: ast.AST, functions: frozenset[str] | set[str]) -> bool:
        if isinstance(node, ast.Name):
            return isinstance(node.ctx, ast.Load) and node.id in functions
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        if node.func.attr not in functions:
            return False
        owner = node.func.value
        if node.func.attr in _OF_MODELS and not self._has_method(owner, node.func.attr):
            return False
        return not (isinstance(owner, ast.Name) and owner.id in self._foreign)

    def _has_method(self, owner: ast.expr, method: str) -> bool:
        """Whether an object is seen to be of a class of the program that has a method."""
        if isinstance(owner, ast.Call):
            classes = {_last_name(owner.func)}
        else:
            name = _last_name(owner)
            if name == "self" or name in self._modules:
                return True
            classes = self._made_by.get(name, set())
        return any(method in self._methods.get(each, ()) for each in classes)


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a statement that are executed with it: not the bodies of functions that it defines."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, (*_FUNCTION, ast.ClassDef)):
            waiting.extend(each.decorator_list)
            continue
        yield each
        waiting.extend(ast.iter_child_nodes(each))


def _walk_all(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        for child in ast.iter_child_nodes(node):
            yield from ast.walk(child)


def _constructors(node: ast.ClassDef) -> list[ast.AST]:
    return [each for each in node.body if isinstance(each, _FUNCTION) and each.name == "__init__"]


def _goes_back(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _last_name(node.func) == "backward"


def _builds_optimizer(node: ast.AST) -> bool:
    """Whether it calls a class with a model's parameters, as optimizers are made."""
    if not isinstance(node, ast.Call) or not _last_name(node.func)[:1].isupper():
        return False
    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
    return any(
        isinstance(each, ast.Attribute) and each.attr in _PARAMETERS
        for argument in arguments
        for each in ast.walk(argument)
    )


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
