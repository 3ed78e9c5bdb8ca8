"""How long sums and messages between the ranks take, over the transport that training uses.

Each is made several times; a median counts. Knows ranks; does not know what the times are for.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.group.sums import Layout
from openclaw_nb.engine.profile.clock import now

_SHORT = 64  # values
_LEAST, _MOST = 1 << 16, 1 << 24
_TIMES, _WARM_UP = 11, 3
_TAG = 7


def meet(ranks: Ranks) -> None:
    """Wait for all ranks."""
    ranks.gather(torch.zeros(1))


def time_meetings(ranks: Ranks) -> float:
    """Return the seconds in which ranks that are all there meet."""
    return _timed(lambda: meet(ranks))


def time_all_reduces(ranks: Ranks, num_bytes: int, device: torch.device) -> list[tuple[float, float]]:
    """Return bytes and seconds of a short all-reduce and of one of about ``num_bytes``, with its copies."""
    numels = [_SHORT, min(max(num_bytes // 4, _LEAST), _MOST)]
    sums = ranks.make_sums([Layout(numel, torch.float32, device) for numel in numels])
    found = []
    for numel, total in zip(numels, sums, strict=True):
        source, turns = torch.ones(numel, device=device), iter(range(1 << 30))

        def reduce(total=total, source=source, turns=turns) -> None:  # type: ignore[no-untyped-def]
            number = next(turns)
            turn = number % len(total.inputs)
            total.inputs[turn].copy_(source)
            work = total.start(turn, number)
            if work is not None:
                work.wait()
            source.copy_(total.result)

        found.append((4.0 * numel, _timed(reduce, lambda: meet(ranks))))
    return found


def time_group_sums(ranks: Ranks, num_bytes: int, device: torch.device) -> list[tuple[float, float]]:
    """Return bytes and seconds of a short all-reduce of the group and of one of about ``num_bytes``.

    It is what strategies have whose sums are not made in buckets: split layers, and shards.
    """
    found = []
    for numel in (_SHORT, min(max(num_bytes // 4, _LEAST), _MOST)):
        values = torch.zeros(numel, device=device)

        def reduce(values=values) -> None:  # type: ignore[no-untyped-def]
            ranks.group.allreduce([values]).wait()

        found.append((4.0 * numel, _timed(reduce, lambda: meet(ranks))))
    return found


def time_messages(ranks: Ranks, num_bytes: int) -> list[tuple[float, float]]:
    """Return bytes and seconds of a short message from rank 0 to rank 1 and of one of about ``num_bytes``."""
    found = []
    for numel in (_SHORT, min(max(num_bytes // 4, _LEAST), _MOST)):
        buffer = torch.ones(numel)

        def there_and_back(buffer=buffer) -> None:  # type: ignore[no-untyped-def]
            if ranks.rank == 0:
                ranks.group.send([buffer], 1, _TAG).wait()
                ranks.group.recv([buffer], 1, _TAG).wait()
            elif ranks.rank == 1:
                ranks.group.recv([buffer], 0, _TAG).wait()
                ranks.group.send([buffer], 0, _TAG).wait()

        found.append((4.0 * numel, _timed(there_and_back) / 2))
    meet(ranks)
    return found


def _timed(act: Callable[[], None], before: Callable[[], None] = lambda: None) -> float:
    seconds = []
    for _ in range(_TIMES):
        before()
        began = now()
        act()
        seconds.append(now() - began)
    return median(seconds[_WARM_UP:])
