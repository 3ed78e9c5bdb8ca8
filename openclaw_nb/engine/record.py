"""What the newest cell has shown and measured, and how it ended: for a notebook that comes later.

    Shown, Measured (as they are sent) ──> Record, bounded ──> `Recall`'s answer

A notebook that attaches reads it and goes on with the events that follow, by their numbers: nothing twice, nothing
missing. Text is bounded where it is shown (`outbox`); measurements are summed up in pairs when they become many.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from openclaw_nb.protocol import codec
from openclaw_nb.protocol.messages import Event, Measured, Reply, RunCell, Shown

_MEASUREMENTS = 2000
_DISPLAYS = 500
_DISPLAY_CHARACTERS = 4_000_000

Entry = list[Any]


class Record:
    """What one cell has told on this worker.

    Parameters
    ----------
    command : RunCell
        The cell.
    rank, world_size : int
        This worker's place in the group that runs it.
    """

    def __init__(self, command: RunCell, rank: int, world_size: int) -> None:
        self.command = command
        self._place = {"rank": rank, "world_size": world_size}
        self._started = time.monotonic()
        self._seconds: float | None = None
        self._reply: Reply | None = None
        self._shown = Transcript()
        self._num_batches = self._num_measured = 0
        self._measured: list[Measured] = []

    def take(self, event: Event) -> None:
        """Take an event of this cell."""
        if isinstance(event, Shown):
            self._num_batches = event.seq
            for entry in event.entries:
                self._shown.add(entry)
        elif isinstance(event, Measured):
            self._num_measured = event.seq
            self._measured.append(event)
            if len(self._measured) > _MEASUREMENTS:
                self._measured = _in_pairs(self._measured)

    def end(self, reply: Reply) -> None:
        """Take how it ended."""
        self._reply, self._seconds = reply, time.monotonic() - self._started

    def tell(self, *, with_output: bool) -> dict[str, Any]:
        """Return all of it, or only what the cell is and whether it has ended."""
        seconds = time.monotonic() - self._started if self._seconds is None else self._seconds
        found: dict[str, Any] = {
            **self._place,
            "run_id": self.command.run_id,
            "epoch": self.command.epoch,
            "execution_count": self.command.execution_count,
            "seconds": seconds,
            "ago": time.monotonic() - self._started - seconds,
            "reply": None if self._reply is None else codec.encode(self._reply),
            "num_batches": self._num_batches,
            "num_measured": self._num_measured,
        }
        if with_output:
            found["entries"] = self._shown.entries()
            found["measured"] = [codec.encode(event) for event in self._measured]
        return found


class Transcript:
    """Transcript entries, without those that later ones have made invisible.

    Text joins that of the same stream before it, the newest end of a flood takes the place of the one before, a display
    that is updated keeps its newest state, and what was cleared is gone. Of many displays the oldest are dropped.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._num_displays = self._characters = 0

    def add(self, entry: Entry) -> None:
        """Take the next entry."""
        kind, last = entry[0], self._entries[-1] if self._entries else [""]
        if last[:2] == ["clear", True]:
            self._keep(lambda other: other is last)
        if kind == "stream" and last[:2] == entry[:2]:
            last[2] += entry[2]
            return
        if kind == "clear" and not entry[1]:
            self._keep(lambda other: False)
        elif kind == "omit":
            self._keep(lambda other: other[0] != "omit" or other[3] != entry[3])
        elif kind == "display":
            self._make_room(entry)
        self._entries.append(list(entry))

    def entries(self) -> list[Entry]:
        """Return a copy that does not change any more."""
        return [list(entry) for entry in self._entries]

    def _keep(self, wanted: Callable[[Entry], bool]) -> None:
        self._entries = [entry for entry in self._entries if wanted(entry)]
        displays = [entry for entry in self._entries if entry[0] == "display"]
        self._num_displays, self._characters = len(displays), sum(map(_size, displays))

    def _make_room(self, entry: Entry) -> None:
        """Drop the state that a display replaces; when there are too many, the older half."""
        if entry[4]:
            self._keep(lambda other: other[0] != "display" or other[3:] != entry[3:])
        self._num_displays += 1
        self._characters += _size(entry)
        if self._num_displays > _DISPLAYS or self._characters > _DISPLAY_CHARACTERS:
            displays = [other for other in self._entries if other[0] == "display"]
            dropped = {id(other) for other in displays[: (len(displays) + 1) // 2]}
            self._keep(lambda other: id(other) not in dropped)
            self._num_displays += 1
            self._characters += _size(entry)


def _size(display: Entry) -> int:
    return sum(len(value) if isinstance(value, str) else len(repr(value)) for value in display[1].values())


def _in_pairs(events: list[Measured]) -> list[Measured]:
    return [_sum(*events[start : start + 2]) for start in range(0, len(events), 2)]


def _sum(first: Measured, second: Measured | None = None) -> Measured:
    """Return one measurement for two that follow each other."""
    if second is None:
        return first
    names = {**first.seconds, **second.seconds}
    return replace(
        second,
        count=first.count + second.count,
        steps=first.steps + second.steps,
        samples=first.samples + second.samples,
        seconds={name: first.seconds.get(name, 0.0) + second.seconds.get(name, 0.0) for name in names},
        num_bytes=first.num_bytes + second.num_bytes,
        drift=first.drift if second.drift is None else second.drift,
        first_nan=second.first_nan if first.first_nan is None else first.first_nan,
    )
