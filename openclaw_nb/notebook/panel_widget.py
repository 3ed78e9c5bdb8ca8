"""The panel's live form: a widget that holds the parts of a picture; its script is `panel.js`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import traitlets

from openclaw_nb.notebook.panel_changes import PartChanges
from openclaw_nb.notebook.panel_html import PANEL_STYLE, Picture

_PARTS = ("head", "devices", "measured")

_BUTTON_STYLE = """
.oc-panel .oc-buttons { display: flex; flex-wrap: wrap; align-items: center; gap: 8px; margin-bottom: 8px; }
.oc-panel .oc-buttons[hidden] { display: none; }
.oc-panel .oc-buttons button { font: inherit; padding: 3px 12px; border-radius: 3px; cursor: pointer;
  color: inherit; background: transparent; border: 1px solid currentColor; }
.oc-panel .oc-buttons button:hover { background: rgba(128, 128, 128, 0.2); }
.oc-panel .oc-buttons button:focus-visible { outline: 2px solid #2f7fd0; outline-offset: 1px; }
"""


class PanelWidget(anywidget.AnyWidget):
    """What the front end shows while a cell runs; of a part, only what changes is sent.

    Attributes
    ----------
    head, devices, measured : str
        The parts of a `Picture`, as they were when they were last sent whole.
    changes : dict
        By part, the tokens that have changed since then: see `PartChanges`.
    run : str
        The cell that the buttons are for; "" hides them.
    blocking : bool
        Whether that cell keeps the kernel, so that only its stop button is heard.
    kernel_id : str
        By which Jupyter's server knows this kernel; "" when it was not started by one.
    """

    _esm = Path(__file__).with_name("panel.js").read_text("utf-8")
    _css = PANEL_STYLE + _BUTTON_STYLE

    head = traitlets.Unicode().tag(sync=True)
    devices = traitlets.Unicode().tag(sync=True)
    measured = traitlets.Unicode().tag(sync=True)
    changes = traitlets.Dict().tag(sync=True)
    run = traitlets.Unicode().tag(sync=True)
    blocking = traitlets.Bool().tag(sync=True)
    kernel_id = traitlets.Unicode().tag(sync=True)

    def __init__(self) -> None:
        super().__init__(kernel_id=_kernel_id())
        self._sent = {name: PartChanges() for name in _PARTS}

    def show(self, picture: Picture, *, blocking: bool) -> None:
        """Change what differs, in one message."""
        for name, part in self._sent.items():
            part.take(getattr(picture, name))
        with self.hold_sync():
            for name, part in self._sent.items():
                setattr(self, name, part.base)
            self.changes = {name: part.changes for name, part in self._sent.items()}
            self.run, self.blocking = picture.run_id, blocking

    @property
    def mime(self) -> dict[str, Any]:
        """What displays a view of it."""
        content = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return {"application/vnd.jupyter.widget-view+json": content}


def _kernel_id() -> str:
    from ipykernel.connect import get_connection_file

    try:
        name = Path(get_connection_file()).stem
    except RuntimeError:  # no kernel
        return ""
    return name.removeprefix("kernel-") if name.startswith("kernel-") else ""
