"""How a cell's models compute, as every strategy hangs it onto them: their precision, and what is computed twice.

    Computing(...)     read, and refused, before anything has changed
    install            around the modules' own code, inside of what a strategy hangs onto the model, until ended

Knows what a cell is told and its objects; does not know how they are made parallel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.memory.recompute import Recompute
from openclaw_nb.engine.objects.find import Objects
from openclaw_nb.engine.parallel.base import CellContext
from openclaw_nb.engine.precision.cell import CellPrecision
from openclaw_nb.strategies.memory import Memory
from openclaw_nb.strategies.precision import Precision


class Computing:
    """The precision and the memory settings of one cell.

    Parameters
    ----------
    context : CellContext
        The cell; lines for the person are added to its notes.
    objects : Objects
        Its objects.
    agree : callable, optional
        Returns whether an overflow was on any rank; not needed where ranks have the same gradients.

    Attributes
    ----------
    objects : Objects
        The cell's, with the loss scale, if there is one, among the scalers.
    precision : CellPrecision
        What the models compute in.
    blocks : dict of str to nn.Module
        What is computed twice, by name.

    Raises
    ------
    RefusedError
        For layers or blocks that are not there, or cannot be treated so.
    """

    def __init__(
        self, context: CellContext, objects: Objects, agree: Callable[[bool], bool] | None = None
    ) -> None:
        options, is_trial = context.spec.options, context.publisher.is_trial
        self.precision = CellPrecision(Precision.told(options), objects, is_trial=is_trial, agree=agree)
        self.objects = self.precision.objects
        self._recompute = Recompute(objects.models, Memory.told(options).activation_checkpointing)
        self.blocks = self._recompute.blocks
        context.notes.extend(self.precision.notes)
        if names := self._recompute.names:
            context.notes.append(
                f"{len(names)} blocks are computed a second time in the backward pass, and not kept: {', '.join(names)}"
            )

    def install(self) -> list[Callable[[], None]]:
        """Begin; return what ends it, in the order in which it was begun."""
        undo: list[Callable[[], None]] = []
        for each in (self.precision, self._recompute):
            each.install()
            undo.append(each.remove)
        return undo


def on_any(ranks: Ranks) -> Callable[[bool], bool]:
    """Return what finds out whether something is so on any rank; all ranks call it alike."""

    def agree(is_so: bool) -> bool:
        return bool(ranks.gather(torch.tensor([float(is_so)])).any())

    return agree
