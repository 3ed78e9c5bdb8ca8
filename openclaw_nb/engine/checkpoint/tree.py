"""Python values as JSON, tensors and arrays set aside: what optimizers, schedulers and scalers keep.

    {"step": tensor(3.), 0: (0.9, inf)}  ──encode──>  {"$": "dict", "items": [["step", {"$": "tensor", "key": …}], …]}

What is not written here is refused by its place, so that nothing ever has to be unpickled. Knows values; does not know
what they are for.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openclaw_nb.core.errors import CheckpointError

_PLAIN = (type(None), bool, int, str)
_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
}
_KNOWN = (dict, list, tuple, set, frozenset, torch.Size, OrderedDict, Counter)


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return what JSON can hold of a value.

    Parameters
    ----------
    value : object
        What is to be kept.
    path : str
        Where it is; names its tensors, and itself when it is refused.
    tensors : dict of str to Tensor
        Its tensors are added, uncopied; arrays as tensors that share their memory.

    Raises
    ------
    CheckpointError
        For a value of a kind that is not written.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "is": str(value)}
    if kind in _KNOWN:
        return _encode_container(value, path, tensors)
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"$": "tensor", "key": path}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        tensors[path] = torch.from_numpy(np.array(value))
        return {"$": "array" if isinstance(value, np.ndarray) else "scalar", "key": path}
    if kind is complex:
        return {"$": "complex", "is": [value.real, value.imag]}
    if kind is bytes:
        return {"$": "bytes", "is": base64.b64encode(value).decode()}
    raise CheckpointError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: it takes numbers, "
        "strings, tensors, arrays, and lists, tuples, sets and dicts of them. Keep such a value out of its state, or "
        "train without --checkpoint."
    )


def _encode_container(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    kind = type(value)
    if kind not in (dict, OrderedDict, Counter):
        items = [encode(item, f"{path}[{place}]", tensors) for place, item in enumerate(value)]
        return items if kind is list else {"$": kind.__name__, "items": items}
    if kind is dict and "$" not in value and all(type(key) is str for key in value):
        return {key: encode(item, f"{path}{_step_to(key)}", tensors) for key, item in value.items()}
    pairs = [
        [encode(key, f"a key of {path}", tensors), encode(item, f"{path}[{key!r}]", tensors)]
        for key, item in value.items()
    ]
    return {"$": kind.__name__, "items": pairs}


def _step_to(key: str) -> str:
    return f".{key}" if key.isidentifier() else f"[{key!r}]"


def decode(content: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `encode` has written; tensors are taken from ``tensors`` as they are."""
    if isinstance(content, list):
        return [decode(item, tensors) for item in content]
    if not isinstance(content, dict):
        return content
    kind = content.get("$")
    if kind is None:
        return {key: decode(item, tensors) for key, item in content.items()}
    if kind in _MAPPINGS:
        return _MAPPINGS[kind](
            (decode(key, tensors), decode(item, tensors)) for key, item in content["items"]
        )
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(item, tensors) for item in content["items"])
    if kind in ("tensor", "array", "scalar"):
        tensor = tensors[content["key"]]
        return tensor if kind == "tensor" else tensor.numpy()[() if kind == "scalar" else ...]
    if kind == "bytes":
        return base64.b64decode(content["is"])
    return complex(*content["is"]) if kind == "complex" else float(content["is"])
