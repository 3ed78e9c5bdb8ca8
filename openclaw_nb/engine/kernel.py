"""The engine's kernel: an ipyparallel engine that also understands this package's commands.

A command comes as the metadata of an ordinary ``execute_request`` (on the shell channel, in order with
cells) or as an ``openclaw_request`` (on the control channel, answered while a cell runs). Everything else,
such as ``%%px``, works as on any engine.

This file and `process` are the worker side's only doors to ipyparallel.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from ipyparallel.engine.kernel import IPythonParallelKernel

from openclaw_nb.engine.agent import Agent
from openclaw_nb.protocol import codec

COMMAND_KEY = "openclaw"


class _NoSubshells:
    """Stands in for the shell channel's thread, which an engine has not: cells run on the main thread.

    ipykernel looks up ``parent_thread`` for every cell with a top-level ``await``.
    """

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


class WorkerKernel(IPythonParallelKernel):  # type: ignore[misc]
    """Kernel of one worker."""

    control_msg_types: ClassVar[list[str]] = [*IPythonParallelKernel.control_msg_types, "openclaw_request"]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shell_channel_thread = _NoSubshells()
        self.agent = Agent(self)
        self._execute_sleep = (
            0.0  # ipykernel's pause after each request, for output that the outbox carries here
        )

    @property
    def _supports_kernel_subshells(self) -> bool:
        return False

    async def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: dict[str, Any] | None = None,
        allow_stdin: bool = False,
        *,
        cell_meta: dict[str, Any] | None = None,
        cell_id: str | None = None,
    ) -> dict[str, Any]:
        """Carry out a command, or run code as an ordinary engine does."""
        command = (cell_meta or {}).get(COMMAND_KEY)
        if command is None:
            reply: dict[str, Any] = await super().do_execute(
                code,
                silent,
                store_history,
                user_expressions,
                allow_stdin,
                cell_meta=cell_meta,
                cell_id=cell_id,
            )
            return reply
        answer = await self.agent.handle(codec.decode(command))
        return {
            "status": "ok",
            "execution_count": self.execution_count,
            "user_expressions": {},
            "payload": [],
            COMMAND_KEY: codec.encode(answer),
        }

    async def openclaw_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Answer a command that came on the control channel, on the control thread."""
        answer = self.agent.handle_at_once(codec.decode(parent["content"][COMMAND_KEY]))
        self.session.send(
            stream,
            "openclaw_reply",
            {"status": "ok", COMMAND_KEY: codec.encode(answer)},
            parent=parent,
            ident=ident,
        )
