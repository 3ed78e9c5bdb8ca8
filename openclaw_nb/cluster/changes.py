"""What is told of workers that went, or came, while a cell ran: one line each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Death:
    """A death after which the cell went on.

    Attributes
    ----------
    rank, worker : int
        Who died.
    num_left : int
        How many ranks were left.
    num_steps : int
        After how many steps; -1 when the training was over.
    seconds : float
        From the news of it until those who were left went on.
    """

    rank: int
    worker: int
    num_left: int
    num_steps: int = -1
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.num_steps < 0:
            return f"rank {self.rank} (worker-{self.worker}) died when its training was over"
        others = "the other one goes" if self.num_left == 1 else f"the other {self.num_left} go"
        return (
            f"rank {self.rank} (worker-{self.worker}) died after step {self.num_steps}: {others} on after "
            f"{self.seconds:.2f} s, with nothing lost; the batch of that moment was repeated"
        )


@dataclass(frozen=True)
class Joined:
    """A worker that came into the cell.

    Attributes
    ----------
    rank, worker : int
        Who came.
    num_ranks : int
        How many ranks there are with it.
    num_steps : int
        After how many steps.
    pause_seconds : float
        How long the others waited for it.
    """

    rank: int
    worker: int
    num_ranks: int
    num_steps: int
    pause_seconds: float

    def __str__(self) -> str:
        return (
            f"worker-{self.worker} takes part as rank {self.rank} after step {self.num_steps}, with the variables of "
            f"one that was there: {self.num_ranks} ranks share each global batch; the others waited "
            f"{self.pause_seconds:.2f} s"
        )


@dataclass(frozen=True)
class Left:
    """A worker that was removed from the cell.

    Attributes
    ----------
    rank, worker : int
        Who left.
    num_left : int
        How many ranks are left.
    num_steps : int
        After how many steps, as far as they had been told.
    """

    rank: int
    worker: int
    num_left: int
    num_steps: int

    def __str__(self) -> str:
        ranks = "1 rank has" if self.num_left == 1 else f"{self.num_left} ranks share"
        return f"rank {self.rank} (worker-{self.worker}) left about step {self.num_steps}: {ranks} each global batch"


@dataclass(frozen=True)
class TurnedAway:
    """A worker that could not come into the cell; ``why`` is its error."""

    worker: int
    why: str

    def __str__(self) -> str:
        return f"worker-{self.worker} could not take part in the cell: {self.why}"


Change = Death | Joined | Left | TurnedAway
