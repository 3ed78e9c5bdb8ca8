"""Names with HTML in them show as they are, wherever names show: nothing that a browser would take for its own.

The panel's are in `test_panel`, the charts' in `test_figures`.
"""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import pytest

from openclaw_nb.cluster.devices import Device
from openclaw_nb.cluster.status import DeviceStatus
from openclaw_nb.notebook import tables
from openclaw_nb.notebook.certificate import Certificate
from openclaw_nb.notebook.figures import PLOTLY_MIME, RunFigures
from openclaw_nb.notebook.live import _rich
from openclaw_nb.notebook.merge import Block
from openclaw_nb.notebook.progress import ProgressBar
from openclaw_nb.notebook.transcript import Display

from .test_figures import history

EVIL = "<img src=x onerror=\"alert('1')\">&<b>bold</b>"


class Tags(HTMLParser):
    """The tags and the text of what a browser would draw."""

    def __init__(self, drawn: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.values: list[str | None] = []
        self.feed(drawn)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.values += [value for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


class Master:
    """A cluster's records, all of whose names are as bad as can be."""

    name = communication = backend = problem = EVIL
    epoch = 1

    def get_device_status(self) -> list[DeviceStatus]:
        texts = dict.fromkeys(("id", "worker", "host", "name", "state", "work"), EVIL)
        none = dict.fromkeys(("utilisation", "memory_used", "memory_total", "temperature", "power", "pid"))
        return [DeviceStatus(**texts, **none, seen=0.0)]  # type: ignore[arg-type]


def certificate() -> Certificate:
    row: dict[str, Any] = {"step": 1, "loss": 1.0, "gradient": 1.0, "state": 1.0, "loss_name": EVIL}
    row |= {"gradient_name": EVIL, "state_name": EVIL, "limits": {"loss": 0.0, "gradient": 0.0, "state": 0.0}}
    parted = {"step": 1, "kind": "gradient", "name": EVIL, "difference": 1.0, "limit": 0.0}
    return Certificate(
        {"strategy": EVIL, "num_ranks": 2, "rows": [row], "parted": parted, "reason": EVIL, "notes": [EVIL]}
    )


CLUSTER = {"name": EVIL, "runs": True, "detached": False, "alive": True, "owner_pid": EVIL}


@pytest.mark.parametrize(
    ("drawn", "count"),
    [
        (tables.status_table(Master())._repr_html_(), 4),  # type: ignore[arg-type]
        (tables.device_table([Device(EVIL, "cpu", 0, EVIL)], {EVIL: [EVIL]})._repr_html_(), 3),
        (tables.cluster_table([CLUSTER], 1)._repr_html_(), 2),
        (certificate()._repr_html_(), 5),
        (ProgressBar(EVIL, in_notebook=True)._html(1, 2, EVIL), 2),
    ],
    ids=["status", "devices", "clusters", "certificate", "progress"],
)
def test_names_show_as_they_are(drawn: str, count: int) -> None:
    parsed = Tags(drawn)
    assert not parsed.tags & {"img", "b", "script"}
    assert parsed.text.count(EVIL) >= count


def test_what_a_cell_displays_is_its_own_business_and_its_label_is_ours() -> None:
    """A display is passed on as it came; what is put before it holds numbers of ranks alone."""
    shown = Display({"text/html": EVIL}, {})
    label, display = _rich(Block((1,), (shown,)), 4, ())
    assert display[0]["text/html"] == EVIL
    assert Tags(label[0]["text/html"]).text == "[rank 1]"


def test_figures_hold_no_name_that_is_not_a_number() -> None:
    """plotly takes some HTML in texts; all texts are ours, and workers are named by their numbers."""
    bundle = RunFigures(history())._repr_mimebundle_()
    specification = json.dumps(bundle[PLOTLY_MIME])
    assert "<" not in specification
    names = {trace["name"] for trace in bundle[PLOTLY_MIME]["data"]}
    assert names == {"all workers", "worker 0", "worker 1", "loss"}
