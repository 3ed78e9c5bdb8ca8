"""The composition root: one object that owns this process's cluster.

    magics, command line, scripts ──> Session ──> devices are chosen ──> MasterNode

Decides what is started and ended when; does not know how anything is shown.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

from openclaw_nb.cluster.devices import Device, choose_devices, list_devices
from openclaw_nb.cluster.files import end_abandoned
from openclaw_nb.cluster.launch import check_devices, check_installed, check_words, devices_for
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.run import CellRun, RunResult
from openclaw_nb.cluster.worker import Worker, count_text
from openclaw_nb.config.cells import CellDefaults, cell_defaults
from openclaw_nb.config.effects import Seen, effects_table
from openclaw_nb.config.load import Paths, load
from openclaw_nb.config.settings import Configuration
from openclaw_nb.config.settle import Asked, Settled, check_capabilities, check_threads, settle
from openclaw_nb.core.errors import (
    AlreadyStartedError,
    NotStartedError,
    RemoteCellError,
    UsageError,
    unknown_name,
)
from openclaw_nb.core.host import available_memory_bytes, usable_cores
from openclaw_nb.core.table import Table
from openclaw_nb.core.text import is_set
from openclaw_nb.metrics.publish import Metrics
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.strategies import (
    DataParallelStrategy,
    HybridParallelStrategy,
    ModelParallelStrategy,
    PipelineStrategy,
    ShardedDataParallelStrategy,
    TensorParallelStrategy,
    canonical_strategy,
)

Progress = Callable[[int, int, str], None]
Described = (
    DataParallelStrategy
    | ShardedDataParallelStrategy
    | TensorParallelStrategy
    | ModelParallelStrategy
    | PipelineStrategy
    | HybridParallelStrategy
)
Strategy = str | Described | StrategySpec


class Session:
    """Owns the cluster of this process; there is one at a time.

    Attributes
    ----------
    monitor : Monitor
        What strategy cells have measured, of this cluster and earlier ones.
    metrics : Metrics
        The endpoint from which Prometheus reads that, and how busy the devices are; not open until it is asked for.

    See Also
    --------
    current_session : the session that the magics use.
    """

    def __init__(self) -> None:
        self._cluster: OpenClawCluster | None = None
        self._lock = threading.Lock()
        self._pid = 0
        self.monitor = Monitor()
        self.metrics = Metrics(self._find_master, self.monitor)

    @property
    def cluster(self) -> OpenClawCluster | None:
        """The cluster that runs, or None."""
        cluster = self._cluster
        return cluster if cluster is not None and cluster.running else None

    @property
    def master(self) -> MasterNode:
        """The master of the cluster that runs.

        Raises
        ------
        NotStartedError
            When there is none.
        """
        if (cluster := self.cluster) is None:
            raise NotStartedError("No cluster is running. Start one first: %openclaw start -n 2")
        return cluster.master

    def _find_master(self) -> MasterNode | None:
        return None if (cluster := self.cluster) is None else cluster.master

    @cached_property
    def known_devices(self) -> list[Device]:
        """The machine's devices, looked for once: for completion, which must be quick."""
        return list_devices()

    def start(self, cluster: OpenClawCluster, progress: Progress | None = None) -> MasterNode:
        """Choose devices and start their workers.

        Parameters
        ----------
        cluster : OpenClawCluster
            What is asked for.
        progress : callable, optional
            Called with (done, total, what).

        Raises
        ------
        AlreadyStartedError
            When a cluster runs; it goes on.
        UsageError
            When the devices cannot be had; nothing was started then.
        StartError
            When processes do not come up; all are ended.
        """
        with self._lock:
            self._check_none_runs()
            configuration = cluster.configuration
            settled = settle(configuration, cluster.asked, list_devices(), _own_addresses())
            check_words(settled.backend, settled.communication)
            check_installed(settled.backend, settled.communication)
            devices = _choose(cluster, settled)
            check_devices(settled.communication, devices)
            check_threads(
                configuration, len(devices), usable_cores(), oversubscribe=cluster.may_oversubscribe
            )
            notes = check_capabilities(configuration, devices, available_memory_bytes())
            self._serve_metrics(configuration)
            self._stop_at_exit()
            master = MasterNode(
                settled.host,
                configuration.given("master.port") if cluster.port is None else cluster.port,
                name=cluster.name,
                backend=settled.backend,
                communication=settled.communication,
                lease_seconds=cluster.lease_seconds,
                oversubscribe=cluster.oversubscribe,
                environment=settled.environment,
                log_level=configuration.given("master.log_level") or "",
            )
            num_working = len(devices) - cluster.spares
            try:
                master.start()
                master.start_workers(devices[:num_working], progress, spares=devices[num_working:])
            except BaseException:
                master.stop()
                raise
            master.listen(self.monitor.take)
            self._cluster = cluster
            cluster.replaced = settled.replaced
            _set_up(master, configuration, [*settled.notes, *notes])
            return master

    def attach(self, cluster: OpenClawCluster, name: str | None) -> MasterNode:
        """Take over a cluster that runs without an owner; see `MasterNode.attach`.

        Raises
        ------
        AlreadyStartedError
            When this process has a cluster; it goes on.
        """
        with self._lock:
            self._check_none_runs()
            self._serve_metrics(cluster.configuration)
            self._stop_at_exit()
            lease, listener = cluster.lease_seconds, self.monitor.take
            master = MasterNode.attach(name, lease_seconds=lease, listener=listener)
            self._cluster = cluster
            return master

    def _serve_metrics(self, configuration: Configuration) -> None:
        port = configuration.value("master.metrics_port")
        if port is not None:
            self.metrics.serve(port=port)

    def detach(self) -> str:
        """Leave the cluster running without an owner; return its name.

        Raises
        ------
        NotStartedError
            When none runs.
        """
        master = self.master
        master.detach()
        self._cluster = None
        return master.name

    def _check_none_runs(self) -> None:
        if self.cluster is not None:
            running = self.cluster.master
            raise AlreadyStartedError(
                f"The cluster {running.name!r} runs already, with {count_text(running.workers)}. "
                "Use it, or end it first (%openclaw stop)."
            )

    def stop(self, name: str | None = None) -> int:
        """End the cluster; return how many processes were ended.

        Parameters
        ----------
        name : str, optional
            Another cluster than this process's: one that nobody owns.

        Raises
        ------
        NotStartedError
            When none runs.
        UnknownNameError, AlreadyStartedError
            When there is none of this name, or another process owns it.
        """
        if name is not None and (self.cluster is None or self.master.name != name):
            return end_abandoned(name)
        ended = self.master.stop()
        self._cluster = None
        return ended

    def _stop_at_exit(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            atexit.register(self._exit)

    def _exit(self) -> None:
        # A forked child inherits this call, but not the cluster.
        if self._pid != os.getpid() or self.cluster is None:
            return
        if self.cluster.lease_seconds:
            self.master.leave()  # as if this process had been killed: its lease begins
        else:
            self.stop()


class OpenClawCluster:
    """A cluster of workers on this machine, from start to stop.

    Parameters
    ----------
    workers : int, optional
        How many; by default one a GPU, or as many as cores and memory allow.
    devices : str or sequence of str, optional
        Ids (``"GPU-0,GPU-1"``), or ``"auto"``.
    name : str, optional
        For ``%openclaw list``; made up when not given.
    backend : {"local", "thread", "cuda", "mpi"}, optional
        How workers are started; see `MasterNode`. ``"local"`` when nothing says otherwise.
    communication : {"auto", "nccl", "gloo", "mpi"}, optional
        What the workers communicate with; see `MasterNode`. ``"auto"`` when nothing says otherwise.
    oversubscribe : bool
        Start also with more workers than devices, or little memory, as with ``OPENCLAW_OVERSUBSCRIBE=1``.
    spares : int
        How many more workers wait, to take the place of one that dies in a cell (`MasterNode.enable_auto_recovery`).
    lease_seconds : float
        How long the workers, and a cell that runs on them, wait for a new owner (`attach`) when this process ends, in
        whatever way, without `stop` or `detach`.
    config_path : str, path or sequence of them, optional
        A configuration file (`docs/configuration.md`), or several. What is said by the other parameters wins over it,
        and over variables ``OPENCLAW_…``, which win over the file.
    port : int, optional
        Where workers join that other processes start; see `MasterNode`.

    Attributes
    ----------
    configuration : Configuration
        What file and variables say.
    cell : object or None
        In a notebook that has attached to the cluster, a handle of the cell that ran there.
    replaced : mapping of str to str, or None
        Since the start: the core in the place of each GPU that was named and is not there, by ``fallback: cpu``.

    Examples
    --------
    >>> with OpenClawCluster(workers=2) as cluster:            # doctest: +SKIP
    ...     cluster.run_cell("x = rank + 1").wait()
    ...     cluster.master.pull(["x"], rank=1)
    {'x': 2}
    """

    def __init__(
        self,
        workers: int | None = None,
        devices: str | Sequence[str] | None = None,
        name: str | None = None,
        backend: str | None = None,
        communication: str | None = None,
        oversubscribe: bool = False,
        lease_seconds: float = 0.0,
        spares: int = 0,
        config_path: Paths | None = None,
        port: int | None = None,
    ) -> None:
        self.configuration: Configuration = load(config_path, os.environ)
        self.lease_seconds = lease_seconds
        self.spares = spares
        self.workers = workers
        self.devices = devices
        self.name = name
        self.backend = backend
        self.communication = communication
        self.port = port
        self.oversubscribe = oversubscribe
        self.cell: Any = None
        self._master: MasterNode | None = None
        self._started: list[str] | None = None
        self.replaced: Mapping[str, str] | None = None

    def start(self, progress: Progress | None = None) -> OpenClawCluster:
        """Start the workers and form their process group; see `Session.start`."""
        master = current_session().start(self, progress)
        self._started = _devices_of(master)
        self._master = master
        return self

    @classmethod
    def attach(cls, name: str | None = None, *, lease_seconds: float = 0.0) -> OpenClawCluster:
        """Take over a cluster that runs without an owner, with its variables.

        Parameters
        ----------
        name : str, optional
            Which; not needed where there is one.
        lease_seconds : float
            As for `OpenClawCluster`.
        """
        cluster = cls(name=name, lease_seconds=lease_seconds)
        cluster._master = current_session().attach(cluster, name)
        return cluster

    def detach(self) -> None:
        """Leave the workers running without an owner, until somebody attaches to them."""
        self.master.detach()

    @property
    def may_oversubscribe(self) -> bool:
        """Whether workers may share devices and cores."""
        return self.oversubscribe or is_set(os.environ, "OPENCLAW_OVERSUBSCRIBE")

    @property
    def asked(self) -> Asked:
        """What was said beside the configuration."""
        oversubscribe = self.may_oversubscribe
        return Asked(self.workers, self.devices, self.backend, self.communication, oversubscribe)

    @property
    def cell_defaults(self) -> CellDefaults:
        """What the configuration says of cells: their strategy, and the defaults of its options."""
        devices = _devices_of(self._master) if self._master is not None and self.running else []
        return cell_defaults(self.configuration, devices, self._started, self.replaced)

    def effective_configuration(self) -> Table:
        """Return each configured key with its value, where that comes from, what it has set, and on which workers.

        Its records are `openclaw_nb.config.effects.Effect`. A cluster that does not run says what would be set.
        """
        said = {
            "parallel.workers": self.workers,
            "parallel.backend": self.backend,
            "parallel.communication": self.communication,
            "master.port": self.port,
        }
        return effects_table(self.configuration.overridden(said), _seen(self) if self.running else None)

    @property
    def running(self) -> bool:
        """Whether the cluster is started."""
        return self._master is not None and self._master.running

    @property
    def master(self) -> MasterNode:
        """The cluster's master.

        Raises
        ------
        NotStartedError
            When the cluster does not run.
        """
        if self._master is None or not self._master.running:
            raise NotStartedError("This cluster does not run. Call its start() first.")
        return self._master

    def run_cell(
        self,
        source: str,
        *,
        strategy: Strategy | None = None,
        targets: Sequence[int] | None = None,
    ) -> CellRun:
        """Run source on the workers and return the run at once; its ``wait()`` returns how it ended.

        Parameters
        ----------
        source : str
            What a notebook's cell would hold.
        strategy : str, one of `openclaw_nb.strategies`, or StrategySpec, optional
            How it is run in parallel; on every rank as it stands when not given. A word takes its options from the
            configuration; ``"default"`` is the strategy that is configured.
        targets : sequence of int, optional
            The ranks that run it; all by default.
        """
        master, defaults = self.master, self.cell_defaults
        described = _described(strategy, defaults) if isinstance(strategy, str) else strategy
        if described is None or isinstance(described, StrategySpec):
            defaults.check(described)
            return master.run_cell(source, strategy=described, targets=targets)
        defaults.check(described.spec())
        targets = self._ranks_on(described.devices) if targets is None else targets
        return master.run_cell(source, strategy=described.spec(), targets=targets)

    def _ranks_on(self, devices: Sequence[str] | None) -> list[int] | None:
        if devices is None:
            return None
        working = [worker for worker in self.master.workers if not worker.spare]
        ranks = {worker.device.id: rank for rank, worker in enumerate(working)}
        for device in devices:
            if device not in ranks:
                raise unknown_name("device of the cluster", device, ranks)
        return [ranks[device] for device in devices]

    def run(self, strategy: Strategy | None, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Call ``function(**arguments)`` on every rank of the strategy and return the results by rank.

        Parameters
        ----------
        strategy : str, one of `openclaw_nb.strategies`, StrategySpec or None
            As for `run_cell`; the model, optimizer and loaders are found among the arguments.
        function : callable
            It and its arguments are copied to the workers.

        Raises
        ------
        RemoteCellError
            With the traceback of the rank that raised first.
        """
        master = self.master
        strategy = _described(strategy, self.cell_defaults) if isinstance(strategy, str) else strategy
        master.push({"_openclaw_function": function, "_openclaw_arguments": arguments})
        source = "_openclaw_result = _openclaw_function(**_openclaw_arguments)"
        result = self.run_cell(source, strategy=strategy).wait()
        assert result is not None
        if not result.ok:
            raise RemoteCellError(_what_failed(result))
        ranks = self._ranks_on(getattr(strategy, "devices", None)) or range(master.world_size)
        return [master.pull(["_openclaw_result"], rank)["_openclaw_result"] for rank in ranks]

    def stop(self) -> int:
        """End every process of the cluster; return how many there were."""
        return self.master.stop()

    def __enter__(self) -> OpenClawCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.running:
            self.stop()

    def __repr__(self) -> str:
        if not self.running:
            return "<OpenClawCluster: not running>"
        master = self.master
        return f"<OpenClawCluster {master.name}: {count_text(master.workers)}, {master.communication}>"


def _devices_of(master: MasterNode) -> list[str]:
    return [worker.device.id for worker in master.workers if not worker.spare]


def _what_failed(result: RunResult) -> str:
    if result.first is None:
        return f"The function ended on no rank as it should: {result.cause or 'it was interrupted'}."
    failure = result.failures[result.first]
    return f"rank {result.first} raised {failure.error_type}: {failure.message}\n" + "\n".join(
        failure.traceback
    )


_session = Session()


def current_session() -> Session:
    """Return the session of this process."""
    return _session


def resize_workers(num_workers: int) -> list[Worker]:
    """Add workers to this process's cluster, or remove the last ones; see `MasterNode.resize_workers`.

    Raises
    ------
    NotStartedError
        When none runs.
    """
    return current_session().master.resize_workers(num_workers)


def _described(word: str, defaults: CellDefaults) -> Described:
    """Return the description of a strategy that a word names, with what is configured.

    Raises
    ------
    UsageError
        For another word, or "default" where none is configured.
    """
    if word == "default":
        if defaults.strategy is None:
            raise UsageError(
                "No strategy is configured: name one, or write `strategy: data` into the configuration."
            )
        word = defaults.strategy
    found: Described = defaults.describe(canonical_strategy(word), {})
    return found


def _own_addresses() -> set[str]:
    """Return the addresses and the name of this host."""
    import psutil

    found = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    return {*found, socket.gethostname()}


def _set_up(master: MasterNode, configuration: Configuration, notes: Sequence[str]) -> None:
    """Let a master that was started be as it is configured beyond its start."""
    timeout = configuration.value("parallel.timeout")
    if timeout is not None:
        master.set_timeout(communication=timeout, computation=None)
    if master.log_level:
        logging.getLogger("openclaw_nb").setLevel(master.log_level)
    for note in notes:
        master.note(note)


def _seen(cluster: OpenClawCluster) -> Seen:
    master = cluster.master
    working = [worker for worker in master.workers if not worker.spare]
    return Seen(
        backend=master.backend,
        communication=master.communication,
        host=master.host,
        port=master.port,
        controller_log=master.controller_log_level,
        limit_seconds=master.limits.communication_seconds,
        devices={worker.id: worker.device.id for worker in working},
        reports=master.worker_settings(),
        cells=cluster.cell_defaults,
        metrics_port=None if (metrics := current_session().metrics.published) is None else metrics.port,
    )


def _choose(cluster: OpenClawCluster, settled: Settled) -> list[Device]:
    return choose_devices(
        settled.workers,
        settled.devices,
        available=devices_for(settled.backend, list_devices()),
        memory_available_bytes=available_memory_bytes(),
        oversubscribe=cluster.may_oversubscribe,
        num_spares=cluster.spares,
    )
