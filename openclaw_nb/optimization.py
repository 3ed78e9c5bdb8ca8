"""Mixed precision as it is asked for by layer: a description that strategies take, and plain loops too.

Imports no torch: what it describes is made real in `openclaw_nb.engine.precision`, where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from openclaw_nb.core.errors import UsageError
from openclaw_nb.strategies.precision import Precision


@dataclass(frozen=True)
class MixedPrecisionCoordinator:
    """Some layers compute in 16 bits, with one loss scale on all workers; the rest stays float32.

    Parameters stay float32. Where float16 is of no use, as on CPUs, which emulate it (tens of times slower), the
    layers compute in bfloat16, and this is said.

    Parameters
    ----------
    devices : sequence of str, optional
        The devices whose workers take part; all when not given.
    fp16_layers : sequence of str
        Which layers: names of submodules, words for types (``conv``, ``linear``, ``attention``, ``embedding``,
        ``recurrent``, or a part of a class's name), or regular expressions for names.
    scaler : {"dynamic", "none"} or number
        How the loss is scaled: by a scale that is halved when a gradient overflows, which also skips the step, on all
        workers alike, and doubled after 2000 steps without; not at all; or by a factor that stays.

    Raises
    ------
    UsageError
        When a value cannot be.

    Examples
    --------
    >>> from openclaw_nb.strategies import DataParallelStrategy
    >>> coordinator = MixedPrecisionCoordinator(devices=["CPU-0", "CPU-1"], fp16_layers=["conv", "attention"])
    >>> strategy = DataParallelStrategy(precision=coordinator)
    >>> strategy.devices, strategy.spec().options["precision"]["layers"]
    (('CPU-0', 'CPU-1'), ['conv', 'attention'])
    """

    devices: Sequence[str] | None = None
    fp16_layers: Sequence[str] = ("conv", "attention")
    scaler: str | float | None = "dynamic"

    def __post_init__(self) -> None:
        if isinstance(self.devices, str):
            raise UsageError(f"devices is a list of ids such as ['GPU-0', 'GPU-1'], not {self.devices!r}.")
        if self.devices is not None:
            object.__setattr__(self, "devices", tuple(self.devices))
        _ = self.precision

    @property
    def precision(self) -> Precision:
        """What a strategy is asked for."""
        return Precision("fp16", self.fp16_layers, self.scaler)

    @contextmanager
    def applied_to(
        self, model: Any, optimizer: Any = None, environment: Mapping[str, str] = os.environ
    ) -> Iterator[Any]:
        """Let a model compute so while the block runs, in a loop without a strategy.

        Parameters
        ----------
        model : nn.Module
            Called and trained as ever: ``loss.backward()`` scales, and leaves gradients that are not scaled.
        optimizer : Optimizer, optional
            Its step does nothing when a gradient has overflowed. Where the process is in a torch.distributed group,
            on any of its ranks: then all ranks call ``backward()`` equally often.
        environment : mapping
            Where a worker finds which device it has. On one that is not among ``devices`` nothing is changed.

        Yields
        ------
        LossScale or None
            The scale; ``get_scale()`` tells it.
        """
        device = environment.get("OPENCLAW_DEVICE")
        if device is not None and self.devices is not None and device not in self.devices:
            yield None
            return
        from openclaw_nb.engine.precision.plain import single_device

        optimizers = {} if optimizer is None else {"optimizer": optimizer}
        with single_device(self.precision, {"model": model}, optimizers, agree=True) as applied:
            yield applied.scale
