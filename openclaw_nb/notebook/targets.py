"""Which ranks ``--targets`` means.

    "0,1"  "0-2"  "worker-1"  "CPU-1,GPU-0"  ──> ranks

Pure: knows names of workers and devices by rank, no cluster.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from openclaw_nb.core.errors import UsageError, unknown_name

_RANGE = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    worker: str
    device: str


def resolve_targets(text: str, places: Mapping[int, Place]) -> list[int]:
    """Return the ranks that ``text`` names, in order, each once.

    Raises
    ------
    UnknownNameError
        If there is no such rank, worker or device in the cluster.
    UsageError
        If nothing is named.
    """
    words = [word for word in re.split(r"[,\s]+", text) if word]
    if not words:
        raise UsageError("--targets names nothing: give ranks (0,1 or 0-2), worker ids or devices.")
    return sorted({rank for word in words for rank in _ranks_of(word, places)})


def _ranks_of(word: str, places: Mapping[int, Place]) -> list[int]:
    if word.isdecimal():
        ranks = [int(word)]
    elif found := _RANGE.fullmatch(word):
        ranks = list(range(int(found[1]), int(found[2]) + 1))
        if not ranks:
            raise UsageError(f"The range {word} is empty: write {found[2]}-{found[1]}.")
    else:
        return _by_name(word, places)
    for rank in ranks:
        if rank not in places:
            raise unknown_name("rank", str(rank), map(str, places))
    return ranks


def _by_name(word: str, places: Mapping[int, Place]) -> list[int]:
    name = word.lower()
    ranks = [rank for rank, place in places.items() if name in (place.worker.lower(), place.device.lower())]
    if not ranks:
        names = {name for rank, place in places.items() for name in (str(rank), place.worker, place.device)}
        raise unknown_name("rank, worker or device in this cluster:", word, names)
    return ranks
