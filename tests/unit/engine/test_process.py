"""The worker's process reads where its controller is."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from openclaw_nb.engine.process import WorkerApp

CONNECTION = {
    "location": "",
    "interface": "tcp://127.0.0.1",
    "registration": 5555,
    "key": "a key",
    "signature_scheme": "hmac-sha256",
    "pack": "json",
    "unpack": "json",
}


def test_a_connection_file_that_is_not_filled_yet_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "ipcontroller-engine.json"
    file.touch()
    app = WorkerApp(url_file=str(file), wait_for_url_file=30)
    threading.Timer(0.3, lambda: file.write_text(json.dumps(CONNECTION))).start()
    app.load_connection_file()
    assert app.registration_url == "tcp://127.0.0.1:5555"
    assert app.config.Session.key == b"a key"


def test_a_connection_file_that_stays_empty_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "ipcontroller-engine.json"
    file.touch()
    with pytest.raises(json.JSONDecodeError):
        WorkerApp(url_file=str(file), wait_for_url_file=0.2).load_connection_file()
