"""The panel's live form: a widget that holds the parts of a picture; its script is `panel.js`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import traitlets

from openclaw_nb.notebook.panel_html import PANEL_STYLE, Picture

_BUTTON_STYLE = """
.oc-panel .oc-buttons { display: flex; flex-wrap: wrap; align-items: center; gap: 8px; margin-bottom: 8px; }
.oc-panel .oc-buttons[hidden] { display: none; }
.oc-panel .oc-buttons button { font: inherit; padding: 3px 12px; border-radius: 3px; cursor: pointer;
  color: inherit; background: transparent; border: 1px solid currentColor; }
.oc-panel .oc-buttons button:hover { background: rgba(128, 128, 128, 0.2); }
.oc-panel .oc-buttons button:focus-visible { outline: 2px solid #2f7fd0; outline-offset: 1px; }
"""


class PanelWidget(anywidget.AnyWidget):
    """What the front end shows while a cell runs; a part is sent only when it changes.

    Attributes
    ----------
    head, devices, measured : str
        See `Picture`.
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
    run = traitlets.Unicode().tag(sync=True)
    blocking = traitlets.Bool().tag(sync=True)
    kernel_id = traitlets.Unicode().tag(sync=True)

    def __init__(self) -> None:
        super().__init__(kernel_id=_kernel_id())

    def show(self, picture: Picture, *, blocking: bool) -> None:
        """Change what differs, in one message."""
        with self.hold_sync():
            self.head, self.devices, self.measured = picture.head, picture.devices, picture.measured
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
