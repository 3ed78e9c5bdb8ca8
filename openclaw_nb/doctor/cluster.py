"""Checks of a cluster that runs: can its workers add up an array, do all of them answer, what slows them down.

    MasterNode, Monitor ──> checks ──> findings

The array sum runs a cell on the workers; it leaves no variable behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.core.text import counted
from openclaw_nb.doctor.findings import FAIL, OK, SKIP, WARN, Check, Finding
from openclaw_nb.doctor.runs import situation_of
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.plan.advice import advise, scaling, shares

_SUM_SECONDS = 30.0
_LENGTH, _ROUNDS = 250_000, 5

# Each rank adds an array of its own; what comes out is known: n (n + 1) / 2 times 0 + 1 + ... + (length - 1).
_ARRAY_SUM = f"""
def _openclaw_array_sum():
    import time, torch
    seconds = []
    for _ in range({_ROUNDS}):
        array = torch.arange({_LENGTH}, dtype=torch.float64).to(device) * (rank + 1)
        began = time.perf_counter()
        dist.all_reduce(array)
        total = array.sum().item()
        seconds.append(time.perf_counter() - began)
    return total, min(seconds)
_openclaw_array_sum = _openclaw_array_sum()
"""
_FORGET = "globals().pop('_openclaw_array_sum', None);"


def checks_of_cluster(master: MasterNode, monitor: Monitor) -> list[tuple[str, Check]]:
    """Return the checks, by name; the advice on the last run before the array sum, which is a run, too."""
    return [
        ("workers", lambda: _workers(master)),
        ("communication", lambda: _communication(master)),
        ("timeout", lambda: _timeout(master)),
        ("last run", lambda: _last_run(master, monitor)),
        ("array sum", lambda: array_sum(master)),
    ]


def _workers(master: MasterNode) -> Iterator[Finding]:
    if master.problem:
        yield Finding("workers", FAIL, master.problem, "%openclaw stop, then %openclaw start.")
        return
    dead = [worker.id for worker in master.workers if not worker.alive]
    answers = master.worker_settings()
    silent = [worker.id for worker in master.workers if worker.alive and worker.id not in answers]
    if dead or silent:
        told = [f"{', '.join(dead)} died"] * bool(dead) + [f"{', '.join(silent)} did not answer"] * bool(
            silent
        )
        todo = "%openclaw reset --replace starts new processes for those that do not answer; their variables are lost."
        yield Finding("workers", FAIL if dead else WARN, "; ".join(told), todo)
    else:
        yield Finding("workers", OK, f"{counted(len(answers), 'worker')} answered")


def _communication(master: MasterNode) -> Iterator[Finding]:
    gpus = [worker.device.id for worker in master.workers if worker.device.kind == "gpu"]
    if len(gpus) > 1 and "nccl" not in master.communication.lower():
        seen = f"{', '.join(gpus)} communicate by {master.communication}, not by NCCL"
        todo = "Take parallel.communication: nccl; the check nccl says what is missing."
        yield Finding("communication", WARN, seen, todo, "parallel.communication")
    else:
        yield Finding("communication", OK, master.communication)


def _timeout(master: MasterNode) -> Iterator[Finding]:
    limits = {
        "communication": master.limits.communication_seconds,
        "computation": master.limits.computation_seconds,
    }
    told = ", ".join(f"{name} {'no limit' if s == math.inf else f'{s:g} s'}" for name, s in limits.items())
    yield Finding("timeout", OK, told)


def _last_run(master: MasterNode, monitor: Monitor) -> Iterator[Finding]:
    history = monitor.latest(worker_curves=False)
    if history is None:
        yield Finding("last run", SKIP, "no cell with a strategy has run yet")
        return
    situation = situation_of(master, history)
    found = advise(situation)
    if not found:
        spent = ", ".join(f"{100 * share:.0f} % {part}" for part, share in shares(history.workers).items())
        yield Finding("last run", OK, f"{counted(history.steps, 'step')}: {spent or 'nothing was measured'}")
    for each in found:
        poor = f"{scaling(situation.workers)}. " if each is found[0] and scaling(situation.workers) else ""
        todo = f"{each.change[0].upper()}{each.change[1:]}."
        yield Finding("last run", WARN, f"{poor}{each.seen}", todo, each.key)


def array_sum(master: MasterNode) -> Iterator[Finding]:
    """Let all workers add up an array, and compare the sum with what it must be."""
    run = master.last_run
    if run is not None and run.running:
        rows = "; ".join(
            f"rank {rank} {does} {where}".rstrip() for rank, does, where in run.who_waits_where()
        )
        yield Finding(
            "array sum", SKIP, f"a cell runs: {rows}", "Wait for it, or stop it: %openclaw interrupt."
        )
        return
    run = master.run_cell(_ARRAY_SUM)
    result = run.wait(_SUM_SECONDS)
    if result is None:
        rows = "; ".join(f"rank {rank} {does}" for rank, does, _ in run.who_waits_where())
        run.interrupt()
        run.wait(_SUM_SECONDS)
        todo = "Processes cannot reach each other: look at the checks loopback and interface; then %openclaw reset."
        yield Finding(
            "array sum", FAIL, f"no sum after {_SUM_SECONDS:g} s: {rows}", todo, "parallel.communication"
        )
        return
    if not result.ok:
        told = [f"rank {rank}: {each.error_type}: {each.message}" for rank, each in result.failures.items()]
        todo = "Try another way to communicate, parallel.communication: gloo, and %openclaw reset."
        seen = "; ".join(told) or result.cause or "it was interrupted"
        yield Finding("array sum", FAIL, seen, todo, "parallel.communication")
        return
    yield _compared(master)


def _compared(master: MasterNode) -> Finding:
    ranks = range(master.world_size)
    told = [master.pull(["_openclaw_array_sum"], rank)["_openclaw_array_sum"] for rank in ranks]
    master.run_cell(_FORGET).wait(_SUM_SECONDS)
    wanted = len(ranks) * (len(ranks) + 1) / 2 * (_LENGTH * (_LENGTH - 1) / 2)
    wrong = [f"rank {rank}: {total:.0f}" for rank, (total, _) in enumerate(told) if total != wanted]
    if wrong:
        todo = "The sums of this transport are wrong: do not train on it. Try parallel.communication: gloo."
        return Finding(
            "array sum", FAIL, f"{'; '.join(wrong)} in place of {wanted:.0f}", todo, "parallel.communication"
        )
    seconds = max(seconds for _, seconds in told)
    rate = _LENGTH * 8 / seconds / 1e6
    return Finding(
        "array sum",
        OK,
        f"{counted(len(told), 'worker')} agree: {wanted:.0f}, 2 MB in {seconds * 1000:.1f} ms ({rate:.0f} MB/s)",
    )
