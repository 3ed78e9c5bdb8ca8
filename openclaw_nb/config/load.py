"""From files and variables of the environment to a checked configuration.

    files ──> tree ──> keys and values checked ──> merged; they must agree ──> overridden by variables ──> Configuration

All problems are collected, so that a person sees them at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openclaw_nb.config.contradictions import contradictions
from openclaw_nb.config.kinds import Kind, Word, WrongValueError, did_you_mean, shown
from openclaw_nb.config.schema import BESIDE, KEYS, SAME, SECTIONS, WORKER_KEYS, keys_in, variable_names
from openclaw_nb.config.settings import Configuration, DeclaredWorker, Setting
from openclaw_nb.config.tree import Entry, read_file, read_variable
from openclaw_nb.core.errors import ConfigurationError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_CHECKED_PREFIXES = tuple(f"OPENCLAW_{section.upper()}_" for section in SECTIONS if section != "workers")


@dataclass
class _Found:
    settings: dict[str, Setting] = field(default_factory=dict)
    workers: list[DeclaredWorker] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def load(paths: Paths | None, environment: Mapping[str, str]) -> Configuration:
    """Return the configuration that files and variables make.

    Parameters
    ----------
    paths : str, path, sequence of them, or None
        One or several files, which must not contradict each other; variables alone without one.
    environment : mapping of str to str
        Where ``OPENCLAW_…`` override what the files say.

    Raises
    ------
    ConfigurationError
        With every problem: file, line, key, what was given and what is allowed.
    """
    files = [Path(path) for path in _listed(paths)]
    merged = _Found()
    for path in files:
        _merge(merged, _read(read_file(path)))
    _override(merged, environment)
    found = Configuration(merged.settings, tuple(merged.workers), tuple(str(path) for path in files))
    problems = merged.problems or contradictions(found)
    if problems:
        raise ConfigurationError(list(dict.fromkeys(problems)))
    return found


def _listed(paths: Paths | None) -> list[str | os.PathLike[str]]:
    if paths is None:
        return []
    return [paths] if isinstance(paths, str | os.PathLike) else list(paths)


# ----------------------------------------------------------------------------------------------- one file


def _read(root: Entry) -> _Found:
    found = _Found()
    if not isinstance(root.value, dict):
        found.problems.append(
            f"{root.where}: a configuration is a block of keys ({', '.join(keys_in(''))}), not {shown(root.value)}."
        )
        return found
    for name, entry in root.value.items():
        _read_top(found, name, entry)
    return found


def _read_top(found: _Found, name: str, entry: Entry) -> None:
    if name == "workers":
        _read_workers(found, entry)
    elif name == "strategy" and not isinstance(entry.value, dict):
        _take(found, "strategy.name", name, entry)
    elif name in SECTIONS:
        _read_section(found, name, entry)
    elif name in BESIDE or name in KEYS:
        _take(found, BESIDE.get(name, name), name, entry)
    else:
        found.problems.append(_unknown(entry.where, name, "", keys_in("")))


def _read_section(found: _Found, section: str, entry: Entry) -> None:
    if entry.value is None:
        return
    if not isinstance(entry.value, dict):
        allowed = ", ".join(keys_in(section))
        found.problems.append(
            f"{entry.where}, {section}: {shown(entry.value)} is not a block of keys: {allowed}."
        )
        return
    for name, inner in entry.value.items():
        path = f"{section}.{name}"
        if path in KEYS:
            _take(found, path, path, inner)
        else:
            found.problems.append(_unknown(inner.where, name, section, keys_in(section)))


def _unknown(where: str, name: str, section: str, allowed: Sequence[str]) -> str:
    path = f"{section}.{name}" if section else name
    hint = did_you_mean(name, allowed) or _hint_elsewhere(name)
    place = f"in {section}" if section else "in a configuration"
    return f"{where}, {shown(path)[1:-1]}: there is no such key {place}.{hint} Allowed: {', '.join(allowed)}."


def _hint_elsewhere(name: str) -> str:
    """Say where a key of this name stands."""
    homes = [path for path in (*KEYS, *BESIDE) if path.rpartition(".")[2] == name]
    return f" Did you mean {homes[0]!r}?" if homes else ""


def _take(found: _Found, path: str, written: str, entry: Entry) -> None:
    """Keep a key's value, if it is one."""
    value = _checked(found, KEYS[path].kind, written, entry)
    if value is None:
        return
    setting = Setting(value, entry.where, written)
    before = found.settings.get(path)
    if before is not None and before.value != value:
        found.problems.append(_contradicts(before, setting))
        return
    found.settings[path] = setting


def _checked(found: _Found, kind: Kind, written: str, entry: Entry) -> Any:
    """Return the value in one form; note the problem and return None when it is none."""
    try:
        return kind.read(entry.plain)
    except WrongValueError as error:
        allowed = "" if kind.allowed in str(error) or isinstance(kind, Word) else f" Allowed: {kind.allowed}."
        found.problems.append(f"{entry.where}, {written}: {error}{allowed}")
        return None


def _contradicts(one: Setting, other: Setting) -> str:
    return (
        f"{other.where}, {other.written}: {shown(_listed_value(other.value))} contradicts "
        f"{shown(_listed_value(one.value))} of {one.written} ({one.where}). Leave one of them out."
    )


def _listed_value(value: Any) -> Any:
    return ", ".join(value) if isinstance(value, tuple) and all(isinstance(v, str) for v in value) else value


# -------------------------------------------------------------------------------------------- the workers


def _read_workers(found: _Found, entry: Entry) -> None:
    if isinstance(entry.value, int) and not isinstance(entry.value, bool):
        found.problems.append(
            f"{entry.where}, workers: here stands a list of devices; how many workers there are is "
            f"parallel.workers: {entry.value}."
        )
        return
    if not isinstance(entry.value, list) or not entry.value:
        found.problems.append(
            f"{entry.where}, workers: {shown(entry.value)} is not a list of blocks with {', '.join(WORKER_KEYS)}."
        )
        return
    for number, item in enumerate(entry.value):
        _read_worker(found, f"workers[{number}]", item)


def _read_worker(found: _Found, path: str, item: Entry) -> None:
    if not isinstance(item.value, dict):
        found.problems.append(
            f"{item.where}, {path}: {shown(item.value)} is not a block with {', '.join(WORKER_KEYS)}."
        )
        return
    taken: dict[str, Any] = {}
    for name, inner in item.value.items():
        if name not in WORKER_KEYS:
            found.problems.append(_unknown(inner.where, name, path, list(WORKER_KEYS)))
            continue
        taken[name] = _checked(found, WORKER_KEYS[name].kind, f"{path}.{name}", inner)
    if "device_id" not in taken:
        found.problems.append(f"{item.where}, {path}: device_id is missing, such as device_id: GPU-0.")
    elif taken["device_id"] is not None:
        found.workers.append(
            DeclaredWorker(
                taken["device_id"], taken.get("ip") or "", taken.get("capabilities") or (), item.where
            )
        )


# ------------------------------------------------------------------------------------- several of them


def _merge(merged: _Found, found: _Found) -> None:
    """Add a further file, which must agree with those before."""
    merged.problems += found.problems
    for path, setting in found.settings.items():
        before = merged.settings.setdefault(path, setting)
        if before.value != setting.value:
            merged.problems.append(_contradicts(before, setting))
    if found.workers and merged.workers and found.workers != merged.workers:
        merged.problems.append(
            f"{found.workers[0].where}, workers: contradicts the workers of {merged.workers[0].where}. "
            "Leave one of the lists out."
        )
    merged.workers = merged.workers or found.workers


def _override(merged: _Found, environment: Mapping[str, str]) -> None:
    """Let variables win over what the files say."""
    known = {name: path for path in KEYS for name in variable_names(path)}
    given: dict[str, Setting] = {}
    for name, path in _given(known, environment):
        own = _Found()
        try:
            _take(own, path, path, read_variable(name, environment[name]))
        except ConfigurationError as error:
            merged.problems += error.problems
        merged.problems += own.problems
        for setting in own.settings.values():
            before = given.setdefault(path, setting)
            if before.value != setting.value:
                merged.problems.append(_contradicts(before, setting))
    for path, setting in given.items():
        for one, other in (*SAME, ("parallel.strategy", "strategy.name")):
            counterpart = {one: other, other: one}.get(path)
            if counterpart is not None and counterpart not in given:
                merged.settings.pop(
                    counterpart, None
                )  # it wins over the file's other name for the same thing, too
        merged.settings[path] = setting
    for name in environment:
        if name.startswith(_CHECKED_PREFIXES) and name not in known:
            merged.problems.append(
                f"{name}: this variable overrides no key.{did_you_mean(name, known)} "
                "A variable is OPENCLAW_, the section and the key, such as OPENCLAW_PARALLEL_WORKERS."
            )


def _given(known: Mapping[str, str], environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, path) for name, path in known.items() if environment.get(name, "").strip())
