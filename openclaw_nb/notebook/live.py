"""The output of a running cell, drawn again and again until the cell ends.

    entries of each rank ──> Transcript ──┐
    entries of each rank ──> Transcript ──┴─ merge ──> segments ──> slots ──> NotebookSink
                                                └────> lines that will not change ──> TextSink

Knows when to draw, what changed and how much may be sent; does not know what is wrong when a cell fails,
and does not start, stop or wait for anything.
"""

from __future__ import annotations

import html
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from openclaw_nb.notebook.merge import Block, Limits, label, merge, render_text
from openclaw_nb.notebook.transcript import Display, Item, Result, Transcript

LIVE_LIMITS = Limits(lines=400, blocks=100, chars=100_000)
FINAL_LIMITS = Limits(lines=10_000, blocks=2_000, chars=800_000)
_INTERVAL_SECONDS = 0.2
# Jupyter's server drops what a kernel shows faster than 1 MB/s; half of it is left to the rest of the cell.
_CHARS_PER_SECOND = 500_000
_DRAWING_SHARE = 0.2

Data = dict[str, Any]


@dataclass(frozen=True)
class Picture:
    """All that there is to draw at one moment."""

    transcripts: Mapping[int, Transcript]
    world_size: int
    status: str | None
    at: float
    final: bool


class Sink(Protocol):
    """Where a picture goes."""

    def draw(self, picture: Picture) -> int:
        """Draw it; return about how many characters were sent."""


class LiveOutput:
    """The output of one cell on several ranks.

    Entries may come from any thread. Draw from the thread that runs the cell: what another thread
    displays for the first time may land in a later cell.

    Parameters
    ----------
    world_size : int
        How many ranks the group has; with one there are no labels.
    ranks : iterable of int
        The ranks that run the cell; a rank that joins later is taken up with its first entry.
    sink : Sink
        `NotebookSink` or `TextSink`; or an object with ``show`` and ``update``, see `Slots`.
    clock : callable
        Seconds that only grow.
    """

    def __init__(
        self,
        world_size: int,
        ranks: Iterable[int],
        sink: Sink | SlotSink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world_size = world_size
        self._transcripts = {rank: Transcript() for rank in ranks}
        self._sink: Sink = TextSink(sink.file) if False else _as_sink(sink)
        self._clock = clock
        self._status: str | None = None
        self._not_before = float("-inf")
        self._lock = threading.RLock()
