"""A configuration that was read and checked: values with where they come from.

Knows keys and values; does not know files, nor what is running.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from openclaw_nb.config.schema import KEYS

DEFAULT = "default"


@dataclass(frozen=True)
class Setting:
    """A value.

    Attributes
    ----------
    value : object
        In the form that its kind gives it.
    where : str
        File and line, the name of a variable, or ``"default"``.
    written : str
        The key as it was written there.
    """

    value: Any
    where: str
    written: str


@dataclass(frozen=True)
class DeclaredWorker:
    """An entry of ``workers:``; two are equal wherever they stand."""

    device_id: str
    ip: str = ""
    capabilities: tuple[str, ...] = ()
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class Configuration:
    """What files and variables say.

    Attributes
    ----------
    settings : mapping of str to Setting
        Values by key, those that were given.
    workers : tuple of DeclaredWorker
        The entries of ``workers:``.
    files : tuple of str
        The files.
    """

    settings: Mapping[str, Setting] = field(default_factory=dict)
    workers: tuple[DeclaredWorker, ...] = ()
    files: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything was configured."""
        return bool(self.settings or self.workers or self.files)

    def given(self, path: str) -> Any:
        """Return a key's value, or None where nobody gave one."""
        setting = self.settings.get(path)
        return None if setting is None else setting.value

    def value(self, path: str) -> Any:
        """Return a key's value: the one given, else its default where there is a file; variables alone bring none."""
        setting = self.settings.get(path)
        if setting is not None:
            return setting.value
        return KEYS[path].default if self.files else None

    def where(self, path: str) -> str:
        """Return where a key's value comes from."""
        setting = self.settings.get(path)
        return DEFAULT if setting is None else setting.where

    def place(self, path: str) -> str:
        """Return where a key stands and how it is written, as errors begin."""
        setting = self.settings[path]
        return f"{setting.where}, {setting.written}"

    def overridden(self, arguments: Mapping[str, Any]) -> Configuration:
        """Return the configuration with what was said beside it, by key; None for what was not said."""
        said = {path: Setting(v, "argument", path) for path, v in arguments.items() if v is not None}
        return replace(self, settings={**self.settings, **said})

    @property
    def strategy(self) -> Setting | None:
        """The default strategy of training cells, unless parallel.enabled is false."""
        if self.value("parallel.enabled") is False:
            return None
        return self.settings.get("strategy.name") or self.settings.get("parallel.strategy")
