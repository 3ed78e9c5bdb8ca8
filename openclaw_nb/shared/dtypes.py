"""The types of values that shared tensors may have, by names that numpy and torch share.

Knows names and sizes; imports neither library.
"""

from __future__ import annotations

from typing import Any

from openclaw_nb.core.errors import UsageError, unknown_name

_NUMPY_TOO = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
_TORCH_ALONE = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
ITEM_BYTES = {**_NUMPY_TOO, **_TORCH_ALONE}
"""Bytes of one value, by the type's name."""


def dtype_name(dtype: Any) -> str:
    """Return the name of a type that is given by name, or as numpy's or torch's.

    Raises
    ------
    UsageError
        When shared tensors cannot have it.
    """
    word = dtype if isinstance(dtype, str) else str(dtype)
    name = word.removeprefix("torch.")
    if name in ITEM_BYTES:
        return name
    if not isinstance(dtype, str):
        import numpy as np

        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = word
    if name not in ITEM_BYTES:
        raise unknown_name("type of shared tensors", name, ITEM_BYTES)
    return name


def check_numpy_has(dtype: str, name: str) -> None:
    """Raise a UsageError when numpy has no such type."""
    if dtype in _TORCH_ALONE:
        raise UsageError(
            f"The shared tensor {name!r} is of {dtype}, which numpy does not have: take shared.tensor({name!r}), which "
            "imports torch."
        )
