"""Custom autograd functions get wholes: called past torch's functions, they would lose the gradient of a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from openclaw_nb.engine.loss.record import map_tensors
from openclaw_nb.engine.tensor.split import joined

_OWN = __name__.partition(".")[0]


def join_for_functions() -> Callable[[], None]:
    """Let every ``autograd.Function`` but our own get whole tensors from here on; return how to undo that."""
    function: Any = torch.autograd.Function
    before = function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.partition(".")[0] != _OWN:
            args = tuple(map_tensors(joined, each) for each in args)
        return before.__get__(None, cls)(*args, **kwargs)

    def undo() -> None:
        function.apply = before

    function.apply = classmethod(apply)
    return undo
