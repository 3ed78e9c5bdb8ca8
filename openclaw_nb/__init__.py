"""Run ordinary PyTorch notebook cells on several devices.

Public names are found when they are first used: importing the package, or loading it as a notebook
extension, imports neither torch nor ipyparallel.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from openclaw_nb._version import __version__

if TYPE_CHECKING:
    from openclaw_nb.cluster.join.node import WorkerNode
    from openclaw_nb.cluster.master import MasterNode
    from openclaw_nb.scheduler import PipelineScheduler
    from openclaw_nb.session import OpenClawCluster, resize_workers
    from openclaw_nb.shared import SharedMemory, attach_shared_memory

__all__ = [
    "MasterNode",
    "OpenClawCluster",
    "PipelineScheduler",
    "SharedMemory",
    "WorkerNode",
    "__version__",
    "attach_shared_memory",
    "load_ipython_extension",
    "resize_workers",
    "unload_ipython_extension",
]

_HOMES = {
    "MasterNode": "openclaw_nb.cluster.master",
    "OpenClawCluster": "openclaw_nb.session",
    "PipelineScheduler": "openclaw_nb.scheduler",
    "SharedMemory": "openclaw_nb.shared",
    "WorkerNode": "openclaw_nb.cluster.join.node",
    "attach_shared_memory": "openclaw_nb.shared",
    "resize_workers": "openclaw_nb.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython: Any) -> None:
    """Add ``%openclaw`` and ``%%openclaw_parallel`` to a notebook: what ``%load_ext openclaw_nb`` calls."""
    from openclaw_nb.notebook.magics import load

    load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Take the magics away again; a cluster that runs goes on."""
    from openclaw_nb.notebook.magics import unload

    unload(ipython)
