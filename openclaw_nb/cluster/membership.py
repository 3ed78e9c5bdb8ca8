"""Which workers there are, and the process group they form.

Starts workers, forms the group under a new epoch after anything went wrong, and starts a new process in
the place of one that died, where the backend can. One thread at a time changes the membership; `ensure_ready` is where
others wait.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from typing import Any

import psutil

from openclaw_nb.cluster.devices import Device
from openclaw_nb.cluster.ipp import Door
from openclaw_nb.cluster.launch import SET_ENDED, Launch
from openclaw_nb.cluster.ownership import kill
from openclaw_nb.cluster.worker import Worker
from openclaw_nb.core.errors import ClusterError, OpenClawError, StartError, UsageError, WorkerDiedError
from openclaw_nb.protocol.messages import (
    Done,
    Failed,
    FormGroup,
    ImportModules,
    ListModules,
    Locate,
    Recall,
    Release,
    Reply,
)

Progress = Callable[[int, int, str], None]
HandOver = Callable[[Sequence[Worker]], str]
_START_SECONDS = 120.0
_RENDEZVOUS_SECONDS = 600.0
_POLL_SECONDS = 0.05
_WARM_SECONDS = 60.0
_MAX_ATTEMPTS = 3
_PATIENCE_SECONDS = 1.0
_STUCK_SECONDS = 5.0  # on a busy machine a rank that is free may need a moment to say so
_CLOSE_SECONDS = 10.0
_ANSWER_SECONDS = 5.0
_NO_NCCL = (
    "NCCL was asked for and cannot be used here, as it needs a GPU and PyTorch's CUDA build on every worker: all ranks "
    "use {communication}. With parallel.communication: gloo or auto this is not said; "
    "openclaw doctor says what is missing."
)
_NO_WORKERS = (
    "The cluster has no workers yet: start some (MasterNode.start_workers, add_worker), or let one join "
    "(WorkerNode(...).connect(), `openclaw worker`)."
)
_NO_ANSWER = "a cell that lets nothing else run"


class Membership:
    """The workers of one cluster.

    Parameters
    ----------
    door : Door
        How to reach engines.
    launch : Launch
        How to start them.
    host : str
        Address for the workers' stores.
    communication : str
        What the group is asked to communicate with.
    cluster_id : str
        The mark of its processes.

    Attributes
    ----------
    connecting : Lock
        Held while the controller is being started: `connect` waits for it.
    """

    def __init__(self, door: Door, launch: Launch, host: str, communication: str, cluster_id: str) -> None:
        self.door = door
        self._launch = launch
        self._host = host
        self._asked_communication = communication
        self._cluster_id = cluster_id
        self.communication = ""
        self.epoch = 0
        self.workers: list[Worker] = []
        self.ranks: dict[int, int] = {}
        self.notes: list[str] = []
        self._ready = threading.Event()
        self._error: OpenClawError | None = None
        self._changed = threading.Condition()
        self._forming = threading.Lock()
        self._mender: threading.Thread | None = None
        self._is_mending = self._mend_again = self._in_run = False
        self._closing = False
        self._lost = ""
        self._doing = ""
        self._first_death = ""
        self._replacing: list[threading.Thread] = []
        self._blank: set[int] = set()
        self._coming: set[int] = set()  # started, or announced, and not yet fit for a group
        self.connecting, self._is_connected = threading.Lock(), False
        self._hand_over: HandOver | None = None

    # ----------------------------------------------------------------------------------------- start

    def start(
        self, devices: Sequence[Device], spares: Sequence[Device], progress: Progress | None
    ) -> list[Worker]:
        """Start one worker a device and form the group, which spares are not in."""
        tell = progress or (lambda done, total, what: None)
        devices, num_working = [*devices, *spares], len(devices)
        total = 2 * len(devices) + 2
        started = self._announce(devices)  # a guest may have come before them
        for worker in started[num_working:]:
            worker.spare = True
        self._launch.start(started, len(self.present))
        tell(0, total, "starting the controller")
        self.connect()
        self._await_workers(started, lambda count: tell(1 + count, total, "starting workers"))
        tell(1 + len(devices), total, "importing torch")
        self._await_stores(started, lambda count: tell(1 + len(devices) + count, total, "importing torch"))
        self._coming -= {worker.number for worker in started}
        self._form()
        self.notes += self._launch.remarks()
        if self._asked_communication == "nccl" and not self.communication.startswith("nccl"):
            self.notes.append(_NO_NCCL.format(communication=self.communication))
        tell(total, total, "ready")
        self._ready.set()
        return self.workers

    def connect(self) -> None:
        """Reach the controller, once it has come up; at once when that was done before.

        Raises
        ------
        StartError
            When it does not come up.
        """
        with self.connecting:
            if not self._is_connected:
                self.door.connect()
                self._is_connected = True

    def _announce(self, devices: Sequence[Device], *, guest: bool = False) -> list[Worker]:
        """Give numbers to workers whose processes are not there yet."""
        with self._changed:
            first = len(self.workers)
            added = [Worker(number=first + i, device=device, guest=guest) for i, device in enumerate(devices)]
            self._coming.update(worker.number for worker in added)
            self.workers += added
        return added

    def state(self) -> dict[str, Any]:
        """Return what another process needs to go on with these workers."""
        return {
            "host": self._host,
            "communication": self._asked_communication,
            "devices": [asdict(worker.device) for worker in self.workers],
            "spares": [worker.number for worker in self.workers if worker.spare],
            "removed": [worker.number for worker in self.workers if worker.removed],
            "guests": [worker.number for worker in self.workers if worker.guest],
        }

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Take over workers that run, from their `state`. `mend` forms a group of them."""
        self.workers = [
            Worker(
                number=i,
                device=Device(**device),
                spare=i in state.get("spares", ()),
                removed=i in state.get("removed", ()),
                guest=i in state.get("guests", ()),
            )
            for i, device in enumerate(state["devices"])
        ]
        self.connect()
        for worker in self.workers:
            if worker.guest and not worker.alive:
                worker.removed = True
            if not worker.alive and not worker.removed and self._launch.replaces:
                self.notes.append(f"{worker.id} is gone: a new process starts in its place.")
        for worker in self._ask_where():
            worker.busy_with = _NO_ANSWER

    def _ask_where(self) -> list[Worker]:
        """Ask all workers where they are; return those that do not answer in time."""
        asked = {w.number: self.door.request_at_once(w.number, Locate()) for w in self.workers if w.alive}
        wait(asked.values(), timeout=_ANSWER_SECONDS)
        for number, answer in asked.items():
            if answer.done():
                self._take_place(self.workers[number], answer)
        return [self.workers[number] for number, answer in asked.items() if not answer.done()]

    def records(self) -> dict[int, dict[str, Any] | None]:
        """Return what each worker that answers has to say of its newest cell, by its number."""
        ask = Recall(with_output=False)
        asked = {
            w.number: self.door.request_at_once(w.number, ask)
            for w in self.workers
            if w.alive and w.busy_with != _NO_ANSWER
        }
        wait(asked.values(), timeout=_ANSWER_SECONDS)
        found = {}
        for number, answer in asked.items():
            with contextlib.suppress(WorkerDiedError, TimeoutError):
                reply = answer.result(timeout=0)
                found[number] = reply.value.get("run") if isinstance(reply, Done) else None
        return found

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return what each worker that answers in time says of its settings, by its id."""
        asked = {w.id: self.door.request_at_once(w.number, Locate()) for w in self.present if w.alive}
        wait(asked.values(), timeout=_ANSWER_SECONDS)
        found = {}
        for name, answer in asked.items():
            with contextlib.suppress(WorkerDiedError, TimeoutError):
                reply = answer.result(timeout=0)
                if isinstance(reply, Done):
                    found[name] = reply.value["settings"]
        return found

    @property
    def silent(self) -> list[Worker]:
        """Workers that have not said where they are since they were taken over."""
        return [worker for worker in self.workers if worker.busy_with == _NO_ANSWER]

    def _await_workers(self, workers: Sequence[Worker], tell: Callable[[int], None]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        with self._changed:
            while missing := [w for w in workers if not w.alive]:
                ended = [w for w in missing if w.removed or self.door.engine_ended(w.number)]
                if ended or self._closing or time.monotonic() > deadline:
                    absent = ended or missing
                    raise StartError(
                        f"{', '.join(w.id for w in absent)} did not come up. The end of the log:\n"
                        f"{self._launch.last_words(absent[0])}"
                    )
                self._changed.wait(_POLL_SECONDS)
                tell(sum(worker.alive for worker in workers))

    def _await_stores(self, workers: Sequence[Worker], tell: Callable[[int], None]) -> None:
        """Wait until each of these workers has imported torch and opened its store."""
        deadline = time.monotonic() + _START_SECONDS
        while waiting := [w for w in workers if w.alive and not w.store_port]:
            for worker in waiting:
                self._locate(worker)
            tell(sum(1 for w in workers if w.store_port))
            if time.monotonic() > deadline or self._closing:
                raise StartError(f"{waiting[0].id} did not import torch within {_START_SECONDS:.0f} s.")
            time.sleep(_POLL_SECONDS)

    def _locate(self, worker: Worker) -> None:
        answer = self.door.request_at_once(worker.number, Locate())
        wait([answer], timeout=_ANSWER_SECONDS)
        if answer.done():
            self._take_place(worker, answer)

    def _take_place(self, worker: Worker, answer: Future[Reply]) -> None:
        try:
            reply = answer.result()
        except WorkerDiedError:
            return
        if isinstance(reply, Done):
            value = reply.value
            worker.pid, worker.store_port, worker.epoch = value["pid"], value["store_port"], value["epoch"]
            worker.seen = time.monotonic()
            self.epoch = max(self.epoch, worker.epoch)
            worker.rank, worker.warm = value["rank"], value["warm"]
            self.communication = value["transport"] or self.communication
            worker.busy_with = value["where"]["run_id"] if value["where"] is not None else ""
            if value["problem"]:
                raise StartError(f"{worker.id}: {value['problem']}")

    # ---------------------------------------------------------------------------------------- the group

    def all_ranks(self) -> dict[int, int]:
        """Return the number of each living worker by its rank when all take part."""
        return {rank: worker.number for rank, worker in enumerate(self._fit)}

    @property
    def _fit(self) -> list[Worker]:
        """The members that can form a group now."""
        return [w for w in self.members if w.alive and w.number not in self._coming]

    @property
    def members(self) -> list[Worker]:
        """The workers that are, or are to be, in the group."""
        return [worker for worker in self.workers if not (worker.spare or worker.removed)]

    @property
    def present(self) -> list[Worker]:
        """The workers that were not removed, spares among them."""
        return [worker for worker in self.workers if not worker.removed]

    def regroup(self, numbers: Sequence[int]) -> None:
        """Form the group of exactly these workers, unless it stands already."""
        if list(self.ranks.values()) != list(numbers):
            self._form(numbers)

    def regroup_running(self, numbers: Sequence[int], run_id: str) -> dict[int, FormGroup]:
        """Return how each of these workers joins a group of them while a cell runs, under a new epoch."""
        with self._forming:
            members = [worker for worker in self.workers if worker.number in numbers]
            self.mark_running(run_id, numbers)
            self.epoch += 1
            self.ranks = {rank: worker.number for rank, worker in enumerate(members)}
            return {worker.number: self._form_command(rank, members) for rank, worker in enumerate(members)}

    def _form(self, numbers: Sequence[int] | None = None) -> None:
        """Form the group of these workers, or of all living ones, under a new epoch.

        Raises
        ------
        StartError
            When it cannot be formed in several attempts.
        """
        problem = ""
        with self._forming:  # a cell that wants other ranks and the mender may come at the same time
            for _ in range(_MAX_ATTEMPTS):
                problem = self._try_to_form(numbers)
                if not problem or self._closing:
                    return
        raise StartError(f"The process group could not be formed: {problem}")

    def _try_to_form(self, numbers: Sequence[int] | None) -> str:
        members = [w for w in self._fit if numbers is None or w.number in numbers]
        if not members:
            raise StartError("No worker is alive. Start again with %openclaw stop and %openclaw start.")
        self.epoch += 1
        self.ranks = {rank: worker.number for rank, worker in enumerate(members)}
        sent = {
            worker.number: self.door.request(worker.number, self._form_command(rank, members))
            for rank, worker in enumerate(members)
        }
        return self._collect(sent)

    def _form_command(self, rank: int, members: list[Worker]) -> FormGroup:
        return FormGroup(
            epoch=self.epoch,
            rank=rank,
            world_size=len(members),
            store_host=self._host,
            store_port=members[0].store_port,
            backend=self._asked_communication,
            timeout_seconds=_RENDEZVOUS_SECONDS,
            directory=os.getcwd(),
            search_path=list(sys.path),
        )

    def _collect(self, sent: dict[int, Future[Reply]]) -> str:
        """Wait for every member; when one fails, release the others. Return what went wrong, or ""."""
        problem = ""
        pending = dict(sent)
        while pending:
            for number, future in list(pending.items()):
                if not future.done():
                    continue
                del pending[number]
                found = self._problem_of(number, future)
                if found and not problem:
                    problem = found
                    self.release(problem)
            if pending:
                names = ", ".join(self.workers[number].id for number in pending)
                self._doing = f"the process group is being formed; {names} has not come yet"
                time.sleep(0.002)
            if self._closing:
                return "the cluster is being stopped"
        self._doing = ""
        return problem

    def _problem_of(self, number: int, future: Future[Reply]) -> str:
        try:
            reply = future.result()
        except WorkerDiedError as error:
            return str(error)
        if isinstance(reply, Failed):
            return f"worker {number}: {reply.message}"
        self.communication = reply.value["backend"]
        self.workers[number].pid = reply.value["pid"]
        self.workers[number].busy_with = ""
        return ""

    def release(self, cause: str) -> None:
        """End every wait of the present epoch on all living workers."""
        for worker in self.workers:
            if worker.alive:
                command = Release(epoch=self.epoch, run_id="", cause=cause, grace_seconds=0.0)
                self.door.request_at_once(worker.number, command)

    def interrupt_strays(self) -> bool:
        """Stop cells that an earlier owner has begun; return whether there were any."""
        strays = [worker for worker in self.workers if worker.alive and worker.busy_with]
        for worker in strays:
            command = Release(
                epoch=worker.epoch, run_id=worker.busy_with, cause="interrupted", grace_seconds=0.0
            )
            self.door.request_at_once(worker.number, command)
        return bool(strays)

    def end_forming(self) -> None:
        """End the forming of a group that an earlier owner, which is gone, has not asked all workers for."""
        for worker in self.workers:
            if worker.alive:
                cause = "another process has taken the cluster over"
                self.door.request_at_once(
                    worker.number, Release(epoch=worker.epoch, run_id="", cause=cause, grace_seconds=0.0)
                )

    # ------------------------------------------------------------------------------------------ mending

    def joined(self, number: int) -> None:
        """Take the news that an engine registered."""
        with self._changed:
            if number < len(self.workers):
                self.workers[number].alive = True
                self.workers[number].seen = time.monotonic()
            self._changed.notify_all()

    def heard(self, number: int) -> None:
        """Take the news that an engine told something."""
        if number < len(self.workers):
            self.workers[number].seen = time.monotonic()

    def begin_run(self) -> None:
        """Leave those who die from now on to the cell that begins; `after_run` mends what it leaves."""
        with self._changed:
            self._in_run = True

    def died(self, number: int) -> bool:
        """Take the news that an engine is gone; return whether a cell runs, else a new process takes its place."""
        with self._changed:
            was_removed = False
            if number < len(self.workers):
                worker = self.workers[number]
                was_removed = worker.removed
                self._first_death = self._first_death or worker.id
                worker.alive, worker.store_port, worker.pid, worker.busy_with = False, 0, None, ""
                worker.warm = False
                if worker.guest and not was_removed:
                    worker.removed = True
                    self.notes.append(f"{worker.id} on {worker.device.id} has left: its process ended.")
            self._changed.notify_all()
            if self._in_run:
                return True
            if was_removed:
                return False
            self._ready.clear()  # before anybody sees that one is missing
            self.mend()
            return False

    def mark_running(self, run_id: str, numbers: Iterable[int]) -> None:
        """Note what the workers are busy with."""
        for number in numbers:
            self.workers[number].busy_with = run_id

    def replace_running(self, number: int, ready: Callable[[int], None]) -> None:
        """Start a new process in the place of one that died, in the background, while the cell runs.

        Parameters
        ----------
        number : int
            The worker.
        ready : callable
            Told the worker's number when it can join a group.
        """
        thread = threading.Thread(
            target=self._replace, args=(self.workers[number], ready), name="openclaw-replace", daemon=True
        )
        with self._changed:
            if not self._in_run:  # the cell has ended meanwhile: `after_run` lets this one be mended
                return
            thread.start()
            self._replacing = [each for each in self._replacing if each.is_alive()] + [thread]

    def _replace(self, worker: Worker, ready: Callable[[int], None]) -> None:
        self._blank.add(worker.number)
        try:
            self._launch.start([worker], len(self.workers))
            self._await_workers([worker], lambda count: None)
            self._await_stores([worker], lambda count: None)
        except (OpenClawError, OSError) as error:
            self.notes.append(f"No new process could be started in the place of {worker.id}: {error}")
            return
        self.warm_up([worker])
        self._await_warmth(worker)
        if worker.alive:
            ready(worker.number)

    def take_spare(self, number: int) -> int | None:
        """Let a spare take the place of a worker in the cell that runs; return its number, or None."""
        with self._changed:
            spare = next((w for w in self.workers if w.spare and w.alive and w.store_port), None)
            if spare is None or not self._in_run:
                return None
            spare.spare, self.workers[number].spare = False, True
            self._blank.add(spare.number)
            return spare.number

    def add(self, devices: Sequence[Device]) -> list[Worker]:
        """Start workers beside those that there are; return when they can join a group.

        Raises
        ------
        StartError
            When one does not come up; nothing is left of them then.
        """
        added = self._announce(devices)
        try:
            self._launch.start(added, len(self.present))
        except BaseException:
            for worker in added:
                self.remove(worker.number)
            raise
        self.await_fit(added)
        return added

    def admit(self, device: Device) -> Worker:
        """Give a number to a worker that another process is about to start; `await_fit` waits for it."""
        return self._announce([device], guest=True)[0]

    def environment_for(self, worker: Worker) -> dict[str, str]:
        """Return the variables with which a worker is started that joins."""
        return self._launch.environment_for(worker, len(self.present))

    def await_fit(self, added: Sequence[Worker]) -> None:
        """Wait until these workers, which are starting, can join a group.

        Raises
        ------
        StartError
            When one does not come up; nothing is left of them then.
        """
        try:
            self._await_workers(added, lambda count: None)
            self._await_stores(added, lambda count: None)
            if gone := [worker.id for worker in added if worker.removed]:
                raise StartError(f"{', '.join(gone)} ended before it could take part.")
        except BaseException:
            for worker in added:
                self.remove(worker.number)
            raise
        if any(worker not in added for worker in self._fit):  # else nobody has variables that they lack
            self._blank.update(worker.number for worker in added)
        self.warm_up(added)
        for worker in added:
            self._await_warmth(worker)
        self._coming -= {worker.number for worker in added}

    def remove(self, number: int) -> None:
        """End a worker, for good."""
        self.workers[number].removed = True
        self._blank.discard(number)
        self._coming.discard(number)
        self.kill(number)
        with self._changed:
            self._changed.notify_all()

    def kill(self, number: int) -> None:
        """End a worker's process."""
        if number < len(self.workers) and (pid := self.workers[number].pid) is not None:
            kill(pid, self._cluster_id)

    def is_stopped(self, number: int) -> bool:
        """Return whether a worker's process is stopped (SIGSTOP)."""
        worker = self.workers[number]
        try:
            return worker.pid is not None and psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:  # it is gone
            return False

    def warm_up(self, workers: Sequence[Worker]) -> None:
        """Let workers import what the variables of those that train come from, so that nobody waits for it later."""
        known = (w for w in self.members if w.alive and w.number not in self._blank and w not in workers)
        source = next(known, None)
        if source is None:
            return
        asked = self.door.request_at_once(source.number, ListModules())
        wait([asked], timeout=_ANSWER_SECONDS)
        with contextlib.suppress(OpenClawError, TimeoutError):
            reply = asked.result(timeout=0)
            if isinstance(reply, Done):
                order = ImportModules(**reply.value)
                wait([self.door.request_at_once(w.number, order) for w in workers], timeout=_ANSWER_SECONDS)

    def warm_spares(self) -> None:
        """Let the spares import, in the background, what they would need in the cell that begins."""
        spares = [w for w in self.workers if w.spare and w.alive and w.store_port]
        if spares:
            threading.Thread(
                target=self.warm_up, args=(spares,), name="openclaw-warm-up", daemon=True
            ).start()

    def when_warm(self, number: int, ready: Callable[[int], None]) -> None:
        """Tell a spare's number, from another thread, when it has imported what it was asked to: at once as a rule."""

        def tell() -> None:
            self._await_warmth(self.workers[number])
            if self.workers[number].alive:
                ready(number)

        threading.Thread(target=tell, name="openclaw-warm", daemon=True).start()

    def _await_warmth(self, worker: Worker) -> None:
        """Wait until a worker would let nobody wait for what it has to import, but not for ever: a module may block."""
        deadline = time.monotonic() + _WARM_SECONDS
        worker.warm = False
        self._locate(worker)
        while worker.alive and not worker.warm and not self._closing and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            self._locate(worker)

    def after_run(
        self,
        *,
        clean: bool,
        busy: Sequence[int],
        joined: Sequence[int] = (),
        hand_over: HandOver | None = None,
    ) -> None:
        """Put the group in order after a cell: nothing to do after a clean one.

        Parameters
        ----------
        clean : bool
            Whether the group stands as it did.
        busy : sequence of int
            Workers that have not left the cell.
        joined : sequence of int
            Workers that have come into it, and so have its variables.
        hand_over : callable, optional
            Gives the cell's variables to those that came too late for it; returns what they did, for the person.
        """
        self._blank -= set(joined)
        with self._changed:
            self._in_run = False
            for worker in self.workers:
                if worker.number not in busy:
                    worker.busy_with = ""
            is_changing = any(thread.is_alive() for thread in self._replacing)
            is_blank = any(worker.number in self._blank for worker in self.members)
            is_whole = all(worker.alive or worker.number in self._coming for worker in self.present)
            if not clean or is_changing or is_blank or not is_whole:
                self._hand_over = hand_over
                self.mend()

    def reform(self, replace_busy: bool) -> None:
        """Form a fresh group; end workers that are stuck in a cell when told to.

        Raises
        ------
        UsageError
            When they cannot be replaced.
        """
        if replace_busy and not self._launch.replaces:
            raise UsageError(f"No worker can be replaced here. {SET_ENDED}")
        if replace_busy:
            for worker in self.workers:
                if worker.busy_with:
                    self.kill(worker.number)
        self.mend()

    def lost(self, why: str) -> None:
        """Take the news that no worker can be reached any more: nothing is mended, and waiting ends."""
        self._lost, self._closing = why, True
        with self._changed:
            self._changed.notify_all()

    def mend(self) -> None:
        """Start what is missing and form a fresh group, in the background."""
        if self._closing:
            return
        with self._changed:
            self._ready.clear()
            self._error = None
            if self._is_mending:
                self._mend_again = True
                return
            self._is_mending = True
            self._mender = threading.Thread(target=self._mend, name="openclaw-mend", daemon=True)
            self._mender.start()

    def _mend(self) -> None:
        while not self._closing:
            self._mend_again, self._error = False, None
            try:
                self._mend_once()
            except OpenClawError as error:
                # Kept for whoever runs the next cell.
                self._error = error
            except OSError as error:  # no process can be started: no memory, too many of them
                self._error = StartError(f"The workers could not be mended: {error}")
            with self._changed:
                if not self._mend_again:
                    self._is_mending = False
                    self._ready.set()
                    return

    def _furnish(self) -> None:
        """Give those that have no variables what the last cell has left, or say that they have none."""
        blank = [worker for worker in self.members if worker.number in self._blank]
        hand_over, self._hand_over = self._hand_over, None
        self._blank.clear()
        if not blank:
            return
        names = ", ".join(worker.id for worker in blank)
        why = ""
        if hand_over is not None:
            self._doing = f"{names} takes over the variables"
            try:
                self.notes.append(f"{names} came too late for the cell and {hand_over(blank)}.")
                return
            except OpenClawError as error:
                why = f" ({error})"
        self.notes.append(
            f"{names} is a new process without variables{why}: run the cells that build them again, "
            "or %openclaw push."
        )

    def _mend_once(self) -> None:
        for thread in self._replacing:
            thread.join()
        dead = [w for w in self.present if not w.alive and w.number not in self._coming]
        if dead and not self._launch.replaces:
            self._launch.end()
            raise ClusterError(f"{self._first_death or dead[0].id} died. {SET_ENDED}")
        if dead:
            self._doing = f"{', '.join(w.id for w in dead)} died: a new process is starting in its place"
            self._blank.update(worker.number for worker in dead)
            self._launch.start(dead, len(self.workers))
            self._await_workers(dead, lambda count: None)
            self._await_stores(dead, lambda count: None)
        self._await_answers()
        self._form()
        self._furnish()

    def _await_answers(self) -> None:
        """Wait for workers that have not said where they are: in native code they answer when they come out."""
        while not self._closing and (silent := [w for w in self.workers if w.alive and not w.store_port]):
            self._doing = f"{silent[0].id} does not answer yet"
            self._ask_where()
            time.sleep(_POLL_SECONDS)

    def ensure_ready(self, on_wait: Callable[[str], None] | None) -> None:
        """Wait until the group stands.

        Raises
        ------
        ClusterError
            When a rank is still inside an earlier cell, the group could not be formed, the controller has ended, or
            this process leaves the cluster.
        """
        started = time.monotonic()
        if not self.workers:
            raise ClusterError(_NO_WORKERS)
        while not self._ready.wait(0 if self._closing else _POLL_SECONDS) or self._lost:
            if self._closing:
                raise ClusterError(self._lost or "The cluster is being stopped, or left to another owner.")
            waited = time.monotonic() - started
            stuck = [w for w in self.workers if w.busy_with and w.alive]
            if stuck and waited > _STUCK_SECONDS:
                raise ClusterError(
                    f"{stuck[0].id} is still inside an earlier cell, probably in native code. "
                    "It rejoins by itself when it comes out; %openclaw reset --replace starts a new process "
                    "instead."
                )
            if on_wait and self._doing and waited > _PATIENCE_SECONDS:
                on_wait(self._doing)
        if self._error is not None:
            raise self._error

    def take_notes(self) -> list[str]:
        """Return what a person should be told since the last call."""
        notes, self.notes = self.notes, []
        return notes

    def close(self) -> None:
        """Stop mending; no process is started after this returns."""
        self._closing = True
        with self._changed:
            self._changed.notify_all()
        if self._mender is not None:
            self._mender.join(_CLOSE_SECONDS)
