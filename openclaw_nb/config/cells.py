"""What a configuration says of cells: their strategy where they name none, and the defaults of their options.

Knows descriptions of strategies; does not know notebooks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from openclaw_nb.config.schema import BESIDE, fields_of
from openclaw_nb.config.settings import Configuration
from openclaw_nb.config.settle import allowed_precisions, cores_for_gpus
from openclaw_nb.core.errors import ConfigurationError
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.strategies import STRATEGIES

# Fields of descriptions that a key of another section sets, for every strategy that has them.
COMMON = {
    "sync_frequency": "parallel.sync_interval",
    "fusion_buffer_size": "parallel.fusion_buffer_size",
    "memory_pinning": "parallel.memory_pinning",
    "async_io": "parallel.async_io",
    "checkpoint": "checkpoint.dir",
    "checkpoint_every": "checkpoint.interval",
}
_OF_GPUS = {
    "memory_pooling": "parallel.memory_pooling",
    "gpu_memory_fraction": "parallel.gpu_memory_fraction",
}
# An option of a cell takes the place of these fields, too: they say the same in another way.
_REPLACES = {"stages": ("model_layers", "device_mapping"), "model_layers": ("stages", "device_mapping")}


@dataclass(frozen=True)
class CellDefaults:
    """What holds for cells that do not say otherwise.

    Attributes
    ----------
    strategy : str or None
        The strategy of training cells that name none.
    where : str
        Where that is configured.
    """

    strategy: str | None = None
    where: str = ""
    _own: Mapping[str, Any] = field(default_factory=dict)
    _common: Mapping[str, Any] = field(default_factory=dict)
    _forbidden: Mapping[str, str] = field(default_factory=dict)

    def fields_for(self, strategy: str) -> dict[str, Any]:
        """Return the fields of a strategy's description that are configured."""
        own = self._own if strategy == self.strategy else {}
        taken = fields_of(strategy)
        return {name: value for name, value in {**self._common, **own}.items() if name in taken}

    def describe(self, strategy: str, given: Mapping[str, Any]) -> Any:
        """Return a strategy's description: what was given for a cell, and for the rest what is configured.

        Raises
        ------
        UsageError
            When that cannot be.
        """
        replaced = {name for each in given for name in _REPLACES.get(each, ())}
        configured = {name: v for name, v in self.fields_for(strategy).items() if name not in replaced}
        return STRATEGIES[strategy](**{**configured, **given})

    def check(self, spec: StrategySpec | None) -> None:
        """Refuse a cell that uses what the workers may not, by their ``capabilities``.

        Raises
        ------
        ConfigurationError
            With the worker that does not allow it.
        """
        asked = {} if spec is None else spec.options.get("precision") or {}
        if (precision := str(asked.get("name"))) in self._forbidden:
            raise ConfigurationError([f"The cell asks for {precision}. {self._forbidden[precision]}"])


def cell_defaults(
    configuration: Configuration,
    devices: Collection[str],
    started: Collection[str] | None = None,
    replaced: Mapping[str, str] | None = None,
) -> CellDefaults:
    """Return what a configuration says of the cells of a cluster.

    Parameters
    ----------
    configuration : Configuration
        What is configured.
    devices : collection of str
        The devices of the workers.
    started : collection of str, optional
        Those of the workers that were started, which may be others by now; `devices` when not given.
    replaced : mapping of str to str, optional
        The core in the place of each GPU that is named and not there; by the configuration alone when not given.
    """
    started = devices if started is None else started
    if replaced is None:
        has_gpus = any(device.startswith("GPU-") for device in started)
        replaced = {} if has_gpus else cores_for_gpus(configuration)
    has_gpu = any(device.startswith("GPU-") for device in devices)
    paths = COMMON | (_OF_GPUS if has_gpu else {})
    common = {name: configuration.value(path) for name, path in paths.items()}
    common = {name: value for name, value in common.items() if value is not None}
    if "checkpoint_every" in common:
        common["checkpoint_every"] = f"{common['checkpoint_every']:.10g}s"

    own = {
        path.partition(".")[2]: _placed(path, setting.value, replaced)
        for path, setting in configuration.settings.items()
        if path.startswith("strategy.") and path != "strategy.name"
    }
    if "devices" in own and not set(own["devices"]) < set(started):
        # All of them, which are all after a change of the workers, too; or others were asked for beside the file.
        del own["devices"]
    strategy = configuration.strategy
    if strategy is None:  # what may stand beside the word for a strategy holds under each that a cell names
        common |= {name: own[name] for name in BESIDE if name in own}
    forbidden = {
        precision: f"{worker.where}, capabilities of {worker.device_id}: {', '.join(worker.capabilities)}."
        for precision, worker in allowed_precisions(configuration).items()
    }
    return CellDefaults(
        None if strategy is None else strategy.value,
        "" if strategy is None else f"{strategy.where}, {strategy.written}",
        own,
        common,
        forbidden,
    )


def _placed(path: str, value: Any, replaced: Mapping[str, str]) -> Any:
    """Return a value in which cores have taken the place of GPUs, where they have."""
    if path == "strategy.devices":
        return tuple(replaced.get(device, device) for device in value)
    if path == "strategy.device_mapping":
        return {layer: replaced.get(device.upper(), device.upper()) for layer, device in value.items()}
    return value
