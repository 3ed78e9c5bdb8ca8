"""A small process that ends a cluster when the notebook kernel that owns it dies.

    owner (kernel)                                guardian
    Guardian.start() ── first line (JSON) ──────► reads fd 0, which only the owner can write to
    Guardian.detach() ─ "detach" ───────────────► ends, the cluster goes on
    Guardian.dismiss()  "stop" ─────────────────► ends, there is no cluster any more
    killed ─────────── end of the pipe ─────────► waits the lease out, ends every process of the
                                                  cluster, removes its directory and
                                                  shared memory, ends

A killed kernel runs no clean-up, and the workers live in sessions of their own: without this process they
would stay for ever. The end of the pipe is noticed at once. A child that the kernel forked may hold the
pipe open, so the owner's pid and start time are looked at every two seconds too; either is enough.

With a lease the cluster waits for a new owner (``attach`` after a kernel restart). The guardian of the new
owner writes its name into the directory, and the old one, seeing that, ends and touches nothing.

The guardian knows processes by their mark (`openclaw_nb.cluster.ownership`), the directory by its marker
file, and shared memory by names that begin with ``openclaw-<id>``. It does not know ipyparallel, and it
imports nothing heavy: it runs for as long as the cluster.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from openclaw_nb.cluster.ownership import CLUSTER_VARIABLE, create_time, end_processes
from openclaw_nb.core.errors import ClusterError, StartError

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

MARKER_FILE = "openclaw-cluster.json"
"""A directory is a cluster's own if it holds this JSON file with the key ``cluster_id``."""

_CLAIM_FILE = "guardian.json"
_LOCK_FILE = "lock"
_LOG_FILE = "guardian.log"
_SHARED_MEMORY = "/dev/shm"
_OWNER_CHECK_SECONDS = 2.0
_CLAIM_CHECK_SECONDS = 0.2
_GRACE_SECONDS = 1.5
_READY_SECONDS = 20.0
_READY = b"ready\n"


@dataclass(frozen=True)
class Charge:
    """What a guardian is told in its first line.

    Attributes
    ----------
    cluster_id : str
        The mark of the cluster's processes.
    directory : str
        The cluster's directory, removed with the cluster if its marker file says the same id.
    lease_seconds : float
        How long the cluster waits for a new owner after its owner died.
    owner_pid, owner_create_time : int, float
        Whose death ends the cluster, as `openclaw_nb.cluster.ownership.create_time` gives it.
    """

    cluster_id: str
    directory: str
    lease_seconds: float
    owner_pid: int
    owner_create_time: float


@contextlib.contextmanager
def locked(directory: str | Path) -> Iterator[None]:
    """Be the only process that takes a cluster over or ends it, for the time of the ``with`` block."""
    try:
        descriptor = os.open(os.path.join(directory, _LOCK_FILE), os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:  # the directory is gone: nobody else can take what was in it
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------- the owner's side


class Guardian:
    """The owner's handle of a guardian process.

    The guardian watches until `detach` or `dismiss` is called or the owner ends, also if the handle is lost.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(cls, cluster_id: str, directory: str | Path, *, lease_seconds: float = 0.0) -> Guardian:
        """Start a guardian for a cluster that the calling process owns, and wait until it watches.

        Parameters
        ----------
        cluster_id : str
            The mark of the cluster's processes.
        directory : str or Path
            The cluster's directory. It must exist; the guardian writes its claim into it.
        lease_seconds : float
            How long the cluster stays up after the owner's death, to be taken over by another guardian.

        Raises
        ------
        StartError
            If the guardian does not come up, with what it said.
        """
        if not os.path.isdir(directory):
            raise StartError(f"The cluster's directory {str(directory)!r} does not exist; make it first.")
        started = create_time(os.getpid())
        assert started is not None, "the calling process is alive"
        charge = Charge(cluster_id, os.path.abspath(directory), lease_seconds, os.getpid(), started)
        process = _spawn()
        try:
            _hand_over(process, charge)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        guardian = cls(process)
        _hold(guardian)
        return guardian

    @property
    def pid(self) -> int:
        """The guardian's process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the guardian still watches."""
        return self._process.poll() is None

    def detach(self) -> None:
        """Leave the cluster running: the guardian ends and touches nothing. Safe to call again."""
        self._say(b"detach\n")

    def dismiss(self) -> None:
        """Say that the cluster was stopped cleanly: the guardian ends. Safe to call again."""
        self._say(b"stop\n")

    def _say(self, word: bytes) -> None:
        import subprocess

        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            return  # said before, or this is a fork of the owner, which owns nothing
        with contextlib.suppress(BrokenPipeError):  # somebody killed it: there is nothing left to tell
            stdin.write(word)
        _held.discard(self)
        stdin.close()
        try:
            self._process.wait(_READY_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # stopped or stuck: it must not act on the end of the pipe later
            self._process.wait()

    def _let_go(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()


# Keeps the handles, and with them the pipes, alive: a handle that is collected as garbage would look to its
# guardian like a dead owner.
_held: set[Guardian] = set()


def _hold(guardian: Guardian) -> None:
    """Keep the pipe open here, and close it in every process that this one forks."""
    _held.add(guardian)
    _let_go_in_forks()


@functools.cache
def _let_go_in_forks() -> None:
    os.register_at_fork(after_in_child=_let_go_of_all)


def _let_go_of_all() -> None:
    for guardian in _held:
        guardian._let_go()
    _held.clear()


def _spawn() -> subprocess.Popen[bytes]:
    """Start the guardian's interpreter: isolated, so that neither user paths nor site hooks reach it."""
    import subprocess

    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = (
        "import sys; sys.path.append(sys.argv[1]); "
        "from openclaw_nb.cluster.guardian import main; sys.exit(main())"
    )
    # Off Linux psutil is needed, which lives among the site packages.
    flags = ["-I", "-S"] if sys.platform == "linux" else ["-P"]
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code, root],
        bufsize=0,
        stdin=subprocess.PIPE,  # created close-on-exec: no program that the owner starts gets its write end
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != CLUSTER_VARIABLE},
        cwd=os.sep,
        start_new_session=True,
    )


def _hand_over(process: subprocess.Popen[bytes], charge: Charge) -> None:
    """Send the first line and wait for the answer."""
    assert process.stdin is not None, "all three are pipes"
    assert process.stdout is not None
    assert process.stderr is not None
    with contextlib.suppress(BrokenPipeError):  # it ended already, and what it said is read below
        process.stdin.write(json.dumps(asdict(charge)).encode() + b"\n")
    ready, _, _ = select.select([process.stdout], [], [], _READY_SECONDS)
    if not ready:
        raise StartError(f"The guardian of the cluster gave no sign of life in {_READY_SECONDS:.0f} s.")
    if process.stdout.read(len(_READY)) != _READY:
        said = process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        raise StartError(f"The guardian of the cluster did not start: {said or 'it said nothing'}")
    process.stdout.close()
    process.stderr.close()


# ------------------------------------------------------------------------------------- the guardian process


def main() -> int:
    """Be the guardian: read the charge, watch, and act on what ends the watch. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    lines = _Lines(0)
    first = lines.next(lambda: True)
    if first is None:
        return 0
    charge = Charge(**json.loads(first))
    _claim(charge)
    os.write(1, _READY)
    _silence()
    word = lines.next(lambda: create_time(charge.owner_pid) == charge.owner_create_time)
    if word is not None or not _lease_ran_out(charge):
        return 0
    with locked(charge.directory):  # whoever takes it over meanwhile has said so when the lock is ours
        return _end_cluster(charge) if _is_mine(charge) else 0


class _Lines:
    """The lines that arrive on a pipe, without a reader that would block past the owner's death."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = b""

    def next(self, owner_lives: Callable[[], bool]) -> str | None:
        """Return the next line, or None when the pipe has ended or the owner lives no more."""
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._descriptor], [], [], _OWNER_CHECK_SECONDS)
            chunk = os.read(self._descriptor, 4096) if ready else b""
            if not chunk and (ready or not owner_lives()):
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()


def _silence() -> None:
    """Point both outputs at nothing: their pipes end in the owner, which closes them."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.close(nothing)


def _claim(charge: Charge) -> None:
    """Write into the directory that this guardian, and no earlier one, watches over the cluster."""
    path = os.path.join(charge.directory, _CLAIM_FILE)
    draft = f"{path}.{os.getpid()}"
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(_own_claim(), file)
    os.replace(draft, path)


def _own_claim() -> dict[str, float | None]:
    return {"pid": os.getpid(), "create_time": create_time(os.getpid())}


def _is_mine(charge: Charge) -> bool:
    """Whether no other guardian took over; a directory without a claim has nobody else who would act."""
    claim = _read_json(charge.directory, _CLAIM_FILE)
    return claim is None or claim == _own_claim()


def _lease_ran_out(charge: Charge) -> bool:
    """Wait for a new owner as long as the lease says, and one may come; False if one came."""
    deadline = time.monotonic() + charge.lease_seconds
    while _is_mine(charge):
        left = deadline - time.monotonic()
        if left <= 0 or not os.path.isdir(charge.directory):  # without it nobody can come
            return True
        time.sleep(min(left, _CLAIM_CHECK_SECONDS))
    return False


def _end_cluster(charge: Charge) -> int:
    """End every process, then remove the directory; what could not be done is written into it."""
    try:
        end_processes(charge.cluster_id, grace_seconds=_GRACE_SECONDS)
        _remove_files(charge)
    except (ClusterError, OSError) as error:
        if _is_ours(charge):
            with open(os.path.join(charge.directory, _LOG_FILE), "a", encoding="utf-8") as file:
                file.write(f"{error}\n")
        return 1
    return 0


def _remove_files(charge: Charge) -> None:
    """Remove the directory and, known by the id in their names, what the cluster left in shared memory."""
    import glob
    import shutil

    for path in glob.glob(f"{_SHARED_MEMORY}/openclaw-{charge.cluster_id}*"):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    if _is_ours(charge):
        shutil.rmtree(charge.directory)  # does not follow links, neither at the top nor below


def _is_ours(charge: Charge) -> bool:
    marker = _read_json(charge.directory, MARKER_FILE)
    return isinstance(marker, dict) and marker.get("cluster_id") == charge.cluster_id


def _read_json(directory: str, name: str) -> object:
    try:
        with open(os.path.join(directory, name), encoding="utf-8") as file:
            content: object = json.load(file)
            return content
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(main())
