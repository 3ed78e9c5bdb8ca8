"""Degrees against closed forms: a product, a numbering, and groups that part the ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from openclaw_nb.core.errors import UnknownNameError, UsageError
from openclaw_nb.plan.parallelism import AXES, Coordinates, Degrees, check_fits, factorisations

SOME = [Degrees(*each) for each in itertools.product((1, 2, 3), repeat=3)]


@pytest.mark.parametrize("degrees", SOME, ids=str)
def test_ranks_and_coordinates_are_the_same_thing(degrees: Degrees) -> None:
    found = [degrees.coordinates(rank) for rank in range(degrees.num_ranks)]
    # Tensor is fastest, data slowest: the order in which nested loops walk them.
    loops = itertools.product(range(degrees.data), range(degrees.pipeline), range(degrees.tensor))
    assert found == [Coordinates(*at) for at in loops]
    assert [degrees.rank(at) for at in found] == list(range(degrees.num_ranks))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("degrees", SOME, ids=str)
def test_groups_part_the_ranks(degrees: Degrees, axis: str) -> None:
    groups = degrees.groups(axis)
    assert sorted(itertools.chain(*groups)) == list(range(degrees.num_ranks))
    for group in groups:
        places = [degrees.coordinates(rank) for rank in group]
        assert [getattr(at, axis) for at in places] == list(range(getattr(degrees, axis)))
        others = {tuple(getattr(at, other) for other in AXES if other != axis) for at in places}
        assert len(others) == 1


def test_neighbours_share_a_layer() -> None:
    degrees = Degrees(data=2, tensor=2)
    assert degrees.groups("tensor") == [[0, 1], [2, 3]]
    assert degrees.groups("data") == [[0, 2], [1, 3]]
    assert degrees.lines()[3] == "rank 3: data 1, pipeline 0, tensor 1"


@pytest.mark.parametrize("num_ranks", [1, 2, 6, 12, 13, 64])
def test_factorisations_are_all_there_are(num_ranks: int) -> None:
    found = factorisations(num_ranks)
    every = {
        each
        for each in itertools.product(range(1, num_ranks + 1), repeat=3)
        if num_ranks <= 13 and math.prod(each) == num_ranks
    }
    assert all(each.num_ranks == num_ranks for each in found)
    assert len(set(found)) == len(found)
    if every:
        assert {(each.data, each.pipeline, each.tensor) for each in found} == every
    assert found[0] == Degrees(data=num_ranks)


def test_an_axis_may_be_limited() -> None:
    assert factorisations(4, {"pipeline": 1}) == [Degrees(4), Degrees(2, 1, 2), Degrees(1, 1, 4)]


def test_what_does_not_fit_is_told_with_both_numbers_and_what_does() -> None:
    with pytest.raises(UsageError) as refused:
        check_fits(Degrees(data=2, tensor=3), 4, {"pipeline": 1})
    said = str(refused.value)
    assert said == (
        "--dp 2 --tp 3 are 2 x 1 x 3 = 6 ranks, and there are 4 workers. What fits 4: --dp 4; --dp 2 --tp 2; --tp 4. "
        "Did you mean --dp 2 --tp 2?"
    )
    check_fits(Degrees(2, 1, 2), 4)


def test_many_choices_are_cut_short() -> None:
    with pytest.raises(UsageError, match=r"\.\.\.\. Did you mean --dp 2 --pp 2 --tp 16\?"):
        check_fits(Degrees(2, 2, 17), 64)


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "2"])
def test_what_is_no_degree(given: Any) -> None:
    with pytest.raises(UsageError, match="the tensor degree is a whole number of at least 1"):
        Degrees(tensor=given)


def test_ranks_and_axes_that_are_not_there() -> None:
    with pytest.raises(UsageError, match="There is no rank 4: 2 x 1 x 2 are ranks 0 to 3"):
        Degrees(2, 1, 2).coordinates(4)
    with pytest.raises(UnknownNameError, match="Did you mean 'tensor'"):
        Degrees(2).groups("tenser")
