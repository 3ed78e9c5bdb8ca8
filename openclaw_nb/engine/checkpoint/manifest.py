"""What a checkpoint's folder must hold to be valid: the manifest, and each file by size and SHA-256.

    step-00000120/   manifest.json       format, step, world size, the models' description, the files; its own digest
                     tensors.safetensors
                     state.json

Knows files and digests; does not know what the tensors and the state are.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_nb.core.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """A file as it must be found again."""

    size_bytes: int
    sha256: str


def dump(about: dict[str, Any], files: dict[str, FileRecord]) -> bytes:
    """Return the manifest's text: what is told ``about`` the checkpoint, its files, and the digest of all that."""
    content = {"format": FORMAT, **about, "files": {name: vars(record) for name, record in files.items()}}
    return json.dumps({**content, "sha256": _digest(content)}, indent=1).encode()


def read(folder: Path) -> dict[str, Any]:
    """Return a folder's manifest.

    Raises
    ------
    CheckpointError
        When it is missing, damaged or of another format.
    """
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from None
    if not isinstance(content, dict) or "sha256" not in content:
        raise CheckpointError(f"{MANIFEST} is not one of a checkpoint")
    if content.pop("sha256") != _digest(content):
        raise CheckpointError(f"{MANIFEST} is damaged: its SHA-256 is another")
    if content["format"] != FORMAT:
        raise CheckpointError(f"it has format {content['format']}, and this version reads {FORMAT}")
    return content


def check_sizes(folder: Path, manifest: dict[str, Any]) -> None:
    """Check that all files are there with their sizes, which is quick.

    Raises
    ------
    CheckpointError
        Naming the first file that is not.
    """
    for name, record in manifest["files"].items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{name} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error}") from None
        if size != record["size_bytes"]:
            raise CheckpointError(f"{name} has {size} bytes, not {record['size_bytes']}")


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Check all files, every byte.

    Raises
    ------
    CheckpointError
        Naming the first file that is damaged.
    """
    check_sizes(folder, manifest)
    for name, record in manifest["files"].items():
        try:
            found = _digest_of_file(folder / name)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error}") from None
        if found != record["sha256"]:
            raise CheckpointError(f"{name} is damaged: its SHA-256 is another")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _digest_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
