"""Going on after a death: the survivors meet in a new group and agree on what is done.

    an operation of all ranks fails ──> every survivor comes here, from whatever operation it is in
        │ a group of those who are left (`Regroup`, from the notebook's side)
        ▼
    how many operations has each seen complete?
        the same on all ──> the operation is nobody's: it is made again, or the batch is repeated (a void step)
        one more on some ──> it was complete: who missed it takes over its outcome

Operations are counted. Two ranks can be apart by one at most: the next needs all of them. What an outcome is, is the
business of who makes the operation.

Newcomers are let in the same way: at a place that all ranks have agreed on they go on to a group in which there are
ranks that have seen nothing yet, and the first of the others gives them what it takes.

Knows groups, counts and outcomes; does not know batches, gradients or messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from openclaw_nb.core.errors import GroupError, OpenClawError, ReleasedError
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.plan.wishes import Wishes


class Regrouper(Protocol):
    """Where this worker's next group comes from."""

    def wait(self) -> bool:
        """Wait until the next group is asked for; return False when the cell is to end instead."""

    def join(self, ranks: Ranks) -> None:
        """Join the group that was asked for last, and let ``ranks`` be its ranks.

        Raises
        ------
        ReleasedError, GroupError
            When it was given up before it stood.
        """

    def tell(self, num_steps: int) -> None:
        """Tell that the ranks go on, after so many steps."""

    @property
    def wishes(self) -> Wishes:
        """Who is to come and go, as far as this rank knows."""

    def arrive(self, *, lets_in: bool) -> None:
        """Tell that this rank waits, where all ranks will, for the next group, and whether newcomers can come in."""


_NEW = -1


@dataclass(frozen=True)
class Missed:
    """The outcome of an operation that this rank has missed; ``value`` is what its other ranks have kept of it."""

    value: Any


class Continuity:
    """Counts the operations of all ranks, and takes the survivors of a death on to a new group.

    Parameters
    ----------
    ranks : Ranks
        The ranks; bound to each new group.
    regrouper : Regrouper or None
        Where groups come from; with None a death ends the operation, as it ends the cell.

    Attributes
    ----------
    renew : callable
        Makes anew what belongs to a group; called in each new one by all ranks.
    num_steps : int
        How many steps are complete.
    """

    def __init__(self, ranks: Ranks, regrouper: Regrouper | None = None) -> None:
        self._ranks, self._regrouper = ranks, regrouper
        self.renew: Callable[[], None] = lambda: None
        self._done = self.num_steps = 0
        self._given: Any = None
        self._take: Callable[[Any], Any] = lambda given: given
        self._outcome: Callable[[], Any] = lambda: None

    @property
    def is_possible(self) -> bool:
        """Whether there is a way on after a death."""
        return self._regrouper is not None

    @property
    def wishes(self) -> Wishes:
        """Who is to come and go, as far as this rank knows."""
        return self._regrouper.wishes if self._regrouper is not None else Wishes()

    def start(self, renew: Callable[[], None]) -> None:
        """Let ``renew`` make what belongs to a group, now and in each that comes."""
        self.renew = renew
        try:
            renew()
        except (OpenClawError, RuntimeError) as error:
            self.recover(error)

    def complete(self, outcome: Callable[[], Any], *, is_step: bool = False) -> None:
        """Count an operation that is complete here; ``outcome`` returns what a rank that missed it needs."""
        self._done += 1
        self.num_steps += is_step
        self._outcome = outcome

    def agree(self, make: Callable[[], Any]) -> Any:
        """Return what an operation of all ranks returns, the same on each; it is made again after a death."""
        value = self.attempt(make)
        if isinstance(value, Missed):
            value = value.value
        self.complete(lambda: value)
        return value

    def attempt(self, make: Callable[[], Any]) -> Any:
        """Return what an operation of all ranks returns, or `Missed`; it is made again after a death."""
        while True:
            try:
                return make()
            except (OpenClawError, RuntimeError) as error:
                missed = self.recover(error)
                if missed is not None:
                    return missed

    def recover(self, error: BaseException) -> Missed | None:
        """Go on in a new group after an operation has failed.

        Parameters
        ----------
        error : Exception
            What it failed with; raised again when it is not the end of a rank, or there is no way on.

        Returns
        -------
        Missed or None
            The outcome, when the operation was complete on another rank; None when it was on none.
        """
        if self._regrouper is None or not is_release(error):
            raise error
        return self._go_on(self._regrouper, error)

    def change(self, give: Callable[[], Any] | None) -> None:
        """Go on in a group with newcomers, or without those that leave; called at the same place by all ranks.

        Parameters
        ----------
        give : callable or None
            Returns what newcomers need; called on one rank. With None nobody can come in here.
        """
        assert self._regrouper is not None
        self._regrouper.arrive(lets_in=give is not None)
        self._go_on(self._regrouper, ReleasedError("the cell was ended while its ranks changed"), give)

    def enter(self, take: Callable[[Any], Any]) -> Any:
        """Return what this newcomer makes of what a rank has given to it; its first group stands.

        Parameters
        ----------
        take : callable
            Takes what was given. The others wait until it has.

        Raises
        ------
        ReleasedError
            When the cell ends before.
        """
        regrouper = self._regrouper
        assert regrouper is not None
        self._done, self._take = _NEW, take
        is_joined = True
        while is_joined or regrouper.wait():
            try:
                if not is_joined:
                    regrouper.join(self._ranks)
                is_joined = False
                self._meet(None)
                return self._given
            except (OpenClawError, RuntimeError) as error:
                if not _is_end_of_group(error):
                    raise
        raise ReleasedError("the cell was ended before the newcomer was let in")

    def tell(self) -> None:
        """Tell that this newcomer goes on with the others."""
        assert self._regrouper is not None
        self._regrouper.tell(self.num_steps)

    def _go_on(
        self, regrouper: Regrouper, error: BaseException, give: Callable[[], Any] | None = None
    ) -> Missed | None:
        while regrouper.wait():
            try:
                regrouper.join(self._ranks)
                missed = self._meet(give)
                self.renew()
            except (OpenClawError, RuntimeError) as next_error:
                if not _is_end_of_group(next_error):
                    raise
                continue
            regrouper.tell(self.num_steps + (missed is not None))
            return missed
        raise error

    def _meet(self, give: Callable[[], Any] | None) -> Missed | None:
        """Compare what is done, and give newcomers what they need; every rank of the new group is here."""
        told = self._ranks.gather(torch.tensor([self._done, int(give is not None)]))
        rows, givers = told[:, 0].tolist(), told[:, 1].tolist()
        most, least = max(rows), min(row for row in rows if row != _NEW)
        missed = None
        if least < most:
            ahead = rows.index(most)
            mine = self._outcome() if self._ranks.rank == ahead else None
            value = self._ranks.broadcast(mine, source=ahead)
            missed = Missed(value) if least <= self._done < most else None
        if _NEW in rows:
            if 1 not in givers:
                raise OpenClawError("Newcomers came, and all who could have let them in are gone.")
            self._introduce(givers.index(1), give)
        return missed

    def _introduce(self, source: int, give: Callable[[], Any] | None) -> None:
        """Give newcomers what they need. Nobody goes on before all have it."""
        mine = None
        if self._ranks.rank == source and give is not None:
            mine = give(), self._done, self.num_steps
        given, done, num_steps = self._ranks.broadcast(mine, source=source)
        if self._done == _NEW:
            self._given = self._take(given)
            self._done, self.num_steps = done, num_steps
        self._ranks.gather(torch.zeros(1))


def _is_end_of_group(error: BaseException) -> bool:
    return isinstance(error, GroupError) or is_release(error)


def is_release(error: BaseException) -> bool:
    """Whether an error is the end of an operation because a rank is gone.

    torch's C++ code turns the error of a released collective into a RuntimeError that quotes it.
    """
    return isinstance(error, ReleasedError) or ReleasedError.__name__ in f"{type(error).__name__}: {error}"
