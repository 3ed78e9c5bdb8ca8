"""The global batches of a cell's loaders, sliced over the ranks.

    for x, y in loader   ──>  DataLoader.__iter__ (ours while the cell runs)
                                ├─ evaluation, or not ours  ──> as ever
                                └─ training ──> the same batch sampler, each batch cut to this rank's part

The single-device loader's global batches come in the same order: rank 0's random state is made common at the
start of each pass and drawn from just as the single-device loader would: some by ``iter(loader)``, the rest with the
first batch, which differs where several loaders are begun together. Knows loaders; not what the slices are for.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.reentry.loops import Loops, Pass
from openclaw_nb.engine.steps import randomness
from openclaw_nb.engine.steps.shares import Shares

_WHOLE_BATCH = "use --split model, under which every rank draws the whole batch and the model call is split"


@dataclass(frozen=True)
class Slice:
    """This rank's part of one global batch.

    ``num_local`` samples are real; 0 means that the rank holds one dummy sample which must not count. ``shares`` is how
    many each rank has. ``is_last`` tells the last batch of the pass.
    """

    num_local: int
    num_global: int
    shares: tuple[int, ...]
    is_last: bool
    loader_id: int

    @property
    def num_rows(self) -> int:
        """Rows that the rank really has, dummy included."""
        return max(1, self.num_local)


class SlicedBatches:
    """A batch sampler that yields this rank's part of each batch of another one, some of them again when told to.

    Parameters
    ----------
    ranks : Ranks
        Among whom each batch is shared out; there may be fewer of them later.
    shares : Shares
        Theirs.
    loader : DataLoader
        The single-device loader.

    Attributes
    ----------
    num_unsettled : int
        How many batches the cell has got that may be asked for again.
    drawn_from : bytes
        The random state that the pass has drawn its batches from.
    """

    def __init__(self, ranks: Ranks, shares: Shares, loader: DataLoader[Any]) -> None:
        self._batches: Any = loader.batch_sampler
        self._generators = randomness.generators_of(loader)
        self._ranks, self._shares, self._loader_id = ranks, shares, id(loader)
        self._source: Iterator[tuple[list[int], bool]] | None = None
        self._unsettled: deque[tuple[list[int], bool]] = deque()
        self._num_skipped = 0
        self._drawn_again_from = b""
        self.drawn_from = b""
        self.num_unsettled = 0
        self._drawn: deque[Slice] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def restart(self, num_skipped: int = 0, drawn_from: bytes = b"") -> None:
        """Let the next iteration be a new pass, or go on with one that has drawn from a random state, later in it."""
        self._source, self._num_skipped, self._drawn_again_from = None, num_skipped, drawn_from

    def begin(self) -> Iterator[tuple[list[int], bool]]:
        """Draw the random numbers that a pass begins with, unless it has begun; return what is left of it."""
        if self._source is None:
            if self._drawn_again_from:
                randomness.restore(self._drawn_again_from, self._generators)
            self.drawn_from = self._drawn_again_from or randomness.capture(self._generators)
            source = _with_ends(self._batches)
            begun = list(itertools.islice(source, self._num_skipped + 1))
            self._source = itertools.chain(begun[self._num_skipped :], source)
            self._unsettled.clear()
        return self._source

    def take(self) -> Slice:
        """Return the slice of the next batch that the cell gets."""
        self.num_unsettled += 1
        return self._drawn.popleft()

    def settle(self) -> None:
        """Forget the batches that the cell has got: they will not be asked for again."""
        for _ in range(self.num_unsettled):
            self._unsettled.popleft()
        self.num_unsettled = 0

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches that are not settled, then the others."""
        source = self.begin()
        again, self._unsettled = self._unsettled, deque()
        self.num_unsettled = 0
        self._drawn.clear()
        for batch, is_last in itertools.chain(again, source):
            self._unsettled.append((batch, is_last))
            bounds = self._shares.bounds(len(batch))
            low, high = bounds[self._ranks.rank]
            sizes = tuple(end - start for start, end in bounds)
            self._drawn.append(Slice(high - low, len(batch), sizes, is_last, self._loader_id))
            yield list(batch[low:high] or batch[:1])


def _with_ends(batches: Iterable[list[int]]) -> Iterator[tuple[list[int], bool]]:
    """Yield each batch with whether it is the last."""
    source = iter(batches)
    batch = next(source, None)
    while batch is not None:
        following = next(source, None)
        yield batch, following is None
        batch = following


class Steps(Protocol):
    """What makes steps of the batches."""

    num_groups: int
    shares: Shares

    def is_training(self) -> bool:
        """Whether a loader whose iteration begins now is a training loader."""

    def take_slice(self, part: Slice | None) -> None:
        """Take note of the batch that the cell gets, and of None when a pass has ended."""

    @property
    def is_settled(self) -> bool:
        """Whether no batch that was given may have to be repeated."""

    def begin_again(self) -> None:
        """Go back to where the first batch that is to be repeated began."""

    def rest(self) -> None:
        """Take note that all batches so far are trained, and that the next one is not drawn yet."""

    def leave_loop(self, *, repeated: bool) -> None:
        """Take note that a loop over a loader was left early, and whether it has given a batch twice."""

    def agree(self, make: Callable[[], Any]) -> Any:
        """Return what an operation of all ranks returns."""


class _Twin:
    """A loader that draws the slices of another one's batches: of whom, and for which pass it is used."""

    def __init__(self, of: DataLoader[Any], batches: SlicedBatches, loader: DataLoader[Any]) -> None:
        self.of, self.batches, self.loader = of, batches, loader
        self._last: Pass | None = None
        self._iterator: Callable[[], object] = lambda: None

    @property
    def is_used(self) -> bool:
        """Whether a pass is under way, or may begin: somebody holds its iterator."""
        return self._last is not None and not self._last.is_over and self._iterator() is not None

    def use(self, one: Pass, iterator: Generator[Any, None, None]) -> Iterator[Any]:
        """Take note of a pass, and return its iterator."""
        self._last, self._iterator = one, weakref.ref(iterator)
        return iterator


class LoaderSplitter:
    """Slices the cell's training loaders while it is installed.

    Parameters
    ----------
    ranks : Ranks
        The ranks that share each batch.
    steps : Steps
        What makes steps of the batches.
    fetching : callable
        Wraps the batches of each pass, to measure how long they take.
    common_only : bool
        Do not slice: every rank draws the whole batch, from a common random state.
    only : sequence of DataLoader or None
        The only loaders to slice, when they were given by name.
    loops : Loops
        The cell's loops: a newcomer's passes go on where the others' are.
    pinning : bool
        Let loaders pin memory where they do by themselves.
    loads_ahead : bool or None
        Whether loaders load ahead, in a process of their own; as they were made where it is None.
    """

    def __init__(
        self,
        ranks: Ranks,
        steps: Steps,
        *,
        fetching: Callable[[Iterable[Any]], Iterator[Any]],
        common_only: bool,
        only: Sequence[DataLoader[Any]] | None,
        loops: Loops,
        pinning: bool = True,
        loads_ahead: bool | None = None,
    ) -> None:
        self._pinning, self._loads_ahead = pinning, loads_ahead
        self._loops = loops
        self._ranks = ranks
        self._steps = steps
        self._fetching = fetching
        self._common_only = common_only
        self._only = None if only is None else {id(loader) for loader in only}
        self._inner: dict[int, _Twin] = {}
        self._plain_iter: Any = None
        self._starting = False

    def install(self) -> None:
        """Take over the iteration of every DataLoader of this process."""
        self._plain_iter = plain = DataLoader.__iter__

        def iterate(loader: DataLoader[Any]) -> Any:
            if self._starting or not self._wants(loader):
                return plain(loader)
            if self._common_only:
                return self._common(loader)
            # What a newcomer's loader has to do is known when its loop asks for the first item.
            return self._resumed(loader) if self._loops.is_resuming else self._sliced(loader)

        DataLoader.__iter__ = iterate  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give the iteration back."""
        DataLoader.__iter__ = self._plain_iter  # type: ignore[method-assign]
        self._inner.clear()

    def _wants(self, loader: DataLoader[Any]) -> bool:
        if self._only is not None and id(loader) not in self._only:
            return False
        return self._steps.is_training()

    def _make_common(self, loader: DataLoader[Any]) -> bytes:
        """Give every rank rank 0's random state, and return it."""
        generators = randomness.generators_of(loader)
        own = randomness.capture(generators)
        data: bytes = self._steps.agree(lambda: self._ranks.broadcast(own))
        if data != own:
            randomness.restore(data, generators)
        return data

    def _begin(self, loader: DataLoader[Any]) -> Any:
        self._starting = True
        try:
            return self._plain_iter(loader)
        finally:
            self._starting = False

    def _common(self, loader: DataLoader[Any]) -> Iterator[Any]:
        self._make_common(loader)
        return self._each(self._begin(loader))

    def _each(self, fetched: Iterable[Any]) -> Iterator[Any]:
        for batch in self._fetching(fetched):
            yield batch
            self._steps.rest()

    def _sliced(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Begin a pass, by what the single-device loader does when it is asked for an iterator."""
        one = Pass(self._make_common(loader))
        twin = self._twin(loader)
        twin.batches.restart()
        return twin.use(one, self._pass(one, twin, self._begin(twin.loader), is_new=True))

    def _resumed(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Go on with a pass of the other ranks, with the random numbers that it began with, after what is trained."""
        one = self._loops.resumed_pass()
        if one is None:
            yield from self._sliced(loader)
            return
        twin = self._twin(loader)
        randomness.restore(one.start, randomness.generators_of(loader))
        twin.batches.restart(one.taken, one.drawn_from)
        fetched = self._begin(twin.loader)
        twin.batches.begin()
        yield from twin.use(one, self._pass(one, twin, fetched, is_new=False))

    def _pass(
        self, one: Pass, twin: _Twin, fetched: Iterable[Any], *, is_new: bool
    ) -> Generator[Any, None, None]:
        if is_new:
            self._loops.begin_pass(one)
        self._steps.shares.num_open += 1
        try:
            yield from itertools.repeat(None, one.given)  # for the batches that the others have had
            while not one.is_over and (yield from self._give(one, twin.batches, fetched)):
                self._steps.begin_again()
                fetched = self._begin_again(twin.loader)
        finally:
            self._steps.shares.num_open -= 1
            self._loops.end_pass(one)
        self._steps.take_slice(None)

    def _give(self, one: Pass, batches: SlicedBatches, fetched: Iterable[Any]) -> Generator[Any, None, bool]:
        """Yield batches until the pass ends, or the ranks or their shares are others; return whether they are.

        What was drawn before has the wrong shares then.
        """
        shares = self._steps.shares
        before = self._steps.num_groups, shares.turn
        for batch in self._fetching(fetched):
            self._steps.take_slice(batches.take())
            one.drawn_from = batches.drawn_from
            one.given += 1
            one.taken += 1
            one.num_unsettled += 1
            try:
                yield batch
            except GeneratorExit:
                if not one.is_over:  # else another takes its place
                    self._steps.leave_loop(repeated=one.has_repeated)
                raise
            if self._steps.is_settled:
                batches.settle()
                one.num_unsettled = 0
                self._steps.rest()
                shares.take_up()
            if (self._steps.num_groups, shares.turn) != before:
                one.taken -= one.num_unsettled
                one.num_unsettled = 0
                return True
        return False

    def _begin_again(self, loader: DataLoader[Any]) -> Any:
        """Iterate a loader anew, without the random numbers that a pass begins with."""
        generators = randomness.generators_of(loader)
        before = randomness.capture(generators)
        try:
            return self._begin(loader)
        finally:
            randomness.restore(before, generators)

    def _twin(self, loader: DataLoader[Any]) -> _Twin:
        """Return the loader's sliced twin for a pass; it is kept, so that persistent worker processes persist.

        A loader that is iterated while another pass of it is under way gets one more.
        """
        kept = self._inner.get(id(loader))
        if kept is not None and not kept.is_used:
            return kept
        self._check(loader)
        batches = SlicedBatches(self._ranks, self._steps.shares, loader)
        inner = twin(loader, batches, pinning=self._pinning, loads_ahead=self._loads_ahead)
        made = _Twin(loader, batches, inner)
        self._inner.setdefault(id(loader), made)
        return made

    def _check(self, loader: DataLoader[Any]) -> None:
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            raise RefusedError(
                "A loader without a batch sampler (an IterableDataset, or batch_size=None) cannot be sliced "
                f"by sample: {_WHOLE_BATCH}."
            )
        if not getattr(loader, "in_order", True):
            raise RefusedError("A loader with in_order=False cannot be sliced: set in_order=True.")
        if loader.batch_size is not None and loader.batch_size < self._ranks.size:
            raise RefusedError(
                f"batch_size={loader.batch_size} is smaller than the {self._ranks.size} workers that share "
                f"each batch. Use a batch of at least {self._ranks.size}, or fewer workers (--targets)."
            )


class MergedBatches:
    """A batch sampler that yields several batches of another one as one.

    Parameters
    ----------
    batches : iterable of list of int
        The other one.
    count : int
        How many.
    """

    def __init__(self, batches: Iterable[list[int]], count: int) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self._batches)
        while group := list(itertools.islice(batches, self._count)):
            yield [index for batch in group for index in batch]


def twin(
    loader: DataLoader[Any],
    batches: Iterable[list[int]],
    *,
    pinning: bool,
    loads_ahead: bool | None = None,
) -> DataLoader[Any]:
    """Return a loader like ``loader`` that draws ``batches``.

    Parameters
    ----------
    loader : DataLoader
        What it is like.
    batches : iterable of list of int
        What it draws.
    pinning : bool
        Whether it may pin memory.
    loads_ahead : bool or None
        Whether it loads ahead, in a process of its own; as ``loader`` does where it is None.
    """
    extra: dict[str, Any] = {}
    num_workers = _num_workers(loader, loads_ahead)
    if num_workers and loader.num_workers:
        extra = {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory and pinning,
        timeout=loader.timeout if num_workers else 0,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        **extra,
    )


def _num_workers(loader: DataLoader[Any], loads_ahead: bool | None) -> int:
    if loads_ahead is None:
        return loader.num_workers
    if not loads_ahead:
        return 0
    # A child that is forked cannot use the GPU: tensors there are as near as they can be.
    tensors = getattr(loader.dataset, "tensors", ())
    on_gpu = any(getattr(tensor, "is_cuda", False) for tensor in tensors)
    return loader.num_workers if on_gpu else max(1, loader.num_workers)
