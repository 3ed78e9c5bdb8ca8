"""A directory of checkpoints, written by one process: each appears as a whole or not at all.

    files under .writing-<whose>-step-…/, each synced ──> that folder synced ──> renamed to step-… ──> directory synced
    older ones than the newest K: renamed to .removing-…, then deleted
    .lock  held by the process that writes here; whatever a killed one has left is removed when the next begins

A process that is killed at any moment leaves whole checkpoints and temporary folders. Knows files; does not know what
is in them, nor when they are written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from openclaw_nb.core.errors import CheckpointError
from openclaw_nb.engine.checkpoint import manifest, owner
from openclaw_nb.engine.checkpoint.catalog import listed, name_of
from openclaw_nb.engine.checkpoint.manifest import FileRecord

Data = bytes | memoryview

_CHUNK_BYTES = 1 << 22
_LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems without them
_held: set[tuple[int, int]] = set()  # locks are the process's: a second one in it would be let in


class Store:
    """Writes checkpoints into a directory; keeps others out from `open` or a write on until `close`.

    Parameters
    ----------
    directory : Path
        Made when it is not there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock: int | None = None
        self._lock_id = (0, 0)

    def open(self) -> None:
        """Make the directory, keep other writers out, and remove what killed ones have left.

        Raises
        ------
        CheckpointError
            When nothing can be written there, or another process does.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise CheckpointError(
                f"{self.directory} cannot be a directory of checkpoints, as a file has that name or part of it. Give "
                "a directory; it is made when it is not there."
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"The directory of checkpoints {self.directory} cannot be made ({error.strerror}). Give one that can "
                "be written to."
            ) from None
        with contextlib.suppress(OSError):  # a folder that may not be read cannot be synced either
            _sync_directory(self.directory.parent)
        self._take_lock()
        self._sweep()

    def close(self) -> None:
        """Let other writers in."""
        if self._lock is not None:
            _held.discard(self._lock_id)
            os.close(self._lock)
            self._lock, self._lock_id = None, (0, 0)

    def write(self, step: int, files: Mapping[str, Iterable[Data]], about: dict[str, Any]) -> Path:
        """Write a checkpoint and return its folder.

        Parameters
        ----------
        step : int
            After how many steps it is; one of the same step is replaced.
        files : mapping of str to iterable of bytes
            What each file holds, in pieces.
        about : dict
            What the manifest tells beside.

        Raises
        ------
        OSError
            When it cannot be written; nothing is left of it then.
        CheckpointError
            When another process has begun to write to the directory since.
        """
        self._renew_lock()
        name = name_of(step)
        folder = self.directory / owner.temporary_name("writing", name)
        folder.mkdir()
        try:
            records = {name: _write(folder / name, pieces) for name, pieces in files.items()}
            _write(folder / manifest.MANIFEST, [manifest.dump({"step": step, **about}, records)])
            _sync_directory(folder)
            target = self.directory / name
            if target.exists():
                self._remove(target)
            folder.rename(target)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        _sync_directory(self.directory)
        return target

    def prune(self, keep: int) -> None:
        """Remove what is older than the ``keep`` newest whole checkpoints; nothing, while there are fewer.

        Raises
        ------
        OSError
            When something cannot be removed.
        """
        num_whole = 0
        for _, folder in listed(self.directory):
            if num_whole >= keep:
                self._remove(folder)
            num_whole += _is_whole(folder)

    def _remove(self, folder: Path) -> None:
        """Remove a checkpoint: renamed first, as half of one must not be left under its name."""
        doomed = folder.with_name(owner.temporary_name("removing", folder.name))
        folder.rename(doomed)
        shutil.rmtree(doomed)

    def _sweep(self) -> None:
        for path in self.directory.iterdir():
            if owner.is_left_over(path.name):
                shutil.rmtree(path, ignore_errors=True)

    # -------------------------------------------------------------------------------------- one writer

    def _take_lock(self) -> None:
        path = self.directory / _LOCK
        with contextlib.suppress(OSError):
            found = path.stat()
            if (found.st_dev, found.st_ino) in _held:
                raise self._taken(f"pid {os.getpid()}")
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CheckpointError(
                f"The directory of checkpoints {self.directory} cannot be written to ({error.strerror}). Give another."
            ) from None
        try:
            # Not flock, whose locks are shared by forked children: a loader's would outlive a killed worker.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                holder = os.read(lock, 100).decode(errors="replace").strip()
                os.close(lock)
                raise self._taken(holder) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"pid {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        found = os.fstat(lock)
        self._lock, self._lock_id = lock, (found.st_dev, found.st_ino)
        _held.add(self._lock_id)

    def _taken(self, holder: str) -> CheckpointError:
        return CheckpointError(
            f"Checkpoints are being written to {self.directory} by another process ({holder or 'unknown'}). Give "
            "another directory, or wait for its end."
        )

    def _renew_lock(self) -> None:
        """Lock again after `close`, and when the directory has been made anew since."""
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(self.directory / _LOCK)
            if (found.st_dev, found.st_ino) == self._lock_id:
                return
        if self.directory.is_dir():  # else the caller's mkdir says that it is gone
            self.close()
            self._take_lock()


def _is_whole(folder: Path) -> bool:
    try:
        manifest.check_sizes(folder, manifest.read(folder))
    except CheckpointError:
        return False
    return True


def _write(path: Path, pieces: Iterable[Data]) -> FileRecord:
    """Write a new file, synced to the disk, and return its record."""
    digest, size = hashlib.sha256(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for chunk in _chunks(pieces):
            digest.update(chunk)
            size += len(chunk)
            left = chunk
            while left:
                left = left[os.write(file, left) :]
        os.fsync(file)
    finally:
        os.close(file)
    return FileRecord(size, digest.hexdigest())


def _chunks(pieces: Iterable[Data]) -> Iterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for start in range(0, len(view), _CHUNK_BYTES):
            yield view[start : start + _CHUNK_BYTES]


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that do not have it
            raise
    finally:
        os.close(directory)
