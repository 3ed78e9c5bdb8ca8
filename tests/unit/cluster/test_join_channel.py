"""The port on which workers join: who does not know the secret gets nothing, costs nothing and stops nobody."""

from __future__ import annotations

import os
import random
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from openclaw_nb.cluster.join.audit import AuditLog
from openclaw_nb.cluster.join.channel import NO_WORKER, UNREADABLE, WRONG_TOKEN, Caller, Listener
from openclaw_nb.cluster.join.gate import Gate
from openclaw_nb.cluster.join.ports import check_host, parse_address, speaks_zeromq
from openclaw_nb.cluster.join.secret import JoinSecret, given_secret, read_token
from openclaw_nb.core.errors import (
    JoinError,
    NotReachedError,
    NotTrustedError,
    PortInUseError,
    UsageError,
)
from openclaw_nb.protocol.messages import Leave, Refused, Standing

MESSAGE = Leave(protocol=8, ticket="t")
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


class Desk:
    """Answers everything, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def answer(self, message: dict[str, Any], who: str) -> Any:
        self.asked.append(message)
        if message.get("ticket") == "no":
            return Refused(reason="not you")
        if message.get("ticket") == "bug":
            raise KeyError("bug")
        return Standing(stage="joined", worker=3)


@pytest.fixture
def secret() -> JoinSecret:
    return JoinSecret.new()


@pytest.fixture
def audit(tmp_path: Path) -> AuditLog:
    return AuditLog(tmp_path / "joins.log")


@pytest.fixture
def port(secret: JoinSecret, audit: AuditLog) -> Iterator[int]:
    listener = Listener(secret, Desk().answer, audit)
    yield listener.open("127.0.0.1", 0)
    listener.close()


def ask(port: int, secret: JoinSecret, ticket: str = "t") -> Standing:
    with Caller("127.0.0.1", port, secret) as caller:
        return caller.ask(Leave(protocol=8, ticket=ticket), 30)


def audited(audit: AuditLog, words: str) -> None:
    deadline = time.monotonic() + 30
    while not any(words in line for line in audit.lines()):
        assert time.monotonic() < deadline, audit.lines()
        time.sleep(0.02)


def garbage(port: int, draw: random.Random) -> None:
    """One stranger: random bytes, a truncated handshake, another protocol, a huge frame announced, or nothing."""
    kinds = (
        draw.randbytes(draw.randrange(1, 300)),
        GREETING[: draw.randrange(1, len(GREETING))],
        GREETING + b"\x04" + bytes([draw.randrange(256)]) + draw.randbytes(draw.randrange(100)),
        GREETING + b"\x06" + struct.pack(">Q", 2**62),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"",
    )
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stream:
        stream.sendall(draw.choice(kinds))
        if draw.random() < 0.3:  # gone without a farewell
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def flood(port: int, secret: JoinSecret, count: int) -> tuple[int, int]:
    """Send strangers, with an honest caller among them; return how many bytes and descriptors they have cost."""
    draw, process = random.Random(7), psutil.Process()
    for _ in range(200):  # what is allocated once
        garbage(port, draw)
    before, descriptors = process.memory_info().rss, process.num_fds()
    for number in range(count):
        garbage(port, draw)
        if number % 100 == 0:
            assert ask(port, secret).stage == "joined"
    deadline = time.monotonic() + 30
    while process.num_fds() > descriptors + 8 and time.monotonic() < deadline:
        time.sleep(0.05)
    return process.memory_info().rss - before, process.num_fds() - descriptors


def test_who_knows_the_secret_is_answered(port: int, secret: JoinSecret) -> None:
    assert ask(port, secret) == Standing(stage="joined", worker=3)
    assert ask(port, JoinSecret(secret.token)).worker == 3
    with pytest.raises(JoinError, match=r"^not you$"):
        ask(port, secret, "no")
    with pytest.raises(JoinError, match="could not answer: KeyError"):
        ask(port, secret, "bug")
    assert ask(port, secret).worker == 3


def test_a_wrong_token_is_noted(port: int, audit: AuditLog) -> None:
    with pytest.raises(NotTrustedError):
        ask(port, JoinSecret.new())
    audited(audit, WRONG_TOKEN)


def test_a_worker_with_a_key_of_its_own_is_not_let_in(port: int, secret: JoinSecret, audit: AuditLog) -> None:
    other = JoinSecret.new()
    other.master = secret.master
    with pytest.raises(NotTrustedError):
        ask(port, other)
    audited(audit, WRONG_TOKEN)


def test_an_unreadable_message_of_somebody_trusted_is_noted(
    port: int, secret: JoinSecret, audit: AuditLog
) -> None:
    with Caller("127.0.0.1", port, secret) as caller:
        caller._socket.send_multipart([b"1", b"[" * 50_000])
        caller._socket.send_multipart([b"no", b"message", b"at all"])
        audited(audit, UNREADABLE)
        assert caller.ask(MESSAGE, 30).worker == 3


def test_nobody_there(secret: JoinSecret) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        with pytest.raises(NotReachedError, match="nobody listens"):
            ask(taken.getsockname()[1], secret)


def test_hundreds_of_strangers_cost_nothing(port: int, secret: JoinSecret, audit: AuditLog) -> None:
    grown, descriptors = flood(port, secret, 300)
    assert grown < 8 * 1024**2
    assert descriptors <= 8
    audited(audit, NO_WORKER)
    assert len(audit.lines()) < 20


@pytest.mark.soak
def test_ten_thousand_strangers_cost_nothing(port: int, secret: JoinSecret, audit: AuditLog) -> None:
    grown, descriptors = flood(port, secret, 10_000)
    assert grown < 8 * 1024**2
    assert descriptors <= 8


def test_strangers_that_stay_are_hung_up_on(port: int, secret: JoinSecret) -> None:
    process = psutil.Process()
    before = process.num_fds()
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(400)]
    try:
        deadline = time.monotonic() + 30
        while process.num_fds() - before - len(held) > 300:  # both ends are this process's
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert ask(port, secret).worker == 3
    finally:
        for each in held:
            each.close()


def test_a_port_in_use_names_its_holder(
    port: int, secret: JoinSecret, audit: AuditLog, tmp_path: Path
) -> None:
    with pytest.raises(
        PortInUseError, match=rf"Port {port} of 127.0.0.1 is in use by process {os.getpid()} "
    ):
        Listener(secret, Desk().answer, audit).open("127.0.0.1", port)
    gate = Gate(str(tmp_path))
    gate.open("127.0.0.1", port, Desk().answer, or_any=True)
    assert gate.port not in (0, port)
    assert stat.S_IMODE(os.stat(gate.token_file).st_mode) == 0o600
    token = read_token(gate.token_file).token
    gate.close()
    gate.open("127.0.0.1", 0, Desk().answer)
    assert read_token(gate.token_file).token == token  # workers that were given it can still join
    gate.close()


def test_tokens_are_checked_and_never_shown(tmp_path: Path, secret: JoinSecret) -> None:
    assert secret.token not in repr(secret) + repr(secret.master) + repr(secret.worker)
    with pytest.raises(UsageError, match="no join token: it has 7 characters") as caught:
        JoinSecret("hunter2")
    assert "hunter2" not in str(caught.value)
    file = tmp_path / "token"
    file.write_text(f"{secret.token}\n")
    file.chmod(0o644)
    with pytest.raises(UsageError, match=r"has mode 0644: .*chmod 600"):
        read_token(file)
    file.chmod(0o600)
    assert given_secret(None, {"OPENCLAW_TOKEN_FILE": str(file)}).token == secret.token  # type: ignore[union-attr]
    assert given_secret(None, {"OPENCLAW_TOKEN": secret.token}).token == secret.token  # type: ignore[union-attr]
    assert given_secret(None, {}) is None
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_token(tmp_path / "none")


def test_addresses() -> None:
    assert check_host("localhost", "host") == "127.0.0.1"
    with pytest.raises(UsageError, match=r"host='192.0.2.1': only loopback .* cannot join yet"):
        check_host("192.0.2.1", "host")
    assert parse_address(":50051") == ("127.0.0.1", 50051)
    for wrong in ("host", "host:", "host:port", "host:0", "host:70000"):
        with pytest.raises(UsageError):
            parse_address(wrong)


def test_a_master_is_told_from_another_server(port: int) -> None:
    assert speaks_zeromq("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(30)
        assert not speaks_zeromq("127.0.0.1", other.getsockname()[1])


def test_a_line_cannot_begin_another(audit: AuditLog) -> None:
    audit.write("refused: a\n2030-01-01T00:00:00Z joined: b")
    assert len(audit.lines()) == 1
    assert stat.S_IMODE(audit.path.stat().st_mode) == 0o600
