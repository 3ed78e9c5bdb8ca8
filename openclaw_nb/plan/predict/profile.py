"""What was measured of a cell: layers and a step on one worker, steps on several at once, and the link between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openclaw_nb.plan.predict.cost import Link, fit_all_reduce, fit_message


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer, on the whole batch.

    Attributes
    ----------
    name : str
        Its name in the model.
    part : str
        What it is of a stage: the name of the layer that is on one worker as a whole, or "" where it runs wherever its
        input is, as a function without parameters does.
    unit : str
        The name of what sharded training gathers at once with it; "" for the rest, which is gathered together.
    seconds : float
        Forward and backward together.
    parameter_bytes, input_bytes, output_bytes, saved_bytes : int
        ``saved_bytes`` is what it keeps for the backward pass.
    shared_bytes : int
        Of parameters that a layer before it has too, which are not in ``parameter_bytes``.
    splits : bool
        Whether its weights can be split over workers (tensor parallel).
    """

    name: str
    seconds: float
    part: str = ""
    unit: str = ""
    parameter_bytes: int = 0
    shared_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    saved_bytes: int = 0
    splits: bool = False


@dataclass(frozen=True)
class Timing:
    """Seconds of one step's phases on one worker: to get data, forward and backward, and the update."""

    data: float
    model: float
    update: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.data + self.model + self.update


@dataclass(frozen=True)
class Together:
    """So many workers at once, each with its part of the batch, all ends of steps met; and their links.

    Attributes
    ----------
    timing : Timing
        Of a step.
    all_reduce : Link
        What gradients of data parallel training are summed over, through memory where workers share it.
    group : Link
        What the workers' group makes its collectives over: those of split layers, and of shards.
    message : Link
        What one worker sends to another.
    """

    timing: Timing
    all_reduce: Link
    group: Link
    message: Link


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All that predictions are made from.

    Attributes
    ----------
    layers : tuple of Layer
        In the order in which they are called.
    batch_size : int
        Samples of a global batch.
    alone : mapping of int to Timing
        One worker, the others idle, with a batch of so many samples; the global batch and one smaller, at least.
    together : mapping of int to Together
        By how many workers.
    optimizer_factor : float
        Bytes of the optimizer's state, by bytes of the parameters.
    memory_bytes : int
        What a worker may use.
    num_cores : int or None
        Cores that all workers share; None when each has a device of its own.
    num_batchnorms : int
        Layers whose statistics are of a whole batch.
    """

    layers: tuple[Layer, ...]
    batch_size: int
    alone: Mapping[int, Timing]
    together: Mapping[int, Together] = field(default_factory=dict)
    optimizer_factor: float = 0.0
    memory_bytes: int = 1 << 62
    num_cores: int | None = None
    num_batchnorms: int = 0

    @property
    def parts(self) -> list[list[Layer]]:
        """The layers by what is on one worker as a whole, in order; what has no part goes with what is before it."""
        found: dict[str, list[Layer]] = {}
        first: list[Layer] = []
        at = first
        for layer in self.layers:
            at = found.setdefault(layer.part, []) if layer.part else at
            at.append(layer)
        if found:
            next(iter(found.values()))[:0] = first
        return list(found.values())

    @property
    def step(self) -> Timing:
        """A step with the global batch on one worker."""
        return self.alone[self.batch_size]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(layer.parameter_bytes for layer in self.layers)

    def alone_with(self, num_samples: float) -> Timing:
        """Return one worker's step with so many samples: a fixed part and one that grows with the samples."""
        small = min(self.alone)
        if small == self.batch_size:
            part = num_samples / self.batch_size
            return Timing(self.step.data * part, self.step.model * part, self.step.update)
        low, high = self.alone[small], self.step

        def at(few: float, many: float) -> float:
            # Neither part is negative, however the two were measured; of the whole batch it is what was measured.
            slope = min(max((many - few) / (self.batch_size - small), 0.0), many / self.batch_size)
            return many - slope * (self.batch_size - num_samples)

        return Timing(at(low.data, high.data), at(low.model, high.model), high.update)

    def contention(self, num_workers: int) -> float:
        """Return how many times as long forward and backward take when so many workers compute at once."""
        if num_workers == 1 or not self.together:
            return 1.0
        nearest = self._nearest(num_workers)
        part = -(-self.batch_size // nearest)
        alone = self.alone_with(part).model
        return max(self.together[nearest].timing.model / alone, 1.0) if alone else 1.0

    def link(self, num_workers: int) -> Together:
        """Return what was measured with so many workers, or with the number nearest to it."""
        return self.together[self._nearest(num_workers)]

    def _nearest(self, num_workers: int) -> int:
        return min(self.together, key=lambda count: (abs(count - num_workers), count))


def read_profile(alone: Mapping[str, Any], together: Sequence[Mapping[str, Any]]) -> Profile:
    """Return the profile that the workers' reports tell.

    Parameters
    ----------
    alone : mapping
        Report of one worker by itself; see `openclaw_nb.engine.profile.trial.Profiler`.
    together : sequence of mapping
        Reports of several at once.
    """
    layers = tuple(Layer(**layer) for layer in alone["layers"])
    return Profile(
        layers=layers,
        batch_size=alone["batch_size"],
        alone={int(each["num_samples"]): _timing(each) for each in alone["timings"]},
        together={int(each["num_workers"]): _together(each) for each in together},
        optimizer_factor=alone["optimizer_factor"],
        memory_bytes=min(each["memory_bytes"] for each in (*together, alone)),
        num_cores=alone["num_cores"],
        num_batchnorms=alone["num_batchnorms"],
    )


def _timing(told: Mapping[str, Any]) -> Timing:
    return Timing(told["data"], told["model"], told["update"])


def _together(told: Mapping[str, Any]) -> Together:
    reduces, sums, messages = told["all_reduces"], told["group_sums"], told["messages"]
    return Together(
        _timing(told["timings"][0]),
        all_reduce=fit_all_reduce(tuple(reduces[0]), tuple(reduces[1]), told["num_workers"]),
        group=fit_all_reduce(tuple(sums[0]), tuple(sums[1]), told["num_workers"]),
        message=fit_message(tuple(messages[0]), tuple(messages[1])),
    )
