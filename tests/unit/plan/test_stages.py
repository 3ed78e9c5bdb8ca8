"""Which layers are meant, and how they are cut."""

from __future__ import annotations

import itertools

import pytest

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.plan.stages import check_all_used, check_microbatches, cut, resolve, segments

NAMES = ["embed", "blocks.0", "blocks.0.norm", "blocks.1", "blocks.1.norm", "head"]
CONTAINERS = {"blocks": ["blocks.0", "blocks.1"]}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (["embed", "head"], ["embed", "head"]),
        (["blocks"], ["blocks.0", "blocks.1"]),
        ([r"blocks\.\d"], ["blocks.0", "blocks.1"]),
        (["blocks.*"], ["blocks.0", "blocks.1"]),
        (["head", "position", "embed"], ["head", "position", "embed"]),
    ],
)
def test_words_stand_for_layers(wanted: list[str], expected: list[str]) -> None:
    assert resolve(wanted, NAMES, CONTAINERS, ["position"]) == expected


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (["embed", "tail", "ghost"], "there is no layer tail, ghost"),
        (["head", "h.*"], "named twice, or inside of another one that is named: head"),
        (["blocks.0", "blocks.0.norm"], "inside of another one that is named: blocks.0.norm"),
        (["("], "neither a layer nor a regular expression"),
    ],
)
def test_words_that_cannot_be(wanted: list[str], said: str) -> None:
    with pytest.raises(RefusedError, match=said.replace(".", r"\.")):
        resolve(wanted, NAMES, CONTAINERS)


def test_what_is_left_out_is_listed() -> None:
    check_all_used(["embed", "blocks.0"], ["embed.weight", "blocks.0.norm.bias"])
    with pytest.raises(RefusedError, match=r"in no layer that was named: head\.weight, position"):
        check_all_used(["embed"], ["embed.weight", "head.weight", "position"])


@pytest.mark.parametrize("sizes", [[1.0], [5, 1, 1, 1, 1, 5], [0, 0, 9, 0], [3, 1, 4, 1, 5, 9, 2, 6]])
def test_the_largest_stage_is_as_small_as_can_be(sizes: list[float]) -> None:
    """Against all ways to cut them."""
    for count in range(1, len(sizes) + 1):
        stages = cut(sizes, count)
        assert stages == sorted(stages)
        assert {*stages} == {*range(count)}
        found = max(
            sum(s for s, stage in zip(sizes, stages, strict=True) if stage == k) for k in range(count)
        )
        ways = itertools.combinations(range(1, len(sizes)), count - 1)
        bounds = ([0, *way, len(sizes)] for way in ways)
        assert found == min(max(sum(sizes[a:b]) for a, b in itertools.pairwise(each)) for each in bounds)


def test_more_stages_than_layers() -> None:
    with pytest.raises(RefusedError, match="2 layers, fewer than the 3 workers"):
        cut([1, 1], 3)


def test_segments_of_an_owner() -> None:
    assert segments([0, 0, 1, 0]) == [(0, 0, 2), (1, 2, 3), (0, 3, 4)]


def test_microbatches() -> None:
    assert [check_microbatches(n, 4, 0) for n in (0, 1, 3, 4, 9)] == [1, 1, 3, 4, 4]
    assert check_microbatches(8, 1, 2) == 1
    with pytest.raises(RefusedError, match=r"2 BatchNorm layers.*4 micro-batches.*GroupNorm"):
        check_microbatches(8, 4, 2)
