"""Run one cell's source in the worker's shell and say how it ended.

Knows IPython's shell and the cell's own lines; does not know groups, strategies or messages.
"""

from __future__ import annotations

import ast
import asyncio
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from openclaw_nb.core.errors import OpenClawError, ReleasedError

_ASYNC = re.compile(r"\b(await|async)\b")


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: the error, if any, and its traceback as IPython draws it."""

    error: BaseException | None
    traceback: list[str]


class Transformer(Protocol):
    """What makes the program that is run of a cell's tree."""

    def visit(self, tree: ast.Module) -> ast.Module:
        """Return the program."""


class CellRunner:
    """Runs cells on the main thread and can be interrupted from another.

    Parameters
    ----------
    shell : InteractiveShell
        The worker's shell.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._lock = threading.Lock()
        self._in_user_code = False
        self._task: asyncio.Future[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._traceback: list[str] = []
        self._code_name = ""
        shell._showtraceback = self._keep_traceback
        self._show = shell.showtraceback
        shell.showtraceback = self._show_traceback

    # ------------------------------------------------------------------------------------ running

    async def run(self, source: str, execution_count: int, transformer: Transformer | None = None) -> Outcome:
        """Run ``source`` as the notebook's cell ``execution_count``, or what ``transformer`` makes of it.

        The source's line numbers are those of the notebook's cell, and tracebacks name that cell.
        """
        shell = self._shell
        shell.execution_count = execution_count
        shell.displayhook.source = source
        self._traceback = []
        transformed = shell.transform_cell(source)
        self._code_name = shell.compile.get_code_name(source, transformed, execution_count)
        previous = signal.signal(signal.SIGINT, self._on_sigint)
        try:
            with self._transformed_by(transformer):
                result = await self._run_cell(source, transformed)
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            # The interrupt came in the last instant, outside of what the shell guards.
            return Outcome(KeyboardInterrupt(*error.args), self._traceback)
        finally:
            self._leave_user_code()
            signal.signal(signal.SIGINT, previous)
        raised = result.error_before_exec or result.error_in_exec
        if isinstance(raised, asyncio.CancelledError):
            raised = KeyboardInterrupt()
        return Outcome(raised, self._traceback)

    @contextmanager
    def _transformed_by(self, transformer: Transformer | None) -> Iterator[None]:
        if transformer is None:
            yield
            return
        self._shell.ast_transformers.append(transformer)
        try:
            yield
        finally:
            if transformer in self._shell.ast_transformers:  # the shell drops one that raises
                self._shell.ast_transformers.remove(transformer)

    async def _run_cell(self, source: str, transformed: str) -> Any:
        shell = self._shell
        # Whether there is an await at the top level takes compiling to tell, a word does not.
        if not _ASYNC.search(source) or not shell.should_run_async(source, transformed_cell=transformed):
            self._enter_user_code(None)
            return shell.run_cell(source, store_history=False)
        coroutine = shell.run_cell_async(source, store_history=False, transformed_cell=transformed)
        task = asyncio.ensure_future(coroutine)
        self._enter_user_code(task)
        try:
            return await task
        finally:
            shell.events.trigger("post_execute")

    def _enter_user_code(self, task: asyncio.Future[Any] | None) -> None:
        with self._lock:
            self._in_user_code, self._task = True, task
            self._loop = asyncio.get_running_loop()

    def _leave_user_code(self) -> None:
        with self._lock:
            self._in_user_code, self._task = False, None

    def _keep_traceback(self, error_type: type, error: BaseException, lines: list[str]) -> None:
        self._traceback = list(lines)

    def _show_traceback(self, *args: Any, **kwargs: Any) -> None:
        """Draw a traceback the usual way, but cheaply where nobody reads more than the cell's line.

        Errors of this package and interrupts end at the cell's own line: drawing what torch did below it
        takes half a second, and others wait for this rank.
        """
        kind, error, trace = sys.exc_info()
        ours = kind is not None and issubclass(kind, OpenClawError | KeyboardInterrupt)
        if not ours and ReleasedError.__name__ not in str(error):
            self._show(*args, **kwargs)
            return
        end = last = trace
        while last is not None:
            if last.tb_frame.f_code.co_filename in self._shell.compile._filename_map:
                end = last
            last = last.tb_next
        if end is not None:
            end.tb_next = None
        self._show((kind, error, trace), **kwargs)

    # ----------------------------------------------------------------------------------- interrupting

    def interrupt(self) -> bool:
        """Raise KeyboardInterrupt in the running cell; return False when none runs. Any thread may call."""
        with self._lock:
            if not self._in_user_code:
                return False
            if self._task is not None and self._loop is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)
            else:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return True

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        # A signal that arrives when the user's code is already left must not end the worker's own code.
        if self._in_user_code:
            raise KeyboardInterrupt

    # -------------------------------------------------------------------------------------- where

    def position(self) -> tuple[int, str]:
        """Return the line of the cell that runs now and its text, or (0, "")."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        names = self._shell.compile._filename_map
        fallback: FrameType | None = None
        while frame is not None:
            name = frame.f_code.co_filename
            if name == self._code_name:
                return frame.f_lineno, _source_line(frame)
            if fallback is None and name in names:
                fallback = frame
            frame = frame.f_back
        return (fallback.f_lineno, _source_line(fallback)) if fallback else (0, "")


def _source_line(frame: FrameType) -> str:
    import linecache

    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
