"""What ran when on each rank of a pipeline, a lane each, beside the ideal: static SVG, a plotly figure, a few words.

    boxes (lane, part, start, end) ──> SVG, lanes below each other ──> saved notebook, nbconvert
                                   ──> plotly bars, when asked for
                                   ──> lines of text

Knows names and times; what they are of is the business of who measured them.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openclaw_nb.notebook.svg import COLOURS, STYLE, number_text, ticks

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_WIDTH, _LEFT, _RIGHT = 760, 92, 10
_LANE, _BAR, _FOOT = 24, 18, 30
_MIN_TEXT = 9.0  # narrower boxes have no room for a number
_MAX_BOXES = 3000
_CSS = f"""<style>{STYLE}
.oc-charts .oc-lanes {{ flex: 1 1 100%; max-width: 860px; }}
.oc-lanes svg text.oc-in {{ fill: #fff; font-size: 9px; text-anchor: middle; }}
</style>"""


@dataclass(frozen=True)
class Box:
    """Something that ran: in which lane, what kind of thing, which number it has, and when, in seconds."""

    lane: str
    part: str
    number: int
    start: float
    end: float


@dataclass(frozen=True)
class Lanes:
    """One picture: its title and its boxes."""

    title: str
    boxes: Sequence[Box]

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(b.end for b in self.boxes) - min(b.start for b in self.boxes) if self.boxes else 0.0


class Timeline(Sequence[Box]):
    """What ran, as a list of boxes that shows as a picture.

    Parameters
    ----------
    words : sequence of str
        What is said above it.
    pictures : sequence of Lanes
        What ran first, then what it is compared with; they are drawn to the same scale.
    unit : str
        Of the time axis.
    """

    def __init__(self, words: Sequence[str], pictures: Sequence[Lanes], unit: str = "seconds") -> None:
        self.words = tuple(words)
        self.pictures = tuple(pictures)
        self.unit = unit

    @property
    def ideal(self) -> Sequence[Box]:
        """The boxes of what it is compared with, if there is such a thing."""
        return self.pictures[1].boxes if len(self.pictures) > 1 else ()

    def __getitem__(self, index: Any) -> Any:
        return self.pictures[0].boxes[index]

    def __iter__(self) -> Iterator[Box]:
        return iter(self.pictures[0].boxes)

    def __len__(self) -> int:
        return len(self.pictures[0].boxes)

    def __repr__(self) -> str:
        return "\n".join(self.words)

    def _repr_html_(self) -> str:
        words = "".join(f"<p>{html.escape(line)}</p>" for line in self.words)
        longest = max(picture.seconds for picture in self.pictures)
        parts = list(dict.fromkeys(box.part for picture in self.pictures for box in picture.boxes))
        drawn = "".join(_draw(picture, longest, parts, self.unit) for picture in self.pictures)
        return f'{_CSS}<div class="oc-run">{words}<div class="oc-charts">{drawn}{_legend(parts)}</div></div>'

    def figure(self) -> Figure:
        """Build a plotly figure of what ran, to be zoomed into."""
        from plotly.graph_objects import Bar, Figure

        boxes = list(self)
        begin = min((box.start for box in boxes), default=0.0)
        figure = Figure()
        for number, part in enumerate(dict.fromkeys(box.part for box in boxes)):
            chosen = [box for box in boxes if box.part == part]
            figure.add_trace(
                Bar(
                    name=part,
                    orientation="h",
                    y=[box.lane for box in chosen],
                    base=[box.start - begin for box in chosen],
                    x=[box.end - box.start for box in chosen],
                    text=[str(box.number) for box in chosen],
                    marker={"color": COLOURS[number % len(COLOURS)]},
                )
            )
        figure.update_layout(
            barmode="overlay",
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            font={"color": "#808080"},
            height=120 + 40 * len({box.lane for box in boxes}),
            xaxis={"title": {"text": self.unit}, "gridcolor": "rgba(128,128,128,0.25)"},
            yaxis={"autorange": "reversed"},
            title={"text": self.pictures[0].title},
        )
        return figure


def _draw(picture: Lanes, longest: float, parts: Sequence[str], unit: str) -> str:
    head = f'<p class="oc-title">{html.escape(picture.title)}</p>'
    if not picture.boxes or longest <= 0:
        return f'<div class="oc-chart oc-lanes">{head}<p>Nothing has run.</p></div>'
    lanes = list(dict.fromkeys(box.lane for box in sorted(picture.boxes, key=lambda box: box.lane)))
    begin = min(box.start for box in picture.boxes)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    foot = len(lanes) * _LANE
    drawn = [_text(_LEFT - 6, n * _LANE + 15, "end", lane) for n, lane in enumerate(lanes)]
    for box in picture.boxes[:_MAX_BOXES]:
        colour = COLOURS[parts.index(box.part) % len(COLOURS)]
        drawn.append(_box(box, _LEFT + (box.start - begin) * scale, lanes.index(box.lane), scale, colour))
    drawn += [
        _text(_LEFT + x * scale, foot + 14, "middle", number_text(x))
        for x in ticks(0.0, longest)
        if x <= longest
    ]
    drawn.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, foot + 27, "middle", unit))
    summary = f"{picture.title}: {len(picture.boxes)} pieces of work in {len(lanes)} lanes"
    view = f'viewBox="0 0 {_WIDTH} {foot + _FOOT}" role="img" aria-label="{html.escape(summary)}"'
    return f'<div class="oc-chart oc-lanes">{head}<svg {view}>{"".join(drawn)}</svg></div>'


def _box(box: Box, left: float, lane: int, scale: float, colour: str) -> str:
    width = max(0.5, (box.end - box.start) * scale)
    top = lane * _LANE + 2
    what = html.escape(f"{box.lane}: {box.part} {box.number}, {box.end - box.start:.4g}")
    shape = (
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{colour}" '
        f'stroke="#fff" stroke-width="0.5"><title>{what}</title></rect>'
    )
    inside = f'<text class="oc-in" x="{left + width / 2:.1f}" y="{top + 13}">{box.number}</text>'
    return shape + (inside if width >= _MIN_TEXT else "")


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _legend(parts: Sequence[str]) -> str:
    items = "".join(
        '<li><svg viewBox="0 0 22 8" aria-hidden="true">'
        f'<rect width="22" height="8" fill="{COLOURS[n % len(COLOURS)]}"/></svg>{html.escape(part)}</li>'
        for n, part in enumerate(parts)
    )
    return f'<div class="oc-chart oc-lanes"><ul class="oc-legend">{items}</ul></div>'
