from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openclaw_nb import __version__, cli
from openclaw_nb.cluster.files import ClusterFiles
from openclaw_nb.core.host import usable_cores


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENCLAW_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"openclaw-nb {__version__}"


def test_devices_for_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list-devices", "--json"]) == 0
    devices = json.loads(capsys.readouterr().out)
    assert [d["id"] for d in devices if d["kind"] == "cpu"] == [f"CPU-{i}" for i in range(usable_cores())]


def test_devices_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list-devices"]) == 0
    assert "CPU-0" in capsys.readouterr().out


def test_no_cluster(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out == "No cluster runs on this host.\n"


def test_clusters(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ClusterFiles.create("0" * 32, "mine")
    assert cli.main(["list", "--json"]) == 0
    (note,) = json.loads(capsys.readouterr().out)
    assert (note["name"], note["alive"]) == ("mine", True)


@pytest.mark.parametrize("arguments", [["lst"], ["list", "--jsn"]])
def test_what_is_not_understood(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: openclaw" in capsys.readouterr().err


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "list-devices" in capsys.readouterr().err


def test_a_configuration_is_written_checked_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    assert cli.main(["init"]) == 2
    assert "openclaw_config.yaml is there already" in capsys.readouterr().err
    assert cli.main(["config"]) == 0
    assert "parallel.timeout" in capsys.readouterr().out
    assert cli.main(["config", "--json", "openclaw_config.yaml"]) == 0
    effects = {each["key"]: each for each in json.loads(capsys.readouterr().out)}
    assert effects["parallel.timeout"]["value"] == 30.0
    Path("wrong.yaml").write_text("parallel: {wrokers: 2}")
    assert cli.main(["config", "wrong.yaml"]) == 2
    assert "wrong.yaml, line 1, parallel.wrokers: there is no such key" in capsys.readouterr().err
    assert cli.main(["config", "--effective"]) == 2


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("openclaw do", {"down", "doctor"}),
        ("openclaw run train.py --strat", {"--strategy "}),
        ("openclaw run train.py --precision b", {"bf16 "}),
    ],
)
def test_tab_completes(line: str, expected: set[str], tmp_path: Path) -> None:
    found = tmp_path / "found"
    # What the shell's function sets, as argcomplete's documentation has it.
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(found),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    command = [sys.executable, "-c", "from openclaw_nb.cli import main; main()"]
    subprocess.run(command, env={**os.environ, **asked}, check=True, timeout=60)
    assert set(found.read_text().split("\n")) == expected


def test_bash_takes_what_completion_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    script = f"{capsys.readouterr().out}\ncomplete -p openclaw openclaw-cli"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["openclaw", "openclaw-cli"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_told_something_of_their_own(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    assert "openclaw-cli" in capsys.readouterr().out


def test_only_a_command_that_runs_a_program_takes_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["list", "--", "--epochs", "3"])
    assert ended.value.code == 2
    assert "nothing can stand behind two dashes" in capsys.readouterr().err
