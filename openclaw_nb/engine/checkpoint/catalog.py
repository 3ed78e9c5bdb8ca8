"""Which checkpoints are in a directory, and the newest valid one; those that are not valid are named with the reason.

Reads only. Knows names and manifests; does not know what a checkpoint is for.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_nb.core.errors import CheckpointError
from openclaw_nb.engine.checkpoint import manifest

TENSORS = "tensors.safetensors"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A valid checkpoint.

    Attributes
    ----------
    path : Path
        Its folder.
    about : dict
        Its manifest.
    skipped : tuple of str
        Newer ones that are not valid, one line each: the name and the reason.
    """

    path: Path
    about: dict[str, Any]
    skipped: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """After how many steps it was taken."""
        return int(self.about["step"])

    def state(self) -> dict[str, Any]:
        """Return everything but the tensors, as `checkpoint.state` has written it."""
        content: dict[str, Any] = json.loads((self.path / STATE).read_bytes())
        return content


def name_of(step: int) -> str:
    """Return the name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def listed(directory: Path) -> list[tuple[int, Path]]:
    """Return what is named like a checkpoint, the newest first; nothing when there is no such directory."""
    try:
        entries = list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    named = [(int(found[1]), path) for path in entries if (found := _NAME.fullmatch(path.name))]
    return sorted(named, reverse=True)


def find_newest(directory: str | Path) -> Checkpoint | None:
    """Return the newest valid checkpoint of a directory, every byte checked; None when there is none.

    Raises
    ------
    CheckpointError
        When there are checkpoints and none is valid: each is named with the reason.
    """
    skipped: list[str] = []
    for step, folder in listed(Path(directory)):
        try:
            about = manifest.read(folder)
            if about["step"] != step:
                raise CheckpointError(f"its manifest is one of step {about['step']}")
            manifest.check_files(folder, about)
        except CheckpointError as error:
            skipped.append(f"{folder.name}: {error}")
            continue
        return Checkpoint(folder, about, tuple(skipped))
    if skipped:
        raise CheckpointError(f"No checkpoint in {directory} is valid. {'. '.join(skipped)}.")
    return None
