"""The state that a cell may change, taken and put back in place: objects keep their identity.

    names that the cell reads ──> objects, and what they hold; functions, and the names that those read
        ──> refused: what gives its values once, what cannot be copied, what is too large for the memory there is
        ──> state kept (`keepers`), tensors copied (`storage`) ──> put back, as often as is wanted

Knows where a cell can reach; does not know what happens in between.
"""

from __future__ import annotations

import collections.abc
import io
import re
import types
from collections.abc import Callable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from openclaw_nb.core.errors import OpenClawError, RefusedError
from openclaw_nb.core.host import available_memory_bytes
from openclaw_nb.core.text import size_text
from openclaw_nb.engine.objects.names import code_reads
from openclaw_nb.engine.objects.reach import is_users_class, is_users_code
from openclaw_nb.engine.steps import randomness
from openclaw_nb.engine.verify import keepers
from openclaw_nb.engine.verify.storage import Copies

# What gives each value once: there is no way to ask for its position.
_ONE_WAY = (collections.abc.Iterator, types.AsyncGeneratorType, io.IOBase)
_NEVER_CHANGES = (
    *(
        str,
        bytes,
        int,
        float,
        complex,
        type(None),
        type(Ellipsis),
        range,
        slice,
        property,
        staticmethod,
        classmethod,
    ),
    *(
        types.BuiltinFunctionType,
        types.MethodWrapperType,
        types.WrapperDescriptorType,
        types.MethodDescriptorType,
    ),
    *(
        types.GetSetDescriptorType,
        types.MemberDescriptorType,
        types.CodeType,
        types.GenericAlias,
        types.UnionType,
    ),
    *(
        np.generic,
        np.dtype,
        np.ufunc,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.finfo,
    ),
)
_OF_IPYTHON = re.compile(r"_+\d*|_i+\d*|_[iod]h|_oh|__\w+__|In|Out|exit|quit|get_ipython")
# Code that reads one of these may reach any variable, whatever else it names.
_ANYTHING = frozenset({"globals", "locals", "vars", "exec", "eval", "get_ipython", "__main__"})
_TOLD = 5


class _Found(NamedTuple):
    """An object on the way, and how it was come to."""

    value: Any
    name: str
    parent: _Found | None
    of_user: bool

    def __str__(self) -> str:
        names, here = [], self
        while True:
            names.append(here.name)
            if here.parent is None:
                return ".".join(reversed(names))
            here = here.parent


class Snapshot:
    """The state of everything that a cell can reach.

    Parameters
    ----------
    namespace : mutable mapping
        The worker's variables.
    used : set of str
        The names that the cell reads.
    held : mapping of str to object
        What the cell uses and may have no name of its own.
    extra_bytes : int
        Memory that is needed besides, in bytes.
    num_sharing : int
        How many processes of this host do the same at this moment.

    Attributes
    ----------
    unknown : list of str
        What may hold state that cannot be looked into, and so is not put back.

    Raises
    ------
    RefusedError
        When the cell uses something whose state cannot be put back, such as a generator or an open file, or when the
        memory does not suffice. Nothing has changed then.
    """

    def __init__(
        self,
        namespace: MutableMapping[str, Any],
        used: set[str],
        held: Mapping[str, Any] = MappingProxyType({}),
        *,
        extra_bytes: int = 0,
        num_sharing: int = 1,
    ) -> None:
        self._namespace = namespace
        self._bindings = dict(namespace)
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], Any]] = []
        self._waiting: list[_Found] = []
        self._copies = Copies()
        self.unknown: list[str] = []
        self._names: set[str] = set()
        self._read(used)
        self._waiting += [_Found(value, name, None, True) for name, value in held.items()]
        while self._waiting:
            self._visit(self._waiting.pop())
        self._check_memory(extra_bytes, num_sharing)
        self._copies.take()
        self._random = randomness.capture([])
        self._on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        """Put everything back.

        Raises
        ------
        OpenClawError
            When something cannot be; all else is.
        """
        errors = []
        with torch.no_grad():
            for undo in (*self._undo, *self._copies.restore()):
                try:
                    undo()
                except Exception as error:  # noqa: BLE001 - the rest must be put back all the same; raised below
                    errors.append(error)
        randomness.restore(self._random, [])
        if self._on_gpus:
            torch.cuda.set_rng_state_all(self._on_gpus)
        for name in self._namespace.keys() - self._bindings.keys():
            del self._namespace[name]
        self._namespace.update(self._bindings)
        if errors:
            raise OpenClawError(
                f"{len(errors)} objects could not be put back as they were; the first: {errors[0]}"
            )

    # ---------------------------------------------------------------------------------- what is reached

    def _read(self, names: set[str]) -> None:
        """Go on with the variables of these names; with all, where code may reach any."""
        if names & _ANYTHING:
            names = {name for name in self._namespace if not _OF_IPYTHON.fullmatch(name)} | names
        new = (names & self._namespace.keys()) - self._names
        self._names |= new
        self._waiting += [_Found(self._namespace[name], name, None, True) for name in sorted(new)]

    def _visit(self, found: _Found) -> None:
        value = found.value
        if isinstance(value, _NEVER_CHANGES) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, types.ModuleType):
            self._visit_library(found, value)
        elif isinstance(value, type):
            if is_users_class(value, self._namespace):
                self._take(found, keepers.keep_class(value))
        elif isinstance(value, Tensor):
            self._copies.add(str(found), value)
            grad = value.grad if value.is_leaf else None
            self._take(found, (None, [] if grad is None else [("grad", grad)]))
        elif isinstance(value, np.ndarray):
            self._visit_array(found, value)
        else:
            self._visit_object(found)

    def _visit_library(self, found: _Found, module: types.ModuleType) -> None:
        if vars(module) is self._namespace:
            self._read({"globals"})
        elif is_users_code(vars(module), self._namespace):
            self._take(found, keepers.keep_globals(vars(module)))

    def _visit_array(self, found: _Found, array: np.ndarray[Any, Any]) -> None:
        if array.flags.writeable:
            self._copies.add(str(found), array)
        if array.dtype.hasobject and array.dtype.names is None:
            self._take(found, (None, [("item", item) for item in array.flat]))

    def _visit_object(self, found: _Found) -> None:
        value = found.value
        kept, fields = keepers.keep(value), None
        if kept is None and keepers.is_machinery(value):
            return
        if kept is None or _has_own_fields(value):
            fields = keepers.keep_fields(value)
        if isinstance(value, types.FunctionType):
            self._visit_code(value)
        of_users_class = is_users_class(type(value), self._namespace)
        if of_users_class:
            self._take(found, (None, [("type", type(value))]))
        for each in (kept, fields):
            if each is not None:
                self._take(found, each)
        # Of a class of the person's what it iterates over is found in its fields.
        if kept is None and found.of_user and isinstance(value, _ONE_WAY) and not of_users_class:
            raise RefusedError(
                f"{str(found)!r} is a {type(value).__name__}, whose position cannot be put back after the cell was "
                "tried out. Let the cell make it itself, or keep a list."
            )
        if kept is None and fields is None:
            self._note_unknown(found)

    def _visit_code(self, function: types.FunctionType) -> None:
        names = set(code_reads(function.__code__))
        if function.__globals__ is self._namespace:
            self._read(names)
        elif is_users_code(function.__globals__, self._namespace):
            module = keepers.keep_globals(function.__globals__)
            if id(function.__globals__) not in self._seen:
                self._seen[id(function.__globals__)] = function.__globals__
                self._take(_Found(None, str(function.__module__), None, True), (module[0], []))
            parts = [(name, each) for name, each in module[1] if name in names]
            self._take(_Found(None, str(function.__module__), None, True), (None, parts))

    def _take(self, found: _Found, kept: keepers.Kept) -> None:
        undo, parts = kept
        if undo is not None:
            self._undo.append(undo)
        of_user = found.value is None or self._is_open(found.value)
        self._waiting += [
            _Found(value, name, found, of_user)
            for name, value in parts
            if not isinstance(value, _NEVER_CHANGES)
        ]

    def _is_open(self, value: Any) -> bool:
        """Whether what an object holds is the person's own business, not a library's."""
        plain = type(value).__module__ in ("builtins", "types", "collections", "argparse", "functools")
        return plain or is_users_class(value if isinstance(value, type) else type(value), self._namespace)

    def _note_unknown(self, found: _Found) -> None:
        kind = type(found.value)
        hashing: Any = kind.__hash__
        is_a_value = kind is object or (hashing is not None and hashing is not object.__hash__)
        if found.of_user and not is_a_value:
            self.unknown.append(f"{found} ({kind.__module__}.{kind.__qualname__})")

    # ------------------------------------------------------------------------------------------- memory

    def _check_memory(self, extra_bytes: int, num_sharing: int) -> None:
        sizes = sorted(self._copies.sizes(), reverse=True)
        total = sum(size for size, _ in sizes) + extra_bytes
        free = available_memory_bytes() // num_sharing
        if total <= free:
            return
        largest = [f"{name} {size_text(size)}" for size, name in sizes[:_TOLD] if size * 20 > total]
        steps = f"{size_text(extra_bytes)} for what the steps are compared by" if extra_bytes else ""
        listed = ", ".join([*largest, *filter(None, [steps])])
        raise RefusedError(
            f"The cell cannot be tried out: what it can reach has to be copied, which takes {size_text(total)} "
            f"({listed}), and {size_text(free)} of this host's memory are free for this worker. Verify fewer steps, or "
            "smaller data."
        )


def _has_own_fields(value: Any) -> bool:
    """Whether an object is of a class derived from a container, and may hold more than items."""
    return isinstance(value, dict | list | set | tuple) and hasattr(value, "__dict__")
