from __future__ import annotations

import pickle
import re
from typing import Any

from openclaw_nb.cluster.run import RunResult
from openclaw_nb.core.errors import (
    CellInterrupted,
    GroupError,
    OpenClawError,
    RefusedError,
    RemoteCellError,
    WorkerDiedError,
)
from openclaw_nb.notebook.failure import CellError, cell_error, drawn
from openclaw_nb.notebook.targets import Place
from openclaw_nb.protocol.messages import Failed

PLACES = {rank: Place(f"worker-{rank}", f"CPU-{rank}") for rank in range(4)}
# As IPython draws it on a worker, colour codes and all.
TRACEBACK = [
    "\x1b[31m---------------------------------------------------------------------------\x1b[39m",
    "\x1b[31mValueError\x1b[39m                                Traceback (most recent call last)",
    "\x1b[36mCell\x1b[39m\x1b[36m \x1b[39m\x1b[32mIn[5]\x1b[39m\x1b[32m, line 3\x1b[39m\n"
    "\x1b[32m----> 3\x1b[39m raise ValueError('boom')",
    "\x1b[31mValueError\x1b[39m: boom",
]


def failed(kind: str = "ValueError", message: str = "boom", **changes: Any) -> Failed:
    given = {"error_type": kind, "message": message, "traceback": TRACEBACK, "at": 1.0, **changes}
    return Failed(**given)


def released() -> Failed:
    return failed("ReleasedError", "all_reduce() was ended", consequence=True, at=2.0)


def result(**changes: Any) -> RunResult:
    given: dict[str, Any] = {
        "values": {},
        "failures": {},
        "died": (),
        "busy": (),
        "interrupted": False,
        "cause": "",
        "release_seconds": 0.04,
        "seconds": 3.21,
    }
    return RunResult(**{**given, **changes})


def shown(error: OpenClawError) -> str:
    """Return what IPython would show, without colours."""
    lines = vars(error)["_render_traceback_"]()
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(lines))


def test_the_first_rank_that_raised_is_shown_and_the_others_are_folded() -> None:
    table = [(0, "waits in all_reduce() for 4 s", "line 4: dist.all_reduce(t)"), (1, "raised ValueError", "")]
    failures = {0: released(), 1: failed(), 2: released(), 3: released()}
    error = cell_error(result(failures=failures, table=table), PLACES)
    lines = shown(error).split("\n")
    assert lines[0] == "rank 1 of 4 (CPU-1) raised:"
    assert "Cell In[5], line 3" in lines
    assert "ranks 0, 2-3 were released after 0.04 s; variables kept." in lines
    assert "  rank 0  waits in all_reduce() for 4 s  line 4: dist.all_reduce(t)" in lines
    assert "all_reduce() was ended" not in shown(error)
    assert str(error) == (
        "rank 1 of 4 (CPU-1) raised ValueError: boom (line 3)\n"
        "ranks 0, 2-3 were released after 0.04 s; variables kept."
    )


def test_the_error_keeps_what_a_script_needs_also_when_pickled() -> None:
    error = pickle.loads(pickle.dumps(cell_error(result(failures={1: failed()}), PLACES)))
    assert isinstance(error, CellError)
    assert isinstance(error, RemoteCellError)
    assert (error.ranks, error.error_type, error.line) == ((1,), "ValueError", 3)
    assert error.remote_traceback == tuple(TRACEBACK)
    assert shown(error).startswith("rank 1 of 4")


def test_who_waits_where_is_left_out_when_nobody_waited() -> None:
    table = [(0, "computes", ""), (1, "raised ValueError", "")]
    text = shown(cell_error(result(failures={0: released(), 1: failed()}, table=table), PLACES))
    assert "computes" not in text
    assert "rank 0 was released" in text


def test_the_same_error_on_several_ranks_is_shown_once() -> None:
    failures = {rank: failed(at=1.0 + rank, consequence=rank > 1) for rank in range(4)}
    error = cell_error(result(failures=failures), PLACES)
    assert shown(error).startswith("ranks 0-3 raised:")
    assert shown(error).count("Traceback") == 1
    assert "released" not in shown(error)
    few = cell_error(result(failures={0: failed(), 1: failed()}), PLACES)
    assert shown(few).startswith("ranks 0-1 of 4 raised:")


def test_another_error_of_another_rank_is_not_swallowed() -> None:
    failures = {0: failed(), 1: failed("KeyError", "'x'", consequence=True, at=1.5), 2: released()}
    text = shown(cell_error(result(failures=failures), PLACES))
    assert "rank 1 raised KeyError: 'x'" in text
    assert "rank 2 was released" in text


def test_a_name_that_only_the_notebook_has() -> None:
    error = failed("NameError", "name 'x' is not defined")
    assert "`x` exists in the notebook: %openclaw push x" in shown(
        cell_error(result(failures={0: error}), PLACES, {"x": 1})
    )
    assert "push" not in shown(cell_error(result(failures={0: error}), PLACES, {"y": 1}))
    module = cell_error(result(failures={0: error}), PLACES, {"x": re})
    assert "import it in a cell that runs on the workers" in shown(module)


def test_a_refusal_is_its_message_without_a_traceback() -> None:
    message = "LBFGS calls its closure again. Use SGD."
    refusal = failed("RefusedError", message, traceback=["Traceback ...", "frames"])
    error = cell_error(result(failures=dict.fromkeys(range(4), refusal)), PLACES)
    assert type(error) is RefusedError
    assert shown(error) == f"RefusedError: {message}"
    at_a_line = cell_error(result(failures={0: failed("RefusedError", "No.")}), PLACES)
    assert str(at_a_line) == "No. (line 3)"


def test_a_worker_that_died() -> None:
    error = cell_error(result(failures={0: released()}, died=(1,), cause="rank 1 died"), PLACES)
    assert isinstance(error, WorkerDiedError)
    text = shown(error)
    assert "Rank 1 of 4 (worker-1 on CPU-1) died. A new process takes its place" in text
    assert "variables it had are gone" in text
    assert "Rank 0 was released after 0.04 s; variables kept." in text


def test_a_rank_that_does_not_come_out() -> None:
    table = [(0, "computes", "line 7: a @ b"), (1, "raised ValueError", "")]
    text = shown(cell_error(result(failures={1: failed()}, busy=(0,), table=table), PLACES))
    assert "rank 0 (line 7: a @ b)" in text
    assert "%openclaw reset --replace" in text


def test_an_interrupted_cell_is_one_line() -> None:
    failures = {0: failed("KeyboardInterrupt", "", consequence=True, interrupted=True)}
    error = cell_error(result(failures=failures, interrupted=True), PLACES)
    assert isinstance(error, CellInterrupted)
    assert isinstance(error, KeyboardInterrupt)
    assert shown(error) == "CellInterrupted: Stopped after 3.2 s; variables kept."


def test_ranks_that_waited_for_each_other() -> None:
    cause = "rank 1 has finished the cell, but rank 0 waits in barrier(), line 2"
    table = [(0, "waits in barrier() for 1 s", "line 2: dist.barrier()"), (1, "has finished", "")]
    error = cell_error(result(failures={0: released()}, cause=cause, table=table), PLACES)
    assert isinstance(error, GroupError)
    assert str(error) == (
        "Rank 1 has finished the cell, but rank 0 waits in barrier(), line 2. "
        "The cell was ended on every rank. "
        "Rank 0 was released after 0.04 s; variables kept."
    )
    assert "  rank 1  has finished" in shown(error).split("\n")


def test_a_cut_that_nobody_made_is_told_as_the_rank_tells_it() -> None:
    message = "barrier(): the connection to another rank is gone"
    cut = failed("ReleasedError", message, consequence=True)
    error = cell_error(result(failures={0: cut}, values={1: {}}), PLACES)
    assert isinstance(error, GroupError)
    assert f"rank 0: {message}" in shown(error)


def test_an_error_without_a_drawing_of_its_own_is_its_message() -> None:
    assert shown(drawn(GroupError("It broke."))) == "GroupError: It broke."


def test_where_workers_are_not_replaced_the_first_death_is_the_cause() -> None:
    """mpiexec ends the others after it: that they died, or were released, is no news of theirs."""
    ended = result(died=(2, 0), failures={1: released()}, cause="rank 2 died")
    text = shown(cell_error(ended, PLACES, replaced=False))
    assert "Rank 2 of 4 (worker-2 on CPU-2) died. One death ends an MPI set" in text
    assert "%openclaw stop" in text
    assert "kept" not in text
    assert "Rank 0" not in text
    assert "takes its place" in shown(cell_error(result(died=(2,)), PLACES))


def test_a_rank_that_raised_before_the_set_ended_is_the_cause() -> None:
    ended = result(died=(2, 0), failures={1: failed()})
    error = cell_error(ended, PLACES, replaced=False)
    assert isinstance(error, CellError)
    assert "boom" in shown(error)
    assert "rank 2 of 4 (worker-2 on CPU-2) died. One death ends an MPI set" in shown(error)
