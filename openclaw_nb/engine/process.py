"""The worker's process: an ipyparallel engine with our kernel, importing torch while it registers."""

from __future__ import annotations

from ipyparallel.engine import app as engine_app

from openclaw_nb.engine import preload
from openclaw_nb.engine.kernel import WorkerKernel


class WorkerApp(engine_app.IPEngine):  # type: ignore[misc]
    """An ipyparallel engine whose kernel is a `WorkerKernel`."""

    name = "openclaw-worker"


def main() -> None:
    """Run the worker until it is stopped."""
    preload.start()
    # ipyparallel 9 has no option for the kernel's class; it looks the name up in this module.
    engine_app.Kernel = WorkerKernel
    WorkerApp.launch_instance()
