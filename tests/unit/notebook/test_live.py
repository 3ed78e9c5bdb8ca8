from __future__ import annotations

import io
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import openclaw_nb
from openclaw_nb.notebook.live import LiveOutput, TextSink


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """A sink that remembers every call, and what stands in each slot."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.slots: list[dict[str, Any]] = []
        self.metadata: list[dict[str, Any]] = []

    def show(self, slot: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        assert slot == len(self.slots)
        self.calls.append(("show", slot))
        self.slots.append(data)
        self.metadata.append(metadata)

    def update(self, slot: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        self.calls.append(("update", slot))
        self.slots[slot] = data
        self.metadata[slot] = metadata

    def take(self) -> list[tuple[str, int]]:
        calls, self.calls = self.calls, []
        return calls


def texts(recorder: Recorder) -> list[str]:
    return [data["text/plain"] for data in recorder.slots]


def live(world_size: int = 2) -> tuple[LiveOutput, Recorder, Clock]:
    recorder, clock = Recorder(), Clock()
    return LiveOutput(world_size, range(world_size), recorder, clock), recorder, clock


PNG = {"image/png": "AAAA", "text/plain": "<Figure>"}


def test_text_streams_into_one_slot_and_says_who_has_shown_it() -> None:
    output, recorder, clock = live()
    output.feed(0, ["stream", "stdout", "epoch 0\n"])
    output.refresh()
    assert texts(recorder) == ["[rank 0]\nepoch 0"]
    output.feed(1, ["stream", "stdout", "epoch 0\n"])
    clock.now += 1
    output.refresh()
    assert texts(recorder) == ["[ranks 0-1]\nepoch 0"]
    assert recorder.take() == [("show", 0), ("update", 0)]


def test_it_draws_at_most_five_times_a_second() -> None:
    output, recorder, clock = live()
    drawn = []
    for i in range(101):
        output.feed(0, ["stream", "stdout", f"{i}\n"])
        drawn.append(output.refresh())
        clock.now += 0.01
    assert sum(drawn) == 6  # at 0.0, 0.2, ... 1.0 s
    output.feed(0, ["stream", "stdout", "more\n"])
    output.refresh(force=True)
    assert len(recorder.take()) == 7


def test_large_output_is_sent_more_slowly() -> None:
    output, _, clock = live(1)
    output.feed(0, ["display", {"image/png": "x" * 1_000_000}, {}, None, False])
    assert output.refresh()
    clock.now += 1.9
    assert not output.refresh()
    clock.now += 0.2
    assert output.refresh()


def test_nothing_is_sent_when_nothing_changed() -> None:
    output, recorder, _ = live()
    output.feed(0, ["stream", "stdout", "a\n"])
    output.feed(1, ["display", PNG, {}, "i", False])
    output.refresh(force=True)
    recorder.take()
    output.refresh(force=True)
    output.feed(1, ["display", dict(PNG), {}, "i", True])  # the same again
    output.refresh(force=True)
    assert recorder.take() == []
    output.feed(1, ["display", {"text/plain": "new"}, {}, "i", True])
    output.refresh(force=True)
    assert recorder.take() == [("update", 2)]


def test_displays_have_their_own_slots_below_their_label() -> None:
    output, recorder, _ = live()
    for rank in (0, 1):
        output.feed(rank, ["stream", "stdout", "before\n"])
        output.feed(rank, ["display", {"text/plain": f"figure of {rank}"}, {"width": 3}, None, False])
        output.feed(rank, ["stream", "stdout", "after\n"])
        output.feed(rank, ["display", PNG, {}, None, False])
    output.finish()
    assert texts(recorder) == [
        "[ranks 0-1]\nbefore",
        "[rank 0]",
        "figure of 0",
        "[rank 1]",
        "figure of 1",
        "[ranks 0-1]\nafter",
        "<Figure>",
    ]
    assert recorder.slots[-1] == PNG
    assert recorder.metadata[2] == {"width": 3}
    assert "[rank 0]" in recorder.slots[1]["text/html"]


def test_a_folded_result_still_has_its_label() -> None:
    output, recorder, _ = live(4)
    for rank in range(4):
        output.feed(rank, ["result", {"text/plain": "42"}, {}])
    output.finish()
    assert recorder.slots == [{"text/plain": "[ranks 0-3]\n42"}]


def test_a_rich_result_has_a_slot_of_its_own() -> None:
    output, recorder, _ = live()
    table = {"text/html": "<table>", "text/plain": "table"}
    for rank in range(2):
        output.feed(rank, ["result", table, {}])
    output.finish()
    assert texts(recorder) == ["[ranks 0-1]", "table"]
    assert recorder.slots[1] == table


def test_one_worker_has_no_labels_and_one_of_several_has() -> None:
    output, recorder, _ = live(1)
    output.feed(0, ["display", PNG, {}, None, False])
    output.feed(0, ["stream", "stdout", "a\n"])
    output.finish()
    assert texts(recorder) == ["<Figure>", "a"]
    recorder = Recorder()
    output = LiveOutput(4, [2], recorder, Clock())
    output.feed(2, ["stream", "stdout", "a\n"])
    output.finish()
    assert texts(recorder) == ["[rank 2]\na"]


def test_a_rank_that_joins_is_taken_up() -> None:
    output, recorder, _ = live(1)
    output.feed(0, ["stream", "stdout", "a\n"])
    output.feed(1, ["stream", "stdout", "a\nb\n"])
    output.finish()
    assert texts(recorder) == ["[ranks 0-1]\na\n[rank 1]\nb"]


def test_slots_no_longer_needed_are_emptied_and_used_again() -> None:
    output, recorder, _ = live(1)
    output.feed(0, ["stream", "stdout", "a\n"])
    output.feed(0, ["display", PNG, {}, None, False])
    output.refresh(force=True)
    output.feed(0, ["clear", False])
    output.feed(0, ["stream", "stdout", "b\n"])
    output.refresh(force=True)
    assert recorder.slots == [{"text/plain": "b"}, {"text/plain": ""}]
    output.feed(0, ["display", PNG, {}, None, False])
    output.finish()
    assert recorder.slots == [{"text/plain": "b"}, PNG]


def test_the_status_is_last_and_goes_away() -> None:
    output, recorder, _ = live(1)
    output.status("rank 1 waits for rank 0")
    output.refresh(force=True)
    output.feed(0, ["stream", "stdout", "a\n"])
    output.refresh(force=True)
    assert texts(recorder) == ["a", "rank 1 waits for rank 0"]
    output.status(None)
    output.refresh(force=True)
    assert texts(recorder) == ["a", ""]
    output.status("again")
    output.finish()
    assert texts(recorder) == ["a", ""]


def test_live_text_is_bounded_and_the_end_shows_what_was_kept() -> None:
    output, recorder, _ = live(1)
    output.feed(0, ["stream", "stdout", "".join(f"{i}\n" for i in range(5_000))])
    output.refresh()
    shown = texts(recorder)[0].split("\n")
    assert shown == [
        *map(str, range(100)),
        "... 4,600 lines left out ...",
        *map(str, range(4_700, 5_000)),
    ]
    output.finish()
    assert texts(recorder)[0].split("\n") == list(map(str, range(5_000)))


def test_stderr_is_red_unless_it_has_colours() -> None:
    output, recorder, _ = live(1)
    output.feed(0, ["stream", "stderr", "warning\n\x1b[32mgreen\x1b[0m\n"])
    output.finish()
    assert texts(recorder) == ["\x1b[31mwarning\x1b[0m\n\x1b[32mgreen\x1b[0m"]


# -------------------------------------------------------------------------------------------- a terminal


def terminal(world_size: int = 2) -> tuple[LiveOutput, io.StringIO, Clock]:
    file, clock = io.StringIO(), Clock()
    return LiveOutput(world_size, range(world_size), TextSink(file, patience_seconds=2), clock), file, clock


def test_a_terminal_gets_each_agreed_line_once() -> None:
    output, file, _ = terminal()
    output.feed(0, ["stream", "stdout", "a\nb\n"])
    output.feed(1, ["stream", "stdout", "a\nb"])
    output.refresh(force=True)
    output.refresh(force=True)
    assert file.getvalue() == "[ranks 0-1]\na\n"
    output.feed(1, ["stream", "stdout", "\nc\n"])
    output.feed(0, ["result", {"text/plain": "42"}, {}])
    output.refresh(force=True)
    assert file.getvalue() == "[ranks 0-1]\na\nb\n"
    output.finish()
    assert file.getvalue() == "[ranks 0-1]\na\nb\n[rank 0]\n42\n[rank 1]\nc\n"
    output.finish()
    assert file.getvalue().count("42") == 1


def test_a_terminal_waits_only_so_long_for_other_ranks() -> None:
    output, file, clock = terminal()
    output.feed(0, ["stream", "stdout", "only rank 0 prints\n"])
    output.refresh()
    clock.now += 1.9
    output.refresh()
    assert file.getvalue() == ""
    clock.now += 0.3
    output.refresh()
    assert file.getvalue() == "[rank 0]\nonly rank 0 prints\n"
    output.finish()
    assert file.getvalue() == "[rank 0]\nonly rank 0 prints\n"


def test_a_terminal_gets_a_bar_when_it_is_done_and_a_status_once() -> None:
    output, file, _ = terminal(1)
    for percent in range(0, 101, 10):
        output.feed(0, ["stream", "stderr", f"\r{percent}%"])
        output.status(f"waits for {percent} s")
        output.refresh(force=True)
    output.feed(0, ["stream", "stderr", "\n"])
    output.status(None)
    output.finish()
    assert file.getvalue() == "waits for 0 s\n100%\n"


def test_a_terminal_loses_nothing_of_a_long_run() -> None:
    output, file, _ = terminal()
    for start in range(0, 20_000, 100):
        for rank in range(2):
            output.feed(rank, ["stream", "stdout", "".join(f"{i}\n" for i in range(start, start + 100))])
        output.refresh(force=True)
    output.finish()
    assert file.getvalue().split("\n") == ["[ranks 0-1]", *map(str, range(20_000)), ""]


# ------------------------------------------------------------------------------------- cost, and for real


@pytest.mark.parametrize("same", [True, False])
def test_a_flood_costs_little_time(same: bool) -> None:
    start = time.process_time()
    output = LiveOutput(4, range(4), Recorder())
    for i in range(25_000):
        for rank in range(4):
            output.feed(rank, ["stream", "stdout", f"step {i} loss {i if same else i + rank / 10}\n"])
        output.refresh()
    output.finish()
    # About 0.5 s where this was written.
    assert time.process_time() - start < 2


def test_a_flood_takes_bounded_memory() -> None:
    tracemalloc.start()
    try:
        output = LiveOutput(4, range(4), Recorder())
        for i in range(100):
            text = "".join(f"step {i} {j}\n" for j in range(1_000))
            for rank in range(4):
                output.feed(rank, ["stream", "stdout", text])
        output.finish()
        # 4 x 5,000 lines of about 150 bytes each; all 400,000 would take over 40 MB.
        assert tracemalloc.get_traced_memory()[0] < 10_000_000
    finally:
        tracemalloc.stop()


CELL = """
from openclaw_nb.notebook.live import LiveOutput, NotebookSink

output = LiveOutput(2, [0, 1], NotebookSink())
for rank in (0, 1):
    output.feed(rank, ["stream", "stdout", "start\\n"])
output.refresh(force=True)
output.status("rank 0 waits")
for step in range(3):
    for rank in (0, 1):
        output.feed(rank, ["stream", "stderr", f"\\r{step + 1}/3"])
    output.refresh(force=True)
output.status(None)
output.feed(0, ["display", {"text/plain": "0%"}, {}, "bar", False])
output.refresh(force=True)
output.feed(0, ["display", {"text/html": "<b>100%</b>", "text/plain": "100%"}, {}, "bar", True])
output.feed(1, ["result", {"text/plain": "42"}, {}])
output.finish()
"""


def test_a_real_kernel_saves_the_final_state() -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    root = Path(openclaw_nb.__path__[0]).parent
    client = nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(root)}})
    client.execute()
    saved = nbformat.reads(nbformat.writes(notebook), as_version=4)
    outputs = saved.cells[0].outputs
    assert [output.output_type for output in outputs] == ["display_data"] * len(outputs)
    assert [output.data["text/plain"] for output in outputs] == [
        "[ranks 0-1]\nstart\n\x1b[31m3/3\x1b[0m",
        "[rank 0]",
        "100%",
        "[rank 1]\n42",
    ]
    assert outputs[2].data["text/html"] == "<b>100%</b>"


def test_large_displays_at_the_end_never_go_faster_than_the_server_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jupyter's server counts three seconds together, and drops what goes beyond 1 MB/s in them."""
    clock = Clock()
    sent: list[tuple[float, int]] = []

    class Scale:
        def show(self, slot: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
            sent.append((clock.now, sum(len(value) for value in data.values())))

        update = show

    monkeypatch.setattr(time, "sleep", lambda seconds: setattr(clock, "now", clock.now + seconds))
    output = LiveOutput(4, range(4), Scale(), clock)
    for rank in range(4):
        for number in range(3):
            output.feed(
                rank, ["display", {"image/png": f"{rank} {number}" + "A" * 1_200_000}, {}, None, False]
            )
    output.finish()
    assert sum(size > 1_200_000 for _, size in sent) == 12
    for begin, _ in sent:
        assert sum(size for at, size in sent if begin <= at < begin + 3) < 3_000_000
