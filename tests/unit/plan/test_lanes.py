from __future__ import annotations

import pytest

from openclaw_nb.core.errors import RefusedError, UsageError
from openclaw_nb.plan.lanes import in_turn, on_devices


def test_neighbours_on_one_device_are_one_stage() -> None:
    placed = on_devices(list("abcd"), ["CPU-1", "CPU-1", "CPU-0", "CPU-0"])
    assert placed.stages == (("a", "b"), ("c", "d"))
    assert placed.devices == ("CPU-1", "CPU-0")


def test_devices_that_come_again_are_chunks() -> None:
    placed = on_devices(list("abcde"), ["x", "y", "y", "x", "y"])
    assert placed.stages == (("a",), ("b", "c"), ("d",), ("e",))
    assert placed.num_chunks == 2
    for order in (["x", "y", "x"], ["x", "y", "z", "x", "z", "y"]):
        with pytest.raises(RefusedError, match="in the same order"):
            on_devices([f"p{n}" for n in range(len(order))], order)
    with pytest.raises(UsageError, match="3 devices for 2 stages"):
        on_devices(["a", "b"], ["x", "y", "x"])


def test_parts_are_spread_over_devices() -> None:
    assert in_turn(list("abcde"), ["x", "y"], "1f1b").stages == (("a", "b"), ("c", "d", "e"))
    assert in_turn(list("ab"), ["x", "y", "z"], "gpipe").devices == ("x", "y")
    assert in_turn(list("abcd"), ["x", "y"], "interleaved").num_chunks == 2
    for parts in ("ab", "abc"):
        with pytest.raises(RefusedError, match="as many stages"):
            in_turn(list(parts), ["x", "y"], "interleaved")
    assert in_turn(list("abcd"), ["x", "y", "z"], "interleaved").devices == ("x", "y")
