"""What code that reads certain names can reach in a namespace.

Knows Python's functions, classes and containers, and whose code is the user's. It does not know torch, and
it runs nothing of the user's (no property, no ``__getattr__``): it reads dictionaries and code objects.

    names read + namespace --reachable--> {"trainer.model": object, ...}
"""

from __future__ import annotations

import argparse
import functools
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from openclaw_nb.engine.objects.names import code_reads

MAX_DEPTH = 3
"""Attributes and items are followed this many steps away from a name."""
MAX_ITEMS = 64
"""Longer containers hold data, not the objects of a training loop."""
MAX_OBJECTS = 2000
"""The walk stops here whatever the namespace holds."""

_PLAIN_DATA = frozenset({int, float, complex, bool, str, bytes, bytearray, range, slice, type(None)})
_OPEN_RECORDS = (SimpleNamespace, argparse.Namespace)
_OWN_PACKAGE = __name__.partition(".")[0]
_LIBRARY_DIRS = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))


def reachable(loads: Iterable[str], namespace: Mapping[str, object]) -> dict[str, object]:
    """List what code that reads these names can reach.

    Parameters
    ----------
    loads : iterable of str
        Names to start from; those not in the namespace are passed over.
    namespace : mapping of str to object
        The globals that the cell runs in.

    Returns
    -------
    dict of str to object
        Dotted path to object, nearest first, the same on every rank. Items of containers are written as
        attributes (``nets.gen``, ``models.0``), what a function holds in a closure or default too
        (``train.model``). An object that has two paths is there twice.
    """
    walk = _Walk(namespace)
    for name in sorted(loads):
        if name in namespace:
            walk.add(name, namespace[name], 0)
    walk.run()
    return walk.found


def look_up(path: str, found: Mapping[str, object], namespace: Mapping[str, object]) -> object:
    """Return what a dotted path stands for; LookupError if nothing.

    Parameters
    ----------
    path : str
        As `reachable` writes it, or any attribute path from a name of the namespace.
    found : mapping
        The answer of `reachable`.
    namespace : mapping
        The globals of the cell.
    """
    if path in found:
        return found[path]
    head, *rest = path.split(".")
    value = namespace[head]
    for part in rest:
        value = _member(value, part)
    return value


def _member(value: Any, part: str) -> object:
    """``value.part``, ``value["part"]`` or ``value[int(part)]``, whichever there is."""
    if isinstance(value, Mapping) and part in value:
        return value[part]
    if isinstance(value, (list, tuple)) and part.isdecimal():
        return value[int(part)]
    try:
        return getattr(value, part)
    except AttributeError as error:
        raise LookupError(part) from error


class _Walk:
    """Breadth first over what the user's own functions, classes, objects and containers refer to."""

    def __init__(self, namespace: Mapping[str, object]) -> None:
        self.found: dict[str, object] = {}
        self._namespace = namespace
        self._depths: dict[int, int] = {}
        self._queue: deque[tuple[str, Any, int]] = deque()

    def add(self, path: str, value: object, depth: int) -> None:
        """Note an object; follow it later unless it was followed from as near before."""
        if type(value) in _PLAIN_DATA or depth > MAX_DEPTH:
            return
        if path not in self.found and len(self.found) >= MAX_OBJECTS:
            return
        if self.found.setdefault(path, value) is not value:
            return
        if depth < self._depths.get(id(value), MAX_DEPTH + 1):
            self._depths[id(value)] = depth
            self._queue.append((path, value, depth))

    def run(self) -> None:
        while self._queue:
            self._follow(*self._queue.popleft())

    def _follow(self, path: str, value: Any, depth: int) -> None:
        # type() and not isinstance(): a lazy proxy must not be woken by being looked at.
        kind = type(value)
        if issubclass(kind, FunctionType):
            self._function(path, value, depth)
        elif issubclass(kind, MethodType):
            self.add(self._name_of(value.__self__) or f"{path}.__self__", value.__self__, depth)
            self.add(f"{path}.__func__", value.__func__, depth)
        elif issubclass(kind, functools.partial):
            self._partial(path, value, depth)
        elif issubclass(kind, type):
            self._class(path, value, depth, with_init=True)
        elif issubclass(kind, ModuleType):
            self._module(path, value, depth)
        else:
            self._instance(path, value, depth)

    def _name_of(self, value: object) -> str:
        return next((name for name, bound in self._namespace.items() if bound is value), "")

    def _function(self, path: str, function: FunctionType, depth: int) -> None:
        # A decorator of a library is followed to what it wraps, but its own globals are not the user's.
        if self._is_users(function.__globals__):
            self._globals(path, function)
        for name, value in held_by(function):
            self.add(f"{path}.{name}", value, depth)

    def _globals(self, path: str, function: FunctionType) -> None:
        prefix = "" if function.__globals__ is self._namespace else f"{path}."
        for name in code_reads(function.__code__):
            if name in function.__globals__:
                self.add(prefix + name, function.__globals__[name], 0)

    def _partial(self, path: str, partial: functools.partial[Any], depth: int) -> None:
        self.add(f"{path}.func", partial.func, depth)
        self._items(f"{path}.args", enumerate(partial.args), depth)
        self._items(f"{path}.keywords", partial.keywords.items(), depth)

    def _module(self, path: str, module: ModuleType, depth: int) -> None:
        if self._is_users(vars(module)):
            public = ((name, value) for name, value in vars(module).items() if not name.startswith("_"))
            self._items(path, public, depth)

    def _class(self, path: str, cls: type, depth: int, *, with_init: bool) -> None:
        """Methods, and the values in the class bodies; construction is not run on a built instance."""
        for owner in cls.__mro__:
            if not self._is_user_class(owner):
                continue
            for name, value in vars(owner).items():
                if not with_init and name in ("__init__", "__new__"):
                    continue
                functions = functions_of(value)
                for function in functions:
                    self.add(f"{path}.{name}", function, depth)
                if not functions and not name.startswith("__"):
                    self.add(f"{path}.{name}", value, depth + 1)

    def _instance(self, path: str, value: Any, depth: int) -> None:
        kind = type(value)
        if issubclass(kind, (list, tuple, dict)) and len(value) <= MAX_ITEMS:
            self._items(path, _entries(value), depth)
        attributes = _attributes(value)
        if self._is_user_class(kind) or kind in _OPEN_RECORDS:
            # Torch keeps its own machinery (parameters, submodules) in underscored attributes.
            if _from_torch(kind):
                attributes = {name: held for name, held in attributes.items() if not name.startswith("_")}
            self._items(path, attributes.items(), depth)
            self._class(path, kind, depth, with_init=False)
        elif "__wrapped__" in attributes:
            self.add(f"{path}.__wrapped__", attributes["__wrapped__"], depth)

    def _items(self, path: str, items: Iterable[tuple[object, object]], depth: int) -> None:
        for key, value in items:
            self.add(f"{path}.{key}", value, depth + 1)

    def _is_users(self, module_globals: Mapping[str, object]) -> bool:
        return is_users_code(module_globals, self._namespace)

    def _is_user_class(self, cls: type) -> bool:
        return is_users_class(cls, self._namespace)


def is_users_code(module_globals: Mapping[str, object], namespace: Mapping[str, object]) -> bool:
    """Whether code with these globals is of the notebook, or of a file that is no installed library."""
    name = module_globals.get("__name__")
    if module_globals is namespace or name == "__main__":
        return True
    file = module_globals.get("__file__")
    if not isinstance(file, str) or str(name).partition(".")[0] == _OWN_PACKAGE:
        return False
    installed = "site-packages" in file or "dist-packages" in file
    return not installed and not file.startswith(_LIBRARY_DIRS)


def is_users_class(cls: type, namespace: Mapping[str, object]) -> bool:
    """Whether a class is of the notebook, or of a file that is no installed library."""
    if cls.__module__ in ("__main__", namespace.get("__name__")):
        return True
    module = sys.modules.get(str(cls.__module__))
    return module is not None and is_users_code(vars(module), namespace)


def held_by(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Closure variables, default arguments and attributes (``__wrapped__`` is one) of a function."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    defaults = function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    yield from vars(function).items()


def functions_of(value: object) -> list[FunctionType]:
    """The functions behind an entry of a class body."""
    if isinstance(value, property):
        inner: tuple[object, ...] = (value.fget, value.fset)
    elif isinstance(value, (staticmethod, classmethod)):
        inner = (value.__func__,)
    elif isinstance(value, functools.cached_property):
        inner = (value.func,)
    else:
        inner = (value,)
    return [function for function in inner if isinstance(function, FunctionType)]


def _entries(container: Any) -> Iterable[tuple[object, object]]:
    if isinstance(container, dict):
        return container.items()
    return zip(getattr(container, "_fields", range(len(container))), container, strict=True)


def _attributes(value: object) -> dict[str, object]:
    """What an object stores itself, in its dictionary or its slots."""
    try:
        stored = dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        stored = {}
    for owner in type(value).__mro__:
        slots = vars(owner).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name.startswith("__"):
                continue
            try:
                stored.setdefault(name, object.__getattribute__(value, name))
            except AttributeError:  # an empty slot
                continue
    return stored


def _from_torch(kind: type) -> bool:
    return any(str(owner.__module__).partition(".")[0] == "torch" for owner in kind.__mro__)
