"""Sharded data parallel as it is asked for: the options, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from openclaw_nb.core.errors import UsageError
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.strategies.common import Computing


@dataclass(frozen=True)
class ShardedDataParallelStrategy(Computing):
    """Every worker has a shard of the parameters, gradients and optimizer state, and a part of each batch.

    Made real by PyTorch's FSDP2 (``fully_shard``). For models whose parameters, gradients and optimizer state do not
    fit several times into the memory there is; each layer is gathered when it runs.

    Parameters
    ----------
    devices : sequence of str, optional
        The devices whose workers take part; all when not given.
    sync_frequency : int
        Make one step from so many batches.
    accumulate : int
        How many batches make one step, for batches that do not fit into memory.
    shard_layers : sequence of str or str, optional
        The layers that are gathered one by one: names of modules (``"body.layers"``, ``"body.layers.0"``) or of their
        class (``"Block"``), as a list or separated by commas. The model's repeated blocks when not given.
    reshard_after_forward : bool
        Drop a layer's parameters after its forward pass and gather them again for its backward pass; False needs more
        memory and fewer messages.
    memory_pinning : bool
        Let loaders pin memory where they were made to; False saves memory of the host.
    async_io : bool, optional
        As for `DataParallelStrategy`.
    **computing
        Precision and memory: those of `openclaw_nb.strategies.common.Computing`.

    Raises
    ------
    UsageError
        When a value cannot be.

    Examples
    --------
    >>> ShardedDataParallelStrategy(shard_layers="encoder,decoder").spec().options["shard_layers"]
    ['encoder', 'decoder']
    """

    name: ClassVar[str] = "sharded"

    devices: Sequence[str] | None = None
    sync_frequency: int = 1
    accumulate: int = 1
    shard_layers: Sequence[str] | str | None = None
    reshard_after_forward: bool = True
    memory_pinning: bool = True
    async_io: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(isinstance(name, str) and name.strip() for name in self._layer_names()):
            raise UsageError(
                "shard_layers names modules of the model, or classes of them, such as 'body.layers' or 'Block', not "
                f"{self.shard_layers!r}."
            )

    def _layer_names(self) -> list[Any]:
        if self.shard_layers is None:
            return []
        given = self.shard_layers
        return given.split(",") if isinstance(given, str) else list(given)

    def spec(self, **cell: Any) -> StrategySpec:
        """Return what the workers are told.

        Parameters
        ----------
        **cell
            The other fields of `StrategySpec`: which model, optimizer and loader.
        """
        options: dict[str, Any] = {
            "sync_frequency": self.sync_frequency,
            "accumulate": self.accumulate,
            "reshard_after_forward": self.reshard_after_forward,
            "memory_pinning": self.memory_pinning,
        }
        if names := [name.strip() for name in self._layer_names()]:
            options["shard_layers"] = names
        if self.async_io is not None:
            options["async_io"] = self.async_io
        options |= self.computing_options()
        return StrategySpec(name=self.name, options=options, **cell)
