"""The worker's one way out: what a cell shows, and events, on the engine's own iopub topic.

    print / display / logging ──> Outbox.add ──(every 50 ms)──> Shown event ──> notebook
                                      └──(what is left at the end)──> the cell's reply

A flood is bounded here, at its source: of each stream the first part is sent, then only the last part
and the number of lines between; of displays what an allowance that grows with time lets pass, then the
newest. Messages carry no parent, so that ipyparallel's hub and client ignore them; the notebook side
subscribes to the topic itself.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher

from openclaw_nb.engine.descriptors import PipeReader
from openclaw_nb.engine.progress_bars import use_text_bars
from openclaw_nb.engine.record import Record
from openclaw_nb.protocol import codec
from openclaw_nb.protocol.messages import Event, Reply, Shown

TOPIC = b"openclaw."
HEAD_CHARACTERS = 200_000
TAIL_CHARACTERS = 10_000
DISPLAY_CHARACTERS = 500_000
DISPLAY_CHARACTERS_PER_SECOND = 200_000
_FLUSH_SECONDS = 0.05
_TAIL_SECONDS = 1.0


class _Flood:
    """One stream's bound: how much has passed, and the newest part of what was held back."""

    def __init__(self) -> None:
        self.passed = 0
        self.num_lines = 0
        self._tail: deque[str] = deque()
        self._size = 0
        self.changed = False

    def hold(self, text: str) -> None:
        self.num_lines += text.count("\n")
        self._tail.append(text[-TAIL_CHARACTERS:])
        self._size += len(self._tail[-1])
        while self._size > TAIL_CHARACTERS and len(self._tail) > 1:
            self._size -= len(self._tail.popleft())
        self.changed = True

    def tail(self) -> str:
        text = "".join(self._tail)[-TAIL_CHARACTERS:]
        return text[text.find("\n") + 1 :] if self.num_lines else text


class _DisplayFlood:
    """The bound of displays: those beyond it are counted, but for the newest, which is held back for a while."""

    def __init__(self) -> None:
        self._left = float(DISPLAY_CHARACTERS)
        self._filled_at = time.monotonic()
        self._shown: set[str] = set()
        self._held: list[Any] | None = None
        self._num_dropped = 0

    def take(self, entry: list[Any]) -> list[list[Any]]:
        """Take a display; return what is to be sent now."""
        if self._held is not None and not (entry[4] and entry[3] == self._held[3]):
            self._num_dropped += 1
        self._held = entry
        return self.due()

    def due(self, *, at_once: bool = False) -> list[list[Any]]:
        """Return the display that is held, if its time has come, and a word on those that were dropped before it."""
        now = time.monotonic()
        grown = (now - self._filled_at) * DISPLAY_CHARACTERS_PER_SECOND
        self._left, self._filled_at = min(DISPLAY_CHARACTERS, self._left + grown), now
        if self._held is None or (self._left <= 0 and not at_once):
            return []
        entry, self._held = self._held, None
        self._left -= sum(
            len(value) if isinstance(value, str) else len(repr(value)) for value in entry[1].values()
        )
        entry[4] = bool(entry[4] and entry[3] in self._shown)  # its first state may have been dropped
        if entry[3]:
            self._shown.add(entry[3])
        return [*self._note(), entry]

    def _note(self) -> list[list[Any]]:
        if not self._num_dropped:
            return []
        text = f"[{self._num_dropped} displays were left out here: more than can be shown in their time]\n"
        self._num_dropped = 0
        return [["stream", "stderr", text]]

    @property
    def holds(self) -> bool:
        return self._held is not None


class Outbox:
    """Collects what the running cell shows and sends it in batches.

    Parameters
    ----------
    kernel : ipykernel.kernelbase.Kernel
        The engine's kernel, whose session and iopub socket are used.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._run_id = ""
        self._muted = False
        self._entries: list[list[Any]] = []
        self._floods: dict[str, _Flood] = {}
        self._displays = _DisplayFlood()
        self._seq = 0
        self._record: Record | None = None
        self._tail_sent = 0.0
        self._wake = threading.Event()
        self._readers: list[PipeReader] = []
        threading.Thread(target=self._send_loop, name="openclaw-outbox", daemon=True).start()

    # -------------------------------------------------------------------------------------- a run

    def begin(self, record: Record) -> None:
        """Start collecting for this run."""
        with self._lock:
            self._record = record
            self._run_id, self._seq = record.command.run_id, 0
            self._entries, self._floods, self._displays = [], {}, _DisplayFlood()

    def end(self) -> tuple[int, list[list[Any]]]:
        """Stop collecting; return how many batches were sent and what is left to show."""
        with self._lock:
            self._hold_tails()
            self._entries += self._displays.due(at_once=True)
            entries, self._entries = self._entries, []
            self._run_id = ""
            return self._seq, entries

    def ended(self, reply: Reply) -> None:
        """Take how the run ended."""
        with self._lock:
            if self._record is not None:
                self._record.end(reply)

    def recall(self, *, with_output: bool) -> dict[str, Any] | None:
        """Return what the newest run has told so far; None when nothing has run."""
        with self._lock:
            return None if self._record is None else self._record.tell(with_output=with_output)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Drop what is shown in the ``with`` block."""
        self._muted = True
        try:
            yield
        finally:
            self.drain()
            self._muted = False

    def drain(self) -> None:
        """Take in what child processes and C code have written to the descriptors so far."""
        for reader in self._readers:
            reader.drain()

    def read_descriptors(self, stream: Any, name: str) -> None:
        """Take over the pipe behind a stream, if ipykernel has put one there."""
        if getattr(stream, "_fid", None) is not None:
            self._readers.append(PipeReader(stream, lambda text: self.write(name, text)))

    # ------------------------------------------------------------------------------------ what is shown

    def write(self, name: str, text: str) -> int:
        """Take text of ``stdout`` or ``stderr``."""
        if os.getpid() != self._owner:  # a forked child, such as a loader's worker: its parent reads the pipe
            os.write(1 if name == "stdout" else 2, text.encode(errors="replace"))
            return len(text)
        with self._lock:
            if self._muted:
                return len(text)
            if not self._run_id:
                # The engine's own log, or a thread that outlived its cell: it must not land in a later one.
                self._log(text)
                return len(text)
            flood = self._floods.setdefault(name, _Flood())
            head = text[: max(0, HEAD_CHARACTERS - flood.passed)]
            if head:
                flood.passed += len(head)
                self._stream(name, head)
            if len(head) < len(text):
                flood.hold(text[len(head) :])
        self._wake.set()
        return len(text)

    def _log(self, text: str) -> None:
        descriptor = getattr(sys.stderr, "_original_stdstream_copy", None)
        if descriptor is not None:
            os.write(descriptor, text.encode(errors="replace"))

    def _stream(self, name: str, text: str) -> None:
        if self._entries and self._entries[-1][:2] == ["stream", name]:
            self._entries[-1][2] += text
        else:
            self._entries.append(["stream", name, text])

    def add(self, *entry: Any) -> None:
        """Take a transcript entry such as ``("display", data, metadata, display_id, update)``."""
        with self._lock:
            if self._run_id and not self._muted:
                self._entries += self._displays.take(list(entry)) if entry[0] == "display" else [list(entry)]
        self._wake.set()

    # ---------------------------------------------------------------------------------------- sending

    def publish(self, event: Event) -> None:
        """Send an event at once."""
        with self._lock:
            if self._record is not None and self._record.command.run_id == event.run_id:
                self._record.take(event)
            self._kernel.session.send(
                self._kernel.iopub_socket, "openclaw_event", codec.encode(event), parent={}, ident=self._topic
            )

    @property
    def _topic(self) -> bytes:
        return TOPIC + b"%d" % self._kernel.engine_id

    def _send_loop(self) -> None:
        while True:
            self._wake.wait()
            time.sleep(_FLUSH_SECONDS)
            self._wake.clear()
            self.flush()

    def flush(self) -> None:
        """Send what has been collected since the last batch."""
        with self._lock:
            if time.monotonic() - self._tail_sent > _TAIL_SECONDS:
                self._hold_tails()
            self._entries += self._displays.due()
            if self._displays.holds:
                self._wake.set()
            if not self._entries or not self._run_id:
                return
            self._seq += 1
            event = Shown(
                run_id=self._run_id, worker=self._kernel.engine_id, seq=self._seq, entries=self._entries
            )
            self._entries = []
            self.publish(event)

    def _hold_tails(self) -> None:
        for name, flood in self._floods.items():
            if flood.changed:
                tail = flood.tail()
                self._entries.append(["omit", flood.num_lines - tail.count("\n"), tail, name])
                flood.changed = False
                self._tail_sent = time.monotonic()


class OutboxPublisher(DisplayPublisher):
    """What ``display()`` calls in a cell."""

    outbox: Outbox

    def set_parent(self, parent: Any) -> None:
        """The kernel tells which request it works on; the outbox knows its run itself."""

    def publish(  # type: ignore[no-untyped-def]
        self, data, metadata=None, source=None, *, transient=None, update=False, **kwargs
    ) -> None:
        """Show a bundle, or update the one with the same display id."""
        display_id = (transient or {}).get("display_id")
        self.outbox.add("display", data, metadata or {}, display_id, bool(update))

    def clear_output(self, wait: bool = False) -> None:
        """Clear what the cell has shown on this rank."""
        self.outbox.add("clear", bool(wait))


class OutboxResult(DisplayHook):
    """What takes the value of a cell's last expression."""

    outbox: Outbox
    source = ""

    def set_parent(self, parent: Any) -> None:
        """The kernel tells which request it works on; the outbox knows its run itself."""

    def quiet(self) -> bool:
        """Whether the cell's last expression ends in a semicolon."""
        return bool(self.semicolon_at_end_of_expression(self.source))  # type: ignore[no-untyped-call]

    def write_output_prompt(self) -> None:
        """The notebook writes its own label."""

    def write_format_data(self, format_dict, md_dict=None) -> None:  # type: ignore[no-untyped-def]
        """Send the formatted value."""
        self.outbox.add("result", format_dict, md_dict or {})

    def finish_displayhook(self) -> None:
        """Nothing is printed, so there is no line to end."""
        self._is_active = False


class _KeepsNothing(dict[int, list[Any]]):
    """A history of outputs that stays empty."""

    def __missing__(self, key: int) -> list[Any]:
        return []


def _nothing() -> None:
    pass


def capture(outbox: Outbox, shell: Any) -> None:
    """Let everything that this process shows go through ``outbox``."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.write = lambda text, name=name: outbox.write(name, text)
        stream.flush = (
            _nothing  # what is written is in the outbox; ipykernel flushes, and waits, after each request
        )
        outbox.read_descriptors(stream, name)
    shell.display_pub = OutboxPublisher(parent=shell, shell=shell)  # type: ignore[no-untyped-call]
    shell.display_pub.outbox = outbox
    # No output cache: it would keep every shown value alive.
    shell.displayhook = OutboxResult(  # type: ignore[no-untyped-call]
        parent=shell, shell=shell, cache_size=0
    )
    shell.displayhook.outbox = outbox
    shell.display_trap.hook = shell.displayhook
    # IPython would keep a copy of all that is shown, for as long as the worker lives.
    shell._tee = lambda channel: nullcontext()
    shell.history_manager.outputs = _KeepsNothing()
    use_text_bars()
