"""A process group whose waits end when they are told to, and which knows when ranks disagree.

    user's dist.all_reduce(t) ──> ReleasableGroup.allreduce ──> agree (compare what each rank calls)
                                        │                          │ same everywhere
                                        ▼                          ▼
                                  PendingWork.wait  <── done ── gloo / nccl

The caller waits in Python on a `PendingWork`, never inside the backend, so that `ReleasableGroup.release`
or a signal ends the wait at once. The backend's own thread is left to the group's undertaker (`service`).

Knows torch's process groups; does not know cells, ranks of the cluster or why a group is released.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from openclaw_nb.core.errors import MismatchError, OpenClawError, ReleasedError
from openclaw_nb.engine.group.point_to_point import Post

# torch's stubs describe how its base classes are called from outside, not what a subclass overrides.
_Work: Any = dist.Work
_ProcessGroup: Any = dist.ProcessGroup

_SIGNATURE_BYTES = 192
# How gloo says that a peer left: always the consequence of something that happened there.
_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


@dataclass(frozen=True)
class Wait:
    """What this rank waits for: the call, the group's name, the call's number and since when."""

    call: str
    group: str
    number: int
    since: float


class PendingWork(_Work):  # type: ignore[misc]
    """The result of a collective that is under way.

    Both ways of waiting end on release: `wait` sleeps on a Python event, and the future is one of ours.
    """

    def __init__(
        self, call: str, outputs: list[Any], waits: WaitBoard, on_finish: Callable[[PendingWork], None]
    ) -> None:
        super().__init__()
        self.call = call
        self.source_rank = -1
        self._outputs = outputs
        self._waits = waits
        self._on_finish = on_finish
        self._finished = threading.Event()
        self._trigger: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def _source_rank(self) -> int:
        return self.source_rank

    def tensors(self) -> list[torch.Tensor]:
        """Return the output tensors, nested lists flattened."""
        flat = [item if isinstance(item, list) else [item] for item in self._outputs]
        return [t for items in flat for t in items]

    def finish(self, error: Exception | None) -> None:
        """Set the outcome once; later outcomes are dropped."""
        if error is not None and any(text in str(error) for text in _PEER_LOST):
            error = ReleasedError(f"{self.call}: the connection to another rank is gone")
        with self._lock:
            if self._finished.is_set():
                return
            self._error = error
            self._finished.set()
        self._on_finish(self)
        if self._trigger is not None:
            self._trigger.set_result(None)

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the collective is done.

        Raises
        ------
        ReleasedError
            When the group was released meanwhile.
        """
        if not self._finished.is_set():
            with self._waits.waiting(self.call):
                self._finished.wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether the outcome is there."""
        return self._finished.is_set()

    def is_success(self) -> bool:
        """Return whether the collective is done without an error."""
        return self._finished.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """Return the error, if there is one."""
        return self._error

    def result(self) -> list[Any]:
        """Return the output tensors."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future with the output tensors.

        C++ code, such as the reducer of a DistributedDataParallel, waits on it too. For such code
        ``Future.set_exception`` is no error but a result of another type; a callback that raises is one.
        """
        with self._lock:
            if self._future is None:
                trigger: torch.futures.Future[Any] = torch.futures.Future()
                self._future = trigger.then(self._value_of)
                if not self._finished.is_set():
                    self._trigger = trigger
                    return self._future
            else:
                return self._future
        trigger.set_result(None)
        return self._future

    def _value_of(self, _: torch.futures.Future[Any]) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._outputs


class WaitBoard:
    """Where the group notes what this rank waits for, for whoever asks from another thread."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._number = 0
        self.current: Wait | None = None

    def waiting(self, call: str) -> WaitBoard:
        """Use as ``with board.waiting("all_reduce"):``."""
        self._number += 1
        self.current = Wait(call, self._group, self._number, time.monotonic())
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        self.current = None


def signature(call: str, tensors: list[torch.Tensor], detail: str = "") -> str:
    """Describe a collective so that two ranks can tell whether they make the same call.

    Examples
    --------
    >>> signature("all_reduce", [torch.zeros(2, 3)], "sum")
    'all_reduce(float32[2, 3], sum)'
    """
    kinds = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors[:4]]
    if len(tensors) > 4:
        kinds.append(f"{len(tensors)} tensors, {sum(t.numel() for t in tensors)} elements")
    return f"{call}({', '.join([*kinds, detail] if detail else kinds)})"


class ReleasableGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group that wraps a torch backend.

    Parameters
    ----------
    inner : Backend
        The backend that does the work (gloo or nccl).
    rank, size : int
        Place in the group.
    name : str
        Shown where waits are shown.
    witness : Backend, optional
        A backend for CPU tensors through which ranks compare their calls before each collective. The
        group that the step engine uses itself makes the same calls on every rank and does without.
    """

    def __init__(self, inner: Any, rank: int, size: int, name: str, *, witness: Any | None = None) -> None:
        super().__init__(rank, size)
        self.inner: Any = inner
        self._cpu = inner if inner.name() == "gloo" else witness
        self.label = name
        self.board = WaitBoard(name)
        self._witness = witness if size > 1 else None
        self._post = Post(inner) if self._witness is inner else None
        self._in_backend = 0
        self._pending: set[PendingWork] = set()
        self._lock = threading.Lock()
        self._released: str | None = None
        self._lanes: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}

    # ------------------------------------------------------------------------------------ release

    def release(self, cause: str) -> None:
        """End every wait in this group now, and refuse every later call."""
        with self._lock:
            self._released = cause
            pending, lanes = list(self._pending), list(self._lanes.values())
        for work in pending:
            work.finish(ReleasedError(cause))
        for lane in lanes:
            lane.put(None)

    @property
    def released(self) -> bool:
        """Whether the group was released."""
        return self._released is not None

    @property
    def busy(self) -> bool:
        """Whether the backend still works on a call, be it released or not."""
        return self._in_backend > 0

    def abort_backend(self) -> None:
        """Let a backend that can (nccl) end what it does; gloo's sockets are cut instead."""
        if self.inner is not None and self.inner is not self._cpu:
            self.inner.abort()

    def bury(self) -> None:
        """Drop the backends, on a spare thread: their destructors wait for what they still do."""
        self.inner = self._cpu = self._witness = self._post = None

    # ---------------------------------------------------------------------------------- one call

    def _call(
        self, method: str, args: tuple[Any, ...], outputs: list[Any], text: str, *, shared: bool = True
    ) -> PendingWork:
        """Issue one backend call; ``shared`` calls are made by all ranks and compared first."""
        work = self._begin(text, outputs)
        if shared and self._witness is not None:
            self._issue_later(lambda: self._agree_and_issue(work, method, args))
        else:
            self._issue(work, method, args)
        return work

    def _forget(self, work: PendingWork) -> None:
        with self._lock:
            self._pending.discard(work)

    def _issue(self, work: PendingWork, method: str, args: tuple[Any, ...]) -> None:
        try:
            inner = getattr(self.inner, method)(*args)
        except Exception as error:  # noqa: BLE001 - a refusal is the work's outcome
            work.finish(error)
        else:
            self._follow(work, inner)

    def _follow(self, work: PendingWork, inner: Any) -> None:
        if any(t.device.type != "cpu" for t in work.tensors()):
            inner.wait()  # on a GPU this orders the streams and returns
            work.finish(None)
            return
        try:
            future = inner.get_future()
        except RuntimeError:  # some of gloo's works, such as reduce_scatter's, have none
            self._finish_apart(work, inner.wait)
            return
        with self._lock:
            self._in_backend += 1
        future.add_done_callback(lambda future: self._left_backend(work, future))

    def _left_backend(self, work: PendingWork, future: torch.futures.Future[Any]) -> None:
        with self._lock:
            self._in_backend -= 1
        try:
            future.value()
        except Exception as error:  # noqa: BLE001 - whatever was raised is the work's outcome
            work.finish(error)
        else:
            work.finish(None)

    def _issue_later(self, action: Callable[[], None], lane: str = "issue") -> None:
        """Run ``action`` on the lane's thread, in order: asynchronous calls stay asynchronous."""
        with self._lock:
            calls = self._lanes.get(lane)
            if calls is None:
                calls = self._lanes[lane] = queue.SimpleQueue()
                threading.Thread(
                    target=_issue_all, args=(calls,), name=f"openclaw-{lane}", daemon=True
                ).start()
            calls.put(action)
            if self._released is not None:  # since the call began: nobody else will end the thread
                calls.put(None)

    def _agree_and_issue(self, work: PendingWork, method: str, args: tuple[Any, ...]) -> None:
        try:
            self._agree(work.call)
        except (OpenClawError, RuntimeError) as error:
            work.finish(error)
            return
        self._issue(work, method, args)

    def _agree(self, text: str) -> None:
        mine = torch.zeros(_SIGNATURE_BYTES, dtype=torch.uint8)
        data = text.encode()[:_SIGNATURE_BYTES]
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.size())]
        assert self._witness is not None
        self._witness.allgather([every], [mine]).wait()
        texts = [bytes(t.numpy()).rstrip(b"\0").decode(errors="replace") for t in every]
        if len(set(texts)) > 1:
            calls = "; ".join(f"rank {r} calls {t}" for r, t in enumerate(texts))
            raise MismatchError(
                f"The ranks disagree about a collective: {calls}. "
                "Every rank must make the same calls in the same order, on tensors of the same shape and "
                "type."
            )

    # ----------------------------------------------------------- what torch.distributed calls on a group

    def getBackendName(self) -> str:
        """Return a name of our own: torch looks for its backends' C++ classes behind theirs."""
        return "openclaw"

    @property
    def group_name(self) -> str:
        """The name by which torch finds the group, as sharded tensors do. Its own getter asks a backend."""
        return str(c10d._world.pg_names.get(self, self.label))

    def allreduce(self, tensors: Any, opts: Any = None) -> PendingWork:
        """Reduce tensors over all ranks, in place."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        opts = opts if opts is not None else c10d.AllreduceOptions()
        return self._call("allreduce", (tensors, opts), tensors, signature("all_reduce", tensors, _op(opts)))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> PendingWork:
        """Reduce several tensors at once."""
        text = signature("all_reduce_coalesced", tensors, _op(opts))
        return self._call("allreduce_coalesced", (tensors, opts), tensors, text)

    def broadcast(self, tensors: Any, opts: Any = None) -> PendingWork:
        """Send the root's tensors to all ranks."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        opts = opts if opts is not None else c10d.BroadcastOptions()
        text = signature("broadcast", tensors, f"src={opts.rootRank}")
        return self._call("broadcast", (tensors, opts), tensors, text)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> PendingWork:
        """Reduce tensors to the root."""
        text = signature("reduce", tensors, f"{_op(opts)}, dst={opts.rootRank}")
        return self._call("reduce", (tensors, opts), tensors, text)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """Gather every rank's tensors on every rank."""
        opts = opts if opts is not None else c10d.AllgatherOptions()
        return self._call("allgather", (outputs, inputs, opts), outputs, signature("all_gather", inputs))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """Gather several tensors at once."""
        opts = opts if opts is not None else c10d.AllgatherOptions()
        text = signature("all_gather_coalesced", inputs)
        return self._call("allgather_coalesced", (outputs, inputs, opts), outputs, text)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> PendingWork:
        """Gather into one tensor."""
        opts = opts if opts is not None else c10d.AllgatherOptions()
        text = signature("all_gather_into_tensor", [source])
        return self._call("_allgather_base", (output, source, opts), [output], text)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """Gather several tensors, each into one; torch's functional collectives come here with a single one too."""
        works = [self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> PendingWork:
        """Reduce several tensors, and give each rank its part of each; see `all_gather_single_coalesced`."""
        opts = opts if opts is not None else c10d.ReduceScatterOptions()
        works = [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> PendingWork:
        """Reduce, then give each rank its part."""
        text = signature("reduce_scatter", list(outputs), _op(opts))
        return self._call("reduce_scatter", (outputs, inputs, opts), outputs, text)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> PendingWork:
        """Reduce one tensor, then give each rank its part."""
        text = signature("reduce_scatter_tensor", [source], _op(opts))
        return self._call("_reduce_scatter_base", (output, source, opts), [output], text)

    _reduce_scatter_base = reduce_scatter_single

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> PendingWork:
        """Gather every rank's tensors on the root."""
        text = signature("gather", inputs, f"dst={opts.rootRank}")
        return self._call("gather", (outputs, inputs, opts), outputs, text)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> PendingWork:
        """Give each rank its part of the root's tensors."""
        text = signature("scatter", outputs, f"src={opts.rootRank}")
        return self._call("scatter", (outputs, inputs, opts), outputs, text)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> PendingWork:
        """Exchange one tensor with each rank."""
        text = signature("all_to_all", [], f"{len(inputs)} tensors")
        return self._call("alltoall", (outputs, inputs, opts), outputs, text)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, output_sizes: Any, input_sizes: Any, opts: Any
    ) -> PendingWork:
        """Exchange parts of one tensor with each rank."""
        text = signature("all_to_all_single", [], str(source.dtype).removeprefix("torch."))
        args = (output, source, output_sizes, input_sizes, opts)
        return self._call("alltoall_base", args, [output], text)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> PendingWork:
        """Wait until every rank has come."""
        opts = opts if opts is not None else c10d.BarrierOptions()
        return self._call("barrier", (opts,), [], "barrier()")

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> PendingWork:
        """Send a tensor to one rank."""
        work = self._begin(signature("send", tensors, f"dst={dst}"), tensors)
        if self._post is None:
            self._finish_apart(work, lambda: self.inner.send(tensors, dst, tag).wait())
        else:
            parts = self._post.send(tensors, work.call, dst, tag)
            self._finish_apart(work, lambda: [part.wait() for part in parts[:2]])
        return work

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> PendingWork:
        """Receive a tensor from one rank."""
        return self._receive(tensors, src, tag, f"src={src}")

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> PendingWork:
        """Receive a tensor from whichever rank sends one."""
        return self._receive(tensors, None, tag, "any source")

    def _receive(self, tensors: list[torch.Tensor], src: int | None, tag: int, detail: str) -> PendingWork:
        work = self._begin(signature("recv", tensors, detail), tensors)
        if self._post is None:
            self._finish_apart(work, lambda: self.inner.recv(tensors, src, tag).wait())
            return work
        post = self._post
        arriving, letter = post.begin_receive(src, tag)

        def finish() -> None:
            work.source_rank = post.finish_receive(arriving, letter, tensors, work.call, src)

        self._finish_apart(work, finish)
        return work

    def _begin(self, call: str, tensors: list[torch.Tensor]) -> PendingWork:
        work = PendingWork(call, tensors, self.board, self._forget)
        with self._lock:
            if self._released is not None:
                raise ReleasedError(self._released)
            self._pending.add(work)
        return work

    def start_apart(
        self, call: str, tensors: list[torch.Tensor], action: Callable[[], None], lane: str = "issue"
    ) -> PendingWork:
        """Run ``action`` in place of a backend's call, after what was started this way before.

        Parameters
        ----------
        call : str
            Shown as what this rank waits for.
        tensors : list of Tensor
            What the action writes to.
        action : callable
            Made by all ranks in the same order. A lost connection counts as the other rank's end.
        lane : str
            Actions of one lane run in order, those of different lanes at the same time.
        """
        work = self._begin(call, tensors)
        self._issue_later(lambda: self._run(work, action), lane)
        return work

    def start_beside(self, call: str, action: Callable[[], Any]) -> PendingWork:
        """Run ``action``, which may use the backend for long, on a thread of its own; it ends with the group.

        Parameters
        ----------
        call : str
            Shown as what this rank waits for, if it does.
        action : callable
            A lost connection counts as the other rank's end.
        """
        work = self._begin(call, [])
        self._finish_apart(work, action)
        return work

    def _finish_apart(self, work: PendingWork, wait: Callable[[], Any]) -> None:
        """Wait on a thread: the backend gives no future for sends and receives."""
        run = functools.partial(self._run, work, wait)
        threading.Thread(target=run, name="openclaw-message", daemon=True).start()

    def _run(self, work: PendingWork, action: Callable[[], Any]) -> None:
        with self._lock:
            self._in_backend += 1
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever was raised is the work's outcome; later works go on
            work.finish(error)
        else:
            work.finish(None)
        finally:
            with self._lock:
                self._in_backend -= 1


def _issue_all(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (action := calls.get()) is not None:
        action()
        del action  # it holds the work, which must not outlive its group on this thread


_OPS = {
    name: getattr(dist.ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


def _op(opts: Any) -> str:
    return next((name.lower() for name, op in _OPS.items() if opts.reduceOp == op), "custom")
