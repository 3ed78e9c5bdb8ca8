"""Pipeline schedules: what each rank does in which order, how long it ideally takes, how much of that is bubble.

    gpipe        all micro-batches forward, then all back                    Huang et al. 2019, arXiv:1811.06965
    1f1b         one forward, one backward: at most p micro-batches are held  Narayanan et al. 2019 (PipeDream),
                                                                             2021, arXiv:2006.09503
    interleaved  1f1b with v stages a rank, rank r has r, r + p, …           Narayanan et al. 2021, arXiv:2104.04473
    zero-bubble  1f1b whose weight gradients fill the gaps (ZB-H1)           Qi et al. 2023, arXiv:2401.10241

Pure: numbers in, lists of actions and times out. Knows no tensors, ranks of a cluster, or clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from openclaw_nb.core.errors import RefusedError, UsageError, unknown_name

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")


class Kind(StrEnum):
    """What an action computes; ``BACKWARD`` is ``INPUT`` and ``WEIGHT`` in one."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"

    @property
    def words(self) -> str:
        """What it is, for people."""
        return _WORDS[self]


_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward (input gradient)",
    Kind.WEIGHT: "backward (weight gradient)",
}


@dataclass(frozen=True, order=True)
class Action:
    """One micro-batch at one stage, one way."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


Lane = list[Action]


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) of a micro-batch at one stage; a whole backward takes ``input`` + ``weight``."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0

    def of(self, kind: Kind) -> float:
        """How long an action of this kind takes."""
        if kind is Kind.BACKWARD:
            return self.input + self.weight
        return {Kind.FORWARD: self.forward, Kind.INPUT: self.input, Kind.WEIGHT: self.weight}[kind]


@dataclass(frozen=True)
class Timed:
    """An action of a rank, with when it begins and ends."""

    rank: int
    action: Action
    start: float
    end: float


# ------------------------------------------------------------------------------------------ the schedules


def build(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> list[Lane]:
    """Return what each rank does, in order.

    Parameters
    ----------
    schedule : str
        One of `SCHEDULES`.
    num_ranks : int
        p; stage s is at rank s mod p.
    num_microbatches : int
        m.
    num_chunks : int
        v, the stages a rank; more than one with ``interleaved`` only.

    Raises
    ------
    UsageError
        For an unknown schedule, or numbers that it does not allow.

    Examples
    --------
    >>> [" ".join(map(str, lane)) for lane in build("1f1b", 2, 3)]
    ['F0.0 F0.1 B0.0 F0.2 B0.1 B0.2', 'F1.0 B1.0 F1.1 B1.1 F1.2 B1.2']
    """
    check(schedule, num_ranks, num_microbatches, num_chunks)
    make = _MAKERS[schedule]
    return [make(rank, num_ranks, num_microbatches, num_chunks) for rank in range(num_ranks)]


def check(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Refuse numbers that a schedule does not allow; see `build`."""
    if schedule not in SCHEDULES:
        raise unknown_name("schedule", schedule, SCHEDULES)
    if min(num_ranks, num_microbatches, num_chunks) < 1:
        raise UsageError(
            f"A schedule has at least one rank, micro-batch and stage a rank, not {num_ranks}, {num_microbatches} "
            f"and {num_chunks}."
        )
    if schedule != "interleaved" and num_chunks > 1:
        raise RefusedError(
            f"{schedule!r} has one stage a device, but devices come again after others ({num_chunks} stages each). "
            "Take schedule='interleaved', or let each device have neighbouring stages."
        )
    if schedule == "interleaved" and num_chunks == 1 and num_ranks > 1:
        raise RefusedError(
            f"'interleaved' has several stages a device: give 2·{num_ranks} stages, or more, to {num_ranks} devices "
            "in turn, such as stage_devices=['CPU-0', 'CPU-1', 'CPU-0', 'CPU-1']. With one each, take '1f1b'."
        )
    if schedule == "interleaved" and num_microbatches % num_ranks:
        raise RefusedError(
            f"'interleaved' sends micro-batches in groups of as many as there are devices: {num_microbatches} is no "
            f"multiple of {num_ranks}."
        )


def _gpipe(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Lane:
    order = range(num_microbatches)
    return [Action(kind, rank, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in order]


def _one_forward_one_backward(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Lane:
    forwards = [Action(Kind.FORWARD, rank, m) for m in range(num_microbatches)]
    backwards = [Action(Kind.BACKWARD, rank, m) for m in range(num_microbatches)]
    return _alternate(forwards, backwards, num_ranks - rank - 1)


def _interleaved(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Lane:
    """Go through groups of p micro-batches, each through all of the rank's stages."""
    order = [
        (chunk, group + number)
        for group in range(0, num_microbatches, num_ranks)
        for chunk in range(num_chunks)
        for number in range(num_ranks)
    ]
    forwards = [Action(Kind.FORWARD, rank + chunk * num_ranks, m) for chunk, m in order]
    last = num_chunks - 1
    backwards = [Action(Kind.BACKWARD, rank + (last - chunk) * num_ranks, m) for chunk, m in order]
    return _alternate(forwards, backwards, (num_ranks - rank - 1) * 2 + last * num_ranks)


def _alternate(forwards: Lane, backwards: Lane, num_warm_up: int) -> Lane:
    warm_up = min(num_warm_up, len(forwards))
    steady = zip(forwards[warm_up:], backwards, strict=False)
    lane = [*forwards[:warm_up], *(action for pair in steady for action in pair)]
    return lane + backwards[len(forwards) - warm_up :]


def _zero_bubble(rank: int, num_ranks: int, num_microbatches: int, num_chunks: int) -> Lane:
    """Let weight gradients wait, the more the later the rank's gaps come: rank r keeps r of them for its end.

    A micro-batch is held until its weight gradient is made: p at most on each rank, as on the first of 1f1b.
    """
    num_forward = min(num_ranks - rank, num_microbatches)
    lane = [Action(Kind.FORWARD, rank, m) for m in range(num_forward)]
    for number in range(num_microbatches):
        lane.append(Action(Kind.INPUT, rank, number))
        if number >= rank:
            lane.append(Action(Kind.WEIGHT, rank, number - rank))
        if num_forward < num_microbatches:
            lane.append(Action(Kind.FORWARD, rank, num_forward))
            num_forward += 1
    late = range(max(0, num_microbatches - rank), num_microbatches)
    return lane + [Action(Kind.WEIGHT, rank, m) for m in late]


_MAKERS = {
    "1f1b": _one_forward_one_backward,
    "gpipe": _gpipe,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
}


def _needs(action: Action, num_stages: int) -> Iterator[Action]:
    """Which actions must be over before this one begins; of a whole backward, by either name."""
    kind, stage, number = action.kind, action.stage, action.microbatch
    if kind is Kind.WEIGHT:
        yield Action(Kind.INPUT, stage, number)
    elif kind is Kind.FORWARD:
        if stage:
            yield Action(kind, stage - 1, number)
    else:
        yield Action(Kind.FORWARD, stage, number)
        if stage < num_stages - 1:
            yield Action(kind, stage + 1, number)


def num_held(lane: Lane) -> int:
    """Return the largest number of micro-batches that a rank holds activations of at once."""
    held = most = 0
    for action in lane:
        held += {Kind.FORWARD: 1, Kind.INPUT: 0}.get(action.kind, -1)
        most = max(most, held)
    return most


def choose_num_microbatches(batch_size: int, num_ranks: int, schedule: str) -> int:
    """Return a number of micro-batches for a batch: the largest divisor that is at most 4 p, which bounds the bubble.

    Raises
    ------
    RefusedError
        When no divisor does for the schedule.
    """
    step = num_ranks if schedule == "interleaved" else 1
    for number in range(4 * num_ranks, 0, -1):
        if batch_size % number == 0 and number % step == 0:
            return number
    raise RefusedError(
        f"No number of micro-batches that is a multiple of {step}, as 'interleaved' on {num_ranks} devices needs, "
        f"divides a batch of {batch_size}. Take batches of a multiple of {step}."
    )


# ------------------------------------------------------------------------------------------------- times


def simulate(
    lanes: Sequence[Lane], costs: Costs | Sequence[Costs] = Costs(), hop: float = 0.0
) -> list[Timed]:
    """Return when each action ideally runs.

    Parameters
    ----------
    lanes : sequence of lists of Action
        What `build` returns.
    costs : Costs or sequence of Costs
        Of every stage, or by stage.
    hop : float
        How long a message between ranks takes.

    Raises
    ------
    UsageError
        When the ranks would wait for each other for ever.
    """
    num_stages = 1 + max(action.stage for lane in lanes for action in lane)
    by_stage = [costs] * num_stages if isinstance(costs, Costs) else list(costs)
    ends: dict[Action, tuple[float, int]] = {}
    clock, places = [0.0] * len(lanes), [0] * len(lanes)
    timed: list[Timed] = []
    while len(timed) < sum(map(len, lanes)):
        before = len(timed)
        for rank, lane in enumerate(lanes):
            while places[rank] < len(lane):
                action = lane[places[rank]]
                needs = list(_needs(action, num_stages))
                if any(need not in ends for need in needs):
                    break
                arrived = [end + hop * (other != rank) for end, other in (ends[need] for need in needs)]
                start = max([clock[rank], *arrived])
                clock[rank] = start + by_stage[action.stage].of(action.kind)
                ends[action] = clock[rank], rank
                timed.append(Timed(rank, action, start, clock[rank]))
                places[rank] += 1
        if len(timed) == before:
            stuck = ", ".join(
                f"rank {r} at {lane[places[r]]}" for r, lane in enumerate(lanes) if places[r] < len(lane)
            )
            raise UsageError(f"The ranks of this schedule wait for each other: {stuck}.")
    return timed


def bubble_of(timed: Sequence[Timed]) -> float:
    """Return the share of all ranks' time, from the first start to the last end, in which they compute nothing."""
    ranks = {each.rank for each in timed}
    whole = max(each.end for each in timed) - min(each.start for each in timed)
    busy = sum(each.end - each.start for each in timed)
    return 1.0 - busy / (whole * len(ranks)) if whole > 0 else 0.0


def closed_form_bubble(
    schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1, costs: Costs = Costs()
) -> float:
    """Return the bubble by the papers' formulas, for stages of equal cost and free messages.

    (p-1)/(m+p-1) for gpipe and 1f1b; (p-1)/(v m+p-1) for interleaved; for zero-bubble
    (p-1)(F+I-W) / (m (F+I+W) + (p-1)(F+I-W)), which holds for m >= p and costs of like size; 0 where W is larger than
    F+I, and fills all gaps.
    """
    p, m = num_ranks, num_microbatches
    if schedule == "zero-bubble":
        idle = max(0.0, (p - 1) * (costs.forward + costs.input - costs.weight))
        return idle / (m * (costs.forward + costs.input + costs.weight) + idle)
    return (p - 1) / (num_chunks * m + p - 1)
