"""`openclaw up`, `run` and `down`, as typed: the script's own numbers, exit codes, and what is said otherwise."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from openclaw_nb import cli

from .conftest import HANG_SECONDS

pytestmark = pytest.mark.cluster

COMMAND = [sys.executable, "-c", "import sys; from openclaw_nb.cli import main; sys.exit(main())"]

SCRIPT = """\
'''A script as one finds them.'''
import argparse
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from helper import accuracy


def train(model, loader, optimizer, epoch):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.7f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(96, 8)
    data = TensorDataset(x, x[:, :4].argmax(1))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        train(model, loader, optimizer, epoch)
    print(f"accuracy {accuracy(model, data):.4f}")
    return 3


if __name__ == "__main__":
    sys.exit(main())
"""
HELPER = """\
def accuracy(model, data):
    x, y = data.tensors
    return (model(x).argmax(1) == y).float().mean().item()
"""
BODY = """\
import os, sys, time, torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, x in enumerate(DataLoader(torch.ones(64, 2), batch_size=4)):
    model(x).mean().backward()
    optimizer.step()
    if number == 3:
        {then}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with scripts, and a cluster of two workers that nobody owns."""
    path = tmp_path_factory.mktemp("scripts")
    (path / "train.py").write_text(SCRIPT)
    (path / "helper.py").write_text(HELPER)
    started = openclaw(path, "up", "-n", "2", "--oversubscribe", "--name", "base", "--json")
    assert started.returncode == 0, started.stderr
    assert [worker["device"] for worker in json.loads(started.stdout)["workers"]] == ["CPU-0", "CPU-1"]
    yield path
    ended = openclaw(path, "down")
    assert re.fullmatch(r"Cluster base stopped: \d+ processes ended, none is left\.\n", ended.stdout)
    assert openclaw(path, "list", "--json").stdout.strip() == "[]"


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENCLAW_RUNTIME_DIR": str(folder / "runtime")}


def openclaw(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=2 * HANG_SECONDS,
    )


def run(folder: Path, name: str, source: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / name).write_text(source)
    return openclaw(folder, "run", "--attach", "base", name, *words)


def numbers(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"\d+\.\d+", text)]


def test_an_unedited_script_gives_its_own_numbers_and_exit_code(folder: Path) -> None:
    plain = subprocess.run(
        [sys.executable, "train.py", "--epochs", "2"],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert plain.returncode == 3, plain.stderr
    words = ("--strategy", "data_parallel", "--verify", "2", "--", "--epochs", "2")
    ours = openclaw(folder, "run", "--attach", "base", "train.py", *words)
    assert ours.returncode == 3, ours.stderr
    shown = [line for line in ours.stdout.splitlines() if not line.startswith("[")]
    assert [line.split()[0] for line in shown] == ["epoch", "epoch", "accuracy"]
    assert numbers("\n".join(shown)) == pytest.approx(numbers(plain.stdout), abs=2e-6)
    assert "PASSED: 2 steps of data_parallel on 2 workers" in ours.stderr


def test_what_was_measured_is_for_programs_too(folder: Path) -> None:
    ours = openclaw(folder, "run", "--attach", "base", "train.py", "-s", "data_parallel", "--json")
    told = json.loads(ours.stdout)
    (training,) = told.pop("trainings")
    line = SCRIPT.split("\n").index("    for epoch in range(args.epochs):") + 1
    assert (told["exit_code"], told["workers"], training["line"], training["steps"]) == (3, 2, line, 6)


def test_an_error_is_told_at_the_scripts_own_line(folder: Path) -> None:
    ours = run(folder, "raises.py", BODY.format(then="raise KeyError('planted')"), "-s", "data_parallel")
    assert ours.returncode == 1
    assert re.search(r"raises\.py.*line 9|raises\.py:9", ours.stderr)
    assert "KeyError: 'planted'" in ours.stderr


@pytest.mark.parametrize(
    ("then", "code"), [("sys.exit(5)", 5), ("sys.exit('too bad')", 1), ("sys.exit()", 0)]
)
def test_it_ends_with_the_code_of_the_script(folder: Path, then: str, code: int) -> None:
    ours = run(folder, "exits.py", BODY.format(then=then), "-s", "data_parallel")
    assert ours.returncode == code
    assert ("too bad" in ours.stderr) == ("too bad" in then)


@pytest.mark.parametrize(
    ("name", "source", "words", "told"),
    [
        ("plain.py", "print(1)\n", ["-s", "data_parallel"], "plain.py has no training loop"),
        ("wrong.py", "x = (\n", ["-s", "data_parallel"], "wrong.py, line 1: '(' was never closed"),
        (
            "train.py",
            SCRIPT,
            ["-s", "data_parallel", "-n", "3"],
            "--workers is decided when a cluster starts",
        ),
        ("wrong.ipynb", "{}", ["-s", "data_parallel"], "wrong.ipynb is no notebook"),
    ],
)
def test_what_cannot_be_run_is_told_and_nothing_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    source: str,
    words: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(source)
    assert cli.main(["run", "--attach", "base", name, *words]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert told in found.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "train.py trains, and no strategy is named or configured"),
        (["-s", "data_paralel"], "Did you mean 'data_parallel'"),
    ],
)
def test_a_strategy_that_is_not_there_is_told(folder: Path, words: list[str], told: str) -> None:
    ours = run(folder, "train.py", SCRIPT, *words)
    assert (ours.returncode, ours.stdout) == (2, "")
    assert told in ours.stderr
    assert "Traceback" not in ours.stderr


def test_a_file_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--attach", "base", "none.py", "-s", "data_parallel"]) == 2
    assert "none.py does not exist" in capsys.readouterr().err


def test_ctrl_c_ends_the_script_and_leaves_the_cluster(folder: Path) -> None:
    (folder / "long.py").write_text(BODY.format(then="print('begun', flush=True); time.sleep(600)"))
    process = subprocess.Popen(
        [*COMMAND, "run", "--attach", "base", "long.py", "-s", "data_parallel"],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while "begun" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130
    assert run(folder, "after.py", "print('goes on')\n", "-s", "none").stdout == "[ranks 0-1]\ngoes on\n"


def test_a_worker_that_is_killed_is_told_and_the_cluster_is_whole_afterwards(folder: Path) -> None:
    then = "os.kill(os.getpid(), 9) if os.environ['OPENCLAW_DEVICE'] == 'CPU-1' else None"
    ours = run(folder, "dies.py", BODY.format(then=then), "-s", "data_parallel")
    assert ours.returncode == 1
    assert "worker-1" in ours.stderr
    assert "Traceback (most recent" not in ours.stderr
    assert run(folder, "after.py", "print('goes on')\n", "-s", "none").stdout.endswith(
        "[ranks 0-1]\ngoes on\n"
    )


SLOW_RANK = "time.sleep(0.3) if os.environ['OPENCLAW_DEVICE'] == 'CPU-1' else None"


def test_a_profile_names_the_slow_worker_and_what_to_change(folder: Path) -> None:
    (folder / "slow.py").write_text(BODY.format(then=SLOW_RANK).replace("if number == 3", "if number > 2"))
    words = ("profile", "--attach", "base", "slow.py", "-s", "data_parallel")
    ours = openclaw(folder, *words, "--json")
    assert ours.returncode == 0, ours.stderr
    (training,) = json.loads(ours.stdout)["trainings"]
    fast, slow = training["workers"]
    assert (training["steps"], training["samples"]) == (16, 64)
    assert (slow["id"], slow["device"], slow["samples"]) == ("worker-1", "CPU-1", 32)
    assert slow["load"] > 1.5 > 0.5 > fast["load"]
    assert training["skew"] == slow["load"]
    assert sum(fast["split"].values()) == pytest.approx(1.0)
    assert fast["split"]["wait"] > 0.5
    (advice, *_) = training["advice"]
    assert (advice["cause"], advice["key"]) == ("straggler", "balance_load")


def test_a_benchmark_measures_every_setting_on_every_number_of_workers(folder: Path) -> None:
    (folder / "quick.py").write_text(BODY.format(then="time.sleep(0.05)"))
    words = ("-n", "1,2", "-s", "data_parallel", "-s", "model_parallel", "--json", "-o", "report.html")
    ours = openclaw(folder, "benchmark", "--attach", "base", "quick.py", *words)
    assert ours.returncode == 1, ours.stderr  # one module cannot be on two workers
    found = {(each["setting"], each["workers"]): each for each in json.loads(ours.stdout)["results"]}
    measured = [("single device", 1), ("data_parallel", 1), ("data_parallel", 2)]
    assert list(found) == [*measured, ("model_parallel", 1), ("model_parallel", 2)]
    plain = found["single device", 1]
    assert (plain["speedup"], plain["efficiency"]) == (1.0, 1.0)
    for key in measured:
        each = found[key]
        assert (each["steps"], each["samples"], each["error"]) == (16, 64, "")
        assert each["speedup"] == pytest.approx(plain["seconds"] / each["seconds"])
        assert each["efficiency"] == pytest.approx(each["speedup"] / each["workers"])
        assert each["p50_ms"] < 50 <= 1000 * each["seconds"]
        assert each["p50_ms"] < each["p99_ms"]
    assert "it is one module" in found["model_parallel", 2]["error"]
    assert "<meter" in (folder / "report.html").read_text()


def test_a_benchmark_of_a_script_that_fails_says_so(folder: Path) -> None:
    (folder / "fails.py").write_text(BODY.format(then="sys.exit(3) if 'exit' in sys.argv else planted"))
    words = ("benchmark", "--attach", "base", "fails.py", "-s", "data_parallel", "-n", "2")
    ours = openclaw(folder, *words)
    assert (ours.returncode, ours.stdout.count("NameError: name 'planted'")) == (1, 2), ours.stdout
    ours = openclaw(folder, *words, "--", "exit")
    assert (ours.returncode, ours.stdout.count("The program ended with 3.")) == (1, 2), ours.stdout
