"""`openclaw benchmark` and `profile`: what is refused before anything starts, and reports on disk."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from openclaw_nb import cli
from openclaw_nb.cli import _report
from openclaw_nb.core.errors import UsageError
from openclaw_nb.plan.speed import PLAIN, Result

TRAINS = """\
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.ones(4, 2):
    model(x).mean().backward()
    optimizer.step()
"""
RESULTS = [
    Result(
        setting=PLAIN,
        workers=1,
        samples_per_second=1000.0,
        p50_ms=1.0,
        p99_ms=3.0,
        speedup=1.0,
        efficiency=1.0,
    ),
    Result(
        setting="a <b>",
        workers=2,
        samples_per_second=1500.0,
        p50_ms=2.0,
        p99_ms=4.0,
        speedup=1.5,
        efficiency=0.75,
    ),
    Result(setting="broken", workers=2, error="it was <refused>"),
]
REPORT = _report.Report(program="train.py", results=RESULTS, repeat=3, place={"torch": "2.13.0"})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENCLAW_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("OPENCLAW_OVERSUBSCRIBE", raising=False)
    Path("train.py").write_text(TRAINS)
    Path("plain.py").write_text("print(1)\n")
    Path("wrong.py").write_text("x = (\n")
    Path("other.json").write_text('{"format": "something else"}')
    Path("damaged.json").write_text('{"format": "openclaw-benchmark-1", "results": 3}')
    return tmp_path


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "Give a script or a notebook to measure"),
        (["none.py"], "none.py does not exist"),
        (["wrong.py"], "wrong.py, line 1: '(' was never closed"),
        (["plain.py"], "plain.py has no training loop"),
        (["train.py"], "No strategy is named or configured"),
        (["train.py", "-s", "data_paralel"], "data_paralel"),
        (["train.py", "-s", "none"], "is measured anyway"),
        (["train.py", "-s", "data_parallel --verify 3"], "--verify changes what is run"),
        (["train.py", "-s", "data_parallel", "-s", "data_parallel"], "stands there twice"),
        (["train.py", "-s", "data_parallel", "-n", "1,x"], "-n 1,x: give numbers of workers"),
        (["train.py", "-s", "data_parallel", "-n", "0"], "-n 0: give numbers of workers"),
        (["train.py", "-s", "data_parallel", "-n", "1,9999"], "9999 workers were asked for"),
        (["train.py", "-s", '"data_par'], "No closing quotation"),
        (["train.py", "-s", "data_parallel", "--repeat", "0"], "--repeat 0: give a number from 1 to 100"),
        (["train.py", "-s", "data_parallel", "-o", "report.txt"], "written as .json or .html"),
        (["train.py", "-s", "data_parallel", "-o", "nowhere/report.json"], "there is no folder nowhere"),
        (["--compare", "none.json", "other.json"], "none.json cannot be read"),
        (["--compare", "other.json", "other.json"], "other.json is no report"),
        (["--compare", "damaged.json", "damaged.json"], "damaged.json is a damaged report"),
        (["train.py", "--compare", "other.json", "other.json"], "leave the script out"),
    ],
)
def test_what_cannot_be_measured_is_told(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["benchmark", *words]) == 2
    shown = capsys.readouterr()
    assert (told in shown.err, shown.out) == (True, "")


def test_only_what_runs_under_a_strategy_is_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "train.py", "-s", "none"]) == 2
    assert "Only what runs under a strategy is measured" in capsys.readouterr().err


def test_a_report_is_read_as_it_was_written() -> None:
    _report.write(REPORT, _report.check_writable("report.json"))
    assert _report.read("report.json") == REPORT


def test_a_report_that_cannot_be_written_is_told() -> None:
    Path("taken.json").mkdir()
    with pytest.raises(UsageError, match=r"taken\.json cannot be written: Is a directory"):
        _report.write(REPORT, Path("taken.json"))


def test_the_page_shows_the_same_and_is_well_formed() -> None:
    _report.write(REPORT, _report.check_writable("report.html"))
    seen: list[str] = []
    meters: list[str | None] = []

    class Reader(HTMLParser):
        def handle_data(self, data: str) -> None:
            seen.append(data)

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag != "refused"
            if tag == "meter":
                meters.append(dict(attrs)["value"])

    Reader().feed(Path("report.html").read_text())
    assert {"a <b>", "1,500", "75%", "broken on 2 workers: it was <refused>"} <= set(seen)
    assert meters == ["1.000", "0.750"]


def test_two_reports_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    faster = [Result(setting="a <b>", workers=2, samples_per_second=3000.0, p50_ms=1.0, p99_ms=1.0)]
    after = _report.Report(program="train.py", results=faster, place={"torch": "2.14.0"})
    _report.write(REPORT, Path("old.json"))
    _report.write(after, Path("new.json"))
    assert cli.main(["benchmark", "--compare", "old.json", "new.json", "--json"]) == 0
    changes = {(each["setting"], each["workers"]): each for each in json.loads(capsys.readouterr().out)}
    changed = changes["a <b>", 2]
    assert (changed["rate"], changed["p50"], changed["p99"]) == (2.0, 0.5, 0.25)
    assert changes[PLAIN, 1]["rate"] is None
    assert cli.main(["benchmark", "--compare", "old.json", "new.json"]) == 0
    assert "torch is not the same: 2.13.0 before, 2.14.0 after" in capsys.readouterr().out
