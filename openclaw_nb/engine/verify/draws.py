"""What draws random numbers: ranks draw others than a single device, so that nothing can be compared.

Layers are found by how far the generators have come before and after them, which costs little. The calls are found by
looking at every function of torch, in a run of its own.

Knows modules, torch's functions and its random state; does not know what is verified.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name


class Draws:
    """Watches models while they run.

    Parameters
    ----------
    models : mapping of str to nn.Module
        By the names under which layers are told.

    Attributes
    ----------
    layers : list of str
        The innermost layers that have drawn, each once.
    inside, outside : list of str
        The calls that have drawn, each once: in the models, and elsewhere but for loaders. Only when `watching` names
        them.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._modules = {
            module: f"{model}.{name}".rstrip(".")
            for model, root in models.items()
            for name, module in root.named_modules()
        }
        self._before: list[list[Tensor]] = []
        self._explained: list[bool] = []
        self.layers: list[str] = []
        self.inside: list[str] = []
        self.outside: list[str] = []

    @contextmanager
    def watching(self, *, calls: bool = False) -> Iterator[None]:
        """Watch in the ``with`` block, for ``calls`` too."""
        handles = [
            handle
            for module in self._modules
            for handle in (
                module.register_forward_pre_hook(self._enter, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]
        try:
            with _Calls(self) if calls else nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._before.append(_states())
        self._explained.append(False)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if not self._before:  # left by an error on the way in
            return
        drew = _differ(self._before.pop(), _states())
        explained = self._explained.pop()
        name = self._modules[module]
        if drew and not explained and name not in self.layers:
            self.layers.append(name)
        if drew and self._explained:
            self._explained[-1] = True

    def note(self, function: Any) -> None:
        """Take note of a function that has drawn and was called just now."""
        where = _calling_line()
        calls = self.inside if self._before else self.outside
        if where is not None:
            call = f"{resolve_name(function) or function}{f' in `{where}`' if where else ''}"
            calls += [call] if call not in calls else []


class _Calls(TorchFunctionMode):
    """Sees every function of torch that is called."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _states()
        result = func(*args, **(kwargs or {}))
        if _differ(before, _states()):
            self._draws.note(func)
        return result


def _states() -> list[Tensor]:
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_gpu]


def _differ(one: list[Tensor], other: list[Tensor]) -> bool:
    return not all(torch.equal(a, b) for a, b in zip(one, other, strict=False))


def _calling_line() -> str | None:
    """Return the line of the person's code that runs; None when a loader stands between, "" when there is no text."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("torch.utils.data"):
            return None
        if module.partition(".")[0] not in ("torch", "openclaw_nb"):
            break
        frame = frame.f_back
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
