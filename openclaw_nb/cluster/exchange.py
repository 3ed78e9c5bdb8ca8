"""Variables between the notebook and the workers of this host, through one file in shared memory.

The notebook writes a variable once, each worker reads it from there, one after the other: no copy for
each worker is in flight at the same time.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from openclaw_nb.cluster.run import Channel
from openclaw_nb.core.errors import ClusterError, UnknownNameError, UsageError
from openclaw_nb.protocol import codec
from openclaw_nb.protocol.messages import (
    Command,
    Complete,
    DescribeVariables,
    Failed,
    ReceiveVariables,
    SendVariables,
)

_COMPLETE_SECONDS = 1.0


class Exchange:
    """Pushes, pulls and describes variables.

    Parameters
    ----------
    channel : Channel
        How to reach the workers.
    folder : callable
        Returns the directory for files, given how many bytes are needed.
    """

    def __init__(self, channel: Channel, folder: Callable[[], str]) -> None:
        self._channel = channel
        self._folder = folder
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
        """
        path = self._new_path()
        try:
            try:
                size = codec.write_variables(path, variables)
            except TypeError as error:
                raise UsageError(f"{error}. Build it in a cell that runs on the workers instead.") from None
            for done, worker in enumerate(workers):
                if progress:
                    progress(done, len(workers))
                self._ask(worker, ReceiveVariables(path=path))
            if progress:
                progress(len(workers), len(workers))
            return size
        finally:
            _remove(path)

    def pull(self, worker: int, names: Sequence[str]) -> dict[str, Any]:
        """Return variables of one worker.

        Raises
        ------
        UnknownNameError
            When the worker has no such variable.
        UsageError
            When a variable cannot be pickled.
        """
        path = self._new_path()
        try:
            self._ask(worker, SendVariables(names=list(names), path=path))
            return codec.read_variables(path)
        finally:
            _remove(path)

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

    def _new_path(self) -> str:
        return os.path.join(self._folder(), f"variables-{os.getpid()}-{next(self._count)}")


def _value(reply: Any) -> dict[str, Any]:
    if isinstance(reply, Failed):
        kinds = {"UnknownNameError": UnknownNameError, "TypeError": UsageError}
        raise kinds.get(reply.error_type, ClusterError)(reply.message)
    value: dict[str, Any] = reply.value
    return value


def _remove(path: str) -> None:
    if os.path.exists(path):
        os.unlink(path)
