"""Line charts and stacked bars as SVG text: readable in light and dark, without scripts, nothing from outside.

    lines (name, xs, ys) ──> thin ──> scale ──> <svg> and a legend

Text and axes take the colour of the text around them; lines take colours that stand out from white and from
black. Knows numbers and names; does not know what they mean.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

COLOURS = ("#2f7fd0", "#c8741a", "#2e9157", "#9a66cf", "#d0504c", "#178f96", "#c4569a", "#7a8a1f")
"""Each has a contrast of more than 3 to white and to JupyterLab's dark grey."""

STYLE = """
.oc-charts { display: flex; flex-wrap: wrap; gap: 8px 24px; }
.oc-chart { flex: 1 1 300px; max-width: 520px; min-width: 0; margin: 0; }
.oc-chart svg { display: block; width: 100%; height: auto; }
.oc-chart svg text { fill: currentColor; font-size: 11px; }
.oc-title { font-size: 12px; font-weight: 600; margin: 0 0 2px; }
.oc-charts .oc-chart ul.oc-legend { display: flex; flex-wrap: wrap; gap: 0 14px; margin: 2px 0 0; padding: 0;
  list-style: none; font-size: 12px; }
.oc-charts .oc-chart ul.oc-legend li { margin: 0; white-space: nowrap; }
.oc-chart ul.oc-legend svg { display: inline-block; width: 22px; height: 8px; margin-right: 5px; }
"""

_WIDTH, _HEIGHT = 420, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 10, 8, 32
_BAR_LEFT, _BAR_STEP = 80, 20
PLOT_WIDTH = _WIDTH - _LEFT - _RIGHT
"""Of a line chart, in its own units, of which a pixel of the screen is about one."""

_TINY, _HUGE = 1e-300, 1e300  # beyond these, differences are no longer numbers
_DASHES = ("", "6 3", "2 3", "8 3 2 3")

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line of a chart; ``bold`` sets it off from the others."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    bold: bool = False


@dataclass(frozen=True)
class Labels:
    """The words of a chart; ``summary`` tells those who cannot see it what it shows."""

    title: str
    x: str
    y: str
    summary: str


def line_chart(
    lines: Sequence[Line], labels: Labels, *, max_points: int = 240, from_zero: bool = False
) -> str:
    """Draw lines over common axes.

    Parameters
    ----------
    lines : sequence of Line
        What to draw; values that are no finite numbers leave a gap. The horizontal axis begins at 0.
    labels : Labels
        Title, names of the axes, and a summary for screen readers.
    max_points : int
        How many points of each line are drawn, about.
    from_zero : bool
        Let the vertical axis begin at 0, too.

    Returns
    -------
    str
        HTML: title, SVG and, for several lines, a legend; says so when there is no point to draw.
    """
    title = f'<p class="oc-title">{html.escape(labels.title)}</p>'
    thinned = [thin(line.xs, line.ys, max_points) for line in lines]
    finite = [point for points in thinned for point in points if _finite(point)]
    if not finite:
        return f'<div class="oc-chart">{title}<p>No value can be drawn.</p></div>'
    frame = _Frame.around(finite, from_zero)
    drawn = "".join(
        _polyline(points, _pen(line, number), frame)
        for number, (line, points) in enumerate(zip(lines, thinned, strict=True))
    )
    picture = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(labels.summary)}">'
        f"{_axes(frame, labels)}{drawn}</svg>"
    )
    return f'<div class="oc-chart">{title}{picture}{_legend(lines)}</div>'


@dataclass(frozen=True)
class Bar:
    """One bar of `stacked_bars`: its name and a size for each part."""

    name: str
    sizes: Sequence[float]


def stacked_bars(bars: Sequence[Bar], parts: Sequence[str], title: str, summary: str) -> str:
    """Draw bars below each other, each cut into parts by their share of it.

    Parameters
    ----------
    bars : sequence of Bar
        What to draw, with one size for each part.
    parts : sequence of str
        The parts' names, for the legend.
    title, summary : str
        As in `Labels`.
    """
    height = len(bars) * _BAR_STEP
    drawn = "".join(_stacked(bar, number * _BAR_STEP) for number, bar in enumerate(bars))
    picture = (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{html.escape(summary)}">{drawn}</svg>'
    )
    names = "".join(
        f"<li>{_sample(_pen(Line(part, (), (), bold=True), n))}{html.escape(part)}</li>"
        for n, part in enumerate(parts)
    )
    head = f'<p class="oc-title">{html.escape(title)}</p>'
    return f'<div class="oc-chart">{head}{picture}<ul class="oc-legend">{names}</ul></div>'


def _stacked(bar: Bar, top: float) -> str:
    whole = sum(bar.sizes) or 1.0
    start = float(_BAR_LEFT)
    found = [_mark(_BAR_LEFT - 6, top + 14, "end", bar.name)]
    for number, size in enumerate(bar.sizes):
        width = size / whole * (_WIDTH - _BAR_LEFT - _RIGHT)
        box = f'x="{start:.1f}" y="{top + 4:.0f}" width="{width:.1f}" height="13"'
        found.append(f'<rect {box} fill="{COLOURS[number % len(COLOURS)]}"/>')
        start += width
    return "".join(found)


def thin(xs: Sequence[float], ys: Sequence[float], max_points: int) -> list[Point]:
    """Choose about ``max_points`` points: lowest and highest of each stretch, so that no peak is lost."""
    if len(ys) <= max_points:
        return list(zip(xs, ys, strict=True))
    size = math.ceil(len(ys) / max(1, (max_points - 2) // 2))
    kept = {0, len(ys) - 1}
    if math.isnan(sum(ys)):
        ys_or_gaps: Sequence[float] = [math.inf if y != y else y for y in ys]  # NaN leaves a gap: kept
    else:
        ys_or_gaps = ys
    for start in range(0, len(ys), size):
        stretch = ys_or_gaps[start : start + size]
        kept.update(start + stretch.index(y) for y in (min(stretch), max(stretch)))
    return [(xs[i], ys[i]) for i in sorted(kept)]


def _finite(point: Point) -> bool:
    return abs(point[0]) < _HUGE and abs(point[1]) < _HUGE  # also false for NaN


# --------------------------------------------------------------------------------------------- axes


@dataclass(frozen=True)
class _Frame:
    """The stretch of values that the picture shows, and where they lie in it."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def around(cls, points: Sequence[Point], from_zero: bool) -> _Frame:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        low, high = (min(0.0, *ys), max(ys)) if from_zero else (min(ys), max(ys))
        marks = ticks(*_widened(low, high))
        low, high = min(low, marks[0]), max(high, marks[-1])
        return cls(*_widened(min(0.0, *xs), max(xs)), *_widened(low, high))

    def place(self, point: Point) -> str:
        x = _LEFT + (point[0] - self.left) / (self.right - self.left) * (_WIDTH - _LEFT - _RIGHT)
        return f"{x:.1f},{self.height(point[1]):.1f}"

    def height(self, y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - self.low) / (self.high - self.low) * (_HEIGHT - _TOP - _BOTTOM)


def _widened(low: float, high: float) -> tuple[float, float]:
    """Give a stretch without length one, so that a single value can be drawn."""
    if high > low:
        return low, high
    return (low, low + 1.0) if abs(low) < _TINY else (low - abs(low) / 10, low + abs(low) / 10)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about ``count`` round numbers from just below ``low`` to just above ``high``."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def number_text(value: float) -> str:
    """Write a number with at most four digits that say something."""
    if value and math.isfinite(value) and abs(value) < 1e4:
        return f"{value:,.4g}"
    return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"


def _axes(frame: _Frame, labels: Labels) -> str:
    parts = []
    for y in ticks(frame.low, frame.high):
        if _inside(y, frame.low, frame.high):
            parts.append(_mark(_LEFT - 6, frame.height(y) + 4, "end", number_text(y)))
            parts.append(_rule(frame.height(y), 0.18))
    baseline = _HEIGHT - _BOTTOM
    for x in ticks(frame.left, frame.right):
        if _inside(x, frame.left, frame.right):
            at = float(frame.place((x, frame.low)).partition(",")[0])
            parts.append(_mark(at, baseline + 14, "middle", number_text(x)))
    parts.append(_rule(baseline, 0.6))
    parts.append(_mark((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 4, "middle", labels.x))
    middle = (_TOP + baseline) / 2
    turned = f'transform="translate(10 {middle:.0f}) rotate(-90)" text-anchor="middle"'
    parts.append(f"<text {turned}>{html.escape(labels.y)}</text>")
    return "".join(parts)


def _inside(value: float, low: float, high: float) -> bool:
    slack = (high - low) * 1e-9
    return low - slack <= value <= high + slack


def _mark(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _rule(y: float, opacity: float) -> str:
    ends = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
    return f'<line {ends} stroke="currentColor" stroke-opacity="{opacity}"/>'


# -------------------------------------------------------------------------------------------- lines


def _pen(line: Line, number: int) -> str:
    """How a line is drawn: colours come again after eight lines, with other dashes."""
    dash = _DASHES[number // len(COLOURS) % len(_DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    width = 2.5 if line.bold else 1.5
    return f'fill="none" stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="{width}"{dashes}'


def _polyline(points: Sequence[Point], pen: str, frame: _Frame) -> str:
    parts = []
    for piece in _pieces(points):
        places = [frame.place(point) for point in piece]
        if len(places) == 1:
            x, _, y = places[0].partition(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="2" {pen}/>')
        else:
            parts.append(f'<polyline points="{" ".join(places)}" {pen} stroke-linejoin="round"/>')
    return "".join(parts)


def _pieces(points: Iterable[Point]) -> list[list[Point]]:
    """Split a line where it has no value."""
    pieces: list[list[Point]] = [[]]
    for point in points:
        if _finite(point):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    items = (
        f"<li>{_sample(_pen(line, number))}{html.escape(line.name)}</li>" for number, line in enumerate(lines)
    )
    return f'<ul class="oc-legend">{"".join(items)}</ul>'


def _sample(pen: str) -> str:
    return f'<svg viewBox="0 0 22 8" aria-hidden="true"><line x1="1" x2="21" y1="4" y2="4" {pen}/></svg>'
