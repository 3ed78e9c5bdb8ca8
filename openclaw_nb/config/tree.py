"""A YAML file as values that know their line.

    bytes ──> nodes (PyYAML's safe loader) ──> Entry: value, line; blocks are dicts of entries, lists are lists of them

Only plain data: no tags of programs, no key twice, bounded in size and depth. Knows YAML; does not know which keys
there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from openclaw_nb.config.kinds import shown
from openclaw_nb.core.errors import ConfigurationError

_MOST_BYTES = 1_000_000
_MOST_NODES = 10_000
_DEEPEST = 20
_STANDARD = "tag:yaml.org,2002:"
_COLLECTIONS = (f"{_STANDARD}map", f"{_STANDARD}seq")
_PLAIN = ("str", "int", "float", "bool", "null")


@dataclass(frozen=True)
class Entry:
    """A value and where it stands.

    Attributes
    ----------
    value : object
        A plain value, a dict of str to Entry, or a list of Entry.
    where : str
        ``"openclaw_config.yaml, line 3"``, or the name of a variable.
    """

    value: Any
    where: str

    @property
    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: entry.plain for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [entry.plain for entry in self.value]
        return self.value


def read_file(path: Path) -> Entry:
    """Return what a file holds; an empty block for an empty file.

    Raises
    ------
    ConfigurationError
        When there is no such file, it is no YAML, or it holds more than plain data.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigurationError([f"{path}: larger than {_MOST_BYTES} bytes, so no configuration."])
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigurationError(
            [f"{path}: there is no such file. `openclaw init` writes one, with every key explained."]
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigurationError([f"{path}: cannot be read: {error}."]) from None
    return read_text(data, str(path))


def read_text(data: bytes, name: str) -> Entry:
    """Return what the bytes of a file hold; see `read_file`."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigurationError([f"{name}, line {line}: the file is not UTF-8 text."]) from None
    try:
        return _Reader(name).read(text)
    except RecursionError:
        raise ConfigurationError([f"{name}: nested too deeply."]) from None


class _Reader:
    """Walks through the nodes of one file."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_nodes = 0

    def read(self, text: str) -> Entry:
        loader = yaml.SafeLoader("")
        try:
            loader = yaml.SafeLoader(text)
            node = loader.get_single_node()
            if node is None:
                return Entry({}, f"{self._name}, line 1")
            return self._entry(node, loader, 0)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = "" if mark is None else f", line {mark.line + 1}"
            words = " ".join(filter(None, (error.context, error.problem)))
            raise ConfigurationError([f"{self._name}{line}: this is not YAML: {words}."]) from None
        except yaml.YAMLError as error:  # characters that a text file cannot hold
            raise ConfigurationError(
                [f"{self._name}: this is not YAML: {str(error).splitlines()[0]}."]
            ) from None
        finally:
            loader.dispose()

    def _entry(self, node: yaml.Node, loader: yaml.SafeLoader, depth: int) -> Entry:
        self._num_nodes += 1
        where = self._where(node)
        if (
            self._num_nodes > _MOST_NODES or depth > _DEEPEST
        ):  # aliases can stand for more than a memory holds
            raise ConfigurationError([f"{where}: too much, or nested too deeply, for a configuration."])
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _COLLECTIONS:
            raise ConfigurationError([f"{where}: {self._refused(node)}"])
        if isinstance(node, yaml.MappingNode):
            return Entry(self._block(node, loader, depth), where)
        if isinstance(node, yaml.SequenceNode):
            return Entry([self._entry(each, loader, depth + 1) for each in node.value], where)
        return Entry(self._scalar(node, loader), where)

    def _block(self, node: yaml.MappingNode, loader: yaml.SafeLoader, depth: int) -> Mapping[str, Entry]:
        found: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            where = self._where(key_node)
            key = self._scalar(key_node, loader) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                written = "a list or a block" if key is None else shown(key)
                raise ConfigurationError([f"{where}: a key is a word, not {written}."])
            if key in found:
                raise ConfigurationError(
                    [f"{where}: the key {key!r} stands here twice, first at {found[key].where}."]
                )
            entry = self._entry(value_node, loader, depth + 1)
            found[key] = Entry(entry.value, where)
        return found

    def _scalar(self, node: yaml.Node, loader: yaml.SafeLoader) -> Any:
        kind = node.tag.rpartition(":")[2]
        if kind in ("timestamp", "merge", "value"):
            return node.value  # what looks like a date is text, "<<" and "=" are no more than words
        if kind not in _PLAIN or not node.tag.startswith(_STANDARD):
            raise ConfigurationError([f"{self._where(node)}: {self._refused(node)}"])
        try:
            return loader.construct_object(node)
        except (
            ValueError,
            LookupError,
            OverflowError,
        ):  # "0x", nothing at all, or more digits than a number may have
            raise ConfigurationError(
                [f"{self._where(node)}: {shown(node.value)} cannot be read as {kind}; put text in quotes."]
            ) from None

    def _refused(self, node: yaml.Node) -> str:
        return f"the tag {shown(node.tag)} is not allowed: plain values only."

    def _where(self, node: yaml.Node) -> str:
        return f"{self._name}, line {node.start_mark.line + 1}"


def read_variable(name: str, text: str) -> Entry:
    """Return the value of a variable of the environment, read as a file's would be.

    Raises
    ------
    ConfigurationError
        When it cannot be read.
    """
    try:
        entry = _Reader(name).read(text.strip())
    except (ConfigurationError, RecursionError):
        raise ConfigurationError([f"{name}: {shown(text)} cannot be read."]) from None
    return Entry(_replaced(entry, name), name)


def _replaced(entry: Entry, name: str) -> Any:
    """Return the entry's value, whose places are the variable's name alone."""
    if isinstance(entry.value, dict):
        return {key: Entry(_replaced(each, name), name) for key, each in entry.value.items()}
    if isinstance(entry.value, list):
        return [Entry(_replaced(each, name), name) for each in entry.value]
    return entry.value
