"""The master's side of joining: who asks is let in or refused, and brought into the group.

    Join ──> refused (why, also in the audit log)
         └─> a number ──> wait for the controller ──> start your engine ──> fit for a group ──> joined

Knows the membership and the messages; does not know sockets, nor what a cell does with newcomers.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from openclaw_nb._version import __version__
from openclaw_nb.cluster.devices import Device
from openclaw_nb.cluster.join.audit import AuditLog
from openclaw_nb.cluster.membership import Membership
from openclaw_nb.cluster.worker import Worker
from openclaw_nb.core.errors import OpenClawError
from openclaw_nb.core.text import is_set
from openclaw_nb.plan.joining import Applicant, Software, Terms, why_not
from openclaw_nb.protocol import codec
from openclaw_nb.protocol.messages import PROTOCOL_VERSION, Join, Leave, Refused, Standing

_MOST_TICKETS = 256


def own_software() -> Software:
    """Return what this process runs, as far as both sides must agree on it; torch is not imported."""
    try:
        torch = version("torch").partition("+")[0]
    except PackageNotFoundError:
        torch = ""
    python = ".".join(platform.python_version_tuple()[:2])
    return Software(version=__version__, protocol=str(PROTOCOL_VERSION), python=python, torch=torch)


@dataclass
class _Guest:
    """One who was let in: how far it has come."""

    worker: Worker
    who: str
    stage: str = "wait"
    reason: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    connection: dict[str, Any] = field(default_factory=dict)

    def standing(self) -> Standing | Refused:
        if self.reason:
            return Refused(reason=self.reason)
        if self.stage == "start":
            return Standing(
                stage="start",
                worker=self.worker.number,
                environment=self.environment,
                connection=self.connection,
            )
        return Standing(stage=self.stage, worker=self.worker.number)


class Desk:
    """Answers those who ask to join.

    Parameters
    ----------
    members : Membership
        Where they come in.
    audit : AuditLog
        Where it is noted.
    oversubscribe : bool
        Let them share devices.
    closed : callable
        Returns why nobody can join now; "" when workers can.
    take_in : callable
        Brings a worker that is fit for it into the group.
    remove : callable
        Lets a worker of this id leave, as gently as can be.
    """

    def __init__(
        self,
        members: Membership,
        audit: AuditLog,
        *,
        oversubscribe: bool,
        closed: Callable[[], str],
        take_in: Callable[[Worker], None],
        remove: Callable[[str], None],
    ) -> None:
        self._members, self.audit = members, audit
        self._oversubscribe, self._closed = oversubscribe, closed
        self._take_in, self._remove = take_in, remove
        self._software = own_software()
        self._guests: dict[str, _Guest] = {}

    def answer(self, message: dict[str, Any], who: str) -> Standing | Refused:
        """Answer one message of somebody who knows the join secret."""
        if message.get("protocol") != PROTOCOL_VERSION:  # what else it says may mean something else there
            return self._refuse(_applicant(message), who)
        try:
            request = codec.decode(message)
        except ValueError as error:
            return Refused(reason=str(error))
        match request:
            case Join():
                return self._join(request, who)
            case Leave():
                return self._leave(request)
        return Refused(reason=f"A master does not answer {type(request).__name__}.")

    # ---------------------------------------------------------------------------------------- coming

    def _join(self, request: Join, who: str) -> Standing | Refused:
        guest = self._guests.get(request.ticket)
        if guest is not None:
            return guest.standing()
        applicant = _applicant(codec.encode(request))
        if why_not(applicant, self._terms()) or request.device is None:
            return self._refuse(applicant, who)
        device = Device(**request.device)
        self._forget_some()
        told = f"{device.id}, pid {request.pid} on {request.host}, from {who}"
        guest = self._guests[request.ticket] = _Guest(self._members.admit(device), told)
        self.audit.write(f"admitted as {guest.worker.id}: {told}")
        threading.Thread(target=self._bring_in, args=(guest,), name="openclaw-guest", daemon=True).start()
        return guest.standing()

    def _bring_in(self, guest: _Guest) -> None:
        members, worker = self._members, guest.worker
        try:
            members.connect()
            guest.environment = members.environment_for(worker)
            guest.connection = members.door.engine_connection()
            guest.stage = "start"
            members.await_fit([worker])
            self._take_in(worker)
        except (OpenClawError, OSError, ValueError) as error:  # told to whoever asks next
            guest.reason = f"{worker.id} could not be taken in: {error}"
            members.remove(worker.number)
            self.audit.write(f"given up: {guest.reason}")
            return
        guest.stage = "joined"
        self.audit.write(f"joined: {worker.id} on {guest.who}")

    def _refuse(self, applicant: Applicant, who: str) -> Refused:
        reason = why_not(applicant, self._terms()) or "It does not say what its device is."
        self.audit.write(f"refused: {applicant.device_id!r} on {applicant.host!r}, from {who}: {reason}")
        return Refused(reason=reason)

    def _terms(self) -> Terms:
        return Terms(
            software=self._software,
            host=socket.gethostname(),
            taken={worker.device.id: worker.id for worker in self._members.present},
            oversubscribe=self._oversubscribe or is_set(os.environ, "OPENCLAW_OVERSUBSCRIBE"),
            closed=self._closed(),
        )

    def _forget_some(self) -> None:
        """Keep the number of tickets bounded; those of workers that are here stay."""
        if len(self._guests) >= _MOST_TICKETS:
            self._guests = {
                ticket: guest for ticket, guest in self._guests.items() if not guest.worker.removed
            }

    # --------------------------------------------------------------------------------------- leaving

    def _leave(self, request: Leave) -> Standing | Refused:
        guest = self._guests.get(request.ticket)
        if guest is None or guest.worker.removed or guest.reason:
            return Standing(stage="left")
        if guest.stage == "joined":
            guest.stage = "leaving"
            threading.Thread(target=self._let_go, args=(guest,), name="openclaw-guest", daemon=True).start()
        elif guest.stage != "leaving":
            self._members.remove(guest.worker.number)  # who waits for it hears of it
        return guest.standing()

    def _let_go(self, guest: _Guest) -> None:
        try:
            self._remove(guest.worker.id)
        except OpenClawError as error:
            self.audit.write(f"leaves all the same: {guest.worker.id}: {error}")
        guest.stage = "left"

    def died(self, number: int) -> None:
        """Note that a worker is gone, if it is one that had joined."""
        guest = next((each for each in self._guests.values() if each.worker.number == number), None)
        if guest is not None:
            self.audit.write(f"left: {guest.worker.id} on {guest.who}")


def _applicant(message: dict[str, Any]) -> Applicant:
    """Read who asks, from a message that may be of another version."""
    versions = {name: str(message.get(name, "")) for name in ("version", "protocol", "python", "torch")}
    return Applicant(
        host=str(message.get("host", "")),
        device_id=str(message.get("device_id", "")),
        has_device=message.get("device") is not None,
        software=Software(**versions),
    )
