"""What is asked of the ranks of a running cell: who is to come, and who to go."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wishes:
    """What a rank knows of those that are to come and go.

    Attributes
    ----------
    num_ranks : int
        How many ranks there are to be.
    num_new : int
        How many of them wait to come in.
    leaves : bool
        Whether ranks are to leave.
    """

    num_ranks: int = 0
    num_new: int = 0
    leaves: bool = False
