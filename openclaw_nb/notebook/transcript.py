"""What one rank has shown so far in the running cell, as a list of items.

Knows how text, displays, results and ``clear_output`` change what stands on a screen, and bounds itself;
does not know other ranks or how anything is drawn.

    entry from the wire ──> Transcript.apply ──> items: (Line, Line, Display, Omitted, Line, ...)

A line stays where it began: text that goes on after a display continues its line, and a carriage return
rewrites it, so that a progress bar keeps its place however much is shown around it.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

HEAD_ITEMS = 1_000
TAIL_ITEMS = 4_000
HEAD_CHARS = 2_000_000
TAIL_CHARS = 8_000_000
LINE_CHARS = 10_000
FLOOD_LINES = 1_000
LEFT_OUT = -1  # stands for the number of the item that says what was left out here
_CUT = " ... (line cut)"
_RETURNABLE_LINES = 32  # how far up a cursor may go: nested progress bars write above their last line
_IDS = 10_000
_PLACES = 16

_CONTROL = re.compile(r"(\n|\r|\x1b\[\d*[AK])")
_UNFINISHED = re.compile(r"\x1b(\[[\d;]*)?$")
_COLOUR = re.compile(r"\x1b\[([\d;]*)m")
_COLOUR_ENDS = {"", "0", "00", "22", "23", "24", "27", "39", "49"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of text, without its line break."""

    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class Omitted:
    """So many lines are not shown here."""

    num_lines: int


@dataclass(frozen=True)
class _Bundle:
    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def key(self) -> str:
        """The data as one string: equal exactly when the data is."""
        return json.dumps(self.data, sort_keys=True, default=repr)


@dataclass(frozen=True)
class Display(_Bundle):
    """A shown mime bundle; two are equal when their data is."""


@dataclass(frozen=True)
class Result(_Bundle):
    """The value of the cell's last expression as a mime bundle."""


Item = Line | Display | Result | Omitted


@dataclass(frozen=True, slots=True)
class _Flood:
    """What the worker told of a stream that it no longer sends in full."""

    num_lines: int
    lines: tuple[Line, ...]

    def items(self) -> Iterator[Item]:
        if self.num_lines > 0:
            yield Omitted(self.num_lines)
        yield from self.lines


_Stored = Line | Display | Result | _Flood


def _size(item: _Stored) -> int:
    if isinstance(item, Line):
        return len(item.text)
    if isinstance(item, _Flood):
        return sum(len(line.text) for line in item.lines)
    return sum(len(value) if isinstance(value, str) else len(repr(value)) for value in item.data.values())


class _Kept:
    """Numbered items in order: a head that stays, a bounded tail, and the count of what fell out between."""

    def __init__(self) -> None:
        self.num_left_out = 0
        self._next = 0
        self._first = 0
        self._head: dict[int, _Stored] = {}
        self._tail: dict[int, _Stored] = {}
        self._head_chars = 0
        self._tail_chars = 0

    def add(self, item: _Stored) -> int:
        number, size = self._next, _size(item)
        self._next += 1
        if not self._tail and not self.num_left_out and self._fits_head(size):
            self._head[number] = item
            self._head_chars += size
        else:
            self._tail[number] = item
            self._tail_chars += size
            self._bound_tail()
        return number

    def _fits_head(self, size: int) -> bool:
        return len(self._head) < HEAD_ITEMS and self._head_chars + size <= HEAD_CHARS

    def _bound_tail(self) -> None:
        while len(self._tail) > TAIL_ITEMS or (self._tail_chars > TAIL_CHARS and len(self._tail) > 1):
            item = self._tail.pop(self._oldest())
            self._tail_chars -= _size(item)
            self.num_left_out += item.num_lines + len(item.lines) if isinstance(item, _Flood) else 1

    def _oldest(self) -> int:
        """The first number of the tail; a dict's own iterator would pass all that was taken out before."""
        while self._first not in self._tail:
            self._first += 1
        return self._first

    def get(self, number: int) -> _Stored | None:
        return self._tail.get(number) or self._head.get(number)

    def replace(self, number: int, item: _Stored) -> None:
        if number in self._head:
            self._head_chars += _size(item) - _size(self._head[number])
            self._head[number] = item
        elif number in self._tail:
            self._tail_chars += _size(item) - _size(self._tail[number])
            self._tail[number] = item
            self._bound_tail()

    def forget(self, number: int) -> None:
        if number == LEFT_OUT:
            self.num_left_out = 0
        elif number in self._head:
            self._head_chars -= _size(self._head.pop(number))
        elif number in self._tail:
            self._tail_chars -= _size(self._tail.pop(number))

    def numbered(self) -> Iterator[tuple[int, Item]]:
        yield from _expanded(self._head)
        if self.num_left_out:
            yield LEFT_OUT, Omitted(self.num_left_out)
        yield from _expanded(self._tail)


def _expanded(stored: dict[int, _Stored]) -> Iterator[tuple[int, Item]]:
    for number, item in stored.items():
        if isinstance(item, _Flood):
            yield from ((number, part) for part in item.items())
        else:
            yield number, item


class _Pen:
    """Where one stream writes: ``up`` lines above the fresh line that it has not begun, at column ``col``."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.lines: deque[int] = deque(maxlen=_RETURNABLE_LINES)
        self.up = 0
        self.col = 0
        self.colours = ""
        self.held = ""  # the beginning of a control code, of which the next piece has the end

    def lift(self) -> None:
        """Leave the lines written so far: what follows begins a line of its own."""
        self.lines.clear()
        self.up = self.col = 0


class Transcript:
    """What one rank has shown so far in this cell.

    At most 5,000 items are kept: the first 1,000 and the newest; what falls out between is counted.

    Attributes
    ----------
    version : int
        Grows with each call that may have changed something.
    """

    def __init__(self) -> None:
        self.version = 0
        self._clear_before_next = False
        self._cached: tuple[int, tuple[Item, ...]] = (-1, ())
        self._begin()

    def _begin(self) -> None:
        self._kept = _Kept()
        self._pens = {name: _Pen(name) for name in ("stdout", "stderr")}
        self._ids: dict[str, list[int]] = {}
        self._floods: dict[str, _Spot] = {}
        self._clear_before_next = False

    @property
    def items(self) -> tuple[Item, ...]:
        """What stands on the screen, in order."""
        if self._cached[0] != self.version:
            self._cached = self.version, tuple(item for _, item in self._kept.numbered())
        return self._cached[1]

    def apply(self, entry: Sequence[Any]) -> None:
        """Carry out an entry of the wire: the name of one of the methods below, then its arguments.

        Raises
        ------
        ValueError
            If the entry is of no known kind.
        """
        kind, *arguments = entry
        match kind:
            case "stream":
                self.stream(*arguments)
            case "display":
                self.display(*arguments)
            case "result":
                self.result(*arguments)
            case "clear":
                self.clear(*arguments)
            case "omit":
                self.omit(*arguments)
            case _:
                raise ValueError(
                    f"A transcript has no entry {kind!r}; it has stream, display, result, clear, omit."
                )

    # ------------------------------------------------------------------------------------------ text

    def stream(self, name: str, text: str) -> None:
        """Write text as a terminal would.

        Parameters
        ----------
        name : str
            ``"stdout"`` or ``"stderr"``.
        text : str
            Any part of the stream. A line feed ends a line, a carriage return goes back to the beginning of
            it, the terminal's "cursor up" and "erase line" work, colour codes are kept.
        """
        if not text:
            return
        self._output()
        pen = self._pens[name]
        text, pen.held = pen.held + text, ""
        if "\x1b" in text and (code := _UNFINISHED.search(text)):
            text, pen.held = text[: code.start()], code[0]
        if pen.up > 1 or "\r" in text or "\x1b" in text:
            self._write_controlled(pen, text)
        else:
            self._write_plain(pen, text)

    def _write_plain(self, pen: _Pen, text: str) -> None:
        *ended, rest = text.split("\n")
        for part in ended:
            if part and pen.up:
                self._write(pen, part)
            elif not pen.up:
                self._new_line(pen, part)
            self._end_line(pen)
        if rest:
            self._write(pen, rest)

    def _write_controlled(self, pen: _Pen, text: str) -> None:
        for token in _CONTROL.split(text):
            if token == "\n":
                if not pen.up:
                    self._new_line(pen, "")
                self._end_line(pen)
            elif token == "\r":
                pen.col = 0
            elif _CONTROL.fullmatch(token):
                self._move_or_erase(pen, token)
            elif token:
                self._write(pen, token)

    def _move_or_erase(self, pen: _Pen, code: str) -> None:
        amount = code[2:-1]
        if code.endswith("A"):
            pen.up = min(len(pen.lines), pen.up + int(amount or 1))
        elif pen.up and isinstance(line := self._kept.get(pen.lines[-pen.up]), Line):
            kept = "" if amount == "2" else line.text[: pen.col]
            self._kept.replace(pen.lines[-pen.up], Line(pen.stream, kept))

    def _write(self, pen: _Pen, piece: str) -> None:
        line = self._kept.get(pen.lines[-pen.up]) if pen.up else None
        if not isinstance(line, Line):
            if pen.up:  # its line was left out meanwhile
                pen.lift()
            self._new_line(pen, piece)
            return
        text, pen.col = _overwritten(line.text, pen.col, piece)
        self._kept.replace(pen.lines[-pen.up], Line(pen.stream, _cut(text)))

    def _new_line(self, pen: _Pen, text: str) -> None:
        text = pen.colours + text
        pen.lines.append(self._kept.add(Line(pen.stream, _cut(text))))
        pen.up, pen.col = 1, len(text)

    def _end_line(self, pen: _Pen) -> None:
        line = self._kept.get(pen.lines[-pen.up])
        if isinstance(line, Line) and ("\x1b" in line.text or pen.colours):
            pen.colours = _open_colours(line.text)
        pen.up -= 1
        pen.col = 0

    def omit(self, num_lines: int, tail: str, name: str = "stdout") -> None:
        """Say that the worker left out lines of a flood; a repeated call replaces the count and the tail.

        Parameters
        ----------
        num_lines : int
            How many lines, in this cell so far, that are not in ``tail`` either.
        tail : str
            The newest text of the flood.
        name : str
            The stream that is flooded.
        """
        self._output()
        spot = self._floods.get(name)
        if spot is None or self._kept.get(spot.number) is None:
            spot = _Spot(self._flood_number(name, num_lines, tail), counted=spot.told if spot else 0)
            self._floods[name] = spot
        lines = _lines_of(name, tail)
        num_cut = max(0, len(lines) - FLOOD_LINES)
        shown = _Flood(max(0, num_lines - spot.counted) + num_cut, tuple(lines[num_cut:]))
        self._kept.replace(spot.number, shown)
        spot.told = num_lines + len(lines)

    def _flood_number(self, name: str, num_lines: int, tail: str) -> int:
        """Where the flood stands: in place of a progress bar that it rewrites, else at the end."""
        pen = self._pens[name]
        rewritten = pen.lines[-pen.up] if pen.up and not num_lines and "\r" in tail else None
        pen.lift()
        if rewritten is not None and self._kept.get(rewritten) is not None:
            return rewritten
        return self._kept.add(_Flood(0, ()))

    # --------------------------------------------------------------------------------------- bundles

    def display(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        display_id: str | None = None,
        update: bool = False,
    ) -> None:
        """Show a mime bundle, or put it in the place of those shown under the same id in this cell.

        An update of an id that this cell has not shown, or has cleared, changes nothing.
        """
        shown = Display(data, metadata or {})
        if update:
            self._update(display_id, shown)
            return
        self._output()
        number = self._kept.add(shown)
        if display_id is not None:
            self._remember(display_id, number)

    def _update(self, display_id: str | None, shown: Display) -> None:
        for number in self._ids.get(display_id or "", ()):
            self._kept.replace(number, shown)
        self.version += 1

    def _remember(self, display_id: str, number: int) -> None:
        numbers = self._ids.setdefault(display_id, [])
        numbers.append(number)
        del numbers[:-_PLACES]
        if len(self._ids) > _IDS:
            self._ids = {name: at for name, at in self._ids.items() if self._kept.get(at[-1]) is not None}

    def result(self, data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        """Show the value of the cell's last expression."""
        self._output()
        self._kept.add(Result(data, metadata or {}))

    def clear(self, wait: bool = False) -> None:
        """Take away all that was shown; with ``wait`` only when the next output comes."""
        if wait:
            self._clear_before_next = True
            return
        self._begin()
        self.version += 1

    def _output(self) -> None:
        """Whatever comes next is shown: clear first if that was asked for."""
        if self._clear_before_next:
            self._begin()
        self.version += 1

    # ------------------------------------------------------------------- for output that cannot be changed

    def settled(self) -> list[tuple[int, Item]]:
        """Items that no later output can change, with their numbers, in order.

        Left out are lines not yet ended, displays that may be updated and a flood's count and tail.
        """
        moving = {spot.number for spot in self._floods.values()}
        moving.update(number for numbers in self._ids.values() for number in numbers)
        for pen in self._pens.values():
            moving.update(list(pen.lines)[len(pen.lines) - pen.up :])
        return [(number, item) for number, item in self._kept.numbered() if number not in moving]

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop items of `settled` that have been printed for good."""
        for number in numbers:
            self._kept.forget(number)
        self.version += 1


@dataclass
class _Spot:
    """Where a flood stands, how many of its lines were ``told``, and how many of them fell out before."""

    number: int
    counted: int
    told: int = 0


def _lines_of(stream: str, text: str) -> list[Line]:
    parts = text.removesuffix("\n").split("\n") if text else []
    return [Line(stream, _cut(part.rstrip("\r").rpartition("\r")[2])) for part in parts]


def _overwritten(text: str, col: int, piece: str) -> tuple[str, int]:
    """Write ``piece`` over ``text`` at ``col``; return the text and where the cursor then stands."""
    if col >= len(text):
        text += piece
        return text, len(text)
    if "\x1b" in piece or "\x1b" in text:
        # Columns cannot be counted between colour codes: what was written last wins.
        text = text[:col] + piece
        return text, len(text)
    end = col + len(piece)
    return text[:col] + piece + text[end:], end


def _cut(text: str) -> str:
    return text if len(text) <= LINE_CHARS else text[:LINE_CHARS] + _CUT


def _open_colours(text: str) -> str:
    """The colour codes that are still in force at the end of a line."""
    codes: list[str] = []
    for match in _COLOUR.finditer(text):
        if match[1].rpartition(";")[2] in _COLOUR_ENDS:
            codes.clear()
        else:
            codes.append(match[0])
    return "".join(codes[-4:])
