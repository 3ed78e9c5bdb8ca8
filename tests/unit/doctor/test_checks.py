"""Each check on the real thing where it can be made here, and the report of all of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from openclaw_nb import cli
from openclaw_nb.config.load import load
from openclaw_nb.config.schema import KEYS
from openclaw_nb.core.errors import UsageError
from openclaw_nb.core.host import available_memory_bytes, usable_cores
from openclaw_nb.doctor import host
from openclaw_nb.doctor.consult import parse_reach, wanted_of
from openclaw_nb.doctor.findings import FAIL, OK, SKIP, WARN, Check, Finding, examine, failed, report
from openclaw_nb.doctor.host import Wanted, checks_of_host
from openclaw_nb.doctor.network import check_reach, checks_of_network


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENCLAW_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path


def found(name: str, wanted: Wanted | None = None) -> Finding:
    wanted = wanted or Wanted(workers=1)
    checks = dict([*checks_of_host(wanted), *checks_of_network(wanted, None)])
    first: Finding = next(iter(examine([(name, checks[name])])))
    assert not first.key or first.key in KEYS
    return first


def test_more_workers_than_cores_name_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = usable_cores()
    assert found("cores", Wanted(workers=cores + 1)).state == WARN, "these tests may oversubscribe"
    monkeypatch.delenv("OPENCLAW_OVERSUBSCRIBE")
    many = found("cores", Wanted(workers=cores + 1))
    assert (many.state, many.key) == (FAIL, "parallel.workers")
    assert f"Take at most parallel.workers: {cores}" in many.todo
    threads = found("cores", Wanted(workers=1, threads=cores + 1))
    assert (threads.state, threads.key) == (FAIL, "parallel.omp_threads")
    assert found("cores").state == OK


def test_too_little_memory_names_the_key() -> None:
    many = available_memory_bytes() // 2**30
    short = found("memory", Wanted(workers=many))
    assert (short.state, short.key) == (FAIL, "parallel.workers")
    assert found("memory").state == OK
    assert "beside the workers that run" in found("memory", Wanted(workers=many, runs=True)).seen


def test_a_directory_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("files").state == OK
    monkeypatch.setenv("OPENCLAW_RUNTIME_DIR", "/proc/openclaw")
    assert "OPENCLAW_RUNTIME_DIR" in found("files").todo


def test_a_port_that_is_taken_names_who_has_it() -> None:
    server = [sys.executable, "-c", "import socket,sys; s=socket.create_server(('127.0.0.1',0)); "]
    server[-1] += "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        taken = found("port", Wanted(port=port))
        assert (taken.state, taken.key) == (FAIL, "master.port")
        assert f"(pid {process.pid})" in taken.seen
        assert check_reach("127.0.0.1", port).state == OK
        process.communicate("")
    assert found("port", Wanted(port=port)).state == OK
    closed = check_reach("127.0.0.1", port)
    assert (closed.state, closed.key) == (FAIL, "master.port")
    assert "refuses connections: the port is closed" in closed.seen
    assert "master.host, master.port" in closed.todo


def test_a_host_that_does_not_answer_is_told_from_one_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full drops what comes, as a firewall does."""
    monkeypatch.setattr("openclaw_nb.doctor.network._SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        dropped = check_reach(*address)
        for each in waiting:
            each.close()
    assert "does not answer within 0.3 s" in dropped.seen
    assert "firewall" in dropped.todo


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    other = found("port", Wanted(host="192.0.2.77", port=0))
    assert (other.state, other.key) == (FAIL, "master.host")


def test_an_interface_that_does_not_exist() -> None:
    wrong = found("interface", Wanted(interface="eth77"))
    assert (wrong.state, wrong.key) == (FAIL, "network_interface")
    assert "lo (127.0.0.1)" in wrong.todo
    assert found("interface", Wanted(interface="lo")).state == OK
    assert found("loopback").state == OK


def test_what_torch_can_do_is_asked_of_the_workers_python(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = dict(checks_of_host(Wanted(communication="nccl")))
    told = {each.check: each for each in checks["torch"]()}
    assert told["torch"].state == told["gloo"].state == OK
    assert (told["nccl"].state, told["nccl"].key) in ((WARN, "parallel.communication"), (OK, ""))
    monkeypatch.setattr(host, "_ASK_TORCH", "raise ImportError('no torch')")
    (missing,) = checks["torch"]()
    assert (missing.state, missing.seen) == (FAIL, "torch cannot be imported: ImportError: no torch")


def test_mpi_is_needed_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:/nowhere")
    wanted = Wanted(backend="mpi")
    library = [each for each in dict(checks_of_host(wanted))["mpi"]() if each.check == "LD_LIBRARY_PATH"]
    assert all((each.state, each.seen) == (WARN, "not there: /nowhere") for each in library)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("openclaw_nb.cluster.mpiexec.sys.executable", "/nowhere/python")
    monkeypatch.setattr(host, "find_mpiexec", lambda: find_none())
    assert found("mpi", wanted).state == FAIL
    assert found("mpi").state == SKIP


def find_none() -> str:
    from openclaw_nb.cluster.mpiexec import find_mpiexec

    return find_mpiexec("/nowhere/python", "")


def test_a_check_that_goes_wrong_leaves_the_others() -> None:
    def wrong() -> list[Finding]:
        raise ZeroDivisionError("really")

    checks: list[tuple[str, Check]] = [("a", wrong), ("b", lambda: [Finding("b", FAIL, "no", "do it")])]
    first, second = examine(checks)
    assert (first.check, first.state, first.seen) == ("a", WARN, "ZeroDivisionError: really")
    assert failed([second])
    assert not failed([first])
    table = report([first, second], "it")
    assert table.title == "Checked it: 0 ok, 1 warn, 1 fail"
    assert "  b: do it" in table.notes
    assert list(table) == [first, second]


def test_a_configuration_says_what_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "master: {port: 1234}\nparallel: {workers: 3, omp_threads: 2, backend: mpi}\nnetwork_interface: lo"
    )
    wanted = wanted_of(load(path, {}))
    assert (wanted.workers, wanted.threads, wanted.backend, wanted.interface, wanted.port) == (
        3,
        2,
        "mpi",
        "lo",
        1234,
    )
    assert wanted_of(load(path, {}), workers=5).workers == 5


@pytest.mark.parametrize("text", ["host", ":1", "host:", "host:0", "host:70000", "host:x"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"such as 192\.168\.1\.100:50051"):
        parse_reach(text)


def test_the_command_ends_with_a_code_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{free.getsockname()[1]}"
        assert cli.main(["doctor", "--no-start", "--json", "--reach", closed, "-n", "1"]) == 1
    told = {each["check"]: each for each in json.loads(capsys.readouterr().out)}
    assert told["reach"]["state"] == FAIL
    assert {"cores", "memory", "shared memory", "torch", "mpi", "port", "interface", "open sockets"} <= set(
        told
    )
    assert cli.main(["doctor", "--reach", "nothing"]) == 2
    assert cli.main(["doctor", "-n", "0"]) == 2
    assert os.environ.get("OPENCLAW_RUNTIME_DIR")
