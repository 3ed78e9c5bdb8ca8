"""Whether a worker that asks to join may, and how long one that finds no master waits between attempts.

Pure: what the worker says of itself and what the master knows in, a decision out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0


@dataclass(frozen=True)
class Software:
    """What must be the same on both sides: variables travel as pickles, and gradients between PyTorch's own sockets.

    Attributes
    ----------
    version, protocol : str
        Of this package, and of its wire.
    python, torch : str
        Versions as far as they count; "" where it is not installed.
    """

    version: str
    protocol: str
    python: str
    torch: str


@dataclass(frozen=True)
class Applicant:
    """What a worker says that asks to join.

    Attributes
    ----------
    host : str
        The name of its host.
    device_id : str
        The device that it was given.
    has_device : bool
        Whether its host has that.
    software : Software
        What it runs.
    """

    host: str
    device_id: str
    has_device: bool
    software: Software


@dataclass(frozen=True)
class Terms:
    """What a master asks of a worker.

    Attributes
    ----------
    software : Software
        What it must run.
    host : str
        The master's own host.
    taken : mapping of str to str
        The worker on each device of that host that is in use.
    oversubscribe : bool
        Whether workers may share devices.
    closed : str
        Why nobody can join; "" when workers can.
    """

    software: Software
    host: str
    taken: Mapping[str, str] = field(default_factory=dict)
    oversubscribe: bool = False
    closed: str = ""


def why_not(applicant: Applicant, terms: Terms) -> str:
    """Return why a worker may not join, for the person who started it; "" when it may."""
    if differing := _differing(applicant.software, terms.software):
        return differing
    if terms.closed:
        return terms.closed
    if applicant.host != terms.host:
        return (
            f"This worker is on the host {applicant.host}, the master on {terms.host}: workers of other hosts cannot "
            "join yet. Start it on the master's host."
        )
    if not applicant.has_device:
        return f"The host {applicant.host} has no device {applicant.device_id}."
    holder = terms.taken.get(applicant.device_id)
    if holder is not None and not terms.oversubscribe:
        return (
            f"{applicant.device_id} is in use by {holder}. Give the worker another device, remove {holder}, or let "
            "workers share devices (oversubscribe, or OPENCLAW_OVERSUBSCRIBE=1, at the master)."
        )
    return ""


def _differing(theirs: Software, ours: Software) -> str:
    pairs = (
        ("openclaw_nb", theirs.version, ours.version),
        ("protocol", theirs.protocol, ours.protocol),
        ("Python", theirs.python, ours.python),
        ("torch", theirs.torch, ours.torch),
    )
    told = [
        f"{what} {worker or 'missing'} and {master or 'missing'}"
        for what, worker, master in pairs
        if worker != master
    ]
    if not told:
        return ""
    return (
        f"Worker and master run different versions: {', '.join(told)}. Install the master's versions for the worker, "
        "then connect again."
    )


def pauses() -> Iterator[float]:
    """Yield how many seconds to wait before each further attempt: twice as long each time, up to 5 s."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
