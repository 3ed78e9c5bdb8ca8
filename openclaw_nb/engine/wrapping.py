"""A module's ``forward`` with something around it for a while; a copy or a pickle of the module is without it.

Knows modules' dictionaries; does not know what is around. Unlike a pair of hooks it ends what it has begun also when
the cell is interrupted in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Around = Callable[..., Any]
"""Called with what it is around, then with that one's arguments."""


def wrap_forward(module: nn.Module, around: Around) -> Callable[[], None]:
    """Let ``around`` be called in place of a module's ``forward``; return how to undo that, last wrapped first."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = _Wrapped(module, module.forward, around)

    def undo() -> None:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = before

    return undo


class _Wrapped:
    def __init__(self, module: nn.Module, inner: Callable[..., Any], around: Around) -> None:
        self._module, self._inner, self._around = module, inner, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._inner, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")
