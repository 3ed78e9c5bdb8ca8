"""A cell of another process: each of its events is taken once, whichever way and whenever it comes."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import pytest

from openclaw_nb.cluster import adopted
from openclaw_nb.cluster.adopted import AdoptedRun, newest
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.run import Output
from openclaw_nb.core.errors import WorkerDiedError
from openclaw_nb.engine.record import Record
from openclaw_nb.protocol.messages import (
    Command,
    Done,
    Event,
    Measured,
    Recall,
    Release,
    Reply,
    RunCell,
    Shown,
)


class Workers:
    """Workers that answer when they are told to, from real records."""

    def __init__(self, count: int = 2) -> None:
        command = RunCell(run_id="r", epoch=3, source="", execution_count=5)
        self.records = {number: Record(command, number, count) for number in range(count)}
        self.asked: list[tuple[int, Recall, Future[Reply]]] = []
        self.released: list[int] = []

    def request(self, worker: int, command: Command) -> Future[Reply]:
        raise AssertionError("what runs is not asked in order")

    def request_at_once(self, worker: int, command: Command) -> Future[Reply]:
        answer: Future[Reply] = Future()
        if isinstance(command, Recall):
            self.asked.append((worker, command, answer))
        elif isinstance(command, Release):
            self.released.append(worker)
        return answer

    def answer(self, worker: int) -> None:
        """Answer what this worker was asked, when it is asked."""
        deadline = time.monotonic() + 10
        while not (waiting := [a for a in self.asked if a[0] == worker and not a[2].done()]):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        for _, command, answer in waiting:
            answer.set_result(Done(value={"run": self.records[worker].tell(with_output=command.with_output)}))


def shown(worker: int, seq: int) -> Shown:
    return Shown(run_id="r", worker=worker, seq=seq, entries=[["stream", "stdout", f"{worker}.{seq} "]])


def measured(worker: int, seq: int, at: float) -> Measured:
    return Measured(worker=worker, run_id="r", seq=seq, at=at, steps=1, samples=8, loss=None)


def adopt(workers: Workers, told: list[Measured], silent: tuple[int, ...] = ()) -> AdoptedRun:
    records = {n: r.tell(with_output=False) for n, r in workers.records.items() if n not in silent}
    run = AdoptedRun(workers, records, silent, [], lambda result: None, told.append)
    run.follow()
    return run


def publish(workers: Workers, run: AdoptedRun | None, event: Any) -> None:
    workers.records[event.worker].take(event)
    if run is not None:
        run.tell(event)


def text(run: AdoptedRun) -> dict[int, str]:
    found: dict[int, str] = {}
    while (event := run.next_event(0.2)) is not None:
        if isinstance(event, Output):
            found[event.rank] = found.get(event.rank, "") + event.entry[2]
    return found


def test_each_event_is_taken_once_and_in_order() -> None:
    workers, told = Workers(), list[Measured]()
    past: list[Event] = [
        shown(0, 1),
        measured(0, 1, 1.0),
        shown(1, 1),
        measured(1, 1, 1.5),
        measured(0, 2, 2.0),
    ]
    for event in past:
        publish(workers, None, event)
    run = adopt(workers, told)
    publish(workers, run, shown(0, 2))  # in the record when it is read, and it comes as an event, too
    workers.answer(0)
    publish(workers, run, shown(1, 2))
    publish(workers, run, measured(1, 2, 2.5))
    assert told == []  # what rank 1 knows may be older
    workers.answer(1)
    publish(workers, run, shown(0, 3))
    publish(workers, run, measured(0, 3, 3.0))
    for record in workers.records.values():
        record.end(Done(value={}))
    for worker in (0, 1):
        workers.answer(worker)
    result = run.wait(10)
    assert result is not None
    assert result.ok
    assert text(run) == {0: "0.1 0.2 0.3 ", 1: "1.1 1.2 "}
    assert [(event.worker, event.seq) for event in told] == [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3)]


def test_a_silent_worker_stands_for_the_rank_that_is_missing() -> None:
    workers, told = Workers(3), list[Measured]()
    for worker in range(3):
        publish(workers, None, measured(worker, 1, 1.0))
    run = adopt(workers, told, silent=(1,))
    assert run.ranks == {0: 0, 1: 1, 2: 2}
    for record in workers.records.values():
        record.end(Done(value={}))
    workers.answer(0)
    workers.answer(2)
    assert run.wait(0.5) is None
    workers.answer(1)
    result = run.wait(10)
    assert result is not None
    assert result.ok
    assert sorted(event.worker for event in told) == [0, 1, 2]


def test_a_rank_whose_worker_is_gone_has_died() -> None:
    workers = Workers(3)
    del workers.records[1]
    run = adopt(workers, [])
    for worker in (0, 2):
        workers.records[worker].end(Done(value={}))
        workers.answer(worker)
    result = run.wait(10)
    assert result is not None
    assert result.died == (1,)
    assert run.ranks == {0: 0, 2: 2}


def test_a_worker_that_dies_while_it_is_asked() -> None:
    workers = Workers()
    run = adopt(workers, [])
    workers.records[0].end(Done(value={}))
    workers.answer(0)
    workers.asked[1][2].set_exception(WorkerDiedError("gone"))
    result = run.wait(10)
    assert result is not None
    assert result.died == (1,)


def test_another_process_in_a_workers_place_does_not_run_the_cell() -> None:
    workers = Workers()
    run = adopt(workers, [])
    workers.records[1] = Record(RunCell(run_id="other", epoch=4, source="", execution_count=1), 0, 1)
    workers.records[0].end(Done(value={}))
    workers.answer(0)
    workers.answer(1)
    result = run.wait(10)
    assert result is not None
    assert result.died == (1,)


def test_the_newest_cell_is_the_one_that_began_last() -> None:
    old, new = {"run_id": "a", "seconds": 50.0, "ago": 1.0}, {"run_id": "b", "seconds": 3.0, "ago": 5.0}
    assert newest({0: old, 1: new, 2: None, 3: new}) == {1: new, 3: new}
    assert newest({0: None}) == {}


def test_all_ranks_are_heard_before_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopted, "_ASK_SECONDS", 3600.0)  # whatever it is, it is waited once for all ranks
    workers, told = Workers(8), list[Measured]()
    for worker in range(8):
        publish(workers, None, measured(worker, 1, float(worker)))
    records = {number: record.tell(with_output=False) for number, record in workers.records.items()}
    monkeypatch.setattr(workers, "request_at_once", lambda worker, command: _known(workers, worker, command))
    run = AdoptedRun(workers, records, [], [], lambda result: None, told.append)
    run.follow()
    deadline = time.monotonic() + 10
    while len(told) < 8 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert [event.worker for event in told] == list(range(8))
    run.leave("seen")


def _known(workers: Workers, worker: int, command: Command) -> Future[Reply]:
    assert isinstance(command, Recall)
    answer: Future[Reply] = Future()
    answer.set_result(Done(value={"run": workers.records[worker].tell(with_output=command.with_output)}))
    return answer


def test_what_comes_before_the_record_is_told_from_the_record() -> None:
    told: list[Measured] = []
    master = MasterNode()
    master.listen(told.append)
    master._on_event(measured(0, 25, 9.0))  # the 24 before it are not known yet
    assert told == []
