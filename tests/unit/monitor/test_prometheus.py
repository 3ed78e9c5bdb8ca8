"""What Prometheus is told: the values, and that its own checker takes the text."""

from __future__ import annotations

import math
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from openclaw_nb.core.errors import UsageError
from openclaw_nb.monitor.endpoint import Endpoint
from openclaw_nb.monitor.prometheus import (
    CONTENT_TYPE,
    STATES,
    ClusterFacts,
    Family,
    Snapshot,
    exposition,
    families,
)
from openclaw_nb.monitor.store import Monitor
from openclaw_nb.protocol.messages import Measured


@dataclass(frozen=True)
class Record:
    """A device record as the cluster has them."""

    id: str
    worker: str
    state: str = "idle"
    utilisation: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    temperature: float | None = None
    power: float | None = None
    seen: float = 1e9


def measured(worker: int, run_id: str, seq: int, samples: int, **more: float | None) -> Measured:
    seconds = {"data": 0.1, "compute": 0.5, "wait": 0.25, "transfer": 0.15}
    told = {"loss": 0.5, **more}
    return Measured(
        worker=worker,
        run_id=run_id,
        seq=seq,
        at=float(seq),
        steps=2,
        samples=samples,
        seconds=seconds,
        **told,
    )


def told(snapshot: Snapshot) -> dict[str, float]:
    lines = exposition(families(snapshot)).splitlines()
    return {
        name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))
    }


CLUSTER = ClusterFacts(
    name='a"b\\c\n', backend="local", communication="gloo", epoch=3, usable=True, computes=False
)


def test_counters_count_all_runs_also_those_that_are_no_longer_kept() -> None:
    monitor = Monitor(num_runs=2)
    for run in range(5):
        for seq in (1, 2):
            monitor.take(measured(0, f"run-{run}", seq, samples=10))
    monitor.take(measured(1, "run-4", 3, samples=7))  # its first two did not arrive
    found = told(Snapshot(version="1", totals=monitor.totals(), num_runs=monitor.num_begun))
    assert found["openclaw_runs_total"] == 5
    assert found['openclaw_worker_samples_total{worker="worker-0"}'] == 100
    assert found['openclaw_worker_steps_total{worker="worker-0"}'] == 20
    assert found['openclaw_worker_step_seconds_total{worker="worker-0",phase="wait"}'] == pytest.approx(2.5)
    assert found['openclaw_worker_lost_measurements_total{worker="worker-1"}'] == 2


def test_readings_are_in_base_units_and_those_that_do_not_exist_are_left_out() -> None:
    devices = [
        Record("GPU-0", "worker-0", "busy", 50.0, 2, 8, 61.0, 250.0),
        Record("CPU-0", "worker-1", "dead"),
    ]
    found = told(Snapshot(version="1", cluster=CLUSTER, devices=devices))
    gpu = '{worker="worker-0",device="GPU-0"}'
    assert found[f"openclaw_device_utilisation_ratio{gpu}"] == 0.5
    assert found[f"openclaw_device_memory_used_bytes{gpu}"] == 2
    assert found[f"openclaw_device_power_watts{gpu}"] == 250
    assert [name for name in found if "CPU-0" in name] == [
        'openclaw_worker_last_seen_timestamp_seconds{worker="worker-1",device="CPU-0"}'
    ]
    counts = {state: found[f'openclaw_workers{{state="{state}"}}'] for state in STATES}
    assert counts == {"idle": 0, "busy": 1, "spare": 0, "dead": 1}


def test_without_a_cluster_it_is_told_that_there_is_none() -> None:
    found = told(Snapshot(version="1"))
    assert found["openclaw_cluster_up"] == 0
    assert not any(name.startswith("openclaw_cluster_info") for name in found)


def test_a_loss_that_is_not_finite_is_told_as_such() -> None:
    monitor = Monitor()
    monitor.take(measured(0, "a", 1, 1, loss=math.nan))
    assert math.isnan(told(Snapshot(version="1", newest=monitor.latest()))["openclaw_run_loss"])
    values: list[tuple[dict[str, str], float]] = [({}, math.inf), ({}, -math.inf), ({}, True)]
    lines = exposition([Family("x", "gauge", "X.", values)]).splitlines()
    assert lines[2:] == ["x +Inf", "x -Inf", "x 1"]


def test_words_of_people_cannot_end_a_label() -> None:
    text = exposition(families(Snapshot(version="1", cluster=CLUSTER)))
    assert 'cluster="a\\"b\\\\c\\n"' in text


# ------------------------------------------------------------------------------------------------- by HTTP


@pytest.fixture
def guarded() -> Iterator[Endpoint]:
    endpoint = Endpoint(lambda: "x 1\n", token="secret")
    yield endpoint
    endpoint.close()


def ask(url: str, token: str = "") -> tuple[int, str, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status, answer.read().decode(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), ""


def test_only_who_has_the_token_may_read(guarded: Endpoint) -> None:
    assert ask(guarded.url, "secret") == (200, "x 1\n", CONTENT_TYPE)
    for token in ("", "secre", "sécret", "secretsecret"):
        status, text, _ = ask(guarded.url, token)
        assert (status, "x 1" in text) == (401, False)


def test_elsewhere_is_nothing(guarded: Endpoint) -> None:
    status, text, _ = ask(guarded.url.replace("/metrics", "/secrets"), "secret")
    assert status == 404
    assert "/metrics" in text


def test_an_error_is_told_and_the_next_one_is_served() -> None:
    answers = iter([ZeroDivisionError("broken"), "x 1\n"])

    def collect() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    endpoint = Endpoint(collect)
    assert ask(endpoint.url)[:2] == (500, "ZeroDivisionError: broken\n")
    assert ask(endpoint.url)[:2] == (200, "x 1\n")
    endpoint.close()


def test_clients_that_talk_nonsense_or_nothing_keep_nobody_waiting(
    guarded: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    address, before = (guarded.host, guarded.port), threading.active_count()
    silent = [socket.create_connection(address) for _ in range(5)]
    for garbage in (b"\x00\xff" * 100, b"GET", b"GET / HTTP/9.9\r\n\r\n", b"G" * 70_000 + b"\r\n\r\n"):
        with socket.create_connection(address) as client, client.makefile("rb") as answers:
            client.sendall(garbage)
            client.shutdown(socket.SHUT_WR)
            with_luck = answers.read(100)
            assert b"x 1" not in with_luck
    assert ask(guarded.url, "secret")[0] == 200
    for client in silent:
        client.close()
    assert threading.active_count() <= before + len(silent)
    assert capfd.readouterr().err == "", "nothing of it is shown in the notebook"


def test_a_port_that_is_taken(guarded: Endpoint) -> None:
    with pytest.raises(UsageError, match=f"cannot be served at 127.0.0.1:{guarded.port}: Address already in"):
        Endpoint(lambda: "", port=guarded.port)
    with pytest.raises(UsageError, match="Give another port"):
        Endpoint(lambda: "", host="192.0.2.1")
