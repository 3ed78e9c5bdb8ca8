"""A model, or some of its layers, that compute in 16 bits while everything around stays float32.

    whole model   autocast around its call            layers   autocast around each of theirs
                  what it returns becomes float32              so does what they return

Operations choose by torch's autocast what they compute in; parameters stay float32, and so do their gradients. What
comes out is float32 again, so that the loss, or the next layer, computes in full precision. Knows modules; does not
know losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from openclaw_nb.engine.loss.record import map_tensors
from openclaw_nb.engine.wrapping import wrap_forward


class Casting:
    """Lets modules compute in another dtype while it is installed.

    Parameters
    ----------
    modules : mapping of str to nn.Module
        Those that do, by name.
    dtype : torch.dtype
        What they compute in.
    device_type : str
        Where: ``"cpu"`` or ``"cuda"``.

    Attributes
    ----------
    idle : dict of str to nn.Module
        Those that were never called so far.
    """

    def __init__(self, modules: Mapping[str, nn.Module], dtype: torch.dtype, device_type: str) -> None:
        self._modules, self._dtype, self._device_type = dict(modules), dtype, device_type
        self._undo: list[Callable[[], None]] = []
        self.idle = dict(modules)

    def install(self) -> None:
        """Begin, until `remove`."""
        for name, module in self._modules.items():
            self._undo.append(wrap_forward(module, self._around(name)))

    def remove(self) -> None:
        """Leave the modules as they were."""
        while self._undo:
            self._undo.pop()()

    def _around(self, name: str) -> Callable[..., Any]:
        def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.idle.pop(name, None)
            with torch.autocast(self._device_type, dtype=self._dtype):
                output = inner(*args, **kwargs)
            return map_tensors(self._widened, output)

        return around

    def _widened(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype is self._dtype else tensor
