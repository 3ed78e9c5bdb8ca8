"""What ranks could not finish together because their group was released, and finish in the next one.

    exit of a cell ── the group is gone ──> Unfinished, kept by the group service under its epoch
    the next group stands ── are enough of those here who have it? ── yes ──> they finish it
                                                                   └─ no ──> it is dropped

Enough are all of them, or any two where each has something of its own to give. Alone in a group, a rank keeps that: the
others may still come. Ranks tell each other in the store what they have left, so that one that has nothing need not
take part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from openclaw_nb.engine.group.ranks import Ranks


@dataclass(frozen=True)
class Unfinished:
    """One rank's share of what is left.

    Attributes
    ----------
    name : str
        The same on all ranks that have a share, and for nothing else in their group.
    place, num_shares : int
        Which share this is, of how many.
    finish : callable
        Given the ranks that have shares here, numbered by their places, and these places by rank. All of them call it.
    needs_all : bool
        Whether nothing can be finished where a share is missing.
    """

    name: str
    place: int
    num_shares: int
    finish: Callable[[Ranks, Sequence[int]], None]
    needs_all: bool = True

    def of_epoch(self, epoch: int) -> Unfinished:
        """Return it with a name that no other group has used."""
        return replace(self, name=f"{self.name}, epoch {epoch}")

    def word(self) -> str:
        """Return what is told to the other ranks."""
        return f"{self.name}:{self.place}"

    def holders(self, words: Sequence[str]) -> Mapping[int, int] | None:
        """Return the ranks with shares by their places, in order; None when they are too few.

        Parameters
        ----------
        words : sequence of str
            What each rank has told, by rank; "" when nothing is left there.
        """
        told = [word.rpartition(":") for word in words]
        places = {int(place): rank for rank, (name, _, place) in enumerate(told) if name == self.name}
        enough = self.num_shares if self.needs_all else 2
        return dict(sorted(places.items())) if len(places) >= enough else None

    def waits(self, words: Sequence[str]) -> bool:
        """Whether it is kept although it cannot be finished now: nobody else is here who could have a share."""
        return not self.needs_all and len(words) == 1
