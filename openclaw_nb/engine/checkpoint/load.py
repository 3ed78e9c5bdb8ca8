"""Loads checkpoints into objects: all of a cell's, or those that a person names.

    from openclaw_nb.engine.checkpoint.load import load
    load("runs/a", model=model, optimizer=optimizer)

Knows checkpoints and objects; the files are the catalog's, and what is compared and copied `state`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from openclaw_nb.core.errors import CheckpointError
from openclaw_nb.engine.checkpoint import state
from openclaw_nb.engine.checkpoint.catalog import TENSORS, Checkpoint, find_newest
from openclaw_nb.engine.checkpoint.tensors import read_tensors
from openclaw_nb.engine.checkpoint.tree import decode
from openclaw_nb.engine.objects.find import Objects

_ROLES: dict[str, type | tuple[type, ...]] = {
    "models": nn.Module,
    "optimizers": Optimizer,
    "schedulers": LRScheduler,
    "scalers": torch.amp.GradScaler,
}


def load_into(objects: Objects, checkpoint: Checkpoint, *, some: bool = False) -> None:
    """Put a checkpoint's state into objects, in place.

    Parameters
    ----------
    objects : Objects
        A cell's objects.
    checkpoint : Checkpoint
        A valid one, from `find_newest`.
    some : bool
        Whether it is only for those objects that are there; the random numbers are left alone then.

    Raises
    ------
    CheckpointError
        When the objects are not those of the checkpoint; nothing has changed then.
    """
    content = checkpoint.state()
    tensors = read_tensors(checkpoint.path / TENSORS, content["aliases"])
    state.restore(objects, content, checkpoint.about["models"], tensors, some=some)


def place_of(checkpoint: Checkpoint) -> Any:
    """Return where in its loops the cell was, as `Checkpointer.place` has told it; None when it was not told."""
    content = checkpoint.state()
    return decode(content["place"], read_tensors(checkpoint.path / TENSORS, content["aliases"]))


def load(directory: str | Path, **objects: Any) -> Checkpoint:
    """Load the newest valid checkpoint of a directory into objects that are there, in place.

    Parameters
    ----------
    directory : str or Path
        What ``--checkpoint`` was given.
    **objects
        A model, an optimizer, a scheduler, a scaler, by the names that they had in the cell; those that are not given
        are left alone.

    Returns
    -------
    Checkpoint
        Which one it was: its ``step``, and in ``skipped`` the newer ones that are not valid, with the reasons.

    Raises
    ------
    CheckpointError
        When there is none, none is valid, or the objects are not those of the checkpoint; nothing has changed then.
    """
    found = find_newest(directory)
    if found is None:
        raise CheckpointError(
            f"There is no checkpoint in {directory}. Give the directory of --checkpoint DIR."
        )
    load_into(_sorted_out(objects), found, some=True)
    return found


def _sorted_out(objects: dict[str, Any]) -> Objects:
    found: dict[str, dict[str, Any]] = {role: {} for role in [*_ROLES, "loaders"]}
    for name, value in objects.items():
        role = next((role for role, kind in _ROLES.items() if isinstance(value, kind)), None)
        if role is None:
            raise CheckpointError(
                f"{name} is a {type(value).__name__}: a checkpoint is loaded into models, optimizers, schedulers and "
                "scalers."
            )
        found[role][name] = value
    return Objects(**found, aliases={}, ignored=(), built=())
