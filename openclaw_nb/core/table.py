"""A table of text that displays well as HTML and as plain text.

Knows strings; what its records are is the business of who makes it.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_nb.core.text import aligned


@dataclass(frozen=True, repr=False)
class Table(Sequence[Any]):
    """Rows of text for people, and the records that they stand for: ``len``, index and iterate over those.

    Attributes
    ----------
    title : str
        A line above the table.
    columns : tuple of str
        Names of the columns.
    rows : tuple of tuple of str
        What is shown.
    records : tuple
        What the rows stand for, one a row.
    notes : tuple of str
        Lines below the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    records: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        return self.records[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.records)

    def __repr__(self) -> str:
        table = [aligned([self.columns, *self.rows], indent="  ")] if self.rows else []
        return "\n".join([self.title, *table, *self.notes])

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in self.columns)
        body = "".join(f"<tr>{_html_cells(row)}</tr>" for row in self.rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if self.rows else ""
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        return f"<div>{html.escape(self.title)}</div>{table}{notes}"


def _html_cells(row: Sequence[str]) -> str:
    return "".join(f'<td style="text-align: left">{html.escape(cell)}</td>' for cell in row)
