"""Times and sizes of a model's layers, noted while it runs.

A layer is a module without parts, or one that has parameters of its own and is not cut by stages, with all its parts.
Each is told with the stages' layer and the gathered layer that it is in, by the strategies' own rules. The backward
pass is counted to a layer as its forward pass is.

Knows modules and their hooks; does not know what is predicted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from openclaw_nb.engine.loss.record import map_tensors
from openclaw_nb.engine.profile.clock import now
from openclaw_nb.engine.sharding.layers import choose_layers
from openclaw_nb.engine.stages.layout import layer_names

_SPLIT = (nn.Linear, nn.Embedding, nn.MultiheadAttention)
_BATCHNORM = nn.modules.batchnorm._BatchNorm


def layers_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return the model's layers with their names."""
    found: dict[nn.Module, str] = {}
    stages = list(layer_names(model))

    def is_one(module: nn.Module, name: str) -> bool:
        """Whether what a module has itself keeps its parts together."""
        if next(module.parameters(recurse=False), None) is None:
            return False
        is_cut = any(each.startswith(f"{name}." if name else "") for each in stages)
        return not is_cut or isinstance(module, nn.MultiheadAttention)

    def visit(module: nn.Module, name: str) -> None:
        parts = list(module.named_children())
        if not parts or is_one(module, name):
            found.setdefault(module, name or type(module).__name__)
            return
        for part, child in parts:
            visit(child, f"{name}.{part}" if name else part)

    visit(model, "")
    return found


class LayerMeter:
    """Measures the layers of a model in its `measuring` block.

    Parameters
    ----------
    model : nn.Module
        The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = layers_of(model)
        self._order: list[nn.Module] = []
        self._inside: list[tuple[nn.Module, float]] = []
        self._present: dict[nn.Module, float] = {}
        self._seconds: dict[nn.Module, list[float]] = defaultdict(list)
        self._sizes: dict[nn.Module, tuple[int, int]] = {}
        self._saved: dict[nn.Module, int] = defaultdict(int)
        self._most_saved: dict[nn.Module, int] = {}
        self._seen: set[int] = set()
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure in the ``with`` block."""
        handles: list[Any] = [self._model.register_forward_pre_hook(self._begin, prepend=True)]
        for layer in self._names:
            handles.append(layer.register_forward_pre_hook(self._enter))
            handles.append(layer.register_forward_hook(self._leave, prepend=True))
        handles.append(self._model.register_forward_hook(self._end))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, *_: Any) -> None:
        self._present, self._saved, self._seen, self._inside = {}, defaultdict(int), set(), []

    def _enter(self, layer: nn.Module, _: Any) -> None:
        if layer not in self._order:
            self._order.append(layer)
        self._inside.append((layer, now()))

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        _, began = self._inside.pop()
        self._present[layer] = self._present.get(layer, 0.0) + now() - began
        self._sizes[layer] = _bytes_in(args), _bytes_in(output)

    def _end(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            for layer, seconds in self._present.items():
                self._seconds[layer].append(seconds)
            self._most_saved = dict(self._saved)

    def _save(self, tensor: Tensor) -> Tensor:
        where = tensor.untyped_storage().data_ptr()
        layer = self._inside[-1][0] if self._inside else (self._order[-1] if self._order else None)
        if layer is not None and where not in self._parameters and where not in self._seen:
            self._seen.add(where)
            self._saved[layer] += tensor.untyped_storage().nbytes()
        return tensor.detach()

    def report(self, model_seconds: float) -> dict[str, Any]:
        """Return what was measured.

        Parameters
        ----------
        model_seconds : float
            Of forward and backward without these hooks; shared out by the layers' forward passes.
        """
        own, again = _own_parameters(self._order)
        rest = sum(p.nbytes for p in self._model.parameters()) - sum(own.values())
        if self._order:
            own[self._order[-1]] += rest  # of what is called in no layer
        forward = {layer: median(self._seconds.get(layer) or [0.0]) for layer in self._order}
        factor = model_seconds / (sum(forward.values()) or 1.0)
        parts, units = list(layer_names(self._model)), choose_layers(self._model)
        layers = [
            {
                "name": self._names[layer],
                "seconds": forward[layer] * factor,
                "part": _holder(self._names[layer], parts),
                "unit": _holder(self._names[layer], units),
                "parameter_bytes": own[layer],
                "shared_bytes": again[layer],
                "input_bytes": self._sizes[layer][0],
                "output_bytes": self._sizes[layer][1],
                "saved_bytes": self._most_saved.get(layer, 0),
                "splits": isinstance(layer, _SPLIT),
            }
            for layer in self._order
        ]
        num_batchnorms = sum(isinstance(module, _BATCHNORM) for module in self._model.modules())
        return {"layers": layers, "num_batchnorms": num_batchnorms}


def _holder(name: str, holders: Sequence[str]) -> str:
    """Return which of the modules a layer is, or is in; "" when none."""
    return next((each for each in holders if name == each or name.startswith(f"{each}.")), "")


def _own_parameters(order: Iterable[nn.Module]) -> tuple[dict[nn.Module, int], dict[nn.Module, int]]:
    """Return each layer's bytes of parameters that no layer before has, and of those that one has."""
    seen: set[int] = set()
    own: dict[nn.Module, int] = {}
    again: dict[nn.Module, int] = {}
    for layer in order:
        mine = {id(p): p.nbytes for p in layer.parameters()}
        own[layer] = sum(size for number, size in mine.items() if number not in seen)
        again[layer] = sum(mine.values()) - own[layer]
        seen |= mine.keys()
    return own, again


def _bytes_in(values: Any) -> int:
    total = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    map_tensors(count, values)
    return total
