"""The random number generators of a worker: made common where data is drawn, its own inside the model.

Every rank must draw the same permutation, and should drop other units. So code outside the model sees the
same state on every rank, and `ModelStream` swaps in a stream of the rank's own while the model runs.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader


def states(generators: list[torch.Generator]) -> dict[str, Any]:
    """Return the state of the process's generators and of ``generators``, as numbers, arrays and tensors."""
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generators": [generator.get_state() for generator in generators],
    }


def put(values: dict[str, Any], generators: list[torch.Generator]) -> None:
    """Set what `states` returned, on the same generators in the same order."""
    torch.set_rng_state(values["torch"])
    random.setstate(values["python"])
    np.random.set_state(values["numpy"])
    for generator, state in zip(generators, values["generators"], strict=True):
        generator.set_state(state)


def capture(generators: list[torch.Generator]) -> bytes:
    """Return `states` as bytes, for other ranks."""
    return pickle.dumps(states(generators), protocol=5)


def restore(data: bytes, generators: list[torch.Generator]) -> None:
    """Set what `capture` returned, on the same generators in the same order."""
    put(pickle.loads(data), generators)


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators that a loader draws with, each once."""
    holders = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    found: dict[int, torch.Generator] = {}
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    return list(found.values())


def generators_in(value: Any) -> list[torch.Generator]:
    """Return the generators that a variable is or draws with."""
    if isinstance(value, torch.Generator):
        return [value]
    return generators_of(value) if isinstance(value, DataLoader) else []


class ModelStream:
    """This rank's own random stream, in force while the model runs.

    Parameters
    ----------
    rank : int
        Ranks get different streams; the same rank gets the same one from the same common state.
    """

    def __init__(self, rank: int) -> None:
        digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8)
        seed = (int.from_bytes(digest.digest(), "big") + rank) % 2**63
        self._own = torch.Generator().manual_seed(seed).get_state()
        self._common: torch.Tensor | None = None
        if torch.cuda.is_available():
            torch.cuda.manual_seed(seed)

    def enter(self) -> None:
        """Set the rank's own state."""
        self._common = torch.get_rng_state()
        torch.set_rng_state(self._own)

    def leave(self) -> None:
        """Set the common state again."""
        if self._common is not None:
            self._own = torch.get_rng_state()
            torch.set_rng_state(self._common)
            self._common = None
