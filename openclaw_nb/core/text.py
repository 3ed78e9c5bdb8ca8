"""Small pieces of text that several surfaces share: aligned columns, sizes, flags in the environment.

Knows strings and numbers only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from openclaw_nb.core.errors import UsageError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<prefix>[kmgt])?(i?b)?", re.IGNORECASE)


def aligned(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Set rows of cells below each other, two spaces between columns.

    Parameters
    ----------
    rows : sequence of sequence of str
        All of the same length; the header, if there is one, is the first.
    indent : str
        What each line begins with.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join((indent + line).rstrip() for line in lines)


def size_text(size_bytes: int | None) -> str:
    """Write a size for people, e.g. ``"1.5 GiB"``; ``"-"`` where it is not known."""
    if size_bytes is None:
        return "-"
    size = float(size_bytes)
    for unit in _UNITS[:-1]:
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"


def counted(number: int, what: str) -> str:
    """Write how many there are, e.g. ``"1 sample"`` and ``"2 samples"``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def parse_size(size: int | str, what: str) -> int:
    """Return the bytes that a size says: ``"25MB"``, ``"1.5 GiB"``, ``4096``. Units are powers of 1024.

    Raises
    ------
    UsageError
        Naming ``what`` was to be a size.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    found = _SIZE.fullmatch(str(size).strip())
    if found is None:
        raise UsageError(f"{what} is a size such as '25MB' or a number of bytes, not {size!r}.")
    power = ["", *"kmgt"].index((found["prefix"] or "").lower())
    return int(float(found["number"]) * 1024**power)


def is_set(environment: Mapping[str, str], name: str) -> bool:
    """Return whether a variable says yes; unset, empty, ``0``, ``no``, ``off`` and ``false`` say no."""
    return environment.get(name, "").strip().lower() not in ("", "0", "no", "off", "false")
