"""The strategies as the notebook side knows them: names and checked options, no torch."""

from __future__ import annotations

from typing import Any

from openclaw_nb.core.errors import unknown_name
from openclaw_nb.strategies.data_parallel import DataParallelStrategy
from openclaw_nb.strategies.hybrid_parallel import HybridParallelStrategy
from openclaw_nb.strategies.model_parallel import ModelParallelStrategy
from openclaw_nb.strategies.pipeline import PipelineStrategy
from openclaw_nb.strategies.sharded import ShardedDataParallelStrategy
from openclaw_nb.strategies.tensor_parallel import TensorParallelStrategy

__all__ = [
    "ALIASES",
    "STRATEGIES",
    "DataParallelStrategy",
    "HybridParallelStrategy",
    "ModelParallelStrategy",
    "PipelineStrategy",
    "ShardedDataParallelStrategy",
    "TensorParallelStrategy",
    "canonical_strategy",
]

STRATEGIES: dict[str, Any] = {
    "data_parallel": DataParallelStrategy,
    "sharded": ShardedDataParallelStrategy,
    "tensor_parallel": TensorParallelStrategy,
    "model_parallel": ModelParallelStrategy,
    "pipeline": PipelineStrategy,
    "hybrid_parallel": HybridParallelStrategy,
}
ALIASES = {
    "data": "data_parallel",
    "hybrid": "hybrid_parallel",
    "model": "model_parallel",
    "tensor": "tensor_parallel",
}


def canonical_strategy(name: str) -> str:
    """Return the strategy's own name for a name or an alias of it.

    Raises
    ------
    UnknownNameError
        With the strategies that there are.
    """
    found = ALIASES.get(name, name)
    if found not in STRATEGIES:
        raise unknown_name("strategy", name, [*STRATEGIES, *ALIASES])
    return found
