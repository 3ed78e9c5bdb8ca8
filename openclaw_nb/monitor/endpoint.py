"""A small HTTP server that answers ``GET /metrics`` with a text, from a thread of its own.

Knows HTTP and one secret; what the text says is the business of who makes it.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from openclaw_nb.core.errors import UsageError
from openclaw_nb.monitor.prometheus import CONTENT_TYPE

_PATH = "/metrics"
_CLIENT_SECONDS = 5.0
_LOOK_SECONDS = 0.1  # how often the thread looks whether it is to end
_log = logging.getLogger(__name__)


class Endpoint:
    """Serves a text until it is closed.

    Parameters
    ----------
    collect : callable
        Returns the text; called for each request, on a thread of its own.
    host : str
        The address to listen on.
    port : int
        The port; 0 takes one that is free.
    token : str
        What a client must show (``Authorization: Bearer``); "" lets all in who reach the port.

    Raises
    ------
    UsageError
        When the port cannot be had.

    Examples
    --------
    >>> endpoint = Endpoint(lambda: "answer 42")
    >>> from urllib.request import urlopen
    >>> urlopen(endpoint.url).read()
    b'answer 42'
    >>> endpoint.close()
    """

    def __init__(
        self, collect: Callable[[], str], host: str = "127.0.0.1", port: int = 0, token: str = ""
    ) -> None:
        try:
            self._server = _Server(collect, host, port, token)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"Metrics cannot be served at {host}:{port}: {getattr(error, 'strerror', None) or error}. Give another "
                "port (0 takes one that is free), or an address of this host."
            ) from error
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_LOOK_SECONDS,),
            name="openclaw-metrics",
            daemon=True,
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the text is."""
        return f"http://{self.host}:{self.port}{_PATH}"

    def close(self) -> None:
        """Serve no more; the port is free again."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that says nothing keeps nobody waiting

    def __init__(self, collect: Callable[[], str], host: str, port: int, token: str) -> None:
        self.collect, self.token = collect, token
        super().__init__((host, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        # Whoever is gone, or speaks no HTTP, is no concern of the notebook in which this would be printed.
        _log.debug("A client of the metrics failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "openclaw", ""
    timeout = _CLIENT_SECONDS

    def do_GET(self) -> None:
        if not self._may_read():
            self._answer(HTTPStatus.UNAUTHORIZED, "The token is needed: Authorization: Bearer TOKEN.\n")
        elif self.path.partition("?")[0] != _PATH:
            self._answer(HTTPStatus.NOT_FOUND, f"Metrics are at {_PATH}.\n")
        else:
            self._answer(*self._collected())

    def _collected(self) -> tuple[HTTPStatus, str]:
        try:
            return HTTPStatus.OK, self.server.collect()
        except Exception as error:  # noqa: BLE001 - whoever asks is told, and the next may have better luck
            _log.debug("The metrics could not be collected", exc_info=True)
            return HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}\n"

    def _may_read(self) -> bool:
        shown = self.headers.get("Authorization", "")
        wanted = f"Bearer {self.server.token}"
        return not self.server.token or hmac.compare_digest(shown.encode(errors="replace"), wanted.encode())

    def _answer(self, status: HTTPStatus, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        _log.debug(format, *args)
