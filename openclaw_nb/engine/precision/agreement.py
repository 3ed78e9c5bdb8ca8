"""A cell's own GradScaler, which skips a step on all ranks when a gradient has overflowed on any.

Where ranks have the same gradients they skip alike without it; where they have parts of them, or the cell changes
them after ``backward()``, they would not. Knows torch's GradScaler; its ``_unscale_grads_`` is private, and a test says
when it changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Gather = Callable[[Tensor], Tensor]
"""Returns the ranks' vectors as rows; called by all ranks alike."""


def agree_on_overflow(scaler: torch.amp.GradScaler, gather: Gather) -> Callable[[], None]:
    """Let a scaler find what any rank finds; return how to undo that.

    Its class is exchanged, as what is set on the object would be pickled with it.
    """
    kind = type(scaler)

    def unscale(self: Any, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = kind._unscale_grads_(self, *args, **kwargs)
        own = max((float(each) for each in found.values()), default=0.0)
        on_any = float(gather(torch.tensor([own])).max())
        for each in found.values():
            each.fill_(on_any)
        return found

    fields = {"__module__": kind.__module__, "_unscale_grads_": unscale}
    scaler.__class__ = type(kind.__name__, (kind,), fields)

    def undo() -> None:
        scaler.__class__ = kind

    return undo
