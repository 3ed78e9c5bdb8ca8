from __future__ import annotations

import pytest

from openclaw_nb.notebook.transcript import Display, Line, Omitted, Result, Transcript


def texts(transcript: Transcript) -> list[str]:
    return [item.text for item in transcript.items if isinstance(item, Line)]


def written(*parts: str) -> list[str]:
    transcript = Transcript()
    for part in parts:
        transcript.stream("stdout", part)
    return texts(transcript)


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        (("a\nb\n",), ["a", "b"]),
        (("a", "b", "\n", "c"), ["ab", "c"]),
        (("a\n\nb",), ["a", "", "b"]),
        (("\n",), [""]),
        (("a\r\nb\r\n",), ["a", "b"]),
        (("a\r", "\nb"), ["a", "b"]),
        ((" 10%", "\r 20%", "\r100%\n", "next"), ["100%", "next"]),
        (("abcdef\rxy",), ["xycdef"]),  # what a terminal leaves standing
        (("abc\r", "x", "y", "z!"), ["xyz!"]),
        (("abc\r\x1b[Kx",), ["x"]),
        (("\x1b[31mlong red\x1b[0m\rshort",), ["short"]),
        (("",), []),
    ],
)
def test_text_stands_as_in_a_terminal(parts: tuple[str, ...], lines: list[str]) -> None:
    assert written(*parts) == lines


def test_however_text_is_cut_into_pieces_the_lines_are_the_same() -> None:
    text = "start\n 10%\r 20%\n\x1b[32mgreen\nstill\x1b[0m\nouter\ninner\x1b[A\rOUTER\nx"
    assert written(*text) == written(text)


def test_nested_bars_write_above_their_last_line() -> None:
    lines = written("outer 0%", "\n", "\rinner 50%", "\x1b[A", "\n", "\rinner 99%", "\x1b[A", "\router 100%")
    assert lines == ["outer 100%", "inner 99%"]


def test_real_nested_tqdm_leaves_two_lines() -> None:
    tqdm = pytest.importorskip("tqdm")
    transcript = Transcript()

    class File:
        def write(self, text: str) -> None:
            transcript.stream("stderr", text)

        def flush(self) -> None:
            pass

    with tqdm.tqdm(total=3, file=File(), mininterval=0, desc="outer") as outer:
        for _ in range(3):
            for _ in tqdm.tqdm(range(5), file=File(), mininterval=0, desc="inner", leave=False):
                pass
            outer.update()
    shown = [text for text in texts(transcript) if text.strip()]
    assert len(shown) == 1
    assert shown[0].startswith("outer: 100%")
    assert "3/3" in shown[0]


def test_colours_are_kept_and_go_on_over_lines() -> None:
    assert written("\x1b[31mred\nstill\x1b[0m\nplain\n") == ["\x1b[31mred", "\x1b[31mstill\x1b[0m", "plain"]


def test_a_bar_on_stderr_keeps_its_place_among_lines_of_stdout() -> None:
    transcript = Transcript()
    transcript.stream("stderr", "\r 50%")
    transcript.stream("stdout", "hello\n")
    transcript.stream("stderr", "\r100%\n")
    assert transcript.items == (Line("stderr", "100%"), Line("stdout", "hello"))


def test_an_update_replaces_the_display_of_its_id_only() -> None:
    transcript = Transcript()
    transcript.display({"text/plain": "one"}, {}, "a", False)
    transcript.display({"text/plain": "two"}, {}, "b", False)
    transcript.display({"text/plain": "ONE"}, {"k": 1}, "a", True)
    transcript.display({"text/plain": "lost"}, {}, "never shown", True)
    assert transcript.items == (Display({"text/plain": "ONE"}), Display({"text/plain": "two"}))
    assert transcript.items[0].metadata == {"k": 1}  # type: ignore[union-attr]


def test_the_wire_entries_do_what_the_methods_do() -> None:
    transcript = Transcript()
    transcript.apply(["stream", "stdout", "gone"])
    transcript.apply(["clear", False])
    transcript.apply(["stream", "stderr", "warn\n"])
    transcript.apply(["display", {"text/plain": "d"}, {}, None, False])
    transcript.apply(["omit", 7, "tail\n"])
    transcript.apply(["result", {"text/plain": "r"}, {}])
    assert transcript.items == (
        Line("stderr", "warn"),
        Display({"text/plain": "d"}),
        Omitted(7),
        Line("stdout", "tail"),
        Result({"text/plain": "r"}),
    )
    with pytest.raises(ValueError, match="'shout'"):
        transcript.apply(["shout", "x"])


def test_clear_waits_for_the_next_output() -> None:
    transcript = Transcript()
    transcript.stream("stdout", "old")
    transcript.clear(wait=True)
    assert texts(transcript) == ["old"]
    transcript.stream("stdout", "new")
    assert texts(transcript) == ["new"]
    transcript.clear(wait=False)
    assert transcript.items == ()


def test_an_update_is_no_output_that_a_waiting_clear_waits_for() -> None:
    transcript = Transcript()
    transcript.display({"text/plain": "0"}, {}, "a", False)
    transcript.clear(wait=True)
    transcript.display({"text/plain": "1"}, {}, "a", True)
    assert transcript.items == (Display({"text/plain": "1"}),)
    transcript.stream("stdout", "x")
    transcript.display({"text/plain": "2"}, {}, "a", True)
    assert transcript.items == (Line("stdout", "x"),)


def test_a_repeated_omission_replaces_count_and_tail() -> None:
    transcript = Transcript()
    transcript.stream("stdout", "head\n")
    transcript.omit(10, "x\ny\n")
    transcript.omit(25, "z\n")
    transcript.stream("stderr", "after")
    assert transcript.items == (
        Line("stdout", "head"),
        Omitted(25),
        Line("stdout", "z"),
        Line("stderr", "after"),
    )


def test_each_stream_has_its_own_flood() -> None:
    transcript = Transcript()
    transcript.omit(3, "out\n", "stdout")
    transcript.omit(4, "err\n", "stderr")
    transcript.omit(5, "OUT\n", "stdout")
    assert transcript.items == (Omitted(5), Line("stdout", "OUT"), Omitted(4), Line("stderr", "err"))


def test_a_long_lived_bar_stays_one_line_when_its_stream_is_held_back() -> None:
    transcript = Transcript()
    transcript.stream("stderr", "\r 10%")
    transcript.omit(0, "\r 11%\r 12%", "stderr")
    transcript.omit(0, "\r 98%\r 99%", "stderr")
    assert transcript.items == (Line("stderr", " 99%"),)


def test_what_is_kept_is_bounded_and_the_rest_counted() -> None:
    transcript = Transcript()
    for start in range(0, 20_000, 100):
        transcript.stream("stdout", "".join(f"{i}\n" for i in range(start, start + 100)))
    items = transcript.items
    assert texts(transcript) == [*map(str, range(1_000)), *map(str, range(16_000, 20_000))]
    assert items[1_000] == Omitted(15_000)


def test_large_displays_are_bounded_by_their_size() -> None:
    transcript = Transcript()
    for i in range(50):
        transcript.display({"image/png": f"{i:02}" + "x" * 1_000_000}, {})
    shown = [item for item in transcript.items if isinstance(item, Display)]
    assert sum(len(item.data["image/png"]) for item in shown) <= 10_000_000
    assert shown[0].data["image/png"].startswith("00")
    assert shown[-1].data["image/png"].startswith("49")
    assert [item for item in transcript.items if isinstance(item, Omitted)] == [Omitted(50 - len(shown))]


def test_one_endless_line_is_bounded() -> None:
    transcript = Transcript()
    for _ in range(100):
        transcript.stream("stdout", "x" * 1_000)
    (line,) = texts(transcript)
    assert line == "x" * 10_000 + " ... (line cut)"


def test_an_omission_that_fell_out_is_not_counted_twice() -> None:
    transcript = Transcript()
    for i in range(1_000):
        transcript.stream("stderr", f"{i}\n")
    transcript.omit(100, "tail\n")  # the first item behind the head, and so the first to fall out
    for i in range(4_000):
        transcript.stream("stderr", f"{i}\n")
    assert Omitted(101) in transcript.items
    transcript.omit(150, "tail\n")
    counted = sum(item.num_lines for item in transcript.items if isinstance(item, Omitted))
    # 150 of the flood, of which 101 had been told; its first tail line is among them; and one pushed out now.
    assert counted == 101 + 49 + 1


def test_the_version_tells_whether_something_changed() -> None:
    transcript = Transcript()
    seen = {transcript.version}
    for entry in (
        ["stream", "stdout", "a"],
        ["display", {}, {}, "i", False],
        ["display", {}, {}, "i", True],
        ["result", {}, {}],
        ["omit", 1, ""],
        ["clear", False],
    ):
        transcript.apply(entry)
        assert transcript.version not in seen, entry
        seen.add(transcript.version)
    before = transcript.version
    transcript.stream("stdout", "")
    assert transcript.version == before


def test_settled_items_are_those_that_nothing_can_change() -> None:
    transcript = Transcript()
    transcript.stream("stdout", "done\nopen")
    transcript.display({"text/plain": "may change"}, {}, "i", False)
    transcript.display({"text/plain": "stays"}, {}, None, False)
    settled = transcript.settled()
    assert [item for _, item in settled] == [Line("stdout", "done"), Display({"text/plain": "stays"})]
    transcript.forget(number for number, _ in settled)
    transcript.stream("stdout", " end\n")
    assert [item for _, item in transcript.settled()] == [Line("stdout", "open end")]
    assert transcript.items == (Line("stdout", "open end"), Display({"text/plain": "may change"}))
