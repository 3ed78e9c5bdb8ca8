"""The output of a running cell, drawn again and again until the cell ends.

    entries of each rank ──> Transcript ──┐
    entries of each rank ──> Transcript ──┴─ merge ──> Slots ─────> NotebookSink
                                                └────> TextSink     (can change what it has shown)
                                                      (cannot)

Knows when to draw, what changed and how much may be sent; does not know what is wrong when a cell fails,
and starts, stops and waits for nothing.
"""

from __future__ import annotations

import html
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, TextIO

from openclaw_nb.notebook.merge import Block, Limits, label, merge, render_text
from openclaw_nb.notebook.transcript import Display, Item, Result, Transcript

LIVE_LIMITS = Limits(lines=400, blocks=100, chars=100_000)
FINAL_LIMITS = Limits(lines=10_000, blocks=2_000, chars=800_000)
_INTERVAL_SECONDS = 0.2
# Jupyter's server drops what a kernel shows faster than 1 MB/s; half of it is left to the rest of the cell.
_CHARS_PER_SECOND = 500_000
_DRAWN_AT_ONCE = 500_000
# Drawing many long transcripts may take this part of the kernel's time, not more.
_DRAWING_SHARE = 0.2

Bundle = tuple[dict[str, Any], dict[str, Any]]
_EMPTY: Bundle = ({"text/plain": ""}, {})


class SlotSink(Protocol):
    """A place with numbered slots, each of which holds one mime bundle that can be changed."""

    def show(self, slot: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Open the next slot, below the others."""

    def update(self, slot: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Change what an open slot holds."""


@dataclass(frozen=True)
class Picture:
    """All that there is to draw at one moment; ``at`` is the clock's time in seconds."""

    transcripts: Mapping[int, Transcript]
    world_size: int
    status: str | None
    at: float
    final: bool


class LiveOutput:
    """The output of one cell on several ranks.

    Entries may come from any thread. Call `refresh` and `finish` in the thread that runs the cell: what
    another thread displays for the first time may land in a later cell.

    Parameters
    ----------
    world_size : int
        How many ranks the group has; with one there are no labels.
    ranks : iterable of int
        The ranks that run the cell; one that joins later is taken up with its first entry.
    sink : SlotSink or TextSink
        Where it is drawn.
    clock : callable
        Seconds that only grow.
    """

    def __init__(
        self,
        world_size: int,
        ranks: Iterable[int],
        sink: SlotSink | TextSink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world_size = world_size
        self._transcripts = {rank: Transcript() for rank in ranks}
        self._canvas = sink if isinstance(sink, TextSink) else Slots(sink)
        self._clock = clock
        self._status: str | None = None
        self._not_before = float("-inf")
        self._finished = False
        self._lock = threading.RLock()

    def feed(self, rank: int, entry: Sequence[Any]) -> None:
        """Take what a rank has shown, as the wire has it; see `Transcript.apply`."""
        with self._lock:
            if rank not in self._transcripts:
                self._transcripts[rank] = Transcript()
            self._transcripts[rank].apply(entry)

    def status(self, text: str | None) -> None:
        """Set the text below all output, or take it away; drawn with the next refresh."""
        with self._lock:
            self._status = text

    def refresh(self, force: bool = False) -> bool:
        """Draw what has changed, unless the last time was just now; return whether it drew."""
        with self._lock:
            now = self._clock()
            if now < self._not_before and not force:
                return False
            size = self._canvas.draw(self._picture(now))
            spent = self._clock() - now
            pause = max(_INTERVAL_SECONDS, size / _CHARS_PER_SECOND, spent / _DRAWING_SHARE)
            self._not_before = now + pause
            return True

    def finish(self) -> None:
        """Draw what stays in the cell."""
        with self._lock:
            self._finished = True
            self._status = None
            self.refresh(force=True)
            while self._canvas.unfinished:
                time.sleep(max(0.0, self._not_before - self._clock()))  # longer after a large display
                self.refresh(force=True)

    def _picture(self, now: float) -> Picture:
        world_size = max(self._world_size, len(self._transcripts))
        return Picture(self._transcripts, world_size, self._status, now, self._finished)


# ------------------------------------------------------------------------------------------ in a notebook


class Slots:
    """Draws pictures into the slots of a sink; only slots whose content changed are sent.

    Adjacent text shares a slot; a display or a rich result has one of its own, below a slot with its label.
    A slot that is no longer needed is emptied, and used again when output grows.

    Attributes
    ----------
    unfinished : bool
        Whether the last drawing ended early, as there was more than can be sent at once: the next goes on.
    """

    def __init__(self, sink: SlotSink) -> None:
        self._sink = sink
        self.unfinished = False
        self._sent: list[Bundle] = []
        self._drawn: tuple[Any, ...] = ()

    def draw(self, picture: Picture) -> int:
        """Draw it; return about how many characters were sent."""
        versions = {rank: transcript.version for rank, transcript in picture.transcripts.items()}
        state = versions, picture.world_size, picture.status, picture.final
        if state == self._drawn and not self.unfinished:
            return 0
        blocks = merge({rank: transcript.items for rank, transcript in picture.transcripts.items()})
        limits = FINAL_LIMITS if picture.final else LIVE_LIMITS
        wanted = segments(blocks, picture.world_size, limits)
        if picture.status is not None:
            wanted.append(({"text/plain": picture.status}, {}))
        size = self._send(wanted)
        self._drawn = state
        return size

    def _send(self, wanted: list[Bundle]) -> int:
        size = 0
        self.unfinished = False
        wanted = wanted + [_EMPTY] * (len(self._sent) - len(wanted))
        for slot, bundle in enumerate(wanted):
            if size > _DRAWN_AT_ONCE:
                self.unfinished = True
                break
            if slot == len(self._sent):
                self._sink.show(slot, *bundle)
                self._sent.append(bundle)
            elif self._sent[slot] != bundle:
                self._sink.update(slot, *bundle)
                self._sent[slot] = bundle
            else:
                continue
            size += sum(len(str(value)) for value in bundle[0].values())
        return size


def segments(blocks: Sequence[Block], world_size: int, limits: Limits) -> list[Bundle]:
    """Turn blocks into the mime bundles that stand below each other."""
    bundles: list[Bundle] = []
    before: tuple[int, ...] = ()
    for rich, run in groupby(_pieces(blocks), key=lambda piece: piece[0]):
        parts = [part for _, part in run]
        if rich:
            for part in parts:
                bundles += _rich(part, world_size, before)
                before = part.ranks
        else:
            text = render_text(parts, world_size, before=before, limits=limits, coloured=True)
            bundles.append(({"text/plain": text}, {}))
            before = parts[-1].ranks
    return bundles


def _pieces(blocks: Sequence[Block]) -> Iterable[tuple[bool, Block]]:
    """Split blocks where text and rich items meet."""
    for block in blocks:
        for rich, items in groupby(block.items, key=_is_rich):
            yield rich, Block(block.ranks, tuple(items))


def _is_rich(item: Item) -> bool:
    return isinstance(item, Display) or (isinstance(item, Result) and set(item.data) != {"text/plain"})


def _rich(part: Block, world_size: int, before: tuple[int, ...]) -> list[Bundle]:
    bundles: list[Bundle] = []
    if part.ranks != before and (name := label(part.ranks, world_size)):
        small = f'<div style="opacity: 0.7; font-size: 85%">[{html.escape(name)}]</div>'
        bundles.append(({"text/plain": f"[{name}]", "text/html": small}, {}))
    bundles += [(item.data, item.metadata) for item in part.items if isinstance(item, Display | Result)]
    return bundles


class NotebookSink:
    """Slots in the output of the cell that the kernel runs."""

    def __init__(self) -> None:
        self._name = f"openclaw-{uuid.uuid4().hex}"

    def show(self, slot: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Display a bundle under the slot's own display id."""
        from IPython.display import display

        display(data, metadata=metadata, raw=True, display_id=f"{self._name}-{slot}")

    def update(self, slot: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Change the display of a slot, also in the saved notebook."""
        from IPython.display import update_display

        update_display(data, metadata=metadata, raw=True, display_id=f"{self._name}-{slot}")


# ---------------------------------------------------------------------------------------- in a terminal


class TextSink:
    """Prints what several ranks have shown, each line once, to a file that takes nothing back.

    Lines that can no longer change are printed as soon as all ranks have shown a line at or after them,
    or after a time of patience: a rank may be the only one that prints. The end prints the rest.

    Parameters
    ----------
    file : text file
        Where to print.
    patience_seconds : float
        How long lines wait for other ranks to show the same.
    """

    unfinished = False  # nothing limits how fast a file is written

    def __init__(self, file: TextIO, patience_seconds: float = 2.0) -> None:
        self._file = file
        self._patience_seconds = patience_seconds
        self._waits_since: float | None = None
        self._before: tuple[int, ...] = ()
        self._in_status = False

    def draw(self, picture: Picture) -> int:
        """Print what is due; return 0, as nothing limits how fast a file is written."""
        if picture.final:
            self._print(merge({rank: t.items for rank, t in picture.transcripts.items()}), picture)
            for transcript in picture.transcripts.values():
                transcript.clear()
        else:
            self._print_settled(picture)
        if picture.status is not None and not self._in_status:
            self._file.write(picture.status + "\n")
            self._before = ()
        self._in_status = picture.status is not None
        self._file.flush()
        return 0

    def _print_settled(self, picture: Picture) -> None:
        settled = {rank: transcript.settled() for rank, transcript in picture.transcripts.items()}
        blocks = merge({rank: [item for _, item in numbered] for rank, numbered in settled.items()})
        due = blocks[: self._num_due(blocks, picture)]
        self._print(due, picture)
        for rank, numbered in settled.items():
            num_printed = sum(len(block.items) for block in due if rank in block.ranks)
            picture.transcripts[rank].forget(number for number, _ in numbered[:num_printed])

    def _num_due(self, blocks: Sequence[Block], picture: Picture) -> int:
        agreed = [i for i, block in enumerate(blocks, 1) if len(block.ranks) == len(picture.transcripts)]
        if not blocks or agreed:
            self._waits_since = None
            return agreed[-1] if agreed else 0
        if self._waits_since is None:
            self._waits_since = picture.at
        if picture.at - self._waits_since < self._patience_seconds:
            return 0
        self._waits_since = None
        return len(blocks)

    def _print(self, blocks: Sequence[Block], picture: Picture) -> None:
        if not blocks:
            return
        coloured = self._file.isatty()
        text = render_text(blocks, picture.world_size, before=self._before, coloured=coloured)
        self._before = blocks[-1].ranks
        self._file.write(text + "\n")
