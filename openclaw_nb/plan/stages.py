"""Which layers make which stage: names found, checked, and cut into consecutive stages of like size.

    words of the person ──resolve──> layers, in order ──check──> each parameter in exactly one
                                         └──cut──> a stage for each, balanced by size

Pure: names and numbers; does not know modules, ranks or devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate

from openclaw_nb.core.errors import RefusedError


def resolve(
    wanted: Sequence[str],
    names: Sequence[str],
    containers: Mapping[str, Sequence[str]],
    exact: Sequence[str] = (),
) -> list[str]:
    r"""Return the layers that words stand for, in the words' order; unknown and double ones are refused.

    Parameters
    ----------
    wanted : sequence of str
        Names of layers, or regular expressions that match whole names. Of nested matches the outermost counts.
    names : sequence of str
        All layers, in the model's order.
    containers : mapping of str to sequence of str
        What only holds layers, such as a ModuleList; its name stands for them.
    exact : sequence of str
        What may be named beside layers, as it is: parameters that belong to none.

    Raises
    ------
    RefusedError
        Listing every word that fits nothing, and every layer that was named twice.

    Examples
    --------
    >>> resolve(["a", r"b\.\d"], ["a", "b.0", "b.1", "c"], {})
    ['a', 'b.0', 'b.1']
    """
    found: list[str] = []
    unknown: list[str] = []
    for word in wanted:
        fitting = [word] if word in exact else _fitting(word, names, containers)
        found += fitting
        unknown += [] if fitting else [word]
    double = [name for name in dict.fromkeys(found) if found.count(name) > 1 or _is_inside(name, found)]
    problems = [f"there is no layer {_listed(unknown)}"] if unknown else []
    problems += [f"named twice, or inside of another one that is named: {_listed(double)}"] if double else []
    if problems:
        raise RefusedError(f"The layers cannot be used: {'; '.join(problems)}. Layers: {_listed(names)}.")
    return found


def _fitting(word: str, names: Sequence[str], containers: Mapping[str, Sequence[str]]) -> list[str]:
    if word in names:
        return [word]
    if word in containers:
        return [each for child in containers[word] for each in _fitting(child, names, containers)]
    try:
        pattern = re.compile(word)
    except re.error as error:
        raise RefusedError(f"{word!r} is neither a layer nor a regular expression: {error}.") from None
    fitting = [name for name in names if pattern.fullmatch(name)]
    return [name for name in fitting if not _is_inside(name, fitting)]


def _is_inside(name: str, others: Sequence[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def check_all_used(layers: Sequence[str], state: Sequence[str]) -> None:
    """Refuse layers that leave out some of the model's state.

    Parameters
    ----------
    layers : sequence of str
        What was chosen.
    state : sequence of str
        Names of all parameters, and of buffers that training changes.
    """
    missing = [name for name in state if name not in layers and not _is_inside(name, layers)]
    if missing:
        raise RefusedError(
            f"These parameters are in no layer that was named: {_listed(missing)}. Every one must be in exactly one: "
            "name their layers too, or the parameter itself where it belongs to none."
        )


def cut(sizes: Sequence[float], num_stages: int) -> list[int]:
    """Return the stage of each layer: consecutive stages, the largest as small as can be.

    Raises
    ------
    RefusedError
        When there are more stages than layers.

    Examples
    --------
    >>> cut([4, 1, 1, 4], 2)
    [0, 0, 1, 1]
    """
    count = len(sizes)
    if num_stages > count:
        raise RefusedError(
            f"The model has {count} layers, fewer than the {num_stages} workers that are to have one each: use fewer "
            "workers (--targets), or name smaller layers (--stages)."
        )
    sums = [0.0, *accumulate(sizes)]
    best = [[(sums[end], 0) for end in range(count + 1)]]
    for stage in range(1, num_stages):
        row = [(float("inf"), 0)] * (count + 1)
        for end in range(stage + 1, count + 1):
            row[end] = min((max(best[-1][at][0], sums[end] - sums[at]), at) for at in range(stage, end))
        best.append(row)
    stages = [0] * count
    end = count
    for stage in range(num_stages - 1, -1, -1):
        start = best[stage][end][1]
        stages[start:end] = [stage] * (end - start)
        end = start
    return stages


def segments(owners: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the runs of layers with one owner: (owner, first layer, layer after the last).

    Examples
    --------
    >>> segments([0, 0, 1])
    [(0, 0, 2), (1, 2, 3)]
    """
    starts = [at for at in range(len(owners)) if not at or owners[at] != owners[at - 1]]
    ends = [*starts[1:], len(owners)]
    return [(owners[start], start, end) for start, end in zip(starts, ends, strict=True)]


def check_microbatches(num_samples: int, num_microbatches: int, num_batchnorms: int) -> int:
    """Return into how many parts a batch is cut: no more than it has samples.

    Raises
    ------
    RefusedError
        When BatchNorm layers would each see a part of the batch only.
    """
    count = min(num_microbatches, num_samples)
    if count > 1 and num_batchnorms:
        raise RefusedError(
            f"The model has {num_batchnorms} BatchNorm layers, which take mean and variance of the whole batch: with "
            f"{count} micro-batches they would take those of each part. Use --microbatches 1, or another "
            "normalisation (GroupNorm, LayerNorm)."
        )
    return max(1, count)


def _listed(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(names[:most])
    return f"{shown}, and {len(names) - most} more" if len(names) > most else shown
