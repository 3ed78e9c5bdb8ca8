"""All checks together: the host, its network, and a cluster that runs or is started for them.

Configuration, options ──> Wanted ──> checks ──> findings
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.config.settings import Configuration
from openclaw_nb.core.errors import OpenClawError, UsageError
from openclaw_nb.core.host import usable_cores
from openclaw_nb.doctor.cluster import array_sum, checks_of_cluster
from openclaw_nb.doctor.findings import FAIL, Finding, examine
from openclaw_nb.doctor.host import Wanted, checks_of_host
from openclaw_nb.doctor.network import checks_of_network, open_sockets
from openclaw_nb.session import OpenClawCluster, Session

Tell = Callable[[str], None]


def wanted_of(configuration: Configuration, workers: int | None = None) -> Wanted:
    """Return what a configuration asks of its host; ``workers`` wins over it."""
    given = configuration.given
    plain = Wanted()
    return Wanted(
        workers=workers if workers is not None else given("parallel.workers"),
        threads=given("parallel.omp_threads"),
        backend=given("parallel.backend") or plain.backend,
        communication=given("parallel.communication") or plain.communication,
        interface=given("network_interface") or "",
        host=given("master.host") or plain.host,
        port=plain.port if given("master.port") is None else given("master.port"),
    )


def consult(
    session: Session,
    configuration: Configuration,
    *,
    workers: int | None = None,
    reach: tuple[str, int] | None = None,
    starts: bool = True,
    tell: Tell = lambda what: None,
) -> list[Finding]:
    """Make all checks.

    Parameters
    ----------
    session : Session
        Its cluster is looked at, if it has one.
    configuration : Configuration
        What is asked of the host.
    workers : int, optional
        For how many workers; what is configured when not given.
    reach : tuple of str and int, optional
        An address and a port to which a connection is tried.
    starts : bool
        Whether workers are started for the array sum where no cluster runs, and ended again.
    tell : callable
        Told what is looked at next.

    Returns
    -------
    list of Finding
        In the order of the checks.
    """
    cluster = session.cluster
    wanted = wanted_of(configuration, workers)
    if cluster is not None and workers is None and not cluster.master.problem:
        wanted = _as_it_runs(wanted, cluster.master)
    tell("this host")
    found = examine([*checks_of_host(wanted), *checks_of_network(wanted, reach)])
    if cluster is not None:
        tell(f"the cluster {cluster.master.name}")
        checks = checks_of_cluster(cluster.master, session.monitor)
        return found + examine([*checks, ("open sockets", open_sockets)])
    if not starts:
        return found + examine([("open sockets", open_sockets)])
    tell("an array sum, on workers that are started for it")
    return found + examine([("array sum", lambda: _on_new_workers(wanted))])


def _as_it_runs(wanted: Wanted, master: MasterNode) -> Wanted:
    threads = [report["threads"] or 1 for report in master.worker_settings().values()]
    num_workers = sum(not worker.spare for worker in master.workers)
    return replace(wanted, workers=num_workers, threads=max(threads, default=None), runs=True)


def _on_new_workers(wanted: Wanted) -> list[Finding]:
    """Start workers as they are wanted, let them add up an array, and end them."""
    num_workers = wanted.workers if wanted.workers is not None else min(2, usable_cores())
    try:
        with OpenClawCluster(
            workers=num_workers, backend=wanted.backend, communication=wanted.communication
        ) as cluster:
            return [*array_sum(cluster.master), *open_sockets()]
    except OpenClawError as error:
        todo = "Put right what it says, or take fewer workers: -n 1."
        return [Finding("array sum", FAIL, f"{num_workers} workers could not be started: {error}", todo)]


def parse_reach(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``.

    Raises
    ------
    UsageError
        For something else.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{text!r} is no address with a port, such as 192.168.1.100:50051.")
    return host, int(port)
