"""The join secret: one token, from which both sides derive the keys of CurveZMQ.

    token (256 random bits, as text) ──HMAC-SHA256──> the master's key pair
                                     └─────────────> the key pair of workers

Each side proves that it knows the token before the other reads a word of it; the token itself never travels. It is in a
file of mode 0600 in the cluster's folder. Knows keys and files; does not know sockets.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from base64 import urlsafe_b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from openclaw_nb.core.errors import UsageError

TOKEN_VARIABLE = "OPENCLAW_TOKEN"
TOKEN_FILE_VARIABLE = "OPENCLAW_TOKEN_FILE"
TOKEN_FILE = "join-token"
_TOKEN_BYTES = 32
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")
_MASTER, _WORKER = b"openclaw join: master", b"openclaw join: worker"


@dataclass(frozen=True)
class KeyPair:
    """Keys of one side, as ZeroMQ takes them (z85); the secret half is not shown."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()})"


class JoinSecret:
    """What a master and its workers know, and nobody else.

    Parameters
    ----------
    token : str
        43 letters, digits, ``-`` and ``_``.
    source : str
        Where it comes from, for messages, which never show it.

    Raises
    ------
    UsageError
        For what is no token.
    """

    def __init__(self, token: str, source: str = "the token that was given") -> None:
        token = token.strip()
        if not _TOKEN.fullmatch(token):
            raise UsageError(
                f"{source[0].upper()}{source[1:]} is no join token: it has {len(token)} characters, and a token has 43 "
                f"letters, digits, '-' and '_'. The master keeps it in its cluster's folder, in the file {TOKEN_FILE}."
            )
        self.token = token
        self.source = source
        key = urlsafe_b64decode(token + "=")
        self.master = _key_pair(key, _MASTER)
        self.worker = _key_pair(key, _WORKER)

    @classmethod
    def new(cls) -> JoinSecret:
        """Make a fresh one."""
        return cls(secrets.token_urlsafe(_TOKEN_BYTES))

    def __repr__(self) -> str:
        return f"<JoinSecret from {self.source}>"


def _key_pair(key: bytes, purpose: bytes) -> KeyPair:
    import zmq
    from zmq.utils import z85

    secret = z85.encode(hmac.digest(key, purpose, hashlib.sha256))
    return KeyPair(zmq.curve_public(secret), secret)


def given_secret(token: str | None, environment: Mapping[str, str]) -> JoinSecret | None:
    """Return the secret that was given: an argument, ``OPENCLAW_TOKEN``, or the file of ``OPENCLAW_TOKEN_FILE``.

    Raises
    ------
    UsageError
        For what is no token, or a file that others can read.
    """
    if token is not None:
        return JoinSecret(token)
    if TOKEN_VARIABLE in environment:
        return JoinSecret(environment[TOKEN_VARIABLE], TOKEN_VARIABLE)
    if TOKEN_FILE_VARIABLE in environment:
        return read_token(environment[TOKEN_FILE_VARIABLE])
    return None


def read_token(path: str | os.PathLike[str]) -> JoinSecret:
    """Return the secret of a token file.

    Raises
    ------
    UsageError
        When it cannot be read, others than this user could, or it holds no token.
    """
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        text = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise UsageError(f"The token file {path} cannot be read: {error.strerror}.") from None
    if mode & 0o077:
        raise UsageError(
            f"The token file {path} has mode {mode:04o}: others could read or change it. chmod 600 {path}"
        )
    return JoinSecret(text, f"the file {path}")


@dataclass(frozen=True)
class Address:
    """Where somebody of this user listens for workers, or for masters that call."""

    host: str
    port: int
    token_file: str


def write_address(note: Path, host: str, port: int, secret: JoinSecret) -> None:
    """Leave a token beside a note of where it is good, both for this user alone."""
    token_file = note.with_name(TOKEN_FILE)
    _write(token_file, secret.token)
    _write(note, json.dumps({"host": host, "port": port}))


def read_address(note: Path) -> Address | None:
    """Return what such a note says; None for one that is not this user's, or no longer there."""
    try:
        if note.stat().st_uid != os.getuid():
            return None
        content = json.loads(note.read_text())
        return Address(str(content["host"]), int(content["port"]), str(note.with_name(TOKEN_FILE)))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(new, path)
