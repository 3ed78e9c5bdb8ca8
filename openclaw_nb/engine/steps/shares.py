"""Which part of each batch each rank of a cell gets, and how the ranks agree on it.

    a rank's speed ── told to it, or measured here ──> told to all with each step's sums (`loss.votes`)
        └─ all ranks have all speeds, and come to the same shares (`plan.balance`)
              └─ they count from the next batch on; what a loader has drawn ahead with the former ones is drawn again

After each step all ranks have the same speeds, as sums are the same on all, and so the same shares: nothing else has to
be agreed on. It does no harm that a command with new speeds comes to one rank some steps before another.

Knows speeds and shares; does not know batches, gradients or messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.steps.pace import Pace
from openclaw_nb.plan.balance import WINDOW, SpeedMeter, equal_shares, next_shares
from openclaw_nb.plan.shares import share_bounds


class Shares:
    """The shares of one cell's ranks.

    Parameters
    ----------
    ranks : Ranks
        Among whom batches are shared out.
    pace : Pace
        What this rank is told of its speed.

    Attributes
    ----------
    num_open : int
        How many loaders the cell is iterating on this rank.
    turn : int
        Grows when other shares begin to count.
    """

    def __init__(self, ranks: Ranks, pace: Pace) -> None:
        self._ranks, self._pace = ranks, pace
        self._used = self._agreed = equal_shares(ranks.size)
        self._meter = SpeedMeter()
        self._measured = 0.0
        self._num_samples = self._num_steps = 0
        self.num_open = self.turn = 0

    # ------------------------------------------------------------------------------------ agreeing

    def renew(self) -> None:
        """Agree on the shares in a new group, from its first batch on. Every rank calls this."""
        rows = self._ranks.gather(torch.tensor([self.tell()], dtype=torch.float64))
        self._used = self._agreed = next_shares(equal_shares(self._ranks.size), rows.flatten().tolist())
        self._num_samples = self._num_steps = 0  # of a batch that became void

    def tell(self) -> float:
        """Return the speed with which this rank is to count, 0 when it has none yet; for the other ranks."""
        own = self._measured if self._pace.is_continuous else 0.0
        return own or self._pace.speed

    @property
    def is_held(self) -> bool:
        """Whether shares must stay on this rank: a batch of another loader, cut by the present ones, may be used on."""
        return self.num_open > 1

    def agree(self, speeds: Sequence[float], *, is_held: bool) -> None:
        """Take what all ranks have told with one step.

        Parameters
        ----------
        speeds : sequence of float
            What `tell` has returned on each rank.
        is_held : bool
            Whether shares must stay on some rank.
        """
        self._agreed = self._used if is_held else next_shares(self._used, speeds)

    def take_up(self) -> None:
        """Let what was agreed on count; called where all ranks are about to draw the same batch."""
        if self._agreed != self._used:
            self._used = self._agreed
            self.turn += 1

    def bounds(self, num_samples: int) -> list[tuple[int, int]]:
        """Return the half-open range of samples of each rank in the next batch that is drawn."""
        return share_bounds(num_samples, self._ranks.size, self._used)

    # ----------------------------------------------------------------------------------- measuring

    def count(self, num_samples: int) -> None:
        """Count samples of this rank that are in the present step."""
        self._num_samples += num_samples

    def step(self, seconds: float) -> None:
        """Take the end of a step that took this rank so many seconds of work."""
        self._meter.take(self._num_samples, seconds)
        self._num_samples = 0
        self._num_steps += 1
        if self._num_steps % WINDOW == 0:  # on all ranks after the same step: the shares change once
            self._measured = self._meter.speed or self._measured
            self._meter.clear()
