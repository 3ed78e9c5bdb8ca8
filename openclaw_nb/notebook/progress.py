"""One progress bar in the output of a cell, gone when the work is done.

Knows how far something is and draws that; does not know what it is.
"""

from __future__ import annotations

import html
import sys
import time
import uuid
from types import TracebackType
from typing import Any

_WIDTH = 24


class ProgressBar:
    """A bar that is drawn when told how far things are, and cleared at the end of the ``with`` block.

    Parameters
    ----------
    title : str
        What is going on.
    in_notebook : bool
        Whether displays can be updated; otherwise one line of the terminal is.
    delay_seconds : float
        What is done sooner shows no bar.
    """

    def __init__(self, title: str, *, in_notebook: bool, delay_seconds: float = 0.0) -> None:
        self._title = title
        self._in_notebook = in_notebook
        self._not_before = time.monotonic() + delay_seconds
        self._name = f"openclaw-progress-{uuid.uuid4().hex}"
        self._drawn: tuple[int, int, str] | None = None

    def __call__(self, done: int, total: int, what: str = "") -> None:
        """Draw that ``done`` of ``total`` steps are done."""
        state = done, total, what
        if state == self._drawn or time.monotonic() < self._not_before:
            return
        text = f"{self._title} {_bar(done, total)} {what}".rstrip()
        if self._in_notebook:
            self._show({"text/plain": text, "text/html": self._html(done, total, what)})
        else:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        self._drawn = state

    def _html(self, done: int, total: int, what: str) -> str:
        title = html.escape(self._title)
        bar = f'<progress value="{done}" max="{total}" aria-label="{title}"></progress>'
        return f"<div>{title} {bar} {html.escape(what)}</div>"

    def _show(self, data: dict[str, Any]) -> None:
        from IPython.display import display, update_display

        if self._drawn is None:
            display(data, raw=True, display_id=self._name)
        else:
            update_display(data, raw=True, display_id=self._name)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn is None:
            return
        if self._in_notebook:
            self._show({"text/plain": "", "text/html": ""})
        else:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _bar(done: int, total: int) -> str:
    filled = _WIDTH * done // max(1, total)
    return f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {done}/{total}"
