"""The worker's body: one command in, one reply out.

`handle` runs on the main thread, in order; `handle_at_once` on the control thread, also while a cell runs.
Knows the parts of a worker and wires them; does not know the notebook side.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import psutil

from openclaw_nb.core.errors import OpenClawError, ReleasedError
from openclaw_nb.engine import preload, settings, variables
from openclaw_nb.engine.cell import CellRunner, Outcome
from openclaw_nb.engine.outbox import Outbox, capture
from openclaw_nb.engine.record import Record
from openclaw_nb.engine.regroup import CellRegrouper
from openclaw_nb.engine.steps.pace import Pace
from openclaw_nb.protocol.messages import (
    BorrowVariables,
    Command,
    Complete,
    DescribeVariables,
    Done,
    EnterCell,
    Failed,
    FormGroup,
    ImportModules,
    LendVariables,
    ListModules,
    Locate,
    Meet,
    Profiling,
    Recall,
    ReceiveVariables,
    Regroup,
    Release,
    Reply,
    RunCell,
    SendVariables,
    SetPace,
    StrategySpec,
    TakeBackVariables,
    Whereabouts,
)

if TYPE_CHECKING:
    from openclaw_nb.engine.group.service import GroupService
    from openclaw_nb.engine.reentry.parcel import Parcel

_BEAT_SECONDS = 0.5
_INTERRUPT_AGAIN_SECONDS = 0.5
_log = logging.getLogger(__name__)


class Agent:
    """Carries out commands in this worker's process.

    Parameters
    ----------
    kernel : WorkerKernel
        The engine's kernel.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._shell = kernel.shell
        self._preload = preload.start()
        self._runner = CellRunner(self._shell)
        self.outbox = Outbox(kernel)
        self._group: GroupService | None = None
        self._store_port = 0
        self._running: RunCell | None = None
        self._regrouper: CellRegrouper | None = None
        self._released = ""
        self._released_early = ("", "")
        self._ended_epoch = (0, "")
        self._regroup_early: Regroup | None = None
        self._newest_pace: SetPace | None = None
        self._pace = Pace()
        self._introduced: dict[str, Any] = {}
        self._captured = False
        self._lent: Parcel | None = None
        self._last_strategy: StrategySpec | None = None
        self._bytes_at_start = self._bytes_at_cell = 0
        self._beater: threading.Thread | None = None
        self._lock = threading.Lock()

    # --------------------------------------------------------------------------------- in order

    async def handle(self, command: Command) -> Reply:
        """Carry out a command on the main thread."""
        if not self._captured:  # the streams are replaced by ipyparallel after the kernel is made
            capture(self.outbox, self._shell)
            self._captured = True
        _log.debug("%s", type(command).__name__)
        reply = await self._handle(command)
        if isinstance(command, RunCell | EnterCell):
            self.outbox.ended(reply)
        return reply

    async def _handle(self, command: Command) -> Reply:
        try:
            match command:
                case RunCell():
                    return await self._run_cell(command)
                case EnterCell():
                    return await self._enter_cell(command)
                case FormGroup():
                    return self._form_group(command)
                case SendVariables():
                    return Done(value=variables.send(self._shell.user_ns, command.names, command.path))
                case ReceiveVariables():
                    return Done(value=variables.receive(self._shell.user_ns, command.path))
                case LendVariables():
                    return Done(value=self._lend())
                case BorrowVariables():
                    self._borrow(command.path)
                    return Done()
                case TakeBackVariables():
                    self._take_back()
                    return Done()
                case DescribeVariables():
                    return Done(value=variables.describe(self._shell.user_ns, command.names))
                case Complete():
                    return Done(value=self._complete(command))
                case _:
                    return self.handle_at_once(command)
        except KeyboardInterrupt as error:
            return failure(error, [], consequence=bool(self._released), interrupted=True)
        except Exception as error:  # noqa: BLE001 - the reply carries it to the notebook; the worker goes on
            return failure(error, traceback.format_exception(error))

    def _settle_in(self, command: FormGroup) -> None:
        """Be where the notebook is."""
        self._preload.wait()
        _go_to(command.directory, command.search_path)

    def _form_group(self, command: FormGroup) -> Done:
        self._settle_in(command)
        if command.world_size:
            self._service.form(command)
        self._introduce()
        self._bytes_at_start = self._bytes_at_start or psutil.Process().memory_info().rss
        service = self._service
        _log.info(
            "group %d: rank %d of %d, %s", service.epoch, service.rank, service.world_size, service.transport
        )
        return Done(value={"backend": service.transport, "pid": os.getpid()})

    @property
    def _service(self) -> GroupService:
        if self._group is None:
            from openclaw_nb.engine.group.service import GroupService

            self._group = GroupService(os.environ["OPENCLAW_CLUSTER"], self._cause_of_end)
        return self._group

    def _introduce(self) -> None:
        """Put the names that a plain cell may use into the namespace, but for those that a cell has bound by itself."""
        import torch
        import torch.distributed as dist

        on_gpu = os.environ.get("OPENCLAW_DEVICE", "").startswith("GPU") and torch.cuda.is_available()
        names = {
            "rank": self._service.rank,
            "world_size": self._service.world_size,
            "device": torch.device("cuda", 0) if on_gpu else torch.device("cpu"),
            "dist": dist,
        }
        own = {n for n, value in self._introduced.items() if self._shell.user_ns.get(n, value) is not value}
        self._introduced = names
        self._shell.push({n: value for n, value in names.items() if n not in own}, interactive=False)

    def _lend(self) -> dict[str, Any]:
        from openclaw_nb.engine.reentry.parcel import pack

        self._take_back()
        self._lent = pack(self._shell.user_ns, self._shell.user_ns_hidden)
        return {"path": self._lent.path, "left": self._lent.left}

    def _borrow(self, path: str) -> None:
        from openclaw_nb.engine.reentry.parcel import unpack

        unpack(path, self._shell.user_ns, self._shell.user_ns_hidden)

    def _take_back(self) -> None:
        if self._lent is not None:
            self._lent.close()
            self._lent = None

    def _complete(self, command: Complete) -> dict[str, Any]:
        if not command.code.strip():
            hidden = self._shell.user_ns_hidden
            names = [n for n in self._shell.user_ns if not n.startswith("_") and n not in hidden]
            return {"text": "", "matches": sorted(names)}
        self._shell.Completer.use_jedi = False  # it takes a second, and its names are not returned here
        text, matches = self._shell.complete(None, line=command.code, cursor_pos=command.cursor)
        return {"text": text, "matches": matches[:200]}

    # ------------------------------------------------------------------------------------- a cell

    async def _run_cell(self, command: RunCell) -> Reply:
        if command.epoch != self._service.epoch:
            message = f"The worker is in epoch {self._service.epoch}, not {command.epoch}."
            return failure(OpenClawError(message), [])
        self._begin(command, self._new_regrouper(command) if command.elastic else None)
        return await self._answer(command, self._run_under_strategy(command))

    async def _enter_cell(self, command: EnterCell) -> Reply:
        """Take part, as a newcomer, in a cell that runs."""
        cell = command.cell
        self._settle_in(command.group)
        regrouper = self._new_regrouper(cell)
        regrouper.ask(Regroup(run_id=cell.run_id, group=command.group, cause="the worker is a newcomer"))
        self._begin(cell, regrouper)
        return await self._answer(cell, self._go_in(cell, regrouper))

    def _new_regrouper(self, command: RunCell) -> CellRegrouper:
        worker = self._kernel.engine_id
        return CellRegrouper(self._service, self.outbox, worker, command.run_id, self._introduce)

    def _begin(self, command: RunCell, regrouper: CellRegrouper | None) -> None:
        service = self._service
        self._bytes_at_cell = psutil.Process().memory_info().rss
        with self._lock:
            self._running, self._regrouper = command, regrouper
            self._released = ""
            newest = self._newest_pace  # it may have come past the cell
            self._pace = Pace()
            is_newer = newest is not None and newest.run_id == command.run_id
            self._pace.set(newest if is_newer else command.pace, self._kernel.engine_id)
            early, self._regroup_early = self._regroup_early, None
            if regrouper is not None and early is not None and early.run_id == command.run_id:
                regrouper.ask(early)
            if self._released_early[0] == command.run_id:
                self._released = self._released_early[1]
                if regrouper is not None:
                    regrouper.end()
                self._interrupt_later(command, 0.0)
        self.outbox.begin(Record(command, service.rank, service.world_size))
        if self._beater is None:
            self._beater = threading.Thread(target=self._beat, name="openclaw-beat", daemon=True)
            self._beater.start()

    async def _answer(
        self, command: RunCell, work: Coroutine[Any, Any, tuple[Outcome, dict[str, Any]]]
    ) -> Reply:
        try:
            outcome, report = await work
            outcome = self._explained(command, outcome)
        finally:
            with self._lock:
                self._running = self._regrouper = None
            self._show_pages()
            self.outbox.drain()
            num_batches, entries = self.outbox.end()
        value = {"num_batches": num_batches, "entries": entries, **report}
        if outcome.error is None:
            return Done(value=value)
        return failure(
            outcome.error,
            outcome.traceback,
            consequence=self._is_consequence(outcome.error),
            interrupted=isinstance(outcome.error, KeyboardInterrupt),
            value=value,
        )

    def _explained(self, command: RunCell, outcome: Outcome) -> Outcome:
        """Add what used the memory to an error that says it ran out."""
        if outcome.error is None:
            return outcome
        from openclaw_nb.engine.memory.explain import explained
        from openclaw_nb.engine.memory.usage import Baseline

        baseline = Baseline(self._bytes_at_start or self._bytes_at_cell, self._bytes_at_cell)
        return explained(outcome, command.strategy, baseline, self._service.rank, self._service.world_size)

    def _show_pages(self) -> None:
        """Show what ``?`` and ``%page`` would open in a pager."""
        for payload in self._shell.payload_manager.read_payload():
            if payload.get("source") == "page":
                self.outbox.add("display", payload["data"], {}, None, False)
        self._shell.payload_manager.clear_payload()

    async def _run_under_strategy(self, command: RunCell) -> tuple[Outcome, dict[str, Any]]:
        if command.strategy is None:
            outcome = await self._runner.run(command.source, command.execution_count)
            return outcome, {}
        if command.verify_steps:
            return await self._verify(command, command.strategy)
        if command.profile is not None:
            return await self._profile(command, command.strategy, command.profile)
        return await self._train(command, command.strategy)

    async def _go_in(self, command: RunCell, regrouper: CellRegrouper) -> tuple[Outcome, dict[str, Any]]:
        assert command.strategy is not None
        try:
            regrouper.join_first()
        except (OpenClawError, RuntimeError) as error:
            return Outcome(error, traceback.format_exception(error)), {}
        return await self._train(command, command.strategy, is_newcomer=True)

    async def _train(
        self, command: RunCell, spec: StrategySpec, *, is_newcomer: bool = False
    ) -> tuple[Outcome, dict[str, Any]]:
        from openclaw_nb.engine.parallel.registry import Crossing, strategy_context

        self._last_strategy = spec
        report: dict[str, Any] = {}
        namespace, publisher = self._shell.user_ns, self._publisher(command)
        crossing = None if self._regrouper is None else Crossing(self._regrouper, is_newcomer)
        hidden = None
        if crossing is not None or spec.options.get("checkpoint"):
            hidden = {**self._shell.user_ns_hidden, **self._introduced}
        context = strategy_context(
            spec, self._service, namespace, command.source, publisher, report, crossing, hidden
        )
        try:
            with context as prepared:
                outcome = await self._runner.run(command.source, command.execution_count, prepared.gate)
                if outcome.error is None:
                    prepared.strategy.finish()
        except (OpenClawError, RuntimeError) as error:
            # Preparing the objects, or giving them back, failed: there is no cell to show a line of.
            return Outcome(error, traceback.format_exception(error)), report
        finally:
            report["num_measured"] = publisher.num_sent
        if command.compare_names:
            from openclaw_nb.engine.objects.names import cell_names

            report["names"] = variables.digests(namespace, cell_names(command.source).stores)
        return outcome, report

    async def _verify(self, command: RunCell, spec: StrategySpec) -> tuple[Outcome, dict[str, Any]]:
        """Try the cell's first steps on one device and under its strategy, and compare them."""
        from openclaw_nb.engine.parallel.registry import ranks_of, strategy_context
        from openclaw_nb.engine.steps.measure import SilentPublisher
        from openclaw_nb.engine.verify.trial import Trial, Verifier

        namespace = self._shell.user_ns

        async def run(recording: AbstractContextManager[None]) -> Outcome:
            with recording:
                return await self._runner.run(command.source, command.execution_count)

        async def run_parallel(recording: AbstractContextManager[None]) -> Outcome:
            publisher = SilentPublisher(self.outbox, self._kernel.engine_id, command.run_id, self._pace)
            with strategy_context(spec, self._service, namespace, command.source, publisher, {}):
                return await run(recording)

        try:
            with self.outbox.muted():
                trial = Trial(command.source, spec, command.verify_steps)
                verifier = Verifier(trial, ranks_of(self._service), namespace, run, run_parallel)
                return await verifier.verify()
        except (OpenClawError, RuntimeError) as error:
            return Outcome(error, traceback.format_exception(error)), {}

    async def _profile(
        self, command: RunCell, spec: StrategySpec, asked: Profiling
    ) -> tuple[Outcome, dict[str, Any]]:
        """Time the plain cell's first steps, on all workers of the group at once."""
        from openclaw_nb.engine.parallel.registry import ranks_of
        from openclaw_nb.engine.profile.trial import Profiler

        async def run(timing: AbstractContextManager[None]) -> Outcome:
            with timing:
                return await self._runner.run(command.source, command.execution_count)

        try:
            with self.outbox.muted():
                ranks, namespace = ranks_of(self._service), self._shell.user_ns
                return await Profiler(command.source, spec, asked, ranks, namespace, run).profile()
        except (OpenClawError, RuntimeError) as error:
            return Outcome(error, traceback.format_exception(error)), {}

    def _publisher(self, command: RunCell) -> Any:
        from openclaw_nb.engine.steps.measure import Publisher

        return Publisher(self.outbox, self._kernel.engine_id, command.run_id, self._pace)

    def _is_consequence(self, error: BaseException) -> bool:
        # torch's C++ code turns the error of a released collective into a RuntimeError that quotes it.
        return bool(self._released) or ReleasedError.__name__ in f"{type(error).__name__}: {error}"

    # ---------------------------------------------------------------------------------------- at once

    def handle_at_once(self, command: Command) -> Reply:
        """Carry out a command on the control thread."""
        match command:
            case Release():
                return self._release(command)
            case Regroup():
                return self._regroup(command)
            case Meet():
                return self._meet(command)
            case SetPace():
                return self._set_pace(command)
            case Locate():
                running = self._running
                where = self._whereabouts(running) if running else None
                return Done(value={"where": None if where is None else vars(where), **self._state()})
            case ListModules():
                return Done(
                    value={"names": self._modules(), "directory": os.getcwd(), "search_path": list(sys.path)}
                )
            case ImportModules():
                _go_to(command.directory, command.search_path)
                self._preload.add(command.names)
                return Done()
            case Recall():
                return Done(value={"run": self.outbox.recall(with_output=command.with_output)})
            case _:
                return failure(OpenClawError(f"{type(command).__name__} is not for the control channel."), [])

    def _state(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "epoch": self._group.epoch if self._group else 0,
            "intact": self._group.intact if self._group else False,
            "store_port": self._open_store(),
            "rank": self._group.rank if self._group else 0,
            "transport": self._group.transport if self._group else "",
            "settings": settings.report(
                self._group.transport if self._group else "",
                self._group.socket_buffers if self._group else None,
                self._last_strategy,
                has_torch=self._preload.ready,
            ),
            "problem": self._preload.problem,
            "warm": self._preload.is_complete,
        }

    def _modules(self) -> list[str]:
        hidden = self._shell.user_ns_hidden
        return variables.modules_of({n: v for n, v in self._shell.user_ns.copy().items() if n not in hidden})

    def _open_store(self) -> int:
        """Open this worker's store once torch is there; return its port, or 0 before that."""
        if not self._store_port and self._preload.ready:
            from openclaw_nb.engine.group import service

            self._store, self._store_port = service.listen(service.host_of_store())
        return self._store_port

    def _release(self, command: Release) -> Done:
        """Cut the collectives now; interrupt Python code that goes on after the grace time."""
        self._ended_epoch = command.epoch, command.cause  # it may come past the command to form the group
        if self._group is not None and self._group.epoch == command.epoch:
            self._group.release(command.cause)
        with self._lock:
            running = self._running
            if running is None or running.run_id != command.run_id:
                self._released_early = command.run_id, command.cause  # it came past the cell that it ends
                return Done(value={"running": False})
            self._released = command.cause
            if self._regrouper is not None:
                self._regrouper.end()
        self._interrupt_later(running, command.grace_seconds)
        return Done(value={"running": True})

    def _cause_of_end(self, epoch: int) -> str:
        ended, cause = self._ended_epoch
        return cause if ended == epoch else ""

    def _regroup(self, command: Regroup) -> Done:
        """Let the running cell go on in another group."""
        with self._lock:
            regrouper = self._regrouper_of(command.run_id)
            if regrouper is None:
                self._regroup_early = command  # it came past the command to enter the cell
            else:
                regrouper.ask(command)
        return Done(value={"running": regrouper is not None})

    def _meet(self, command: Meet) -> Done:
        """Let the cell meet the other ranks where that can be."""
        with self._lock:
            regrouper = self._regrouper_of(command.run_id)
            if regrouper is not None:
                regrouper.ask_to_meet(command)
        return Done(value={"running": regrouper is not None})

    def _set_pace(self, command: SetPace) -> Done:
        with self._lock:
            self._newest_pace = command
            running = self._running is not None and self._running.run_id == command.run_id
            if running:
                self._pace.set(command, self._kernel.engine_id)
        return Done(value={"running": running})

    def _regrouper_of(self, run_id: str) -> CellRegrouper | None:
        return self._regrouper if self._running is not None and self._running.run_id == run_id else None

    def _interrupt_later(self, running: RunCell, seconds: float) -> None:
        timer = threading.Timer(seconds, self._interrupt_if_running, args=(running,))
        timer.daemon = True
        timer.start()

    def _interrupt_if_running(self, running: RunCell) -> None:
        """Interrupt, again and again: it may come before the cell's own code, or be swallowed by it."""
        if self._running is running:
            self._runner.interrupt()
            self._interrupt_later(running, _INTERRUPT_AGAIN_SECONDS)

    # ------------------------------------------------------------------------------------- whereabouts

    def _beat(self) -> None:
        """Tell where the cell is, twice a second while one runs."""
        before: RunCell | None = None
        while True:
            time.sleep(_BEAT_SECONDS)
            running = self._running
            if running is not None and running is before:
                # The memory may have run out, for one. Without beats nobody would know that this rank waits.
                with contextlib.suppress(Exception):
                    self.outbox.publish(self._whereabouts(running))
            before = running

    def _whereabouts(self, command: RunCell) -> Whereabouts:
        wait = self._group.current_wait() if self._group else None
        line, code = self._runner.position()
        return Whereabouts(
            worker=self._kernel.engine_id,
            run_id=command.run_id,
            epoch=command.epoch,
            call=wait.call if wait else "",
            group=wait.group if wait else "",
            number=wait.number if wait else 0,
            seconds=time.monotonic() - wait.since if wait else 0.0,
            line=line,
            code=code[:200],
        )


def failure(
    error: BaseException,
    lines: list[str],
    *,
    consequence: bool = False,
    interrupted: bool = False,
    value: dict[str, Any] | None = None,
) -> Failed:
    """Build the reply that carries an error to the notebook."""
    return Failed(
        error_type=type(error).__name__,
        message=str(error),
        traceback=lines,
        consequence=consequence,
        interrupted=interrupted,
        at=time.monotonic(),
        value=value or {},
    )


def _go_to(directory: str, search_path: list[str]) -> None:
    with contextlib.suppress(OSError):  # the notebook's directory may not exist on another host
        os.chdir(directory)
    sys.path[:] = [*search_path, *(p for p in sys.path if p not in search_path)]
