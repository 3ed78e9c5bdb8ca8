"""Every error that this package raises, in one tree.

    OpenClawError
    |-- UsageError            what was asked cannot be done as it was said (also a ValueError)
    |   |-- UnknownNameError  a verb, option, strategy, device or worker that does not exist
    |   |-- ResourceError     more workers than cores, devices or memory allow
    |   |   |-- NoRoomError   a file does not fit
    |   |   `-- PortInUseError  another socket has the port
    |   |-- ConfigurationError  a configuration file, or a variable that overrides it, that cannot be
    |   |-- CheckpointError   a checkpoint that cannot be written, read, or loaded into these objects
    |   `-- RefusedError      a cell that a strategy cannot run with the single-device result
    |-- ClusterError          the cluster is not in the state that the call needs
    |   |-- NotStartedError
    |   |-- AlreadyStartedError
    |   |-- StartError        processes did not come up
    |   `-- JoinError         a worker could not join a master
    |       |-- NotReachedError  nobody answers there
    |       `-- NotTrustedError  one side does not prove to know the join secret
    |-- WorkerError           something happened on a worker
    |   |-- RemoteCellError   a rank raised in a cell
    |   |-- WorkerDiedError   a worker's process ended
    |   |-- NotVerifiedError  a cell was not run, as its strategy does not equal a single device
    |   `-- CellInterrupted   the stop button (also a KeyboardInterrupt)
    `-- GroupError            the process group cannot go on
        |-- ReleasedError     a collective was cut because another rank could not take part
        `-- MismatchError     ranks called different collectives

A message says what was given, what is allowed and what to do. Errors survive pickling.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class OpenClawError(Exception):
    """Base of all errors of this package."""


class UsageError(OpenClawError, ValueError):
    """What was asked cannot be done as it was said."""


class UnknownNameError(UsageError):
    """A name that does not exist, with what does and the nearest of them."""


class ResourceError(UsageError):
    """More workers than the machine's cores, devices or memory allow."""


class NoRoomError(ResourceError):
    """A file does not fit where it was to be written."""


class PortInUseError(ResourceError):
    """Another socket has the port."""


class ConfigurationError(UsageError):
    """A configuration that cannot be: each problem on a line, with file, line and key.

    Parameters
    ----------
    problems : str or sequence of str
        What is wrong, and what is allowed instead.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        super().__init__(problems if isinstance(problems, str) else "\n".join(problems))

    @property
    def problems(self) -> list[str]:
        """Each problem."""
        return str(self).splitlines()


class CheckpointError(UsageError):
    """A checkpoint that cannot be written, read, or loaded into these objects."""


class RefusedError(UsageError):
    """A cell that the strategy cannot run with the single-device result."""


class ClusterError(OpenClawError, RuntimeError):
    """The cluster is not in the state that the call needs."""


class NotStartedError(ClusterError):
    """No cluster is running."""


class AlreadyStartedError(ClusterError):
    """A cluster is running already."""


class StartError(ClusterError):
    """The processes of the cluster did not come up."""


class JoinError(ClusterError):
    """A worker could not join a master: none was found, or it refused."""


class NotReachedError(JoinError):
    """Nobody answers there."""


class NotTrustedError(JoinError):
    """Who answers there does not prove to know the join secret, or does not believe that this side does."""


class WorkerError(OpenClawError, RuntimeError):
    """Something happened on a worker."""


class RemoteCellError(WorkerError):
    """A rank raised while it ran a cell."""


class WorkerDiedError(WorkerError):
    """A worker's process ended."""


class CellInterrupted(WorkerError, KeyboardInterrupt):
    """The cell was stopped by the person who ran it."""


class GroupError(OpenClawError, RuntimeError):
    """The process group cannot go on."""


class NotVerifiedError(WorkerError):
    """A cell that was to be verified first has failed to be, and was not run."""


class ReleasedError(GroupError):
    """A collective was cut because another rank could not take part."""


class MismatchError(GroupError):
    """Ranks called different collectives."""


def unknown_name(kind: str, given: str, allowed: Iterable[str]) -> UnknownNameError:
    """Build the error for a name that does not exist.

    Parameters
    ----------
    kind : str
        What the name stands for, e.g. ``"strategy"``.
    given : str
        What the person wrote.
    allowed : iterable of str
        Every name that would have been accepted.

    Returns
    -------
    UnknownNameError
        With the nearest allowed name, if one is near, and the whole list.
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UnknownNameError(f"There is no {kind} {given!r}.{hint} Allowed: {', '.join(names) or 'none'}.")
