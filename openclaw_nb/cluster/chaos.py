"""Plants one real fault into a strategy cell, takes it back afterwards, and reports what came of it.

    begin ──> steps are told ── due? ──> strike: a signal, a limit, a flipped bit ──> finish: all put back ──> Report
                                           └──> a thread, where a fault takes time (slow, disk-full)

Only processes of this cluster are touched: pid, start time and mark are compared each time (`ownership`). Knows
processes, files and how cells end; decides nothing (`plan.chaos`), and does not know the wire.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from openclaw_nb.cluster.changes import Death, Joined, Left
from openclaw_nb.cluster.ownership import ProcessRecord, record_of, send_signal
from openclaw_nb.cluster.run import RunResult
from openclaw_nb.cluster.worker import Worker
from openclaw_nb.core.text import size_text
from openclaw_nb.plan.chaos import ON_CHECKPOINTS, Fault, Outcome, Report, Strike, victim

_PULSE_SECONDS = 0.1  # far below what heartbeats may miss
_WATCH_SECONDS = 0.005
_SPARE_MEMORY_BYTES = 1 << 20
_FILE_BYTES = 256  # the lock's line fits, no file of a checkpoint does
_TENSORS = "tensors.safetensors"


class Processes(Protocol):
    """What faults need of a cluster's processes."""

    def find(self, pid: int) -> ProcessRecord | None:
        """Return the process if it is one of the cluster's."""

    def signal(self, record: ProcessRecord, number: int) -> bool:
        """Signal it if it is still the one that was recorded; return whether it was."""

    def limit(self, record: ProcessRecord, which: int, soft: int) -> int | None:
        """Set a soft limit; return the former one, or None when the process is gone."""

    def size_bytes(self, record: ProcessRecord) -> int:
        """Return how much address space it has."""


class OwnProcesses:
    """The processes of one cluster.

    Parameters
    ----------
    cluster_id : str
        The mark that they carry.
    """

    def __init__(self, cluster_id: str) -> None:
        self._cluster_id = cluster_id

    def find(self, pid: int) -> ProcessRecord | None:
        """Return the process if it is one of the cluster's."""
        return record_of(pid, self._cluster_id)

    def signal(self, record: ProcessRecord, number: int) -> bool:
        """Signal it if it is still the one that was recorded; return whether it was."""
        return send_signal(record, self._cluster_id, number)

    def limit(self, record: ProcessRecord, which: int, soft: int) -> int | None:
        """Set a soft limit; return the former one, or None when the process is gone."""
        now = self.find(record.pid)
        if now is None or now.create_time != record.create_time:
            return None
        with contextlib.suppress(ProcessLookupError):
            former, hard = resource.prlimit(record.pid, which)
            resource.prlimit(record.pid, which, (soft, hard))
            return former
        return None

    def size_bytes(self, record: ProcessRecord) -> int:
        """Return how much address space it has; 0 when it is gone."""
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{record.pid}/statm").read_text().split()[0])
            return pages * os.sysconf("SC_PAGE_SIZE")
        return 0


class Chaos:
    """One fault, from its plan to its report.

    Parameters
    ----------
    fault : Fault
        What is planted.
    processes : Processes
        How processes are reached.
    clock : callable
        Seconds of the host's clock that only grows.

    Attributes
    ----------
    run_id : str
        The cell that it is planted into; "" before one has begun.
    report : Report or None
        What came of it, once the cell has ended.
    """

    def __init__(
        self, fault: Fault, processes: Processes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.fault = fault
        self.run_id = ""
        self.report: Report | None = None
        self._processes, self._clock = processes, clock
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._ranks: Callable[[], Mapping[int, Worker]] = dict
        self._checkpoint: Path | None = None
        self._began = self._first_at = self._struck_at = 0.0
        self._first = self._due = 0
        self._steps: dict[int, int] = {}
        self._strike: Strike | None = None
        self._why_not = ""
        self._rank = -1
        self._worker: Worker | None = None
        self._record: ProcessRecord | None = None
        self._limits: dict[int, int] = {}
        self._is_stopped = False
        self._died_at = self._failed_at = -1.0

    def __repr__(self) -> str:
        if self.report is not None:
            return f"Resilience report\n{self.report}"
        where = "the cell that runs" if self.run_id else "the next cell with a strategy"
        return f"To be planted into {where}: {self.fault}. The report follows when it has ended."

    def wait(self, timeout: float | None = None) -> Report | None:
        """Wait until there is a report; return it, or None after ``timeout`` seconds."""
        self._done.wait(timeout)
        return self.report

    # ------------------------------------------------------------------------------ from the cell

    def begin(
        self,
        run_id: str,
        ranks: Callable[[], Mapping[int, Worker]],
        num_steps: int,
        checkpoint: Path | None,
    ) -> None:
        """Take a cell that runs: its workers by rank, as they are then; its steps so far; where its checkpoints are."""
        with self._lock:
            self.run_id, self._ranks, self._checkpoint = run_id, ranks, checkpoint
            self._began = self._first_at = self._clock()
            self._first, self._due = num_steps, self.fault.due_step(num_steps)
            self._strike_if_due()

    def measured(self, worker: int, steps: int) -> None:
        """Take the news that a worker has made so many more steps."""
        with self._lock:
            if not self._steps:
                self._first_at = self._clock()
            self._steps[worker] = self._steps.get(worker, self._first) + steps
            self._strike_if_due()

    def died(self, worker: int) -> None:
        """Take the news that a worker is gone, or does not answer any more."""
        with self._lock:
            if self._worker is not None and self._worker.number == worker and self._died_at < 0:
                self._died_at = self._clock()

    def finish(self, result: RunResult) -> Report:
        """Put everything back, and report."""
        self.put_back()
        with self._lock:
            if self.report is not None:
                return self.report
            why_not = self._why_not or f"the cell ended after step {self._num_steps}, before step {self._due}"
            directory = str(self._checkpoint or "") if self.fault.kind in ON_CHECKPOINTS else ""
            self.report = Report(self.fault, self._outcome(result), self._strike, why_not, directory)
        self._done.set()
        return self.report

    @property
    def _num_steps(self) -> int:
        return max(self._steps.values(), default=self._first)

    # ------------------------------------------------------------------------------------ the strike

    def _strike_if_due(self) -> None:
        if self._strike is not None or self._over.is_set() or self._num_steps < self._due:
            return
        ranks = self._ranks()
        rank = victim(self.fault, {rank: worker.id for rank, worker in ranks.items()})
        if rank is None:
            self._why_not = f"{self.fault.worker} does not take part in the cell"
            return
        worker = ranks[rank]
        record = self._processes.find(worker.pid) if worker.pid else None
        if record is None:
            self._why_not = f"the process of {worker.id} is gone"
            return
        self._rank, self._worker, self._record = rank, worker, record
        self._struck_at = self._clock()
        detail = self._plant(record)
        if detail is not None:
            who = f"{worker.id} (rank {rank}, {worker.device.id})"
            self._strike = Strike(who, self._num_steps, self._struck_at - self._began, detail)

    def _plant(self, record: ProcessRecord) -> str | None:
        """Do it; return what more there is to say of it, or None when it cannot be done now."""
        match self.fault.kind:
            case "kill":
                self._processes.signal(record, signal.SIGKILL)
            case "stop":
                self._is_stopped = self._processes.signal(record, signal.SIGSTOP)
            case "slow":
                self._go_on_with(self._pulse)
            case "oom":
                size = self._processes.size_bytes(record)
                self._set_limit(record, resource.RLIMIT_AS, size + _SPARE_MEMORY_BYTES)
                return f"; it has {size_text(size)}"
            case "disk-full" | "corrupt-checkpoint":
                return self._plant_in(record, self._checkpoint)
        return ""

    def _plant_in(self, record: ProcessRecord, directory: Path | None) -> str | None:
        if directory is None:
            self._why_not = "the cell writes no checkpoints: add --checkpoint DIR"
            return None
        if self.fault.kind == "disk-full":
            before = _seen(directory)
            self._set_limit(record, resource.RLIMIT_FSIZE, _FILE_BYTES)
            self._go_on_with(lambda: self._watch(directory, before))
            return f"; {directory}"
        damaged = damage_newest(directory)
        if damaged is None:
            self._why_not = f"there was no checkpoint in {directory} until the cell ended"
            return None
        return f"; {damaged}"

    def _set_limit(self, record: ProcessRecord, which: int, soft: int) -> None:
        former = self._processes.limit(record, which, soft)
        if former is not None:
            self._limits[which] = former

    def _go_on_with(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, name="openclaw-chaos", daemon=True)
        self._thread.start()

    def _pulse(self) -> None:
        """Let the process stand still and run in turns."""
        assert self._record is not None
        while not self._over.is_set():
            self._is_stopped = self._processes.signal(self._record, signal.SIGSTOP)
            self._over.wait(_PULSE_SECONDS)
            self._processes.signal(self._record, signal.SIGCONT)
            self._is_stopped = False
            self._over.wait(_PULSE_SECONDS)

    def _watch(self, directory: Path, before: _Seen) -> None:
        """Take the limit back when one checkpoint has not been written."""
        while not self._over.wait(_WATCH_SECONDS):
            now = _seen(directory)
            if now.is_writing or now == before:
                continue
            if now.names == before.names:  # something came and went
                self._failed_at = self._clock()
                self._take_limits_back()
                return
            before = now

    # ---------------------------------------------------------------------------------- and afterwards

    def put_back(self) -> None:
        """Leave nothing stopped and nothing limited; a process that the others have given up is ended."""
        with self._lock:  # a strike is over, or does not come any more
            self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._take_limits_back()
        if self._record is not None and self._is_stopped:
            is_given_up = self._died_at >= 0  # another has its place, or will
            self._processes.signal(self._record, signal.SIGKILL if is_given_up else signal.SIGCONT)
            self._is_stopped = False

    def _take_limits_back(self) -> None:
        while self._limits and self._record is not None:
            self._processes.limit(self._record, *self._limits.popitem())

    def _outcome(self, result: RunResult) -> Outcome:
        detected_seconds, detected_as = self._detection(result)
        number = self._worker.number if self._worker is not None else -1
        death = next((death for death in result.deaths if death.worker == number), None)
        return Outcome(
            ending=_ending(result),
            num_steps=self._num_steps,
            detected_seconds=detected_seconds,
            detected_as=detected_as,
            went_on=_going_on(death),
            num_repeated=sum(death.num_steps >= 0 for death in result.deaths),
            changes=tuple(str(change) for change in result.changes if isinstance(change, Joined | Left)),
            checkpoints=tuple(note for note in result.notes if "checkpoint" in note),
            rates=self._rates(),
        )

    def _detection(self, result: RunResult) -> tuple[float | None, str]:
        if self._strike is None or self._worker is None:
            return None, ""
        failure = result.failures.get(self._rank)
        if self._died_at >= 0:
            how = "does not answer, and is taken for dead" if self.fault.kind == "stop" else "died"
            return self._died_at - self._struck_at, f"{self._worker.id} {how}"
        if failure is not None and not failure.consequence:
            return failure.at - self._struck_at, f"rank {self._rank} raised {failure.error_type}"
        if self._failed_at >= 0:
            return self._failed_at - self._struck_at, "a checkpoint could not be written; training went on"
        return None, ""

    def _rates(self) -> tuple[float, ...]:
        if self.fault.kind != "slow" or self._strike is None:
            return ()
        before, after = self._struck_at - self._first_at, self._clock() - self._struck_at
        if before <= 0 or after <= 0:
            return ()
        return (self._strike.step - self._first) / before, (self._num_steps - self._strike.step) / after


def _ending(result: RunResult) -> str:
    if result.ok:
        return ""
    if result.first is not None:
        failure = result.failures[result.first]
        return f"rank {result.first} raised {failure.error_type}: {failure.message}"
    return result.cause or ("interrupted" if result.interrupted else "a worker died")


def _going_on(death: Death | None) -> str:
    if death is None or death.num_steps < 0:
        return ""
    ranks = "1 rank" if death.num_left == 1 else f"{death.num_left} ranks"
    return f"{death.seconds:.2f} s after it was known, with {ranks}, from step {death.num_steps}"


# ---------------------------------------------------------------------------------- a directory of checkpoints


@dataclass(frozen=True)
class _Seen:
    """What is to be seen of a directory: its checkpoints, whether one is being written, when something came or went."""

    names: frozenset[str] = frozenset()
    is_writing: bool = False
    changed_at: int = 0


def _seen(directory: Path) -> _Seen:
    try:
        names = frozenset(os.listdir(directory))
        changed_at = directory.stat().st_mtime_ns
    except OSError:  # not made yet, or removed
        return _Seen()
    checkpoints = frozenset(name for name in names if name.startswith("step-"))
    return _Seen(checkpoints, any(name.startswith(".writing-") for name in names), changed_at)


def damage_newest(directory: Path) -> str | None:
    """Flip one bit of the newest checkpoint's tensors; return which, or None when there is no checkpoint."""
    for folder in sorted(directory.glob("step-*"), reverse=True):
        with contextlib.suppress(FileNotFoundError), (folder / _TENSORS).open("r+b") as file:
            middle = os.fstat(file.fileno()).st_size // 2
            file.seek(middle)
            byte = file.read(1)
            file.seek(middle)
            file.write(bytes([byte[0] ^ 1]))
            return f"{folder.name}/{_TENSORS}, byte {middle}"
    return None
