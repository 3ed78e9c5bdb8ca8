"""Where the workers' time goes, in words and pictures."""

from __future__ import annotations

from openclaw_nb.monitor.store import Monitor, RunHistory
from openclaw_nb.notebook.figures import plotly_specification
from openclaw_nb.notebook.sync import describe_sync, sync_chart, sync_traces
from openclaw_nb.protocol.messages import Measured


def history(waits: list[float], *, turned: bool = False) -> RunHistory:
    """Ten seconds of workers that wait for a share of each second; ``turned`` lets them change places midway."""
    monitor = Monitor(lambda: 0.0)
    for n in range(1, 11):
        for worker, wait in enumerate(reversed(waits) if turned and n > 5 else waits):
            seconds = {"data": 0.0, "compute": 0.9 - wait, "wait": wait, "transfer": 0.1}
            monitor.take(
                Measured(
                    worker=worker,
                    run_id="run-1",
                    seq=n,
                    at=n,
                    steps=2,
                    samples=64,
                    loss=1.0,
                    seconds=seconds,
                    num_bytes=2 * 1024 * 1024,
                )
            )
    found = monitor.latest()
    assert found is not None
    return found


def test_the_slowest_is_named_with_what_the_others_wait() -> None:
    assert describe_sync(history([0.5, 0.0])) == [
        "time: 0 % data, 65 % compute, 25 % wait for the slowest, 10 % transfer; 1.0 MiB a step and worker are reduced",
        "worker 1 is the slowest since second 0: the other waits for it 50 % of the time",
    ]
    assert "the others wait for it 40 %" in describe_sync(history([0.4, 0.4, 0.0]))[1]


def test_nobody_is_named_when_all_are_about_as_fast() -> None:
    for waits in ([0.05, 0.0], [0.3, 0.2], [0.0, 0.0]):
        assert history(waits).straggler is None
        assert len(describe_sync(history(waits))) == 1


def test_since_when_is_told_when_another_becomes_the_slowest() -> None:
    found = history([0.5, 0.0], turned=True).straggler
    assert found is not None
    assert found.worker == 0
    assert found.since in (6.0, 7.0)  # two seconds are looked at together


def test_one_worker_waits_for_nobody() -> None:
    alone = history([0.0])
    assert describe_sync(alone) == []
    assert sync_chart(alone, now=False) == ""
    assert sync_traces(alone, "") == []
    assert "xaxis3" not in plotly_specification(alone)["layout"]


def test_bars_have_the_shares_and_a_name_for_those_who_do_not_see_them() -> None:
    drawn = sync_chart(history([0.5, 0.0]), now=False)
    assert drawn.count("<rect") == 8
    assert 'aria-label="What each worker&#x27;s time goes to; time: 0 % data' in drawn
    widths = [float(part.split('"')[0]) for part in drawn.split('width="')[1:] if part[0].isdigit()]
    whole = sum(widths[:4])
    assert [round(width / whole, 2) for width in widths[:4]] == [0.0, 0.4, 0.5, 0.1]
    traces = plotly_specification(history([0.5, 0.0]))["data"]
    assert [t["x"] for t in traces if t["type"] == "bar"] == [[0.0, 0.0], [4.0, 9.0], [5.0, 0.0], [1.0, 1.0]]


def test_of_many_workers_those_that_wait_least_and_most_are_drawn() -> None:
    many = history([0.01 * number for number in range(40)])
    drawn = sync_chart(many, now=True)
    assert drawn.count("<rect") == 4 * 16
    assert "(16 of 40)" in drawn
    assert ">worker 0<" in drawn
    assert ">worker 39<" in drawn
    assert ">worker 20<" not in drawn
