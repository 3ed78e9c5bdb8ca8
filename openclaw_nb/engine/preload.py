"""Importing torch on a thread of its own, so that an engine registers meanwhile."""

from __future__ import annotations

import contextlib
import importlib
import queue
import threading
from collections.abc import Iterable


class Preload:
    """Imports what cells will need, in the background.

    ``torch`` comes first; once it is there `wait` returns, and what the first optimizer would import
    (seconds that look like a hang) follows.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._names: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._waiting = 0
        self._lock = threading.Lock()
        self.add(_LATER)
        threading.Thread(target=self._run, name="openclaw-import", daemon=True).start()

    def add(self, names: Iterable[str]) -> None:
        """Import these modules, too, after those that wait."""
        with self._lock:
            for name in names:
                self._waiting += 1
                self._names.put(name)

    def _run(self) -> None:
        try:
            importlib.import_module("torch")
            importlib.import_module("openclaw_nb.engine.group.service")
        except BaseException as error:  # noqa: BLE001 - kept for whoever waits for torch, who gets it raised
            self._error = error
            return
        finally:
            self._done.set()
        while True:
            # Whoever needs a module that cannot be imported gets the error itself; a script may also end itself.
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(self._names.get())
            with self._lock:
                self._waiting -= 1

    @property
    def ready(self) -> bool:
        """Whether torch can be used now."""
        return self._done.is_set() and self._error is None

    @property
    def is_complete(self) -> bool:
        """Whether all is imported that was asked for, what the first strategy cell would wait for among it."""
        return self._waiting == 0

    @property
    def problem(self) -> str:
        """Why torch cannot be used, or ""."""
        return "" if self._error is None else f"torch cannot be imported: {self._error}"

    def wait(self) -> None:
        """Wait until torch can be used.

        Raises
        ------
        ImportError
            When torch could not be imported.
        """
        self._done.wait()
        if self._error is not None:
            raise ImportError(f"torch cannot be imported on the worker: {self._error}") from self._error


# What the first traceback, the first strategy cell and the first optimizer would import: seconds that look like a hang.
_LATER = (
    "stack_data",
    "pygments.lexers.python",
    "pygments.formatters.terminal256",
    "openclaw_nb.engine.parallel.registry",
    "torch._dynamo",
)

_preload: Preload | None = None


def start() -> Preload:
    """Start importing, once a process."""
    global _preload
    if _preload is None:
        _preload = Preload()
    return _preload
