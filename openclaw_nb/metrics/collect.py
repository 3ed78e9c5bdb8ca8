"""What is known of a cluster at one moment, as the text that Prometheus reads.

Asks a master and a monitor; how it is written is `monitor.prometheus`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence

from openclaw_nb._version import __version__
from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.status import DeviceStatus
from openclaw_nb.core.errors import OpenClawError
from openclaw_nb.monitor.prometheus import ClusterFacts, Snapshot, exposition, families
from openclaw_nb.monitor.store import Monitor


def collect(master: MasterNode | None, monitor: Monitor) -> str:
    """Return the metrics of this moment.

    Parameters
    ----------
    master : MasterNode or None
        Of the cluster that runs; without one there are only the counters of what has run.
    monitor : Monitor
        What strategy cells have measured.
    """
    cluster, devices = _facts(master)
    snapshot = Snapshot(
        version=__version__,
        cluster=cluster,
        devices=devices,
        totals=monitor.totals(),
        newest=monitor.latest(worker_curves=False),
        num_runs=monitor.num_begun,
    )
    return exposition(families(snapshot))


def _facts(master: MasterNode | None) -> tuple[ClusterFacts | None, Sequence[DeviceStatus]]:
    if master is None:
        return None, ()
    run = master.last_run
    try:
        facts = ClusterFacts(
            name=master.name,
            backend=master.backend,
            communication=master.communication,
            epoch=master.epoch,
            usable=not master.problem,
            computes=run is not None and run.running,
        )
        return facts, master.get_device_status()
    except OpenClawError:  # it is stopped at this moment
        return None, ()
