"""How those who know the join secret talk: CurveZMQ, one request at a time, each answered.

    Caller.ask(message) ══ encrypted, both sides authenticated ══ Listener ──> answer(message) ──> reply

Nothing of a stranger is read: a connection that does not prove, in ZeroMQ's handshake, to know the secret is closed,
and of those that say nothing only so many are kept. Knows sockets and JSON; does not know what is asked.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from openclaw_nb.cluster.join.audit import AuditLog
from openclaw_nb.cluster.join.ports import holder_of
from openclaw_nb.cluster.join.secret import JoinSecret
from openclaw_nb.core.errors import (
    JoinError,
    NotReachedError,
    NotTrustedError,
    OpenClawError,
    PortInUseError,
    UsageError,
)
from openclaw_nb.protocol import codec
from openclaw_nb.protocol.messages import Refused, Standing

Answer = Callable[[dict[str, Any], str], Any]
_ZAP = "inproc://zeromq.zap.01"  # where ZeroMQ asks whom to let in (RFC 27), one in each context
_ZAP_DOMAIN = b"openclaw-join"
_LARGEST_MESSAGE_BYTES = 64 * 1024
_QUEUED_MESSAGES = 64
_HANDSHAKE_MILLISECONDS = 5000
_MOST_STRANGERS = 256
_TICK_MILLISECONDS = 500
_CLOSE_SECONDS = 5.0
WRONG_TOKEN = "refused, wrong token"
NO_WORKER = "refused, no worker of this package"
UNREADABLE = "refused, a message that cannot be read"
_EXAMPLES = {
    WRONG_TOKEN: "a connection that began the handshake with other keys than this cluster's",
    "": "a connection that ended before the handshake did",
}


class Listener:
    """Answers who knows the secret, on a port, from a thread of its own.

    Parameters
    ----------
    secret : JoinSecret
        What callers must know.
    answer : callable
        Takes a message as a dictionary and the caller's address, returns the reply; must be quick.
    audit : AuditLog
        Where strangers are noted.
    """

    def __init__(self, secret: JoinSecret, answer: Answer, audit: AuditLog) -> None:
        self._secret, self._answer, self._audit = secret, answer, audit
        self._strangers = _Strangers(audit)
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._wake_address = f"inproc://wake-{secrets.token_hex(8)}"

    def open(self, host: str, port: int) -> int:
        """Begin to listen; return the port, which is a free one for 0.

        Raises
        ------
        UsageError
            When it cannot be had, with who holds it.
        """
        import zmq

        self._context = zmq.Context()
        try:
            bound = self._bind(host, port)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise _port_error(host, port, error) from None
        self._strangers.address = (host, bound)
        self._thread = threading.Thread(target=self._run, name="openclaw-join", daemon=True)
        self._thread.start()
        return bound

    def _bind(self, host: str, port: int) -> int:
        import zmq

        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._wake = self._context.socket(zmq.PULL)
        self._wake.bind(self._wake_address)
        self._router = router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.curve_server = True
        router.curve_secretkey = self._secret.master.secret
        router.zap_domain = _ZAP_DOMAIN
        router.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE_BYTES)
        router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MILLISECONDS)
        router.rcvhwm = router.sndhwm = _QUEUED_MESSAGES
        self._monitor = _monitor_of(router)
        router.bind(f"tcp://{host}:{port or '*'}")
        return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2].rstrip("\0"))

    def close(self) -> None:
        """Stop listening; safe to call again."""
        import zmq

        if self._thread is None or self._closing.is_set():
            return
        self._closing.set()
        wake = self._context.socket(zmq.PUSH)
        wake.connect(self._wake_address)
        wake.send(b"")
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)
        wake.close()

    # ------------------------------------------------------------------------------------- on the thread

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        takers: dict[Any, Callable[[], None]] = {
            self._router: self._take_message,
            self._zap: self._let_in,
            self._monitor: lambda: self._strangers.take(_event_of(self._monitor)),
            self._wake: lambda: None,
        }
        for each in takers:
            poller.register(each, zmq.POLLIN)
        while not self._closing.is_set():
            for ready, _ in poller.poll(_TICK_MILLISECONDS):
                takers[ready]()
            self._audit.tell_counts()
        self._audit.tell_counts(now=True)
        self._router.disable_monitor()
        for each in takers:
            each.close(linger=0)
        # Not `term` here: it would wait for the socket of `close`, which waits for this thread.
        threading.Thread(target=self._context.term, name="openclaw-join-end", daemon=True).start()

    def _let_in(self) -> None:
        """Tell ZeroMQ whether a key is that of this cluster's workers."""
        from zmq.utils import z85

        parts = self._zap.recv_multipart()
        key = (
            z85.encode(parts[6]) if len(parts) == 7 and parts[5] == b"CURVE" and len(parts[6]) == 32 else b""
        )
        trusted = secrets.compare_digest(key, self._secret.worker.public)
        status = [b"200", b"OK"] if trusted else [b"400", b"not a worker of this cluster"]
        self._zap.send_multipart([*parts[:2], *status, b"worker" if trusted else b"", b""])

    def _take_message(self) -> None:
        import zmq

        frames = self._router.recv_multipart(copy=False)
        who = str(frames[-1].get("Peer-Address"))
        self._strangers.trust(frames[-1].get(zmq.SRCFD))
        try:
            sequence, message = _unpacked([frame.bytes for frame in frames[1:]])
        except (ValueError, RecursionError):
            self._audit.count(UNREADABLE, f"from {who}")
            return
        with contextlib.suppress(zmq.ZMQError):  # it has gone meanwhile
            self._router.send_multipart([frames[0].bytes, sequence, self._reply(message, who)])

    def _reply(self, message: dict[str, Any], who: str) -> bytes:
        try:
            reply = self._answer(message, who)
        except OpenClawError as error:
            reply = Refused(reason=str(error))
        except Exception as error:  # the reply says so; the next one must be heard whatever it was
            logging.getLogger(__name__).exception("A request to join could not be answered.")
            reply = Refused(reason=f"The master could not answer: {type(error).__name__}.")
        return json.dumps(codec.encode(reply)).encode()


class _Strangers:
    """The connections of a listener, as ZeroMQ tells of them: those that fail are counted, and the oldest closed."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit
        self._connections: dict[int, None] = {}  # those that have not said anything yet, the oldest first
        self._why = ""
        self.address = ("", 0)

    def take(self, event: dict[str, Any]) -> None:
        import zmq

        match event["event"]:
            case zmq.EVENT_ACCEPTED:
                self._accepted(event["value"])
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._why = WRONG_TOKEN
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if (
                event["value"] == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
            ):
                self._why = WRONG_TOKEN
            case zmq.EVENT_DISCONNECTED:  # directly after the failure, if there was one
                self._ended(event["value"])

    def _accepted(self, descriptor: int) -> None:
        self._connections.pop(descriptor, None)
        self._connections[descriptor] = None
        if len(self._connections) > _MOST_STRANGERS:
            self._hang_up(next(iter(self._connections)))

    def trust(self, descriptor: int) -> None:
        """Note that a message has come on a connection, so that its handshake went well."""
        self._connections.pop(descriptor, None)

    def _ended(self, descriptor: int) -> None:
        why, self._why = self._why, ""
        if descriptor in self._connections:
            del self._connections[descriptor]
            self._audit.count(why or NO_WORKER, _EXAMPLES[why])

    def _hang_up(self, descriptor: int) -> None:
        """End a connection that ZeroMQ has, if the number is still one of this port."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getsockname() == self.address:
                connection.shutdown(socket.SHUT_RDWR)


class Caller:
    """Asks a `Listener`; a context manager.

    Parameters
    ----------
    host, port
        Where it listens.
    secret : JoinSecret
        What it must know, and this side does.
    """

    def __init__(self, host: str, port: int, secret: JoinSecret) -> None:
        import zmq

        self._where = f"{host}:{port}"
        self._context = zmq.Context()
        self._socket = dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.curve_serverkey = secret.master.public
        dealer.curve_publickey, dealer.curve_secretkey = secret.worker.public, secret.worker.secret
        dealer.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE_BYTES)
        self._monitor = _monitor_of(dealer)
        self._trusted = False
        dealer.connect(f"tcp://{self._where}")

    def __enter__(self) -> Caller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(linger=0)

    def ask(self, message: Any, seconds: float = 5.0) -> Standing:
        """Return the answer.

        Raises
        ------
        NotReachedError
            When nobody answers in time.
        NotTrustedError
            When the handshake fails: another secret, or no master.
        JoinError
            When the answer is a refusal, with its reason.
        """
        import zmq

        sequence = secrets.token_bytes(8)
        self._socket.send_multipart([sequence, json.dumps(codec.encode(message)).encode()], zmq.NOBLOCK)
        deadline = time.monotonic() + seconds
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            for ready, _ in poller.poll(max(1, int(1000 * left))):
                if ready is self._monitor:
                    self._follow(_event_of(ready)["event"])
                elif (reply := self._take(sequence)) is not None:
                    return reply
        raise NotReachedError(f"{self._where} did not answer in {seconds:.0f} s")

    def _follow(self, event: int) -> None:
        import zmq

        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._trusted = True
        elif event == zmq.EVENT_CLOSED and not self._trusted:  # the connection was refused
            raise NotReachedError(f"nobody listens on {self._where}")
        elif event not in (zmq.EVENT_ACCEPTED, zmq.EVENT_CLOSED) and not self._trusted:
            raise NotTrustedError(f"{self._where} ended the handshake")

    def _take(self, sequence: bytes) -> Standing | None:
        """Return the answer to this request, or None for one to an earlier one that came late."""
        found, content = _unpacked(self._socket.recv_multipart())
        if found != sequence:
            return None
        try:
            reply = codec.decode(content)
        except ValueError as error:
            raise JoinError(f"{self._where} answered something else: {error}") from None
        if isinstance(reply, Refused):
            raise JoinError(reply.reason)
        if not isinstance(reply, Standing):
            raise JoinError(f"{self._where} answered something else: {type(reply).__name__}")
        return reply


def _unpacked(frames: list[bytes]) -> tuple[bytes, dict[str, Any]]:
    if len(frames) != 2:
        raise ValueError(f"{len(frames)} frames instead of 2")
    content = json.loads(frames[1])
    if not isinstance(content, dict):
        raise ValueError("no message")
    return frames[0], content


def _monitor_of(watched: Any) -> Any:
    """Return a socket on which ZeroMQ tells what becomes of connections."""
    import zmq

    address = f"inproc://monitor-{secrets.token_hex(8)}"
    events = (
        zmq.EVENT_ACCEPTED
        | zmq.EVENT_CLOSED
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    )
    watched.monitor(address, events)
    monitor = watched.context.socket(zmq.PAIR)
    # Without a limit: at one, ZeroMQ's own thread would wait, with a lock that closing the socket needs.
    monitor.rcvhwm = 0
    monitor.connect(address)
    return monitor


def _event_of(monitor: Any) -> dict[str, Any]:
    from zmq.utils.monitor import parse_monitor_message

    return dict(parse_monitor_message(monitor.recv_multipart()))


def _port_error(host: str, port: int, error: Any) -> UsageError:
    import errno

    if error.errno == errno.EADDRINUSE:
        holder = holder_of(port)
        by = f" by {holder}" if holder else "; by whom cannot be known from here"
        return PortInUseError(
            f"Port {port} of {host} is in use{by}. Give another one (port=, or master.port in the configuration), "
            "or 0 for a free one."
        )
    why = os.strerror(error.errno) if error.errno else str(error)
    return UsageError(
        f"Nothing can listen on port {port} of {host}: {why}. Give another one, or 0 for a free one."
    )
