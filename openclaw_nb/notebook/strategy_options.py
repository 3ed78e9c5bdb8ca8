"""What a cell's options ask of its strategy: which of them it takes, and the description that they make.

Knows the options' names; does not know how they are written.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from openclaw_nb.config.cells import CellDefaults
from openclaw_nb.core.errors import UsageError
from openclaw_nb.strategies.precision import Precision
from openclaw_nb.strategies.tensor_parallel import parse_plan

# What is said of batches, losses and BatchNorm where each rank has a part of each batch.
_BATCHES = (
    *("sync_frequency", "accumulate", "no_memory_pinning"),
    *("split", "reduction", "no_sync_batchnorm"),
)
# What is said of how each worker computes, under every strategy.
_COMPUTING = (
    *("precision", "fp16_layers"),
    *("activation_checkpointing", "memory_pooling", "gpu_memory_fraction"),
)
# What is not in a description, but in what every strategy cell is told.
_OF_CELLS = ("split", "reduction", "no_sync_batchnorm")
_TOGETHER = ("precision", "fp16_layers")
_OWN: Mapping[str, tuple[str, ...]] = {
    "data_parallel": (
        *_BATCHES,
        *("mode", "fusion_buffer_size"),
        *("checkpoint", "checkpoint_every", "keep", "resume"),
    ),
    "sharded": (*_BATCHES, "shard_layers", "no_reshard_after_forward"),
    "tensor_parallel": (*_BATCHES, "tp", "tp_plan"),
    "hybrid_parallel": (*_BATCHES, "dp", "pp", "tp", "tp_plan"),
    "model_parallel": ("stages",),
    "pipeline": ("stages", "microbatches", "schedule"),
}
_TAKES = {name: (*_COMPUTING, *own) for name, own in _OWN.items()}
# Why a strategy does not take one, where it can be told in a few words.
_WHY_NOT: Mapping[str, Mapping[str, str]] = {
    "sharded": {
        "checkpoint": "no worker has the whole state to write; save model.state_dict(), which is whole",
        "mode": "workers cannot make steps of their own with a shard each",
        "fusion_buffer_size": "gradients are reduced layer by layer (--shard-layers)",
    },
}


def refuse_others(name: str, given: argparse.Namespace, flags: Iterable[tuple[str, str]]) -> None:
    """Refuse options that the strategy does not take.

    Parameters
    ----------
    name : str
        The strategy.
    given : argparse.Namespace
        The options of the cell.
    flags : iterable of (str, str)
        Each option's name in ``given``, and as it is written.

    Raises
    ------
    UsageError
        With the strategies that take it, and why this one does not.
    """
    of_strategies = {option for options in _TAKES.values() for option in options}
    for option, flag in flags:
        if _is_given(given, option) and option in of_strategies.difference(_TAKES[name]):
            takers = ", ".join(each for each, options in _TAKES.items() if option in options)
            why = _WHY_NOT.get(name, {}).get(option)
            raise UsageError(
                f"{flag} is no option of {name}, but of {takers}{'' if why is None else f': {why}'}."
            )


def describe(name: str, given: argparse.Namespace, defaults: CellDefaults | None = None) -> Any:
    """Return the strategy's description that a cell's options make, and what is configured beside them.

    Raises
    ------
    UsageError
        For a value that cannot be.
    """
    described = _read_precision(given)
    for option in _TAKES[name]:
        if _is_given(given, option) and option not in (*_OF_CELLS, *_TOGETHER):
            value = getattr(given, option)
            described |= _READ[option](value) if option in _READ else {option: value}
    return (defaults or CellDefaults()).describe(name, described)


def _is_given(given: argparse.Namespace, option: str) -> bool:
    value = getattr(given, option)
    return value is not None and value is not False


def _read_precision(given: argparse.Namespace) -> dict[str, Any]:
    """Read what ``--precision`` and ``--fp16-layers`` ask for together."""
    if given.precision is None and given.fp16_layers is None:
        return {}
    layers = None if given.fp16_layers is None else given.fp16_layers.split(",")
    return {"precision": Precision(given.precision or "fp16", layers)}


def _read_stages(text: str) -> dict[str, Any]:
    """Read layers in order, or with slashes those of each worker."""
    stages = [[name.strip() for name in part.split(",") if name.strip()] for part in text.split("/")]
    if not all(stages):
        raise UsageError(
            f"--stages takes names of layers, embed,blocks,head, or each worker's, embed/blocks,head; not {text!r}."
        )
    return {"model_layers": stages[0]} if len(stages) == 1 else {"stages": stages}


# How an option is read into fields of a description, where it is not one by itself.
_READ: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "no_memory_pinning": lambda _: {"memory_pinning": False},
    "activation_checkpointing": lambda layers: {
        "activation_checkpointing": layers.split(",") if isinstance(layers, str) else layers
    },
    "no_reshard_after_forward": lambda _: {"reshard_after_forward": False},
    "stages": _read_stages,
    "dp": lambda degree: {"data_parallel_degree": degree},
    "pp": lambda degree: {"pipeline_degree": degree},
    "tp": lambda degree: {"tensor_parallel_degree": degree},
    "tp_plan": lambda text: {"plan": parse_plan(text)},
}
