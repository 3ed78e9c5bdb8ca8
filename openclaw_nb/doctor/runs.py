"""What the newest run says of its settings: a run and where it ran, as `plan.advice` takes it.

Asks a master and its workers; decides nothing.
"""

from __future__ import annotations

from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.config.schema import fields_of
from openclaw_nb.core.host import usable_cores
from openclaw_nb.monitor.store import Monitor, RunHistory
from openclaw_nb.plan.advice import Situation, headline

_SHORTEST_SECONDS = 5.0
_FEWEST_STEPS = 20


def situation_of(master: MasterNode, history: RunHistory) -> Situation:
    """Return the newest strategy cell's run with its settings, as the workers tell them.

    Parameters
    ----------
    master : MasterNode
        Whose workers have made it.
    history : RunHistory
        What it has measured.
    """
    reports = list(master.worker_settings().values())
    cell = next((report["cell"] for report in reports if report["cell"]), None)
    cell = cell or {"name": "data_parallel", "options": {}}
    options = cell["options"]
    is_shared_out = cell["name"] == "data_parallel" and options.get("mode", "gradient") == "gradient"
    return Situation(
        workers=history.workers,
        strategy=cell["name"],
        takes=fields_of(cell["name"]),
        options=options,
        num_cores=usable_cores(),
        threads_per_worker=max((report["threads"] or 1 for report in reports), default=1),
        on_gpus=any(worker.device.kind == "gpu" for worker in master.workers),
        communication=master.communication,
        balances=is_shared_out and master.replaces_workers,
    )


def advice_after(master: MasterNode, monitor: Monitor) -> str:
    """Return one sentence about what the run that has just ended could do better; "" for a short one, or a good one."""
    run = master.last_run
    history = monitor.history(run.run_id) if run is not None else None
    if history is None or history.seconds < _SHORTEST_SECONDS or history.steps < _FEWEST_STEPS:
        return ""
    return headline(situation_of(master, history))
