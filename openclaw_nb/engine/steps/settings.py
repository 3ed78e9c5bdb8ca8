"""What a cell adapts while it trains, such as a loss scale: made equal again when local steps are averaged.

A rank that steps by itself shows its scalers and schedulers its own losses only. Of scalers the smallest scale is
taken, as it overflows on no rank; of schedulers, and of what they set in the optimizers, rank 0's.

Knows scalers, schedulers and optimizers; does not know when ranks average, nor their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.objects.find import Objects
from openclaw_nb.engine.variables import digest

_OF_SCALERS = ("scale", "_growth_tracker")


class Settings:
    """The adapted settings of one rank.

    Parameters
    ----------
    ranks : Ranks
        The ranks whose settings are to be the same.
    objects : Objects
        Their scalers, schedulers and optimizers.
    """

    def __init__(self, ranks: Ranks, objects: Objects) -> None:
        self._ranks, self._objects = ranks, objects

    def __str__(self) -> str:
        """Return a text that is the same on ranks with the same settings."""
        return digest([self._scales(), self._schedules()], depth=8)

    def make_equal(self) -> str:
        """Give all ranks the same settings. Every rank calls this, when they are not the same on all.

        Returns
        -------
        str
            What was done, in words.
        """
        words = [*self._equal_scales(), *self._equal_schedules()]
        return (
            f"the workers adapt to their own losses and had come apart: at an average {' and '.join(words)}"
        )

    def _scales(self) -> list[list[float]]:
        states = [scaler.state_dict() for scaler in self._objects.scalers.values()]
        return [[float(state[name]) for name in _OF_SCALERS] for state in states if state]

    def _schedules(self) -> list[Any]:
        states = [scheduler.state_dict() for scheduler in self._objects.schedulers.values()]
        return [states, [{k: v for k, v in group.items() if k != "params"} for group in self._groups()]]

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._objects.optimizers.values():
            yield from optimizer.param_groups

    def _equal_scales(self) -> list[str]:
        scalers = {name: s for name, s in self._objects.scalers.items() if s.is_enabled()}
        if not scalers:
            return []
        rows = self._ranks.gather(torch.tensor(self._scales(), dtype=torch.float64).reshape(-1))
        least = rows.amin(dim=0).view(-1, len(_OF_SCALERS)).tolist()
        for scaler, (scale, tracker) in zip(scalers.values(), least, strict=True):
            state = scaler.state_dict() | {"scale": scale, "_growth_tracker": int(tracker)}
            scaler.load_state_dict(state)
        return [f"the smallest scale of {', '.join(scalers)} is used"]

    def _equal_schedules(self) -> list[str]:
        states, settings = self._ranks.broadcast(self._schedules())
        for scheduler, state in zip(self._objects.schedulers.values(), states, strict=True):
            scheduler.load_state_dict(state)
        for group, values in zip(self._groups(), settings, strict=True):
            for name, value in values.items():
                _set(group, name, value)
        names = ", ".join([*self._objects.schedulers, *self._objects.optimizers])
        return [f"rank 0's state of the schedule is used ({names})"]


def _set(group: dict[str, Any], name: str, value: Any) -> None:
    """Set one setting; a tensor, such as a learning rate on a GPU, in place."""
    if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
        group[name].copy_(value)
    else:
        group[name] = value
