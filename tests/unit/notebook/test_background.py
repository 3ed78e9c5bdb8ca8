"""A handle whose output cannot be drawn still follows its cell to the end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from openclaw_nb.cluster.run import RunResult
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.notebook.background import BackgroundRun, MemorySink
from openclaw_nb.notebook.cellrun import Prepared
from openclaw_nb.notebook.live import LiveOutput

RESULT = RunResult({}, {}, (), (), False, "", 0.0, 1.0)


class Run:
    """A cell that runs until it is let end."""

    def __init__(self) -> None:
        self.run_id, self.result = "run-1", None
        self._end = threading.Event()

    @property
    def running(self) -> bool:
        return not self._end.is_set()

    longest_wait_seconds = 0.0

    def next_event(self, timeout: float) -> None:
        self._end.wait(timeout)

    def wait(self, timeout: float | None = None) -> Any:
        self._end.wait(timeout)
        return self.result

    def end(self) -> None:
        self.result = RESULT
        self._end.set()


class Broken(MemorySink):
    def show(self, slot: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        raise ZeroDivisionError("cannot be drawn")


@pytest.mark.parametrize("sink", [MemorySink(), Broken()], ids=["drawn", "cannot be drawn"])
def test_a_run_ends_when_its_cell_does_and_not_before(sink: MemorySink) -> None:
    run = Run()
    output = LiveOutput(1, [0], sink)
    output.feed(0, ["stream", "stdout", "shown"])
    handle = BackgroundRun(Prepared(run, {}, output, 7), sink, Monitor(), {})  # type: ignore[arg-type] # a stand-in
    assert handle.wait(0.3) is None
    assert handle.running
    run.end()
    if isinstance(sink, Broken):
        with pytest.raises(ZeroDivisionError, match="cannot be drawn"):
            handle.wait(20)
    else:
        assert handle.wait(20) is RESULT
        assert handle.output == "shown"
    assert not handle.running
