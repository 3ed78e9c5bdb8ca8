"""A worker that this process starts and that joins a master which runs already, or will in a moment.

    WorkerNode ── Join (again and again) ──> master ──> refused, or start
               ── engine, a child of this process ──> the controller ──> the group

The engine ends with this process, however that ends (`openclaw_nb.engine.leash`); it ends, too, when the master removes
it or stops. Knows the messages, and one child process; does not know what the worker does.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from openclaw_nb.cluster.devices import Device, choose_devices, list_devices
from openclaw_nb.cluster.files import read_notes, runtime_directory
from openclaw_nb.cluster.join.channel import Caller
from openclaw_nb.cluster.join.desk import own_software
from openclaw_nb.cluster.join.gate import ADDRESS_FILE
from openclaw_nb.cluster.join.ports import check_host, check_port, speaks_zeromq
from openclaw_nb.cluster.join.secret import (
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    JoinSecret,
    given_secret,
    read_address,
    read_token,
)
from openclaw_nb.cluster.ownership import create_time
from openclaw_nb.core.errors import (
    AlreadyStartedError,
    JoinError,
    NotReachedError,
    NotTrustedError,
    OpenClawError,
    StartError,
    UsageError,
)
from openclaw_nb.plan.joining import pauses
from openclaw_nb.protocol.messages import PROTOCOL_VERSION, Join, Leave, Standing
from openclaw_nb.protocol.placement import LEASH
from openclaw_nb.shared import SharedMemory, attach_shared_memory

_GUESTS_FOLDER = ".workers"  # no cluster can have this name
_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 10.0
_JOIN_SECONDS = 180.0
_LEAVE_SECONDS = 15.0
_END_SECONDS = 5.0
_TRUST_ATTEMPTS = 3  # a master that is flooded hangs up on strangers
_LOG_LINES = 12


class WorkerNode:
    """A worker in a process beside this one, which joins a master over its port.

    In a script the process stays, after its last line, until the worker has left; in a notebook the worker leaves with
    the kernel. For now master and worker run on one host, as one user.

    Parameters
    ----------
    master_host : str
        Where the master listens.
    master_port : int
        On which port.
    device_id : str
        The worker's device, one of those that ``openclaw list-devices`` shows.
    token : str, optional
        The master's join token. If not given, that in ``OPENCLAW_TOKEN``, or in the file that ``OPENCLAW_TOKEN_FILE``
        names, or in the folder of this user's cluster that listens there.
    wait_seconds : float
        How long `connect` looks for a master.

    Examples
    --------
    >>> worker = WorkerNode("127.0.0.1", 50051, device_id="CPU-1")            # doctest: +SKIP
    >>> worker.connect()
    <WorkerNode worker-1 on CPU-1: joined 127.0.0.1:50051>
    """

    def __init__(
        self,
        master_host: str = "127.0.0.1",
        master_port: int = 50051,
        device_id: str = "GPU-0",
        token: str | None = None,
        *,
        wait_seconds: float = 60.0,
    ) -> None:
        self.master_host = check_host(master_host, "master_host")
        self.master_port = check_port(master_port, "master_port", 1)
        self.device_id = str(device_id).strip().upper()
        self._given = given_secret(token, os.environ)
        self._wait_seconds = wait_seconds
        self._ticket = secrets.token_hex(16)
        self._number = -1
        self._engine: _Engine | None = None
        self._secret: JoinSecret | None = None

    # -------------------------------------------------------------------------------------------- coming

    def connect(self) -> WorkerNode:
        """Join the master; return when the worker takes part, or will at the head of a loop of the cell that runs.

        Raises
        ------
        JoinError
            When no master is found in time, the token is not its, or it refuses, with its reason.
        UsageError
            When this host has no such device.
        StartError
            When the worker's process does not come up.
        AlreadyStartedError
            When it has joined.
        """
        if self.state == "joined":
            raise AlreadyStartedError(f"{self!r}: close() it before it joins again.")
        message = self._join_message(self._find_device())
        with self._reach(message) as caller:
            try:
                self._come_in(caller, message)
            except BaseException:
                with contextlib.suppress(OpenClawError):
                    caller.ask(self._leave_message())
                self._end_engine()
                raise
        _stay_at_exit(self)
        return self

    start = connect

    def _find_device(self) -> Device:
        available = list_devices()
        try:
            return choose_devices(
                1, [self.device_id], available=available, memory_available_bytes=0, oversubscribe=True
            )[0]
        except UsageError as error:
            self._tell_of_no_device()
            raise type(error)(f"{error} (device_id={self.device_id!r} of WorkerNode)") from None

    def _tell_of_no_device(self) -> None:
        """Let the master note it, if it is there."""
        with contextlib.suppress(OpenClawError), self._call() as caller:
            caller.ask(self._join_message(None), _ANSWER_SECONDS)

    def _call(self) -> Caller:
        """Return a way to a master, whose secret is looked for anew: it may have come meanwhile."""
        self._secret = self._given or self._find_secret()
        return Caller(self.master_host, self.master_port, self._secret)

    def _find_secret(self) -> JoinSecret:
        notes = sorted(read_notes(), key=lambda note: not note["alive"])
        for note in notes:
            address = read_address(Path(note["directory"]) / ADDRESS_FILE)
            if address is not None and address.port == self.master_port:
                return read_token(address.token_file)
        raise NotReachedError(
            f"no cluster of this user listens there (looked in {runtime_directory()}), and no token was given"
        )

    @contextlib.contextmanager
    def _reach(self, message: Join) -> Iterator[Caller]:
        """Find the master, which may come later than this worker, and ask it; yield a way on which it has answered."""
        deadline = time.monotonic() + self._wait_seconds
        distrusted = 0
        for attempts, pause in enumerate(pauses(), 1):
            try:
                caller = self._call()
            except NotReachedError as error:
                problem = str(error)
            else:
                with caller:
                    try:
                        caller.ask(message, _ANSWER_SECONDS)
                    except NotTrustedError:
                        distrusted += 1
                        problem = self._why_not_trusted()
                        if distrusted == _TRUST_ATTEMPTS:
                            raise JoinError(problem) from None
                    except NotReachedError as error:
                        problem = str(error)
                    else:
                        yield caller
                        return
            if time.monotonic() + pause > deadline:
                raise self._not_reached(problem, attempts)
            time.sleep(pause)

    def _why_not_trusted(self) -> str:
        where = f"{self.master_host}:{self.master_port}"
        if not speaks_zeromq(self.master_host, self.master_port):
            return f"What listens on {where} is no master of openclaw_nb. Is the port right?"
        assert self._secret is not None
        return (
            f"The master on {where} does not know the token ({self._secret.source}): it is wrong, or of another "
            "cluster. The right one is in the file join-token of the cluster's folder (MasterNode.token_file)."
        )

    def _not_reached(self, problem: str, attempts: int) -> NotReachedError:
        return NotReachedError(
            f"No master was found on {self.master_host}:{self.master_port} in {self._wait_seconds:g} s and {attempts} "
            f"attempts; the last: {problem}. Start it there (MasterNode(port={self.master_port}).start(), or %openclaw "
            "start), and look whether host and port are its."
        )

    def _join_message(self, device: Device | None) -> Join:
        own = own_software()
        return Join(
            protocol=PROTOCOL_VERSION,
            version=own.version,
            python=own.python,
            torch=own.torch,
            ticket=self._ticket,
            host=socket.gethostname(),
            pid=os.getpid(),
            device_id=self.device_id,
            device=None if device is None else asdict(device),
        )

    def _leave_message(self) -> Leave:
        return Leave(protocol=PROTOCOL_VERSION, ticket=self._ticket)

    def _come_in(self, caller: Caller, message: Join) -> None:
        deadline = time.monotonic() + _JOIN_SECONDS
        while time.monotonic() < deadline:
            standing = caller.ask(message, _ANSWER_SECONDS)
            self._number = standing.worker
            if standing.stage == "joined":
                return
            if standing.stage == "start" and self._engine is None:
                self._engine = _Engine.start(standing)
            if self._engine is not None and not self._engine.alive:
                raise StartError(f"{self.id} did not come up. The end of its log:\n{self._engine.log_tail()}")
            time.sleep(_POLL_SECONDS)
        raise JoinError(f"{self.id} was not taken in within {_JOIN_SECONDS:.0f} s.")

    # -------------------------------------------------------------------------------------------- being

    @property
    def id(self) -> str:
        """The worker's id in the cluster, e.g. ``worker-2``; "" before it has one."""
        return f"worker-{self._number}" if self._number >= 0 else ""

    @property
    def pid(self) -> int | None:
        """The process id of the worker, while it runs."""
        return self._engine.pid if self._engine is not None and self._engine.alive else None

    @property
    def state(self) -> str:
        """``new``, ``joined``, or ``left`` when its process has ended: removed, stopped with its master, or killed."""
        if self._engine is None:
            return "left" if self._number >= 0 else "new"
        return "joined" if self._engine.alive else "left"

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the worker has left; return whether it has."""
        if self._engine is None:
            return True
        return self._engine.wait(seconds)

    def attach_shared_memory(self, memory_id: str) -> SharedMemory:
        """Return shared memory of the master's host, by its id; see `openclaw_nb.attach_shared_memory`."""
        return attach_shared_memory(memory_id)

    # ------------------------------------------------------------------------------------------- leaving

    def close(self) -> None:
        """Leave the cluster; a data-parallel cell that runs lets the worker go at the head of a loop.

        Safe to call again.
        """
        if self._engine is not None and self._engine.alive:
            self._say_good_bye()
        self._end_engine()
        self._ticket = secrets.token_hex(16)

    def _say_good_bye(self) -> None:
        assert self._secret is not None
        assert self._engine is not None
        deadline = time.monotonic() + _LEAVE_SECONDS
        with (
            contextlib.suppress(OpenClawError),
            Caller(self.master_host, self.master_port, self._secret) as caller,
        ):
            while self._engine.alive and time.monotonic() < deadline:
                if caller.ask(self._leave_message(), _END_SECONDS).stage == "left":
                    return
                time.sleep(_POLL_SECONDS)

    def _end_engine(self) -> None:
        if self._engine is not None:
            self._engine.end()
        self._engine = None

    def __enter__(self) -> WorkerNode:
        return self if self.state == "joined" else self.connect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        name = f"{self.id} on {self.device_id}" if self.id else f"on {self.device_id}"
        return f"<WorkerNode {name}: {self.state} {self.master_host}:{self.master_port}>"


class _Engine:
    """The worker's process, and the folder with what it must know to connect."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self._process, self._folder = process, folder
        self._lock = threading.Lock()

    @classmethod
    def start(cls, standing: Standing) -> _Engine:
        """Start it as the master said."""
        folder = _make_folder()
        url_file = folder / "engine.json"
        url_file.touch(mode=0o600)
        url_file.write_text(json.dumps(standing.connection))
        command = [
            *(sys.executable, "-m", "openclaw_nb.engine"),
            *(f"--IPEngine.id={standing.worker}", f"--IPEngine.url_file={url_file}"),
            f"--profile-dir={folder}",
        ]
        started = create_time(os.getpid())
        assert started is not None, "this process is alive"
        leash = {LEASH: f"{os.getpid()} {round(started * os.sysconf('SC_CLK_TCK'))}"}
        own = {
            name: value
            for name, value in os.environ.items()
            if name not in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE)
        }
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                command,
                env={**own, **standing.environment, **leash},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the terminal's Ctrl-C is for this process, which ends that one gently
            )
        return cls(process, folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        with self._lock:
            return self._process.poll() is None

    def wait(self, seconds: float | None) -> bool:
        deadline = None if seconds is None else time.monotonic() + seconds
        while self.alive:
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def log_tail(self) -> str:
        text = (self._folder / "log.txt").read_text(errors="replace")
        return "\n".join(text.splitlines()[-_LOG_LINES:])

    def end(self) -> None:
        if self.alive:
            self._process.terminate()
            if not self.wait(_END_SECONDS):
                self._process.kill()
                self.wait(None)
        shutil.rmtree(self._folder, ignore_errors=True)


def _make_folder() -> Path:
    """Make a folder of this user's alone, and remove those that killed processes have left."""
    parent = runtime_directory() / _GUESTS_FOLDER
    parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    for old in parent.iterdir():
        pid = old.name.partition("-")[0]
        if pid.isdecimal() and create_time(int(pid)) is None:
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=parent))


def _stay_at_exit(node: WorkerNode) -> None:
    """Let a script's process stay for as long as its worker; close the worker when the process ends otherwise."""
    ipython = sys.modules.get("IPython")
    is_interactive = hasattr(sys, "ps1") or (ipython is not None and ipython.get_ipython() is not None)
    threading.Thread(target=node.wait, name=f"openclaw-{node.id}", daemon=is_interactive).start()
    atexit.register(node.close)
