"""Checks of the network of this host: can processes reach each other, who listens, and for whom.

    Wanted ──> checks ──> findings

Sends nothing to other hosts, but for a connection to one that was named.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Iterator

import psutil

from openclaw_nb.cluster.files import read_notes
from openclaw_nb.cluster.launch import ports_open_to_others
from openclaw_nb.cluster.ownership import processes_of
from openclaw_nb.core.errors import UsageError
from openclaw_nb.core.host import listening_pids
from openclaw_nb.doctor.findings import FAIL, OK, SKIP, WARN, Check, Finding
from openclaw_nb.doctor.host import Wanted

_SECONDS = 5.0
_MESSAGE = b"openclaw" * 1024
_FIREWALL = (
    "Something between the two processes refuses it, as firewalls do: allow TCP between processes of this host "
    "(iptables -L, ufw status)."
)


def checks_of_network(wanted: Wanted, reach: tuple[str, int] | None) -> list[tuple[str, Check]]:
    """Return the checks, by name.

    Parameters
    ----------
    wanted : Wanted
        Where the master is to listen.
    reach : tuple of str and int, optional
        An address and a port to which a connection is tried.
    """
    found: list[tuple[str, Check]] = [
        ("loopback", lambda: _exchange("loopback", "127.0.0.1")),
        ("interface", lambda: _interface(wanted)),
        ("port", lambda: _port(wanted)),
        ("clusters", _clusters),
    ]
    if reach is not None:
        found.append(("reach", lambda: [check_reach(*reach)]))
    return found


def _exchange(check: str, address: str) -> Iterator[Finding]:
    """Send some bytes through a connection of this process with itself."""
    try:
        with socket.create_server((address, 0)) as server:
            port = server.getsockname()[1]
            threading.Thread(target=_echo, args=(server,), daemon=True).start()
            with socket.create_connection((address, port), timeout=_SECONDS) as client:
                client.sendall(_MESSAGE)
                client.shutdown(socket.SHUT_WR)
                came = b"".join(iter(lambda: client.recv(65536), b""))
    except OSError as error:
        yield Finding(check, FAIL, f"{address}: {error.strerror or error}", _FIREWALL)
        return
    if came == _MESSAGE:
        yield Finding(check, OK, f"bytes went through {address} and came back")
    else:
        yield Finding(check, FAIL, f"{address}: {len(came)} of {len(_MESSAGE)} bytes came back", _FIREWALL)


def _echo(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        server.settimeout(_SECONDS)
        client, _ = server.accept()
        with client:
            client.settimeout(_SECONDS)
            client.sendall(b"".join(iter(lambda: client.recv(65536), b"")))


def _interface(wanted: Wanted) -> Iterator[Finding]:
    addresses = {
        name: [each.address for each in found if each.family == socket.AF_INET]
        for name, found in psutil.net_if_addrs().items()
    }
    states = psutil.net_if_stats()
    up = {name: found for name, found in addresses.items() if found and name in states and states[name].isup}
    listed = ", ".join(f"{name} ({' '.join(found)})" for name, found in up.items()) or "none"
    if not wanted.interface:
        yield Finding("interface", OK, f"up: {listed}; none was named, and sockets are on loopback")
    elif wanted.interface in up:
        yield from _exchange("interface", up[wanted.interface][0])
    else:
        why = "is down or has no IPv4 address" if wanted.interface in addresses else "does not exist"
        todo = f"Name one that is up in network_interface or OPENCLAW_NETWORK_INTERFACE: {listed}."
        yield Finding("interface", FAIL, f"{wanted.interface} {why}", todo, "network_interface")


def _port(wanted: Wanted) -> Iterator[Finding]:
    """See whether the master could listen, or who does."""
    where = f"{wanted.host}:{wanted.port}"
    try:
        with socket.create_server((wanted.host, wanted.port)):
            yield Finding("port", OK, f"{where} is free")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            yield _taken(wanted, where)
        else:
            todo = "Name an address of this host in master.host, and a port from 1024 on in master.port."
            key = "master.host" if error.errno != errno.EACCES else "master.port"
            yield Finding("port", FAIL, f"{where}: {error.strerror or error}", todo, key)


def _taken(wanted: Wanted, where: str) -> Finding:
    holder = _holder(wanted.port)
    if holder is None:
        todo = "Name another master.port, or end what listens there: ss -ltnp shows it to root."
        return Finding(
            "port", FAIL, f"{where} is taken by a process that cannot be seen", todo, "master.port"
        )
    if holder.pid in {process.pid for note in read_notes() for process in _processes(note)}:
        return Finding("port", OK, f"{where}: a cluster of yours listens (pid {holder.pid})")
    todo = f"Name another master.port, or end process {holder.pid}."
    return Finding(
        "port", FAIL, f"{where} is taken by {holder.name()} (pid {holder.pid})", todo, "master.port"
    )


def _holder(port: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        for pid in filter(None, listening_pids(port)):
            return psutil.Process(pid)
    return None


def check_reach(host: str, port: int) -> Finding:
    """Try a connection, as ``telnet HOST PORT`` does, and say what its refusal means."""
    where = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=_SECONDS):
            return Finding("reach", OK, f"{where} can be reached")
    except socket.gaierror as error:
        return Finding(
            "reach", FAIL, f"{host}: {error.strerror}", "Write the name right, or its address in its place."
        )
    except ConnectionRefusedError:
        todo = (
            "Nothing listens there, or a firewall rejects it: is the master started, with this address and port "
            "(master.host, master.port)?"
        )
        return Finding("reach", FAIL, f"{where} refuses connections: the port is closed", todo, "master.port")
    except TimeoutError:
        todo = "A firewall on the way drops it, or the host is down: open this TCP port there, for this host."
        return Finding("reach", FAIL, f"{where} does not answer within {_SECONDS:g} s", todo, "master.port")
    except OSError as error:
        todo = "There is no way to this host: look at its address, the network interface and the routes."
        return Finding("reach", FAIL, f"{where}: {error.strerror or error}", todo, "master.host")


# ---------------------------------------------------------------------------------- clusters of this user


def _processes(note: dict[str, object]) -> list[psutil.Process]:
    with contextlib.suppress(UsageError, psutil.Error):
        return [psutil.Process(each.pid) for each in processes_of(str(note["cluster_id"]))]
    return []


def _clusters() -> Iterator[Finding]:
    running = [note for note in read_notes() if note["runs"]]
    if not running:
        yield Finding("clusters", OK, "none of yours runs")
        return
    lost = [note["name"] for note in running if not note["alive"] or note["detached"]]
    seen = f"running: {', '.join(note['name'] for note in running)}"
    if lost:
        todo = (
            f"Nobody owns {', '.join(lost)}: %openclaw attach NAME takes it up, %openclaw stop NAME ends it."
        )
        yield Finding("clusters", WARN, seen, todo)
    else:
        yield Finding("clusters", OK, seen)


def open_sockets() -> Iterator[Finding]:
    """Look which sockets of this user's clusters other hosts could reach."""
    notes = [note for note in read_notes() if note["runs"]]
    if not notes:
        yield Finding("open sockets", SKIP, "no cluster of yours runs")
        return
    processes = [process for note in notes for process in _processes(note)]
    open_to_others = {p.pid: ports for p in processes if (ports := ports_open_to_others(p.pid))}
    if not open_to_others:
        yield Finding(
            "open sockets", OK, f"all sockets of {len(processes)} processes listen on loopback alone"
        )
        return
    listed = "; ".join(f"pid {pid}: {', '.join(map(str, ports))}" for pid, ports in open_to_others.items())
    todo = (
        "Other hosts can reach these. Open MPI's TCP listens everywhere (parallel.mpi_shared_memory: true avoids it); "
        "sockets that your own cells open are yours."
    )
    yield Finding(
        "open sockets", WARN, f"listen for other hosts, too: {listed}", todo, "parallel.mpi_shared_memory"
    )
