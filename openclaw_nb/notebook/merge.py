"""What several ranks have shown, as one: identical output is folded, the rest stands a rank at a time.

Pure: items in, blocks and text out. Does not know how items come about, slots, kernels or clocks.

The ranks are folded in one after the other. Each is walked beside what the ranks before it showed; where
the two differ, the nearest item that both have is looked for, and what stands before it stays apart:

    rank 0:  load  a  b  done          load     [ranks 0-1]
    rank 1:  load  c  done        =>   a  b     [rank 0]
                                       c        [rank 1]
                                       done     [ranks 0-1]

The search goes equally far ahead on both sides and the walk then passes what was searched, so that folding
in a rank costs no more than the length of both.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from openclaw_nb.notebook.transcript import Display, Item, Line, Omitted, Result

_RED, _RESET = "\x1b[31m", "\x1b[0m"


@dataclass(frozen=True)
class Block:
    """Consecutive items that the same ranks showed; without ranks, a note such as what was left out."""

    ranks: tuple[int, ...]
    items: tuple[Item, ...]


@dataclass(slots=True)
class _Row:
    key: Hashable
    item: Item
    ranks: tuple[int, ...]


def merge(transcripts: Mapping[int, Sequence[Item]]) -> list[Block]:
    """Fold what several ranks have shown.

    Every block names the ranks that have shown its items so far; each rank's own order is kept.

    Parameters
    ----------
    transcripts : mapping of int to sequence of Item
        The items of each rank.

    Returns
    -------
    list of Block
        Neighbouring blocks differ in their ranks.
    """
    rows: list[_Row] = []
    for rank in sorted(transcripts):
        items = transcripts[rank]
        rows = _fold_in(rows, [_Row(_key(item), item, (rank,)) for item in items])
    return [
        Block(ranks, tuple(row.item for row in run))
        for ranks, run in groupby(rows, key=lambda row: row.ranks)
    ]


def _key(item: Item) -> Hashable:
    if isinstance(item, Line):
        return item.stream, item.text
    if isinstance(item, Omitted):
        return item.num_lines
    return type(item).__name__, item.key, None


def _fold_in(rows: list[_Row], new: list[_Row]) -> list[_Row]:
    """Put one more rank's rows among those of the ranks before it."""
    folded: list[_Row] = []
    i = j = 0
    while i < len(rows) and j < len(new):
        if rows[i].key == new[j].key:
            rows[i].ranks += new[j].ranks
            folded.append(rows[i])
            i, j = i + 1, j + 1
            continue
        common = _next_common(rows, i, new, j)
        if common is None:
            break
        folded += rows[i : common[0]]
        folded += new[j : common[1]]
        i, j = common
    end = _end_of_run(rows, i) if j < len(new) else i
    return folded + rows[i:end] + new[j:] + rows[end:]


def _next_common(rows: list[_Row], i: int, new: list[_Row], j: int) -> tuple[int, int] | None:
    """Find the nearest places from ``i`` and ``j`` on that hold the same item."""
    in_rows: dict[Hashable, int] = {}
    in_new: dict[Hashable, int] = {}
    while i < len(rows) or j < len(new):
        old_key = rows[i].key if i < len(rows) else None
        new_key = new[j].key if j < len(new) else None
        if old_key == new_key:
            return i, j
        if old_key in in_new:
            return i, in_new[old_key]
        if new_key in in_rows:
            return in_rows[new_key], j
        if old_key is not None:
            in_rows.setdefault(old_key, i)
        if new_key is not None:
            in_new.setdefault(new_key, j)
        i, j = i + 1, j + 1
    return None


def _end_of_run(rows: list[_Row], i: int) -> int:
    """Where a rank that shares nothing more stands: behind the run of single, or of shared, rows at ``i``."""
    shared = i < len(rows) and len(rows[i].ranks) > 1
    while i < len(rows) and (len(rows[i].ranks) > 1) == shared:
        i += 1
    return i


# ------------------------------------------------------------------------------------------------- as text


def label(ranks: Sequence[int], world_size: int) -> str:
    """Name ranks, e.g. ``"rank 1"``, ``"ranks 0-3"`` or ``"ranks 0, 2-3"``; "" where there is only one."""
    if world_size == 1 or not ranks:
        return ""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


@dataclass(frozen=True)
class Limits:
    """How much text is shown at once; where it is more, the head and the three times longer tail stay."""

    lines: int
    blocks: int
    chars: int


def render_text(
    blocks: Sequence[Block],
    world_size: int,
    *,
    before: tuple[int, ...] = (),
    limits: Limits | None = None,
    coloured: bool = False,
) -> str:
    """Write blocks as text, each headed by its ranks unless the block before has the same.

    Parameters
    ----------
    blocks : sequence of Block
        What is shown. Of displays and results it is their ``text/plain``.
    world_size : int
        How many ranks there are; with one there are no labels.
    before : tuple of int, optional
        The ranks of what stands before this text.
    limits : Limits, optional
        How much at most; longer blocks are shortened first, and what is not shown is counted.
    coloured : bool, optional
        Whether lines of stderr become red where they have no colour of their own, and colours end with
        their line.

    Returns
    -------
    str
        Lines without a line break at the end.
    """
    while True:
        shown = list(blocks) if limits is None else shorten(blocks, limits)
        text = "\n".join(_text_lines(shown, world_size, before, coloured))
        if limits is None or len(text) <= limits.chars or limits.lines <= 16:
            return text
        limits = replace(limits, lines=limits.lines // 2, blocks=max(4, limits.blocks // 2))


def _text_lines(
    blocks: Sequence[Block], world_size: int, before: tuple[int, ...], coloured: bool
) -> Iterator[str]:
    for block in blocks:
        if block.ranks != before and (name := label(block.ranks, world_size)):
            yield f"[{name}]"
        before = block.ranks
        for item in block.items:
            yield _coloured(item) if coloured and isinstance(item, Line) else item_text(item)


def item_text(item: Item) -> str:
    """Write one item as plain text."""
    if isinstance(item, Line):
        return item.text
    if isinstance(item, Omitted):
        return f"... {item.num_lines:,} {'line' if item.num_lines == 1 else 'lines'} left out ..."
    return str(item.data.get("text/plain", f"<{', '.join(item.data) or 'empty output'}>"))


def _coloured(line: Line) -> str:
    if "\x1b" in line.text:
        return line.text if line.text.endswith(_RESET) else line.text + _RESET
    return f"{_RED}{line.text}{_RESET}" if line.stream == "stderr" and line.text else line.text


def shorten(blocks: Sequence[Block], limits: Limits) -> list[Block]:
    """Leave out the middle of blocks, longest first, and then whole blocks in the middle, until they fit."""
    whole = [_by_line(block) for block in blocks]
    if len(whole) > limits.blocks:
        head, tail = limits.blocks // 4, limits.blocks - limits.blocks // 4
        between = sum(_num_lines(block.items) for block in whole[head:-tail])
        whole = [*whole[:head], Block((), (Omitted(between),)), *whole[-tail:]]
    share = _fair_share([len(block.items) for block in whole], limits.lines)
    return [_shortened(block, share) for block in whole]


def _by_line(block: Block) -> Block:
    """Split results and displays into lines of text, so that they can be shortened as lines are."""
    if not any(isinstance(item, Display | Result) for item in block.items):
        return block
    items: list[Item] = []
    for item in block.items:
        if isinstance(item, Display | Result):
            items += (Line("result", text) for text in item_text(item).split("\n"))
        else:
            items.append(item)
    return Block(block.ranks, tuple(items))


def _fair_share(lengths: Sequence[int], total: int) -> int:
    """Find the largest length at which all may be cut so that they make up ``total`` together."""
    left = total
    for place, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - place)
        if length > share:
            return max(1, share)
        left -= length
    return max(lengths, default=0)


def _shortened(block: Block, num_kept: int) -> Block:
    if len(block.items) <= num_kept:
        return block
    head = num_kept // 4
    end = len(block.items) - (num_kept - head)
    between = Omitted(_num_lines(block.items[head:end]))
    return Block(block.ranks, (*block.items[:head], between, *block.items[end:]))


def _num_lines(items: Sequence[Item]) -> int:
    return sum(item.num_lines if isinstance(item, Omitted) else 1 for item in items)
