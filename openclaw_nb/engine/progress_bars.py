"""tqdm's bars as text on a worker.

``tqdm.auto`` and ``tqdm.notebook`` draw widgets, whose models live in a front end that a worker has not. Text bars
travel as ordinary output. Knows tqdm's module names; nothing of tqdm is imported before the cell does.
"""

from __future__ import annotations

import sys
import types
from typing import Any

_NAMES = {"tqdm": "tqdm", "trange": "trange", "tqdm_notebook": "tqdm", "tnrange": "trange"}


class _TextBars(types.ModuleType):
    """Stands in for ``tqdm.notebook``; ``tqdm.auto`` asks it first whether widgets can be drawn."""

    IProgress = object
    WARN_NOIPYW = ""

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(name)
        from tqdm import std

        return getattr(std, _NAMES[name])


def use_text_bars() -> None:
    """Let every kind of tqdm in this process draw text."""
    sys.modules.setdefault("tqdm.notebook", _TextBars("tqdm.notebook"))
