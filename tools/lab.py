"""JupyterLab in Chromium, for tests, benchmarks and pictures of the documentation.

with Lab(folder) as lab, lab.page() as page:
    notebook = Notebook(page, lab.open(page, ["1 + 1"]))
    notebook.run(0)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import nbformat

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
]
_SETTINGS = "@jupyterlab/apputils-extension"


class Lab:
    """A JupyterLab server of its own, with its files in ``folder``.

    Parameters
    ----------
    folder : Path
        Where notebooks, settings and the log go.
    dark : bool
        Use the dark theme.
    widgets : bool
        Whether the server knows ipywidgets' front end.
    variables : mapping of str to str
        More environment variables of the server and its kernels.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dark: bool = False,
        widgets: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.widgets = widgets
        self._variables = dict(variables or {})
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self._token = secrets.token_hex(16)
        self._set("themes", {"theme": "JupyterLab Dark" if dark else "JupyterLab Light"})
        self._set("notification", {"fetchNews": "false", "checkForUpdates": False})

    def _set(self, what: str, values: Mapping[str, Any]) -> None:
        path = self.folder / "settings" / _SETTINGS / f"{what}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))

    def __enter__(self) -> Lab:
        command = [
            sys.executable,
            "-m",
            "jupyter",
            "lab",
            "--no-browser",
            "--allow-root",
            "--port",
            str(self.port),
        ]
        command += [f"--ServerApp.root_dir={self.folder}", f"--IdentityProvider.token={self._token}"]
        if not self.widgets:
            disabled = {"disabledExtensions": {"@jupyter-widgets/jupyterlab-manager": True}}
            config = self.folder / "config" / "labconfig" / "page_config.json"
            config.parent.mkdir(parents=True, exist_ok=True)
            config.write_text(json.dumps(disabled))
        environment = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(self.folder / "config"),
            "JUPYTERLAB_SETTINGS_DIR": str(self.folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(self.folder / "workspaces"),
            "JUPYTER_PREFER_ENV_PATH": "1",
            **self._variables,
        }
        self._log = open(self.folder / "lab.log", "w")
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment)
        wait_until(self._is_open, 60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._log.close()

    def _is_open(self) -> bool:
        assert self.process.poll() is None, (self.folder / "lab.log").read_text()[-3000:]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @contextlib.contextmanager
    def page(self, width: int = 1200, height: int = 1400) -> Iterator[Any]:
        """Open a browser; yields Playwright's page."""
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
            try:
                yield browser.new_page(viewport={"width": width, "height": height})
            finally:
                browser.close()

    def open(self, page: Any, cells: Sequence[str], name: str = "work.ipynb") -> Notebook:
        """Write a notebook and open it with a kernel."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook.metadata["kernelspec"] = kernel
        nbformat.write(notebook, self.folder / name)
        page.goto(f"http://127.0.0.1:{self.port}/lab/tree/{name}?token={self._token}&reset")
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
        page.wait_for_selector("#jp-main-statusbar:has-text('| Idle')", timeout=60_000)
        return Notebook(page, self.folder / name)


class Notebook:
    """The notebook that a page shows, which lies in ``path``."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page, self.path = page, path
        self._cells = page.locator(".jp-CodeCell")

    def start(self, number: int) -> None:
        """Press Control-Enter until the cell begins: JupyterLab drops it while it still connects."""
        for _ in range(10):
            self._cells.nth(number).locator(".cm-content").click()
            self.page.keyboard.press("Control+Enter")
            self.page.wait_for_timeout(500)
            if self.prompt(number) != "[ ]:":
                return

    def run(self, number: int, seconds: float = 60) -> None:
        """Run a cell to its end."""
        self.start(number)
        self.wait(number, seconds)

    def wait(self, number: int, seconds: float = 60) -> float:
        """Wait until a cell has ended; return how long that took."""
        return wait_until(lambda: re.fullmatch(r"\[\d+\]:", self.prompt(number)) is not None, seconds)

    def runs(self, number: int) -> bool:
        """Whether a cell runs."""
        return self.prompt(number) == "[*]:"

    def prompt(self, number: int) -> str:
        """Return what stands before a cell."""
        return str(self._cells.nth(number).locator(".jp-InputArea-prompt").inner_text())

    def output(self, number: int) -> Any:
        """Return the place of a cell's output."""
        return self._cells.nth(number).locator(".jp-OutputArea")

    def text(self, number: int) -> str:
        """Return a cell's output as text."""
        return "\n".join(self._cells.nth(number).locator(".jp-OutputArea-output").all_inner_texts())

    def saved(self) -> Any:
        """Save the notebook and return what is saved."""
        before = self.path.stat().st_mtime_ns
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("Control+s")
        # The server empties the file before it writes it.
        wait_until(lambda: self.path.stat().st_mtime_ns != before and self._is_whole(), 20)
        return nbformat.read(self.path, as_version=4)

    def _is_whole(self) -> bool:
        try:
            json.loads(self.path.read_text())
        except ValueError:
            return False
        return True


def wait_until(condition: Callable[[], bool], seconds: float) -> float:
    """Wait until something holds; return how long that took."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > seconds:
            raise AssertionError(f"it did not happen within {seconds} s")
        time.sleep(0.05)
    return time.monotonic() - begin
