"""What may be asked of data parallel, and what workers are then told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openclaw_nb.core.errors import UsageError
from openclaw_nb.core.text import parse_size
from openclaw_nb.strategies import DataParallelStrategy


def test_workers_are_told_the_options_in_plain_numbers() -> None:
    strategy = DataParallelStrategy(
        sync_frequency=4, mode="parameter", accumulate=2, fusion_buffer_size="1 MiB"
    )
    spec = strategy.spec(model="net")
    assert (spec.name, spec.model) == ("data_parallel", "net")
    assert spec.options == {
        "sync_frequency": 4,
        "mode": "parameter",
        "accumulate": 2,
        "fusion_buffer_size": 2**20,
        "memory_pinning": True,
    }


def test_workers_are_told_of_checkpoints() -> None:
    options = DataParallelStrategy(checkpoint=Path("runs/a"), checkpoint_every=100).spec().options
    assert {name: options[name] for name in ("checkpoint", "checkpoint_every", "keep")} == {
        "checkpoint": "runs/a",
        "checkpoint_every": "100",
        "keep": 3,
    }
    assert "checkpoint_every" not in DataParallelStrategy(checkpoint="runs/a").spec().options


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sync_frequency": 0}, "sync_frequency is a whole number of at least 1, not 0"),
        ({"sync_frequency": 2.5}, "not 2.5"),
        ({"accumulate": True}, "accumulate is a whole number of at least 1, not True"),
        ({"mode": "gradents"}, "Did you mean 'gradient'?"),
        ({"fusion_buffer_size": "25 apples"}, "fusion_buffer_size is a size such as '25MB'"),
        ({"fusion_buffer_size": 0}, "of at least 1024 bytes"),
        ({"checkpoint": "run", "keep": 0}, "keep is a whole number of at least 1, not 0"),
        ({"checkpoint": "run", "checkpoint_every": 0}, "checkpoint_every is a number of steps of at least 1"),
        ({"checkpoint": "run", "checkpoint_every": "5 days"}, "both with a comma between .*, not '5 days'"),
        ({"checkpoint": " "}, "checkpoint is a directory, such as 'checkpoints/run-1'"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        DataParallelStrategy(**given)


@pytest.mark.parametrize(
    ("size", "expected"),
    [("25MB", 25 * 2**20), ("1.5 GiB", 3 * 2**29), ("4096", 4096), (17, 17), ("2k", 2048), ("3 B", 3)],
)
def test_sizes(size: int | str, expected: int) -> None:
    assert parse_size(size, "it") == expected
