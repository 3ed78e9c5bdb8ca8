"""Writes checkpoints on a thread of its own, one at a time, and never stops training: failures are kept, to be told.

Knows the store and what is to be written; does not know when, nor what it means.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openclaw_nb.core.text import size_text
from openclaw_nb.engine.checkpoint.catalog import STATE, TENSORS
from openclaw_nb.engine.checkpoint.store import Data, Store

_NICENESS = 5  # training goes first where there are fewer cores than threads


@dataclass(frozen=True)
class Job:
    """One checkpoint as it is to be written: the step, the tensors' file in pieces, the state, what else is told."""

    step: int
    tensors: tuple[Data, ...]
    state: Mapping[str, Any]
    about: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """How many bytes the tensors' file has."""
        return sum(len(piece) for piece in self.tensors)


@dataclass(frozen=True)
class Failure:
    """Something that could not be done at a step, why, and what room there was."""

    step: int
    reason: str
    what: str = "not written"
    room: str = ""


class Writer:
    """Writes to a store.

    Parameters
    ----------
    store : Store
        Open; closed by `abandon`.
    keep : int
        How many checkpoints are kept.

    Attributes
    ----------
    written : list of str
        The names of those that were written.
    failures : list of Failure
        What could not be done.
    """

    def __init__(self, store: Store, keep: int) -> None:
        self._store, self._keep = store, keep
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_writing = self._is_abandoned = False
        self.written: list[str] = []
        self.failures: list[Failure] = []

    @property
    def is_busy(self) -> bool:
        """Whether something is being written; what it is written from must not change."""
        return self._is_writing

    def begin(self, job: Job) -> None:
        """Begin to write; nothing may be being written."""
        assert not self.is_busy
        self._is_writing = True
        self._thread = threading.Thread(
            target=self._run, args=(job,), name="openclaw-checkpoint", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # no more threads
            self._is_writing, self._thread = False, None
            raise

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is being written; return whether that is so, after ``seconds`` at most."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.is_busy

    def abandon(self) -> None:
        """Let the store be closed as soon as nothing is being written, now and after each further write."""
        with self._lock:
            self._is_abandoned = True
            if not self._is_writing:
                self._store.close()

    def fail(self, failure: Failure) -> None:
        """Take note of what could not be done."""
        self.failures.append(failure)

    def _run(self, job: Job) -> None:
        with contextlib.suppress(OSError):  # on Linux a thread has a niceness of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self._write(job)
        finally:
            with self._lock:
                self._is_writing = False
                if self._is_abandoned:
                    self._store.close()

    def _write(self, job: Job) -> None:
        try:
            files = {TENSORS: job.tensors, STATE: [json.dumps(job.state).encode()]}
            self.written.append(self._store.write(job.step, files, job.about).name)
        except Exception as error:  # noqa: BLE001 - told at the cell's end; training goes on
            self.fail(Failure(job.step, _words(error), room=self._room(job.num_bytes)))
            return
        try:
            self._store.prune(self._keep)
        except OSError as error:
            self.fail(Failure(job.step, _words(error), what="older ones not removed"))

    def _room(self, needed: int) -> str:
        try:
            free = size_text(shutil.disk_usage(self._store.directory).free)
        except OSError:
            free = "unknown"
        return f"{size_text(needed)} needed, {free} free"


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
