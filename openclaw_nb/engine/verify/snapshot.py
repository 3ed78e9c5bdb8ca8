"""The state that a cell may change, taken and put back in place: objects keep their identity.

    names ──> modules, optimizers, schedulers, scalers, loaders, tensors, arrays, containers, own objects ──> put back

Knows Python's and torch's objects; does not know what happens in between.
"""

from __future__ import annotations

import collections
import copy
import io
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.steps import randomness

_HAVE_STATE = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
# What gives each value once: there is no way to ask for its position.
_ONE_WAY = (types.GeneratorType, types.AsyncGeneratorType, io.IOBase, zip, map, filter, enumerate)


class Snapshot:
    """The state of everything that can be reached from some names.

    Parameters
    ----------
    namespace : mutable mapping
        The worker's variables.
    used : set of str
        The names that the cell uses.

    Raises
    ------
    RefusedError
        When the cell uses something whose state cannot be put back, such as a generator or an open file.
    """

    def __init__(self, namespace: MutableMapping[str, Any], used: set[str]) -> None:
        for name in sorted(used & namespace.keys()):
            if isinstance(namespace[name], _ONE_WAY):
                raise RefusedError(
                    f"{name!r} is a {type(namespace[name]).__name__}, whose position cannot be put back after the cell "
                    "was tried out. Let the cell make it itself, or keep a list."
                )
        self._namespace = namespace
        self._bindings = dict(namespace)
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []
        self._generators: list[torch.Generator] = []
        for name, value in namespace.items():
            if not name.startswith("_"):
                self._note(value)
        self._random = randomness.capture(self._generators)

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for undo in self._undo:
                undo()
        randomness.restore(self._random, self._generators)
        for name in self._namespace.keys() - self._bindings.keys():
            del self._namespace[name]
        self._namespace.update(self._bindings)

    def _note(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, type | types.ModuleType | types.FunctionType):
            return
        self._seen[id(value)] = value
        for keep in (_keep_module, _keep_stateful, _keep_loader, _keep_array, _keep_container, _keep_own):
            found = keep(value)
            if found is not None:
                undo, parts = found
                self._undo.append(undo)
                self._generators += parts if keep is _keep_loader else []
                for part in () if keep is _keep_loader else parts:
                    self._note(part)
                return


_Kept = tuple[Callable[[], None], list[Any]]


def _keep_module(value: Any) -> _Kept | None:
    if not isinstance(value, nn.Module):
        return None
    tensors = [_tensor_state(t) for t in (*value.parameters(), *value.buffers())]
    modes = [(module, module.training) for module in value.modules()]
    own = [vars(module) for module in value.modules() if type(module).__module__ == "__main__"]
    plain = [
        (fields, {k: v for k, v in fields.items() if isinstance(v, int | float | str | bool)})
        for fields in own
    ]

    def undo() -> None:
        for put_back in tensors:
            put_back()
        for module, training in modes:
            module.training = training
        for fields, before in plain:
            fields.update(before)

    return undo, []


def _tensor_state(tensor: Tensor) -> Callable[[], None]:
    value, grad, needed = tensor.detach().clone(), tensor.grad, tensor.requires_grad
    kept = None if grad is None else grad.detach().clone()

    def undo() -> None:
        tensor.data.copy_(value)
        if tensor.is_leaf:
            tensor.requires_grad_(needed)
            tensor.grad = grad
            if grad is not None and kept is not None:
                grad.copy_(kept)

    return undo


def _keep_stateful(value: Any) -> _Kept | None:
    if not isinstance(value, _HAVE_STATE):
        return None
    state = copy.deepcopy(value.state_dict())
    loose = {"_per_optimizer_states"} & vars(value).keys()  # a scaler's, of a step that was not finished

    def undo() -> None:
        value.load_state_dict(copy.deepcopy(state))
        for name in loose:
            getattr(value, name).clear()

    return undo, []


def _keep_loader(value: Any) -> _Kept | None:
    if not isinstance(value, DataLoader):
        return None
    return (lambda: None), randomness.generators_of(value)


def _keep_array(value: Any) -> _Kept | None:
    if isinstance(value, Tensor):
        return _tensor_state(value), []
    if isinstance(value, np.ndarray) and value.flags.writeable:
        before = value.copy()
        return (lambda: np.copyto(value, before)), []
    return None


def _keep_container(value: Any) -> _Kept | None:
    if isinstance(value, list | bytearray | collections.deque):
        items = list(value)

        def refill() -> None:
            value.clear()
            value.extend(items)

        return refill, items if not isinstance(value, bytearray) else []
    if isinstance(value, dict | set):
        before = copy.copy(value)

        def update() -> None:
            value.clear()
            value.update(before)

        return update, list(before.values()) if isinstance(before, dict) else []
    if isinstance(value, tuple):
        return (lambda: None), list(value)
    return None


def _keep_own(value: Any) -> _Kept | None:
    """Keep the fields of an object whose class the notebook has defined."""
    fields = getattr(value, "__dict__", None)
    if type(value).__module__ != "__main__" or not isinstance(fields, dict):
        return None
    before = dict(fields)

    def undo() -> None:
        fields.clear()
        fields.update(before)

    return undo, list(before.values())


def modules_in(namespace: Mapping[str, Any]) -> Iterator[nn.Module]:
    """Yield the modules that have a name."""
    yield from {id(m): m for m in namespace.values() if isinstance(m, nn.Module)}.values()
