"""The worker's process: an ipyparallel engine with our kernel, importing torch while it registers."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ipyparallel.engine import app as engine_app

from openclaw_nb.engine import leash, preload, settings
from openclaw_nb.engine.kernel import WorkerKernel
from openclaw_nb.engine.place import find_place, take_place

_LOOK_SECONDS = 0.05


class WorkerApp(engine_app.IPEngine):  # type: ignore[misc]
    """An ipyparallel engine whose kernel is a `WorkerKernel`."""

    name = "openclaw-worker"

    def initialize(self, argv: Any = None) -> None:
        """Set the engine up, and let what this package logs go where its own log goes."""
        super().initialize(argv)
        settings.share_log(self.log, self.log_level)

    def load_connection_file(self) -> None:
        """Read where the controller is, once its file is whole: it makes the file first and fills it after."""
        deadline = time.monotonic() + self.wait_for_url_file
        while not _is_whole(Path(self.url_file)) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        super().load_connection_file()


def _is_whole(file: Path) -> bool:
    try:
        json.loads(file.read_text())
    except ValueError:
        return False
    return True


def main() -> None:
    """Run the worker until it is stopped."""
    arguments = sys.argv[1:]
    leash.hold(os.environ)
    if (place := find_place(os.environ)) is not None:
        take_place(place)
        # ipyparallel's own flag would import mpi4py into every engine, with its defaults.
        arguments = [word for word in arguments if word != "--mpi"] + [f"--IPEngine.id={place.number}"]
    arguments += settings.log_arguments(os.environ)
    # Else the last collections of the interpreter walk through all of torch: most of a second of a core, each worker.
    atexit.register(gc.freeze)
    preload.start()
    # ipyparallel 9 has no option for the kernel's class; it looks the name up in this module.
    engine_app.Kernel = WorkerKernel
    WorkerApp.launch_instance(argv=arguments)
