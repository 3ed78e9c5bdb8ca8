"""What the doctor finds on a cluster that runs: an array sum, and the cause that was put into a run."""

from __future__ import annotations

from typing import Any

import pytest

from openclaw_nb.doctor import cluster as checks
from openclaw_nb.doctor import runs
from openclaw_nb.doctor.cluster import array_sum, checks_of_cluster
from openclaw_nb.doctor.findings import FAIL, OK, SKIP, WARN, Finding, examine
from openclaw_nb.doctor.runs import advice_after
from openclaw_nb.monitor.store import Monitor

from .conftest import HANG_SECONDS, Lab
from .test_data_parallel import LOOP, SETUP

pytestmark = pytest.mark.cluster


def trained(lab: Lab, loop: str, **options: Any) -> Monitor:
    monitor = Monitor()
    forget = lab.master.listen(monitor.take)
    try:
        assert lab.train(SETUP, loop, 2, **options).ok
    finally:
        forget()
    return monitor


def last_run(lab: Lab, monitor: Monitor) -> list[Finding]:
    return list(dict(checks_of_cluster(lab.master, monitor))["last run"]())


def test_all_workers_agree_on_an_array_sum_and_keep_no_trace(lab: Lab) -> None:
    found = {each.check: each for each in examine(checks_of_cluster(lab.master, Monitor()))}
    assert {name: each.state for name, each in found.items()} == {
        "workers": OK,
        "communication": OK,
        "timeout": OK,
        "last run": SKIP,
        "array sum": OK,
    }
    length = 250_000
    assert found["array sum"].seen.startswith(f"4 workers agree: {10 * length * (length - 1) // 2}, 2 MB in")
    lab.good("assert not [name for name in globals() if 'array_sum' in name]")


def test_a_sum_that_is_wrong_is_a_failure(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = checks._ARRAY_SUM.replace("* (rank + 1)", "* (rank + 2)")
    monkeypatch.setattr(checks, "_ARRAY_SUM", broken)
    (found,) = array_sum(lab.master)
    assert (found.state, found.key) == (FAIL, "parallel.communication")
    assert "in place of" in found.seen


def test_while_a_cell_runs_it_says_who_does_what(lab: Lab) -> None:
    run = lab.master.run_cell("import time\nwhile True: time.sleep(0.05)")
    (found,) = array_sum(lab.master)
    assert found.state == SKIP
    assert "rank 3 computes" in found.seen
    run.interrupt()
    assert run.wait(HANG_SECONDS) is not None


def test_a_slow_loader_is_named_with_the_key(lab: Lab) -> None:
    collate = "lambda rows: (time.sleep(0.05), torch.utils.data.default_collate(rows))[1]"
    monitor = trained(lab, f"import time\nloader.collate_fn = {collate}\n{LOOP}")
    found = last_run(lab, monitor)
    assert (found[0].state, found[0].key) == (WARN, "parallel.async_io")
    assert "of the time goes to waiting for batches" in found[0].seen


def test_a_slow_worker_is_named_with_the_call(lab: Lab) -> None:
    slow = LOOP.replace("loss.backward()", "time.sleep(0.2 * rank); loss.backward()")
    monitor = trained(lab, "import time\n" + slow)
    found = {each.key: each for each in last_run(lab, monitor)}
    history = monitor.latest()
    assert history is not None
    assert f"worker-{history.workers[1].worker} is the slowest" in found["balance_load"].seen
    assert "%openclaw balance" in found["balance_load"].todo


def test_a_long_run_ends_with_the_sentence(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    collate = "lambda rows: (time.sleep(0.05), torch.utils.data.default_collate(rows))[1]"
    monitor = trained(lab, f"import time\nloader.collate_fn = {collate}\n{LOOP}")
    assert advice_after(lab.master, monitor) == "", "too short to be told anything"
    monkeypatch.setattr(runs, "_SHORTEST_SECONDS", 0.1)
    monkeypatch.setattr(runs, "_FEWEST_STEPS", 5)
    assert "by parallel.async_io: true" in advice_after(lab.master, monitor)


def test_a_cluster_that_is_lost_is_named(pair: Lab) -> None:
    pair.master.problem = "The cluster's controller (process 1) has ended"
    try:
        (found,) = dict(checks_of_cluster(pair.master, Monitor()))["workers"]()
    finally:
        pair.master.problem = ""
    assert found.state == FAIL
    assert "%openclaw stop" in found.todo
