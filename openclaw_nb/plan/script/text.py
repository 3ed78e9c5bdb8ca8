"""The text of a program, from which pieces are cut that keep their line numbers.

Knows lines, indentation and strings over several lines; does not know what a piece is for.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass, field

Lines = dict[int, str]
"""Text by line number, from 1."""


@dataclass(frozen=True, order=True)
class Edit:
    """Other text in the place of some on one line; columns count bytes, as those of syntax trees do."""

    line: int
    start: int
    end: int
    text: str


@dataclass
class ProgramText:
    """A program's source.

    Attributes
    ----------
    source : str
        The source; it can be parsed.
    """

    source: str
    _lines: list[bytes] = field(init=False, repr=False)
    _in_strings: set[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # As the parser counts lines: a form feed or a line separator of Unicode ends none.
        self._lines = self.source.encode().replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._in_strings = _lines_in_strings(self.source)

    def cut(self, statements: list[ast.stmt], edits: Iterable[Edit] = ()) -> Lines:
        """Return the lines of statements of one body, as they stand at the left margin.

        Parameters
        ----------
        statements : list of ast.stmt
            Neighbours.
        edits : iterable of Edit
            What is changed in them, or elsewhere.
        """
        first, column = _start(statements[0])
        last = statements[-1].end_lineno or first
        lines = {number: self._lines[number - 1] for number in range(first, last + 1)}
        lines[last] = lines[last][: self._end_of_line(statements[-1])]
        for edit in sorted(edits, reverse=True):
            if edit.line in lines:
                old = lines[edit.line]
                lines[edit.line] = old[: edit.start] + edit.text.encode() + old[edit.end :]
        margin = lines[first][:column]
        shifted = {n: self._shifted(n, line, margin, column, first) for n, line in lines.items()}
        return {number: line.decode() for number, line in shifted.items()}

    def _end_of_line(self, statement: ast.stmt) -> int | None:
        """Where a statement ends that has another one behind it on its line, else None: a comment may follow."""
        number, end = statement.end_lineno or 0, statement.end_col_offset or 0
        rest = self._lines[number - 1][end:].strip()
        return end if rest.strip(b"; ") and not rest.startswith(b"#") else None

    def _shifted(self, number: int, line: bytes, margin: bytes, column: int, first: int) -> bytes:
        if number == first:
            return line[column:]
        if number in self._in_strings or not margin:
            return line
        # Within brackets, and before comments, a line may begin further left.
        return line.removeprefix(margin) if line.startswith(margin) else line.lstrip(b" \t\f")


def joined(lines: Lines) -> str:
    """Write lines at their numbers; nothing stands above them but comments, which IPython keeps."""
    first, last = min(lines), max(lines)
    return "\n".join([*["#"] * (first - 1), *(lines.get(number, "") for number in range(first, last + 1))])


def _start(statement: ast.stmt) -> tuple[int, int]:
    """Return line and column of a statement, its decorators included."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorators)]), statement.col_offset


def _lines_in_strings(source: str) -> set[int]:
    """Return the lines that begin inside a string."""
    found: set[int] = set()
    opened: list[int] = []
    starts, ends = (getattr(tokenize, f"FSTRING_{what}", None) for what in ("START", "END"))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING:
            found.update(range(token.start[0] + 1, token.end[0] + 1))
        elif starts is not None and token.type == starts:
            opened.append(token.start[0])
        elif ends is not None and token.type == ends:
            found.update(range(opened.pop() + 1, token.end[0] + 1))
    return found
