"""What a worker tells of its steps does not depend on the host's clock, which may be set while a cell runs."""

from __future__ import annotations

from typing import Any

import pytest

from openclaw_nb.engine.steps import measure
from openclaw_nb.engine.steps.measure import Publisher
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.protocol.messages import Measured


class Outbox:
    def __init__(self) -> None:
        self.events: list[Measured] = []

    def publish(self, event: Any) -> None:
        self.events.append(event)


class Clocks:
    """The host's clocks; the one that people set can be moved."""

    def __init__(self) -> None:
        self.now, self.wrong = 0.0, 0.0

    def monotonic(self) -> float:
        return 50.0 + self.now

    def time(self) -> float:
        return 1e9 + self.now + self.wrong


@pytest.mark.parametrize("jump", [-86400.0, 86400.0], ids=["back", "forward"])
def test_a_clock_that_is_set_changes_nothing(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    clocks, outbox = Clocks(), Outbox()
    monkeypatch.setattr(measure.time, "time", clocks.time)
    monkeypatch.setattr(measure.time, "monotonic", clocks.monotonic)
    publisher = Publisher(outbox, 0, "run-1")  # type: ignore[arg-type]
    monitor = Monitor(clocks.monotonic)
    for step in range(1, 41):
        clocks.now += 0.5
        clocks.wrong = jump if step > 20 else 0.0
        publisher.batch(32)
        publisher.step(1.0 / step, 1.0, 0)
        monitor.take(outbox.events[-1])
    history = monitor.latest()
    assert history is not None
    assert [event.at for event in outbox.events] == [50.0 + 0.5 * step for step in range(1, 41)]
    assert history.rate == pytest.approx(64.0)
    assert history.mean_rate == pytest.approx(64.0)
    assert history.seconds == pytest.approx(19.5)
    assert max(history.rates.y) == pytest.approx(64.0)
