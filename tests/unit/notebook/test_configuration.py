"""``%openclaw init`` and ``%openclaw config``, in a shell without a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import openclaw_nb
from openclaw_nb.core.errors import ConfigurationError, NotStartedError, UsageError


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    monkeypatch.chdir(tmp_path)
    shell = InteractiveShell()
    openclaw_nb.load_ipython_extension(shell)
    yield shell
    openclaw_nb.unload_ipython_extension(shell)


def say(shell: InteractiveShell, line: str) -> Any:
    return shell.run_line_magic("openclaw", line)


def test_a_file_is_written_and_looked_at(shell: InteractiveShell) -> None:
    assert say(shell, "init mine.yaml") == (
        "Written: mine.yaml. %openclaw start --config mine.yaml starts a cluster with it."
    )
    with pytest.raises(UsageError, match=r"mine\.yaml is there already"):
        say(shell, "init mine.yaml")
    assert "Written" in say(shell, "init mine.yaml --force")
    table = say(shell, "config mine.yaml")
    assert {each.key: each.value for each in table}["parallel.timeout"] == 30.0
    assert "No cluster runs from this configuration" in repr(table)


def test_a_wrong_file_starts_nothing(shell: InteractiveShell) -> None:
    Path("wrong.yaml").write_text("parallel: {workers: none}")
    for line in ("config wrong.yaml", "start --config wrong.yaml"):
        with pytest.raises(
            ConfigurationError, match=r"^wrong\.yaml, line 1, parallel\.workers: 'none' is not a whole"
        ):
            say(shell, line)


def test_variables_show_without_a_file(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Nothing is configured" in repr(say(shell, "config"))
    monkeypatch.setenv("OPENCLAW_TIMEOUT", "5")
    (timeout,) = say(shell, "config")
    assert (timeout.key, timeout.value, timeout.where) == ("parallel.timeout", 5.0, "OPENCLAW_TIMEOUT")
    with pytest.raises(NotStartedError, match="No cluster is running whose configuration took effect"):
        say(shell, "config --effective")
