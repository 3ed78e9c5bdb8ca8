"""Model parallel as it is asked for: which layers, and on which devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from openclaw_nb.core.errors import UsageError
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.strategies.common import Computing


@dataclass(frozen=True)
class ModelParallelStrategy(Computing):
    """Each worker has some of the model's layers; a batch goes through all of them, forward and back.

    Parameters
    ----------
    model_layers : sequence of str, optional
        Names of the layers in the order in which they are called, or regular expressions that match whole names.
        Together they hold every parameter exactly once. Found when not given: a model's children, and those of its
        lists.
    device_mapping : mapping of str to str, optional
        The device of each layer, such as ``{"embed": "CPU-0", "head": "CPU-1"}``; balanced by the number of parameters
        when not given.
    stages : sequence of sequence of str, optional
        The layers of each worker by rank, in place of the two above.
    devices : sequence of str, optional
        The devices whose workers take part; those of `device_mapping`, or all, when not given.
    **computing
        Precision and memory: those of `openclaw_nb.strategies.common.Computing`.

    Raises
    ------
    UsageError
        When a value cannot be.

    Examples
    --------
    >>> ModelParallelStrategy(model_layers=["embed", "head"]).spec().options["model_layers"]
    ['embed', 'head']
    """

    name: ClassVar[str] = "model_parallel"

    model_layers: Sequence[str] | None = None
    device_mapping: Mapping[str, str] | None = None
    stages: Sequence[Sequence[str]] | None = None
    devices: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_layers("model_layers", self.model_layers)
        check_stages(self.stages)
        if self.stages is not None and (self.model_layers is not None or self.device_mapping is not None):
            raise UsageError(
                "stages says which worker has which layer: leave model_layers and device_mapping out."
            )
        mapping = self.device_mapping
        if mapping is not None and (not isinstance(mapping, Mapping) or not mapping):
            raise UsageError(f"device_mapping is a dictionary of layers to devices, not {mapping!r}.")
        if mapping is not None and self.devices is None:
            object.__setattr__(self, "devices", list(dict.fromkeys(mapping.values())))
        super().__post_init__()  # last: a coordinator's devices are those where none are given

    def spec(self, **cell: Any) -> StrategySpec:
        """Return what the workers are told.

        Parameters
        ----------
        **cell
            The other fields of `StrategySpec`: which model, optimizer and loader.
        """
        options: dict[str, Any] = {}
        if self.model_layers is not None:
            options["model_layers"] = list(self.model_layers)
        if self.device_mapping is not None:
            options["device_mapping"] = dict(self.device_mapping)
        if self.stages is not None:
            options["stages"] = [list(stage) for stage in self.stages]
        options |= self.computing_options()
        return StrategySpec(name=self.name, options=options, **cell)


def check_layers(option: str, layers: object) -> None:
    """Raise a UsageError unless ``layers`` is None or names layers."""
    is_list = isinstance(layers, Sequence) and not isinstance(layers, str)
    if layers is not None and not (is_list and layers and all(isinstance(n, str) and n for n in layers)):  # type: ignore[attr-defined]
        raise UsageError(f"{option} is a list of names of layers, such as ['embed', 'head'], not {layers!r}.")


def check_stages(stages: object) -> None:
    """Raise a UsageError unless ``stages`` is None or a list of names of layers for each worker."""
    if stages is None:
        return
    if not isinstance(stages, Sequence) or isinstance(stages, str) or not stages:
        raise UsageError(
            f"stages is a list of layers for each worker, such as [['embed'], ['head']], not {stages!r}."
        )
    for stage in stages:
        check_layers("each of stages", stage if stage is not None else ())
