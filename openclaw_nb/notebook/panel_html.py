"""The panel's picture: one moment of a cluster as HTML and as text.

    PanelView (frozen: devices, what runs, what was measured, a note) ──> `draw` ──> Picture (HTML in parts, text)

Pure. Everything that comes from outside is escaped. Does not know where a view comes from, nor how often
it is drawn.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

from openclaw_nb.cluster.status import DeviceStatus
from openclaw_nb.core.text import size_text
from openclaw_nb.monitor.store import RunHistory
from openclaw_nb.notebook.figures import LiveCharts, charts, describe_run, rate_text
from openclaw_nb.notebook.svg import STYLE

NOTHING = "–"
_SILENT_SECONDS = 2.0
_LAST_TITLES = (
    '<th scope="col" class="oc-number">samples/s</th><th scope="col">doing</th>'
    '<th scope="col">last seen</th><th scope="col" class="oc-number">pid</th>'
)

PANEL_STYLE = f"""
.oc-panel {{ color: var(--jp-content-font-color1, inherit); font-size: 13px; line-height: 1.4;
  max-width: 1100px; }}
.oc-panel p {{ margin: 0 0 6px; }}
.oc-panel .oc-head {{ font-size: 14px; margin-bottom: 8px; }}
.oc-panel .oc-scroll {{ overflow-x: auto; margin-bottom: 8px; }}
.oc-panel table.oc-devices {{ table-layout: auto; width: 100%; margin: 0; border-collapse: collapse;
  font-size: 13px; }}
.oc-panel table.oc-devices tr, .oc-panel table.oc-devices tbody tr:nth-child(n) {{ background: none; }}
.oc-panel table.oc-devices th, .oc-panel table.oc-devices td {{ padding: 3px 12px 3px 0; max-width: none;
  text-align: left; vertical-align: middle; border: 0;
  border-bottom: 1px solid var(--jp-border-color2, rgba(128, 128, 128, 0.35)); white-space: nowrap; }}
.oc-panel table.oc-devices .oc-number {{ text-align: right; font-variant-numeric: tabular-nums; }}
.oc-panel table.oc-devices .oc-work {{ white-space: normal; overflow-wrap: anywhere; min-width: 120px; }}
.oc-bar {{ display: inline-block; width: 72px; height: 8px; margin-right: 8px; border-radius: 4px;
  overflow: hidden; vertical-align: middle; background: rgba(128, 128, 128, 0.28); }}
.oc-bar span {{ display: block; height: 100%; background: #2f7fd0; }}
.oc-dot {{ display: inline-block; width: 9px; height: 9px; margin-right: 6px; border-radius: 50%;
  background: #8a8a8a; }}
.oc-dot.oc-busy {{ background: #2e9157; }}
.oc-dot.oc-dead {{ background: #d0504c; }}
{STYLE}"""


@dataclass(frozen=True, kw_only=True)
class PanelView:
    """What the panel shows at one moment.

    Attributes
    ----------
    at : float
        The moment, in seconds since the epoch.
    name : str
        The cluster's; "" when there is none.
    backend : str
        What the process group communicates with.
    epoch : int
        The process group's number.
    doing : str
        What runs, or what ran last.
    devices : tuple of DeviceStatus
        One a worker, in rank order.
    history : RunHistory or None
        What was measured last.
    running : bool
        Whether that run goes on: then samples/s are those of now, else those of the whole run.
    run_id : str
        The cell that runs now, whether it measures anything or not; "" when none does.
    note : str
        Why something is missing, or what to do next; "" when there is nothing to say.
    """

    at: float = 0.0
    name: str = ""
    backend: str = ""
    epoch: int = 0
    doing: str = ""
    devices: tuple[DeviceStatus, ...] = ()
    history: RunHistory | None = None
    running: bool = False
    run_id: str = ""
    note: str = ""

    def rate_of(self, worker: str) -> float | None:
        """Return the samples/s of a worker, by its id."""
        for measured in self.history.workers if self.history else ():
            if f"worker-{measured.worker}" == worker:
                return measured.rate if self.running else measured.mean_rate
        return None


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A view as it is shown.

    Attributes
    ----------
    view : PanelView
        What it is a picture of; two pictures are equal when they look alike.
    head, devices, measured : str
        Parts of the panel as HTML, from top to bottom; each changes at its own pace.
    run_id : str
        The cell that runs; "" when none does.
    """

    view: PanelView = field(compare=False)
    head: str
    devices: str
    measured: str
    run_id: str

    @property
    def text(self) -> str:
        """All of it as plain text."""
        return render_text(self.view)

    @property
    def html(self) -> str:
        """All parts with their style, without scripts and without anything from outside."""
        parts = "".join(f"<div>{part}</div>" for part in (self.head, self.devices, self.measured))
        return (
            f"<style>{PANEL_STYLE}</style>"
            f'<div class="oc-panel" role="group" aria-label="OpenClaw panel">{parts}</div>'
        )

    def bundle(self) -> dict[str, str]:
        """Return it by mime type, for front ends of every kind."""
        return {"text/html": self.html, "text/plain": self.text}


def draw(view: PanelView, live: LiveCharts | None = None) -> Picture:
    """Draw a view; ``live`` draws the charts of a run that goes on."""
    return Picture(
        view=view,
        head=_head(view) + _note(view),
        devices=_device_table(view),
        measured=_measured(view, live or LiveCharts()),
        run_id=view.run_id,
    )


def render_text(view: PanelView) -> str:
    """Write the view as plain text."""
    lines = [", ".join(_head_words(view))] if view.name else []
    lines += [_device_line(device, view.rate_of(device.worker)) for device in view.devices]
    lines += describe_run(view.history, each_worker=False) if view.history else []
    return "\n".join([*lines, view.note] if view.note else lines)


# ---------------------------------------------------------------------------------------------- parts


def _head_words(view: PanelView) -> list[str]:
    group = f"{view.backend} group, epoch {view.epoch}" if view.backend else "no process group"
    return [view.name, group, view.doing]


def _head(view: PanelView) -> str:
    if not view.name:
        return ""
    name, *rest = (html.escape(words) for words in _head_words(view))
    return f'<p class="oc-head"><strong>{name}</strong> · {" · ".join(rest)}</p>'


def _note(view: PanelView) -> str:
    return f"<p>{html.escape(view.note)}</p>" if view.note else ""


def _measured(view: PanelView, live: LiveCharts) -> str:
    if view.history is None:
        return ""
    words = [html.escape(line) for line in describe_run(view.history, each_worker=False)]
    if view.running:
        words[0] += f" · now <strong>{rate_text(view.history.rate)} samples/s</strong>"
        drawn = live.draw(view.history)
    else:
        words[0] = f"The last cell that measured: {words[0]}"
        drawn = charts(view.history, each_worker=False)
    return "".join(f"<p>{line}</p>" for line in words) + drawn


def _device_table(view: PanelView) -> str:
    if not view.devices:
        return ""
    warm = any(device.temperature is not None for device in view.devices)
    titles = ["device", "state", "utilisation", "memory", *(["temperature"] if warm else [])]
    head = "".join(f'<th scope="col">{title}</th>' for title in titles) + _LAST_TITLES
    rows = "".join(_device_row(device, view, warm) for device in view.devices)
    # What can be scrolled must be reachable by keyboard.
    return (
        '<div class="oc-scroll" tabindex="0" role="group" aria-label="Devices">'
        f'<table class="oc-devices"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _device_row(device: DeviceStatus, view: PanelView, warm: bool) -> str:
    cells = [
        f'<th scope="row" title="{html.escape(f"{device.name}, {device.worker} on {device.host}")}">'
        f"{html.escape(device.id)}</th>",
        _cell(
            f'<span class="oc-dot oc-{html.escape(device.state)}" aria-hidden="true"></span>', device.state
        ),
        _cell(_bar(device.utilisation), percent_text(device.utilisation)),
        _cell(_bar(_memory_percent(device)), memory_text(device)),
        *(
            [_cell("", NOTHING if device.temperature is None else f"{device.temperature:.0f} °C")]
            if warm
            else []
        ),
        _cell("", rate_text(view.rate_of(device.worker)), "oc-number"),
        _cell("", device.work or NOTHING, "oc-work"),
        _cell("", _ago_text(view.at - device.seen)),
        _cell("", str(device.pid or NOTHING), "oc-number"),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _cell(mark: str, text: str, kind: str = "") -> str:
    return (
        f'<td class="{kind}">{mark}{html.escape(text)}</td>'
        if kind
        else f"<td>{mark}{html.escape(text)}</td>"
    )


def _bar(percent: float | None) -> str:
    if percent is None:
        return ""
    width = min(100.0, max(0.0, percent))
    return f'<span class="oc-bar" aria-hidden="true"><span style="width:{width:.0f}%"></span></span>'


def _device_line(device: DeviceStatus, rate: float | None) -> str:
    parts: Sequence[str] = (
        f"{device.id}: {device.state}",
        f"utilisation {percent_text(device.utilisation)}",
        f"memory {memory_text(device)}",
        f"{rate_text(rate)} samples/s",
        device.work or NOTHING,
        f"pid {device.pid or NOTHING}",
    )
    return ", ".join(parts)


# --------------------------------------------------------------------------------------------- values


def _ago_text(seconds: float) -> str:
    """Write how long ago something was; what is usual between two signs of a worker is now."""
    return "now" if seconds < _SILENT_SECONDS else f"{seconds:,.0f} s ago"


def percent_text(percent: float | None) -> str:
    """Write a share; a dash when there is no reading."""
    return NOTHING if percent is None else f"{percent:.0f} %"


def memory_text(device: DeviceStatus) -> str:
    """Write the memory in use and the whole."""
    if device.memory_used is None and device.memory_total is None:
        return NOTHING
    used, total = (NOTHING if s is None else size_text(s) for s in (device.memory_used, device.memory_total))
    return f"{used} of {total}"


def _memory_percent(device: DeviceStatus) -> float | None:
    if device.memory_used is None or not device.memory_total:
        return None
    return 100.0 * device.memory_used / device.memory_total
