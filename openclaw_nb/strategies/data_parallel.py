"""Data parallel as it is asked for: the options, checked, in the words of cells, scripts and configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from openclaw_nb.core.errors import UsageError, unknown_name
from openclaw_nb.core.text import parse_size
from openclaw_nb.plan.checkpoints import parse_every
from openclaw_nb.plan.parallelism import check_degree
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.strategies.common import Computing

MODES = ("gradient", "parameter")
_SMALLEST_BUFFER = 1024


@dataclass(frozen=True)
class DataParallelStrategy(Computing):
    """Every worker has the whole model and a part of each batch.

    Parameters
    ----------
    devices : sequence of str, optional
        The devices whose workers take part; all when not given.
    sync_frequency : int
        Synchronise every so many steps.
    mode : {"gradient", "parameter"}
        ``gradient``: gradients are accumulated and one step is made every `sync_frequency` batches, the same as on a
        single device with batches so much larger. ``parameter``: each worker makes steps of its own, and parameters
        are averaged every `sync_frequency` steps (local SGD); also before evaluations, ``state_dict()`` and the end.
    accumulate : int
        How many batches make one step, for batches that do not fit into memory.
    fusion_buffer_size : int or str
        Bytes of gradients that are reduced at once, such as ``"25MB"``. Smaller ones begin earlier in the backward
        pass, larger ones have fewer messages.
    memory_pinning : bool
        Let loaders pin memory where they were made to; False saves memory of the host.
    async_io : bool, optional
        True: loaders without worker processes get one, which loads ahead while the cell computes; what the dataset
        itself draws at random is then what a loader with ``num_workers=1`` draws. False: batches are loaded when they
        are asked for, and training waits until a checkpoint is written. When not given, loaders are as they were
        made, and checkpoints are written meanwhile.
    checkpoint : str or Path, optional
        A directory for checkpoints of the training, made when it is not there; none are written when not given.
    checkpoint_every : int or str, optional
        How often: a number of steps, a time such as ``"300s"``, ``"5m"`` or ``"1h"``, or both (``"100,300s"``),
        whichever comes first. One more is written at the end. When not given, as often as
        `MasterNode.enable_auto_recovery` says: every 300 s, unless it was called.
    keep : int
        How many of the newest checkpoints are kept.
    resume : bool
        Go on from the newest checkpoint of the directory, where the cell was; it begins when there is none.
    **computing
        Precision and memory: those of `openclaw_nb.strategies.common.Computing`.

    Raises
    ------
    UsageError
        When a value cannot be.

    Examples
    --------
    >>> DataParallelStrategy(sync_frequency=10).spec().options["sync_frequency"]
    10
    """

    name: ClassVar[str] = "data_parallel"

    devices: Sequence[str] | None = None
    sync_frequency: int = 1
    mode: str = "gradient"
    accumulate: int = 1
    fusion_buffer_size: int | str = "25MB"
    memory_pinning: bool = True
    async_io: bool | None = None
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_every: int | str | None = None
    keep: int = 3
    resume: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in MODES:
            raise unknown_name("mode", self.mode, MODES)
        check_degree("keep", self.keep)
        if self.checkpoint_every is not None:
            parse_every(self.checkpoint_every, "checkpoint_every")
        if self.checkpoint is not None and not str(self.checkpoint).strip():
            raise UsageError("checkpoint is a directory, such as 'checkpoints/run-1', not an empty word.")
        if self.resume and (self.checkpoint is None or self.mode != "gradient"):
            raise UsageError("resume needs checkpoint, the directory to go on from, and mode 'gradient'.")
        if self.buffer_bytes < _SMALLEST_BUFFER:
            raise UsageError(
                f"fusion_buffer_size is a size of at least {_SMALLEST_BUFFER} bytes, such as '25MB', "
                f"not {self.fusion_buffer_size!r}."
            )

    @property
    def buffer_bytes(self) -> int:
        """The fusion buffer's size in bytes."""
        return parse_size(self.fusion_buffer_size, "fusion_buffer_size")

    def spec(self, **cell: Any) -> StrategySpec:
        """Return what the workers are told.

        Parameters
        ----------
        **cell
            The other fields of `StrategySpec`: which model, optimizer and loader.
        """
        options: dict[str, Any] = {
            "sync_frequency": self.sync_frequency,
            "mode": self.mode,
            "accumulate": self.accumulate,
            "fusion_buffer_size": self.buffer_bytes,
            "memory_pinning": self.memory_pinning,
        }
        if self.async_io is not None:
            options["async_io"] = self.async_io
        options |= self.computing_options()
        if self.checkpoint is not None:
            options |= {"checkpoint": os.fspath(self.checkpoint), "keep": self.keep, "resume": self.resume}
            if self.checkpoint_every is not None:
                options["checkpoint_every"] = str(parse_every(self.checkpoint_every, "checkpoint_every"))
        return StrategySpec(name=self.name, options=options, **cell)
