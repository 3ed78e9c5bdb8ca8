"""A pipeline of process steps: which step waits for which, and how long it all ideally takes.

Pure: numbers in, numbers out. Step s works on item k when step s - 1 has given it, when it is done with item k - 1,
when the channel to step s + 1 has room, and, where steps share what training changes, when the last that shares it is
done with item k - 1.
"""

from __future__ import annotations

from collections.abc import Sequence, Set


def last_sharers(reached: Sequence[Set[int]]) -> list[int]:
    """Return, for each step, the last step that shares something with it: itself when none does.

    Parameters
    ----------
    reached : sequence of set of int
        What each step uses of what training can change.

    Examples
    --------
    >>> last_sharers([set(), {1, 2}, {2}])
    [0, 2, 2]
    """
    return [
        max(other for other in range(step, len(reached)) if other == step or reached[step] & reached[other])
        for step in range(len(reached))
    ]


def ideal_times(
    costs: Sequence[float], num_items: int, depth: int, waits_for: Sequence[int]
) -> list[list[tuple[float, float]]]:
    """Return when each step ideally works on each item: (start, end) by step and item.

    Parameters
    ----------
    costs : sequence of float
        Seconds an item, by step.
    num_items : int
        How many there are.
    depth : int
        How many items a step may be ahead of the next.
    waits_for : sequence of int
        By step, the step that must be done with the item before; itself where it waits for none.
    """
    num_steps = len(costs)
    ends = [[0.0] * num_items for _ in costs]
    times: list[list[tuple[float, float]]] = [[] for _ in costs]
    for item in range(num_items):
        for step in range(num_steps):
            ready = [0.0]
            if step:
                ready.append(ends[step - 1][item])
            if item:
                ready += [ends[step][item - 1], ends[waits_for[step]][item - 1]]
            if item >= depth and step + 1 < num_steps:
                ready.append(ends[step + 1][item - depth])
            start = max(ready)
            ends[step][item] = start + costs[step]
            times[step].append((start, ends[step][item]))
    return times


def idle_share(times: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Return the share of all lanes' time, from the first start to the last end, in which nothing is worked on.

    Intervals of one lane may overlap; what they cover counts once.
    """
    whole = max(end for lane in times for _, end in lane) - min(start for lane in times for start, _ in lane)
    busy = 0.0
    for lane in times:
        reached = float("-inf")
        for start, end in sorted(lane):
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
    return 1.0 - busy / (whole * len(times)) if whole > 0 else 0.0
