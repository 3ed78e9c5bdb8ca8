"""A script or a notebook as a file: read, checked, and cut into the cells that run on the workers.

    train.py  ──> plan.script ──> Step, Step, …        nb.ipynb ──> its code cells, cut where they build and train

Knows files and what a notebook's cells may begin with; does not know workers, nor how anything is shown.
"""

from __future__ import annotations

import ast
import json
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from openclaw_nb.core.errors import UsageError
from openclaw_nb.plan.script.segments import Segment, cut_cell, cut_script
from openclaw_nb.plan.script.training import Training

_OURS = "%%openclaw_parallel"
# These speak to the notebook, or to the cluster that it would have started.
_TO_THE_NOTEBOOK = ("%openclaw", "%load_ext openclaw_nb", "%reload_ext openclaw_nb")
# What these do is done to the host, or shown: once is enough.
_ONCE = (
    "%%bash",
    "%%sh",
    "%%script",
    "%%system",
    "%%writefile",
    "%%html",
    "%%javascript",
    "%%latex",
    "%%markdown",
)
_NUM_MODULES = 100


@dataclass(frozen=True)
class Step:
    """One cell for the workers.

    Attributes
    ----------
    source : str
        Its code.
    number : int
        Its number in tracebacks.
    line : int
        The first line in the file, or the cell.
    trains : bool
        Whether it trains, and so runs under the strategy.
    once : bool
        Whether one worker is to run it.
    words : str or None
        What stands behind ``%%openclaw_parallel`` on the cell's first line; None where that does not stand there.
    """

    source: str
    number: int
    line: int = 1
    trains: bool = False
    once: bool = False
    words: str | None = None


@dataclass(frozen=True)
class Program:
    """What is run.

    Attributes
    ----------
    path : Path
        Its file.
    steps : list of Step
        In order.
    told : tuple of str
        What a person should know of how it was read.
    """

    path: Path
    steps: list[Step]
    told: tuple[str, ...] = ()

    @property
    def is_notebook(self) -> bool:
        """Whether it is a notebook."""
        return self.path.suffix == ".ipynb"

    @property
    def num_trainings(self) -> int:
        """How many of its steps train."""
        return sum(step.trains for step in self.steps)


def read_program(path: str, *, whole: bool = False) -> Program:
    """Read a script or a notebook.

    Parameters
    ----------
    path : str
        The file.
    whole : bool
        Whether a script is left as it is, to run on every worker.

    Raises
    ------
    UsageError
        When there is no such file, it is no Python or no notebook, or trains in a way that no strategy can join.
    """
    file = Path(path)
    if not file.is_file():
        what = "is a directory" if file.is_dir() else "does not exist"
        raise UsageError(f"{path} {what}: openclaw run takes a script (.py) or a notebook (.ipynb).")
    if file.suffix == ".ipynb":
        return _read_notebook(file)
    source = _read_text(file)
    try:
        segments = (
            [Segment(source, 1)] if whole else cut_script(source, file.name, _modules_beside(file, source))
        )
        compile(source, str(file), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise _not_python(file.name, error) from None
    except ValueError as error:  # a null byte
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is no Python: {error}.") from None
    # Only a cell of a notebook shows the value of its last line.
    steps = [Step(f"{each.source}\npass", n, each.line, each.trains) for n, each in enumerate(segments, 1)]
    return Program(file, steps)


def _read_text(file: Path) -> str:
    try:
        with tokenize.open(file) as opened:  # in the encoding that its first lines name
            return opened.read()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.") from None
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is no text: {error}.") from None


def _not_python(name: str, error: SyntaxError) -> UsageError:
    text = f": {error.text.strip()}" if error.text else ""
    return UsageError(f"{name}, line {error.lineno}: {error.msg}{text}. Nothing was run.")


def _modules_beside(file: Path, source: str) -> dict[str, str]:
    """Return the source of the modules that stand beside a script and are imported by it, by name, also indirectly."""
    found: dict[str, str] = {}
    waiting = [source]
    while waiting and len(found) < _NUM_MODULES:
        for name, alias in _imported(waiting.pop()):
            stem = file.parent.joinpath(*name.split("."))
            module = next(
                (each for each in (stem.with_suffix(".py"), stem / "__init__.py") if each.is_file()), None
            )
            if module is None or alias in found or module == file:
                continue
            text = module.read_text(errors="replace")
            found[alias] = text
            waiting.append(text)
    return {name: text for name, text in found.items() if _parses(text)}


def _imported(source: str) -> Iterator[tuple[str, str]]:
    """Yield the modules that a source imports, with the name that each gets there."""
    for node in ast.walk(ast.parse(source) if _parses(source) else ast.Module([], [])):
        if isinstance(node, ast.Import):
            yield from ((each.name, each.asname or each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.module
            yield from ((f"{node.module}.{each.name}", each.asname or each.name) for each in node.names)


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


# ------------------------------------------------------------------------------------------------ notebooks


@dataclass(frozen=True)
class _Cell:
    number: int
    source: str
    words: str | None


def _read_notebook(file: Path) -> Program:
    try:
        content = json.loads(_read_text(file))
        cells = [each for each in content["cells"] if each["cell_type"] == "code"]
        sources = ["".join(each["source"]) for each in cells]
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"{file} is no notebook in the format 4 of Jupyter: open and save it in JupyterLab."
        ) from None
    found = [_cell(number, source) for number, source in enumerate(sources, 1)]
    used = [cell for cell in found if _code(cell.source)]
    trees = {cell.number: _tree(file, cell) for cell in used}
    training = Training(tree for tree in trees.values() if tree is not None)
    steps = [step for cell in used for step in _steps(file, cell, trees[cell.number], training)]
    return Program(file, steps, _told(sources))


def _cell(number: int, source: str) -> _Cell:
    lines = source.split("\n")
    first = next((n for n, line in enumerate(lines) if line.strip()), 0)
    words = None
    if lines[first].startswith(_OURS):
        words = lines[first].removeprefix(_OURS).strip()
        lines[first] = f"# {lines[first]}"
    if not lines[first].startswith("%%"):
        lines = [f"# {line}" if line.startswith(_TO_THE_NOTEBOOK) else line for line in lines]
    return _Cell(number, "\n".join(lines), words)


def _code(source: str) -> bool:
    return any(line.strip() and not line.lstrip().startswith("#") for line in source.split("\n"))


def _tree(file: Path, cell: _Cell) -> ast.Module | None:
    """Return a cell's tree; None for one that is not Python as it stands, by its magics."""
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        return ast.parse(cell.source)
    except SyntaxError:
        pass
    try:
        transformed = TransformerManager().transform_cell(cell.source)
        compile(transformed, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        raise _not_python(f"{file.name}, cell {cell.number}", error) from None
    return None


def _steps(file: Path, cell: _Cell, tree: ast.Module | None, training: Training) -> Iterator[Step]:
    first = next(line for line in cell.source.split("\n") if line.strip())
    if tree is None:
        body = cell.source.partition("\n")[2] if first.startswith("%%") else ""
        trains = _parses(body) and training.trains(ast.parse(body))
        yield Step(cell.source, cell.number, 1, trains, first.startswith(_ONCE), cell.words)
        return
    segments = _joined_end(cell.source, cut_cell(cell.source, f"{file.name}, cell {cell.number}", training))
    for place, each in enumerate(segments, 1):
        source = each.source if place == len(segments) else f"{each.source}\npass"
        yield Step(source, cell.number, each.line, each.trains, False, cell.words)


def _joined_end(source: str, segments: Sequence[Segment]) -> Sequence[Segment]:
    """Return a cell that is one piece as it was written."""
    return [Segment(source, 1, segments[0].trains)] if len(segments) == 1 else segments


def _told(sources: Sequence[str]) -> tuple[str, ...]:
    lines = [line for source in sources for line in source.split("\n") if line.startswith(_TO_THE_NOTEBOOK)]
    if not lines:
        return ()
    return (f"{len(lines)} lines that speak to the notebook are left out, such as: {lines[0].strip()}",)
