from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest

from openclaw_nb.notebook.merge import Block, Limits, label, merge, render_text, shorten
from openclaw_nb.notebook.transcript import Display, Item, Line, Omitted, Result


def lines(*texts: str) -> tuple[Item, ...]:
    return tuple(Line("stdout", text) for text in texts)


def merged(*ranks: str) -> list[tuple[str, str]]:
    """Merge ranks whose lines are words; give each block as its ranks and its words."""
    blocks = merge({rank: lines(*words.split()) for rank, words in enumerate(ranks)})
    return [
        ("".join(map(str, block.ranks)), " ".join(getattr(item, "text", "?") for item in block.items))
        for block in blocks
    ]


@pytest.mark.parametrize(
    ("ranks", "blocks"),
    [
        (["a b c"] * 4, [("0123", "a b c")]),
        (["a x c", "a y c"], [("01", "a"), ("0", "x"), ("1", "y"), ("01", "c")]),
        (["x", "y", "x"], [("02", "x"), ("1", "y")]),
        (["c", "c", "z"], [("01", "c"), ("2", "z")]),
        # a rank at a time inside a divergent run
        (["a p q c", "a r s t c"], [("01", "a"), ("0", "p q"), ("1", "r s t"), ("01", "c")]),
        (["p1 p2", "q1 q2", "p1 p2"], [("02", "p1 p2"), ("1", "q1 q2")]),
        # only rank 0 prints something in between
        (["a log b", "a b", "a b"], [("012", "a"), ("0", "log"), ("012", "b")]),
        # still running: a rank that is behind is not named yet
        (["a b c", "a b c", "a b c", "a"], [("0123", "a"), ("012", "b c")]),
        (["", "a", "a"], [("12", "a")]),
        # behind inside a divergent run: the others stay folded
        (["a b c", "x b c", "y"], [("0", "a"), ("1", "x"), ("2", "y"), ("01", "b c")]),
        # the equal index is preferred to an earlier equal item
        (["s p s", "q r s"], [("0", "s p"), ("1", "q r"), ("01", "s")]),
        ([], []),
        (["", ""], []),
    ],
)
def test_equal_output_is_folded(ranks: list[str], blocks: list[tuple[str, str]]) -> None:
    assert merged(*ranks) == blocks


def test_the_line_of_a_late_rank_joins_its_block() -> None:
    done = "a b c"
    views = [merged(done, done, " ".join(done.split()[:n])) for n in range(4)]
    assert views == [
        [("01", "a b c")],
        [("012", "a"), ("01", "b c")],
        [("012", "a b"), ("01", "c")],
        [("012", "a b c")],
    ]


def test_epochs_with_a_line_of_each_rank_resynchronise_at_every_epoch() -> None:
    ranks = [" ".join(f"epoch{e} loss{e}.{r}" for e in range(3)) for r in range(3)]
    expected = []
    for epoch in range(3):
        expected.append(("012", f"epoch{epoch}"))
        expected += [(str(r), f"loss{epoch}.{r}") for r in range(3)]
    assert merged(*ranks) == expected


def test_every_rank_keeps_its_own_lines_in_order() -> None:
    rng = random.Random(0)
    for _ in range(300):
        ranks = {r: lines(*rng.choices("abcdef", k=rng.randrange(12))) for r in range(rng.randrange(1, 6))}
        blocks = merge(ranks)
        for rank, items in ranks.items():
            assert tuple(item for block in blocks if rank in block.ranks for item in block.items) == items
        for one, two in pairwise(blocks):
            assert one.ranks != two.ranks
        assert all(block.items and list(block.ranks) == sorted(set(block.ranks)) for block in blocks)


def test_bundles_are_equal_when_their_data_is() -> None:
    figure = {"image/png": "AAAA", "text/plain": "<Figure>"}
    other = {"image/png": "BBBB", "text/plain": "<Figure>"}
    blocks = merge(
        {
            0: [Display(figure, {"width": 1}), Result({"text/plain": "1"})],
            1: [Display(dict(reversed(figure.items()))), Result({"text/plain": "1"})],
            2: [Display(other), Result({"text/plain": "1"})],
        }
    )
    assert blocks == [
        Block((0, 1), (Display(figure),)),
        Block((2,), (Display(other),)),
        Block((0, 1, 2), (Result({"text/plain": "1"}),)),
    ]


def test_a_line_of_stderr_is_not_one_of_stdout_and_a_result_no_display() -> None:
    assert len(merge({0: [Line("stdout", "a")], 1: [Line("stderr", "a")]})) == 2
    assert len(merge({0: [Display({"text/plain": "a"})], 1: [Result({"text/plain": "a"})]})) == 2


@pytest.mark.parametrize("kind", ["equal", "different", "mixed", "few words"])
def test_the_cost_is_bounded(kind: str) -> None:
    rng = random.Random(1)
    makers = {
        "equal": lambda r, i: f"{i}",
        "different": lambda r, i: f"{r} {i}",
        "mixed": lambda r, i: f"{i}" if i % 10 == 0 else f"{r} {i}",
        "few words": lambda r, i: rng.choice("abcd"),
    }
    ranks = {r: lines(*(makers[kind](r, i) for i in range(5_000))) for r in range(8)}
    start = time.process_time()
    merge(ranks)
    # About 0.1 s where this was written; a quadratic search would take minutes.
    assert time.process_time() - start < 3


@pytest.mark.parametrize(
    ("ranks", "world_size", "text"),
    [
        ((1,), 4, "rank 1"),
        ((0, 1), 4, "ranks 0-1"),
        ((0, 1, 2, 3), 4, "ranks 0-3"),
        ((0, 2, 3), 4, "ranks 0, 2-3"),
        ((0, 2), 4, "ranks 0, 2"),
        ((0,), 1, ""),
        ((), 4, ""),
    ],
)
def test_label(ranks: tuple[int, ...], world_size: int, text: str) -> None:
    assert label(ranks, world_size) == text


def test_text_names_ranks_once_for_neighbouring_blocks() -> None:
    blocks = [
        Block((0, 1), lines("epoch 0 loss 0.53")),
        Block((1,), lines("only here")),
        Block((1,), (Omitted(1_234_567), Result({"text/plain": "3.0"}), Display({"image/png": "AAAA"}))),
    ]
    assert render_text(blocks, 2) == (
        "[ranks 0-1]\nepoch 0 loss 0.53\n"
        "[rank 1]\nonly here\n... 1,234,567 lines left out ...\n3.0\n<image/png>"
    )
    assert render_text(blocks[:1], 1) == "epoch 0 loss 0.53"
    assert render_text(blocks[:1], 2, before=(0, 1)) == "epoch 0 loss 0.53"


def test_colours_end_with_their_line_and_stderr_is_red() -> None:
    items = (Line("stderr", "warning"), Line("stderr", "\x1b[32mok"), Line("stdout", "plain"))
    text = render_text([Block((0,), items)], 1, coloured=True)
    assert text == "\x1b[31mwarning\x1b[0m\n\x1b[32mok\x1b[0m\nplain"


def test_long_text_keeps_head_and_tail() -> None:
    block = Block((0,), (*lines(*map(str, range(300))), Omitted(1_000), *lines(*map(str, range(300, 1_000)))))
    text = render_text([block], 1, limits=Limits(lines=400, blocks=100, chars=10_000)).split("\n")
    assert text == [
        *map(str, range(100)),
        "... 1,600 lines left out ...",
        *map(str, range(700, 1_000)),
    ]


def test_each_rank_gets_its_share_of_a_bounded_text() -> None:
    blocks = [Block((0,), lines("short"))]
    blocks += [Block((r,), lines(*(f"{r} {i}" for i in range(1_000)))) for r in (1, 2, 3)]
    short = shorten(blocks, Limits(lines=400, blocks=100, chars=10_000))
    assert [block.ranks for block in short] == [(0,), (1,), (2,), (3,)]
    assert short[0] == blocks[0]
    for block in short[1:]:
        assert block.items[0] == blocks[block.ranks[0]].items[0]
        assert block.items[-1] == blocks[block.ranks[0]].items[-1]
        assert sum(isinstance(item, Line) for item in block.items) == 133  # a third of the 399 left


def test_many_blocks_and_long_results_are_bounded_too() -> None:
    blocks = [Block((i % 2,), lines(str(i))) for i in range(1_000)]
    text = render_text(blocks, 2, limits=Limits(lines=400, blocks=100, chars=10_000))
    assert "... 900 lines left out ..." in text
    assert text.startswith("[rank 0]\n0\n")
    assert text.endswith("[rank 1]\n999")
    value = Result({"text/plain": "\n".join(map(str, range(1_000)))})
    text = render_text([Block((0,), (value,))], 1, limits=Limits(lines=400, blocks=100, chars=10_000))
    assert "\n... 600 lines left out ...\n" in text


def test_text_is_bounded_in_characters() -> None:
    block = Block((0,), lines(*(f"{i} " + "x" * 500 for i in range(300))))
    text = render_text([block], 1, limits=Limits(lines=400, blocks=100, chars=20_000))
    assert len(text) <= 20_000
    assert text.startswith("0 x")
    assert text.split("\n")[-1].startswith("299 x")
