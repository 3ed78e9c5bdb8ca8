"""Loaders whose batches have fewer samples, as those of one of several workers have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from openclaw_nb.engine.steps.loaders import twin


class FirstParts:
    """A batch sampler that yields the first part of each batch of another one.

    Parameters
    ----------
    batches : iterable of list of int
        The other one.
    num_parts : int
        In how many parts a batch is divided; the first is the largest.
    sizes : list of int
        The sizes of whole batches are appended.
    """

    def __init__(self, batches: Iterable[list[int]], num_parts: int, sizes: list[int]) -> None:
        self._batches, self._num_parts, self._sizes = batches, num_parts, sizes

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            self._sizes.append(len(batch))
            yield batch[: -(-len(batch) // self._num_parts)]


@contextmanager
def first_parts(num_parts: int) -> Iterator[list[int]]:
    """Let each training loader give the first part of its batches; the list gets the sizes of the whole ones."""
    plain = DataLoader.__iter__
    inside, sizes = False, list[int]()

    def iterate(loader: DataLoader[Any]) -> Any:
        nonlocal inside
        if inside or loader.batch_sampler is None or not torch.is_grad_enabled():
            return plain(loader)
        inside = True
        try:
            return plain(twin(loader, FirstParts(loader.batch_sampler, num_parts, sizes), pinning=True))
        finally:
            inside = False

    DataLoader.__iter__ = iterate  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        DataLoader.__iter__ = plain  # type: ignore[method-assign]
