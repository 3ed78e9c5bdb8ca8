"""The files of a cluster, where no process is needed to see what becomes of them."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from openclaw_nb.cluster.files import ClusterFiles
from openclaw_nb.core.errors import NotStartedError


def test_no_folder_is_made_after_the_files_were_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that comes too late may be handed variables while the cluster is stopped."""
    monkeypatch.setenv("OPENCLAW_RUNTIME_DIR", str(tmp_path))
    files = ClusterFiles.create(uuid.uuid4().hex, "lab")
    folders = [Path(folder) for folder in files.exchange()]
    assert all(folder.is_dir() for folder in folders)
    files.remove()
    with pytest.raises(NotStartedError, match="has ended"):
        files.exchange()
    assert not any(folder.exists() for folder in folders)
