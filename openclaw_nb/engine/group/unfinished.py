"""What ranks could not finish together because their group was released, and finish in the next one.

    exit of a cell ── the group is gone ──> Unfinished, kept by the group service
    the next group stands ── are all who have it here? ── yes ──> they finish it
                                                        └─ no ──> it is dropped

Ranks tell each other in the store what they have left, so that one that has nothing need not take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openclaw_nb.engine.group.ranks import Ranks


@dataclass(frozen=True)
class Unfinished:
    """One rank's share of what is left.

    Attributes
    ----------
    name : str
        The same on all ranks that have a share, and for nothing else.
    place, num_shares : int
        Which share this is, of how many.
    finish : callable
        Given the ranks that have shares, numbered by their places. All of them call it.
    """

    name: str
    place: int
    num_shares: int
    finish: Callable[[Ranks], None]

    def word(self) -> str:
        """Return what is told to the other ranks."""
        return f"{self.name}:{self.place}"

    def holders(self, words: Sequence[str]) -> list[int] | None:
        """Return the ranks with shares, by place; None when some are missing.

        Parameters
        ----------
        words : sequence of str
            What each rank has told, by rank; "" when nothing is left there.
        """
        places = {
            int(word.rpartition(":")[2]): rank
            for rank, word in enumerate(words)
            if word and word.rpartition(":")[0] == self.name
        }
        return [places[i] for i in range(self.num_shares)] if len(places) == self.num_shares else None
