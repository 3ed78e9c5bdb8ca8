"""The process group as a service on a worker: form, leave, release, form again under a new epoch.

Each epoch has its own keys in a store, its own loopback address and two groups over it: the one that the
cell's ``dist`` calls use (ranks compare their calls), and one for the step engine, beside which `divide` makes
groups of parts of the ranks for strategies that need them. Forming waits in
Python while a helper thread does the rendezvous, so that it too ends when it is told to.

Each worker offers a `torch.distributed.TCPStore` from its start; an epoch uses the one of its first rank,
and is gone with it anyway when that rank dies.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from openclaw_nb.core.errors import GroupError, ReleasedError
from openclaw_nb.engine.group import gloo, mpi
from openclaw_nb.engine.group.collectives import ReleasableGroup, Wait
from openclaw_nb.engine.group.mesh import Mesh, connect
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.group.sums import Peers, SharedMemory, Shortcut
from openclaw_nb.engine.group.unfinished import Unfinished
from openclaw_nb.protocol.messages import FormGroup

_T = TypeVar("_T")
Parts = tuple[tuple[int, ...], ...]
_BACKEND_NAME = "openclaw"
_GLOO_NAME = "openclaw_gloo"
# The backend's own limit. A rank that is only slow must not end the others' wait, so it is long: ends of
# waits come from `release`, this only bounds what a thread of gloo that missed its wake-up can linger.
_BACKEND_LIMIT = timedelta(minutes=30)
_CUT_AGAIN_SECONDS = 0.02


def listen(host: str) -> tuple[dist.TCPStore, int]:
    """Open this worker's store on ``host`` alone and return it with its port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


class GroupService:
    """This worker's membership in the process group.

    Parameters
    ----------
    tag : str
        Hexadecimal id of the cluster, the same on every worker.
    cause_of_end : callable, optional
        Given an epoch, why it was released before this rank came to form its group, or "".
    """

    def __init__(self, tag: str, cause_of_end: Callable[[int], str] = lambda epoch: "") -> None:
        self._tag = tag
        self._cause_of_end = cause_of_end
        self.epoch = 0
        self.rank = 0
        self.world_size = 1
        self.backend = "none"
        self.internal: ReleasableGroup | None = None
        self.shortcut: Shortcut | None = None
        self._peers: list[Peers] = []
        self._shortcuts: list[Shortcut] = []
        self._parts: dict[tuple[Parts, str], tuple[ReleasableGroup, Shortcut | None]] = {}
        self._meeting: Wait | None = None
        self._unfinished: Unfinished | None = None
        self._store: dist.Store | None = None
        self._groups: list[ReleasableGroup] = []
        self._scissors: list[gloo.Scissors] = []
        self._serial = 0
        self.socket_buffers: tuple[int, int] | None = None
        self._stop = threading.Event()
        self._cause = ""
        self._forming: FormGroup | None = None
        self._forming_since = 0.0
        dist.Backend.register_backend(_BACKEND_NAME, self._create_user_group, devices=["cpu", "cuda"])
        dist.Backend.register_backend(_GLOO_NAME, self._create_gloo_group, devices=["cpu", "cuda"])
        c10d.new_group = dist.new_group = _with_own_backends(c10d.new_group)

    # --------------------------------------------------------------------------------- form, leave

    def form(self, command: FormGroup) -> None:
        """Join the group of ``command.epoch``; an older group is left first.

        Raises
        ------
        ReleasedError
            When told to stop while waiting for the other ranks.
        GroupError
            When the rendezvous fails.
        """
        self.leave()
        self._stop.clear()
        self._cause = ""
        self.epoch, self._forming, self._forming_since = command.epoch, command, time.monotonic()
        if cause := self._cause_of_end(
            command.epoch
        ):  # asked with the epoch set: what is released from now on is seen
            self.release(cause)
        try:
            store = self._apart(lambda: self._connect(command))
            self.backend = self._apart(lambda: _agree_on_backend(store, command))
            self._serial = 0
            place = dist.PrefixStore("internal", store)
            self.internal = self._create(
                place, command, "step engine", command.rank, command.world_size, self.backend, compares=False
            )
            self._store = store
            self.shortcut = self._take_shortcut(store, command.rank, command.world_size)
            dist.init_process_group(
                _BACKEND_NAME,
                store=dist.PrefixStore("user", store),
                rank=command.rank,
                world_size=command.world_size,
                timeout=_BACKEND_LIMIT,
            )
        except (RuntimeError, KeyboardInterrupt):
            self.leave()
            raise
        self.rank, self.world_size = command.rank, command.world_size
        self._finish_what_is_left(store)

    def leave_unfinished(self, what: Unfinished) -> None:
        """Keep what the ranks of this group are to finish in their next one."""
        self._unfinished = what.of_epoch(self.epoch)

    def _finish_what_is_left(self, store: dist.Store) -> None:
        """Let the ranks that have left something finish it, if enough of them are in this group."""
        left = self._unfinished
        words = self._apart(lambda: _tell_all(store, self.rank, self.world_size, left.word() if left else ""))
        self._unfinished = None
        if left is None:
            return
        holders = left.holders(words)
        if holders is None:
            self._unfinished = left if left.waits(words) else None
            return
        try:
            left.finish(Ranks(*self.divide((tuple(holders.values()),), left.name)), list(holders))
        except (GroupError, KeyboardInterrupt):
            self._unfinished = left
            raise

    def leave(self) -> None:
        """Forget the present group; its backends are buried by a thread of their own."""
        self.release("the worker left the group")
        if dist.is_initialized():
            dist.destroy_process_group()
        # A failed rendezvous leaves the counter that names groups raised on this rank alone.
        c10d._world.group_count = 0
        self.internal = self.shortcut = self._store = None
        self.rank, self.world_size, self.backend = 0, 1, "none"
        self._groups, self._scissors = [], []
        self._peers, self._shortcuts, self._parts = [], [], {}

    def release(self, cause: str) -> None:
        """End every wait of this epoch's groups, forming included; callable from any thread."""
        if self._stop.is_set():
            return
        self._cause = cause
        self._stop.set()
        groups, scissors, shortcuts = list(self._groups), list(self._scissors), list(self._shortcuts)
        for group in groups:
            group.release(cause)
        for peers in list(self._peers):
            peers.cut()
        if groups or scissors:
            threading.Thread(
                target=_bury, args=(groups, scissors, shortcuts), name="openclaw-undertaker", daemon=True
            ).start()

    def divide(self, parts: Parts, purpose: str) -> tuple[ReleasableGroup, Shortcut | None]:
        """Return the group of this rank's part of the ranks, and its shortcut; see `Ranks.split`.

        It is released and left with the whole group. The same parts and purpose are the same groups as long as the
        epoch lasts.

        Raises
        ------
        ReleasedError
            When told to stop while waiting for the other ranks.
        GroupError
            When there is no group, or the ranks cannot meet.
        """
        if self._store is None or not self.intact:
            raise GroupError("The worker is in no group. Run %openclaw reset to form one.")
        key = parts, purpose
        if key not in self._parts:
            own = next(part for part in parts if self.rank in part)
            store = dist.PrefixStore(f"{purpose} {parts} {own}", self._store)
            self._meeting = Wait(f"forming {purpose}", "group", self.epoch, time.monotonic())
            try:
                self._parts[key] = self._form_part(own, purpose, store)
            finally:
                self._meeting = None
        return self._parts[key]

    @property
    def intact(self) -> bool:
        """Whether a group stands and was not released."""
        return self.internal is not None and not self._stop.is_set()

    @property
    def transport(self) -> str:
        """What the ranks' data goes through."""
        if isinstance(self.shortcut, mpi.Channel):
            return f"sums by MPI, dist.* by {self.backend}"
        return f"{self.backend} + shared memory" if self.shortcut is not None else self.backend

    def current_wait(self) -> Wait | None:
        """Return what this rank waits for, if it waits in a collective."""
        if self._forming is not None and self.internal is None and not self._stop.is_set():
            return Wait("forming the group", "group", self.epoch, self._forming_since)
        waits = [self._meeting, *(g.board.current for g in list(self._groups))]
        return next((w for w in waits if w is not None), None)

    # ------------------------------------------------------------------------------------- internals

    def _connect(self, command: FormGroup) -> dist.Store:
        timeout = timedelta(seconds=command.timeout_seconds)
        client = dist.TCPStore(command.store_host, command.store_port, is_master=False, timeout=timeout)
        return dist.PrefixStore(f"epoch-{command.epoch}", client)

    def _form_part(
        self, own: Sequence[int], purpose: str, store: dist.Store
    ) -> tuple[ReleasableGroup, Shortcut | None]:
        assert self._forming is not None
        rank, size = own.index(self.rank), len(own)
        name = f"{purpose} of ranks {', '.join(map(str, own))}"
        place = dist.PrefixStore("internal", store)
        group = self._create(place, self._forming, name, rank, size, self.backend, compares=False)
        return group, self._take_shortcut(store, rank, size)

    def _take_shortcut(self, store: dist.Store, rank: int, size: int) -> Shortcut | None:
        """Let the step engine reduce by MPI if asked to, or through shared memory on one host without GPUs."""
        command = self._forming
        assert command is not None
        if size == 1:
            return None
        if command.backend == "mpi" and size == command.world_size:
            place = dist.PrefixStore("mpi", store)
            channel = self._apart(lambda: mpi.join(place, rank, size, command.epoch))
            self._peers.append(channel)
            self._shortcuts.append(channel)
            return channel
        if command.backend == "auto" and self.backend == "gloo":
            return self._share_memory(dist.PrefixStore("mesh", store), rank, size)
        return None

    def _share_memory(self, place: dist.Store, rank: int, size: int) -> Shortcut | None:
        mesh = self._apart(lambda: connect(place, rank, size))
        if mesh is None:
            return None
        self._peers.append(mesh)
        memory = self._apart(lambda: _memory_of(mesh))
        if memory is not None:
            self._shortcuts.append(memory)
        return memory

    def _create_user_group(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> ReleasableGroup:
        """Build the default group or one of the user's sub-groups; torch calls this."""
        return self._create_group(store, rank, size, self.backend)

    def _create_gloo_group(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> ReleasableGroup:
        """Build a sub-group for which gloo was asked by name; torch calls this."""
        return self._create_group(store, rank, size, "gloo")

    def _create_group(self, store: dist.Store, rank: int, size: int, backend: str) -> ReleasableGroup:
        command = self._forming
        if command is None:
            raise GroupError("The worker is in no group. Run %openclaw reset to form one.")
        name = "default" if size == command.world_size else "sub-group"
        return self._create(store, command, name, rank, size, backend)

    def _create(
        self,
        store: dist.Store,
        command: FormGroup,
        name: str,
        rank: int,
        size: int,
        backend: str,
        *,
        compares: bool = True,
    ) -> ReleasableGroup:
        self._serial += 1
        own = gloo.private_address(self._tag, command.epoch * 4096 + self._serial)
        address = self._apart(lambda: _agree_on_address(store, rank, own))
        self._scissors.append(gloo.Scissors(address))
        witness = self._apart(lambda: gloo.create(store, rank, size, _BACKEND_LIMIT, address))
        self.socket_buffers = gloo.size_buffers(address) or self.socket_buffers
        inner: Any = witness
        if backend == "nccl":
            place = dist.PrefixStore("nccl", store)
            inner = dist.ProcessGroupNCCL(place, rank, size, _BACKEND_LIMIT)  # type: ignore[arg-type] # an overload
        group = ReleasableGroup(inner, rank, size, name, witness=witness if compares else None)
        self._groups.append(group)
        return group

    def _apart(self, build: Callable[[], _T]) -> _T:
        """Run ``build`` on a helper thread and wait for it, but only until this epoch is released."""
        box: list[_T] = []
        errors: list[Exception] = []
        done = threading.Event()

        def run() -> None:
            try:
                box.append(build())
            except Exception as error:  # noqa: BLE001 - raised again below, in the thread that waits
                errors.append(error)
            done.set()

        threading.Thread(target=run, name="openclaw-rendezvous", daemon=True).start()
        while not done.wait(_CUT_AGAIN_SECONDS):
            if self._stop.is_set():
                raise ReleasedError(self._cause)
        if self._stop.is_set():
            raise ReleasedError(self._cause)
        if errors:
            raise GroupError(f"The ranks could not meet: {errors[0]}") from errors[0]
        return box[0]


def _memory_of(mesh: Mesh) -> SharedMemory | None:
    """Return the ranks' memory, or None on all of them where one cannot have it."""
    try:
        return SharedMemory(mesh)
    except OSError:
        mesh.cut()  # so that the others do not wait for this rank
        return None


def _bury(groups: list[ReleasableGroup], scissors: list[gloo.Scissors], shortcuts: list[Shortcut]) -> None:
    """Cut the groups' sockets until their backends are silent, then drop them and their shortcuts.

    Runs on a thread of its own: a backend's destructor waits for its threads.
    """
    for group in groups:
        with contextlib.suppress(RuntimeError):  # a backend that is broken already has nothing left to end
            group.abort_backend()
    deadline = time.monotonic() + _BACKEND_LIMIT.total_seconds()
    quiet_since = time.monotonic()
    while time.monotonic() < deadline:
        found = sum(blade.cut() for blade in scissors)
        if found or any(group.busy for group in groups):
            quiet_since = time.monotonic()
        elif time.monotonic() - quiet_since > 1.0:  # late connections have had time to appear
            break
        time.sleep(_CUT_AGAIN_SECONDS)
    for group in groups:
        group.bury()
    for blade in scissors:
        blade.close()
    for shortcut in shortcuts:
        shortcut.close()


def _agree_on_backend(store: dist.Store, command: FormGroup) -> str:
    """Return ``nccl`` if it was asked for (or left open) and every rank can use it, else ``gloo``."""
    can = command.backend in ("auto", "nccl") and dist.is_nccl_available() and torch.cuda.is_available()
    store.set(f"backend-{command.rank}", "nccl" if can else "gloo")
    every = [store.get(f"backend-{rank}").decode() for rank in range(command.world_size)]
    return "nccl" if set(every) == {"nccl"} else "gloo"


def _tell_all(store: dist.Store, rank: int, size: int, word: str) -> list[str]:
    """Give every rank a word, and return what each one gave."""
    store.set(f"left-{rank}", word)
    return [store.get(f"left-{other}").decode() for other in range(size)]


def _agree_on_address(store: dist.Store, rank: int, own: str) -> str:
    """Return the first rank's address: ranks that are in different sub-groups count their groups differently."""
    if rank == 0:
        store.set("address", own)
    return store.get("address").decode()


def _with_own_backends(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``new_group(backend="gloo")`` make a group whose waits can be ended, like any other."""
    own = {"gloo": _GLOO_NAME, "nccl": _BACKEND_NAME}

    @functools.wraps(new_group)
    def wrapped(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        return new_group(ranks, timeout, own.get(backend, backend), *args, **kwargs)

    return wrapped


def host_of_store() -> str:
    """Return the address that this worker's store listens on."""
    return os.environ.get("OPENCLAW_STORE_HOST", "127.0.0.1")
