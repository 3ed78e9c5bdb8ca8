from __future__ import annotations

import pytest

from openclaw_nb.core.errors import UsageError
from openclaw_nb.notebook.options import parse_cell, split_line
from openclaw_nb.plan.recovery import why_not_elastic
from openclaw_nb.strategies import ShardedDataParallelStrategy


def test_the_cells_line_and_the_class_say_the_same() -> None:
    cell = parse_cell(
        split_line("-s sharded --accumulate 4 --shard-layers body.0,Block --no-reshard-after-forward")
    )
    asked = ShardedDataParallelStrategy(
        accumulate=4, shard_layers=["body.0", "Block"], reshard_after_forward=False
    )
    assert cell.strategy == asked.spec()
    assert asked.spec().options["shard_layers"] == ["body.0", "Block"]
    assert "shard_layers" not in ShardedDataParallelStrategy().spec().options


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "-s sharded --checkpoint runs",
            "--checkpoint is no option of sharded, but of data_parallel: no worker has the whole state",
        ),
        (
            "-s sharded --mode parameter",
            "--mode is no option of sharded, but of data_parallel: workers cannot make steps",
        ),
        ("-s sharded --fusion-buffer-size 1MB", "gradients are reduced layer by layer"),
        ("-s data --shard-layers body", "--shard-layers is no option of data_parallel, but of sharded"),
        (
            "-s data --no-reshard-after-forward",
            "--no-reshard-after-forward is no option of data_parallel, but of sharded",
        ),
        ("-s sharded --shard-layers ''", "shard_layers names modules"),
        ("--shard-layers body", "--shard-layers needs a strategy"),
    ],
)
def test_what_does_not_fit_is_refused(line: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_cell(split_line(line))


@pytest.mark.parametrize("given", [{"accumulate": 0}, {"sync_frequency": True}, {"shard_layers": [3]}])
def test_values_that_cannot_be(given: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        ShardedDataParallelStrategy(**given)  # type: ignore[arg-type]


def test_a_cell_needs_the_ranks_that_it_began_with() -> None:
    assert "no other has" in why_not_elastic(ShardedDataParallelStrategy().spec())
