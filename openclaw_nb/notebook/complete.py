"""What Tab offers after ``%openclaw`` and in cells that run on the workers.

    line up to the cursor ──> which argument is it? ──> names of that kind that fit

`complete_line` is pure: the names come from a `Names`. What `matcher` returns is called by IPython.
"""

from __future__ import annotations

import builtins
import glob
import keyword
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from openclaw_nb.core.errors import OpenClawError
from openclaw_nb.notebook.options import CELL, VERBS, Argument, Command
from openclaw_nb.strategies import ALIASES, STRATEGIES

MATCHER = "openclaw_nb"

_LINE_MAGIC = re.compile(r"^\s*(?:[\w\s,.\[\]'\"]+=\s*)?%openclaw[ \t]+(.*)$")
_CELL_MAGIC = re.compile(r"^\s*%%?openclaw_parallel[ \t]+(.*)$")
_CELL_START = re.compile(r"\s*(?:%%\w+.*\n)*%%openclaw_parallel\b")
_LISTED = {"device", "free device", "target"}  # kinds of which several may be written with commas between


class Names(Protocol):
    """Where names of each kind come from."""

    def of_kind(self, kind: str, prefix: str) -> Iterable[str]:
        """Return names that may begin with ``prefix``."""


@dataclass(frozen=True)
class Completion:
    """What fits: ``fragment`` is the text before the cursor that each of ``matches`` would replace."""

    fragment: str
    matches: list[str]


def complete_line(line: str, names: Names) -> Completion | None:
    """Complete a line of magic up to the cursor, or return None where it is none of ours."""
    if found := _LINE_MAGIC.match(line):
        return _complete_verb(found[1], names)
    if found := _CELL_MAGIC.match(line):
        return _complete_arguments(CELL, found[1].split(" "), names)
    return None


def _complete_verb(text: str, names: Names) -> Completion:
    words = text.split()
    if not words or (len(words) == 1 and not text[-1].isspace()):
        fragment = words[0] if words else ""
        return Completion(fragment, _fitting([*VERBS, "--help"], fragment))
    command = VERBS.get(words[0])
    after = text.split(None, 1)[1] if len(words) > 1 else ""
    return _complete_arguments(command, after.split(" "), names) if command else Completion(text, [])


def _complete_arguments(command: Command, words: Sequence[str], names: Names) -> Completion:
    """Complete the last of the words that follow a command."""
    *before, word = words
    before = [w for w in before if w]
    asked = _argument_of(command, before[-1]) if before else None
    if asked is None and word.startswith("-"):
        option, equals, value = word.partition("=")
        if not equals:
            return Completion(word, _fitting(_unused(command, before), word))
        asked, word = _argument_of(command, option), value
    if asked is None:
        asked = next((a for a in command.arguments if not a.is_option), None)
        if asked is None:
            return Completion(word, _fitting(_unused(command, before), word))
    return _complete_value(asked, word, before, names)


def _argument_of(command: Command, option: str) -> Argument | None:
    found = (a for a in command.arguments if a.is_option and option in a.names and a.takes_value)
    return next(found, None)


def _unused(command: Command, before: Sequence[str]) -> list[str]:
    used = {name for a in command.arguments if set(a.names) & set(before) for name in a.names}
    return [name for name in command.option_names if name not in used]


def _complete_value(argument: Argument, word: str, before: Sequence[str], names: Names) -> Completion:
    if isinstance(argument.values, tuple):
        return Completion(word, _fitting(argument.values, word))
    listed, fragment = "", word
    if argument.values in _LISTED:
        listed, comma, fragment = word.rpartition(",")
        listed += comma
    taken = {*listed.split(","), *before} if not argument.is_option or listed else set()
    offered = [name for name in names.of_kind(argument.values, fragment) if name not in taken]
    return Completion(fragment, _fitting(offered, fragment))


def _fitting(names: Iterable[str], fragment: str) -> list[str]:
    return [name for name in names if name.lower().startswith(fragment.lower())]


def line_in_worker_cell(full_text: str, cursor_line: int) -> str | None:
    """Return the cursor's line where it is code of a cell that runs on the workers, else None."""
    found = _CELL_START.match(full_text)
    if found is None or cursor_line <= full_text.count("\n", 0, found.end()):
        return None
    return full_text.split("\n")[cursor_line]


# --------------------------------------------------------------------------------------- in a live notebook


def _paths(prefix: str) -> list[str]:
    """Return the paths that begin so, folders with a slash behind."""
    found = sorted(glob.glob(f"{glob.escape(prefix)}*"))
    return [f"{path}/" if os.path.isdir(path) else path for path in found]


class LiveNames:
    """Names from the session's cluster and the notebook.

    Parameters
    ----------
    shell : InteractiveShell
        The notebook's shell.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def of_kind(self, kind: str, prefix: str) -> Iterable[str]:
        """Return names of a kind; none where there is no cluster to ask."""
        match kind:
            case "strategy":
                return [*STRATEGIES, *ALIASES]
            case "count":
                return map(str, range(1, len(_session().known_devices) + 1))
            case "device":
                return [device.id for device in _session().known_devices] + ["auto"]
            case "rank":
                return [*map(str, range(sum(not w.spare for w in self._workers()))), "all"]
            case "worker":
                workers = self._workers()
                return dict.fromkeys([*(w.id for w in workers), *(w.device.id for w in workers)])
            case "free device":
                used = {worker.device.id for worker in self._workers()}
                return [device.id for device in _session().known_devices if device.id not in used]
            case "target":
                workers = [worker for worker in self._workers() if not worker.spare]
                ranks = map(str, range(len(workers)))
                return dict.fromkeys([*ranks, *(w.id for w in workers), *(w.device.id for w in workers)])
            case "cluster":
                from openclaw_nb.cluster.files import read_notes

                return [note["name"] for note in read_notes() if note["runs"]]
            case "notebook variable":
                return self._notebook_variables()
            case "worker variable":
                return self._worker_variables(prefix)
            case "directory":
                return [path for path in _paths(prefix) if path.endswith("/")]
            case "file":
                return [path for path in _paths(prefix) if path.endswith(("/", ".yaml", ".yml"))]
        return []

    def _workers(self) -> list[Any]:
        cluster = _session().cluster
        return cluster.master.workers if cluster is not None else []

    def _notebook_variables(self) -> list[str]:
        hidden = self._shell.user_ns_hidden
        return sorted(n for n in self._shell.user_ns if not n.startswith("_") and n not in hidden)

    def _worker_variables(self, prefix: str) -> list[str]:
        _, matches = self.on_worker(prefix, len(prefix))
        return [
            name
            for name in matches
            if name.isidentifier()
            and not keyword.iskeyword(name)
            and not hasattr(builtins, name)
            and not name.startswith("_")
        ]

    def on_worker(self, code: str, cursor: int) -> tuple[str, list[str]]:
        """Complete code against rank 0's variables; nothing while a cell runs or there is no cluster."""
        cluster = _session().cluster
        if cluster is None:
            return "", []
        master = cluster.master
        if master.last_run is not None and master.last_run.running:
            return "", []
        try:
            found = master.complete(code, cursor)
        except OpenClawError:  # the worker is being replaced; Tab is no place to say so
            return "", []
        return found["text"], found["matches"]


def _session() -> Any:
    from openclaw_nb.session import current_session

    return current_session()


def matcher(names: LiveNames) -> Callable[[Any], dict[str, Any]]:
    """Return what IPython calls: it completes magics, and the workers' variables in cells that run there."""

    def complete(context: Any) -> dict[str, Any]:
        line = context.full_text.split("\n")[context.cursor_line][: context.cursor_position]
        if line_in_worker_cell(context.full_text, context.cursor_line) is not None:
            fragment, matches = names.on_worker(line, len(line))
            return _result(fragment, matches, suppress=False)
        found = complete_line(line, names)
        if found is None:
            return _result("", [], suppress=False)
        return _result(found.fragment, found.matches, suppress=True)

    # How IPython recognises a matcher of its newer interface.
    vars(complete).update(matcher_api_version=2, matcher_identifier=MATCHER)
    return complete


def _result(fragment: str, matches: Sequence[str], *, suppress: bool) -> dict[str, Any]:
    from IPython.core.completer import SimpleCompletion

    return {
        "completions": [SimpleCompletion(text, type="openclaw") for text in matches],
        "matched_fragment": fragment,
        "suppress": suppress,
        "ordered": suppress,
    }
