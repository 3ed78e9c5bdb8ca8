"""Where newcomers come into a running cell: at the head of a loop, with all that a rank which is there can give.

    at a head, all ranks:  do newcomers wait, or ranks want to leave?  ──no──> on with the loop
                              │ yes: can this head be entered?  (the first rank looks)
                              ▼
    the ranks go on in another group; the first gives       variables, objects, random state, how far the loops are
    a newcomer:            takes them, and runs the program that goes on at that head

Knows the cell's tree, its loops and its variables; what is trained, and how ranks meet, is the strategy's and
`Continuity`'s business.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from openclaw_nb.core.errors import CheckpointError, RefusedError
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.objects.names import tree_of
from openclaw_nb.engine.parallel.base import Strategy
from openclaw_nb.engine.reentry import bookmark, program
from openclaw_nb.engine.reentry.loops import LoopPlace, Loops
from openclaw_nb.engine.reentry.needs import names_needed
from openclaw_nb.engine.reentry.parcel import Parcel, pack, unpack
from openclaw_nb.engine.steps import randomness
from openclaw_nb.engine.steps.continuity import Continuity

_NOT_IN = "A new worker waits, and takes part when the cell has ended: {reasons}."


@dataclass(frozen=True)
class _Entry:
    """What a newcomer is given beside the variables; it travels with them.

    ``is_anew`` says that nothing of the cell has run in this process, and no variables came.
    """

    number: int
    places: dict[int, LoopPlace]
    random: bytes
    state: Any = None
    is_anew: bool = False


@dataclass(frozen=True)
class _Answer:
    """What is done at a head: newcomers come in, ranks leave; or why newcomers cannot come in."""

    lets_in: bool = False
    leaves: bool = False
    reason: str = ""


class Gate:
    """Lets newcomers into one cell; on a newcomer, the way in.

    Parameters
    ----------
    ranks : Ranks
        The cell's ranks.
    continuity : Continuity
        How they meet newcomers.
    namespace : dict
        The worker's variables.
    hidden : mapping
        Those that are the worker's own.
    notes : list of str
        Takes lines for the person.

    Attributes
    ----------
    loops : Loops
        The cell's loops.
    strategy : Strategy
        The cell's; set before the cell runs.
    has_ended : bool
        Whether nothing of the cell is left to run.
    """

    def __init__(
        self,
        ranks: Ranks,
        continuity: Continuity,
        namespace: dict[str, Any],
        hidden: Mapping[str, Any],
        notes: list[str],
    ) -> None:
        self._ranks, self._continuity = ranks, continuity
        self._namespace, self._hidden, self._notes = namespace, hidden, notes
        self.loops = Loops(
            self._at_head,
            self._on_entered,
            lambda: continuity.num_steps,
            lambda: self.strategy.is_void,
            lambda: self.strategy.begin_again(),
        )
        self.strategy: Strategy
        self._tree = ast.Module([], [])
        self._refused: dict[int, str] = {}
        self._parcel: tuple[int, Parcel] | None = None
        self._entry: _Entry | None = None
        self._head: int | None = None
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self.has_ended = False

    # ---------------------------------------------------------------------------------- the program

    def visit(self, tree: ast.Module) -> ast.Module:
        """Return the program that this worker runs for a cell; the shell calls this with the cell's tree."""
        self._tree = tree
        self._namespace[program.KEEPER] = self.loops
        if self.has_ended:
            return ast.Module([], [])
        if self._entry is None:
            return program.watch(tree)
        self.loops.resume(self._entry.places, self._entry.number)
        enter = program.enter_anew if self._entry.is_anew else program.enter
        return enter(tree, self._entry.number)

    def close(self) -> None:
        """Leave nothing in the namespace, and say who could not be let in."""
        self._namespace.pop(program.KEEPER, None)
        if self._refused and self._continuity.wishes.num_new:
            self._notes.append(_NOT_IN.format(reasons="; ".join(self._refused.values())))

    # ----------------------------------------------------------------------------------- letting in

    def _at_head(self, number: int, worked: bool) -> None:
        if worked and not self.loops.draws_at(number) and self.loops.is_between(number):
            self._head = number
            self.strategy.rest()
            self._head = None
        new, leaves = self.strategy.wishes if worked else (False, False)
        if not (leaves or (new and number not in self._refused)) or not self.loops.is_between(number):
            return
        answer: _Answer = self._continuity.agree(lambda: self._ranks.broadcast(self._answer(number)))
        if answer.reason:
            self._refused[number] = answer.reason
        if answer.lets_in:
            self._continuity.change(lambda: self._pack(number))
        elif answer.leaves:
            self._continuity.change(None)
        self._drop_parcel()

    def _drop_parcel(self) -> None:
        if self._parcel is not None:
            self._parcel[1].close()
            self._parcel = None

    def _answer(self, number: int) -> _Answer:
        """Return what is to be done at a head; the first rank's answer counts."""
        if self._ranks.rank:
            return _Answer()
        wishes = self._continuity.wishes
        if not wishes.num_new or number in self._refused:
            return _Answer(leaves=wishes.leaves)
        reason = self.strategy.why_not(wishes.num_ranks) or self._why_not(number)
        return _Answer(lets_in=not reason, leaves=wishes.leaves, reason=reason)

    def _why_not(self, number: int) -> str:
        """Return why no newcomer can enter at a head, or ""."""
        try:
            self._check_path(number)
            needed = names_needed(program.enter(self._tree, number))
        except RefusedError as error:
            return str(error)
        parcel = self._pack(number)
        missing = [f"`{name}` ({reason})" for name, reason in parcel.left.items() if name in needed]
        if missing:
            line = program.loops_of(self._tree)[number].lineno
            return f"the loop in line {line} needs {', '.join(missing)}, which cannot be sent"
        return ""

    def _check_path(self, number: int) -> None:
        """Refuse heads that do something else when they are evaluated once more."""
        loops = program.loops_of(self._tree)
        for each in program.path_to(self._tree, number):
            loop = loops[each]
            if not program.passes_on(loop):
                raise RefusedError(f"the head of the loop in line {loop.lineno} may not be evaluated twice")
            for value in program.values_in_head(loop):
                if isinstance(self._evaluate(value), Iterator):
                    raise RefusedError(
                        f"the loop in line {loop.lineno} goes over an iterator, `{ast.unparse(value)}`"
                    )

    def _evaluate(self, value: ast.expr) -> Any:
        try:
            return eval(compile(ast.Expression(value), "<head>", "eval"), self._namespace)
        except Exception:  # noqa: BLE001 - any code of the cell's; the newcomer will see the same error in its place
            return None

    def _pack(self, number: int) -> Parcel:
        if self._parcel is None or self._parcel[0] != number:
            self._drop_parcel()
            places = self.loops.places(program.path_to(self._tree, number))
            with self.strategy.plain():
                entry = _Entry(number, places, randomness.capture([]), self.strategy.export_state())
                hidden = {**self._hidden, program.KEEPER: None}
                self._parcel = number, pack(self._namespace, hidden, entry)
        return self._parcel[1]

    # ------------------------------------------------------------------------------------- going in

    def enter(self) -> Any:
        """Take on a newcomer what another rank gives; return the state for the strategy.

        Raises
        ------
        ReleasedError
            When the cell ends before.
        OpenClawError
            When what was given cannot be taken here.
        """
        state = self._continuity.enter(self._take)
        self._keep_generators()
        return state

    def _take(self, parcel: Parcel) -> Any:
        entry: _Entry = unpack(parcel.path, self._namespace, self._hidden)
        self._entry = entry
        if parcel.left:
            listed = ", ".join(f"`{name}` ({reason})" for name, reason in parcel.left.items())
            self._notes.append(f"what a new worker could not be sent: {listed}")
        return entry.state

    def _keep_generators(self) -> None:
        found = {id(g): g for value in self._namespace.values() for g in randomness.generators_in(value)}
        self._generators = [(generator, generator.get_state()) for generator in found.values()]

    # ------------------------------------------------------------------------- checkpoints, and resuming

    @property
    def can_mark(self) -> bool:
        """Whether what is here and now can be gone on from: not within a function that a loop of the cell calls."""
        return self._mark_at is not None or not self.loops.are_running

    @property
    def _mark_at(self) -> int | None:
        return self.loops.drawing if self._head is None else self._head

    def mark(self) -> dict[str, Any] | None:
        """Return where the cell is, for a checkpoint; None in a cell that is in none of its loops."""
        number = self._mark_at
        return None if number is None else bookmark.mark(self._tree, self.loops, number, self._namespace)

    def resume(self, place: Mapping[str, Any] | None, step: int, source: str) -> None:
        """Go on, when the cell of this source runs, from a place; the state that was kept with it is there already.

        Raises
        ------
        CheckpointError
            When there is no going on from there.
        """
        if place is None:
            raise CheckpointError(
                f"The checkpoint of step {step} was taken in a cell without loops of its own, which cannot be entered "
                "in its midst. Load the state with openclaw_nb.load_checkpoint and train the rest."
            )
        self.has_ended = bool(place.get("ended"))
        if not self.has_ended:  # looked into here, as the shell swallows errors of what makes a program
            found = bookmark.find(place, tree_of(source), self._namespace)
            self._namespace.update(found.names)
            self._keep_generators()
            self._entry = _Entry(found.number, found.places, randomness.capture([]), is_anew=True)

    def _on_entered(self) -> None:
        """Go on with the random numbers of the others: evaluating the loops' heads has drawn some."""
        assert self._entry is not None
        randomness.restore(self._entry.random, [])
        for generator, state in self._generators:
            generator.set_state(state)
