"""Variables between the notebook and the workers of this host, through one file in shared memory.

The notebook writes a variable once, each worker reads it from there, one after the other: no copy for
each worker is in flight at the same time. Where shared memory is too small, as in many containers, the
file goes to disk.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any, TypeVar

from openclaw_nb.cluster.run import Channel
from openclaw_nb.core.errors import ClusterError, NoRoomError, UnknownNameError, UsageError
from openclaw_nb.protocol import codec
from openclaw_nb.protocol.messages import (
    BorrowVariables,
    Command,
    Complete,
    DescribeVariables,
    Failed,
    LendVariables,
    ReceiveVariables,
    SendVariables,
    TakeBackVariables,
)

_COMPLETE_SECONDS = 1.0

Written = TypeVar("Written")


class Exchange:
    """Pushes, pulls and describes variables.

    Parameters
    ----------
    channel : Channel
        How to reach the workers.
    folders : callable
        Returns the directories for files, the best first.
    """

    def __init__(self, channel: Channel, folders: Callable[[], Sequence[str]]) -> None:
        self._channel = channel
        self._folders = folders
        self._count = itertools.count()

    def push(
        self,
        workers: Sequence[int],
        variables: Mapping[str, Any],
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Copy variables to the workers; return the size in bytes.

        Raises
        ------
        UsageError
            When a variable cannot be pickled; nothing was sent then.
        NoRoomError
            When they fit nowhere.
        """
        with self._in_a_file(lambda path: _write(path, variables)) as (path, size):
            for done, worker in enumerate(workers):
                if progress:
                    progress(done, len(workers))
                self._ask(worker, ReceiveVariables(path=path))
            if progress:
                progress(len(workers), len(workers))
            return size

    def pull(self, worker: int, names: Sequence[str]) -> dict[str, Any]:
        """Return variables of one worker.

        Raises
        ------
        UnknownNameError
            When the worker has no such variable.
        UsageError
            When a variable cannot be pickled.
        NoRoomError
            When they fit nowhere.
        """
        command = SendVariables(names=list(names), path="")
        with self._in_a_file(lambda path: self._ask(worker, replace(command, path=path))) as (path, _):
            return codec.read_variables(path)

    @contextlib.contextmanager
    def _in_a_file(self, write: Callable[[str], Written]) -> Iterator[tuple[str, Written]]:
        """Let a file be written where it fits; yield its path and what writing returned. It is gone afterwards."""
        problems = []
        for folder in self._folders():
            path = os.path.join(folder, f"variables-{os.getpid()}-{next(self._count)}")
            try:
                written = write(path)
            except NoRoomError as error:
                problems.append(str(error))
                continue
            except BaseException:
                _remove(path)
                raise
            try:
                yield path, written
            finally:
                _remove(path)
            return
        raise NoRoomError(" ".join([*problems, "Free some, or send less at a time."]))

    def hand_over(self, lender: int, borrowers: Sequence[int]) -> dict[str, str]:
        """Give workers all variables of another one; return names that could not be sent, with the reason.

        Raises
        ------
        ClusterError
            When they cannot be taken over.
        """
        lent = self._ask(lender, LendVariables())
        try:
            for worker in borrowers:
                self._ask(worker, BorrowVariables(path=lent["path"]))
        finally:
            self._channel.request(lender, TakeBackVariables())
        left: dict[str, str] = lent["left"]
        return left

    def describe(
        self, ranks: Mapping[int, int], names: Sequence[str]
    ) -> dict[str, dict[int, dict[str, Any]]]:
        """Return type, digest and size of each variable by rank."""
        sent = {r: self._channel.request(w, DescribeVariables(names=list(names))) for r, w in ranks.items()}
        replies = {rank: _value(future.result()) for rank, future in sent.items()}
        return {name: {rank: value[name] for rank, value in replies.items()} for name in names}

    def complete(self, worker: int, code: str, cursor: int) -> dict[str, Any]:
        """Complete code against a worker's variables; empty when the worker is busy."""
        try:
            reply = self._channel.request(worker, Complete(code=code, cursor=cursor)).result(
                _COMPLETE_SECONDS
            )
        except FutureTimeout:
            return {"text": "", "matches": []}
        return _value(reply)

    def _ask(self, worker: int, command: Command) -> dict[str, Any]:
        return _value(self._channel.request(worker, command).result())


def _write(path: str, variables: Mapping[str, Any]) -> int:
    try:
        return codec.write_variables(path, variables)
    except TypeError as error:
        raise UsageError(f"{error}. Build it in a cell that runs on the workers instead.") from None


def _value(reply: Any) -> dict[str, Any]:
    if isinstance(reply, Failed):
        kinds = {"NoRoomError": NoRoomError, "UnknownNameError": UnknownNameError, "TypeError": UsageError}
        raise kinds.get(reply.error_type, ClusterError)(reply.message)
    value: dict[str, Any] = reply.value
    return value


def _remove(path: str) -> None:
    if os.path.exists(path):
        os.unlink(path)
