"""The state that a cell may change, taken and put back in place: objects keep their identity.

    names ──> modules, optimizers, schedulers, scalers, loaders, tensors, arrays, containers, own objects ──> put back

Knows Python's and torch's objects; does not know what happens in between.
"""

from __future__ import annotations

import collections
import collections.abc
import copy
import functools
import io
import random
import re
import types
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from openclaw_nb.core.errors import OpenClawError, RefusedError
from openclaw_nb.engine.steps import randomness

_HAVE_STATE = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
# What gives each value once: there is no way to ask for its position.
_ONE_WAY = (collections.abc.Iterator, types.AsyncGeneratorType, io.IOBase)
_PLAIN = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.FunctionType)
_OF_IPYTHON = re.compile(r"_+\d*|_i+\d*|_[iod]h|_oh|__\w+__|In|Out|exit|quit|get_ipython")


class Snapshot:
    """The state of everything that can be reached from some names.

    Parameters
    ----------
    namespace : mutable mapping
        The worker's variables.
    used : set of str
        The names that the cell uses.
    held : sequence
        Objects that the cell uses and that may have no name of their own.

    Raises
    ------
    RefusedError
        When the cell uses something whose state cannot be put back, such as a generator or an open file.
    """

    def __init__(self, namespace: MutableMapping[str, Any], used: set[str], held: Sequence[Any] = ()) -> None:
        for name in sorted(used & namespace.keys()):
            if isinstance(namespace[name], _ONE_WAY):
                raise RefusedError(
                    f"{name!r} is a {type(namespace[name]).__name__}, whose position cannot be put back after the cell "
                    "was tried out. Let the cell make it itself, or keep a list."
                )
        self._namespace = namespace
        self._bindings = dict(namespace)
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], Any]] = []
        self._generators: list[torch.Generator] = []
        waiting = [value for name, value in namespace.items() if not _OF_IPYTHON.fullmatch(name)]
        waiting += held
        while waiting:
            value = waiting.pop()
            if not isinstance(value, _PLAIN):
                waiting += self._note(value)
        self._random = randomness.capture(self._generators)

    def restore(self) -> None:
        """Put everything back.

        Raises
        ------
        OpenClawError
            When something cannot be; all else is.
        """
        errors = []
        with torch.no_grad():
            for undo in self._undo:
                try:
                    undo()
                except Exception as error:  # noqa: BLE001 - the rest must be put back all the same; raised below
                    errors.append(error)
        randomness.restore(self._random, self._generators)
        for name in self._namespace.keys() - self._bindings.keys():
            del self._namespace[name]
        self._namespace.update(self._bindings)
        if errors:
            raise OpenClawError(
                f"{len(errors)} objects could not be put back as they were; the first: {errors[0]}"
            )

    def _note(self, value: Any) -> list[Any]:
        """Keep the state of one object; return what it consists of."""
        if id(value) in self._seen:
            return []
        self._seen[id(value)] = value
        if isinstance(value, DataLoader):
            self._generators += randomness.generators_of(value)
        for keep in _KEEPERS:
            found = keep(value)
            if found is not None:
                undo, parts = found
                self._undo.append(undo)
                return parts
        return []


_Kept = tuple[Callable[[], Any], list[Any]]


def _keep_module(value: Any) -> _Kept | None:
    if not isinstance(value, nn.Module):
        return None
    tensors = [_tensor_state(t) for t in (*value.parameters(), *value.buffers())]
    # With the dictionaries of its parameters, buffers, parts and hooks.
    fields = [vars(module) for module in value.modules()]
    before = [(each, dict(each)) for each in fields]
    inside = [(d, copy.copy(d)) for each in fields for d in each.values() if isinstance(d, dict)]

    def undo() -> None:
        for each, saved in (*before, *inside):
            each.clear()
            each.update(saved)
        for put_back in tensors:
            put_back()

    return undo, [v for each in fields for v in each.values() if not isinstance(v, dict | nn.Module)]


def _keep_optimizer(value: Any) -> _Kept | None:
    if not isinstance(value, torch.optim.Optimizer):
        return None
    groups, state = list(value.param_groups), {p: dict(s) for p, s in value.state.items()}
    settings = [dict(group) for group in groups]
    tensors = [_tensor_state(t) for s in state.values() for t in s.values() if isinstance(t, Tensor)]

    def undo() -> None:
        value.param_groups[:] = groups
        for group, saved in zip(groups, settings, strict=True):
            group.clear()
            group.update(saved)
        value.state.clear()
        value.state.update({p: dict(s) for p, s in state.items()})
        for put_back in tensors:
            put_back()

    return undo, []


def _tensor_state(tensor: Tensor) -> Callable[[], None]:
    value, grad, needed = tensor.detach().clone(), tensor.grad, tensor.requires_grad
    kept = None if grad is None else grad.detach().clone()

    def undo() -> None:
        if tensor.shape != value.shape or tensor.dtype != value.dtype:
            tensor.data = value.clone()
        elif not torch.equal(tensor, value):
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
    iterator = getattr(value, "_iterator", None)  # of persistent workers: it goes on where it is

    def undo() -> None:
        value._iterator = iterator

    return undo, [value.dataset]


def _keep_generator(value: Any) -> _Kept | None:
    undo: Callable[[], Any]
    if isinstance(value, torch.Generator):
        undo = functools.partial(value.set_state, value.get_state())
    elif isinstance(value, random.Random):
        undo = functools.partial(value.setstate, value.getstate())
    elif isinstance(value, np.random.Generator):
        bits = value.bit_generator
        undo = functools.partial(setattr, bits, "state", copy.deepcopy(bits.state))
    else:
        return None
    return undo, []


def _keep_array(value: Any) -> _Kept | None:
    if isinstance(value, Tensor):
        return _tensor_state(value), []
    if isinstance(value, np.ndarray) and value.flags.writeable:
        before = value.copy()

        def put_back() -> None:
            if value.shape != before.shape:
                value.resize(before.shape, refcheck=False)
            np.copyto(value, before)

        return put_back, []
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
    """Keep the fields of a plain namespace, a dataset, or an object whose class the notebook has defined."""
    fields = getattr(value, "__dict__", None)
    own = type(value).__module__ == "__main__" or isinstance(value, types.SimpleNamespace | Dataset)
    if not own or not isinstance(fields, dict):
        return None
    before = dict(fields)

    def undo() -> None:
        fields.clear()
        fields.update(before)

    return undo, list(before.values())


_KEEPERS = (
    _keep_module,
    _keep_optimizer,
    _keep_stateful,
    _keep_loader,
    _keep_generator,
    _keep_array,
    _keep_container,
    _keep_own,
)
