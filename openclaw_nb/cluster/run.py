"""One cell on its way through the workers, from the first command to the last reply.

    replies, deaths, whereabouts, the stop button ──> queue ──> one thread ──> decide ──> release / finish
                                                                   └──> what is to be shown ──> `next_event`

All state changes on one thread; the decisions are `plan.release`'s. Knows commands and replies; does not
know ipyparallel or how anything is drawn.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from openclaw_nb.core.errors import MismatchError, WorkerDiedError
from openclaw_nb.plan.release import GiveUp, Limits, Phase, RankView, ReleaseNow, decide, waiting_table
from openclaw_nb.protocol.messages import (
    Command,
    Done,
    Event,
    Failed,
    FormGroup,
    Measured,
    Regroup,
    Regrouped,
    Release,
    Reply,
    RunCell,
    Shown,
    Whereabouts,
)

_TICK_SECONDS = 0.1
_GRACE_SECONDS = 0.5
_LATE_BATCH_SECONDS = 2.0


class Mender(Protocol):
    """What a run that goes on after a death needs of the workers' membership."""

    def regroup_running(self, numbers: Sequence[int]) -> Mapping[int, FormGroup]:
        """Return how each of these workers joins a group of them, under a new epoch."""


class Channel(Protocol):
    """What a run needs of the cluster: two ways to send a command to a worker."""

    def request(self, worker: int, command: Command) -> Future[Reply]:
        """Send in order."""

    def request_at_once(self, worker: int, command: Command) -> Future[Reply]:
        """Send past what runs."""


@dataclass(frozen=True)
class Output:
    """Something to show: ``entry`` is a transcript entry of the rank."""

    rank: int
    entry: list[Any]


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


@dataclass(frozen=True, repr=False)
class RunResult:
    """How a cell ended on all ranks.

    ``failures`` and ``values`` are by rank; ``died`` lists ranks in the order in which the news came;
    ``cause`` says why the cell was released, or ""; ``release_seconds`` how long it took until all were out;
    ``busy`` lists ranks that were not; ``left`` says that it goes on, unobserved, for the reason in ``cause``;
    ``deaths`` are those after which it went on;
    ``first`` is the rank whose error came first and is nobody else's consequence, or None.
    """

    values: Mapping[int, dict[str, Any]]
    failures: Mapping[int, Failed]
    died: tuple[int, ...]
    busy: tuple[int, ...]
    interrupted: bool
    cause: str
    release_seconds: float
    seconds: float
    left: bool = False
    deaths: tuple[Death, ...] = ()
    table: list[tuple[int, str, str]] = field(default_factory=list)

    def __repr__(self) -> str:
        ranks = sorted({*self.values, *self.failures, *self.died, *self.busy})
        how = "ended well" if self.ok else self.cause or "did not end well"
        return f"<RunResult: {how} on {len(ranks)} ranks after {self.seconds:.1f} s>"

    @property
    def ok(self) -> bool:
        """Whether the cell ended well on every rank."""
        return not (self.failures or self.died or self.busy or self.interrupted)

    @property
    def notes(self) -> list[str]:
        """What the workers have to say, each line once, and the names that differ between ranks."""
        lines = [str(death) for death in self.deaths]
        lines += [line for value in self.values.values() for line in value.get("notes", ())]
        names = self.differing_names
        if names:
            listed = ", ".join(names)
            lines.append(f"these names differ between the ranks (each counted its own part): {listed}")
        return list(dict.fromkeys(lines))

    @property
    def differing_names(self) -> list[str]:
        """Names that a strategy cell has bound to different values on different ranks."""
        digests = [value["names"] for value in self.values.values() if "names" in value]
        every = sorted({name for row in digests for name in row})
        return [name for name in every if len({row.get(name) for row in digests}) > 1]

    @property
    def first(self) -> int | None:
        """The rank whose error is the first cause."""
        own = {r: f for r, f in self.failures.items() if not f.consequence}
        return min(own, key=lambda r: own[r].at) if own else None


class CellRun:
    """A cell that runs.

    Parameters
    ----------
    channel : Channel
        How to reach the workers.
    run_id : str
        Names the run on the wire.
    ranks : mapping of int to int
        Worker number of each rank that takes part.
    on_finished : callable
        Called with the result once, on the run's thread, before waiters wake.
    absent : sequence of int
        Ranks of the group that do not run the cell.
    mender : Mender, optional
        By whom it goes on after a death.
    max_retries : int
        After how many deaths in a row it does, without a step in between.

    Attributes
    ----------
    limits : Limits
        How long ranks may wait for each other; may be changed while it runs.
    """

    def __init__(
        self,
        channel: Channel,
        run_id: str,
        ranks: Mapping[int, int],
        on_finished: Callable[[RunResult], None],
        absent: Sequence[int] = (),
        *,
        mender: Mender | None = None,
        max_retries: int = 0,
    ) -> None:
        self.run_id = run_id
        self.limits = Limits()
        self.ranks = dict(ranks)
        self._channel = channel
        self._on_finished = on_finished
        self._rank_of = {worker: rank for rank, worker in ranks.items()}
        self._inbox: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._shown: queue.SimpleQueue[Output | Measured | None] = queue.SimpleQueue()
        self._views = {rank: RankView() for rank in ranks}
        self._views |= {rank: RankView(phase=Phase.ABSENT) for rank in absent}
        self._replies: dict[int, Reply] = {}
        self._num_batches = dict.fromkeys(ranks, 0)
        self._num_measured = dict.fromkeys(ranks, 0)
        self._num_steps = dict.fromkeys(ranks, 0)
        self._died: list[int] = []
        self._mender, self._max_retries = mender, max_retries
        self._deaths: list[Death] = []
        self._died_at = 0.0
        self._num_failures = 0
        self._released_at: float | None = None
        self._cause = ""
        self._interrupted = self._left = False
        self._table: list[tuple[int, str, str]] = []
        self._started = self._last_end = time.monotonic()
        self._done = threading.Event()
        self.result: RunResult | None = None

    # --------------------------------------------------------------------------------- from outside

    def start(self, command: RunCell) -> None:
        """Send the cell to each rank's worker."""
        self._epoch = command.epoch
        for rank, worker in self.ranks.items():
            self._channel.request(worker, command).add_done_callback(
                lambda future, rank=rank: self._inbox.put(("reply", rank, future))  # type: ignore[misc]
            )
        threading.Thread(target=self._work, name="openclaw-run", daemon=True).start()

    def tell(self, event: Event) -> None:
        """Take an event of a worker; those of other runs are dropped."""
        if event.run_id == self.run_id and event.worker in self._rank_of:
            self._inbox.put(("event", self._rank_of[event.worker], event))

    def worker_died(self, worker: int) -> None:
        """Take the news that a worker's process ended."""
        if worker in self._rank_of:
            self._inbox.put(("died", self._rank_of[worker], None))

    def interrupt(self) -> None:
        """End the cell as the stop button does."""
        self._inbox.put(("interrupt", -1, None))

    def leave(self, why: str) -> None:
        """Stop following the cell, which goes on, and wait until that is known here."""
        self._inbox.put(("leave", -1, why))
        self._done.wait(_LATE_BATCH_SECONDS)

    def next_event(self, timeout: float) -> Output | Measured | None:
        """Return the next thing to show, or None when nothing came in time or the run is over."""
        try:
            return self._shown.get(timeout=timeout)
        except queue.Empty:
            return None

    def wait(self, timeout: float | None = None) -> RunResult | None:
        """Wait until the run is over; return its result, or None after ``timeout`` seconds."""
        self._done.wait(timeout)
        return self.result

    @property
    def seconds(self) -> float:
        """How long it has run, or did run."""
        return self.result.seconds if self.result is not None else time.monotonic() - self._started

    @property
    def running(self) -> bool:
        """Whether the run is not over."""
        return not self._done.is_set()

    def who_waits_where(self) -> list[tuple[int, str, str]]:
        """Return rows (rank, what it does, the cell's line)."""
        return waiting_table(dict(self._views))

    @property
    def longest_wait_seconds(self) -> float:
        """How long the rank that waits longest has waited in its collective."""
        views = list(self._views.values())
        return max((v.waiting_seconds for v in views if v.phase is Phase.RUNNING and v.call), default=0.0)

    # -------------------------------------------------------------------------------- the run's thread

    def _work(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                self._take(*self._inbox.get(timeout=_TICK_SECONDS))
            if self._left:
                break
            if all(view.phase is not Phase.RUNNING for view in self._views.values()):
                self._await_late_batches()
                break
            decision = decide(self._views, self._since_release(), self.limits)
            if isinstance(decision, ReleaseNow):
                self._release(decision.cause)
            elif isinstance(decision, GiveUp):
                break
        self._finish()

    def _take(self, kind: str, rank: int, item: Any) -> None:
        if rank >= 0 and rank not in self._views:  # of one that the others have gone on without
            return
        match kind:
            case "reply":
                self._take_reply(rank, item)
            case "event":
                self._take_event(rank, item)
            case "died":
                self._die(rank)
            case "leave":
                self._left, self._cause = True, item
            case "interrupt":
                self._interrupted = True
                self._release("interrupted", grace_seconds=0.0)

    def _set(self, rank: int, **changes: Any) -> None:
        if self._views[rank].phase is Phase.RUNNING:
            self._views[rank] = replace(self._views[rank], **changes)

    def _die(self, rank: int) -> None:
        if self._mender is not None and self._can_go_on(rank):
            self._go_on_without(rank, self._mender)
            return
        if self._views[rank].phase is Phase.RUNNING:
            self._died.append(rank)
        self._set(rank, phase=Phase.DIED)

    def _can_go_on(self, rank: int) -> bool:
        others = [view.phase for other, view in self._views.items() if other != rank]
        return (
            self._views[rank].phase is Phase.RUNNING
            and self._released_at is None
            and bool(others)
            and all(phase in (Phase.RUNNING, Phase.DONE) for phase in others)
            and self._num_failures < self._max_retries
        )

    def _go_on_without(self, rank: int, mender: Mender) -> None:
        """Let the others go on in a group of their own."""
        worker = self.ranks.pop(rank)
        del self._views[rank], self._rank_of[worker], self._num_batches[rank], self._num_measured[rank]
        self._deaths.append(Death(rank, worker, len(self.ranks)))
        # A rank that has ended its cell has seen all others come to the end of their training.
        if any(view.phase is Phase.DONE for view in self._views.values()):
            return
        self._num_failures += 1
        self._died_at = time.monotonic()
        groups = mender.regroup_running(list(self.ranks.values()))
        for number, group in groups.items():
            self._epoch = group.epoch
            command = Regroup(run_id=self.run_id, group=group, cause=f"rank {rank} died")
            self._channel.request_at_once(number, command)

    def _count_steps(self, rank: int, steps: int) -> None:
        """Let a step that was made after the last death end the row of failures."""
        self._num_steps[rank] += steps
        if self._deaths and 0 <= self._deaths[-1].num_steps < self._num_steps[rank]:
            self._num_failures = 0

    def _take_regrouped(self, event: Regrouped) -> None:
        newest = self._deaths[-1]
        if event.epoch == self._epoch and newest.num_steps < 0:
            seconds = time.monotonic() - self._died_at
            self._deaths[-1] = replace(newest, num_steps=event.num_steps, seconds=seconds)

    def _take_reply(self, rank: int, future: Future[Reply]) -> None:
        try:
            reply = future.result()
        except WorkerDiedError:
            self._die(rank)
            return
        self._replies[rank] = reply
        if isinstance(reply, Failed):
            # What the ranks disagree about is what every rank should say, also those that are released for it.
            mismatch = reply.error_type == MismatchError.__name__
            error = f"{reply.error_type}: {reply.message}" if mismatch else reply.error_type
            self._set(rank, phase=Phase.RAISED, error=error)
        else:
            self._last_end = time.monotonic()
            self._set(rank, phase=Phase.DONE)
            for other in self._views:
                self._set(other, told_after_end_seconds=0.0)

    def _take_event(self, rank: int, event: Event) -> None:
        match event:
            case Shown():
                self._num_batches[rank] = event.seq
                for entry in event.entries:
                    self._shown.put(Output(rank, entry))
            case Measured():
                self._num_measured[rank] = event.seq
                self._count_steps(rank, event.steps)
                self._shown.put(event)
            case Regrouped():
                self._take_regrouped(event)
            case Whereabouts():
                self._views[rank] = self._views[rank].located(
                    call=event.call,
                    group=event.group,
                    number=event.number,
                    waiting_seconds=event.seconds,
                    line=event.line,
                    code=event.code,
                    told_after_end_seconds=time.monotonic() - self._last_end,
                )

    def _since_release(self) -> float | None:
        return None if self._released_at is None else time.monotonic() - self._released_at

    def _release(self, cause: str, grace_seconds: float = _GRACE_SECONDS) -> None:
        if self._released_at is None:
            self._released_at, self._cause = time.monotonic(), cause
            self._table = self.who_waits_where()
        for rank, view in self._views.items():
            if view.phase is Phase.RUNNING:
                self._channel.request_at_once(
                    self.ranks[rank],
                    Release(epoch=self._epoch, run_id=self.run_id, cause=cause, grace_seconds=grace_seconds),
                )

    def _await_late_batches(self) -> None:
        """Outputs and replies travel on different sockets: wait for the batches that replies have counted."""
        deadline = time.monotonic() + _LATE_BATCH_SECONDS
        while self._missing_batches() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._take(*self._inbox.get(timeout=_TICK_SECONDS))

    def _missing_batches(self) -> bool:
        return any(
            reply.value.get("num_batches", 0) > self._num_batches[rank]
            or reply.value.get("num_measured", 0) > self._num_measured[rank]
            for rank, reply in self._replies.items()
        )

    def _seconds_at_end(self) -> float:
        return time.monotonic() - self._started

    def _finish(self) -> None:
        for rank, reply in sorted(self._replies.items()):
            for entry in reply.value.get("entries", ()):
                self._shown.put(Output(rank, entry))
        phases = {rank: view.phase for rank, view in self._views.items()}
        self.result = RunResult(
            values={r: reply.value for r, reply in self._replies.items() if isinstance(reply, Done)},
            failures={r: reply for r, reply in self._replies.items() if isinstance(reply, Failed)},
            died=tuple(self._died),
            busy=tuple(r for r, phase in phases.items() if phase is Phase.RUNNING),
            interrupted=self._interrupted,
            cause=self._cause,
            release_seconds=self._since_release() or 0.0,
            seconds=self._seconds_at_end(),
            left=self._left,
            deaths=tuple(self._deaths),
            table=self._table,
        )
        self._on_finished(self.result)
        self._done.set()
        self._shown.put(None)
