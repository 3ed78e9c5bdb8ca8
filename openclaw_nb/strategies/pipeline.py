"""Pipeline as it is asked for: the stages, the micro-batches and the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from openclaw_nb.core.errors import UsageError, unknown_name
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.strategies.common import Computing
from openclaw_nb.strategies.model_parallel import check_layers, check_stages

SCHEDULES = ("gpipe",)


@dataclass(frozen=True)
class PipelineStrategy(Computing):
    """Each worker has consecutive layers; a batch is cut into micro-batches, so that workers work at the same time.

    Parameters
    ----------
    model_layers : sequence of str, optional
        Names of the layers in order, or regular expressions; found when not given. They are cut into stages that are
        balanced by the number of parameters.
    stages : sequence of sequence of str, optional
        The layers of each worker by rank, in place of `model_layers`.
    microbatches : int, optional
        Into how many parts each batch is cut; twice the number of workers when not given. A batch with fewer samples is
        cut into as many parts as it has samples.
    schedule : {"gpipe"}
        ``gpipe``: all micro-batches forward, then all back.
    devices : sequence of str, optional
        The devices whose workers take part; all when not given.
    **computing
        Precision and memory: those of `openclaw_nb.strategies.common.Computing`.

    Raises
    ------
    UsageError
        When a value cannot be.

    Examples
    --------
    >>> PipelineStrategy(microbatches=4).spec().options
    {'schedule': 'gpipe', 'microbatches': 4}
    """

    name: ClassVar[str] = "pipeline"

    model_layers: Sequence[str] | None = None
    stages: Sequence[Sequence[str]] | None = None
    microbatches: int | None = None
    schedule: str = "gpipe"
    devices: Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layers("model_layers", self.model_layers)
        check_stages(self.stages)
        if self.stages is not None and self.model_layers is not None:
            raise UsageError("stages says which worker has which layer: leave model_layers out.")
        count = self.microbatches
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise UsageError(f"microbatches is a whole number of at least 1, not {count!r}.")
        if self.schedule not in SCHEDULES:
            raise unknown_name("schedule", self.schedule, SCHEDULES)

    def spec(self, **cell: Any) -> StrategySpec:
        """Return what the workers are told.

        Parameters
        ----------
        **cell
            The other fields of `StrategySpec`: which model, optimizer and loader.
        """
        options: dict[str, Any] = {"schedule": self.schedule}
        if self.microbatches is not None:
            options["microbatches"] = self.microbatches
        if self.model_layers is not None:
            options["model_layers"] = list(self.model_layers)
        if self.stages is not None:
            options["stages"] = [list(stage) for stage in self.stages]
        options |= self.computing_options()
        return StrategySpec(name=self.name, options=options, **cell)
