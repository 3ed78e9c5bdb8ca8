"""Degrees of parallelism: how ranks are laid out along the axes data, pipeline and tensor.

    rank = (data * num_pipeline + pipeline) * num_tensor + tensor

Tensor is fastest: its ranks talk in every layer, so that neighbours, which share a host, take part in one layer. Then
pipeline, which talks between stages; data is slowest, as it talks once a step.

Pure: numbers in, numbers and reasons out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from openclaw_nb.core.errors import UsageError, unknown_name

AXES = ("data", "pipeline", "tensor")
_SHORT = {"data": "dp", "pipeline": "pp", "tensor": "tp"}
_MOST_SHOWN = 12


@dataclass(frozen=True)
class Coordinates:
    """Where a rank is along each axis."""

    data: int
    pipeline: int
    tensor: int

    def __str__(self) -> str:
        return f"data {self.data}, pipeline {self.pipeline}, tensor {self.tensor}"


@dataclass(frozen=True)
class Degrees:
    """How many ranks there are along each axis.

    Raises
    ------
    UsageError
        When one is no whole number of at least 1.

    Examples
    --------
    >>> degrees = Degrees(data=2, tensor=2)
    >>> degrees.num_ranks, degrees.coordinates(1)
    (4, Coordinates(data=0, pipeline=0, tensor=1))
    >>> degrees.groups("data")
    [[0, 2], [1, 3]]
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in fields(self):
            check_degree(f"the {axis.name} degree", getattr(self, axis.name))

    def __str__(self) -> str:
        return f"{self.data} x {self.pipeline} x {self.tensor}"

    @property
    def num_ranks(self) -> int:
        """How many ranks they take."""
        return self.data * self.pipeline * self.tensor

    def coordinates(self, rank: int) -> Coordinates:
        """Return where a rank is.

        Raises
        ------
        UsageError
            When there is no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise UsageError(f"There is no rank {rank}: {self} are ranks 0 to {self.num_ranks - 1}.")
        rest, tensor = divmod(rank, self.tensor)
        data, pipeline = divmod(rest, self.pipeline)
        return Coordinates(data, pipeline, tensor)

    def rank(self, at: Coordinates) -> int:
        """Return the rank at some coordinates."""
        return (at.data * self.pipeline + at.pipeline) * self.tensor + at.tensor

    def groups(self, axis: str) -> list[list[int]]:
        """Return the ranks that differ in their coordinate of one axis alone, group by group.

        Raises
        ------
        UnknownNameError
            When there is no such axis.
        """
        if axis not in AXES:
            raise unknown_name("axis", axis, AXES)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.num_ranks):
            at = self.coordinates(rank)
            found.setdefault(tuple(getattr(at, other) for other in AXES if other != axis), []).append(rank)
        return list(found.values())

    def lines(self) -> list[str]:
        """Return the map of ranks to coordinates, a line each."""
        return [f"rank {rank}: {self.coordinates(rank)}" for rank in range(self.num_ranks)]


def check_degree(name: str, value: object) -> None:
    """Refuse what is no degree.

    Raises
    ------
    UsageError
        When it is no whole number of at least 1.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} is a whole number of at least 1, not {value!r}.")


def factorisations(num_ranks: int, most: Mapping[str, int] | None = None) -> list[Degrees]:
    """Return all degrees that take exactly so many ranks, most data parallel first.

    Parameters
    ----------
    num_ranks : int
        How many ranks there are.
    most : mapping of str to int, optional
        The highest degree of an axis, where it is limited.
    """
    limits = {axis: (most or {}).get(axis, num_ranks) for axis in AXES}
    found = [
        Degrees(data, pipeline, num_ranks // (data * pipeline))
        for data in _divisors(num_ranks)
        for pipeline in _divisors(num_ranks // data)
    ]
    fitting = [each for each in found if all(getattr(each, axis) <= limits[axis] for axis in AXES)]
    return sorted(fitting, key=lambda each: (-each.data, each.pipeline, each.tensor))


def check_fits(degrees: Degrees, num_ranks: int, most: Mapping[str, int] | None = None) -> None:
    """Refuse degrees that do not multiply to the number of workers.

    Parameters
    ----------
    degrees : Degrees
        What is asked for.
    num_ranks : int
        How many workers there are.
    most : mapping of str to int, optional
        The highest degree of an axis that may be suggested.

    Raises
    ------
    UsageError
        With both numbers, what fits, and the nearest of it.
    """
    if degrees.num_ranks == num_ranks:
        return
    fitting = factorisations(num_ranks, most)
    shown = [_words(each) for each in fitting[:_MOST_SHOWN]]
    more = ", ..." if len(fitting) > _MOST_SHOWN else ""
    near = min(fitting, key=lambda each: _distance(each, degrees), default=None)
    hint = f" Did you mean {_words(near)}?" if near is not None else ""
    raise UsageError(
        f"{_words(degrees)} are {degrees} = {degrees.num_ranks} ranks, and there are {num_ranks} workers. What fits "
        f"{num_ranks}: {'; '.join(shown) or 'nothing'}{more}.{hint}"
    )


def _words(degrees: Degrees) -> str:
    """Name degrees as the options do; those that are 1 are left out.

    Examples
    --------
    >>> _words(Degrees(2, 1, 2))
    '--dp 2 --tp 2'
    """
    named = [f"--{_SHORT[axis]} {getattr(degrees, axis)}" for axis in AXES if getattr(degrees, axis) > 1]
    return " ".join(named) or "--dp 1"


def _divisors(number: int) -> Iterator[int]:
    return (each for each in range(1, number + 1) if number % each == 0)


def _distance(one: Degrees, other: Degrees) -> float:
    return sum(abs(math.log(getattr(one, axis) / getattr(other, axis))) for axis in AXES)
