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

from openclaw_nb.cluster.changes import Change, Death, Joined, Left, TurnedAway
from openclaw_nb.core.errors import MismatchError, WorkerDiedError
from openclaw_nb.plan.release import (
    GiveUp,
    Limits,
    Phase,
    RankView,
    ReleaseNow,
    decide,
    stopped_rank,
    waiting_table,
)
from openclaw_nb.protocol.messages import (
    AtHead,
    Command,
    Done,
    EnterCell,
    Event,
    Failed,
    FormGroup,
    Measured,
    Meet,
    Regroup,
    Regrouped,
    Release,
    Reply,
    RunCell,
    SetPace,
    Shown,
    StrategySpec,
    Whereabouts,
)

_TICK_SECONDS = 0.1
_GRACE_SECONDS = 0.5
_LOOK_SECONDS = 0.4
_LATE_BATCH_SECONDS = 2.0


class Mender(Protocol):
    """What a run whose workers go and come needs of their membership."""

    def regroup_running(self, numbers: Sequence[int], run_id: str) -> Mapping[int, FormGroup]:
        """Return how each of these workers, busy with a run, joins a group of them, under a new epoch."""

    def remove(self, number: int) -> None:
        """End a worker, for good."""

    def kill(self, number: int) -> None:
        """End a worker's process."""


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


@dataclass(frozen=True, repr=False)
class RunResult:
    """How a cell ended on all ranks.

    ``failures`` and ``values`` are by rank; ``died`` lists ranks in the order in which the news came;
    ``cause`` says why the cell was released, or ""; ``release_seconds`` how long it took until all were out;
    ``busy`` lists ranks that were not; ``left`` says that it goes on, unobserved, for the reason in ``cause``;
    ``changes`` tells of the workers that went, or came, meanwhile;
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
    changes: tuple[Change, ...] = ()
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
        lines = [str(change) for change in self.changes]
        told = [*self.values.values(), *(failure.value for failure in self.failures.values())]
        lines += [line for value in told for line in value.get("notes", ())]
        names = self.differing_names
        if names:
            listed = ", ".join(names)
            lines.append(f"these names differ between the ranks (each counted its own part): {listed}")
        return list(dict.fromkeys(lines))

    @property
    def deaths(self) -> list[Death]:
        """The deaths after which it went on."""
        return [change for change in self.changes if isinstance(change, Death)]

    @property
    def joined(self) -> list[Joined]:
        """The workers that came meanwhile."""
        return [change for change in self.changes if isinstance(change, Joined)]

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
        By whom it goes on when workers go or come.
    max_retries : int
        After how many deaths in a row it does, without a step in between.
    is_stopped : callable
        Returns whether the process of a worker is stopped (SIGSTOP).

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
        is_stopped: Callable[[int], bool] = lambda worker: False,
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
        self._changes: list[Change] = []
        self._died_at = 0.0
        self._command: RunCell | None = None
        self._num_failures = 0
        self._former: dict[int, int] = {}
        self._waiting: list[int] = []
        self._leaving: list[int] = []
        self._at_head: set[int] = set()
        self._entering: set[int] = set()
        self._pause_seconds = 0.0
        self._is_stopped = is_stopped
        self._looked_at = 0.0
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
        self._command, self._epoch = command, command.epoch
        for rank in self.ranks:
            self._send(rank, command)
        threading.Thread(target=self._work, name="openclaw-run", daemon=True).start()

    def _send(self, rank: int, command: Command) -> None:
        worker = self.ranks[rank]

        def answered(future: Future[Reply]) -> None:
            if self._rank_of.get(worker) == rank:  # else it left, and another may have its rank
                self._inbox.put(("reply", rank, future))

        self._channel.request(worker, command).add_done_callback(answered)

    def tell(self, event: Event) -> None:
        """Take an event of a worker; those of other runs are dropped."""
        if event.run_id == self.run_id and event.worker in self._rank_of:
            self._inbox.put(("event", self._rank_of[event.worker], event))

    def worker_died(self, worker: int) -> None:
        """Take the news that a worker's process ended, be it in the cell or on its way in."""
        self._inbox.put(("died", -1, worker))

    def offer(self, worker: int) -> None:
        """Take the news that a worker is ready to take part; it comes in, once, where the cell lets it."""
        self._inbox.put(("offer", -1, worker))

    def dismiss(self, worker: int) -> None:
        """Let a worker leave the cell where that can be; it is ended then."""
        self._inbox.put(("dismiss", -1, worker))

    def set_pace(self, command: SetPace) -> None:
        """Let the workers, and those that come in later, go on at another pace."""
        self._inbox.put(("pace", -1, command))

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
    def is_elastic(self) -> bool:
        """Whether workers can go and come while it runs."""
        return self._mender is not None

    @property
    def strategy(self) -> StrategySpec | None:
        """How it is run in parallel; None as it stands, and when another process has begun it."""
        return self._command.strategy if self._command is not None else None

    @property
    def num_steps(self) -> int:
        """How many steps its ranks have told of."""
        return max(list(self._num_steps.values()), default=0)

    @property
    def goes_on(self) -> bool:
        """Whether it goes on after deaths."""
        return self._mender is not None and self._max_retries > 0

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
            self._look_for_stopped()
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
                self._take_death(item)
            case "offer" if self._mender is not None:
                if item not in self._waiting and item not in self._rank_of:
                    self._waiting.append(item)
                    self._invite()
            case "dismiss" if self._mender is not None:
                self._leaving.append(item)
                self._invite()
            case "pace":
                self._set_pace(item)
            case "leave":
                self._left, self._cause = True, item
            case "interrupt":
                self._interrupted = True
                self._release("interrupted", grace_seconds=0.0)

    def _set_pace(self, command: SetPace) -> None:
        assert self._command is not None
        self._command = replace(self._command, pace=command)
        for number in self.ranks.values():
            self._channel.request_at_once(number, command)

    def _set(self, rank: int, **changes: Any) -> None:
        if self._views[rank].phase is Phase.RUNNING:
            self._views[rank] = replace(self._views[rank], **changes)

    def _look_for_stopped(self) -> None:
        """Look twice a second whose process is stopped; end one that the others can go on without."""
        now = time.monotonic()
        since = now - self._looked_at
        if since < _LOOK_SECONDS:
            return
        self._looked_at = now
        for rank, worker in self.ranks.items():
            view = self._views[rank]
            seconds = (
                view.stopped_seconds + min(since, 2 * _LOOK_SECONDS) if self._is_stopped(worker) else 0.0
            )
            self._set(rank, stopped_seconds=seconds)
        held = stopped_rank(self._views)
        if held is not None and self._mender is not None and self._can_go_on(held):
            self._mender.kill(self.ranks[held])  # it could come back to a group that is gone
            self._die(held)

    # ------------------------------------------------------------------------- workers go and come

    def _take_death(self, worker: int) -> None:
        if worker in self._waiting:
            self._waiting.remove(worker)
        if worker in self._rank_of:
            self._die(self._rank_of[worker])

    def _die(self, rank: int) -> None:
        if self._mender is not None and self._can_go_on(rank):
            self._go_on_without(rank)
            return
        if self._views[rank].phase is Phase.RUNNING:
            self._died.append(rank)
        self._set(rank, phase=Phase.DIED)

    def _can_go_on(self, rank: int) -> bool:
        return (
            self._views[rank].phase is Phase.RUNNING
            and (self._num_failures < self._max_retries or self.ranks[rank] in self._leaving)
            and self._others_go_on(rank)
        )

    def _others_go_on(self, rank: int) -> bool:
        others = [view.phase for other, view in self._views.items() if other != rank]
        return (
            self._released_at is None
            and bool(others)
            and all(phase in (Phase.RUNNING, Phase.DONE) for phase in others)
        )

    def _go_on_without(self, rank: int) -> None:
        """Let the others go on after a death."""
        self._changes.append(Death(rank, self.ranks[rank], len(self.ranks) - 1))
        self._num_failures += 1
        self._died_at = time.monotonic()
        self._leave_out(rank, f"rank {rank} died")

    def _forget(self, rank: int) -> None:
        worker = self.ranks.pop(rank)
        self._former[worker] = rank
        del self._views[rank], self._rank_of[worker], self._num_batches[rank], self._num_measured[rank]
        self._replies.pop(rank, None)
        self._entering.discard(rank)

    def _leave_out(self, rank: int, cause: str) -> None:
        self._forget(rank)
        # A rank that has ended its cell has seen all others come to the end of their training.
        if all(view.phase is Phase.RUNNING for view in self._views.values()):
            self._regroup(cause)
            self._invite()

    def _regroup(self, cause: str, newcomers: Sequence[int] = ()) -> None:
        """Let the ranks go on in a group of their own, with these newcomers."""
        assert self._mender is not None
        self._at_head.clear()
        groups = self._mender.regroup_running(list(self.ranks.values()), self.run_id)
        for rank, number in self.ranks.items():
            group = groups[number]
            self._epoch = group.epoch
            if rank in newcomers:
                assert self._command is not None
                self._send(rank, EnterCell(cell=self._command, group=group))
            else:
                command = Regroup(run_id=self.run_id, group=group, cause=cause)
                self._channel.request_at_once(number, command)

    def _invite(self) -> None:
        """Ask the ranks to meet where who waits can come in, and who is dismissed can leave."""
        leaving = [worker for worker in self._leaving if worker in self._rank_of]
        if self._released_at is not None or not (self._waiting or leaving):
            return
        num_new = len(self._waiting)
        command = Meet(
            run_id=self.run_id,
            num_ranks=len(self.ranks) + num_new - len(leaving),
            num_new=num_new,
            leaves=bool(leaving),
        )
        for number in self.ranks.values():
            self._channel.request_at_once(number, command)

    def _take_arrival(self, rank: int, event: AtHead) -> None:
        """Change the ranks when all are at the head of the loop."""
        if event.epoch == self._epoch:
            self._at_head.add(rank)
        if self._at_head != set(self.ranks):
            return
        newcomers = [self._give_seat(worker) for worker in self._waiting] if event.lets_in else []
        if newcomers:
            self._waiting = []
        self._entering.update(newcomers)
        gone = self._let_leave()
        self._regroup("the cell's ranks change", newcomers)
        assert self._mender is not None
        for worker in gone:
            self._mender.remove(worker)
        self._invite()

    def _let_leave(self) -> list[int]:
        """Take those out of the ranks that are dismissed, but for the last one; return who they are."""
        gone = []
        for worker in self._leaving:
            rank = self._rank_of.get(worker)
            if rank is None or len(self.ranks) == 1:
                continue
            gone.append(worker)
            self._forget(rank)
            self._changes.append(Left(rank, worker, len(self.ranks), max(self._num_steps.values())))
        return gone

    def _give_seat(self, worker: int) -> int:
        """Make a worker a rank: again the one that it was, another's that is gone, or a new one."""
        free = sorted(set(self._former.values()) - set(self.ranks))
        rank = self._former.get(worker, -1)
        if rank not in free:
            rank = free[0] if free else 1 + max(self.ranks)
        self.ranks[rank], self._rank_of[worker] = worker, rank
        self._views[rank] = RankView()
        self._num_batches[rank] = self._num_measured[rank] = self._num_steps[rank] = 0
        return rank

    def _count_steps(self, rank: int, steps: int) -> None:
        """Let a step that was made after the last death end the row of failures."""
        self._num_steps[rank] += steps
        last = next((c for c in reversed(self._changes) if isinstance(c, Death)), None)
        if last is not None and 0 <= last.num_steps < self._num_steps[rank]:
            self._num_failures = 0

    def _take_regrouped(self, rank: int, event: Regrouped) -> None:
        if event.epoch != self._epoch:
            return
        newest = self._changes[-1] if self._changes else None
        if rank in self._entering:
            self._entering.discard(rank)
            self._num_steps[rank] = event.num_steps
            joined = Joined(rank, event.worker, event.world_size, event.num_steps, self._pause_seconds)
            self._changes.append(joined)
        elif isinstance(newest, Death) and newest.num_steps < 0:
            seconds = time.monotonic() - self._died_at
            self._changes[-1] = replace(newest, num_steps=event.num_steps, seconds=seconds)
        else:
            self._pause_seconds = event.seconds

    def _turn_away(self, rank: int, reply: Failed) -> None:
        """Go on without a newcomer that could not take what it was given."""
        self._changes.append(TurnedAway(self.ranks[rank], f"{reply.error_type}: {reply.message}"))
        self._leave_out(rank, f"rank {rank} could not take part")

    def _take_reply(self, rank: int, future: Future[Reply]) -> None:
        try:
            reply = future.result()
        except WorkerDiedError:
            self._die(rank)
            return
        if isinstance(reply, Failed) and rank in self._entering and self._others_go_on(rank):
            self._turn_away(rank, reply)
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
                self._take_regrouped(rank, event)
            case AtHead():
                self._take_arrival(rank, event)
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
            changes=tuple(self._changes),
            table=self._table,
        )
        self._on_finished(self.result)
        self._done.set()
        self._shown.put(None)
