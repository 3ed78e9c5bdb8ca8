"""What verbs do on a cluster of this process, in order: one worker and a spare become more and fewer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import openclaw_nb
from openclaw_nb.core.errors import UnknownNameError, UsageError
from openclaw_nb.engine.checkpoint.catalog import listed
from openclaw_nb.notebook import options
from openclaw_nb.notebook.verbs import HANDLERS, Context
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.session import current_session
from openclaw_nb.strategies import DataParallelStrategy

from .conftest import HANG_SECONDS, Lab
from .test_data_parallel import SETUP
from .test_elastic import until

pytestmark = pytest.mark.cluster

PACED = """
import time
for epoch in range({num_passes}):
    for x, y in loader:
        time.sleep(0.05)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
"""


def openclaw(line: str) -> Any:
    command, verb, words = options.split_verb(line)
    assert command is not None
    context = Context(current_session(), SimpleNamespace(user_ns={}), in_notebook=False)
    return HANDLERS[verb](context, command.parse(words))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Lab]:
    started = openclaw("start -n 1 --spares 1 --name verbs")
    assert "1 worker and 1 spare" in repr(started)
    yield Lab(started.master)
    openclaw("stop")


def test_a_spare_is_shown_and_has_no_rank(cluster: Lab) -> None:
    table = openclaw("status")
    assert table.title.startswith("Cluster verbs: 1 worker and 1 spare, ")
    assert [(row[0], row[1], row[3]) for row in table.rows] == [
        ("0", "worker-0", "idle"),
        ("-", "worker-1", "spare"),
    ]
    assert "worker-1 (spare)" in repr(openclaw("devices"))


def test_more_and_fewer_while_nothing_runs(cluster: Lab) -> None:
    table = openclaw("add 1")
    assert [row[1] for row in table.rows] == ["worker-0", "worker-2", "worker-1"]
    assert table.notes[0].startswith("worker-2 is a new process without variables")
    assert table.notes[0] in repr(table)
    assert "worker-2 is a new process" in table._repr_html_()
    assert cluster.good("world_size").ok
    assert [row[1] for row in openclaw("remove worker-2").rows] == ["worker-0", "worker-1"]
    assert [worker.id for worker in openclaw_nb.resize_workers(2)] == ["worker-0", "worker-3"]
    assert len(openclaw("resize 1")) == 2, "with the spare"
    with pytest.raises(UnknownNameError, match="worker-9"):
        openclaw("remove worker-9")
    with pytest.raises(UsageError, match="at least 1"):
        openclaw("add 0")
    with pytest.raises(UsageError, match="last worker"):
        openclaw("remove worker-0")


def test_more_and_fewer_while_a_cell_runs(cluster: Lab) -> None:
    cluster.good(SETUP)
    run = cluster.master.run_cell(PACED.format(num_passes=200), strategy=StrategySpec(name="data_parallel"))
    said = openclaw("resize 2")
    assert said.splitlines()[0] == "worker-4 comes in at the next head of a loop."
    until(lambda: len(run.ranks) == 2)
    assert "worker-4 is gone; the cell goes on without it." in openclaw("remove worker-4")
    assert openclaw("resize 1") == "The workers stay as they are."
    assert run.running
    run.interrupt()
    assert run.wait(HANG_SECONDS) is not None


def test_recovery_sets_how_often_checkpoints_are_written(cluster: Lab, tmp_path: Path) -> None:
    cluster.good(SETUP)
    written = []
    for line in ("recover on --every 0.2 --retries 2", "recover off"):
        assert "From the next cell on" in openclaw(line)
        directory = tmp_path / line[8:11].strip()
        spec = DataParallelStrategy(checkpoint=directory, keep=20).spec()
        assert cluster.run(PACED.format(num_passes=3), strategy=spec).ok
        written.append(len(listed(directory)))
    own = DataParallelStrategy(checkpoint=tmp_path / "own", checkpoint_every=1000, keep=20).spec()
    openclaw("recover on --every 0.1")
    assert cluster.run(PACED.format(num_passes=3), strategy=own).ok
    assert written[0] >= 3, "0.75 s of training"
    assert (written[1], len(listed(tmp_path / "own"))) == (1, 1), "only the last one"


@pytest.mark.parametrize(
    ("way", "why"),
    [({"split": "model"}, "--split model"), ({"options": {"mode": "parameter"}}, "--mode parameter")],
)
def test_a_cell_that_cannot_go_on_says_so(cluster: Lab, way: dict[str, Any], why: str) -> None:
    openclaw("recover on")
    cluster.good(SETUP)
    cluster.master.take_notes()
    assert cluster.run(PACED.format(num_passes=1), strategy=StrategySpec(name="data_parallel", **way)).ok
    (note,) = cluster.master.take_notes()
    assert note.startswith(f"recovery does not apply to this cell: with {why}")
    assert cluster.run(PACED.format(num_passes=1), strategy=StrategySpec(name="data_parallel")).ok
    cluster.good("1")
    assert cluster.master.take_notes() == []


def test_a_plain_cell_says_so_when_a_worker_dies(cluster: Lab) -> None:
    openclaw("recover on")
    result = cluster.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert not result.ok
    assert any(
        "recovery does not apply to this cell: without a strategy" in n for n in cluster.master.take_notes()
    )
    openclaw("recover off")
    cluster.good("1")
