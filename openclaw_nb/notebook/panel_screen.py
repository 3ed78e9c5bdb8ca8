"""Where the panel is shown: one display of the notebook, in one of two forms.

    at rest           HTML in the cell's output: what is saved, converted, printed
    while a cell runs a widget: parts that change by themselves, and buttons; HTML again where none answers

The widget's form is taken only once its script has said that it is there, so that a front end without a widget
manager, or one that cannot load it, sees the same picture by the other way.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from openclaw_nb.notebook.panel_html import Picture

if TYPE_CHECKING:
    from openclaw_nb.notebook.panel_widget import PanelWidget

Act = Callable[[str, str], None]
"""Carries out what a button asks for: ``interrupt`` or ``stop``, and the run that it was meant for."""


class Screen(Protocol):
    """A display that can be changed."""

    @property
    def live(self) -> bool:
        """Whether it can be changed."""

    @property
    def watched(self) -> bool:
        """Whether anybody may be looking at it."""

    def show(self, picture: Picture) -> None:
        """Display a picture in the cell that runs now."""

    def update(self, picture: Picture, *, blocking: bool) -> None:
        """Change every display that `show` has opened; may come from any thread.

        ``blocking`` says that the cell that runs keeps the notebook's kernel.
        """


class NotebookScreen:
    """A display of its own in the notebook.

    Keeps the publisher of the moment it is made: a cell that captures its output replaces it for a while, and
    a thread's updates would be caught with it.

    Parameters
    ----------
    act : callable
        Told what a button asks for, on the thread that the kernel hears front ends on.
    """

    def __init__(self, act: Act) -> None:
        from IPython.core.interactiveshell import InteractiveShell

        self._shell: Any = InteractiveShell.instance() if InteractiveShell.initialized() else None
        self._publisher = self._shell.display_pub if self._shell is not None else None
        self._display_id = f"openclaw-panel-{uuid.uuid4().hex}"
        self._act = act
        self._widget: PanelWidget | None = None
        self._answered = self._shows_widget = False
        self._seen = True

    @property
    def live(self) -> bool:
        """Whether a display can be changed here: in a kernel, not in a terminal."""
        return getattr(self._shell, "kernel", None) is not None

    @property
    def watched(self) -> bool:
        """Whether anybody may be looking at it: the front end has not said that it is out of sight."""
        return self._seen

    def show(self, picture: Picture) -> None:
        """Display a picture in the cell that runs now."""
        from IPython.display import display

        if self._widget is None and self._has_a_person():
            self._widget = self._make_widget()
        if self._widget is not None:
            self._widget.show(picture, blocking=False)
        self._shows_widget = self._widget is not None
        display(self._bundle(picture), raw=True, display_id=self._display_id)

    def update(self, picture: Picture, *, blocking: bool) -> None:
        """Change the display, wherever it is."""
        live = self._answered and bool(picture.run_id)
        if self._widget is not None and live:
            self._widget.show(picture, blocking=blocking)
            if self._shows_widget:
                return
        self._shows_widget = live
        if self._publisher is not None:
            transient = {"display_id": self._display_id}
            self._publisher.publish(data=self._bundle(picture), metadata={}, transient=transient, update=True)

    def _bundle(self, picture: Picture) -> dict[str, Any]:
        bundle: dict[str, Any] = picture.bundle()
        if self._widget is not None and self._shows_widget:
            bundle |= self._widget.mime
        return bundle

    def _has_a_person(self) -> bool:
        """Whether somebody can press a button: what executes notebooks lets cells ask nobody for input."""
        if not self.live:
            return False
        request = self._shell.get_parent().get("content", {})
        return bool(request.get("allow_stdin", False))

    def _make_widget(self) -> PanelWidget:
        # Costs a moment, and only front ends with a person need it.
        from openclaw_nb.notebook.panel_widget import PanelWidget

        widget = PanelWidget()
        widget.on_msg(self._hear)
        return widget

    def _hear(self, widget: Any, message: Any, buffers: Any) -> None:
        match message:
            case {"kind": "here"}:
                self._answered = self._seen = True
            case {"kind": "seen", "seen": bool(seen)}:
                self._seen = seen
            case {"kind": "interrupt" | "stop" as what, "run": str(run_id)}:
                self._act(what, run_id)
