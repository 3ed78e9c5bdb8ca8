"""Who brings a new process for a worker that died: the cell while it runs, the mending after it, never both."""

from __future__ import annotations

from typing import Any, cast

from openclaw_nb.cluster.devices import Device
from openclaw_nb.cluster.membership import Membership
from openclaw_nb.cluster.worker import Worker


class Launch:
    """Notes which workers it was asked to start, and starts none."""

    replaces = True

    def __init__(self) -> None:
        self.started: list[int] = []

    def start(self, workers: list[Worker], count: int) -> None:
        self.started += [worker.number for worker in workers]
        raise OSError("no process can be started")


def members() -> tuple[Membership, Launch]:
    launch = Launch()
    found = Membership(cast(Any, None), cast(Any, launch), "127.0.0.1", "gloo", "c")
    found.workers = [
        Worker(
            number=n, device=Device(f"CPU-{n}", "cpu", n, "a core"), alive=True, store_port=1, spare=n == 2
        )
        for n in range(3)
    ]
    return found, launch


def test_one_that_dies_in_a_cell_is_replaced_while_it_runs() -> None:
    found, launch = members()
    found.begin_run()
    assert found.take_spare(0) == 2
    found.replace_running(0, lambda number: None)
    for thread in found._replacing:
        thread.join(10)
    assert launch.started == [0]


def test_news_that_come_after_the_cell_replace_nobody_a_second_time() -> None:
    found, launch = members()
    found.begin_run()
    found.after_run(clean=True, busy=[])
    assert found.take_spare(0) is None
    found.replace_running(0, lambda number: None)
    assert (launch.started, found._replacing) == ([], [])
    assert [worker.spare for worker in found.workers] == [False, False, True]
