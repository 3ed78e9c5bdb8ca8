"""A real Prometheus reads the endpoint of a cluster that trains, and knows what each panel of the dashboard asks."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from openclaw_nb.metrics.publish import Metrics
from openclaw_nb.metrics.setup import dashboard, scrape_config
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.protocol.messages import StrategySpec

from .conftest import HANG_SECONDS, Lab
from .test_data_parallel import SETUP

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="Prometheus is not there (Debian: apt install --no-install-recommends prometheus)",
    ),
]

FOREVER = """
import time
while True:
    for x, y in loader:
        time.sleep(0.02)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
"""


@pytest.fixture(scope="module")
def served(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metrics]:
    """The endpoint of a cluster that trains on two workers for as long as the tests take."""
    patch = pytest.MonkeyPatch()
    patch.setenv("OPENCLAW_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
    monitor = Monitor()
    forget = lab.master.listen(monitor.take)
    served = Metrics(lambda: lab.master, monitor)
    served.serve(port=0)
    lab.good(SETUP, targets=[0, 1])
    run = lab.master.run_cell(FOREVER, targets=[0, 1], strategy=StrategySpec(name="data_parallel"))
    wait_until(lambda: monitor.latest() is not None)
    yield served
    run.interrupt()
    assert run.wait(HANG_SECONDS) is not None
    served.stop()
    forget()
    patch.undo()


@pytest.fixture(scope="module")
def prometheus(served: Metrics, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that reads that endpoint five times a second."""
    directory = tmp_path_factory.mktemp("prometheus")
    assert served.published is not None
    config = scrape_config([served.published]).replace("scrape_interval: 5s", "scrape_interval: 200ms")
    (directory / "prometheus.yml").write_text(config)
    subprocess.run(["promtool", "check", "config", directory / "prometheus.yml"], check=True, timeout=60)
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                "--web.listen-address=127.0.0.1:0",
                "--log.format=json",
            ],
            stdout=output,
            stderr=output,
        )
    try:
        address = f"http://{_address(process, log)}"
        wait_until(lambda: bool(ask(address, "up == 1")))
        yield address
    finally:
        process.terminate()
        process.wait(HANG_SECONDS)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return where it listens, which it says in its log."""
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            if '"address":"127.0.0.1:' in line and "Listening on" in line:
                return str(json.loads(line)["address"])
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ask(prometheus: str, query: str) -> list[dict[str, Any]]:
    """Return what is known; nothing while it does not answer yet: it listens before it is ready."""
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=HANG_SECONDS) as answer:
            found: list[dict[str, Any]] = json.loads(answer.read())["data"]["result"]
            return found
    except urllib.error.HTTPError as error:
        with error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                return []
            raise AssertionError(f"{query}: {error.read().decode()}") from None


def queries() -> dict[str, str]:
    """Return what the panels ask, by title, with Grafana's variables as it would put them in."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        .replace("$__rate_interval", "2s")
        .replace("$instance", ".*")
        for panel in json.loads(dashboard())["panels"]
        for target in panel["targets"]
    }


def test_its_own_checker_finds_nothing_to_say(served: Metrics) -> None:
    assert served.published is not None
    with urllib.request.urlopen(served.published.url, timeout=HANG_SECONDS) as answer:
        text = answer.read()
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, timeout=HANG_SECONDS
    )
    assert (done.returncode, done.stdout.decode(), done.stderr.decode()) == (0, "", "")
    assert b"openclaw_worker_steps_total" in text


def test_every_panel_has_data_on_cores(prometheus: str) -> None:
    for query in queries().values():
        wait_until(partial(_has_data, prometheus, query))


def _has_data(prometheus: str, query: str) -> bool:
    found = [float(each["value"][1]) for each in ask(prometheus, query)]
    return bool(found) and all(value == value for value in found)  # NaN is no data


def test_what_it_knows_is_what_happens(prometheus: str, lab: Lab) -> None:
    (up,) = ask(prometheus, "up")
    assert up["value"][1] == "1"
    by_worker = {
        each["metric"]["worker"]: each for each in ask(prometheus, "openclaw_device_memory_used_bytes")
    }
    assert sorted(by_worker) == sorted(worker.id for worker in lab.master.workers)
    states = {e["metric"]["state"]: e["value"][1] for e in ask(prometheus, "openclaw_workers")}
    assert states == {"idle": "2", "busy": "2", "spare": "0", "dead": "0"}
    (a_step,) = ask(prometheus, "sum(openclaw_worker_samples_total) / max(openclaw_worker_steps_total)")
    assert 10 < float(a_step["value"][1]) <= 32, "a batch of 32, or of the 22 that are left, a step"
