"""By how much two values differ: the largest absolute difference of the numbers in them.

Knows numbers, arrays, tensors, and lists, dicts and models of them; does not know where they come from.
Tensors are taken by what they can do, so that torch is imported only if a value brings it along.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


def is_numeric(value: Any) -> bool:
    """Return whether a value is a number, an array or a tensor."""
    return isinstance(value, int | float | complex) or (hasattr(value, "shape") and hasattr(value, "dtype"))


def difference(left: Any, right: Any) -> float | None:
    """Return the largest absolute difference between two values, or None where it cannot be told.

    NaN at the same place on both sides counts as equal, on one side as infinitely far.
    """
    if is_numeric(left) and is_numeric(right):
        return _of_arrays(left, right)
    if type(left) is not type(right):
        return None
    if hasattr(left, "state_dict"):
        return difference(left.state_dict(), right.state_dict())
    if isinstance(left, Mapping):
        return _largest((left[key], right[key]) for key in left) if left.keys() == right.keys() else None
    if isinstance(left, list | tuple):
        return _largest(zip(left, right, strict=True)) if len(left) == len(right) else None
    return 0.0 if isinstance(left, str | bytes | None) and left == right else None


def _largest(pairs: Iterable[tuple[Any, Any]]) -> float | None:
    largest = 0.0
    for left, right in pairs:
        amount = difference(left, right)
        if amount is None:
            return None
        largest = max(largest, amount)
    return largest


def _of_arrays(left: Any, right: Any) -> float | None:
    import numpy as np

    a, b = _array(left), _array(right)
    if a.shape != b.shape or a.dtype.kind not in "biufc" or b.dtype.kind not in "biufc":
        return None
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
    apart[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    largest = float(apart.max(initial=0.0))
    return math.inf if math.isnan(largest) else largest


def _array(value: Any) -> Any:
    import numpy as np

    if hasattr(value, "detach"):
        plain = value.detach().cpu()
        value = (plain.cdouble() if plain.is_complex() else plain.double()).numpy()
    return np.atleast_1d(np.asarray(value))
