"""Where workers come to: the listener of one master, its secret, address and audit log in the cluster's folder.

Knows files and ports; who comes in is the `Desk`'s.
"""

from __future__ import annotations

from pathlib import Path

from openclaw_nb.cluster.join.audit import AuditLog
from openclaw_nb.cluster.join.channel import Answer, Listener
from openclaw_nb.cluster.join.secret import TOKEN_FILE, JoinSecret, read_token, write_address
from openclaw_nb.core.errors import PortInUseError

DEFAULT_PORT = 50051
ADDRESS_FILE = "join.json"
"""Beside the files of a cluster: where its master listens for workers."""

_AUDIT_FILE = "joins.log"


class Gate:
    """One master's port.

    Parameters
    ----------
    directory : str
        The cluster's folder.

    Attributes
    ----------
    host, port : str, int
        Where it listens.
    audit : AuditLog
        Who came, and who was turned away.
    """

    def __init__(self, directory: str) -> None:
        self._folder = Path(directory)
        self.audit = AuditLog(self._folder / _AUDIT_FILE)
        self.host, self.port = "", 0
        self._listener: Listener | None = None

    @property
    def token_file(self) -> str:
        """The file with the join token, for this user alone."""
        return str(self._folder / TOKEN_FILE)

    def open(self, host: str, port: int | None, answer: Answer, *, or_any: bool = False) -> None:
        """Begin to listen.

        Parameters
        ----------
        host : str
            The address.
        port : int or None
            0 for a free one, None for 50051 or, where that is taken, a free one.
        answer : callable
            As for `Listener`.
        or_any : bool
            Take a free one instead of a port that is taken.

        Raises
        ------
        UsageError
            When the port cannot be had.
        """
        # A master that has attached goes on with the secret that workers were given before.
        secret = read_token(self.token_file) if Path(self.token_file).exists() else JoinSecret.new()
        wanted = DEFAULT_PORT if port is None else port
        self._listener = Listener(secret, answer, self.audit)
        try:
            self.port = self._listener.open(host, wanted)
        except PortInUseError:
            if port is not None and not or_any:
                raise
            self._listener = Listener(secret, answer, self.audit)
            self.port = self._listener.open(host, 0)
        self.host = host
        write_address(self._folder / ADDRESS_FILE, host, self.port, secret)
        self.audit.write(f"listening on {host}:{self.port}")

    def close(self) -> None:
        """Stop listening. Safe to call again."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
