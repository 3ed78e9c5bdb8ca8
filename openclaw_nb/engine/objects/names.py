"""Which names a cell reads, binds and calls, from its source alone.

Knows Python's syntax and what IPython makes of magics. It does not know what the names stand for.

    source --cell_names--> names read, names bound
    source --cell_builds--> which classes the cell calls by itself, for messages
"""

from __future__ import annotations

import ast
import dis
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType

_READS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"})
_CODE_MAGICS = frozenset({"time", "timeit", "prun", "capture"})
_MAGIC_OPTIONS = re.compile(r"^\s*(?:-\w+(?:\s+\d+)?\s+)*")
# nn.Module methods that return the module itself, so `model = model.to(device)` binds nothing new.
_RETURN_SELF = frozenset({"to", "cuda", "cpu", "train", "eval", "requires_grad_"})


@dataclass(frozen=True)
class CellNames:
    """The global names of a cell.

    Attributes
    ----------
    loads : frozenset of str
        Names read by the cell or by functions and classes defined in it, without their local variables.
    stores : frozenset of str
        Names that the cell binds to something new at its top level (or through ``global``).
    """

    loads: frozenset[str]
    stores: frozenset[str]


@dataclass(frozen=True)
class Build:
    """A call of a dotted name at cell level, ``target = callee(...)``; target is "" when it has no name."""

    target: str
    callee: str


@dataclass
class CellBuilds:
    """What a cell's source says about the objects that it makes itself.

    Attributes
    ----------
    calls : list of Build
        In source order; calls inside function bodies are left out.
    imports : dict of str to str
        Names that the cell imports, to the full dotted name.
    bases : dict of str to list of str
        Classes that the cell defines, with their bases as written.
    """

    calls: list[Build] = field(default_factory=list)
    imports: dict[str, str] = field(default_factory=dict)
    bases: dict[str, list[str]] = field(default_factory=dict)


def cell_names(source: str) -> CellNames:
    """Say which global names a cell reads and binds.

    Parameters
    ----------
    source : str
        The cell as written or as IPython transformed it. The bodies of ``%%time``, ``%timeit`` and the like
        count as part of the cell; ``%%writefile`` and other text does not.

    Raises
    ------
    SyntaxError
        If the cell is no Python.
    """
    loads: dict[str, None] = {}
    stores: dict[str, None] = {}
    for tree in _cell_trees(source):
        plain = ast.fix_missing_locations(_DropSelfAssignments().visit(tree))
        code = compile(plain, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        _scan(code, loads, stores, at_top=True)
    return CellNames(frozenset(loads), frozenset(stores))


def code_reads(code: CodeType) -> list[str]:
    """List the global names that a function's code reads, nested functions included, in code order."""
    loads: dict[str, None] = {}
    _scan(code, loads, {}, at_top=False)
    return list(loads)


def cell_builds(source: str) -> CellBuilds:
    """Collect the calls, imports and classes at cell level; same source rules as `cell_names`."""
    visitor = _BuildVisitor()
    for tree in _cell_trees(source):
        visitor.visit(tree)
    return visitor.builds


def tree_of(source: str) -> ast.Module:
    """Return a cell's tree, as the shell makes it of what was written.

    Raises
    ------
    SyntaxError
        If the cell is no Python.
    """
    return ast.parse(_transformed(source))


def _cell_trees(source: str) -> list[ast.Module]:
    """Parse the cell, then every piece of code that a magic of it will run."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        tree = ast.parse(_transformed(source))
    trees = [tree]
    for text in _magic_bodies(tree):
        try:
            trees.extend(_cell_trees(text))
        except SyntaxError:  # the magic itself will say so when it runs
            continue
    return trees


def _transformed(source: str) -> str:
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager().transform_cell(source)


def _magic_bodies(tree: ast.AST) -> Iterator[str]:
    """Code inside ``get_ipython().run_cell_magic('time', '', '...')`` and its line form."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        values = [arg.value if isinstance(arg, ast.Constant) else None for arg in node.args]
        if not values or values[0] not in _CODE_MAGICS or not isinstance(values[-1], str):
            continue
        if node.func.attr == "run_cell_magic":
            yield values[-1]
        elif node.func.attr == "run_line_magic":
            yield _MAGIC_OPTIONS.sub("", values[-1])


class _DropSelfAssignments(ast.NodeTransformer):
    """Turn ``x = x.to(...)`` into ``x.to(...)``: the name keeps its object."""

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=method)),
            ) if name == owner and method in _RETURN_SELF:
                return ast.copy_location(ast.Expr(node.value), node)
        return node


def _scan(code: CodeType, loads: dict[str, None], stores: dict[str, None], *, at_top: bool) -> None:
    """Add the global names of a code object and of the code nested in it."""
    for step in dis.get_instructions(code):
        if step.opname in _READS:
            loads[step.argval] = None
        elif step.opname == "STORE_GLOBAL" or (at_top and step.opname == "STORE_NAME"):
            stores[step.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _scan(constant, loads, stores, at_top=False)


class _BuildVisitor(ast.NodeVisitor):
    """Fills a `CellBuilds`; goes into loops, branches and ``with``, not into function bodies."""

    def __init__(self) -> None:
        self.builds = CellBuilds()
        self._target = ""

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self.builds.imports[alias.asname or top] = alias.name if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.builds.imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.builds.bases[node.name] = [name for base in node.bases if (name := _dotted(base))]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Not at cell level."""

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """Not at cell level."""

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Not at cell level."""

    def visit_Assign(self, node: ast.Assign) -> None:
        self._target = _dotted(node.targets[0])
        self.generic_visit(node)
        self._target = ""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._target = _dotted(node.target)
        self.generic_visit(node)
        self._target = ""

    def visit_Call(self, node: ast.Call) -> None:
        if callee := _dotted(node.func):
            self.builds.calls.append(Build(self._target, callee))
        if isinstance(node.func, ast.Call):
            # nn.Softmax(dim=1)(x): what is assigned is the result, not the module.
            target, self._target = self._target, ""
            self.visit(node.func)
            self._target = target
            for argument in (*node.args, *node.keywords):
                self.visit(argument)
        else:
            self.generic_visit(node)


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` for such an expression, "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""
