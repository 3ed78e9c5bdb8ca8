"""The settings of a GPU's memory for the time of a cell; where there is no GPU, it is said that they do nothing.

Knows torch's CUDA allocator; does not know cells.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from openclaw_nb.strategies.memory import Memory


@contextmanager
def memory_limited(memory: Memory, notes: list[str], *, has_gpu: bool) -> Iterator[None]:
    """Apply a cell's memory settings to this worker while the block runs.

    Parameters
    ----------
    memory : Memory
        What is asked for.
    notes : list of str
        Lines for the person are added.
    has_gpu : bool
        Whether this worker has one; it is the process's first.
    """
    if not has_gpu:
        notes += [
            f"{name}: not applicable: this worker has no GPU, and a CPU's memory is the operating system's"
            for name, is_asked in _asked(memory).items()
            if is_asked
        ]
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction(0)
    if memory.gpu_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(memory.gpu_fraction, 0)
    if memory.pooling:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        yield
    finally:
        if memory.gpu_fraction is not None:
            torch.cuda.set_per_process_memory_fraction(before, 0)
        if memory.pooling:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def _asked(memory: Memory) -> dict[str, bool]:
    return {"memory_pooling": memory.pooling, "gpu_memory_fraction": memory.gpu_fraction is not None}


def has_gpu() -> bool:
    """Return whether this worker has a GPU."""
    return os.environ.get("OPENCLAW_DEVICE", "").startswith("GPU") and torch.cuda.is_available()
