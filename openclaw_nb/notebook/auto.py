"""``%openclaw auto on``: plain cells run on the workers without a magic on their first line.

    cell ──> input transformer ──> %%openclaw_parallel in front of it, unless it is a command to the notebook

Knows IPython's input transformers; does not know workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_OURS = "%%openclaw_parallel\n"
# Cells that begin so speak to the notebook, not to the workers.
_LOCAL = ("%%", "%openclaw", "%load_ext", "%reload_ext", "%unload_ext")


class Auto:
    """Whether plain cells of a shell run on the workers.

    Parameters
    ----------
    shell : InteractiveShell
        The notebook's shell.
    """

    def __init__(self, shell: Any) -> None:
        self._transformers: list[Any] = shell.input_transformers_cleanup
        self._paused = False

    @property
    def on(self) -> bool:
        """Whether it is switched on."""
        return self.transform in self._transformers

    def switch(self, on: bool) -> None:
        """Switch it on or off."""
        if on and not self.on:
            self._transformers.append(self.transform)
        elif not on and self.on:
            self._transformers.remove(self.transform)

    def transform(self, lines: list[str]) -> list[str]:
        """Put the magic in front of a plain cell."""
        first = next((line for line in lines if line.strip() and not line.lstrip().startswith("#")), "")
        if self._paused or not first or first.lstrip().startswith(_LOCAL):
            return lines
        return [_OURS, *lines]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave cells as they are in the ``with`` block: a worker's source is looked at."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


_autos: dict[int, Auto] = {}


def auto_of(shell: Any) -> Auto:
    """Return the switch of a shell."""
    return _autos.setdefault(id(shell), Auto(shell))
