"""What stays of a run in the notebook: figures made from its history, and from nothing else.

    RunHistory ──> static SVG (saved notebook, nbconvert, no network)
               ──> plotly specification (plain dictionaries; where a front end knows plotly)
               ──> a few lines of text

Pure but for `show_run`, which displays. Kept small: a figure adds less than 100 kB to the notebook.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from openclaw_nb.monitor.store import Curve, RunHistory, WorkerHistory
from openclaw_nb.notebook.svg import COLOURS, PLOT_WIDTH, STYLE, Labels, Line, line_chart, thin
from openclaw_nb.notebook.sync import describe_sync, sync_chart, sync_traces

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PLOTLY_MIME = "application/vnd.plotly.v1+json"

_MAX_LINES = 16
_MAX_POINTS = 300
_LIVE_POINTS = 120
_ALL_POINTS = 1600  # of all lines of a chart together
_DIGITS = 5

STATIC_STYLE = f"""<style>
.oc-run {{ color: var(--jp-content-font-color1, inherit); font-size: 13px; line-height: 1.4; }}
.oc-run p {{ margin: 0 0 4px; }}
{STYLE}</style>"""


# ---------------------------------------------------------------------------------------------- in words


def describe_run(history: RunHistory, *, each_worker: bool = True) -> list[str]:
    """Say in a few lines what a run did: steps, samples, samples/s, loss, and what is not known."""
    facts = [_counted(history.steps, "step"), _counted(history.samples, "sample")]
    if history.mean_rate is not None:
        facts.append(f"{rate_text(history.mean_rate)} samples/s ({_counted(len(history.workers), 'worker')})")
    if history.loss:
        facts.append(f"loss {loss_text(history.loss)}")
    lines = [", ".join(facts)]
    if each_worker and len(history.workers) > 1:
        lines.append(_by_worker(history.workers))
    lines += describe_sync(history)
    nans = [(worker.first_nan, worker.worker) for worker in history.workers if worker.first_nan is not None]
    if nans:
        step, worker = min(nans)
        lines.append(f"the loss is not finite from step {step} on, first on the samples of worker {worker}")
    if history.silent:
        names = ", ".join(map(str, history.silent))
        lines.append(
            f"nothing was told by worker {names}: steps, samples and samples/s are those of the others."
        )
    if history.lost:
        lines.append(
            f"{_counted(history.lost, 'measurement')} did not arrive: steps, samples and samples/s lack them."
        )
    return lines


def _by_worker(workers: Sequence[WorkerHistory]) -> str:
    rates = [(worker.mean_rate, worker.worker) for worker in workers if worker.mean_rate is not None]
    if not rates:
        return "samples/s by worker are not known"
    if len(rates) <= 8:
        return "samples/s by worker: " + ", ".join(f"{rate_text(rate)} (worker {w})" for rate, w in rates)
    (low, slowest), (high, fastest) = min(rates), max(rates)
    return f"samples/s from {rate_text(low)} (worker {slowest}) to {rate_text(high)} (worker {fastest})"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def rate_text(rate: float | None) -> str:
    """Write samples/s; a dash when not known."""
    if rate is None:
        return "–"
    return f"{rate:,.0f}" if rate >= 100 or rate == 0 else f"{rate:.3g}"


def loss_text(loss: Curve) -> str:
    """Write the first and the newest loss."""
    first, last = _loss(loss.y[0]), _loss(loss.y[-1])
    return f"{first} → {last}" if len(loss) > 1 else last


def _loss(value: float) -> str:
    return f"{value:.2f}" if 0.1 <= abs(value) < 1000 else f"{value:.3g}"


# ------------------------------------------------------------------------------------------- as a picture


def charts(history: RunHistory, *, each_worker: bool = True) -> str:
    """Draw samples/s by time, the loss by step, and what each worker's time goes to, as HTML with SVG.

    Parameters
    ----------
    history : RunHistory
        What to draw.
    each_worker : bool
        Draw a line a worker beside that of all together.
    """
    lines = _rate_chart(history, each_worker, _MAX_POINTS) + _loss_chart(history, _MAX_POINTS)
    return _side_by_side(lines, sync_chart(history, now=False))


class LiveCharts:
    """Draws the charts of a run that goes on, for a moment's look.

    Lines have fewer points, and are drawn anew when they have moved by about a pixel: in the first minutes each time,
    after an hour every ten seconds. The bars show what time goes to now.
    """

    def __init__(self) -> None:
        self._run_id = ""
        self._drawn_at = 0.0
        self._lines = ""

    def draw(self, history: RunHistory) -> str:
        """Return the charts as HTML with SVG."""
        pixel = history.seconds / PLOT_WIDTH
        if history.run_id != self._run_id or history.seconds - self._drawn_at >= pixel:
            self._run_id, self._drawn_at = history.run_id, history.seconds
            self._lines = _rate_chart(history, False, _LIVE_POINTS) + _loss_chart(history, _LIVE_POINTS)
        return _side_by_side(self._lines, sync_chart(history, now=True))


def _side_by_side(*drawn: str) -> str:
    return f'<div class="oc-charts">{"".join(drawn)}</div>'


def _rate_chart(history: RunHistory, each_worker: bool, max_points: int) -> str:
    if not history.rates:
        return _no_chart("Samples/s", "Known from the second measurement on.")
    unit, lines = _rate_lines(history, each_worker)
    mean = rate_text(history.mean_rate)
    summary = f"Samples per second by time: {mean} on average over {history.seconds:.0f} seconds"
    labels = Labels(
        f"Samples/s{_left_out(history.workers) if each_worker else ''}", unit, "samples/s", summary
    )
    return line_chart(lines, labels, max_points=min(max_points, _points_each(len(lines))), from_zero=True)


def _loss_chart(history: RunHistory, max_points: int) -> str:
    if not history.loss:
        return _no_chart("Loss", "No loss was measured.")
    summary = f"Loss by step: {loss_text(history.loss)} in {_counted(history.steps, 'step')}"
    return line_chart(_loss_lines(history), Labels("Loss", "step", "loss", summary), max_points=max_points)


def _no_chart(title: str, why: str) -> str:
    return f'<div class="oc-chart"><p class="oc-title">{title}</p><p>{why}</p></div>'


def _loss_lines(history: RunHistory) -> list[Line]:
    return [Line("loss", history.loss.x, history.loss.y)] if history.loss else []


def _rate_lines(history: RunHistory, each_worker: bool) -> tuple[str, list[Line]]:
    """Return the unit of the time axis and the lines, that of all workers first."""
    unit, seconds = time_unit(history.seconds)
    curves = [("all workers", history.rates), *(_worker_curves(history.workers) if each_worker else [])]
    lines = [
        Line(name, [x / seconds for x in curve.x], curve.y, bold=number == 0)
        for number, (name, curve) in enumerate(curves)
    ]
    return unit, lines if history.rates else []


def _worker_curves(workers: Sequence[WorkerHistory]) -> list[tuple[str, Curve]]:
    """Return the workers' lines: none for a single one, and of too many the slowest and the fastest."""
    drawn = [worker for worker in workers if worker.rates] if len(workers) > 1 else []
    if len(drawn) > _MAX_LINES:
        drawn.sort(key=lambda worker: worker.mean_rate or 0.0)
        drawn = drawn[: _MAX_LINES // 2] + drawn[-_MAX_LINES // 2 :]
        drawn.sort(key=lambda worker: worker.worker)
    return [(f"worker {worker.worker}", worker.rates) for worker in drawn]


def _left_out(workers: Sequence[WorkerHistory]) -> str:
    half = _MAX_LINES // 2
    return f" (the {half} slowest and {half} fastest of {len(workers)})" if len(workers) > _MAX_LINES else ""


def _points_each(num_lines: int) -> int:
    return max(24, min(_MAX_POINTS, _ALL_POINTS // max(1, num_lines)))


def time_unit(seconds: float) -> tuple[str, float]:
    """Choose the unit of a time axis: its name and how many seconds it has."""
    if seconds < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)


# ---------------------------------------------------------------------------------------------- plotly


def plotly_specification(history: RunHistory) -> dict[str, Any]:
    """Build one plotly figure with all charts side by side, as plain dictionaries."""
    unit, rates = _rate_lines(history, each_worker=True)
    bars = sync_traces(history, "3")
    columns = [[0.0, 0.27], [0.36, 0.63], [0.74, 1.0]] if bars else [[0.0, 0.45], [0.55, 1.0]]
    layout = {
        **_LAYOUT,
        "xaxis": _axis(unit, domain=columns[0]),
        "yaxis": _axis("samples/s", rangemode="tozero"),
        "xaxis2": _axis("step", domain=columns[1], anchor="y2"),
        "yaxis2": _axis("loss", anchor="x2"),
    }
    if bars:
        layout["xaxis3"] = _axis("seconds", domain=columns[2], anchor="y3")
        layout["yaxis3"] = {"anchor": "x3", "autorange": "reversed"}
    return {"data": _traces(rates, "") + _traces(_loss_lines(history), "2") + bars, "layout": layout}


def plotly_figures(history: RunHistory) -> list[Figure]:
    """Build the run's plotly figures: samples/s by time, loss by step, what time went to; those that were measured.

    Parameters
    ----------
    history : RunHistory
        The run.

    Returns
    -------
    list of plotly.graph_objects.Figure
        Figures that can be changed and shown by themselves.
    """
    from plotly.graph_objects import Figure

    unit, rates = _rate_lines(history, each_worker=True)
    wanted = [(rates, unit, "samples/s", "tozero"), (_loss_lines(history), "step", "loss", "normal")]
    figures = [
        Figure(
            data=_traces(lines, ""),
            layout={**_LAYOUT, "xaxis": _axis(x), "yaxis": _axis(y, rangemode=mode), "title": {"text": y}},
        )
        for lines, x, y, mode in wanted
        if lines
    ]
    if bars := sync_traces(history, ""):
        title = {"text": "what time went to"}
        layout = {**_LAYOUT, "xaxis": _axis("seconds"), "yaxis": {"autorange": "reversed"}, "title": title}
        figures.append(Figure(data=bars, layout=layout))
    return figures


_LAYOUT: dict[str, Any] = {
    # Neither paper nor font have a colour of their own theme: readable in light and dark.
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": "#808080"},
    "height": 300,
    "margin": {"l": 60, "r": 20, "t": 50, "b": 45},
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    "hovermode": "closest",
    "barmode": "stack",
}


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "gridcolor": "rgba(128,128,128,0.25)", "zeroline": False, **more}


def _traces(lines: Sequence[Line], axis: str) -> list[dict[str, Any]]:
    return [_trace(line, number, axis, len(lines)) for number, line in enumerate(lines)]


def _trace(line: Line, number: int, axis: str, num_lines: int) -> dict[str, Any]:
    points = thin(line.xs, line.ys, _points_each(num_lines))
    return {
        "type": "scatter",
        "mode": "lines" if len(points) > 1 else "markers",
        "name": line.name,
        "x": [_rounded(x) for x, _ in points],
        "y": [_rounded(y) for _, y in points],
        "xaxis": f"x{axis}",
        "yaxis": f"y{axis}",
        "showlegend": num_lines > 1,
        "line": {"color": COLOURS[number % len(COLOURS)], "width": 2.5 if line.bold else 1.5},
    }


def _rounded(value: float) -> float | None:
    """Shorten a number; what is none becomes a gap, as JSON has no word for it."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


# ----------------------------------------------------------------------------------- into the notebook


def run_figure(history: RunHistory) -> dict[str, Any]:
    """Build what stays of a run: a mime bundle of plotly specification, HTML with SVG, and text.

    Parameters
    ----------
    history : RunHistory
        The run.

    Returns
    -------
    dict
        By mime type; a front end shows the richest that it knows.
    """
    words = describe_run(history)
    paragraphs = "".join(f"<p>{html.escape(line)}</p>" for line in words)
    return {
        PLOTLY_MIME: plotly_specification(history),
        "text/html": f'{STATIC_STYLE}<div class="oc-run">{paragraphs}{charts(history)}</div>',
        "text/plain": "\n".join(words),
    }


class RunFigures(Sequence["Figure"]):
    """The plotly figures of a run, which show as the run's static figure does.

    Parameters
    ----------
    history : RunHistory
        The run.
    """

    def __init__(self, history: RunHistory) -> None:
        self.history = history
        self._figures: list[Figure] | None = None

    @property
    def figures(self) -> list[Figure]:
        """The figures, made when they are first asked for: plotly takes its time to be imported."""
        if self._figures is None:
            self._figures = plotly_figures(self.history)
        return self._figures

    @overload
    def __getitem__(self, index: int) -> Figure: ...
    @overload
    def __getitem__(self, index: slice) -> list[Figure]: ...
    def __getitem__(self, index: int | slice) -> Figure | list[Figure]:
        return self.figures[index]

    def __len__(self) -> int:
        return len(self.figures)

    def __repr__(self) -> str:
        return "\n".join(describe_run(self.history))

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        return run_figure(self.history)


def show_run(history: RunHistory) -> None:
    """Display what stays of a run in the cell that runs now."""
    from IPython.display import display

    display(run_figure(history), raw=True)
