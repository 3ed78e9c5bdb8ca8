"""Which hosts and ports can be listened on and called from here, and who holds a port.

Knows addresses and processes; does not know who joins whom.
"""

from __future__ import annotations

import ipaddress
import socket

from openclaw_nb.core.errors import UsageError
from openclaw_nb.core.host import listening_pids

_LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 1.0
_GREETING_BYTES = 10


def check_host(host: str, what: str) -> str:
    """Return the loopback address that a host's name stands for.

    Parameters
    ----------
    host : str
        An address, or a name.
    what : str
        What it was given as, for the message.

    Raises
    ------
    UsageError
        For another host: those cannot join yet.
    """
    found = _addresses_of(host)
    loopback = [each for each in found if ipaddress.ip_address(each).is_loopback]
    if loopback:
        return loopback[0]
    where = f" (which is {', '.join(found)})" if found and host not in found else ""
    known = "" if found else ", whose address is not known here"
    raise UsageError(
        f"{what}={host!r}{where}{known}: only loopback (127.0.0.1) is supported, as workers of other hosts cannot join "
        "yet. Master and workers run on one host."
    )


def _addresses_of(host: str) -> list[str]:
    """Return the IPv4 addresses of a host; none when it is not known."""
    try:
        return list(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(host, None, socket.AF_INET)))
    except (OSError, UnicodeError):
        return []


def check_port(port: object, what: str, smallest: int = 0) -> int:
    """Return a port.

    Raises
    ------
    UsageError
        For what is none.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not smallest <= port <= 65535:
        raise UsageError(f"{what}={port!r}: give a whole number from {smallest} to 65535.")
    return port


def parse_address(text: str) -> tuple[str, int]:
    """Read ``host:port``, ``:port`` or a port.

    Raises
    ------
    UsageError
        For anything else.
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal():
        raise UsageError(f"{text!r} is no address: give HOST:PORT, such as 127.0.0.1:50051.")
    return host.strip("[]") or _LOOPBACK, check_port(int(port), "port", 1)


def holder_of(port: int) -> str:
    """Return who listens on a port of this host, for a message; "" when it cannot be known."""
    import psutil

    pids = listening_pids(port)
    if not pids:
        return ""
    if pids[0] is None:
        return "a process of another user"
    try:
        words = " ".join(psutil.Process(pids[0]).cmdline())
    except psutil.Error:
        words = ""
    return f"process {pids[0]} ({words[:120] or 'its command line cannot be read'})"


def speaks_zeromq(host: str, port: int) -> bool:
    """Return whether what answers on a port begins as ZeroMQ does; a master does, before it knows whom it talks to."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS) as stream:
            greeting = b""
            while len(greeting) < _GREETING_BYTES and (more := stream.recv(_GREETING_BYTES)):
                greeting += more
    except OSError:
        return False
    return greeting[:1] == b"\xff" and greeting[9:10] == b"\x7f"
