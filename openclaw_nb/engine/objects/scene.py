"""A cell and its namespace as the choice of objects sees them: typed look-ups, names, what the cell builds.

Knows how paths, names and aliases relate and which names a cell leaves alone. It does not know the rules by
which a model or an optimizer is chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from openclaw_nb.core.errors import RefusedError, unknown_name
from openclaw_nb.engine.objects.names import Build, CellBuilds, CellNames, cell_builds, cell_names
from openclaw_nb.engine.objects.reach import look_up, reachable

T = TypeVar("T")


class Scene:
    """A cell, its namespace, and what the one reaches in the other.

    Parameters
    ----------
    source : str
        The cell.
    namespace : mapping of str to object
        The worker's user namespace.
    """

    def __init__(self, source: str, namespace: Mapping[str, object]) -> None:
        self.names: CellNames = cell_names(source)
        self.builds: CellBuilds = cell_builds(source)
        self.namespace = namespace
        found = reachable(self._roots(), namespace)
        self.found = _without_containers({path: plain(value) for path, value in found.items()})

    def _roots(self) -> list[str]:
        """Names to start from: not those whose present value is left over from an earlier run."""
        lasting = (nn.Module, Optimizer)
        return [
            name
            for name in self.names.loads
            if name not in self.names.stores or isinstance(self.namespace.get(name), lasting)
        ]

    def of_type(self, kind: type[T]) -> dict[str, T]:
        """Each reachable object of a type once, under its best name."""
        distinct = {id(value): value for value in self.found.values() if isinstance(value, kind)}
        return {self.name_of(value): value for value in distinct.values()}

    def name_of(self, value: object) -> str:
        """The path that the cell leaves bound to the object, then the shortest."""
        paths = [path for path, held in self.found.items() if held is value]
        return min(paths, key=lambda path: (self.is_stored(path), path.count(".")))

    def is_stored(self, path: str) -> bool:
        """Whether the cell binds the name that a path starts with."""
        return path.partition(".")[0] in self.names.stores

    def live(self, objects: dict[str, T]) -> dict[str, T]:
        """Without objects whose every name the cell binds anew: they are gone when it uses the name."""
        return {name: value for name, value in objects.items() if not self.is_stored(name)}

    def named(self, names: str | None, kind: type[T]) -> dict[str, T] | None:
        """The objects that the person named; None when no name was given."""
        if names is None:
            return None
        asked = (name.strip() for name in names.split(","))
        objects = {name: self._one(name, kind) for name in asked if name}
        # Two names of one object are one object: the first name given counts.
        first = {id(value): name for name, value in reversed(objects.items())}
        return {name: value for name, value in objects.items() if first[id(value)] == name} or None

    def _one(self, name: str, kind: type[T]) -> T:
        try:
            value = plain(look_up(name, self.found, self.namespace))
        except LookupError as error:
            raise unknown_name("name", name, self._candidates(kind)) from error
        if not isinstance(value, kind):
            raise RefusedError(
                f"`{name}` is a {type(value).__name__}, and {_expected(kind)} is expected. "
                f"Candidates: {', '.join(self._candidates(kind)) or 'none'}."
            )
        self.found.setdefault(name, value)
        return value

    def _candidates(self, kind: type[Any]) -> list[str]:
        """Names of a type that would have been accepted: a module without parameters would not."""
        bound = {name: value for name, value in self.namespace.items() if isinstance(value, kind)}
        named = {**bound, **self.of_type(kind)}.items()
        return sorted(name for name, value in named if not name.startswith("_") and not _is_empty(value))

    def aliases(self, chosen: Mapping[str, object]) -> dict[str, str]:
        """Every other path to a chosen object, to the name it was chosen under."""
        names = {id(value): name for name, value in chosen.items()}
        return {
            path: names[id(value)]
            for path, value in self.found.items()
            if id(value) in names and path != names[id(value)]
        }

    def built(self, kinds: tuple[type, ...], *, but: tuple[type, ...] = ()) -> list[Build]:
        """Calls at cell level that make an object of these types."""
        return [
            build
            for build in self.builds.calls
            if (cls := self._class_of(build.callee, set()))
            and issubclass(cls, kinds)
            and not issubclass(cls, but)
        ]

    def _class_of(self, callee: str, seen: set[str]) -> type | None:
        """The class behind a dotted name; for one defined in this very cell, its first known base."""
        head, *rest = callee.split(".")
        if head in self.builds.bases and not rest and head not in seen:
            bases = (self._class_of(base, seen | {head}) for base in self.builds.bases[head])
            return next((base for base in bases if base is not None), None)
        value: object = self.namespace.get(head)
        if head in self.builds.imports:
            top, *parts = self.builds.imports[head].split(".")
            value, rest = sys.modules.get(top), parts + rest
        for part in rest:
            value = vars(value).get(part) if isinstance(value, (ModuleType, type)) else None
        return value if isinstance(value, type) else None


def plain(value: object) -> object:
    """The module inside a compiled one."""
    while isinstance(value, nn.Module) and "_orig_mod" in value._modules:
        value = value._modules["_orig_mod"]
    return value


def _without_containers(found: dict[str, object]) -> dict[str, object]:
    """Put the parts of ModuleList and ModuleDict in their place: nobody calls the container."""
    flat: dict[str, object] = {}
    for path, value in found.items():
        if type(value) in (nn.ModuleList, nn.ModuleDict):
            parts = {f"{path}.{key}": plain(part) for key, part in vars(value)["_modules"].items()}
            flat.update(_without_containers(parts))
        else:
            flat.setdefault(path, value)
    return flat


def _is_empty(value: object) -> bool:
    return isinstance(value, nn.Module) and next(value.parameters(), None) is None


def _expected(kind: type) -> str:
    article = "an" if kind is Optimizer else "a"
    return f"{article} {'model (nn.Module)' if kind is nn.Module else kind.__name__}"
