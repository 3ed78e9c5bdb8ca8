"""The commented configuration that ``openclaw init`` writes, and the reference of all keys: both from the schema."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openclaw_nb.config.schema import BESIDE, KEYS, SECTIONS, WORKER_KEYS, Key, variable_names
from openclaw_nb.config.unbuilt import UNBUILT_KEYS
from openclaw_nb.core.errors import UsageError

FILE_NAME = "openclaw_config.yaml"
_HEAD = """\
# The configuration of an openclaw_nb cluster. Every key may be left out; those behind a "#" are as they would be.
#   in a notebook   %openclaw start --config {name}      then   %openclaw config --effective
#   in a script     OpenClawCluster(config_path="{name}")
# A variable of the environment wins over a key: OPENCLAW_PARALLEL_WORKERS=4, and so on. docs/configuration.md
# says what each key sets on which backend.
"""
_ABOUT = {
    "master": "The controller.",
    "workers": "One entry a worker, when they differ; their devices in the order of ranks.",
    "strategy": "How training cells without -s run. A word, such as `strategy: data`, or a block.",
    "checkpoint": "Where cells write checkpoints, and how often.",
    "parallel": "How many workers, how they are started and what they may use.",
}
# What stands in the file uncommented: it changes nothing on a machine with a device, but shows the form.
_WRITTEN = ("parallel.enabled", "parallel.backend", "parallel.communication", "parallel.timeout")
_BACKENDS = ("local", "thread", "cuda", "mpi")


def template(name: str = FILE_NAME) -> str:
    """Return the text of a commented configuration file."""
    lines = [_HEAD.format(name=name).rstrip()]
    for section in SECTIONS:
        lines += ["", f"# {_ABOUT[section]}", *_section(section)]
    lines += ["", "# At the top level:"]
    for path, key in KEYS.items():
        if "." not in path:
            lines += [*_about(path, key), f"# {path}: {key.example or 'eth0'}"]
    return "\n".join(lines) + "\n"


def _section(section: str) -> Iterator[str]:
    if section == "workers":
        yield "# workers:"
        for number, (name, key) in enumerate(WORKER_KEYS.items()):
            yield f"#   {'-' if not number else ' '} {name}: {_yaml(key.example)}"
        return
    paths = [path for path in KEYS if path.startswith(f"{section}.") and KEYS[path].example is not None]
    written = any(path in _WRITTEN for path in paths)
    yield f"{section}:" if written else f"# {section}:"
    for path in paths:
        key = KEYS[path]
        yield from _about(path, key)
        mark = "  " if path in _WRITTEN else "#   " if not written else "  # "
        yield f"{mark}{path.partition('.')[2]}: {_yaml(key.example)}"


def _about(path: str, key: Key) -> Iterator[str]:
    indent = "  # " if path.startswith("parallel.") else "# "
    yield f"{indent}{key.sets} ({key.kind.allowed})"
    if path in UNBUILT_KEYS:
        yield f"{indent}not applicable yet: {UNBUILT_KEYS[path]}"


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return str(value)


def write_template(path: str | os.PathLike[str] = FILE_NAME, *, overwrite: bool = False) -> Path:
    """Write a commented configuration that loads unchanged; return where.

    Raises
    ------
    UsageError
        When there is such a file already, or it cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        target = target / FILE_NAME
    try:
        with target.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(template(target.name))
    except FileExistsError:
        raise UsageError(
            f"{target} is there already: name another file, or say --force to replace it."
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{target} cannot be written: {error}.") from None
    return target


# ------------------------------------------------------------------------------------------- the reference


def reference() -> str:
    """Return the table of all keys in Markdown, for the documentation."""
    head = ["key", "allowed", "default", "sets", *_BACKENDS, "overridden by"]
    lines = [_row(head), _row(["---"] * len(head))]
    for path, key in KEYS.items():
        default = "" if key.default is None else f"`{_yaml(key.default)}`"
        cells = [_on(backend, path, key) for backend in _BACKENDS]
        names = ", ".join(f"`{name}`" for name in variable_names(path))
        lines.append(_row([f"`{path}`", key.kind.allowed, default, key.sets, *cells, names]))
    for name, key in WORKER_KEYS.items():
        lines.append(_row([f"`workers[].{name}`", key.kind.allowed, "", key.sets, *["yes"] * 4, ""]))
    for name, path in BESIDE.items():
        lines.append(_row([f"`{name}`", KEYS[path].kind.allowed, "", f"as `{path}`", *["yes"] * 4, ""]))
    return "\n".join(lines)


def _on(backend: str, path: str, key: Key) -> str:
    if path in UNBUILT_KEYS:
        return "not yet"
    if backend in key.elsewhere or (backend == "thread" and "cpu" in key.elsewhere):
        return "no"
    return "on GPUs" if "cpu" in key.elsewhere else "yes"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
