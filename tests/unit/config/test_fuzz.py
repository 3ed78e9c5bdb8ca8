"""Whatever a file holds, it loads or says why, and what it says names the file; it never ends in another error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from openclaw_nb.config.cells import cell_defaults
from openclaw_nb.config.effects import effects_table
from openclaw_nb.config.load import load
from openclaw_nb.config.schema import KEYS, SECTIONS, WORKER_KEYS, variable_names
from openclaw_nb.core.errors import ConfigurationError

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402 - only where it is installed

_KEYS = sorted({path.rpartition(".")[2] for path in KEYS} | set(WORKER_KEYS) | set(SECTIONS) | {"devices"})
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        ["data", "hybrid_parallel", "mpi", "nccl", "GPU-0", "25MB", "INFO", "127.0.0.1", "fp16", "CPU-1"]
    )
)
_BLOCKS = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS) | st.text(max_size=5), inner)
    ),
    max_leaves=12,
)


_SETTINGS: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [hypothesis.HealthCheck.function_scoped_fixture],
}


def loads_or_says_why(file: Path) -> None:
    try:
        found = load(file, {})
    except ConfigurationError as error:
        problems = error.problems
    else:
        repr(effects_table(found, None))
        cell_defaults(found, ["CPU-0"])
        return
    assert problems
    assert all("a.yaml" in problem for problem in problems)


@hypothesis.settings(max_examples=150, **_SETTINGS)
@hypothesis.given(
    data=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))
)
def test_any_bytes(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(data)
    loads_or_says_why(file)


@hypothesis.settings(max_examples=250, **_SETTINGS)
@hypothesis.given(
    block=st.dictionaries(st.sampled_from([*SECTIONS, "devices", "fallback"]), _BLOCKS, max_size=4)
)
def test_any_block(block: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(block, allow_unicode=True), encoding="utf-8", errors="replace")
    loads_or_says_why(file)


@hypothesis.settings(max_examples=150, **_SETTINGS)
@hypothesis.given(
    name=st.sampled_from([name for path in KEYS for name in variable_names(path)]), text=st.text(max_size=30)
)
def test_any_variable(name: str, text: str) -> None:
    try:
        load(None, {name: text})
    except ConfigurationError as error:
        problems = error.problems
    else:
        return
    assert all(name in problem for problem in problems)
