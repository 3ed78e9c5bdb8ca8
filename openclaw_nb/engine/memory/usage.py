"""What the memory of this process holds: parameters, gradients, optimizer state, other tensors, and the rest.

Each piece of memory counts once, however many tensors see it. Activations are an estimate: torch does not tell what a
graph keeps on a CPU, so it is what the process has grown by and no tensor that can be found explains. Knows torch's
objects, ``/proc`` and CUDA's counters; does not know advice.
"""

from __future__ import annotations

import gc
import re
import resource
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from openclaw_nb.core.host import available_memory_bytes
from openclaw_nb.engine.memory.recompute import find_blocks
from openclaw_nb.plan.memory import Usage

_ASKED = (
    re.compile(r"tried to allocate (?P<number>[\d.]+) (?P<unit>bytes|[KMGT]iB)", re.IGNORECASE),
    re.compile(r"Unable to allocate (?P<number>[\d.]+) (?P<unit>bytes|[KMGTP]iB)"),
)
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_STATES = {"SGD": 1, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 1, "Adagrad": 1}


@dataclass(frozen=True)
class Baseline:
    """What the process held before it held a person's tensors, and when the cell began; in bytes."""

    at_start: int
    at_cell: int


def resident_bytes() -> int:
    """Return the memory that this process occupies."""
    return int(psutil.Process().memory_info().rss)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had: on a CPU, torch raises a RuntimeError that says so."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    words = ("DefaultCPUAllocator", "not enough memory: you tried to allocate", "std::bad_alloc")
    return isinstance(error, RuntimeError) and any(word in text for word in words)


def requested_bytes(error: BaseException) -> int | None:
    """Return what an error says was asked for."""
    found = next((match for each in _ASKED if (match := each.search(str(error)))), None)
    if found is None:
        return None
    units = [unit.lower() for unit in _UNITS]
    return int(float(found["number"]) * 1024 ** units.index(found["unit"].lower()))


def take_usage(
    error: BaseException, baseline: Baseline, *, num_workers: int, in_use: Iterable[str], on_gpu: bool
) -> Usage:
    """Return what this process's memory holds, right after an error.

    Parameters
    ----------
    error : BaseException
        Says what was asked for; the frames that it keeps hold the activations.
    baseline : Baseline
        What was there before.
    num_workers : int
        How many share the training.
    in_use : iterable of str
        Settings of the cell; see `Usage`.
    on_gpu : bool
        Whether it is the GPU's memory that counts.
    """
    found = _Found(on_gpu)
    held = torch.cuda.memory_reserved(0) if on_gpu else resident_bytes()
    known = found.parameters + found.gradients + found.optimizer + found.tensors
    unexplained = held - known if on_gpu else held - baseline.at_start - known
    grown = unexplained if on_gpu else held - baseline.at_cell
    activations = max(0, min(unexplained, grown))
    largest = {} if not found.roots else {"model": found.roots[0]}
    blocks = [block for _, block in find_blocks(largest)]
    done, total = _progress(error, found.roots)
    parts = [sum(1 for part in block.modules() if not any(True for _ in part.children())) for block in blocks]
    return Usage(
        parameters=found.parameters,
        gradients=found.gradients,
        optimizer=found.optimizer,
        activations=activations,
        tensors=found.tensors,
        rest=max(0, held - known - activations),
        requested=requested_bytes(error),
        free=torch.cuda.mem_get_info(0)[0] if on_gpu else _free_bytes(),
        state=found.state,
        layers_done=done,
        num_layers=total,
        num_workers=num_workers,
        num_blocks=len(blocks),
        parts_per_block=max(1, sum(parts) // max(1, len(parts))),
        in_use=frozenset(in_use),
    )


def _progress(error: BaseException, roots: list[nn.Module]) -> tuple[int, int]:
    """Return how many layers a forward pass had come to when it failed, and of how many; (0, 0) outside of one.

    By the order in which the model has its layers, which is that of most passes.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    inside = {id(frame.f_locals.get("self")) for frame in frames}
    for root in roots:
        leaves = [module for module in root.modules() if not any(True for _ in module.children())]
        reached = [number for number, leaf in enumerate(leaves, start=1) if id(leaf) in inside]
        if reached and id(root) in inside:
            return reached[-1], len(leaves)
    return 0, 0


def _free_bytes() -> int:
    """Return what this process could still have: what the host has left, and what its own limit leaves."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    free = available_memory_bytes()
    if limit == resource.RLIM_INFINITY:
        return free
    return max(0, min(free, limit - int(psutil.Process().memory_info().vms)))


class _Found:
    """The sizes of what can be found in this process."""

    def __init__(self, on_gpu: bool) -> None:
        self._device, self._seen = "cuda" if on_gpu else "cpu", set[int]()
        objects = gc.get_objects()
        # By class, not by isinstance, which would wake lazy proxies.
        parameters = [each for each in objects if issubclass(type(each), nn.Parameter)]
        optimizers = [each for each in objects if issubclass(type(each), Optimizer)]
        self.roots = _outermost([each for each in objects if issubclass(type(each), nn.Module)])
        self.parameters = self._size(parameters)
        trained = [p for p in parameters if p.requires_grad]
        self.gradients = self._size(p.grad for p in trained if p.grad is not None)
        self.optimizer = self._size(_state_of(optimizers))
        others = (each for each in objects if issubclass(type(each), Tensor))
        self.tensors = self._size(each for each in others if not each.requires_grad and each.grad_fn is None)
        if not on_gpu:
            self.tensors += sum(
                each.nbytes for each in objects if type(each) is np.ndarray and each.base is None
            )
        to_come = sum(p.nbytes for p in trained)
        self.state = self.parameters + to_come + max(self.optimizer, _optimizer_to_come(optimizers))

    def _size(self, tensors: Iterable[Tensor]) -> int:
        size = 0
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
                if storage.device.type != self._device:  # "meta": only a shape, as torch's fakes have
                    continue
                place = storage.data_ptr()
            except (RuntimeError, NotImplementedError):  # one without memory of its own
                continue
            if place and place not in self._seen:
                self._seen.add(place)
                size += storage.nbytes()
        return size


def _state_of(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for values in optimizer.state.values():
            yield from (value for value in values.values() if isinstance(value, Tensor))


def _optimizer_to_come(optimizers: Iterable[Optimizer]) -> int:
    """Return what optimizers keep for each parameter after their first step, where it is known."""
    size = 0
    for optimizer in optimizers:
        copies = _STATES.get(type(optimizer).__name__, 0)
        for group in optimizer.param_groups:
            has_state = type(optimizer).__name__ not in ("SGD", "RMSprop") or bool(group.get("momentum"))
            size += sum(p.nbytes for p in group["params"]) * (copies if has_state else 0)
    return size


def _outermost(modules: list[Any]) -> list[nn.Module]:
    """Return the modules that are no part of others, the largest first."""
    inside = {id(part) for module in modules for part in module.modules() if part is not module}
    roots = [module for module in modules if id(module) not in inside]
    return sorted(roots, key=lambda module: -sum(p.numel() for p in module.parameters()))
