"""Environment variables by which a worker learns its place; both sides use them before any message can travel."""

from __future__ import annotations

BY_RANK = "OPENCLAW_BY_RANK"
"""JSON list of what each rank adds to its environment, where one command starts all workers."""

LOG = "OPENCLAW_LOG"
"""The file that a worker's own output goes to."""

SETTINGS = "OPENCLAW_WORKER_SETTINGS"
"""JSON of what a configuration sets in the worker's own code: ``log_level``, ``socket_buffer_size``."""

LEASH = "OPENCLAW_LEASH"
"""Pid and start time of the process with which a worker ends, where it was not started by the cluster."""
