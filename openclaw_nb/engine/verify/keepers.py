"""How the state of one object is kept and put back, by what it is: the object itself stays.

    object ──keep──> what puts it back, and what it consists of; the tensors among that are `storage`'s

Knows Python's, NumPy's and torch's objects; does not know where they were found.
"""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import functools
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from openclaw_nb.engine.objects.reach import functions_of, held_by
from openclaw_nb.engine.steps import randomness

Kept = tuple[Callable[[], Any] | None, list[tuple[str, Any]]]
"""What puts it back, if anything has to be, and its parts with their names."""

_HAVE_STATE = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
# Of an object of the process's own machinery nothing is touched: threads and sockets use it at any time.
_MACHINERY = (
    *("_thread", "asyncio", "concurrent", "contextvars", "importlib", "ipykernel", "IPython", "ipyparallel"),
    *(
        "ipywidgets",
        "logging",
        "multiprocessing",
        "openclaw_nb",
        "queue",
        "selectors",
        "socket",
        "subprocess",
    ),
    *("threading", "tornado", "traitlets", "weakref", "zmq"),
)
_OF_TORCH = (
    "torch._C",
    "torch._dynamo",
    "torch._inductor",
    "torch.autograd",
    "torch.cuda",
    "torch.distributed",
)
_PLAIN = (str, bytes, int, float, complex, type(None))


def is_machinery(value: Any) -> bool:
    """Whether an object belongs to the machinery of the process, which is left alone."""
    names = [str(owner.__module__) for owner in type(value).__mro__]
    return any(name.partition(".")[0] in _MACHINERY or name.startswith(_OF_TORCH) for name in names)


def keep(value: Any) -> Kept | None:
    """Keep the state of an object of a kind that has rules of its own; None for any other."""
    for keeper in _KEEPERS:
        found = keeper(value)
        if found is not None:
            return found
    return None


def _keep_module(value: Any) -> Kept | None:
    """Keep a module with all that is in it."""
    if not isinstance(value, nn.Module):
        return None
    # With the dictionaries of its parameters, buffers, parts and hooks.
    modules = dict(value.named_modules())
    fields = {name: vars(module) for name, module in modules.items()}
    before: list[tuple[Any, Any]] = [(each, dict(each)) for each in fields.values()]
    inside: list[tuple[Any, Any]] = [
        (d, copy.copy(d)) for each in fields.values() for d in each.values() if isinstance(d, dict)
    ]

    def undo() -> None:
        for each, saved in (*before, *inside):
            each.clear()
            each.update(saved)

    parts: list[tuple[str, Any]] = [*value.named_parameters(), *value.named_buffers()]
    parts += [("type", type(module)) for module in modules.values()]
    for name, each in fields.items():
        held = {**each, **{k: v for d in each.values() if isinstance(d, dict) for k, v in d.items()}}
        parts += [
            (f"{name}.{k}".lstrip("."), v) for k, v in held.items() if not isinstance(v, dict | nn.Module)
        ]
        parts += [
            (f"{name}.{k}", v) for k, v in each.items() if isinstance(v, dict) and not k.startswith("_")
        ]
    return undo, parts


def _keep_optimizer(value: Any) -> Kept | None:
    if not isinstance(value, torch.optim.Optimizer):
        return None
    groups, state = list(value.param_groups), {p: dict(s) for p, s in value.state.items()}
    settings = [dict(group) for group in groups]

    def undo() -> None:
        value.param_groups[:] = groups
        for group, saved in zip(groups, settings, strict=True):
            group.clear()
            group.update(saved)
        value.state.clear()
        value.state.update({p: dict(s) for p, s in state.items()})

    parts = [(f"state.{name}", each) for s in state.values() for name, each in s.items()]
    return undo, parts + [(name, each) for group in settings for name, each in group.items()]


def _keep_stateful(value: Any) -> Kept | None:
    if not isinstance(value, _HAVE_STATE):
        return None
    state = copy.deepcopy(value.state_dict())
    loose = {"_per_optimizer_states"} & vars(value).keys()  # a scaler's, of a step that was not finished

    def undo() -> None:
        value.load_state_dict(copy.deepcopy(state))
        for name in loose:
            getattr(value, name).clear()

    return undo, [("optimizer", getattr(value, "optimizer", None))]


def _keep_loader(value: Any) -> Kept | None:
    if not isinstance(value, DataLoader):
        return None
    iterator = getattr(value, "_iterator", None)  # of persistent workers: it goes on where it is

    def undo() -> None:
        value._iterator = iterator

    generators = [("generator", generator) for generator in randomness.generators_of(value)]
    holders = ("dataset", "sampler", "batch_sampler", "collate_fn")
    return undo, [*generators, *((name, getattr(value, name)) for name in holders)]


def _keep_generator(value: Any) -> Kept | None:
    undo: Callable[[], Any]
    if isinstance(value, torch.Generator):
        undo = functools.partial(value.set_state, value.get_state())
    elif isinstance(value, np.random.RandomState):
        undo = functools.partial(value.set_state, copy.deepcopy(value.get_state()))
    elif isinstance(value, random.Random):
        undo = functools.partial(value.setstate, value.getstate())
    elif isinstance(value, np.random.Generator):
        bits = value.bit_generator
        undo = functools.partial(setattr, bits, "state", copy.deepcopy(bits.state))
    else:
        return None
    return undo, []


def _keep_function(value: Any) -> Kept | None:
    """Keep what a function holds: attributes, such as a counter, variables around it, and default arguments."""
    if isinstance(value, types.MethodType):
        return None, [("__self__", value.__self__), ("__func__", value.__func__)]
    if isinstance(value, functools.partial):
        return None, [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if not isinstance(value, types.FunctionType):
        return None
    fields, cells, defaults = (
        dict(vars(value)),
        list(_filled(value)),
        (value.__defaults__, value.__kwdefaults__),
    )

    def undo() -> None:
        vars(value).clear()
        vars(value).update(fields)
        value.__defaults__, value.__kwdefaults__ = defaults
        for cell, content in cells:
            if cell.cell_contents is not content:
                cell.cell_contents = content

    return undo, list(held_by(value))


def _filled(function: types.FunctionType) -> Iterator[tuple[Any, Any]]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not bound yet
            yield cell, cell.cell_contents


def keep_class(value: type) -> Kept:
    """Keep what a class holds itself, such as a counter of its objects."""
    before = dict(vars(value))

    def undo() -> None:
        now = dict(vars(value))
        for name in now.keys() - before.keys():
            type.__delattr__(value, name)
        for name, held in before.items():
            if now.get(name, value) is not held:
                type.__setattr__(value, name, held)

    held = {name: each for name, each in before.items() if not name.startswith("__")}
    functions = [(name, function) for name, each in before.items() for function in functions_of(each)]
    return undo, [*held.items(), *functions, *(("base", base) for base in value.__bases__)]


def keep_globals(values: dict[str, Any]) -> Kept:
    """Keep the variables of a module."""
    before = {name: each for name, each in values.items() if not name.startswith("__")}

    def undo() -> None:
        for name in [name for name in values if not name.startswith("__") and name not in before]:
            del values[name]
        values.update(before)

    return undo, list(before.items())


def _keep_container(value: Any) -> Kept | None:
    if isinstance(value, array.array):
        numbers = value[:]
        return functools.partial(value.__setitem__, slice(None), numbers), []
    if isinstance(value, list | bytearray | collections.deque):
        items = list(value)

        def refill() -> None:
            value.clear()
            value.extend(items)

        return refill, _named(enumerate(items))
    if isinstance(value, dict | set):
        before = copy.copy(value)

        def update() -> None:
            value.clear()
            value.update(before)

        return update, _named(before.items() if isinstance(before, dict) else enumerate(before))
    if isinstance(value, tuple | frozenset | types.MappingProxyType):
        return None, _named(value.items() if isinstance(value, Mapping) else enumerate(value))
    return None


def _named(items: Iterable[tuple[Any, Any]]) -> list[tuple[str, Any]]:
    return [(str(key), item) for key, item in items if not isinstance(item, _PLAIN)]


def keep_fields(value: Any) -> Kept | None:
    """Keep what any object holds in its dictionary and its slots; None when it has neither."""
    fields = getattr(value, "__dict__", None)
    slots = list(_slots(type(value)))
    if not isinstance(fields, dict) and not slots:
        return None
    fields = fields if isinstance(fields, dict) else {}
    before = dict(fields)
    in_slots = {name: slot.__get__(value) for name, slot in slots if _is_filled(slot, value)}

    def undo() -> None:
        fields.clear()
        fields.update(before)
        for name, slot in slots:
            if name in in_slots:
                slot.__set__(value, in_slots[name])
            elif _is_filled(slot, value):
                slot.__delete__(value)

    return undo, [*before.items(), *in_slots.items()]


def _slots(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the descriptors that store what a class has named in ``__slots__``; their own names may be mangled."""
    for owner in cls.__mro__:
        if "__slots__" in vars(owner):
            members = vars(owner).items()
            yield from (
                (name, each) for name, each in members if isinstance(each, types.MemberDescriptorType)
            )


def _is_filled(slot: Any, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


_KEEPERS = (
    _keep_module,
    _keep_optimizer,
    _keep_stateful,
    _keep_loader,
    _keep_generator,
    _keep_function,
    _keep_container,
)
