"""Which layers draw random numbers while they run: ranks draw others than a single device, so nothing can be compared.

Knows modules and torch's random state; does not know what is verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


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
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._modules = {
            module: f"{model}.{name}".rstrip(".")
            for model, root in models.items()
            for name, module in root.named_modules()
        }
        self._before: list[Tensor] = []
        self._explained: list[bool] = []
        self.layers: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch in the ``with`` block."""
        handles = [
            handle
            for module in self._modules
            for handle in (
                module.register_forward_pre_hook(self._enter, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._before.append(torch.get_rng_state())
        self._explained.append(False)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if not self._before:  # left by an error on the way in
            return
        drew = not torch.equal(self._before.pop(), torch.get_rng_state())
        explained = self._explained.pop()
        name = self._modules[module]
        if drew and not explained and name not in self.layers:
            self.layers.append(name)
        if drew and self._explained:
            self._explained[-1] = True
