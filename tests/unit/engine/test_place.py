"""Which worker a process is that one command has started with all others."""

from __future__ import annotations

import json

import pytest

from openclaw_nb.core.errors import StartError
from openclaw_nb.engine.place import find_place
from openclaw_nb.protocol.placement import BY_RANK

TWO = {BY_RANK: json.dumps([{"OPENCLAW_DEVICE": "CPU-0"}, {"OPENCLAW_DEVICE": "CPU-1"}])}


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"])
def test_the_launcher_tells_the_rank(name: str) -> None:
    place = find_place({**TWO, name: "1"})
    assert place is not None
    assert (place.number, place.environment) == (1, {"OPENCLAW_DEVICE": "CPU-1"})


def test_a_process_that_was_started_by_itself_has_none() -> None:
    assert find_place({"OMPI_COMM_WORLD_RANK": "1", "SLURM_PROCID": "0"}) is None


def test_mpis_rank_goes_before_that_of_the_job_around_it() -> None:
    place = find_place({**TWO, "SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "1"})
    assert place is not None
    assert place.number == 1


@pytest.mark.parametrize(("rank", "said"), [({}, "not known"), ({"PMI_RANK": "2"}, "rank is 2")])
def test_a_rank_without_a_place_is_an_error(rank: dict[str, str], said: str) -> None:
    with pytest.raises(StartError, match=f"one of 2 workers.*{said}"):
        find_place({**TWO, **rank})
