"""What to change about a run, from where its time went: the cause that is seen, and the key of the configuration.

    seconds of each worker (data, compute, wait, transfer), devices, settings ──> `advise` ──> Advice, the worst first

Loading and computing is work; waiting for others and transfer is what working together costs. The part of the time that
is work is the efficiency: n workers do the work of n × that many. What makes computing itself slower is not seen, but
for more workers and threads than cores.

Pure: numbers in, sentences out. Knows the names of keys and options; does not know runs, clusters or files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

NOTICEABLE = 0.2
"""A cause is told from this part of the time on; below it there is little to win."""

POOR = 0.7
"""Below this efficiency scaling is called poor."""

_WAITED_FOR = 0.1
_MANY_MESSAGES = 4
_WORK = ("data", "compute")
_STAGED = {
    "model_parallel": (
        "strategy.name",
        "take strategy.name: pipeline, whose workers work at the same time, or data_parallel where the model fits",
    ),
    "pipeline": (
        "strategy.microbatches",
        "cut batches into more parts, by strategy.microbatches or --microbatches",
    ),
}
"""What helps where workers wait for each other by the nature of the strategy: the key, and what to do."""


class WorkerLoad(Protocol):
    """What one worker has done; `openclaw_nb.monitor.store.WorkerHistory` is one."""

    @property
    def worker(self) -> int:
        """Its number."""

    @property
    def steps(self) -> int:
        """How many."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Its time by what it went to: data, compute, wait, transfer."""

    @property
    def num_bytes(self) -> int:
        """What it gave into sums with the others."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A run, and where it ran.

    Attributes
    ----------
    workers : sequence of WorkerLoad
        Who took part.
    strategy : str
        Under which strategy.
    takes : collection of str
        What this strategy can be told, such as ``"sync_frequency"``.
    options : mapping
        What it was told.
    num_cores : int
        How many cores all workers have together.
    threads_per_worker : int
        How many each keeps busy.
    on_gpus : bool
        Whether they are on GPUs.
    communication : str
        What they communicate with.
    balances : bool
        Whether batches can be shared out by speed.
    """

    workers: Sequence[WorkerLoad]
    strategy: str = "data_parallel"
    takes: Collection[str] = frozenset({"sync_frequency", "fusion_buffer_size", "accumulate", "async_io"})
    options: Mapping[str, object] = field(default_factory=dict)
    num_cores: int = 1
    threads_per_worker: int = 1
    on_gpus: bool = False
    communication: str = ""
    balances: bool = True


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One cause, and what to do about it.

    Attributes
    ----------
    cause : str
        ``"data"``, ``"transfer"``, ``"wait"``, ``"straggler"``, ``"cores"`` or ``"nccl"``.
    seen : str
        What was seen, with numbers.
    key : str
        The key of the configuration to change; ``"balance_load"`` is a call, ``"num_workers"`` the DataLoader's.
    change : str
        What to do.
    share : float
        Which part of the time it is about, 0 to 1; 0 where that is not known.
    """

    cause: str
    seen: str
    key: str
    change: str
    share: float = 0.0

    def __str__(self) -> str:
        return f"{self.seen}: {self.change}."


def shares(workers: Sequence[WorkerLoad]) -> dict[str, float]:
    """Return which part of all workers' time went to what; nothing where none was measured."""
    spent: dict[str, float] = {}
    for worker in workers:
        for part, seconds in worker.seconds.items():
            spent[part] = spent.get(part, 0.0) + seconds
    whole = sum(spent.values())
    return {part: seconds / whole for part, seconds in spent.items()} if whole > 0 else {}


def efficiency(workers: Sequence[WorkerLoad]) -> float | None:
    """Return which part of all workers' time was work, 0 to 1; None where nothing was measured."""
    spent = shares(workers)
    return sum(spent.get(part, 0.0) for part in _WORK) if spent else None


def scaling(workers: Sequence[WorkerLoad]) -> str:
    """Say how many workers' work was done, where that is poor; else ""."""
    found = efficiency(workers)
    if found is None or len(workers) < 2 or found >= POOR:
        return ""
    return f"Poor scaling: {len(workers)} workers do the work of {len(workers) * found:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def advise(situation: Situation) -> list[Advice]:
    """Return what to change, what costs the most time first; nothing where there is little to win.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> spent = {"data": 6.0, "compute": 4.0, "wait": 0.0, "transfer": 0.0}
    >>> worker = SimpleNamespace(worker=0, steps=100, seconds=spent, num_bytes=0)
    >>> [(each.cause, each.key) for each in advise(Situation(workers=[worker]))]
    [('data', 'parallel.async_io')]
    """
    found = [*_data(situation), *_together(situation), *_transfer(situation), *_where(situation)]
    return sorted(found, key=lambda each: each.share, reverse=True)


def headline(situation: Situation) -> str:
    """Return the worst cause as one sentence, "" where there is none."""
    found = advise(situation)
    if not found:
        return ""
    worst, poor = found[0], scaling(situation.workers)
    return f"{poor}. {worst}" if poor and worst.share else str(worst)


# ----------------------------------------------------------------------------------------------- the causes


def _data(situation: Situation) -> Iterator[Advice]:
    share = shares(situation.workers).get("data", 0.0)
    if share < NOTICEABLE:
        return
    seen = f"{_percent(share)} of the time goes to waiting for batches"
    key, change = "num_workers", "let more processes load them, by num_workers= of the DataLoader"
    if "async_io" in situation.takes and situation.options.get("async_io") is not True:
        key = "parallel.async_io"
        change = "let them be loaded ahead, by parallel.async_io: true, or num_workers= of the DataLoader"
    yield Advice(cause="data", seen=seen, key=key, change=change, share=share)


def _together(situation: Situation) -> Iterator[Advice]:
    """What waiting for others comes from: stages, one that is slow, or that all wait again and again."""
    share = shares(situation.workers).get("wait", 0.0)
    if situation.strategy in _STAGED:
        if share >= NOTICEABLE:
            key, change = _STAGED[situation.strategy]
            seen = f"{_percent(share)} of the time workers wait for the stages before and after theirs"
            yield Advice(cause="wait", seen=seen, key=key, change=change, share=share)
        return
    slowest = _straggler(situation.workers)
    if slowest is not None:
        yield _about_straggler(situation, *slowest)
    elif share >= NOTICEABLE:
        yield _synchronise_less(situation, "wait", share, "goes to waiting for now one worker, now another")


def _straggler(workers: Sequence[WorkerLoad]) -> tuple[WorkerLoad, float] | None:
    """Return who waits least, and how much the others wait, if that is more than a tenth and twice as much."""
    waits = {
        worker.worker: worker.seconds.get("wait", 0.0) / whole
        for worker in workers
        if (whole := sum(worker.seconds.values())) > 0
    }
    if len(waits) < 2:
        return None
    slowest = min(workers, key=lambda worker: waits.get(worker.worker, 2.0))
    others = [wait for number, wait in waits.items() if number != slowest.worker]
    share = sum(others) / len(others)
    is_one = share >= _WAITED_FOR and waits[slowest.worker] <= share / 2
    return (slowest, share) if is_one else None


def _about_straggler(situation: Situation, slowest: WorkerLoad, share: float) -> Advice:
    others = "the other waits" if len(situation.workers) == 2 else "the others wait"
    loads = slowest.seconds.get("data", 0.0) > slowest.seconds.get("compute", 0.0)
    who = f"worker-{slowest.worker} is the slowest" + ", at loading batches" * loads
    seen = f"{who}, and {others} {_percent(share)} of the time"
    change = "give each worker as much as it can do, by %openclaw balance or master.balance_load()"
    if not situation.balances:
        change = (
            "take workers that are alike, or data_parallel, whose batches can be shared out by balance_load"
        )
    return Advice(cause="straggler", seen=seen, key="balance_load", change=change, share=share)


def _transfer(situation: Situation) -> Iterator[Advice]:
    share = shares(situation.workers).get("transfer", 0.0)
    if share < NOTICEABLE or len(situation.workers) < 2:
        return
    buffer = situation.options.get("fusion_buffer_size")
    per_step = max(worker.num_bytes // max(1, worker.steps) for worker in situation.workers)
    if isinstance(buffer, int) and buffer > 0 and per_step > _MANY_MESSAGES * buffer:
        yield Advice(
            cause="transfer",
            seen=f"{_percent(share)} of the time goes to transfer, in {-(-per_step // buffer)} messages a step",
            key="parallel.fusion_buffer_size",
            change="send fewer and larger ones, by a larger parallel.fusion_buffer_size",
            share=share,
        )
    else:
        yield _synchronise_less(situation, "transfer", share, "goes to transfer")


def _synchronise_less(situation: Situation, cause: str, share: float, what: str) -> Advice:
    seen = f"{_percent(share)} of the time {what}"
    now = situation.options.get("sync_frequency", 1)
    if "sync_frequency" in situation.takes:
        change = f"synchronise less often than every {now} batches" if now != 1 else "synchronise less often"
        change += ", by a larger strategy.sync_frequency (parallel.sync_interval), or take larger batches"
        return Advice(cause=cause, seen=seen, key="strategy.sync_frequency", change=change, share=share)
    if "accumulate" in situation.takes:
        change = (
            "make one step of several batches, by strategy.accumulate or --accumulate, or take larger batches"
        )
        return Advice(cause=cause, seen=seen, key="strategy.accumulate", change=change, share=share)
    change = "take larger batches, or the strategy data_parallel where the model fits on each device"
    return Advice(cause=cause, seen=seen, key="strategy.name", change=change, share=share)


def _where(situation: Situation) -> Iterator[Advice]:
    """What the devices say, whatever was measured."""
    if not situation.on_gpus and len(situation.workers) * situation.threads_per_worker > situation.num_cores:
        yield _too_many(situation)
    if situation.on_gpus and len(situation.workers) > 1 and "nccl" not in situation.communication.lower():
        yield Advice(
            cause="nccl",
            seen=f"sums of {len(situation.workers)} GPUs go by {situation.communication} in place of NCCL",
            key="parallel.communication",
            change="take parallel.communication: nccl; if it falls back, openclaw doctor says what is missing",
        )


def _too_many(situation: Situation) -> Advice:
    workers, threads, cores = len(situation.workers), situation.threads_per_worker, situation.num_cores
    times = f" × {threads} threads" if threads > 1 else ""
    key, fitting = ("parallel.workers", cores)
    if workers <= cores:
        key, fitting = ("parallel.omp_threads", cores // workers)
    return Advice(
        cause="cores",
        seen=f"{workers} workers{times} share {cores} core{'s' * (cores != 1)}, and slow each other down",
        key=key,
        change=f"take fewer, by {key}: {fitting}",
    )
