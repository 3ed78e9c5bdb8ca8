from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from openclaw_nb.monitor.store import Curve, Monitor, RunHistory
from openclaw_nb.notebook.figures import (
    PLOTLY_MIME,
    LiveCharts,
    charts,
    describe_run,
    plotly_figures,
    plotly_specification,
    rate_text,
    run_figure,
    time_unit,
)
from openclaw_nb.notebook.svg import COLOURS, Labels, Line, line_chart, number_text, thin, ticks
from openclaw_nb.protocol.messages import Measured


def history(
    num_events: int = 10,
    num_workers: int = 2,
    *,
    samples: int = 64,
    loss: bool = True,
    skipped: int = 0,
    seconds: float = 1.0,
) -> RunHistory:
    monitor = Monitor(lambda: 0.0)
    for n in range(1, num_events + 1):
        for worker in range(num_workers):
            monitor.take(
                Measured(
                    worker=worker,
                    run_id="run-1",
                    seq=n + skipped,
                    at=n * seconds,
                    steps=1,
                    samples=samples,
                    loss=4.0 / n if loss else None,
                )
            )
    found = monitor.latest()
    assert found is not None
    return found


def drawings(text: str) -> list[ElementTree.Element]:
    """The SVG pictures of an HTML text; parsing them proves that they are well formed."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def lines_of(drawing: ElementTree.Element) -> list[list[tuple[float, float]]]:
    return [
        [(float(x), float(y)) for x, y in (place.split(",") for place in line.get("points", "").split())]
        for line in drawing.iter("polyline")
    ]


# -------------------------------------------------------------------------------------------- words


def test_a_run_in_words() -> None:
    assert describe_run(history()) == [
        "10 steps, 1,280 samples, 128 samples/s (2 workers), loss 4.00 → 0.40",
        "samples/s by worker: 64 (worker 0), 64 (worker 1)",
    ]


def test_one_worker_without_loss_in_words() -> None:
    assert describe_run(history(1, 1, loss=False)) == ["1 step, 64 samples"]


def test_lost_measurements_are_said() -> None:
    words = describe_run(history(3, 1, skipped=2), each_worker=False)
    assert words[-1] == "2 measurements did not arrive: steps, samples and samples/s lack them."


def test_a_worker_that_told_nothing_is_named_and_everything_is_drawn() -> None:
    quiet = replace(history(num_workers=2), silent=(2, 5))
    bundle = run_figure(quiet)
    said = "nothing was told by worker 2, 5: steps, samples and samples/s are those of the others."
    assert said in bundle["text/plain"]
    assert said in bundle["text/html"]
    assert "10 steps, 1,280 samples" in bundle["text/plain"]
    assert len(drawings(bundle["text/html"])) == len(drawings(run_figure(history())["text/html"]))


def test_of_many_workers_the_slowest_and_the_fastest_are_named() -> None:
    assert describe_run(history(5, 9))[1] == "samples/s from 64 (worker 0) to 64 (worker 8)"


def test_numbers_for_people() -> None:
    assert [rate_text(rate) for rate in (None, 0.0, 0.1234, 12.34, 1234.5)] == [
        "–",
        "0",
        "0.123",
        "12.3",
        "1,234",
    ]
    assert [number_text(n) for n in (0.0, 0.0025, 2000.0, 150000.0)] == ["0", "0.0025", "2,000", "150,000"]
    assert [time_unit(s)[0] for s in (100.0, 1000.0, 20000.0)] == ["seconds", "minutes", "hours"]


# ------------------------------------------------------------------------------------------ pictures


def test_both_charts_are_drawn_for_everyone() -> None:
    rates, loss = (d for d in drawings(charts(history())) if d.get("role") == "img")
    assert rates.get("aria-label") == "Samples per second by time: 128 on average over 9 seconds"
    assert loss.get("aria-label") == "Loss by step: 4.00 → 0.40 in 10 steps"
    assert len(lines_of(rates)) == 3  # all workers, and each
    assert len(lines_of(loss)) == 1


def test_the_lines_lie_where_the_numbers_say() -> None:
    xs, ys = [0.0, 5.0, 10.0], [0.0, 4.0, 8.0]
    (drawing,) = drawings(line_chart([Line("a", xs, ys)], Labels("t", "x", "y", "s")))
    ((left, bottom), middle, (right, top)) = lines_of(drawing)[0]
    assert middle == pytest.approx(((left + right) / 2, (top + bottom) / 2), abs=0.11)
    texts = {t.text: (float(t.get("x", 0)), float(t.get("y", 0))) for t in drawing.iter("text")}
    assert texts["10"][0] == pytest.approx(right)
    assert texts["8"][1] - 4 == pytest.approx(top)


def test_a_value_that_is_no_number_leaves_a_gap() -> None:
    ys = [1.0, 2.0, math.nan, 3.0, math.inf, 5.0, 4.0]
    (drawing,) = drawings(line_chart([Line("a", range(7), ys)], Labels("t", "x", "y", "s")))
    assert [len(line) for line in lines_of(drawing)] == [2, 2]
    assert len(list(drawing.iter("circle"))) == 1


@pytest.mark.parametrize(
    "ys",
    [[0.0], [-3.0, -3.0], [1e-12, 2e-12], [5e-324], [1e38, 3e38], [-1.5e308, 1.5e308, 1.0], [-0.3, 0.1]],
)
def test_any_finite_values_can_be_drawn(ys: list[float]) -> None:
    (drawing,) = drawings(line_chart([Line("a", range(len(ys)), ys)], Labels("t", "x", "y", "s")))
    marks = [text for text in drawing.iter("text") if text.get("text-anchor") == "end"]
    assert 2 <= len(marks) <= 8
    assert "nan" not in ElementTree.tostring(drawing, encoding="unicode")


def test_a_chart_without_values_says_so() -> None:
    assert "No value can be drawn" in line_chart([Line("a", [1.0], [math.nan])], Labels("t", "x", "y", "s"))
    assert "No loss was measured" in charts(history(loss=False))
    assert "Known from the second measurement on" in charts(history(1, 1))


def test_names_are_escaped() -> None:
    labels = Labels("<i>", "<i>", "<i>", '"<i>')
    drawn = line_chart([Line("<i>", [1.0], [1.0]), Line("b", [1.0], [2.0])], labels)
    assert "<i>" not in drawn
    assert drawings(drawn)[0].get("aria-label") == '"<i>'


def test_round_marks() -> None:
    assert ticks(0, 100) == [0, 25, 50, 75, 100]
    assert ticks(0, 1) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])
    assert ticks(-7, 12) == [-10, -5, 0, 5, 10, 15]


def test_thinning_keeps_ends_and_peaks() -> None:
    ys = [0.0] * 10_000
    ys[7_777], ys[1_234] = 9.0, -9.0
    points = thin(range(10_000), ys, 100)
    assert len(points) <= 102
    assert points == sorted(points)
    assert {(0, 0.0), (9_999, 0.0), (7_777, 9.0), (1_234, -9.0)} <= set(points)


@pytest.mark.parametrize("background", ["#ffffff", "#111111", "#212121"])
def test_line_colours_stand_out_in_light_and_dark(background: str) -> None:
    # The contrast that WCAG 2.1 (1.4.11) asks of graphical objects.
    assert min(_contrast(colour, background) for colour in COLOURS) >= 3.0


def _contrast(one: str, other: str) -> float:
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


# -------------------------------------------------------------------------------- what the notebook keeps


def test_what_stays_has_no_script_and_nothing_from_outside() -> None:
    bundle = run_figure(history())
    assert list(bundle) == [PLOTLY_MIME, "text/html", "text/plain"]
    assert not re.search(r"<script|https?:|url\(|@import|\son\w+=", bundle["text/html"])
    assert bundle["text/plain"].startswith("10 steps, 1,280 samples")


def test_what_stays_is_small_and_valid_json() -> None:
    bundle = run_figure(history(400, 64, seconds=0.2))  # more points than any line keeps
    assert len(json.dumps(bundle, allow_nan=False)) < 100_000
    assert "(the 8 slowest and 8 fastest of 64)" in bundle["text/html"]


def test_the_plotly_specification_holds_the_measured_values() -> None:
    total, first, second, loss = plotly_specification(history())["data"]
    assert [trace["name"] for trace in (total, first, second)] == ["all workers", "worker 0", "worker 1"]
    # Both workers tell ten times; the total is known from the moment that both have told twice.
    assert total["y"] == [128.0] * 17
    assert first["y"] == second["y"] == [64.0] * 9
    assert loss["x"] == list(range(1, 11))
    assert loss["y"] == pytest.approx([4.0 / n for n in range(1, 11)], rel=1e-4)


def test_plotly_takes_the_specification() -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    figures = plotly_figures(history())
    assert [len(figure.data) for figure in figures] == [3, 1]
    assert len(graph_objects.Figure(plotly_specification(history())).data) == 4
    assert [len(figure.data) for figure in plotly_figures(history(loss=False))] == [3]


def test_plotly_is_not_imported_for_the_static_figure() -> None:
    code = (
        "import sys; import openclaw_nb.notebook.panel; from openclaw_nb.notebook.figures import run_figure\n"
        "assert not {'plotly', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_live_lines_are_drawn_anew_when_they_have_moved_by_a_pixel() -> None:
    live = LiveCharts()
    hour = live.draw(history(10, seconds=400.0))
    assert live.draw(replace(history(10, seconds=400.0), seconds=3605.0, loss=Curve())) == hour
    assert "No loss was measured" in live.draw(
        replace(history(10, seconds=400.0), seconds=3615.0, loss=Curve())
    )
    other = replace(history(10, seconds=1.0), run_id="run-2")
    assert live.draw(other) != hour
    later = live.draw(replace(other, seconds=9.5, loss=Curve()))
    assert "No loss was measured" in later


def test_live_lines_have_fewer_points() -> None:
    long = history(2000)
    (live, *_), (still, *_) = (
        drawings(d) for d in (LiveCharts().draw(long), charts(long, each_worker=False))
    )
    assert 50 < len(lines_of(live)[0]) <= 122 < len(lines_of(still)[0])
