"""Plans a strategy cell, and says what was predicted of one that has run.

Knows requests, runs and the monitor; what is measured is the workers' business.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.planning import Plan, milliseconds
from openclaw_nb.cluster.run import RunResult
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.notebook.cellrun import CellRequest, run_cell
from openclaw_nb.notebook.live import TextSink
from openclaw_nb.plan.predict.model import divisors
from openclaw_nb.protocol.messages import Profiling, StrategySpec


def plan(
    master: MasterNode,
    request: CellRequest,
    num_steps: int,
    notebook: Mapping[str, object],
    memory_bytes: int | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Plan:
    """Profile a cell and predict what each strategy would cost it; what the cell shows is dropped.

    Parameters
    ----------
    master : MasterNode
        The cluster.
    request : CellRequest
        A strategy cell.
    num_steps : int
        How many steps are timed each time.
    notebook : mapping
        Variables of the notebook, for advice in errors.
    memory_bytes : int, optional
        What a worker may use; what it has when not given.
    progress : callable
        Told how many parts of the profile are done, and of how many.

    Raises
    ------
    OpenClawError
        When the cell cannot be tried, or fails.
    """
    num_workers = master.world_size if request.targets is None else len(request.targets)
    total, done = len(divisors(num_workers)), 0

    def run(ranks: Sequence[int], asked: Profiling) -> RunResult:
        nonlocal done
        progress(done, total)
        part = replace(request, targets=list(ranks), profile=asked)
        sink = TextSink(io.StringIO())
        result = run_cell(master, part, sink, tell=lambda text: None, notebook=notebook)
        done += 1
        return result

    return master.plan(
        request.source,
        strategy=request.strategy,
        targets=request.targets,
        num_steps=num_steps,
        memory_bytes=memory_bytes,
        run=run,
    )


def measured_beside(master: MasterNode, monitor: Monitor, source: str, strategy: StrategySpec | None) -> str:
    """Take what the last run has measured into the plan of the same cell; return a line about both, or "".

    Parameters
    ----------
    master : MasterNode
        Which has made the run, and the plan.
    monitor : Monitor
        What was measured.
    source : str
        What has run.
    strategy : StrategySpec or None
        Under what; None for a cell without.
    """
    run, made = master.last_run, master.last_plan
    if made is None or run is None or strategy is None or made.source.strip() != source.strip():
        return ""
    history = monitor.history(run.run_id)
    if history is None or not history.mean_rate:
        return ""
    predicted = made.take(strategy, len(run.ranks), history.mean_rate)
    if predicted is None:
        return ""
    seconds = made.profile.batch_size / history.mean_rate
    off = seconds / predicted.step_seconds - 1
    expected = milliseconds(predicted.step_seconds)
    return f"A step took {milliseconds(seconds)}; {expected} had been predicted ({off:+.0%})."
