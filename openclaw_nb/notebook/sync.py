"""How a run's workers keep step: what their time goes to, what they send, and who is waited for.

    RunHistory ──> words, a chart (SVG), plotly traces

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openclaw_nb.core.text import size_text
from openclaw_nb.monitor.store import RunHistory, WorkerHistory
from openclaw_nb.notebook.svg import COLOURS, Bar, stacked_bars

_MAX_BARS = 16
_PART_NAMES = {
    "data": "data",
    "compute": "compute",
    "wait": "wait for the slowest",
    "transfer": "transfer",
}


def describe_sync(history: RunHistory) -> list[str]:
    """Say what steps spend their time on, how much is sent and who is waited for, where it was measured."""
    spent = _all_seconds(history)
    whole = sum(spent.values())
    if not whole or len(history.workers) < 2:
        return []
    shares = ", ".join(
        f"{100 * seconds / whole:.0f} % {_PART_NAMES[part]}" for part, seconds in spent.items()
    )
    per_step = max(worker.num_bytes for worker in history.workers) // max(1, history.steps)
    line = f"time: {shares}; {size_text(per_step)} a step and worker are reduced"
    return [line, *_straggler(history), *_drift(history)]


def _drift(history: RunHistory) -> list[str]:
    drifts = [worker.drift for worker in history.workers if worker.drift is not None]
    if not drifts:
        return []
    return [
        f"at the last average the workers' parameters were apart by up to {100 * max(drifts):.2g} % of their size"
    ]


def _straggler(history: RunHistory) -> list[str]:
    found = history.straggler
    if found is None:
        return []
    others = "the other waits" if len(history.workers) == 2 else "the others wait"
    return [
        f"worker {found.worker} is the slowest since second {found.since:.0f}: {others} for it "
        f"{100 * found.share:.0f} % of the time"
    ]


def _all_seconds(history: RunHistory) -> dict[str, float]:
    return {part: sum(w.seconds.get(part, 0.0) for w in history.workers) for part in _PART_NAMES}


def sync_chart(history: RunHistory, *, now: bool) -> str:
    """Draw a bar a worker; "" where it was not measured, or for a single worker.

    Parameters
    ----------
    history : RunHistory
        What to draw.
    now : bool
        Show the last seconds, not the whole run.
    """
    bars = [
        Bar(f"worker {worker.worker}", [spent.get(part, 0.0) for part in _PART_NAMES])
        for worker in _most_different(history.workers)
        if sum((spent := worker.recent if now else worker.seconds).values()) > 0
    ]
    if len(bars) < 2:
        return ""
    left_out = f" ({len(bars)} of {len(history.workers)})" if len(bars) < len(history.workers) else ""
    title = f"What each worker's time goes to{left_out}"
    summary = "; ".join([title, *describe_sync(history)])
    return stacked_bars(bars, list(_PART_NAMES.values()), title, summary)


def _most_different(workers: Sequence[WorkerHistory]) -> Sequence[WorkerHistory]:
    """Return the workers; of too many those that wait least and those that wait most."""
    if len(workers) <= _MAX_BARS:
        return workers
    by_wait = sorted(workers, key=lambda worker: worker.seconds.get("wait", 0.0))
    kept = by_wait[: _MAX_BARS // 2] + by_wait[-_MAX_BARS // 2 :]
    return sorted(kept, key=lambda worker: worker.worker)


def sync_traces(history: RunHistory, axis: str) -> list[dict[str, Any]]:
    """Return plotly's horizontal bars, one trace a part; none where nothing was measured.

    Parameters
    ----------
    history : RunHistory
        What to draw.
    axis : str
        Number of the axes, "" for the first.
    """
    workers = [w for w in _most_different(history.workers) if sum(w.seconds.values()) > 0]
    if len(workers) < 2:
        return []
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": [round(worker.seconds.get(part, 0.0), 3) for worker in workers],
            "y": [f"worker {worker.worker}" for worker in workers],
            "xaxis": f"x{axis}",
            "yaxis": f"y{axis}",
            "marker": {"color": COLOURS[number]},
        }
        for number, (part, name) in enumerate(_PART_NAMES.items())
    ]
