"""How a planted fault, and what came of it, is shown: what ``%openclaw chaos`` returns.

Knows the report and a directory of checkpoints; plants nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from openclaw_nb.core.errors import CheckpointError
from openclaw_nb.notebook.tables import Message, Table

if TYPE_CHECKING:
    from openclaw_nb.cluster.chaos import Chaos
    from openclaw_nb.plan.chaos import Report


class PlantedFault:
    """A fault that is to strike, or the report of one that has.

    Parameters
    ----------
    chaos : Chaos
        The fault.
    """

    def __init__(self, chaos: Chaos) -> None:
        self._chaos = chaos

    @property
    def report(self) -> Table | None:
        """What came of it; None until its cell has ended."""
        report = self._chaos.report
        return None if report is None else resilience_table(report)

    def wait(self, timeout: float | None = None) -> Table | None:
        """Wait for the report; return it, or None after ``timeout`` seconds."""
        self._chaos.wait(timeout)
        return self.report

    def _shown(self) -> Table | Message:
        return self.report or Message(repr(self._chaos))

    def __repr__(self) -> str:
        return repr(self._shown())

    def _repr_html_(self) -> str | None:
        return self.report._repr_html_() if self.report is not None else None


def resilience_table(report: Report) -> Table:
    """Return a report as a table; of checkpoints also which are damaged, and which one would be loaded."""
    rows = [*report.rows, *(_checkpoint_rows(Path(report.directory)) if report.directory else [])]
    return Table(f"Resilience report: {report.fault.kind}", ("", "what happened"), tuple(rows), tuple(rows))


def _checkpoint_rows(directory: Path) -> list[tuple[str, str]]:
    from openclaw_nb.engine.checkpoint import manifest
    from openclaw_nb.engine.checkpoint.catalog import listed

    rows: list[tuple[str, str]] = []
    loaded = ""
    for _, folder in listed(directory):
        try:
            manifest.check_files(folder, manifest.read(folder))
            loaded = loaded or folder.name
        except CheckpointError as error:
            rows.append(("damaged", f"{folder.name}, skipped when one is loaded: {error}"))
    return [*rows, ("to be loaded", loaded or f"none: no checkpoint in {directory} is valid")]
