"""What a configuration has set in this worker: applied here, and told when asked.

Knows the process's variables, logger, threads and sockets; does not know the configuration's file.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.protocol.placement import SETTINGS

LOGGER = "openclaw_nb"
_VARIABLES = ("OMP_NUM_THREADS", "OMPI_MCA_btl", "NCCL_IB_DISABLE")


def told(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what the configuration sets in the worker's own code."""
    found: dict[str, Any] = json.loads(environment.get(SETTINGS, "{}"))
    return found


def log_arguments(environment: Mapping[str, str]) -> list[str]:
    """Return what the engine is told to write its log at the configured level."""
    level = told(environment).get("log_level")
    # As a number: traitlets says WARN for WARNING.
    return [] if level is None else [f"--log-level={logging.getLevelNamesMapping()[level]}"]


def share_log(log: logging.Logger | logging.LoggerAdapter[Any], level: int | str) -> None:
    """Let this package's lines go where the engine's go; the root logger stays as it is.

    Parameters
    ----------
    log : Logger
        The engine's, whose own level is the lowest: its handlers are what sorts lines out.
    level : int or str
        What those let through.
    """
    engine = log.logger if isinstance(log, logging.LoggerAdapter) else log
    own = logging.getLogger(LOGGER)
    own.setLevel(level)
    own.handlers = list(engine.handlers)
    own.propagate = False


def size_buffers(sockets: Sequence[socket.socket], environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Give sockets buffers of the configured size.

    Returns
    -------
    tuple of int or None
        The smallest buffers to send and to receive that they have now, as the kernel counts them; None without
        sockets, or where no size is configured.
    """
    size = told(environment).get("socket_buffer_size")
    if size is None or not sockets:
        return None
    options = (socket.SO_SNDBUF, socket.SO_RCVBUF)
    for each in sockets:
        for option in options:
            each.setsockopt(socket.SOL_SOCKET, option, min(size, 2**31 - 1))
    smallest = [min(each.getsockopt(socket.SOL_SOCKET, option) for each in sockets) for option in options]
    return smallest[0], smallest[1]


def report(
    transport: str, buffers: tuple[int, int] | None, cell: StrategySpec | None, *, has_torch: bool
) -> dict[str, Any]:
    """Return what this worker has, as it is now.

    Parameters
    ----------
    transport : str
        What its data goes through.
    buffers : tuple of int, optional
        What `size_buffers` returned.
    cell : StrategySpec, optional
        Its last strategy cell.
    has_torch : bool
        Whether torch is imported.
    """
    threads = sys.modules["torch"].get_num_threads() if has_torch else None
    return {
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "threads": threads,
        "log_level": logging.getLevelName(logging.getLogger(LOGGER).getEffectiveLevel()),
        "store_host": os.environ.get("OPENCLAW_STORE_HOST", ""),
        "transport": transport,
        "socket_buffers": buffers,
        "cell": None if cell is None else {"name": cell.name, "options": dict(cell.options)},
    }
