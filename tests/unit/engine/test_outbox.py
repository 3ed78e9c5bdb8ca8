"""What a worker shows goes out in batches, in order, bounded at its source."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from openclaw_nb.engine.outbox import (
    DISPLAY_CHARACTERS,
    DISPLAY_CHARACTERS_PER_SECOND,
    HEAD_CHARACTERS,
    TAIL_CHARACTERS,
    TOPIC,
    Outbox,
)
from openclaw_nb.engine.record import Record
from openclaw_nb.protocol import codec
from openclaw_nb.protocol.messages import Measured, RunCell, Shown


@dataclass
class Sent:
    """One message as the kernel's session was asked to send it."""

    socket: Any
    kind: str
    event: Any
    parent: Any
    topic: bytes


@dataclass
class Recorder:
    """A kernel and its session: keeps what is sent."""

    engine_id: int = 3
    iopub_socket: str = "the iopub socket"
    sent: list[Sent] = field(default_factory=list)

    @property
    def session(self) -> Recorder:
        return self

    def send(self, socket: Any, kind: str, content: dict[str, Any], *, parent: Any, ident: bytes) -> None:
        self.sent.append(Sent(socket, kind, codec.decode(content), parent, ident))

    @property
    def batches(self) -> list[Shown]:
        return [sent.event for sent in self.sent if isinstance(sent.event, Shown)]


def record(run_id: str) -> Record:
    return Record(RunCell(run_id=run_id, epoch=1, source="", execution_count=1), 0, 1)


@pytest.fixture
def kernel() -> Recorder:
    return Recorder()


@pytest.fixture
def outbox(kernel: Recorder) -> Outbox:
    return Outbox(kernel)


def shown(kernel: Recorder, outbox: Outbox) -> list[list[Any]]:
    """End the run; return all its entries in the order in which the notebook sees them."""
    num_batches, left = outbox.end()
    assert [batch.seq for batch in kernel.batches] == list(range(1, num_batches + 1))
    return [entry for batch in kernel.batches for entry in batch.entries] + left


def streamed(entries: Iterable[list[Any]], name: str = "stdout") -> str:
    return "".join(entry[2] for entry in entries if entry[:2] == ["stream", name])


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


# ------------------------------------------------------------------------------------------- order


def test_entries_keep_their_order_and_neighbouring_text_is_one(kernel: Recorder, outbox: Outbox) -> None:
    outbox.begin(record("r-1"))
    assert outbox.write("stdout", "a") == 1
    outbox.write("stdout", "b\n")
    outbox.write("stderr", "c\n")
    outbox.add("display", {"text/plain": "d"}, {}, None, False)
    outbox.write("stdout", "e\n")
    assert shown(kernel, outbox) == [
        ["stream", "stdout", "ab\n"],
        ["stream", "stderr", "c\n"],
        ["display", {"text/plain": "d"}, {}, None, False],
        ["stream", "stdout", "e\n"],
    ]


def test_batches_go_out_while_the_cell_runs(kernel: Recorder, outbox: Outbox) -> None:
    outbox.begin(record("r-1"))
    outbox.write("stdout", "early\n")
    assert wait_until(lambda: len(kernel.batches) == 1)
    outbox.write("stdout", "late\n")
    assert outbox.end() in [(1, [["stream", "stdout", "late\n"]]), (2, [])]
    sent = kernel.sent[0]
    assert sent.event == Shown(run_id="r-1", worker=3, seq=1, entries=[["stream", "stdout", "early\n"]])
    assert (sent.socket, sent.parent, sent.topic) == ("the iopub socket", {}, TOPIC + b"3")


def test_each_run_counts_its_own_batches(kernel: Recorder, outbox: Outbox) -> None:
    for run_id in ("r-1", "r-2"):
        outbox.begin(record(run_id))
        outbox.write("stdout", run_id)
        outbox.flush()
        assert outbox.end() == (1, [])
    assert [(batch.run_id, batch.seq) for batch in kernel.batches] == [("r-1", 1), ("r-2", 1)]


def test_nothing_of_a_run_that_is_over_lands_in_the_next(kernel: Recorder, outbox: Outbox) -> None:
    outbox.begin(record("r-1"))
    outbox.end()
    outbox.write("stdout", "a thread that outlived its cell\n")
    outbox.add("display", {"text/plain": "late"}, {}, None, False)
    outbox.flush()
    outbox.begin(record("r-2"))
    assert shown(kernel, outbox) == []


def test_other_events_go_at_once(kernel: Recorder, outbox: Outbox) -> None:
    event = Measured(worker=3, run_id="r-1", seq=1, at=1.0, steps=2, samples=64, loss=0.5)
    outbox.publish(event)
    assert [sent.event for sent in kernel.sent] == [event]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_writes_to_the_descriptor(kernel: Recorder, outbox: Outbox) -> None:
    """As a data loader's worker process does; its parent reads the other end."""
    outbox.begin(record("r-1"))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1)
        outbox.write("stdout", "from the child\n")
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        assert file.read() == "from the child\n"
    assert shown(kernel, outbox) == []


# ------------------------------------------------------------------------------------------- floods


def print_writes(lines: Iterable[str]) -> Iterable[str]:
    """``print`` writes the text and the end of the line apart."""
    return (part for line in lines for part in (line, "\n"))


def line_writes(lines: Iterable[str]) -> Iterable[str]:
    return (line + "\n" for line in lines)


def flooded(entries: list[list[Any]], name: str = "stdout") -> tuple[int, int, int]:
    """Return how many lines stand in the head, are left out, and stand in the tail."""
    omitted = [entry for entry in entries if entry[0] == "omit" and entry[3] == name]
    _, count, tail, _ = omitted[-1]  # a later one replaces the earlier ones
    return streamed(entries, name).count("\n"), count, tail.count("\n")


@pytest.mark.parametrize(
    ("num_lines", "writes"), [(1_000_000, line_writes), (200_000, print_writes)], ids=["whole lines", "print"]
)
def test_a_flood_is_bounded_and_counted(
    kernel: Recorder, outbox: Outbox, num_lines: int, writes: Callable[[Iterable[str]], Iterable[str]]
) -> None:
    outbox.begin(record("r-1"))
    started = time.monotonic()
    for text in writes(f"line {i}" for i in range(num_lines)):
        outbox.write("stdout", text)
    seconds = time.monotonic() - started
    entries = shown(kernel, outbox)

    head, left_out, tail = flooded(entries)
    assert head + left_out + tail == num_lines
    assert streamed(entries).startswith("line 0\nline 1\n")
    assert entries[-1][2].endswith(f"line {num_lines - 2}\nline {num_lines - 1}\n")
    assert HEAD_CHARACTERS <= len(streamed(entries)) < HEAD_CHARACTERS + 100
    assert all(len(entry[2]) <= TAIL_CHARACTERS for entry in entries if entry[0] == "omit")
    # At most one batch each 50 ms while there is a head, then one note each half second.
    assert len(entries) <= 20 * seconds + 10


def test_the_tail_begins_with_a_whole_line(kernel: Recorder, outbox: Outbox) -> None:
    outbox.begin(record("r-1"))
    for i in range(100_000):
        outbox.write("stdout", f"<{i}>\n")
    tail = shown(kernel, outbox)[-1][2]
    lines = tail.splitlines()
    first = int(lines[0].strip("<>"))
    assert lines == [f"<{i}>" for i in range(first, 100_000)]


def test_each_stream_has_a_bound_of_its_own(kernel: Recorder, outbox: Outbox) -> None:
    outbox.begin(record("r-1"))
    for i in range(50_000):
        outbox.write("stdout", f"line {i}\n")
    outbox.write("stderr", "a warning\n")
    entries = shown(kernel, outbox)
    assert streamed(entries, "stderr") == "a warning\n"
    assert sum(flooded(entries)) == 50_000
    assert not any(entry[0] == "omit" and entry[3] == "stderr" for entry in entries)


def test_a_line_without_an_end_is_bounded_too(kernel: Recorder, outbox: Outbox) -> None:
    """A progress bar that writes carriage returns for ever has no lines to count."""
    outbox.begin(record("r-1"))
    for i in range(100_000):
        outbox.write("stderr", f"\r{i:6} of 100000")
    entries = shown(kernel, outbox)
    assert sum(len(entry[2]) for entry in entries) < HEAD_CHARACTERS + TAIL_CHARACTERS * len(entries)
    assert entries[-1][0] == "omit"
    assert entries[-1][1] == 0
    assert entries[-1][2].endswith("\r 99999 of 100000")


def display(outbox: Outbox, text: str, display_id: str | None = None, *, update: bool = False) -> None:
    outbox.add("display", {"text/html": text}, {}, display_id, update)


def displays(entries: Iterable[list[Any]]) -> list[list[Any]]:
    return [entry for entry in entries if entry[0] == "display"]


def test_few_or_small_displays_all_pass(kernel: Recorder, outbox: Outbox) -> None:
    outbox.begin(record("r-1"))
    for i in range(200):
        display(outbox, str(i))
    entries = shown(kernel, outbox)
    assert [entry[1]["text/html"] for entry in entries] == [str(i) for i in range(200)]


def test_a_flood_of_displays_is_bounded_counted_and_ends_with_the_newest(
    kernel: Recorder, outbox: Outbox
) -> None:
    outbox.begin(record("r-1"))
    begun = time.monotonic()
    for i in range(3000):
        display(outbox, f"{i:05}" + "x" * 5000)
    entries = shown(kernel, outbox)
    passed = displays(entries)
    allowed = DISPLAY_CHARACTERS + DISPLAY_CHARACTERS_PER_SECOND * (time.monotonic() - begun)
    assert sum(len(entry[1]["text/html"]) for entry in passed) < allowed + 3 * 5005
    assert passed[-1][1]["text/html"].startswith("02999")
    dropped = sum(int(n) for n in re.findall(r"\[(\d+) displays were left out", streamed(entries, "stderr")))
    assert len(passed) + dropped == 3000


def test_a_display_that_is_larger_than_the_bound_passes(kernel: Recorder, outbox: Outbox) -> None:
    outbox.begin(record("r-1"))
    display(outbox, "x" * 3 * DISPLAY_CHARACTERS)
    assert len(displays(shown(kernel, outbox))) == 1


def test_updates_of_a_display_that_was_dropped_show_it(kernel: Recorder, outbox: Outbox) -> None:
    outbox.begin(record("r-1"))
    display(outbox, "x" * 2 * DISPLAY_CHARACTERS)
    display(outbox, "first state", "a")  # held, and replaced by the next
    for i in range(1000):
        display(outbox, f"state {i}", "a", update=True)
    entries = displays(shown(kernel, outbox))
    assert [entry[1]["text/html"][:9] for entry in entries] == ["xxxxxxxxx", "state 999"]
    assert entries[-1][3:] == ["a", False]
    assert streamed(entries, "stderr") == ""


def test_the_next_run_starts_with_a_full_allowance(kernel: Recorder, outbox: Outbox) -> None:
    outbox.begin(record("r-1"))
    for i in range(50_000):
        outbox.write("stdout", f"line {i}\n")
    outbox.end()
    kernel.sent.clear()
    outbox.begin(record("r-2"))
    outbox.write("stdout", "fresh\n")
    assert shown(kernel, outbox) == [["stream", "stdout", "fresh\n"]]
