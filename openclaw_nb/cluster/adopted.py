"""A cell that another process has begun: followed from where its workers' records end.

    Recall ──> what each rank has shown and measured so far ─┐
    events that came meanwhile, from the next number on ─────┴─> as a `CellRun` of one's own
    Recall, again and again, without output ──> how each rank ended

The replies to the cell go to whoever began it. So the workers are asked, and what they answer is taken as the reply.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from openclaw_nb.cluster.run import CellRun, Channel, Output, RunResult
from openclaw_nb.core.errors import WorkerDiedError
from openclaw_nb.plan.release import RankView
from openclaw_nb.protocol import codec
from openclaw_nb.protocol.messages import Done, Event, Measured, Recall, Reply, Shown

_ASK_SECONDS = 0.2
_END_SECONDS = 10.0


class AdoptedRun(CellRun):
    """A cell that another process has begun on the workers.

    Parameters
    ----------
    channel : Channel
        How to reach the workers.
    records : mapping of int to dict
        What each worker has said of the cell, by its number (the ``run`` of `Recall`'s answer).
    silent : sequence of int
        Numbers of workers that have not answered: they stand for the ranks that nobody else has.
    absent : sequence of int
        Ranks of its group that do not run it.
    on_finished : callable
        As for `CellRun`.
    on_measured : callable
        Told every measurement, from the cell's beginning, in order.
    """

    def __init__(
        self,
        channel: Channel,
        records: Mapping[int, dict[str, Any]],
        silent: Sequence[int],
        absent: Sequence[int],
        on_finished: Callable[[RunResult], None],
        on_measured: Callable[[Measured], None],
    ) -> None:
        some = next(iter(records.values()))
        ranks = {record["rank"]: worker for worker, record in sorted(records.items())}
        missing = [rank for rank in range(some["world_size"]) if rank not in ranks and rank not in absent]
        ranks |= dict(zip(missing, silent, strict=False))
        super().__init__(channel, some["run_id"], ranks, on_finished, absent)
        self.execution_count: int = some["execution_count"]
        self._epoch = some["epoch"]
        self._started -= max(record["seconds"] + record["ago"] for record in records.values())
        ended = all(record["reply"] is not None for record in records.values())
        self._ran_seconds = max(record["seconds"] for record in records.values()) if ended else None
        self._on_measured = on_measured
        self._recalled: set[int] = set()
        self._held: list[tuple[int, Event]] = []
        # Told in the order of time, as they would have come: so not before all ranks have said what they know.
        self._awaited = {record["rank"] for record in records.values()}
        self._past: list[Measured] = []
        for rank in missing[len(silent) :]:
            self._views[rank] = RankView()
            self._die(rank)  # its worker is no longer there

    def follow(self) -> None:
        """Take up the cell where it is; return when that is at its end."""
        threading.Thread(target=self._work, name="openclaw-run", daemon=True).start()
        threading.Thread(target=self._ask, name="openclaw-follow", daemon=True).start()
        if self._ran_seconds is not None:
            self.wait(_END_SECONDS)

    # ------------------------------------------------------------------------------- asking the workers

    def _ask(self) -> None:
        """Ask each rank until it has ended; one that does not answer is asked once."""
        asked = {rank: self._recall(rank, with_output=True) for rank in self.ranks}
        while asked and self.running:
            wait(asked.values(), timeout=_ASK_SECONDS, return_when=FIRST_COMPLETED)
            again = []
            for rank in [rank for rank, answer in asked.items() if answer.done()]:
                ended = self._hear(rank, asked.pop(rank))
                if ended is not None:
                    self._inbox.put(("reply", rank, ended))
                else:
                    again.append(rank)
            time.sleep(_ASK_SECONDS)
            asked |= {rank: self._recall(rank, with_output=False) for rank in again}

    def _recall(self, rank: int, *, with_output: bool) -> Future[Reply]:
        return self._channel.request_at_once(self.ranks[rank], Recall(with_output=with_output))

    def _hear(self, rank: int, answer: Future[Reply]) -> Future[Reply] | None:
        """Return the cell's reply once there is one."""
        found: Future[Reply] = Future()
        try:
            reply = answer.result()
        except WorkerDiedError as error:
            found.set_exception(error)
            return found
        record = reply.value.get("run") if isinstance(reply, Done) else None
        if record is None or record["run_id"] != self.run_id:
            found.set_exception(WorkerDiedError(f"Worker {self.ranks[rank]} is another process now."))
            return found
        if "entries" in record:
            self._inbox.put(("recalled", rank, record))
        if record["reply"] is None:
            return None
        found.set_result(codec.decode(record["reply"]))
        return found

    # ------------------------------------------------------------------------------- on the run's thread

    def _take(self, kind: str, rank: int, item: Any) -> None:
        if kind == "recalled":
            self._take_record(rank, item)
        elif kind == "event" and rank not in self._recalled and isinstance(item, Shown | Measured):
            self._held.append((rank, item))
        else:
            super()._take(kind, rank, item)
        if kind == "died":
            rank = self._rank_of.get(item, rank)
        if kind in ("recalled", "reply", "died"):
            self._awaited.discard(rank)
            self._tell_past()

    def _take_record(self, rank: int, record: dict[str, Any]) -> None:
        """Begin with what the record holds, and go on with the events that it does not."""
        self._recalled.add(rank)
        self._num_batches[rank] = record["num_batches"]
        for entry in record["entries"]:
            self._shown.put(Output(rank, entry))
        self._past += map(codec.decode, record["measured"])
        self._num_measured[rank] = record["num_measured"]
        held, self._held = self._held, []
        for of_rank, event in held:
            self._take("event", of_rank, event)

    def _take_event(self, rank: int, event: Event) -> None:
        if isinstance(event, Shown) and event.seq <= self._num_batches[rank]:
            return
        if not isinstance(event, Measured):
            super()._take_event(rank, event)
        elif event.seq > self._num_measured[rank]:
            self._num_measured[rank] = event.seq
            self._past.append(event)
            self._tell_past()

    def _tell_past(self) -> None:
        if self._awaited:
            return
        past, self._past = sorted(self._past, key=lambda event: event.at), []
        for event in past:
            self._on_measured(event)
            self._shown.put(event)

    def _seconds_at_end(self) -> float:
        return super()._seconds_at_end() if self._ran_seconds is None else self._ran_seconds


def newest(records: Mapping[int, dict[str, Any] | None]) -> dict[int, dict[str, Any]]:
    """Return the records of the cell that began last, of those that the workers have told of, by worker."""
    known = {worker: record for worker, record in records.items() if record is not None}
    if not known:
        return {}
    run_id = min(known.values(), key=lambda record: record["seconds"] + record["ago"])["run_id"]
    return {worker: record for worker, record in known.items() if record["run_id"] == run_id}
