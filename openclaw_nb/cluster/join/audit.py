"""The master's record of who joined, left and was turned away.

One line each, with the time, in a file of this user's alone. Who is turned away before they say who they are is
counted: a flood of connections is a few lines. The file is bounded. Knows lines and a file, not what a join is.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

_LARGEST_BYTES = 1024**2
_FOLD_SECONDS = 10.0
_LONGEST_LINE = 600
_log = logging.getLogger(__name__)


class AuditLog:
    """Lines, the newest last.

    Parameters
    ----------
    path : Path
        The file; at 1 MiB it becomes ``<path>.1`` and a new one begins.
    clock : callable
        Seconds that only grow.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._folded: dict[str, tuple[float, int]] = {}

    def write(self, line: str) -> None:
        """Add a line; what a stranger has put into it cannot begin another."""
        stamp = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        text = "".join(each if each.isprintable() else "?" for each in line)[:_LONGEST_LINE]
        with self._lock:
            try:
                self._append(f"{stamp} {text}\n")
            except OSError as error:  # a full disk must not keep workers out, nor let the master fail
                _log.warning("%s (and this could not be written to %s: %s)", text, self.path, error)
                return
        _log.info("%s", text)

    def count(self, kind: str, example: str) -> None:
        """Note a stranger: the first of a kind at once, then how many more there were, every 10 s at most."""
        since, number = self._folded.get(kind, (0.0, -1))
        if number < 0:
            self._folded[kind] = (self._clock(), 0)
            self.write(f"{kind}: {example}")
        else:
            self._folded[kind] = (since, number + 1)

    def tell_counts(self, *, now: bool = False) -> None:
        """Write what was counted, once it is old enough."""
        for kind, (since, number) in list(self._folded.items()):
            if now or self._clock() - since > _FOLD_SECONDS:
                del self._folded[kind]
                if number:
                    self.write(f"{kind}: {number} more")

    def lines(self) -> list[str]:
        """Return the lines of the present file."""
        try:
            return self.path.read_text(errors="replace").splitlines()
        except OSError:
            return []

    def _append(self, line: str) -> None:
        if self.path.exists() and self.path.stat().st_size > _LARGEST_BYTES:
            os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(line)
