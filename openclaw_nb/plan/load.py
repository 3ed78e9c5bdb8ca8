"""How a run's work was shared out, and where the time of its workers went: the numbers behind a profile.

Pure: numbers in, numbers out. Knows what workers measure; does not know runs, clusters or how anything is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from openclaw_nb.plan.advice import WorkerLoad, efficiency, shares

PARTS = ("data", "compute", "wait", "transfer")
"""What the time of a step goes to: loading batches, computing, waiting for other workers, transfer."""

_WORK = ("data", "compute")


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one worker did.

    Attributes
    ----------
    worker : int
        Its number.
    steps : int
        How many.
    work_seconds : float
        What it spent on loading and computing.
    load : float
        Its work, where that of the mean worker is 1.
    split : mapping of str to float
        The part of its time that each of `PARTS` took, 0 to 1.
    """

    worker: int
    steps: int
    work_seconds: float
    load: float
    split: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Load:
    """A run's work by worker.

    Attributes
    ----------
    workers : tuple of Share
        In the order in which they were given.
    skew : float
        The work of the worker that has most to do, where that of the mean worker is 1.
    split : mapping of str to float
        The part of all workers' time that each of `PARTS` took, 0 to 1.
    efficiency : float or None
        The part of the time that was work; None where nothing was measured.
    """

    workers: tuple[Share, ...]
    skew: float
    split: Mapping[str, float]
    efficiency: float | None

    @property
    def communication(self) -> float:
        """The part of the time that working together took: waiting and transfer, 0 to 1."""
        return self.split.get("wait", 0.0) + self.split.get("transfer", 0.0)


def load_of(workers: Sequence[WorkerLoad]) -> Load:
    """Return how the work was shared out.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> def worker(n, compute, wait):
    ...     return SimpleNamespace(worker=n, steps=10, seconds={"compute": compute, "wait": wait}, num_bytes=0)
    >>> found = load_of([worker(0, 3.0, 0.0), worker(1, 1.0, 2.0)])
    >>> found.skew, [share.load for share in found.workers]
    (1.5, [1.5, 0.5])
    """
    work = [sum(each.seconds.get(part, 0.0) for part in _WORK) for each in workers]
    mean = sum(work) / len(work) if work else 0.0
    found = tuple(
        Share(
            worker=each.worker,
            steps=each.steps,
            work_seconds=seconds,
            load=seconds / mean if mean else 1.0,
            split=shares([each]),
        )
        for each, seconds in zip(workers, work, strict=True)
    )
    skew = max((each.load for each in found), default=1.0)
    return Load(workers=found, skew=skew, split=shares(workers), efficiency=efficiency(workers))
