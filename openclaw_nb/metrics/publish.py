"""The endpoint of this process, and how other processes of this user find it.

    Metrics.serve ──> Endpoint on a port
                  └─> a note in the runtime directory ──> `find_published`, for the command line

Loopback needs no token. Any other address needs one: it is in a file that only this user can read, and stays the same,
so that Prometheus can be told of it once.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openclaw_nb.cluster.files import process_start, runtime_directory, write_private
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.config.settle import is_loopback
from openclaw_nb.core.errors import UsageError
from openclaw_nb.metrics.collect import collect
from openclaw_nb.monitor.endpoint import Endpoint
from openclaw_nb.monitor.store import Monitor

DEFAULT_PORT = 9464
"""Where metrics are served when nobody says where; another port is taken when something else listens there."""

_WILDCARDS = ("", "0.0.0.0")
_TOKEN_FILE = "metrics-token"
_NOTE = "metrics-{pid}.json"


@dataclass(frozen=True)
class Published:
    """An endpoint of one of this user's processes.

    Attributes
    ----------
    pid : int
        The process.
    host, port
        Where it listens.
    token_file : str
        The file with the token that a client must show; "" where none is needed.
    """

    pid: int
    host: str
    port: int
    token_file: str = ""

    @property
    def target(self) -> str:
        """What Prometheus is told: a name or address, and the port."""
        return f"{socket.gethostname() if self.host in _WILDCARDS else self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Where the metrics are."""
        return f"http://{self.target}/metrics"

    @property
    def local_url(self) -> str:
        """Where they are for a process of this host."""
        return f"http://{'127.0.0.1' if self.host in _WILDCARDS else self.host}:{self.port}/metrics"

    @property
    def token(self) -> str:
        """What a client must show; "" where nothing is needed."""
        return Path(self.token_file).read_text().strip() if self.token_file else ""

    def __repr__(self) -> str:
        token = f" (with the token in {self.token_file}, unencrypted)" if self.token_file else ""
        return f"Metrics of process {self.pid}: {self.url}{token}"


class Metrics:
    """Serves what this process knows of its cluster, from `serve` to `stop`, also from one cluster to the next.

    Parameters
    ----------
    find_master : callable
        Returns the master of the cluster that runs, or None.
    monitor : Monitor
        What strategy cells have measured.
    """

    def __init__(self, find_master: Callable[[], MasterNode | None], monitor: Monitor) -> None:
        self._find_master = find_master
        self._monitor = monitor
        self._endpoint: Endpoint | None = None
        self._lock = threading.Lock()
        self.published: Published | None = None

    def serve(self, host: str | None = None, port: int | None = None) -> Published:
        """Serve metrics; what is served already goes on unless it is asked for elsewhere.

        Parameters
        ----------
        host : str, optional
            The address to listen on, loopback when not given. Any other needs a token of its clients.
        port : int, optional
            The port; 0 for one that is free. When not given, `DEFAULT_PORT`, or one that is free.

        Raises
        ------
        UsageError
            When it cannot be listened there.
        """
        with self._lock:
            before = self.published
            if before is not None and host in (None, before.host) and port in (None, 0, before.port):
                return before
            self._stop()
            return self._serve(host or "127.0.0.1", port)

    def _serve(self, host: str, port: int | None) -> Published:
        host = "127.0.0.1" if host == "localhost" else host
        directory = runtime_directory()
        token_file = "" if is_loopback(host) else str(_token_file(directory))
        published = Published(os.getpid(), host, 0, token_file)
        self._endpoint = self._open(host, port, published.token)
        self.published = Published(os.getpid(), host, self._endpoint.port, token_file)
        note = {**asdict(self.published), "started": process_start(os.getpid())}
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self._note, note)
        atexit.register(self._note.unlink, missing_ok=True)
        return self.published

    def _open(self, host: str, port: int | None, token: str) -> Endpoint:
        def text() -> str:
            return collect(self._find_master(), self._monitor)

        if port is not None:
            return Endpoint(text, host, port, token)
        try:
            return Endpoint(text, host, DEFAULT_PORT, token)
        except UsageError as error:
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
            return Endpoint(text, host, 0, token)

    def stop(self) -> bool:
        """Serve no more; return whether anything was served."""
        with self._lock:
            return self._stop()

    def _stop(self) -> bool:
        endpoint, self._endpoint, self.published = self._endpoint, None, None
        if endpoint is None:
            return False
        endpoint.close()
        self._note.unlink(missing_ok=True)
        return True

    @property
    def _note(self) -> Path:
        return runtime_directory() / _NOTE.format(pid=os.getpid())


def find_published() -> list[Published]:
    """Return the endpoints of this user's processes on this host."""
    notes = (_read(path) for path in sorted(runtime_directory().glob(_NOTE.format(pid="*"))))
    return [published for note in notes if (published := _alive(note)) is not None]


def _read(path: Path) -> dict[str, Any]:
    try:
        note = json.loads(path.read_text()) if path.stat().st_uid == os.getuid() else {}
    except (OSError, ValueError):  # removed meanwhile, or none of ours
        return {}
    return note if isinstance(note, dict) else {}


def _alive(note: dict[str, Any]) -> Published | None:
    try:
        started, published = note.pop("started"), Published(**note)
        now = process_start(published.pid)
    except (KeyError, TypeError):
        return None
    return published if now is not None and abs(now - started) < 1 else None


def _token_file(directory: Path) -> Path:
    """Return the file with the token; make one where there is none."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / _TOKEN_FILE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32))
    return path
