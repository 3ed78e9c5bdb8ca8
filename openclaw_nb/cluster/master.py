"""The master: one cluster's processes, its process group, and what runs on it.

    MasterNode ──> Door (processes, messages)
               ──> Membership (which workers are there, forming the group, taking back who died)
               ──> CellRun (the cell that runs now)
               ──> Exchange (variables between the notebook and the workers)

Knows workers, epochs and runs; does not know how anything is shown, nor what a strategy does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from openclaw_nb.cluster.adopted import AdoptedRun, newest
from openclaw_nb.cluster.chaos import Chaos, OwnProcesses
from openclaw_nb.cluster.devices import Device
from openclaw_nb.cluster.exchange import Exchange
from openclaw_nb.cluster.faults import Faults
from openclaw_nb.cluster.files import ClusterFiles
from openclaw_nb.cluster.guardian import Guardian
from openclaw_nb.cluster.ipp import Door
from openclaw_nb.cluster.join.desk import Desk
from openclaw_nb.cluster.join.gate import DEFAULT_PORT, Gate
from openclaw_nb.cluster.join.ports import check_host, check_port
from openclaw_nb.cluster.launch import BACKENDS, SET_ENDED, check_devices, check_installed, check_words
from openclaw_nb.cluster.membership import HandOver, Membership, Progress
from openclaw_nb.cluster.ownership import CLUSTER_VARIABLE, end_processes, new_cluster_id
from openclaw_nb.cluster.pace import Paces
from openclaw_nb.cluster.planning import (
    PROFILED_STEPS,
    Plan,
    RunProfile,
    ended_well,
    make_plan,
    measure_profile,
)
from openclaw_nb.cluster.resize import Resizer
from openclaw_nb.cluster.run import CellRun, RunResult
from openclaw_nb.cluster.status import DeviceStatus, StatusReader
from openclaw_nb.cluster.worker import Worker, find_worker
from openclaw_nb.core.errors import (
    AlreadyStartedError,
    ClusterError,
    NotStartedError,
    UsageError,
    unknown_name,
)
from openclaw_nb.core.table import Table
from openclaw_nb.plan.chaos import Report, plan_fault
from openclaw_nb.plan.recovery import check_interval, why_not_elastic
from openclaw_nb.plan.release import Limits
from openclaw_nb.protocol.messages import Event, Measured, Profiling, RunCell, SetPace, StrategySpec
from openclaw_nb.shared.memory import SharedMemory, gibibytes

_STOP_GRACE_SECONDS = 2.0
_BUSY = "A cell is running on the workers. Wait for it, or stop it (%openclaw interrupt)."
_LOST = (
    "The cluster's controller (process {pid}) has ended, so that its workers cannot be reached any more. End them and "
    "start again: %openclaw stop, then %openclaw start."
)
_NOT_SHARED = (
    "The cell that runs does not share its batches out by speed: only data-parallel cells with --mode gradient and "
    "--split loader do, which this notebook has begun on workers of the backend local. Wait for its end."
)
_NO_RECOVERY = "recovery does not apply to this cell: {why}"
_NOT_STARTED = "No cluster is running. Start one with %openclaw start (or MasterNode.start())."


class MasterNode:
    """Starts and commands a cluster of workers.

    Parameters
    ----------
    host : str
        Address that the controller and the workers' sockets bind. Loopback, as workers of other hosts
        cannot join yet.
    port : int, optional
        Where workers join that other processes start (`WorkerNode`); 0 for a free one. Not given it is 50051 or, where
        another cluster listens there, a free one.
    name : str, optional
        Name of the cluster, for ``%openclaw list``; made up when not given.
    backend : {"local", "mpi"}
        How workers are started: a process each, or all by one mpiexec, which ends all when one dies.
    communication : {"auto", "nccl", "gloo", "mpi"}
        What the workers communicate with; ``auto`` takes nccl where every worker can, else gloo, and shared memory for
        the sums of strategies. ``mpi`` makes those sums by MPI and needs the backend mpi.
    lease_seconds : float
        How long the workers wait for a new owner (`attach`) when this process ends without `stop` or `detach`.
    oversubscribe : bool
        Let added workers share devices, and start with little memory.
    environment : mapping of str to str, optional
        Further variables for each worker.
    log_level : {"", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"}
        How much the controller writes into its log.

    Attributes
    ----------
    last_run : CellRun or None
        The cell that runs, or ran last.
    last_plan : Plan or None
        What `plan` returned last.
    problem : str
        Why the cluster can do nothing any more; "" while it can.

    Examples
    --------
    >>> with MasterNode() as master:            # doctest: +SKIP
    ...     master.start_workers(list_devices()[:2])
    ...     result = master.run_cell("print(rank)").wait()
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int | None = None,
        *,
        name: str | None = None,
        backend: str = "local",
        communication: str = "auto",
        lease_seconds: float = 0.0,
        oversubscribe: bool = False,
        environment: Mapping[str, str] | None = None,
        log_level: str = "",
    ) -> None:
        self.host = check_host(host, "host")
        self._asked_port = None if port is None else check_port(port, "port")
        check_words(backend, communication)
        self.cluster_id = new_cluster_id()
        self.name = name or f"cluster-{self.cluster_id[:6]}"
        self.backend = backend
        self._asked_communication = communication
        self._lease_seconds = lease_seconds
        self.oversubscribe = oversubscribe
        self._environment, self.log_level = dict(environment or {}), log_level
        self._door: Door | None = None
        self._membership: Membership | None = None
        self._files: ClusterFiles | None = None
        self._guardian: Guardian | None = None
        self._gate: Gate | None = None
        self._desk: Desk | None = None
        self._exchange: Exchange | None = None
        self._status = StatusReader()
        self._run: CellRun | None = None
        self.last_plan: Plan | None = None
        self._lock, self._saving = threading.Lock(), threading.Lock()
        self._paces = Paces()
        self._listeners: list[Callable[[Event], None]] = [self._paces.take]
        self._limits = Limits()
        self._resizes: list[float] = []
        self._max_retries = 0
        self._checkpoint_every = ""
        self._faults = Faults()
        self._run_count = 0
        self._run_prefix = new_cluster_id()[:8]  # another owner of the cluster may have counted runs before
        self.last_run: CellRun | None = None
        self.problem = ""

    # --------------------------------------------------------------------------------- start, stop

    def start(self) -> MasterNode:
        """Start the controller, and listen for workers that join.

        Raises
        ------
        AlreadyStartedError
            When this master runs.
        PortInUseError
            When something else has the port that was asked for, with what, if it can be known.
        UsageError
            When its directory cannot be written, or what its backend needs is not installed.
        """
        if self._door is not None:
            raise AlreadyStartedError(f"The cluster {self.name!r} runs already.")
        check_installed(self.backend, self._asked_communication)
        files = ClusterFiles.create(self.cluster_id, self.name)
        door = self._open(files)
        with self._members.connecting:  # a worker may come as soon as there is a port
            try:
                self._listen(files, self._asked_port)
            except BaseException:
                files.remove()
                self._forget()
                raise
            self._watch_over()
            door.start_controller(self.host, self.log_level)
        return self

    def _watch_over(self) -> None:
        """Let the cluster end with this process, or with its lease."""
        assert self._files is not None
        lease = self._lease_seconds
        self._guardian = Guardian.start(self.cluster_id, self._files.directory, lease_seconds=lease)

    def _open(self, files: ClusterFiles) -> Door:
        """Make what it takes to reach a cluster's processes."""
        self._files = files
        self._door = Door(
            files.directory,
            self.name,
            {CLUSTER_VARIABLE: self.cluster_id},
            on_event=self._on_event,
            on_joined=self._on_joined,
            on_died=self._on_died,
            on_lost=self._on_lost,
        )
        launch = BACKENDS[self.backend](self._door, self.host, lambda: files.exchange()[0], self._environment)
        self._membership = Membership(
            self._door, launch, self.host, self._asked_communication, self.cluster_id
        )
        self._exchange = Exchange(self._door, files.exchange)
        return self._door

    def _listen(self, files: ClusterFiles, port: int | None, *, or_any: bool = False) -> None:
        """Let workers join that other processes start."""
        gate = Gate(files.directory)
        self._desk = Desk(
            self._members,
            gate.audit,
            oversubscribe=self.oversubscribe,
            closed=lambda: (
                self.problem or ("" if self.replaces_workers else f"No worker can join: {SET_ENDED}")
            ),
            take_in=lambda worker: self._resizer().take_in([worker]),
            remove=self.remove_worker,
        )
        gate.open(self.host, port, self._desk.answer, or_any=or_any)
        self._gate = gate
        if port is not None and port not in (0, gate.port):
            self.note(f"Port {port} is in use: workers join on port {gate.port} of {self.host} now.")

    @property
    def port(self) -> int:
        """Where workers join that other processes start; before the start the port that is asked for."""
        return self._gate.port if self._gate is not None else self._asked_port or DEFAULT_PORT

    @property
    def token_file(self) -> str:
        """The file, for this user alone, with the token that such workers need.

        Raises
        ------
        NotStartedError
            When the cluster does not run.
        """
        return self._require_gate().token_file

    def audit(self) -> list[str]:
        """Return who has joined, left or been turned away, a line each, the newest last."""
        return self._require_gate().audit.lines()

    def _require_gate(self) -> Gate:
        if self._gate is None:
            raise NotStartedError(_NOT_STARTED)
        return self._gate

    @classmethod
    def attach(
        cls,
        name: str | None = None,
        *,
        lease_seconds: float = 0.0,
        listener: Callable[[Event], None] | None = None,
    ) -> MasterNode:
        """Take over a cluster that runs without an owner: one that was detached, or whose kernel ended in its lease.

        The cell that runs there, or ran last, is `last_run`, with what it has shown so far.

        Parameters
        ----------
        name : str, optional
            Which; not needed where there is one.
        lease_seconds : float
            As for `MasterNode`.
        listener : callable, optional
            As for `listen`, from the beginning of that cell.

        Raises
        ------
        UsageError, AlreadyStartedError, StartError
            When there is none to be taken over.
        """
        with ClusterFiles.take_over(name) as (files, state):
            master = cls(
                state["host"],
                name=state["name"],
                backend=state["backend"],
                communication=state["communication"],
                lease_seconds=lease_seconds,
                environment=state.get("environment"),
                log_level=state.get("log_level", ""),
            )
            master.cluster_id = files.cluster_id
            master._max_retries, master._checkpoint_every = state.get("recovery", (0, ""))
            master._limits = Limits(*state.get("limits", ()))
            if listener is not None:
                master.listen(listener)
            try:
                master._open(files).find_controller(state.get("controller", ()))
                master._members.take_over(state)
                master._take_up()
                master._listen(files, state.get("port"), or_any=True)
                # Last: killed before, this process leaves a cluster that can be attached to again.
                master._watch_over()
            except BaseException:
                master._let_go()  # what runs there may be worth keeping
                raise
        return master

    def _take_up(self) -> None:
        """Follow the cell that runs, or ran last; form a group when it has ended."""
        members = self._members
        records = newest(members.records())
        if not records:
            self._after_another_owner()
            return
        epoch = next(iter(records.values()))["epoch"]
        others = [w for w in members.workers if w.alive and w.number not in records]
        absent = [w.rank for w in others if w.epoch == epoch and w not in members.silent]
        silent = [worker.number for worker in members.silent]
        run = AdoptedRun(members.door, records, silent, absent, self._on_run_finished, self._tell)
        run.limits = self._limits
        members.begin_run()
        self._run = self.last_run = run
        run.follow()

    def _after_another_owner(self) -> None:
        self._members.end_forming()
        self._members.mend()

    def detach(self) -> None:
        """Leave the cluster running, without an owner, until somebody attaches to it; a cell that runs goes on."""
        files = self._files
        self._stop_following()
        # The guardian first: killed from here on, this process leaves a cluster that can be attached to.
        self._let_go()
        assert files is not None
        files.let_go(self.name)

    def leave(self) -> None:
        """Let everything go on as it would if this process ended now: for as long as the lease says."""
        self._stop_following()
        if self._door is not None:
            self._door.close()
        self._forget()

    def _stop_following(self) -> None:
        self.unplant()
        self._close_gate()
        self._members.close()
        if self._run is not None:
            self._run.leave("The notebook has left the cluster; the cell goes on there.")

    def _let_go(self) -> None:
        """Stop watching over the processes, and leave them as they are."""
        self._close_gate()
        if self._guardian is not None:
            self._guardian.detach()
        if self._membership is not None:
            self._membership.close()
        if self._door is not None:
            self._door.close()
        self._forget()

    def _close_gate(self) -> None:
        if self._gate is not None:
            self._gate.close()

    def _forget(self) -> None:
        self._gate = self._desk = None
        self._door = self._membership = self._files = self._guardian = self._exchange = None

    def start_workers(
        self,
        devices: Sequence[Device],
        progress: Progress | None = None,
        *,
        spares: Sequence[Device] = (),
    ) -> list[Worker]:
        """Start one worker a device and form the process group.

        Parameters
        ----------
        devices : sequence of Device
            Where the workers run.
        progress : callable, optional
            Called with (done, total, what) as the start goes on.
        spares : sequence of Device
            Where workers wait that take the place of one that dies in a cell (`enable_auto_recovery`).

        Raises
        ------
        StartError
            When a process does not come up; everything started is ended.
        UsageError
            When these devices cannot communicate as asked for; nothing is left then, too.
        """
        try:
            check_devices(self._asked_communication, [*devices, *spares])
            if spares and not self.replaces_workers:
                raise UsageError(f"Spare workers cannot be used here. {SET_ENDED}")
            self._members.start(devices, spares, progress)
        except BaseException:
            self.stop()
            raise
        self._save_state()
        return self.workers

    def _save_state(self) -> None:
        """Keep what another process needs to take the cluster over, once there are workers."""
        if self._files is None or self._membership is None or not self._membership.workers:
            return
        state = {
            "name": self.name,
            "backend": self.backend,
            "controller": self._membership.door.controller,
            "recovery": [self._max_retries, self._checkpoint_every],
            "environment": self._environment,
            "log_level": self.log_level,
            "port": self.port,
            "limits": [self._limits.communication_seconds, self._limits.computation_seconds],
        }
        with self._saving:  # workers may be added and removed from several threads
            self._files.save_state({**state, **self._membership.state()})

    def stop(self) -> int:
        """End every process of the cluster and remove its files.

        Returns
        -------
        int
            How many processes were ended; none is left when this returns.
        """
        if self._run is not None:
            self._run.interrupt()
            self._run.wait(3)
        self.unplant()
        self._close_gate()
        if self._membership is not None:
            self._membership.close()
        if self._door is not None:
            self._door.close()
        ended = end_processes(self.cluster_id, grace_seconds=_STOP_GRACE_SECONDS)
        if self._files is not None:
            self._files.remove()
        if self._guardian is not None:
            self._guardian.dismiss()
        self._forget()
        return len(ended)

    def __enter__(self) -> MasterNode:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the cluster is started."""
        return self._door is not None

    @property
    def _members(self) -> Membership:
        if self._membership is None:
            raise NotStartedError(_NOT_STARTED)
        return self._membership

    @property
    def workers(self) -> list[Worker]:
        """The workers in rank order, and the spares."""
        members = self._members
        return [*members.members, *(worker for worker in members.present if worker.spare)]

    @property
    def world_size(self) -> int:
        """How many ranks the process group has."""
        return len(self._members.all_ranks())

    @property
    def epoch(self) -> int:
        """The number of the present process group."""
        return self._members.epoch

    @property
    def replaces_workers(self) -> bool:
        """Whether a new process takes the place of a worker that died; if not, one death ends the cluster."""
        return BACKENDS[self.backend].replaces

    @property
    def communication(self) -> str:
        """What the workers communicate with."""
        return self._members.communication

    # --------------------------------------------------------------------------------------- cells

    def run_cell(
        self,
        source: str,
        *,
        targets: Sequence[int] | None = None,
        strategy: StrategySpec | None = None,
        execution_count: int = 0,
        verify_steps: int = 0,
        profile: Profiling | None = None,
        on_wait: Callable[[str], None] | None = None,
    ) -> CellRun:
        """Run a cell's source on the workers; return at once with the run.

        Parameters
        ----------
        source : str
            Python (IPython) source.
        targets : sequence of int, optional
            The ranks that run it; all by default.
        strategy : StrategySpec, optional
            How the cell is run in parallel; plain SPMD when not given.
        execution_count : int
            The notebook's number of the cell, for tracebacks.
        verify_steps : int
            With a strategy: only try so many steps, on a single device and under the strategy; rank 0's value in the
            result then has a ``certificate``.
        profile : Profiling, optional
            With a strategy: only time the plain cell's first steps; rank 0's value in the result then has a
            ``profile``.
        on_wait : callable, optional
            Told what is waited for when the cluster is not ready at once.

        Raises
        ------
        UsageError
            For steps to verify that are no count, or without a strategy.
        NotStartedError, ClusterError
            When there is no cluster, or a rank is still busy, or another cell runs.
        """
        if verify_steps < 0 or (verify_steps and strategy is None):
            raise UsageError(
                f"verify_steps is {verify_steps} with {'a' if strategy else 'no'} strategy: give a strategy and at "
                "least 1 step, or 0 to run the cell."
            )
        is_trial = bool(verify_steps) or profile is not None
        members = self._members
        self._refuse_while_a_cell_runs()
        members.ensure_ready(on_wait)
        ranks, absent = self._gather_ranks(targets, alone=strategy is not None)
        strategy = self._with_interval(strategy)
        why_not = why_not_elastic(strategy)
        elastic = self.replaces_workers and not why_not and not is_trial
        if strategy is not None and why_not and self._max_retries and not is_trial:
            members.notes.append(_NO_RECOVERY.format(why=why_not))
        run = self._new_run(ranks, absent, elastic=elastic)
        members.mark_running(run.run_id, ranks.values())
        members.warm_spares()
        if strategy is not None and not is_trial:
            self._faults.arm(run, strategy, members.workers)
        run.start(
            RunCell(
                run_id=run.run_id,
                epoch=members.epoch,
                source=source,
                execution_count=execution_count,
                strategy=strategy,
                compare_names=strategy is not None and not is_trial,
                verify_steps=verify_steps,
                elastic=elastic,
                pace=self._paces.command(run.run_id, shared=elastic),
                profile=profile,
            )
        )
        return run

    def _new_run(self, ranks: dict[int, int], absent: list[int], *, elastic: bool) -> CellRun:
        """Make the run of the cell that is the cluster's from now on; refuse it while another one is."""
        members = self._members
        with self._lock:
            if self._run is not None and self._run.running:
                raise ClusterError(_BUSY)
            self._run_count += 1
            run_id = f"{self._run_prefix}-{self._run_count}"
            run = CellRun(
                members.door,
                run_id,
                ranks,
                self._on_run_finished,
                absent,
                mender=members if elastic else None,
                max_retries=self._max_retries,
                is_stopped=members.is_stopped,
            )
            run.limits = self._limits
            members.begin_run()
            self._run = self.last_run = run
        return run

    def _with_interval(self, strategy: StrategySpec | None) -> StrategySpec | None:
        """Let a cell that writes checkpoints, and does not say how often, do it as `enable_auto_recovery` says."""
        if strategy is None or not self._checkpoint_every or not strategy.options.get("checkpoint"):
            return strategy
        return replace(strategy, options={"checkpoint_every": self._checkpoint_every, **strategy.options})

    def _gather_ranks(
        self, targets: Sequence[int] | None, *, alone: bool
    ) -> tuple[dict[int, int], list[int]]:
        """Return the ranks that run a cell, and those of the group that do not.

        A strategy cell on some of the workers gets a group of their own, with ranks from 0.
        """
        if self._run is not None and self._run.running:
            raise ClusterError(_BUSY)
        chosen = self._choose_ranks(targets)
        if alone:
            self._members.regroup(list(chosen.values()))
            return dict(self._members.ranks), []
        self._members.regroup(list(self._members.all_ranks().values()))
        return chosen, [rank for rank in self._members.ranks if rank not in chosen]

    def _choose_ranks(self, targets: Sequence[int] | None) -> dict[int, int]:
        members = self._members
        ranks = members.all_ranks()
        if targets is None:
            return dict(ranks)
        if any(rank not in ranks for rank in targets):  # one may have died a moment ago, and be replaced now
            members.ensure_ready(None)
            ranks = members.all_ranks()
        for rank in targets:
            if rank not in ranks:
                raise unknown_name("rank", str(rank), [str(r) for r in ranks])
        return {rank: ranks[rank] for rank in targets}

    def _on_run_finished(self, result: RunResult) -> None:
        self._faults.finish(self._run, result)
        busy = [self._run.ranks[r] for r in result.busy] if self._run else []
        if self._membership is not None and isinstance(self._run, AdoptedRun):
            self._membership.end_forming()
            self._membership.after_run(clean=False, busy=busy)
        elif self._membership is not None:
            # A release cuts the group's collectives, also when every rank came out well in the same instant.
            there = set(self._run.ranks.values()) if self._run is not None else set()
            joined = [change.worker for change in result.joined if change.worker in there]
            if result.died and self._max_retries and self._run is not None and self._run.strategy is None:
                self._membership.notes.append(_NO_RECOVERY.format(why=why_not_elastic(None)))
            self._membership.after_run(
                clean=result.ok and not result.cause,
                busy=busy,
                joined=joined,
                hand_over=self._hand_over(self._run, result),
            )

    def _hand_over(self, run: CellRun | None, result: RunResult) -> HandOver | None:
        """Return what gives the variables of a cell that was open to newcomers to those that came too late for it."""
        lender = next(iter(result.values), None)
        if run is None or not run.is_elastic or lender is None or lender not in run.ranks:
            return None
        number, exchange = run.ranks[lender], self._require_exchange()

        def hand_over(borrowers: Sequence[Worker]) -> str:
            left = exchange.hand_over(number, [worker.number for worker in borrowers])
            listed = ", ".join(f"`{name}` ({reason})" for name, reason in left.items())
            end = f", but for {listed}, which cannot be sent" if left else ""
            return f"has the variables of {self._members.workers[number].id} now{end}"

        return hand_over

    def interrupt(self) -> bool:
        """Stop what runs on the workers, state kept; return whether anything ran."""
        if self.problem:
            raise ClusterError(self.problem)
        run = self._run
        if run is None or not run.running:
            return self._members.interrupt_strays()
        run.interrupt()
        run.wait(5)
        return True

    def set_timeout(self, communication: float | None = 60.0, computation: float | None = 300.0) -> None:
        """Limit how long ranks wait in a collective, from now on, also in a cell that runs; without limits at first.

        Past a limit all ranks are released, their variables stay, and the error says who waits where. A cell in
        which no rank waits for another may compute for as long as it likes.

        Parameters
        ----------
        communication : float or None
            Seconds that all ranks may wait together, as when the network stands still; None for no limit.
        computation : float or None
            Seconds that a rank may wait for another which computes: the longest step; None for no limit.

        Raises
        ------
        UsageError
            For a limit that is no positive number.
        """
        self._limits = Limits(_limit("communication", communication), _limit("computation", computation))
        self._save_state()
        if self._run is not None:
            self._run.limits = self._limits

    def enable_auto_recovery(self, checkpoint_interval: float = 300, max_retries: int = 3) -> None:
        """Let data-parallel cells go on when a worker dies, from the next cell on.

        The others repeat the batch of that moment among themselves, so that the parameters are those of the
        undisturbed run, and a spare or a new process takes the place of the one that died. An error that the cell's own
        code raises ends it as ever. To cells that cannot go on so, as with local steps, this is said.

        Parameters
        ----------
        checkpoint_interval : float
            How many seconds apart checkpoints are in cells that write them (``--checkpoint DIR``) and do not say how
            often.
        max_retries : int
            After how many deaths in a row, without a step in between, a cell goes on; 0 for none.

        Raises
        ------
        UsageError
            For an interval that is no number above 0, a negative count, or where one death ends all workers (MPI).
        """
        every = check_interval(checkpoint_interval)
        if isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < 0:
            raise UsageError(f"max_retries={max_retries!r}: give a whole number, 0 or more.")
        if max_retries and not self.replaces_workers:
            raise UsageError(f"Cells cannot go on after a death here. {SET_ENDED}")
        self._max_retries, self._checkpoint_every = max_retries, every
        self._save_state()

    # ---------------------------------------------------------------------------------------- faults

    def plant(
        self, kind: str, *, step: int | None = None, seed: int | None = None, worker: str | None = None
    ) -> Chaos:
        """Plant one real fault into the cell with a strategy that runs, or else into the next one.

        Nothing stays stopped or limited after the cell; what the fault itself breaks is broken.

        Parameters
        ----------
        kind : {"kill", "stop", "slow", "oom", "disk-full", "corrupt-checkpoint"}
            What happens; see `plan.chaos.FAULTS`.
        step : int, optional
            After which step of the cell, as soon as the ranks tell of it, five times a second; 1 when not given.
        seed : int, optional
            Instead, draw one of the next 50 steps with this seed.
        worker : str, optional
            The worker that is struck, by its id or its device's; the last rank's when not given, rank 0's for
            checkpoints.

        Returns
        -------
        Chaos
            Its ``wait()`` returns the report when the cell has ended.

        Raises
        ------
        UsageError
            For what cannot be planted, or while another fault is.
        """
        members, run = self._members, self._run
        if worker is not None:
            worker = find_worker(members.members, worker).id
        fault = plan_fault(kind, step=step, seed=seed, worker=worker)
        chaos = self._faults.plant(fault, OwnProcesses(self.cluster_id))
        if run is not None and run.running and run.strategy is not None:
            self._faults.arm(run, run.strategy, members.workers)
        return chaos

    def unplant(self) -> bool:
        """Take back a fault that was planted, and what it has stopped or limited; return whether there was one."""
        return self._faults.take_back()

    def take_report(self) -> Report | None:
        """Return what came of the fault in the last cell, once; None when none was planted into it."""
        return self._faults.take_report()

    @property
    def chaos(self) -> Chaos | None:
        """The fault that was planted last."""
        return self._faults.chaos

    # --------------------------------------------------------------------------------- more, and fewer

    def add_worker(self, where: int | str = 1) -> list[Worker]:
        """Start more workers; a data-parallel cell that runs takes them in at the head of a loop.

        The global batch and the learning rate stay: each rank gets a smaller part of each batch.

        Parameters
        ----------
        where : int or str
            How many, or on which devices of this machine (``"CPU-2,CPU-3"``).

        Returns
        -------
        list of Worker
            The new workers. Unless a cell takes them in, they have no variables.

        Raises
        ------
        UsageError, UnknownNameError, ResourceError
            When there is no such device or no more of them, or one death ends all workers (MPI).
        StartError
            When a process does not come up; the others go on as they were.
        """
        return self._resizer().add(where)

    def remove_worker(self, which: str) -> None:
        """End a worker; a data-parallel cell that runs lets it go at the head of a loop, and loses nothing.

        Parameters
        ----------
        which : str
            A worker's id, or its device's.

        Raises
        ------
        UnknownNameError
            When there is no such worker.
        UsageError
            For the last one, while a cell runs that needs it, or where one death ends all workers (MPI).
        """
        self._resizer().remove(which)

    def resize_workers(self, num_workers: int) -> list[Worker]:
        """Add workers, or remove the last ones, so that there are so many; return them.

        Raises
        ------
        UsageError
            For less than one; else as `add_worker` and `remove_worker`.
        """
        return self._resizer().resize(num_workers)

    # ---------------------------------------------------------------------------------------------- plan

    def plan(
        self,
        source: str,
        *,
        strategy: StrategySpec | None = None,
        targets: Sequence[int] | None = None,
        num_steps: int = PROFILED_STEPS,
        memory_bytes: int | None = None,
        run: RunProfile | None = None,
    ) -> Plan:
        """Predict a cell's step time, memory and efficiency under every strategy, from a short measured profile.

        The plain cell's first steps are timed on one worker and on several at once; all that it changes is put back.

        Parameters
        ----------
        source : str
            The training cell.
        strategy : StrategySpec, optional
            Which model, optimizer and loader it has, where they cannot be found by type.
        targets : sequence of int, optional
            The ranks to plan for; all by default.
        num_steps : int
            How many steps are timed each time.
        memory_bytes : int, optional
            What a worker may use; what it has when not given.
        run : callable, optional
            Runs one part of the profile and returns how it ended, well; `run_cell` when not given.

        Returns
        -------
        Plan
            All choices, the best first; displays well. Also kept as ``last_plan``.

        Raises
        ------
        OpenClawError
            When the cell cannot be tried, or fails.
        """
        spec = strategy or StrategySpec(name="data_parallel")
        ranks = list(self._members.all_ranks()) if targets is None else list(targets)

        def plainly(ranks: Sequence[int], asked: Profiling) -> RunResult:
            return ended_well(self.run_cell(source, strategy=spec, targets=ranks, profile=asked).wait())

        profile = measure_profile(run or plainly, ranks, num_steps)
        self.last_plan = make_plan(profile, len(ranks), memory_bytes, source)
        return self.last_plan

    # ------------------------------------------------------------------------------------------- balance

    def balance_load(self, continuous: bool = False) -> Table:
        """Give each worker a part of each batch in proportion to its measured speed, now and in later cells.

        The global batch stays, and each worker's gradient counts by its samples, so that the result is still that of a
        single device. Only what a worker does by itself is its speed: waiting for others does not count. A difference
        of 4 % of a share or less is left as it is. In a cell that runs, the new shares count from one of the next
        batches on; what loaders with worker processes have loaded ahead is loaded once more.

        Parameters
        ----------
        continuous : bool
            Let the shares go on to follow the speeds: every 16 steps they are looked at again.

        Returns
        -------
        Table
            The shares, which displays well; its records are `openclaw_nb.cluster.pace.WorkerShare`.

        Raises
        ------
        UsageError
            When nothing was measured yet (unless continuous), for a cell that runs and cannot be balanced, or where
            workers are started by mpiexec.
        """
        run = self._balanced_run()
        ranks = run.ranks if run is not None else self._members.all_ranks()
        table = self._paces.balance(dict(ranks), continuous=continuous)
        self._send_pace(run)
        return table

    def share_equally(self) -> None:
        """Take `balance_load` back: each worker gets as much of each batch as the others, now and in later cells."""
        run = self._balanced_run()
        self._paces.share_equally()
        self._send_pace(run)

    def set_slowdown(self, which: str, factor: float) -> None:
        """Let a worker's work take ``factor`` times as long in strategy cells, now and in later ones.

        To see what an uneven set of workers does where all are alike: at each step the worker sleeps for as long as it
        takes to make its loading and computing that slow.

        Parameters
        ----------
        which : str
            A worker's id, or its device's.
        factor : float
            1 or more; 1 lets it be as fast as it can.

        Raises
        ------
        UsageError
            For another factor, or a name that does not exist.
        """
        worker = find_worker(self._members.present, which)
        self._paces.slow_down(worker.number, factor)
        run = self._run
        if run is not None and run.running and not isinstance(run, AdoptedRun):
            self._send_pace(run)

    def _balanced_run(self) -> CellRun | None:
        """Return the cell that runs, if any; refuse one that cannot be balanced."""
        if self.problem:
            raise ClusterError(self.problem)
        self._members  # noqa: B018 - there must be a cluster
        if not self.replaces_workers:
            raise UsageError("Workers that mpiexec started share each batch equally: use the backend local.")
        run = self._run
        if run is None or not run.running:
            return None
        if not run.is_elastic:
            raise UsageError(_NOT_SHARED)
        return run

    def _send_pace(self, run: CellRun | None) -> None:
        if run is not None:
            command = self._paces.command(run.run_id, shared=run.is_elastic)
            run.set_pace(command or SetPace(run_id=run.run_id))

    def _resizer(self) -> Resizer:
        if self.problem:
            raise ClusterError(self.problem)
        members = self._members
        if not self.replaces_workers:
            raise UsageError(f"The number of workers cannot change here. {SET_ENDED}")
        return Resizer(members, self._run, self._save_state, self._resizes, oversubscribe=self.oversubscribe)

    def ensure_ready(self, on_wait: Callable[[str], None] | None = None) -> None:
        """Wait until the process group stands, as each cell does; at once when it does.

        Parameters
        ----------
        on_wait : callable, optional
            Told what is waited for.

        Raises
        ------
        ClusterError
            When it cannot.
        """
        self._members.ensure_ready(on_wait)

    def reset(self, replace_busy: bool = False, on_wait: Callable[[str], None] | None = None) -> int:
        """Form a fresh process group; the workers' variables stay.

        Parameters
        ----------
        replace_busy : bool
            End workers that do not come out of their cell and start new ones in their place.

        Returns
        -------
        int
            The new group's epoch.
        """
        self.interrupt()
        self._members.reform(replace_busy)
        self._members.ensure_ready(on_wait)
        return self._members.epoch

    # ------------------------------------------------------------------------------------ variables

    def push(
        self,
        variables: Mapping[str, Any],
        targets: Sequence[int] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Copy variables of the notebook to the workers; return their size in bytes."""
        self._ensure_idle()
        workers = list(self._choose_ranks(targets).values())
        return self._require_exchange().push(workers, variables, progress)

    def pull(self, names: Sequence[str], rank: int = 0) -> dict[str, Any]:
        """Return variables of one rank."""
        self._ensure_idle()
        worker = self._choose_ranks([rank])[rank]
        return self._require_exchange().pull(worker, names)

    def compare(
        self, names: Sequence[str], targets: Sequence[int] | None = None
    ) -> dict[str, dict[int, dict[str, Any]]]:
        """Return type, digest and size of each variable on each rank."""
        self._ensure_idle()
        return self._require_exchange().describe(self._choose_ranks(targets), names)

    def create_shared_memory(self, size_gb: float, devices: Sequence[str] | None = None) -> SharedMemory:
        """Make memory of this host in which the notebook and the workers find tensors by name, without copies.

        Parameters
        ----------
        size_gb : float
            How much, in GiB; all of it is taken at once.
        devices : sequence of str, optional
            Whose workers may attach it, e.g. ``["GPU-0", "GPU-1"]``; all by default.

        Returns
        -------
        SharedMemory
            A worker attaches it by ``openclaw_nb.attach_shared_memory(memory.id)``. It ends with ``free()`` or with the
            cluster, whatever happens to this process.

        Raises
        ------
        UsageError
            When the size is no number above 0, or a device is none of the workers'.
        ResourceError
            When ``/dev/shm`` or the memory has less room; nothing is taken then.
        """
        names = [devices] if isinstance(devices, str) else list(devices or ())
        for name in names:
            find_worker(self._members.present, name)
        assert self._files is not None
        return SharedMemory.create(self._files.shared_memory(), gibibytes(size_gb), names)

    def complete(self, code: str, cursor: int, rank: int = 0) -> dict[str, Any]:
        """Complete code against a rank's variables."""
        worker = self._choose_ranks([rank])[rank]
        return self._require_exchange().complete(worker, code, cursor)

    def _ensure_idle(self) -> None:
        """Wait until the group stands; variables do not move while a cell uses them."""
        members = self._members
        self._refuse_while_a_cell_runs()
        members.ensure_ready(None)
        self._refuse_while_a_cell_runs()

    def _refuse_while_a_cell_runs(self) -> None:
        if self._run is not None and self._run.running:
            raise ClusterError(_BUSY)

    def _require_exchange(self) -> Exchange:
        if self._exchange is None:
            raise NotStartedError(_NOT_STARTED)
        return self._exchange

    # --------------------------------------------------------------------------------------- status

    def note(self, text: str) -> None:
        """Keep a line that a person should be told; see `take_notes`."""
        self._members.notes.append(text)

    @property
    def limits(self) -> Limits:
        """How long ranks may wait; see `set_timeout`."""
        return self._limits

    @property
    def controller_log_level(self) -> str:
        """How much the controller's process was told to write into its log; "" when nothing was said."""
        words = (word.partition("=") for word in self._members.door.controller_arguments())
        return next(
            (logging.getLevelName(int(level)) for option, _, level in words if option == "--log-level"), ""
        )

    def worker_settings(self) -> dict[str, dict[str, Any]]:
        """Return what each worker that answers in time has of the settings that a configuration can make.

        Returns
        -------
        dict of str to dict
            By the worker's id; see `openclaw_nb.engine.settings.report`.
        """
        return self._members.settings()

    def take_notes(self) -> list[str]:
        """Return what a person should be told about the workers since the last call."""
        return self._members.take_notes()

    def get_device_status(self) -> list[DeviceStatus]:
        """Return a record of each worker's device; a reading that does not exist is None."""
        run = self._run
        places: dict[int, str] = {}
        if run is not None and run.running:
            places = {run.ranks[rank]: text for rank, text, _ in run.who_waits_where() if rank in run.ranks}
        return [self._status.read(w, places.get(w.number, "")) for w in self.workers]

    # ------------------------------------------------------------------------------------ what arrives

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``listener`` with each event of the workers; return how to end that."""
        self._listeners.append(listener)

        def forget() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return forget

    def _on_event(self, event: Event) -> None:
        if self._membership is not None:
            self._membership.heard(event.worker)
        run = self._run
        if run is None:  # while the cluster is taken over: the cell's record has it, and older ones before it
            return
        if isinstance(event, Measured) and not (isinstance(run, AdoptedRun) and run.run_id == event.run_id):
            self._tell(event)
        run.tell(event)
        if isinstance(event, Measured) and (chaos := self._faults.of(run)) is not None:
            chaos.measured(event.worker, event.steps)

    def _tell(self, event: Event) -> None:
        for listener in list(self._listeners):
            listener(event)

    def _on_lost(self, pid: int) -> None:
        self.problem = _LOST.format(pid=pid)
        if self._membership is not None:
            self._membership.lost(self.problem)
        if self._run is not None:
            self._run.leave(self.problem)
        if self._door is not None:
            self._door.give_up(self.problem)

    def _on_joined(self, number: int) -> None:
        if self._membership is not None:
            self._membership.joined(number)

    def _on_died(self, number: int) -> None:
        run, members = self._run, self._membership
        self._faults.died(run, number)
        if self._desk is not None:
            self._desk.died(number)
        if members is not None and self.replaces_workers:
            # One that is silent may live; another takes its device and its number.
            members.kill(number)
        # Noted first: what ends because of the death begins to mend at once.
        in_cell = members is not None and members.died(number)
        if run is not None:
            run.worker_died(number)
            if in_cell and run.goes_on:
                self._replace_running(number, run)

    def _replace_running(self, number: int, run: CellRun) -> None:
        """Bring a spare, or else a new process, into a cell in which a worker died."""
        members = self._members
        worker = members.workers[number]
        if worker.removed:
            return
        if worker.spare:  # it has not been in the cell
            members.replace_running(number, lambda _: None)
            return
        spare = members.take_spare(number)
        if spare is not None:
            members.when_warm(spare, run.offer)
            self._save_state()
        members.replace_running(number, run.offer if spare is None else lambda number: None)


def _limit(name: str, seconds: object) -> float:
    if seconds is None:
        return math.inf
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise UsageError(f"{name}={seconds!r}: give a number of seconds above 0, or None for no limit.")
    return float(seconds)
