"""Which worker this process is, where one command has started the processes of all workers.

mpiexec gives every process the same environment, and each its rank. What is meant for one worker comes as a list by
rank (``OPENCLAW_BY_RANK``, JSON), of which each process takes its own entry before torch is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from openclaw_nb.core.errors import StartError
from openclaw_nb.protocol.placement import BY_RANK, LOG

# Open MPI, MPICH and those that follow it, Slurm's srun.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


@dataclass(frozen=True)
class Place:
    """A worker's number, and the variables that are meant for it alone."""

    number: int
    environment: Mapping[str, str]


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Return this process's place, or None where it was started by itself.

    Raises
    ------
    StartError
        When whoever has started the process gave it no rank, or one too many.
    """
    if BY_RANK not in environment:
        return None
    places = json.loads(environment[BY_RANK])
    rank = next((environment[name] for name in _RANK_VARIABLES if name in environment), None)
    if rank is None or int(rank) >= len(places):
        raise StartError(
            f"This process was started as one of {len(places)} workers, but its rank is {rank or 'not known'}: none of "
            f"{', '.join(_RANK_VARIABLES)} says which of them it is."
        )
    return Place(int(rank), places[int(rank)])


def take_place(place: Place) -> None:
    """Become that worker: its environment, and its log instead of the one that all processes share."""
    del os.environ[BY_RANK]  # what this worker starts is not one of them
    os.environ.update(place.environment)
    log = os.open(place.environment[LOG], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
