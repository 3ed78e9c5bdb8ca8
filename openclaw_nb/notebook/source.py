"""The source that the workers get of a cell: checked, and with the line numbers of the notebook's cell.

Knows IPython's shell and source text; does not know workers.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from openclaw_nb.core.errors import UsageError
from openclaw_nb.notebook.auto import auto_of
from openclaw_nb.notebook.failure import drawn

_INDENT = re.compile(r"[ \t]*")


class CellSyntaxError(UsageError):
    """The cell cannot be compiled; no rank ran it."""


def checked(shell: Any, line: str, cell: str) -> str:
    """Return the source for the workers.

    Parameters
    ----------
    shell : InteractiveShell
        The notebook's shell.
    line : str
        What stands behind the magic's name.
    cell : str
        The cell below the magic's line.

    Raises
    ------
    CellSyntaxError
        If it cannot be compiled; shown as IPython shows a syntax error.
    """
    source = at_its_lines(cell, line, _num_lines_above(shell, cell))
    if _compiles(
        source, "<cell>"
    ):  # plain Python, as most cells are, needs none of IPython's transformations
        return source
    try:
        with auto_of(shell).paused():
            transformed = shell.transform_cell(source)
        _compile(transformed, shell.compile.cache(transformed, cell_number(shell), raw_code=source))
    except SyntaxError as error:
        lines = shell.SyntaxTB.structured_traceback(type(error), error, [])
        message = f"{error.msg} (line {error.lineno}). Nothing ran on the workers."
        raise drawn(CellSyntaxError(message), lines) from None
    return source


def trains(shell: Any, cell: str) -> bool:
    """Return whether a cell calls some ``.backward()`` itself, not in a function that it only defines."""
    try:
        with auto_of(shell).paused():
            tree = ast.parse(shell.transform_cell(cell))
    except (SyntaxError, ValueError, RecursionError):
        return False
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "backward"
        ):
            return True
        waiting.extend(ast.iter_child_nodes(node))
    return False


def _compiles(source: str, name: str) -> bool:
    try:
        _compile(source, name)
    except (SyntaxError, ValueError):  # a null byte is a ValueError
        return False
    return True


def _compile(source: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the workers show them
        compile(source, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


def cell_number(shell: Any) -> int:
    """Return the number of the cell that runs now, as the notebook shows it.

    IPython raises ``execution_count`` before or after a cell, depending on its version; the inputs tell.
    """
    return max(1, len(shell.history_manager.input_hist_parsed) - 1)


def at_its_lines(cell: str, line: str, num_above: int) -> str:
    """Put as many lines before the cell's code as stand above it in the notebook.

    They are comments, as IPython drops empty lines at the beginning. A cell magic below ours must stay first.
    """
    if cell.lstrip().startswith("%%") or not num_above:
        return cell
    first = next(text for text in cell.split("\n") if text.strip())
    match = _INDENT.match(first)
    indent = match[0] if match else ""
    above = ["#"] * (num_above - 1) + [f"# %%openclaw_parallel {line}".rstrip()]
    return "\n".join([*(indent + text for text in above), cell])


def _num_lines_above(shell: Any, cell: str) -> int:
    """Count the lines above the cell's code: ours, and those of magics above ours; none that `auto` put there."""
    inputs = getattr(shell.history_manager, "input_hist_raw", [""])
    found = inputs[-1].lstrip().rfind(cell.rstrip())
    if auto_of(shell).on and not inputs[-1].lstrip().startswith("%%"):
        return 0
    return max(1, inputs[-1].lstrip().count("\n", 0, found)) if found > 0 else 1
