"""What child processes and C code write to stdout and stderr, read so that nothing is missed at a cell's end.

ipykernel puts a pipe behind each of the two descriptors and reads it on a thread, which may still be busy when
the cell has ended. `PipeReader` takes the reading over: `drain` reads what is there now, on the calling thread.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import Any

_CHUNK_BYTES = 65_536


class PipeReader:
    """Reads one descriptor's pipe.

    Parameters
    ----------
    stream : ipykernel.iostream.OutStream
        The stream whose pipe is taken over.
    write : callable
        Takes the text.
    """

    def __init__(self, stream: Any, write: Callable[[str], object]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._pipe = stream._fid
        stream._should_watch = False
        os.write(
            stream._original_stdstream_fd, b"\n"
        )  # ipykernel's thread ends at the next thing that it reads
        stream.watch_fd_thread.join()
        os.set_blocking(self._pipe, False)
        threading.Thread(target=self._run, name="openclaw-pipe", daemon=True).start()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._pipe, select.POLLIN)
        while True:
            poller.poll()
            self.drain()

    def drain(self) -> None:
        """Pass on everything that has been written to the descriptor so far."""
        with self._lock:
            while data := self._read():
                self._write(data.decode(errors="replace"))

    def _read(self) -> bytes:
        try:
            return os.read(self._pipe, _CHUNK_BYTES)
        except BlockingIOError:
            return b""
