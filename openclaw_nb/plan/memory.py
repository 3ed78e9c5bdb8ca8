"""What would fit into a worker's memory, from what did not.

    what a step takes = state (parameters, gradients, optimizer) + activations + the rest
                            └ sharded: / workers                    └ --accumulate A: / A
                            └ model_parallel, pipeline: / workers ──┘  bf16: / 2   computed twice: `_recomputed`

Estimates of what a setting leaves, each from a division, without what torch's kernels take for themselves (Rajbhandari
et al., "ZeRO", SC 2020, section 3; Chen et al., 2016). Pure: sizes in bytes in, advice out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

_MOST_ACCUMULATED = 64


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a worker's memory held when it ran out, in bytes.

    Attributes
    ----------
    parameters, gradients, optimizer : int
        Of all models and optimizers that were alive.
    activations : int
        An estimate: what has grown since the cell began and is none of the others.
    tensors : int
        Other tensors and arrays, such as the data.
    rest : int
        Python, torch and what else the process holds.
    requested : int or None
        What was asked for and could not be had; None when it is not known.
    free : int
        What could still be had.
    state : int
        What parameters, gradients and optimizer take once all of them are there.
    layers_done, num_layers : int
        How far a forward pass had come, and of how many layers; zeros when it failed elsewhere.
    num_workers : int
        How many share the training.
    num_blocks, parts_per_block : int
        Blocks of the model that could be computed twice, and how many layers each has.
    in_use : frozenset of str
        Settings of the cell: ``"precision"``, ``"activation_checkpointing"``, a strategy's name.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    tensors: int
    rest: int
    requested: int | None
    free: int
    state: int
    layers_done: int = 0
    num_layers: int = 0
    num_workers: int = 1
    num_blocks: int = 0
    parts_per_block: int = 1
    in_use: frozenset[str] = field(default_factory=frozenset)

    @property
    def used(self) -> int:
        """All that was held."""
        known = self.parameters + self.gradients + self.optimizer
        return known + self.activations + self.tensors + self.rest

    @property
    def limit(self) -> int:
        """All that could have been held."""
        return self.used + self.free

    @property
    def growing(self) -> int:
        """What grows with the batch: activations, what was asked for on top, and what later layers would have taken.

        Those as much as the ones before them.
        """
        so_far = self.activations + (self.requested or 0)
        return so_far * self.num_layers // self.layers_done if self.layers_done else so_far

    @property
    def needed(self) -> int:
        """What the step would have taken, as far as it is known."""
        return self.state + self.growing + self.tensors + self.rest


@dataclass(frozen=True)
class Way:
    """A setting or a strategy, what it would take, and whether that is there."""

    what: str
    needed: int
    fits: bool

    @property
    def key(self) -> str:
        """The key of the configuration that says the same."""
        option = self.what.partition(" ")[0]
        return "strategy.name" if option == "--strategy" else f"strategy.{option[2:].replace('-', '_')}"


def ways_out(usage: Usage, strategies: Collection[str]) -> list[Way]:
    """Return what could be done, simplest first, with what each would take.

    Parameters
    ----------
    usage : Usage
        What there was.
    strategies : collection of str
        Which there are.
    """
    ways = [*_settings(usage), *_strategies(usage, strategies)]
    return [Way(what, needed, needed <= usage.limit) for what, needed in ways]


def _settings(usage: Usage) -> Iterator[tuple[str, int]]:
    fixed = usage.state + usage.tensors + usage.rest
    if "precision" not in usage.in_use:
        yield "--precision bf16", fixed + usage.growing // 2
    if usage.num_blocks > 1 and "activation_checkpointing" not in usage.in_use:
        yield "--activation-checkpointing", fixed + _recomputed(usage)
    parts = _fewest_parts(usage.growing, usage.limit - fixed)
    yield f"--accumulate {parts}, with batches of 1/{parts} of the size", fixed + usage.growing // parts


def _recomputed(usage: Usage) -> int:
    """Return what is kept when blocks are computed twice: each one's input, and the inside of one at a time."""
    share = 1 / usage.parts_per_block + 1 / usage.num_blocks
    return int(usage.growing * min(1.0, share))


def _fewest_parts(growing: int, room: int) -> int:
    """Return into how many parts, a power of two, a batch is cut so that one fits; the most when none does."""
    parts = 2
    while growing // parts > room and parts < _MOST_ACCUMULATED:
        parts *= 2
    return parts


def _strategies(usage: Usage, strategies: Collection[str]) -> Iterator[tuple[str, int]]:
    workers = usage.num_workers
    if workers < 2:
        return
    fixed = usage.tensors + usage.rest
    layers = (usage.state + usage.growing) // workers
    needs = {
        "sharded": usage.state // workers + usage.growing + fixed,
        "model_parallel": layers + fixed,
        "pipeline": layers + fixed,
    }
    for name, needed in needs.items():
        if name in strategies and name not in usage.in_use:
            yield f"--strategy {name}, on {workers} workers", needed
