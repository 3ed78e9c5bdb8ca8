"""What a later notebook reads of a cell is what was sent, without what nobody can see any more, and bounded."""

from __future__ import annotations

from typing import Any

import pytest

from openclaw_nb.engine import record as module
from openclaw_nb.engine.record import Record, Transcript
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.protocol import codec
from openclaw_nb.protocol.messages import Done, Measured, RunCell, Shown


def record() -> Record:
    return Record(RunCell(run_id="r", epoch=4, source="", execution_count=9), rank=1, world_size=3)


def kept(*entries: list[Any]) -> list[list[Any]]:
    transcript = Transcript()
    for entry in entries:
        transcript.add(entry)
    return transcript.entries()


def display(text: str, display_id: str | None = None, *, update: bool = False) -> list[Any]:
    return ["display", {"text/plain": text}, {}, display_id, update]


def test_text_of_one_stream_is_joined() -> None:
    out, err = ["stream", "stdout", "a"], ["stream", "stderr", "b"]
    assert kept(out, out, err, out) == [["stream", "stdout", "aa"], err, out]


def test_only_the_newest_end_of_a_flood_is_kept() -> None:
    first, second, other = (
        ["omit", n, text, name]
        for n, text, name in ((5, "x", "stdout"), (9, "y", "stdout"), (1, "z", "stderr"))
    )
    assert kept(first, other, second) == [other, second]


def test_a_display_keeps_its_newest_state() -> None:
    assert kept(display("0", "a"), display("1", "a", update=True), display("2", "a", update=True)) == [
        display("0", "a"),
        display("2", "a", update=True),
    ]


def test_what_was_cleared_is_gone() -> None:
    out = ["stream", "stdout", "a"]
    assert kept(out, ["clear", False]) == [["clear", False]]
    assert kept(out, ["clear", True]) == [out, ["clear", True]]  # it goes with the next output
    assert kept(out, ["clear", True], ["stream", "stdout", "b"]) == [
        ["clear", True],
        ["stream", "stdout", "b"],
    ]


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_many_displays_are_bounded_and_the_newest_stay(size: int) -> None:
    entries = kept(
        ["stream", "stdout", "a"], *(display(f"{n:{size}}") for n in range(1200 if size == 10 else 20))
    )
    displays = [entry[1]["text/plain"] for entry in entries if entry[0] == "display"]
    assert entries[0] == ["stream", "stdout", "a"]
    assert int(displays[-1]) == (1199 if size == 10 else 19)
    assert [int(text) for text in displays] == list(range(int(displays[0]), int(displays[-1]) + 1))
    assert len(displays) <= module._DISPLAYS
    assert sum(map(len, displays)) <= module._DISPLAY_CHARACTERS


def test_what_is_told_does_not_change_afterwards() -> None:
    found = record()
    found.take(Shown(run_id="r", worker=0, seq=1, entries=[["stream", "stdout", "a"]]))
    told = found.tell(with_output=True)
    found.take(Shown(run_id="r", worker=0, seq=2, entries=[["stream", "stdout", "b"]]))
    assert (told["entries"], told["num_batches"]) == ([["stream", "stdout", "a"]], 1)
    again = found.tell(with_output=True)
    assert (again["entries"], again["num_batches"]) == ([["stream", "stdout", "ab"]], 2)


def test_many_measurements_are_summed_up_and_nothing_counts_as_lost() -> None:
    found, count = record(), 9001
    for n in range(1, count + 1):
        found.take(
            Measured(worker=0, run_id="r", seq=n, at=float(n), steps=2, samples=64, loss=1.0 / n, num_bytes=8,
                     seconds={"compute": 0.5, "wait": 0.25}, first_nan=7 if n >= 5 else None)
        )  # fmt: skip
    told = [codec.decode(event) for event in found.tell(with_output=True)["measured"]]
    assert len(told) <= module._MEASUREMENTS + 1
    monitor = Monitor(lambda: 0.0)
    for event in told:
        monitor.take(event)
    history = monitor.latest()
    assert history is not None
    (worker,) = history.workers
    assert (history.steps, history.samples, history.lost) == (2 * count, 64 * count, 0)
    assert (worker.num_bytes, worker.first_nan) == (8 * count, 7)
    assert worker.seconds == pytest.approx({"compute": 0.5 * count, "wait": 0.25 * count})
    assert history.loss.y[-1] == 1.0 / count
    monitor.take(Measured(worker=0, run_id="r", seq=count + 2, at=count + 2.0, steps=1, samples=1, loss=None))
    again = monitor.latest()
    assert again is not None
    assert again.lost == 1  # the one between


def test_it_says_what_the_cell_is_and_how_it_ended() -> None:
    found = record()
    told = found.tell(with_output=False)
    assert {name: told[name] for name in ("rank", "world_size", "run_id", "epoch", "execution_count", "reply")} == {
        "rank": 1, "world_size": 3, "run_id": "r", "epoch": 4, "execution_count": 9, "reply": None,
    }  # fmt: skip
    assert "entries" not in told
    found.end(Done(value={"num_batches": 0}))
    told = found.tell(with_output=False)
    assert codec.decode(told["reply"]) == Done(value={"num_batches": 0})
    assert 0 <= told["seconds"] < 5
    assert told["ago"] >= 0
