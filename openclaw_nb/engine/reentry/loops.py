"""The keeper of a cell's loops: counts their iterations, tells of their heads, and resumes them on a newcomer.

    for x in ITEMS  ──>  for x in keeper.over(0, ITEMS)      the program is `program`'s
                            ├─ at_head(0, True)   another rank may have to be let in here
                            └─ next item        what loaders begin meanwhile belongs to this loop

When a batch has to be trained once more, the loop that gave it evaluates its head again and goes back to it, so that
what counts in the head (`enumerate`, `islice`, `zip`) counts it once.

Knows numbers of loops and passes of loaders; does not know ranks or syntax trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Head = Callable[[], Iterable[Any]]


@dataclass
class Pass:
    """One pass of a loader.

    Attributes
    ----------
    start : bytes
        The common random state at its beginning.
    drawn_from : bytes
        That from which its batches were drawn; empty before the first one.
    given : int
        How many batches the cell has got, those that came again among them.
    taken : int
        How many different ones.
    num_unsettled : int
        How many of the last ones may have to come again.
    is_over : bool
        Whether it has ended, or another takes its place.
    """

    start: bytes
    given: int = 0
    taken: int = 0
    num_unsettled: int = 0
    is_over: bool = False
    drawn_from: bytes = b""

    @property
    def has_repeated(self) -> bool:
        """Whether its iterator has given a batch more than once."""
        return self.given > self.taken


@dataclass(frozen=True)
class LoopPlace:
    """How far a loop is.

    Attributes
    ----------
    given : int
        How many items its body has got.
    passes : list of Pass
        The passes of loaders that its head has begun, in that order.
    """

    given: int
    passes: list[Pass]


@dataclass
class _Loop:
    given: int = 0
    passes: list[Pass] = field(default_factory=list)
    resumed: list[Pass] = field(default_factory=list)


class Loops:
    """The loops of one cell.

    Parameters
    ----------
    at_head : callable
        Told the number of a loop whose next iteration is about to begin, before anything of it has run, and whether
        the iteration before it has worked. All ranks are at the same head then: work is done by all of them together.
    on_entered : callable
        Called once on a newcomer when the loop that it enters is about to give its first item.
    work : callable
        Returns a number that grows with the work that is done.
    repeats : callable
        Returns whether the present batch has to come again.
    on_back : callable
        Called when a loop has gone back, before it gives the batch again.
    """

    def __init__(
        self,
        at_head: Callable[[int, bool], None] = lambda number, worked: None,
        on_entered: Callable[[], None] = lambda: None,
        work: Callable[[], int] = lambda: 0,
        repeats: Callable[[], bool] = lambda: False,
        on_back: Callable[[], None] = lambda: None,
    ) -> None:
        self._at_head = at_head
        self._on_entered = on_entered
        self._work = work
        self._repeats, self._on_back = repeats, on_back
        self._heads: list[tuple[int, int]] = []
        self._loops: dict[int, _Loop] = {}
        self._inside: list[int] = []
        self._places: dict[int, LoopPlace] = {}
        self._entered = -1
        self._first: set[int] = set()
        self._open: list[Pass] = []

    # ---------------------------------------------------------------------------- the cell's program

    def over(
        self, number: int, items: Iterable[Any], again: Head | None = None, values: Head = tuple
    ) -> Iterator[Any]:
        """Yield the items of a ``for`` loop; a newcomer's go on where the others' are.

        Parameters
        ----------
        number : int
            Of the loop.
        items : iterable
            What its head was.
        again : callable, optional
            Evaluates the head once more.
        values : callable
            Returns what the head reads. Iterators among them do not begin anew.
        """
        __tracebackhide__ = True
        yield from self._items(number, self._begin(number, items), again, values)

    def resumed(
        self, number: int, items: Iterable[Any], again: Head | None = None, values: Head = tuple
    ) -> Iterator[Any]:
        """Yield a first item for the iteration that is under way, then those that come after it."""
        __tracebackhide__ = True
        iterator = self._begin(number, items)
        self._first.add(number)
        yield None
        yield from self._items(number, iterator, again, values)

    def _items(self, number: int, iterator: Iterator[Any], again: Head | None, values: Head) -> Iterator[Any]:
        __tracebackhide__ = True
        while True:
            self._tell_head(number)
            if again is not None and self._repeats() and not any(isinstance(v, Iterator) for v in values()):
                iterator = self._go_back(number, again) or iterator
            try:
                item = self._next(number, iterator)
            except StopIteration:
                return
            self._loops[number].given += 1
            yield item

    def is_first(self, number: int) -> bool:
        """Whether this iteration of a loop is the one that was under way; True once."""
        first = number in self._first
        self._first.discard(number)
        return first

    def begins(self, number: int) -> bool:
        """Whether a ``while`` loop is to go on with the iteration that is under way; True once."""
        if number not in self._places:
            return False
        del self._places[number]
        self._loops[number] = _Loop()
        self._first.add(number)
        return True

    def again(self, number: int) -> bool:
        """Tell of the head of a ``while`` loop; always True."""
        if number == self._entered:
            self._enter(number)
        self._loops.setdefault(number, _Loop())
        self._tell_head(number)
        return True

    def _tell_head(self, number: int) -> None:
        before, now = self._leave_inner(number), self._work()
        self._heads.append((number, now))
        self._at_head(number, before is not None and before < now)

    def _leave_inner(self, number: int) -> int | None:
        """Forget the heads of loops that have ended inside of this one; return the work done at its last head."""
        if all(other != number for other, _ in self._heads):
            return None
        while True:
            other, work = self._heads.pop()
            if other == number:
                return work

    def _begin(self, number: int, items: Iterable[Any]) -> Iterator[Any]:
        place = self._places.pop(number, None)
        self._leave_inner(number)
        loop = self._loops[number] = _Loop()
        if place is not None:
            loop.resumed = list(place.passes)
        self._inside.append(number)
        try:
            iterator = iter(items)
            for _ in range(place.given if place is not None else 0):
                next(iterator)
                loop.given += 1
        finally:
            self._inside.pop()
        if number == self._entered:
            self._enter(number)
        return iterator

    def _go_back(self, number: int, again: Head) -> Iterator[Any] | None:
        """Return the items from the first on that has to come again; None when this loop did not give it."""
        loop = self._loops[number]
        passes = [each for each in loop.passes if not each.is_over]
        num_back = max((each.num_unsettled for each in passes), default=0)
        if not num_back:
            return None
        before = [
            replace(
                each,
                given=each.given - each.num_unsettled,
                taken=each.taken - each.num_unsettled,
                num_unsettled=0,
            )
            for each in loop.passes
        ]
        for each in passes:
            self.end_pass(each)
        self._places[number] = LoopPlace(loop.given - num_back, before)
        iterator = self._begin(number, again())
        self._on_back()
        return iterator

    def _enter(self, number: int) -> None:
        self._entered = -1
        self._on_entered()

    def _next(self, number: int, iterator: Iterator[Any]) -> Any:
        self._inside.append(number)
        try:
            return next(iterator)
        finally:
            self._inside.pop()

    # ------------------------------------------------------------------------------------- loaders

    def begin_pass(self, begun: Pass) -> None:
        """Take note of a pass of a loader that begins."""
        self._open.append(begun)
        if self._inside:
            self._loops[self._inside[-1]].passes.append(begun)

    def end_pass(self, ended: Pass) -> None:
        """Take note that a pass has ended, or that its loop was left."""
        ended.is_over = True
        self._open = [each for each in self._open if each is not ended]

    def is_between(self, number: int) -> bool:
        """Whether no batch is worked on at the head of a loop: all passes that are open are begun by this head."""
        own = self._loops[number].passes
        return all(any(each is begun for begun in own) for each in self._open)

    @property
    def drawing(self) -> int | None:
        """The number of the loop whose head draws its next item now; None when none does."""
        return self._inside[-1] if self._inside else None

    @property
    def have_repeated(self) -> bool:
        """Whether a pass that is open has given a batch more than once."""
        return any(each.has_repeated for each in self._open)

    @property
    def are_running(self) -> bool:
        """Whether the cell has loops that have begun."""
        return bool(self._heads)

    def draws_at(self, number: int) -> bool:
        """Whether the head of a loop has begun passes of loaders that are not over."""
        return any(not each.is_over for each in self._loops[number].passes)

    @property
    def is_resuming(self) -> bool:
        """Whether a head that is evaluated now is that of a loop which goes on in its midst."""
        return bool(self._places) or bool(self._inside and self._loops[self._inside[-1]].resumed)

    def resumed_pass(self) -> Pass | None:
        """Return the pass that a loader which is iterated now has to take up; None for one that is new."""
        loop = self._loops.get(self._inside[-1]) if self._inside else None
        if loop is None or not loop.resumed:
            return None
        found = replace(loop.resumed.pop(0))
        self.begin_pass(found)
        return found

    # ------------------------------------------------------------------------------------- newcomers

    def places(self, path: Sequence[int]) -> dict[int, LoopPlace]:
        """Return how far the loops of a path are."""
        return {n: LoopPlace(self._loops[n].given, self._loops[n].passes) for n in path}

    def resume(self, places: dict[int, LoopPlace], number: int) -> None:
        """Let the loops go on at these places when they are entered, down to the head of loop ``number``."""
        self._places = dict(places)
        self._entered = number
