"""The only door to ipyparallel on the notebook side.

    Door.start_controller, start_engine, start_engines_by_mpi ──> processes
    Door.request(worker, command) ──> shell channel, in order with cells ──> Future[Reply]
    Door.request_at_once(worker, command) ──> control channel, also while a cell runs
    events of workers (own iopub topic) and registrations ──> the callbacks given to the constructor

Knows ipyparallel's client, launchers and sockets; does not know what commands mean. Private API used
here (``Client._send``, ``_mux_stream``, ``_control_stream``, ``_config``, ``_registration_callbacks``,
``_engines``) has a version test in ``tests/contract``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import psutil

from openclaw_nb.cluster.ownership import create_time
from openclaw_nb.core.errors import OpenClawError, StartError, WorkerDiedError
from openclaw_nb.protocol import codec
from openclaw_nb.protocol.messages import Command, Event, Reply
from openclaw_nb.protocol.placement import BY_RANK, LOG

_TOPIC = b"openclaw."
_KEY = "openclaw"
_HEARTBEAT_MILLISECONDS = 200
_HEARTBEAT_MISSES = 25
_CONNECT_SECONDS = 30.0
_ENGINE = [sys.executable, "-m", "openclaw_nb.engine"]
_WAIT_FOR_CONTROLLER = f"--IPEngine.wait_for_url_file={_CONNECT_SECONDS}"


class Door:
    """One ipyparallel cluster: its processes, and the messages to and from its engines.

    Parameters
    ----------
    directory : str
        Profile directory of this cluster; it must exist and be this user's alone (mode 0700).
    cluster_id : str
        Names the cluster's files.
    environment : mapping
        Variables for every process of the cluster.
    on_event : callable
        Called with each event of a worker, on a thread of this object.
    on_joined, on_died : callable
        Called with a worker's number when its engine registers or is gone.
    on_lost : callable
        Called with its process id when one of the controller's processes has ended: nothing arrives any more then.

    Attributes
    ----------
    controller : list of (int, float)
        Pid and start time of each process of the controller, known once connected: the hub, its schedulers and the
        monitor of heartbeats.
    """

    def __init__(
        self,
        directory: str,
        cluster_id: str,
        environment: Mapping[str, str],
        *,
        on_event: Callable[[Event], None],
        on_joined: Callable[[int], None],
        on_died: Callable[[int], None],
        on_lost: Callable[[int], None],
    ) -> None:
        self.directory = directory
        self.cluster_id = cluster_id
        self._environment = dict(environment)
        self._on_event, self._on_joined, self._on_died = on_event, on_joined, on_died
        self._on_lost = on_lost
        self._watch: _ControllerWatch | None = None
        self._lock = threading.Lock()
        self._pending: dict[Future[Reply], int] = {}
        self._lost = ""
        self._cluster: Any = None
        self._client: Any = None
        self._listener: _EventListener | None = None
        self._engine_sets: dict[int, str] = {}
        self.controller: list[tuple[int, float]] = []

    # ------------------------------------------------------------------------------------ processes

    def start_controller(self, host: str, log_level: str = "") -> None:
        """Start the controller process; returns before it can be reached.

        Parameters
        ----------
        host : str
            The address that it binds.
        log_level : str
            How much it writes into its log, such as ``"DEBUG"``; as much as ipyparallel does when "".
        """
        import ipyparallel

        self._cluster = ipyparallel.Cluster(
            profile_dir=self.directory,
            cluster_id=self.cluster_id,
            controller_ip=host,
            shutdown_atexit=False,
            send_engines_connection_env=False,
            # An engine that dies would have its last log lines printed into whatever cell is running.
            log_level=logging.CRITICAL,
            delay=0,
            controller_args=[
                f"--HeartMonitor.period={_HEARTBEAT_MILLISECONDS}",
                f"--HeartMonitor.max_heartmonitor_misses={_HEARTBEAT_MISSES}",
                "--IPController.enable_curve=True",
                "--nodb",
                # As a number: traitlets says WARN for WARNING.
                *([f"--log-level={logging.getLevelNamesMapping()[log_level]}"] if log_level else []),
            ],
        )
        self._cluster.start_controller_sync(environment=self._environment)

    def controller_arguments(self) -> list[str]:
        """Return the arguments with which the controller's process runs; none when it cannot be looked at."""
        try:
            return psutil.Process(self.controller[0][0]).cmdline() if self.controller else []
        except psutil.Error:
            return []

    def find_controller(self, processes: Sequence[tuple[int, float]]) -> None:
        """Find the controller and the engines that another process has started.

        Parameters
        ----------
        processes : sequence of (int, float)
            What `controller` was there.

        Raises
        ------
        StartError
            When the controller, or one of its processes, is gone.
        """
        import ipyparallel

        self.controller = [(pid, started) for pid, started in processes]
        for pid, started in self.controller:
            if create_time(pid) != started:
                raise StartError(self._controller_is_gone(f"process {pid} has ended"))
        try:
            self._cluster = ipyparallel.Cluster.from_file(
                profile_dir=self.directory, cluster_id=self.cluster_id, log_level=logging.CRITICAL
            )
        except Exception as error:
            # ipyparallel raises its own and bare exceptions for files and processes that are gone.
            raise StartError(self._controller_is_gone(str(error))) from error
        self._cluster.shutdown_atexit = False
        self._cluster.send_engines_connection_env = False

    def _controller_is_gone(self, why: str) -> str:
        return (
            f"The cluster's controller is gone ({why}), so that its workers cannot be reached any more. "
            f"%openclaw stop {self.cluster_id} ends them."
        )

    def start_engine(self, worker: int, environment: Mapping[str, str], host: str) -> None:
        """Start one engine that will register as number ``worker``."""
        self._engine_sets[worker] = self._cluster.start_engines_sync(
            1,
            engine_set_id=f"worker-{worker}-{time.monotonic_ns()}",
            engine_cmd=_ENGINE,
            engine_args=[f"--IPEngine.id={worker}", _WAIT_FOR_CONTROLLER],
            environment=self.engine_environment(environment, host),
        )

    def engine_environment(self, environment: Mapping[str, str], host: str) -> dict[str, str]:
        """Return the variables of an engine's process, with those of every process of the cluster."""
        return {**self._environment, **environment, "OPENCLAW_STORE_HOST": host}

    def engine_connection(self) -> dict[str, Any]:
        """Return what an engine must know to connect, keys among it: the controller's file for engines."""
        file = os.path.join(self.directory, "security", f"ipcontroller-{self.cluster_id}-engine.json")
        with open(file, encoding="utf-8") as content:
            found: dict[str, Any] = json.load(content)
        return found

    def start_engines_by_mpi(
        self, mpiexec: str, environment: Mapping[str, str], by_rank: Sequence[Mapping[str, str]], host: str
    ) -> None:
        """Start as many engines as ``by_rank`` has entries by one mpiexec; each will register as its rank.

        Parameters
        ----------
        mpiexec : str
            The program.
        environment : mapping
            Variables for all of them, and for mpiexec.
        by_rank : sequence of mapping
            Variables for each.
        host : str
            Address for the workers' stores.
        """
        folder = os.path.join(self.directory, "log")
        logs = [f"ipengine-{self.cluster_id}-worker-{rank}-mpi.log" for rank in range(len(by_rank))]
        own = [{**each, LOG: os.path.join(folder, log)} for each, log in zip(by_rank, logs, strict=True)]
        shared = {**self._environment, **environment, "OPENCLAW_STORE_HOST": host, BY_RANK: json.dumps(own)}
        self._cluster.engine_launcher_class = "mpi"
        engine_set = self._cluster.start_engines_sync(
            len(by_rank),
            engine_set_id=f"mpi-{time.monotonic_ns()}",
            engine_cmd=_ENGINE,
            engine_args=[_WAIT_FOR_CONTROLLER],
            environment=shared,
            mpi_cmd=[mpiexec],
        )
        self._engine_sets = dict.fromkeys(range(len(by_rank)), engine_set)

    def engine_ended(self, worker: int) -> bool:
        """Return whether the process last started for this worker, or the mpiexec of all, is gone."""
        engines = self._cluster.engines.get(self._engine_sets.get(worker))
        return engines is not None and not any(
            launcher.process.is_running() and launcher.process.status() != "zombie"
            for launcher in getattr(engines, "launchers", {"": engines}).values()
        )

    def pid_of_set(self, worker: int) -> int:
        """Return the process id of the mpiexec of this worker."""
        return int(self._cluster.engines[self._engine_sets[worker]].process.pid)

    def end_sets(self) -> None:
        """End every mpiexec that has started engines, also those of an earlier owner of the cluster."""
        for engines in self._cluster.engines.values():
            with contextlib.suppress(psutil.Error):
                psutil.Process(engines.process.pid).terminate()

    def output_of_set(self, worker: int, num_lines: int = 12) -> str:
        """Return the last lines of what the mpiexec of this worker has written."""
        engines = self._cluster.engines.get(self._engine_sets.get(worker))
        return "" if engines is None else "".join(engines.get_output().splitlines(True)[-num_lines:])

    def connect(self) -> None:
        """Connect to the controller and begin to hear events.

        Raises
        ------
        StartError
            When the controller does not answer.
        """
        try:
            self._client = self._cluster.connect_client_sync()
        except Exception as error:
            # ipyparallel raises bare exceptions here (time-outs, refused files, a controller that ended).
            log = self.log_tail("ipcontroller")
            raise StartError(f"The controller did not come up: {error}\n{log}") from error
        # cells are not kept in the client: results are handed out once
        self._client._registration_callbacks.append(self._registered)
        for number in self._client.ids:
            self._on_joined(number)
        self._listener = _EventListener(self._client, self._on_event)
        self.controller = self.controller or _with_children(self._cluster.controller.process.pid)
        self._watch = _ControllerWatch(self.controller, self._on_lost)

    def _registered(self, notice: dict[str, Any]) -> None:
        number = int(notice["id"])
        if notice["event"] == "register":
            self._on_joined(number)
        else:
            self._on_died(number)
            # ipyparallel does so for what it has noted by now, and never on the control channel.
            self._fail_pending(f"Worker {number} died before it answered.", number)

    def close(self) -> None:
        """Close the connections; the processes go on."""
        if self._watch is not None:
            self._watch.close()
        if self._listener is not None:
            self._listener.close()
        if self._client is not None:
            self._client.close(linger=0)
        if self._cluster is not None:
            # Else it writes the file again, in a directory that is gone or another's, when it hears of ended processes.
            self._cluster.cluster_file = ""
        self._client = self._listener = None

    def give_up(self, why: str) -> None:
        """Let every request that waits for an answer, and every later one, fail: none can come any more."""
        with self._lock:
            self._lost = why
        self._fail_pending(why)

    def _fail_pending(self, why: str, worker: int | None = None) -> None:
        with self._lock:
            pending = [answer for answer, each in self._pending.items() if worker in (None, each)]
        for answer in pending:
            _fail(answer, WorkerDiedError(why))

    def log_tail(self, name: str, num_lines: int = 12) -> str:
        """Return the last lines of the newest log whose name begins with ``name``."""
        folder = os.path.join(self.directory, "log")
        try:
            paths = [os.path.join(folder, f) for f in os.listdir(folder) if f.startswith(name)]
            newest = max(paths, key=os.path.getmtime)
            with open(newest, errors="replace") as file:
                return "".join(file.readlines()[-num_lines:])
        except (OSError, ValueError):
            return ""

    # ------------------------------------------------------------------------------------- messages

    def request(self, worker: int, command: Command) -> Future[Reply]:
        """Send a command on the shell channel; replies come in the order of commands.

        Returns
        -------
        Future
            Of the reply; `WorkerDiedError` when the worker's process ends first.
        """
        return self._ask(
            worker,
            lambda client, ident: client.send_execute_request(
                client._mux_stream, "", silent=True, metadata={_KEY: codec.encode(command)}, ident=ident
            ),
        )

    def request_at_once(self, worker: int, command: Command) -> Future[Reply]:
        """Send a command on the control channel."""
        return self._ask(
            worker,
            lambda client, ident: client._send(
                client._control_stream, "openclaw_request", content={_KEY: codec.encode(command)}, ident=ident
            ),
        )

    def _ask(self, worker: int, send: Callable[[Any, bytes], Any]) -> Future[Reply]:
        answer: Future[Reply] = Future()
        client = self._client
        with self._lock:  # so that `give_up` and `_registered` see it, or are seen here
            lost = self._lost
            self._pending[answer] = worker
        identity = client._engines.get(worker) if client is not None else None
        answer.add_done_callback(self._forget)
        if identity is None or lost:
            _fail(answer, WorkerDiedError(lost or f"Worker {worker} is gone."))
        else:
            sent = send(client, str(identity).encode())
            sent.add_done_callback(lambda future: self._settle(worker, answer, future))
        return answer

    def _forget(self, answer: Future[Reply]) -> None:
        with self._lock:
            self._pending.pop(answer, None)

    def _settle(self, worker: int, answer: Future[Reply], sent: Any) -> None:
        try:
            result = sent.result()
        except Exception as error:  # noqa: BLE001 - closed or dead, for the caller both are one thing
            _fail(answer, WorkerDiedError(f"Worker {worker} is gone: {error}"))
            return
        content = result.get("content", {}) if isinstance(result, dict) else getattr(result, "_content", {})
        if _KEY in content:
            with contextlib.suppress(InvalidStateError):  # given up in this moment
                answer.set_result(codec.decode(content[_KEY]))
        elif getattr(result, "ename", "") == "EngineError":
            _fail(answer, WorkerDiedError(f"Worker {worker} died while it ran this."))
        else:
            _fail(answer, OpenClawError(f"Worker {worker} gave no answer: {result!r}"))


def _fail(answer: Future[Reply], error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):
        answer.set_exception(error)


class _ControllerWatch:
    """Notices the end of any of the controller's processes: the hub, and the schedulers that it has started."""

    def __init__(self, processes: Sequence[tuple[int, float]], on_lost: Callable[[int], None]) -> None:
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._poll = select.poll()
        self._pids: dict[int, int] = {}
        self._ended: int | None = None
        self._wake = os.eventfd(0)  # so that `close` does not wait for a time to run out
        self._poll.register(self._wake, select.POLLIN)
        for pid, started in processes:
            self._follow(pid, started)
        self._thread = threading.Thread(target=self._work, name="openclaw-controller", daemon=True)
        self._thread.start()

    def _follow(self, pid: int, started: float) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended = pid
            return
        self._pids[descriptor] = pid
        self._poll.register(descriptor, select.POLLIN)
        if create_time(pid) != started:  # ended before, and the number may be another's now
            self._ended = pid

    def _work(self) -> None:
        while self._ended is None and not self._closing.is_set():
            ended = [
                self._pids[descriptor] for descriptor, _ in self._poll.poll() if descriptor in self._pids
            ]
            self._ended = next(iter(ended), None)
        if self._ended is not None and not self._closing.is_set():
            self._on_lost(self._ended)
        for descriptor in self._pids:
            os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        os.eventfd_write(self._wake, 1)
        if self._thread is not threading.current_thread():
            self._thread.join(2)
        os.close(self._wake)


def _with_children(pid: int) -> list[tuple[int, float]]:
    """Return pid and start time of a process and of all that it has started; a start of 0 is that of one that ended."""
    pids = [pid]
    with contextlib.suppress(psutil.NoSuchProcess):
        pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return [(pid, create_time(pid) or 0.0) for pid in pids]


class _EventListener:
    """Hears the events of all workers on a subscription of its own."""

    def __init__(self, client: Any, on_event: Callable[[Event], None]) -> None:
        import zmq

        self._session = client.session
        self._on_event = on_event
        self._closing = threading.Event()
        self._socket = client._context.socket(zmq.SUB)
        self._socket.RCVHWM = 0
        self._socket.LINGER = 0
        self._socket.subscribe(_TOPIC)
        if client.curve_serverkey:
            self._socket.curve_serverkey = client.curve_serverkey
            self._socket.curve_secretkey = client.curve_secretkey
            self._socket.curve_publickey = client.curve_publickey
        self._socket.connect(client._config["iopub"])
        self._thread = threading.Thread(target=self._run, name="openclaw-events", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._socket.poll(200):
                self._hear(self._socket.recv_multipart())
        self._socket.close()

    def _hear(self, parts: list[bytes]) -> None:
        try:
            _, frames = self._session.feed_identities(parts)
            self._on_event(codec.decode(self._session.deserialize(frames)["content"]))
        except Exception:  # the next event must be heard whatever was wrong with this one
            logging.getLogger(__name__).exception("An event of a worker could not be taken.")

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2)
