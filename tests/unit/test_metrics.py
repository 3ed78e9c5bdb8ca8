"""Where metrics are served and found again, and what Prometheus and Grafana are told."""

from __future__ import annotations

import json
import os
import re
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from openclaw_nb import cli
from openclaw_nb.core.errors import UsageError
from openclaw_nb.metrics.publish import Metrics, Published, find_published
from openclaw_nb.metrics.setup import dashboard, scrape_config
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.notebook import options
from openclaw_nb.notebook.metrics import metrics


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Metrics]:
    monkeypatch.setenv("OPENCLAW_RUNTIME_DIR", str(tmp_path / "runtime"))
    served = Metrics(lambda: None, Monitor())
    yield served
    served.stop()


def openclaw(served: Metrics, line: str) -> Any:
    return metrics(served, options.VERBS["metrics"].parse(line.split()))


def test_the_verb_serves_tells_and_ends(served: Metrics, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["metrics", "--show"]) == 1
    assert (
        "No process of this user serves metrics. In a notebook: %openclaw metrics." in capsys.readouterr().err
    )
    published = openclaw(served, "--port 0")
    assert repr(published) == f"Metrics of process {os.getpid()}: http://127.0.0.1:{published.port}/metrics"
    assert openclaw(served, "") is published, "what is served goes on"
    assert cli.main(["metrics", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["url"], found["pid"], found["token_file"]) == (published.url, os.getpid(), "")
    assert cli.main(["metrics", "--show"]) == 0
    assert "openclaw_cluster_up 0" in capsys.readouterr().out.splitlines()
    assert openclaw(served, "--off") == "Metrics are served no more."
    assert openclaw(served, "--off") == "No metrics were served."
    assert find_published() == []


def test_beyond_loopback_a_token_is_needed_that_only_its_owner_can_read(
    served: Metrics, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = served.serve("0.0.0.0", 0)
    path = tmp_path / "runtime" / "metrics-token"
    assert published.token_file == str(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(published.token) >= 32
    assert published.token not in repr(published)
    assert cli.main(["metrics", "--show"]) == 0
    assert "openclaw_build_info" in capsys.readouterr().out
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(published.local_url)
    again = served.serve("0.0.0.0", 0)
    assert again.token == published.token, "Prometheus is told once"


def test_a_configuration_for_prometheus() -> None:
    endpoints = [
        Published(1, "127.0.0.1", 9464),
        Published(2, "10.0.0.1", 9464, "/home/a b/token"),
        Published(3, "127.0.0.1", 9465),
    ]
    plain, guarded = yaml.safe_load(scrape_config(endpoints))["scrape_configs"]
    assert plain["static_configs"] == [{"targets": ["127.0.0.1:9464", "127.0.0.1:9465"]}]
    assert guarded["authorization"] == {"credentials_file": "/home/a b/token"}


def test_a_note_of_a_process_that_is_gone_is_not_believed(served: Metrics, tmp_path: Path) -> None:
    served.serve(port=0)
    (note,) = (tmp_path / "runtime").glob("metrics-*.json")
    told = json.loads(note.read_text())
    for number, wrong in enumerate(({"started": told["started"] - 100}, {"pid": 2**22 + 1}, {"more": 1})):
        (note.parent / f"metrics-{number}.json").write_text(json.dumps({**told, **wrong}))
    (note.parent / "metrics-x.json").write_text("[")
    assert [each.port for each in find_published()] == [told["port"]]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--port 70000", "'70000' is not a port: a whole number from 0 to 65535"),
        ("--host 192.0.2.1", "cannot be served at 192.0.2.1:9464: Cannot assign requested address"),
        ("--dashboard /nowhere/x.json", "cannot be written to /nowhere/x.json: No such file"),
        ("--prot 1", "Did you mean '--port'"),
    ],
)
def test_what_cannot_be(served: Metrics, line: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        openclaw(served, line)


def test_the_dashboard_is_a_file_for_grafana(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "board.json"
    assert cli.main(["metrics", "--dashboard", str(path)]) == 0
    assert path.read_text() == dashboard()
    assert cli.main(["metrics", "--dashboard", "-"]) == 0
    board = json.loads(dashboard())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) >= 15
    taken: set[tuple[int, int]] = set()
    for place in (SimpleNamespace(**panel["gridPos"]) for panel in board["panels"]):
        assert place.x + place.w <= 24
        cells = {(x, y) for x in range(place.x, place.x + place.w) for y in range(place.y, place.y + place.h)}
        assert not cells & taken, "panels overlap"
        taken |= cells
