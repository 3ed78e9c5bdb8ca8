"""What would fit, from sizes: each number is worked out by hand."""

from __future__ import annotations

from openclaw_nb.plan.memory import Usage, Way, ways_out

GIB = 1024**3
ALL = ("data_parallel", "sharded", "tensor_parallel", "model_parallel", "pipeline")


def usage(**changed: object) -> Usage:
    """1 GiB of parameters, as much of gradients, 2 of Adam's state; 6 of activations, and 2 more were asked for."""
    given = {
        "parameters": GIB,
        "gradients": GIB,
        "optimizer": 2 * GIB,
        "activations": 6 * GIB,
        "tensors": GIB // 2,
        "rest": GIB // 2,
        "requested": 2 * GIB,
        "free": GIB,
        "state": 4 * GIB,
        "num_workers": 4,
        "num_blocks": 8,
        "parts_per_block": 8,
    }
    return Usage(**{**given, **changed})  # type: ignore[arg-type]


def test_sizes_add_up() -> None:
    found = usage()
    assert (found.used, found.limit, found.growing, found.needed) == (11 * GIB, 12 * GIB, 8 * GIB, 13 * GIB)


def test_what_each_setting_and_strategy_would_take() -> None:
    assert ways_out(usage(), ALL) == [
        Way("--precision bf16", 9 * GIB, True),  # 4 + 8 / 2 + 1
        Way("--activation-checkpointing", 7 * GIB, True),  # 4 + 8 (1/8 + 1/8) + 1
        Way("--accumulate 2, with batches of 1/2 of the size", 9 * GIB, True),
        Way("--strategy sharded, on 4 workers", 10 * GIB, True),  # 4 / 4 + 8 + 1
        Way("--strategy model_parallel, on 4 workers", 4 * GIB, True),  # 12 / 4 + 1
        Way("--strategy pipeline, on 4 workers", 4 * GIB, True),
    ]


def test_a_state_that_is_too_large_is_sharded_or_split() -> None:
    found = ways_out(usage(state=18 * GIB, activations=GIB, requested=None, free=0), ALL)
    assert [way.what.split(",")[0] for way in found if way.fits] == [
        "--strategy model_parallel",
        "--strategy pipeline",
    ]
    assert found[2].what.startswith("--accumulate 64")


def test_only_what_is_there_and_not_in_use_is_named() -> None:
    words = [way.what for way in ways_out(usage(num_workers=1, num_blocks=0), ALL)]
    assert words == ["--precision bf16", "--accumulate 2, with batches of 1/2 of the size"]
    in_use = frozenset({"precision", "activation_checkpointing", "sharded"})
    words = [way.what.split(",")[0] for way in ways_out(usage(in_use=in_use), ("sharded", "pipeline"))]
    assert words == ["--accumulate 2", "--strategy pipeline"]


def test_batches_are_cut_as_often_as_it_takes() -> None:
    found = ways_out(usage(activations=30 * GIB, requested=2 * GIB, free=-24 * GIB), ())
    accumulate = next(way for way in found if "accumulate" in way.what)
    # 35 + 0 - 24 = 11 GiB may be held, 5 of which do not follow the batch: 32 / 8 = 4 fit into the other 6.
    assert accumulate == Way("--accumulate 8, with batches of 1/8 of the size", 9 * GIB, True)


def test_layers_that_were_not_reached_count() -> None:
    """8 GiB up to the second of six layers: 24 in all."""
    found = usage(layers_done=2, num_layers=6)
    assert (found.growing, found.needed) == (24 * GIB, 29 * GIB)
    assert ways_out(found, ALL)[1] == Way("--activation-checkpointing", 11 * GIB, True)  # 4 + 24 / 4 + 1
