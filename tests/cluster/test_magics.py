"""The magics in a real kernel, as a notebook's client sees them: one kernel and two workers serve all tests.

The tests run in the order in which they stand: first those without a cluster, last those that end it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = [
    pytest.mark.cluster,
    # The client's own sockets: closed by its event loop some time after the kernel is gone.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

_ANSI = re.compile(r"\x1b\[[\d;]*m")


class _Client(NotebookClient):
    """Keeps what was shown in between, too: the saved notebook holds the end only."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.updates: list[str] = []

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] in ("display_data", "update_display_data"):
            self.updates.append(msg["content"]["data"].get("text/plain", ""))
        return super().process_message(msg, cell, cell_index)


@dataclass
class Ran:
    """A cell that was run: what it holds when the notebook is saved, and how long it took."""

    outputs: list[Any]
    seconds: float
    updates: list[str]

    @property
    def text(self) -> str:
        """All plain text of displays, results and streams."""
        parts = (o.get("text") or o.get("data", {}).get("text/plain", "") for o in self.outputs)
        return "\n".join(part for part in parts if part)

    @property
    def error(self) -> str:
        """The traceback as a person reads it, or ""."""
        lines = [line for o in self.outputs if o["output_type"] == "error" for line in o["traceback"]]
        return _ANSI.sub("", "\n".join(lines))


class Notebook:
    """A kernel that runs cells one after the other."""

    def __init__(self) -> None:
        self.saved = new_notebook()
        self.client = _Client(nb=self.saved, kernel_name="python3", timeout=60, allow_errors=True)

    def run(self, source: str) -> Ran:
        self.saved.cells.append(new_code_cell(source))
        self.client.updates = []
        started = time.monotonic()
        cell = self.client.execute_cell(self.saved.cells[-1], len(self.saved.cells) - 1)
        return Ran(list(cell.outputs), time.monotonic() - started, self.client.updates)

    def value(self, expression: str) -> str:
        ran = self.run(expression)
        assert not ran.error, ran.error
        return ran.text

    def matches(self, code: str) -> list[str]:
        """Ask for completions as a front end does."""

        async def ask() -> Any:
            return await self.client.kc.complete(code, len(code), reply=True, timeout=10)

        return list(run_sync(ask)()["content"]["matches"])

    def good(self, source: str) -> Ran:
        ran = self.run(source)
        assert not ran.error, ran.error
        return ran


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    notebook = Notebook()
    # Clusters of others on this host are none of the tests' business.
    environment = {**os.environ, "OPENCLAW_RUNTIME_DIR": str(tmp_path_factory.mktemp("runtime"))}
    with notebook.client.setup_kernel(env=environment):
        notebook.good("%load_ext openclaw_nb")
        yield notebook


@pytest.fixture(scope="module")
def notebook(kernel: Notebook) -> Notebook:
    """The kernel with two workers."""
    started = kernel.good("cluster = %openclaw start -n 2\ncluster")
    assert "2 workers" in started.text
    kernel.started = started
    return kernel


# ---------------------------------------------------------------------------------------- without a cluster


@pytest.mark.parametrize(
    "source",
    [
        "%openclaw status",
        "%openclaw stop",
        "%openclaw push x",
        "%openclaw pull x",
        "%openclaw interrupt",
        "%openclaw reset",
        "%openclaw auto on",
        "%openclaw resize 2",
        "%openclaw add 1",
        "%openclaw remove worker-0",
        "%openclaw recover on",
        "%openclaw chaos kill",
        "%%openclaw_parallel\n1",
    ],
)
def test_what_needs_a_cluster_says_how_to_start_one(kernel: Notebook, source: str) -> None:
    error = kernel.run(source).error
    assert error == "NotStartedError: No cluster is running. Start one first: %openclaw start -n 2"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("strt", "UnknownNameError: There is no %openclaw verb 'strt'. Did you mean 'start'?"),
        ("start --devices GPU-97", "There is no device 'GPU-97'"),
        ("start --name ../up", "'../up' cannot name a cluster"),
        ("start -n 2 --devices CPU-0", "2 workers were asked for, but the list of devices names 1"),
    ],
)
def test_a_start_that_cannot_be(kernel: Notebook, line: str, said: str) -> None:
    assert said in kernel.run(f"%openclaw {line}").error
    assert kernel.value("%openclaw list") == "No cluster runs on this host."


def test_more_workers_than_cores(kernel: Notebook) -> None:
    kernel.good("import os\nallowed = os.environ.pop('OPENCLAW_OVERSUBSCRIBE')")
    error = kernel.run("%openclaw start -n 1000").error
    kernel.good("os.environ['OPENCLAW_OVERSUBSCRIBE'] = allowed")
    assert re.search(r"1000 workers were asked for, but this machine has \d+ (cores|GPUs) to use", error)


def test_devices_need_no_cluster(kernel: Notebook) -> None:
    assert "CPU-0" in kernel.value("%openclaw devices")


# ------------------------------------------------------------------------------------------------ plain cells


def test_start_leaves_a_table_and_no_progress_bar(notebook: Notebook) -> None:
    bar, table = notebook.started.outputs
    assert bar["data"]["text/plain"] == ""
    assert {"text/plain", "text/html"} <= set(table["data"])
    assert any("importing torch" in text for text in notebook.started.updates)


def test_start_twice(notebook: Notebook) -> None:
    assert "runs already, with 2 workers" in notebook.run("%openclaw start -n 2").error
    assert notebook.value("%%openclaw_parallel\nworld_size") == "[ranks 0-1]\n2"


def test_output_of_each_rank(notebook: Notebook) -> None:
    assert notebook.value("%%openclaw_parallel\nprint('both')\nrank * 10") == (
        "[ranks 0-1]\nboth\n[rank 0]\n0\n[rank 1]\n10"
    )


def test_a_cell_that_shows_nothing_sends_nothing(notebook: Notebook) -> None:
    ran = notebook.good("%%openclaw_parallel\nx = rank + 5")
    assert (ran.outputs, ran.updates) == ([], [])


def test_targets(notebook: Notebook) -> None:
    assert notebook.value("%%openclaw_parallel -t worker-1\nrank") == "[rank 1]\n1"
    assert "There is no rank '7'. Allowed: 0, 1." in notebook.run("%%openclaw_parallel -t 7\nrank").error


def test_top_level_await_and_magics(notebook: Notebook) -> None:
    ran = notebook.good("%%openclaw_parallel\nimport asyncio\nawait asyncio.sleep(0)\n!echo shell")
    assert "shell" in ran.text


def test_help(notebook: Notebook) -> None:
    assert "--sync-frequency K" in notebook.value("%openclaw_parallel --help")
    assert "--oversubscribe" in notebook.value("%openclaw start --help")
    assert "  interrupt  Stop what runs" in notebook.value("%openclaw")


def test_an_empty_cell(notebook: Notebook) -> None:
    assert "There is no code to run" in notebook.run("%%openclaw_parallel\n   ").error
    assert "cell body is empty" in notebook.run("%%openclaw_parallel").text


def test_an_unknown_strategy(notebook: Notebook) -> None:
    error = notebook.run("%%openclaw_parallel -s data_paralel\n1").error
    assert "There is no strategy 'data_paralel'. Did you mean 'data_parallel'?" in error


def test_status_is_a_value_too(notebook: Notebook) -> None:
    ran = notebook.good("s = %openclaw status\n[(r.worker, r.id, r.state) for r in s]")
    assert ran.text == "[('worker-0', 'CPU-0', 'idle'), ('worker-1', 'CPU-1', 'idle')]"


def test_auto_runs_plain_cells_on_the_workers(notebook: Notebook) -> None:
    said = notebook.good("%openclaw auto on").text
    assert said.startswith("Plain cells run on the workers of ")
    try:
        notebook.good("# a comment\nautomatic = rank + 1")
        assert notebook.good("print(automatic)").text == "[rank 0]\n1\n[rank 1]\n2"
        assert "Cluster" in notebook.good("%openclaw status").text
        error = notebook.run("one = 1\n\n1 / 0").error
        assert "----> 3 1 / 0" in error  # the cell's own lines
        assert "SyntaxError" in notebook.run("one = = 1").error
    finally:
        notebook.good("%openclaw auto off")
    assert "NameError" in notebook.run("automatic").error
    assert notebook.value("1 + 1") == "2"


def test_plot_returns_the_figures_of_the_last_strategy_cell(notebook: Notebook) -> None:
    assert "Nothing was measured yet" in notebook.run("%openclaw plot").error
    notebook.good("""%%openclaw_parallel
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
loader = torch.utils.data.DataLoader(data, batch_size=8)""")
    notebook.good("""%%openclaw_parallel -s data_parallel
import time
for x, y in loader:
    optimizer.zero_grad(); loss = torch.nn.functional.mse_loss(model(x), y); loss.backward(); optimizer.step()
    time.sleep(0.1)""")
    shown = notebook.good("figures = %openclaw plot\nfigures")
    assert "8 steps, 64 samples" in shown.text
    assert {"text/html", "application/vnd.plotly.v1+json"} <= set(shown.outputs[0]["data"])
    assert notebook.value("[f.layout.title.text for f in figures]") == (
        "['samples/s', 'loss', 'what time went to']"
    )


def test_verify_shows_a_certificate(notebook: Notebook) -> None:
    ran = notebook.good("certificate = %openclaw verify --steps 3\ncertificate")
    assert ran.text.startswith("PASSED: 3 steps of data_parallel on 2 workers equal single-device training")
    assert "text/html" in ran.outputs[0]["data"]
    assert "Cell 999 has not run under a strategy" in notebook.run("%openclaw verify --cell 999").error


def test_a_cell_that_is_verified_first(notebook: Notebook) -> None:
    cell = (
        "%%openclaw_parallel -s data_parallel --verify 2\n{}for x, y in loader:\n    optimizer.zero_grad()\n"
    )
    cell += "    loss = torch.nn.functional.mse_loss(model(x), y); loss.backward(); optimizer.step()\n"
    assert "PASSED" in notebook.good(cell.format("")).text
    notebook.good(
        "%%openclaw_parallel\nif rank == 1: data.tensors[0].add_(1)\nbefore = model.weight.detach().clone()"
    )
    ran = notebook.run(cell.format(""))
    assert "NotVerifiedError: FAILED" in ran.error
    assert "was not run" in ran.error
    assert notebook.value("%%openclaw_parallel\nbool((before == model.weight).all())") == "[ranks 0-1]\nTrue"


def test_a_cell_in_the_background(notebook: Notebook) -> None:
    code = "import time\nprint('begun')\ntime.sleep(2)\nlater = 7\nprint('end', rank)"
    begun = notebook.good(f"%%openclaw_parallel --background run\n{code}")
    assert "in the background runs for" in begun.text
    assert notebook.value("run.running, run.wait(0.01)") == "(True, None)"
    assert "A cell is running on the workers" in notebook.run("%%openclaw_parallel\n1").error
    assert notebook.value("run.wait().ok") == "True"
    assert (
        notebook.value("print(run.output)").strip() == "[ranks 0-1]\nbegun\n[rank 0]\nend 0\n[rank 1]\nend 1"
    )
    assert "ended well after" in notebook.value("run")
    assert notebook.value("%%openclaw_parallel\nlater") == "[ranks 0-1]\n7"


def test_a_background_cell_that_fails_or_is_stopped(notebook: Notebook) -> None:
    notebook.good("%%openclaw_parallel --background run\n1 / rank")
    error = notebook.run("run.wait()").error
    assert "ZeroDivisionError" in error
    assert "failed after" in notebook.value("run")
    notebook.good("%%openclaw_parallel --background run\nimport time\nkept = 3\ntime.sleep(60)")
    assert notebook.good("run.interrupt()").seconds < 5
    assert "was stopped after" in notebook.value("run")
    assert notebook.value("%%openclaw_parallel\nkept") == "[ranks 0-1]\n3"


# ---------------------------------------------------------------------------------------------------- errors


def test_an_error_on_one_rank(notebook: Notebook) -> None:
    cell = "%%openclaw_parallel\nkept = 'here'\nif rank == 1:\n    raise ValueError('boom')\ndist.barrier()"
    ran = notebook.run(cell)
    assert ran.error.startswith("rank 1 of 2 (CPU-1) raised:")
    assert re.search(r"Cell In\[\d+\], line 4\n", ran.error)
    assert "----> 4     raise ValueError('boom')" in ran.error
    assert re.search(r"rank 0 was released after \d+\.\d\d s; variables kept\.", ran.error)
    assert "openclaw_nb/" not in ran.error  # no frames of this package
    assert notebook.value("%%openclaw_parallel\nkept") == "[ranks 0-1]\n'here'"


def test_a_syntax_error_runs_nowhere(notebook: Notebook) -> None:
    error = notebook.run("%%openclaw_parallel\nsyntax = 1\ndef f(:\n    pass").error
    assert re.match(r"\s*Cell In\[\d+\], line 3\n\s*def f\(:", error)
    assert error.count("SyntaxError") == 1
    assert "NameError" in notebook.run("%%openclaw_parallel\nsyntax").error


def test_a_name_that_only_the_notebook_has(notebook: Notebook) -> None:
    notebook.good("only_here = 3")
    error = notebook.run("%%openclaw_parallel\nonly_here").error
    assert error.startswith("ranks 0-1 raised:")
    assert "`only_here` exists in the notebook: %openclaw push only_here" in error
    notebook.good("%openclaw push only_here")
    assert notebook.value("%%openclaw_parallel\nonly_here") == "[ranks 0-1]\n3"


def test_who_waits_where_shows_while_a_rank_waits(notebook: Notebook) -> None:
    cell = "%%openclaw_parallel\nimport time\nif rank == 1: time.sleep(4.5)\ndist.barrier()\n'through'"
    ran = notebook.good(cell)
    assert ran.text == "[ranks 0-1]\n'through'"
    seen = [text for text in ran.updates if "rank 0  waits in barrier" in text]
    assert re.search(r"rank 0  waits in barrier\(\) for 3 s +line 4: dist\.barrier\(\)", seen[0])
    assert re.search(r"rank 1  computes +line 3: if rank == 1: time\.sleep\(4\.5\)", seen[0])


def test_a_rank_that_finished_while_another_waits_for_it(notebook: Notebook) -> None:
    error = notebook.run("%%openclaw_parallel\nif rank == 0: dist.barrier()").error
    assert error.startswith("GroupError: Rank 1 has finished the cell, but rank 0 waits in barrier()")


def test_interrupt(notebook: Notebook) -> None:
    notebook.good(
        "import os, signal, threading\n"
        "threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()"
    )
    cell = "%%openclaw_parallel\nimport time\nlast = 0\nfor last in range(300):\n    time.sleep(0.1)"
    ran = notebook.run(cell)
    assert re.fullmatch(r"CellInterrupted: Stopped after \d\.\d s; variables kept\.", ran.error)
    assert ran.seconds < 1 + 2
    assert notebook.value("%%openclaw_parallel -t 0\n0 < last < 30") == "[rank 0]\nTrue"


# ------------------------------------------------------------------------------------------------- variables


def test_push_and_pull(notebook: Notebook) -> None:
    notebook.good("import numpy as np\na = np.arange(3.0)\n%openclaw push a")
    notebook.good("%%openclaw_parallel\nb = a + rank\nsame = a.sum()")
    table = notebook.value("%openclaw pull b same")
    assert re.search(r"b +ndarray +differs on rank 1 by up to 1\n", table)
    assert re.search(r"same +float64 +the same$", table)
    assert notebook.value("b, same") == "(array([0., 1., 2.]), np.float64(3.0))"
    notebook.good("%openclaw pull b --from 1")
    assert notebook.value("b") == "array([1., 2., 3.])"
    notebook.good("%openclaw pull b --from all")
    assert notebook.value("b") == "[array([0., 1., 2.]), array([1., 2., 3.])]"
    notebook.good("%openclaw pull b --reduce mean")
    assert notebook.value("b") == "array([0.5, 1.5, 2.5])"


def test_a_variable_that_one_rank_lacks(notebook: Notebook) -> None:
    notebook.good("%%openclaw_parallel -t 0\nlonely = 1")
    assert "missing on rank 1" in notebook.value("%openclaw pull lonely")
    assert "Rank 1: There is no variable" in notebook.run("%openclaw pull lonely --from all").error


def test_variables_that_cannot_travel(notebook: Notebook) -> None:
    assert "There is no variable in the notebook 'only_her'. Did you mean 'only_here'?" in (
        notebook.run("%openclaw push only_her").error
    )
    assert "Did you mean 'kept'?" in notebook.run("%openclaw pull kep").error
    notebook.good("%%openclaw_parallel\nstream = (i for i in range(3))")
    assert "'stream' (generator) cannot be sent" in notebook.run("%openclaw pull stream").error
    notebook.good("lock = threading.Lock()")
    error = notebook.run("%openclaw push a lock").error
    assert "'lock' (lock) cannot be sent" in error
    assert "--reduce combines all ranks" in notebook.run("%openclaw pull a --reduce sum --from 0").error
    assert notebook.value("%%openclaw_parallel\nkept") == "[ranks 0-1]\n'here'"


def test_completion_knows_the_workers(notebook: Notebook) -> None:
    assert notebook.matches("%openclaw pull lone") == ["lonely"]
    assert "CPU-1" in notebook.matches("%openclaw push a -t ")
    assert "kept" in notebook.matches("%%openclaw_parallel\nx = kep")
    assert ".bit_count" in notebook.matches("%%openclaw_parallel\nlast.bit_")


# --------------------------------------------------------------------------------------- the group's troubles


def test_reset(notebook: Notebook) -> None:
    assert "A fresh process group stands" in notebook.value("%openclaw reset")
    assert notebook.value("%%openclaw_parallel\nkept") == "[ranks 0-1]\n'here'"


def test_detach_and_attach(notebook: Notebook) -> None:
    notebook.good("%%openclaw_parallel\nleft_here = rank + 7")
    said = notebook.good("%openclaw detach").text
    assert "runs on by itself" in said
    assert "No cluster is running" in notebook.run("%%openclaw_parallel\n1").error
    assert "%openclaw attach takes it up" in notebook.value("%openclaw list")
    assert notebook.matches("%openclaw attach ") == [said.split()[1]]
    text = notebook.good("cluster = %openclaw attach\ncluster").text
    assert "2 workers" in text
    assert re.search(r"Cell \d+ ended well after [\d.]+ s\. In \.cell of this cluster: its output", text)
    assert notebook.value("cluster.cell.running, cluster.cell.output") == "(False, '')"
    assert notebook.value("%%openclaw_parallel\nleft_here") == "[rank 0]\n7\n[rank 1]\n8"


def test_nothing_to_interrupt(notebook: Notebook) -> None:
    assert notebook.value("%openclaw interrupt") == "Nothing runs on the workers."


def test_stop_while_a_cell_runs(notebook: Notebook) -> None:
    pids = json.loads(notebook.value("[w.pid for w in cluster.master.workers]"))
    notebook.good(
        "from openclaw_nb.session import current_session\n"
        "threading.Timer(1, lambda: current_session().stop()).start()"
    )
    ran = notebook.run("%%openclaw_parallel\nwhile True: time.sleep(0.1)")
    assert ran.error.startswith("CellInterrupted: Stopped")
    notebook.good("import time\nwhile cluster.running: time.sleep(0.1)")
    assert len(pids) == 2
    # `running` is false from the first moment of a stop.
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_stop_says_how_many_processes_it_ended(notebook: Notebook) -> None:
    notebook.good("%openclaw start -n 1 --name once-more")
    assert re.fullmatch(
        r"Cluster once-more stopped: \d+ processes ended, none is left\.", notebook.value("%openclaw stop")
    )
    assert "NotStartedError" in notebook.run("%openclaw stop").error


def test_no_directory_is_left_when_the_kernel_has_heard_of_the_ended_processes(notebook: Notebook) -> None:
    look = "import asyncio, os\nawait asyncio.sleep(1.5)\nos.listdir(os.environ['OPENCLAW_RUNTIME_DIR'])"
    assert notebook.value(look) == "[]"


def test_the_notebook_can_be_saved(notebook: Notebook) -> None:
    nbformat.validate(notebook.saved)
