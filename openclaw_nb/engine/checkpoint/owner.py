"""Whose unfinished files lie in a directory: their names tell the process that makes them.

Knows processes by host, pid and start time, as pids come again; does not know what is written.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from openclaw_nb.core.host import text_of

_NAME = re.compile(r"\.(?:writing|removing)-(?P<host>[0-9a-f]{12})-(?P<pid>\d+)-(?P<start>\d+)-.+")


def temporary_name(doing: str, name: str) -> str:
    """Return what an unfinished thing is called; ``doing`` is ``writing`` or ``removing``."""
    pid = os.getpid()
    return f".{doing}-{_host()}-{pid}-{_start_time(pid)}-{name}"


def is_temporary(name: str) -> bool:
    """Whether a file's name is one of an unfinished thing."""
    return _NAME.fullmatch(name) is not None


def is_left_over(name: str) -> bool:
    """Whether the process that made an unfinished thing is gone; one of another host may not be."""
    found = _NAME.fullmatch(name)
    if found is None or found["host"] != _host():
        return False
    pid = int(found["pid"])
    return pid == os.getpid() or _start_time(pid) != int(found["start"])


def _host() -> str:
    """Return what is the same for processes whose pids can be compared: the boot and the space of pids."""
    space = os.stat("/proc/self/ns/pid").st_ino
    told = f"{os.uname().nodename} {text_of(Path('/proc/sys/kernel/random/boot_id')).strip()} {space}"
    return hashlib.blake2b(told.encode(), digest_size=6).hexdigest()


def _start_time(pid: int) -> int:
    """Return when a process began, in ticks since the boot; 0 when there is none, or it has ended."""
    fields = text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0
