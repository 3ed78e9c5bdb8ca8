"""Which form the panel takes, in a kernel's shell whose front end is played by the test."""

from __future__ import annotations

from typing import Any

import pytest

from openclaw_nb.notebook.panel_html import PanelView, Picture, draw
from openclaw_nb.notebook.panel_screen import NotebookScreen

WIDGET = "application/vnd.jupyter.widget-view+json"


class Shell:
    """What a screen needs of a kernel's shell; keeps what is published."""

    kernel = object()

    def __init__(self, *, asks: bool) -> None:
        self.published: list[dict[str, Any]] = []
        self.display_pub = self
        self._asks = asks

    def get_parent(self) -> dict[str, Any]:
        return {"content": {"allow_stdin": self._asks}}

    def publish(self, data: dict[str, Any], **rest: Any) -> None:
        self.published.append(data)


@pytest.fixture
def acted() -> list[tuple[str, str]]:
    return []


def make(
    monkeypatch: pytest.MonkeyPatch, acted: list[tuple[str, str]], *, asks: bool = True
) -> tuple[NotebookScreen, Shell]:
    shell = Shell(asks=asks)
    monkeypatch.setattr("IPython.core.interactiveshell.InteractiveShell.initialized", lambda: True)
    monkeypatch.setattr("IPython.core.interactiveshell.InteractiveShell.instance", lambda: shell)
    monkeypatch.setattr("IPython.display.display", lambda data, **rest: shell.published.append(data))
    return NotebookScreen(lambda what, run_id: acted.append((what, run_id))), shell


def picture(doing: str, run_id: str = "") -> Picture:
    return draw(PanelView(name="c", doing=doing, run_id=run_id))


def hear(screen: NotebookScreen, **message: Any) -> None:
    """Say something as the widget's script does."""
    widget: Any = screen._widget
    widget._handle_custom_msg(message, [])


def test_it_becomes_a_widget_while_a_cell_runs_and_html_at_rest(
    monkeypatch: pytest.MonkeyPatch, acted: list[tuple[str, str]]
) -> None:
    screen, shell = make(monkeypatch, acted)
    screen.show(picture("idle"))
    assert WIDGET in shell.published[-1]  # to see whether anything answers
    screen.update(picture("a"), blocking=False)
    assert WIDGET not in shell.published[-1]
    hear(screen, kind="here")
    screen.update(picture("b", "run-1"), blocking=True)
    assert WIDGET in shell.published[-1]
    count = len(shell.published)
    screen.update(picture("c", "run-1"), blocking=True)
    assert len(shell.published) == count  # the widget changes by itself
    assert screen._widget is not None
    assert "c" in screen._widget.head
    assert (screen._widget.run, screen._widget.blocking) == ("run-1", True)
    screen.update(picture("d"), blocking=False)
    assert WIDGET not in shell.published[-1]
    assert "d" in shell.published[-1]["text/html"]


def test_html_moves_where_no_script_answers(
    monkeypatch: pytest.MonkeyPatch, acted: list[tuple[str, str]]
) -> None:
    screen, shell = make(monkeypatch, acted)
    screen.show(picture("idle"))
    for doing in "abc":
        screen.update(picture(doing, "run-1"), blocking=True)
        assert WIDGET not in shell.published[-1]
        assert doing in shell.published[-1]["text/plain"]
    assert len(shell.published) == 4


def test_what_executes_notebooks_gets_html_alone(
    monkeypatch: pytest.MonkeyPatch, acted: list[tuple[str, str]]
) -> None:
    screen, shell = make(monkeypatch, acted, asks=False)
    screen.show(picture("idle"))
    assert list(shell.published[-1]) == ["text/html", "text/plain"]
    assert screen._widget is None


def test_buttons_are_told_with_their_run(
    monkeypatch: pytest.MonkeyPatch, acted: list[tuple[str, str]]
) -> None:
    screen, _ = make(monkeypatch, acted)
    screen.show(picture("idle"))
    hear(screen, kind="interrupt", run="run-1")
    hear(screen, kind="stop", run="run-2")
    for strange in ({"kind": "delete", "run": "run-1"}, {"kind": "stop"}, {"kind": "seen", "seen": "no"}, {}):
        hear(screen, **strange)
    assert acted == [("interrupt", "run-1"), ("stop", "run-2")]


def test_it_knows_whether_anybody_may_look(
    monkeypatch: pytest.MonkeyPatch, acted: list[tuple[str, str]]
) -> None:
    screen, _ = make(monkeypatch, acted)
    screen.show(picture("idle"))
    assert screen.watched
    hear(screen, kind="seen", seen=False)
    assert not screen.watched
    hear(screen, kind="here")
    assert screen.watched


def test_the_kernels_id_is_in_the_name_of_its_connection_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from openclaw_nb.notebook import panel_widget

    monkeypatch.setattr("ipykernel.connect.get_connection_file", lambda: "/run/kernel-12-ab.json")
    assert panel_widget._kernel_id() == "12-ab"
    monkeypatch.setattr("ipykernel.connect.get_connection_file", lambda: "/run/mine.json")
    assert panel_widget._kernel_id() == ""
