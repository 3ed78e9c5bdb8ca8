"""Step time, memory, bubble and efficiency of a strategy and its degrees.

One worker's part of the work is taken through the three axes of a mesh::

    data      a part of the batch          gradients are summed (or sharded: gathered and scattered)
    pipeline  a part of the layers         outputs go to the next stage, their gradients back
    tensor    a part of each layer         outputs and input gradients are summed, a pair of layers each

Where workers share cores, each part takes `Profile.contention` times what it takes alone.

What a worker holds is what the strategies are built to hold, in times of the parameters' size (a split layer's part is
``own``, f is `Profile.optimizer_factor`, what is kept for the backward pass comes on top)::

                     while it trains                        when the cell ends
    data parallel    2 + f                                  2 + f
    stages           1 + own (1 + f)                        2 + f
    tensor           1 + f, and own (2 + f)                 1 + f, own (2 + f), and the joined parts (2 + f)
    sharded          (2 + f) / n, and gathered layers       2 (2 + f), of which half are all ranks' shards

The model is the notebook's own object on every worker: stages leave it there whole, tensor parallel keeps it as it was
after the first step, and when a cell ends every worker gets all trained values, gradients and optimizer state.

Sources beside those in `cost`: memory of sharded training, Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models", SC 2020, and Zhao et al., "PyTorch FSDP", VLDB 2023; messages of tensor parallel
layers, Shoeybi et al., "Megatron-LM", 2019: one all-reduce forward and one backward for each pair of split layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from openclaw_nb.core.text import counted, size_text
from openclaw_nb.plan.predict.cost import bubble
from openclaw_nb.plan.predict.profile import Layer, Profile
from openclaw_nb.plan.stages import cut

BUCKET_BYTES = 25 * 1024 * 1024
_COPIES_OF_UNIT = 3  # its gathered parameters, their gradients, and those as they are sent


@dataclass(frozen=True, order=True)
class Choice:
    """A strategy and its degrees: ``data`` × ``pipeline`` × ``tensor`` workers, ``microbatches`` a step."""

    strategy: str
    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    microbatches: int = 1

    @property
    def num_workers(self) -> int:
        """How many workers it takes."""
        return self.data * self.pipeline * self.tensor

    @property
    def degrees(self) -> str:
        """The degrees in words."""
        parts = [f"{short} {n}" for short, n in self._named if n > 1]
        if self.microbatches > 1:
            parts.append(f"{self.microbatches} micro-batches")
        return ", ".join(parts) or "1 worker"

    @property
    def _named(self) -> list[tuple[str, int]]:
        return [("dp", self.data), ("pp", self.pipeline), ("tp", self.tensor)]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is expected of a choice.

    Attributes
    ----------
    choice : Choice
        The strategy and its degrees.
    step_seconds, compute_seconds, transfer_seconds : float
        Of one step; ``compute_seconds`` with the bubble.
    memory_bytes : int
        Parameters, gradients, optimizer state and what is kept for the backward pass, of the worker that has most,
        while it trains.
    end_bytes : int
        The most that a worker holds when the cell ends.
    bubble : float
        The idle part of a pipeline, 0 to 1.
    efficiency : float
        How many times as fast as one worker, by the number of workers.
    problem : str
        Why it cannot be run; "" when it can.
    """

    choice: Choice
    step_seconds: float
    compute_seconds: float
    transfer_seconds: float
    memory_bytes: int
    end_bytes: int = 0
    bubble: float = 0.0
    efficiency: float = 0.0
    problem: str = ""


def choices(num_workers: int, batch_size: int) -> Iterator[Choice]:
    """Yield every strategy and degree that takes all of so many workers, or a divisor of them, once each."""
    yield Choice("single device")
    for count in divisors(num_workers)[1:]:
        yield Choice("data_parallel", data=count)
        yield Choice("sharded", data=count)
        yield Choice("tensor_parallel", tensor=count)
        yield Choice("model_parallel", pipeline=count)
        for parts in _microbatches(count, batch_size):
            yield Choice("pipeline", pipeline=count, microbatches=parts)
        for data in divisors(count):
            for stages in divisors(count // data):
                tensor = count // data // stages
                if sum(degree > 1 for degree in (data, stages, tensor)) < 2:
                    continue
                yield Choice("hybrid_parallel", data, stages, tensor)


def divisors(number: int) -> list[int]:
    """Return the divisors in rising order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _microbatches(num_stages: int, batch_size: int) -> list[int]:
    """Return one, two and four micro-batches a stage, of a sample at least."""
    return sorted({min(n, batch_size) for n in (num_stages, 2 * num_stages, 4 * num_stages)})


def predict(profile: Profile, choice: Choice) -> Prediction:
    """Return what is expected of a choice.

    Parameters
    ----------
    profile : Profile
        The cell.
    choice : Choice
        What it would run under.
    """
    problem = _problem(profile, choice)
    if problem:
        return Prediction(
            choice=choice,
            step_seconds=float("inf"),
            compute_seconds=float("inf"),
            transfer_seconds=0.0,
            memory_bytes=0,
            problem=problem,
        )
    plan = _Plan(profile, choice)
    compute, transfer = plan.compute_seconds(), plan.transfer_seconds()
    memory, end = plan.memory_bytes(), plan.end_bytes()
    seconds = compute + transfer
    return Prediction(
        choice=choice,
        step_seconds=seconds,
        compute_seconds=compute,
        transfer_seconds=transfer,
        memory_bytes=memory,
        end_bytes=end,
        bubble=bubble(choice.pipeline, choice.microbatches),
        efficiency=profile.step.total / seconds / choice.num_workers if seconds else 0.0,
        problem=_too_large(choice.strategy, memory, end, profile.memory_bytes),
    )


_HELD = {
    "model_parallel": "all parameters, and gradients and optimizer state of its own layers",
    "pipeline": "all parameters, and gradients and optimizer state of its own layers",
    "tensor_parallel": "the whole model and optimizer state as they were, beside its parts",
    "hybrid_parallel": "the whole model and optimizer state as they were, beside its parts",
    "sharded": "its shards and the layers that are gathered",
}
_BESIDE = {
    "tensor_parallel": ", beside what it had before and its parts",
    "hybrid_parallel": ", beside what it had before and its parts",
    "sharded": ", beside all shards",
}


def _too_large(strategy: str, memory: int, end: int, room: int) -> str:
    """Say what does not fit into a worker's memory, or "" when all does."""
    there = f"and {size_text(room)} are there"
    if memory > room:
        held = _HELD.get(strategy, "parameters, gradients and optimizer state")
        return f"needs {size_text(memory)} a worker while it trains, {there}: it holds {held}"
    if end > room:
        return (
            f"needs {size_text(end)} a worker when the cell ends, {there}: each gets the whole trained model, its "
            f"gradients and optimizer state{_BESIDE.get(strategy, '')}"
        )
    return ""


def _problem(profile: Profile, choice: Choice) -> str:
    """Say why a choice cannot be run, memory aside."""
    if choice.data > profile.batch_size:
        return f"a batch of {counted(profile.batch_size, 'sample')} cannot be shared by {choice.data} workers"
    if choice.strategy == "hybrid_parallel" and choice.pipeline > 1:
        return "hybrid_parallel has no stages of layers yet"
    if choice.pipeline > max(1, len(profile.parts)):
        return (
            f"the model has {len(profile.parts)} layers to cut between, fewer than {choice.pipeline} stages"
        )
    if choice.tensor > 1 and not any(layer.splits for layer in profile.layers):
        return "no layer's weights can be split"
    if choice.microbatches > 1 and profile.num_batchnorms:
        return "BatchNorm would normalise each micro-batch by itself"
    return ""


@dataclass(frozen=True)
class _Plan:
    """A choice that can be run."""

    profile: Profile
    choice: Choice
    stages: list[Sequence[Layer]] = field(init=False)

    def __post_init__(self) -> None:
        stages: list[Sequence[Layer]] = [self.profile.layers]
        if self.choice.pipeline > 1:
            parts = self.profile.parts
            sizes = [sum(layer.parameter_bytes + layer.shared_bytes for layer in part) for part in parts]
            owners = cut(sizes, self.choice.pipeline)
            stages = [
                [layer for part, owner in zip(parts, owners, strict=True) if owner == stage for layer in part]
                for stage in range(self.choice.pipeline)
            ]
        object.__setattr__(self, "stages", stages)

    def _part(self, layer: Layer) -> float:
        return 1 / self.choice.tensor if layer.splits else 1.0

    def _cost(self, layer: Layer) -> float:
        return layer.seconds * self._part(layer)

    def _parameters(self, stage: Sequence[Layer]) -> float:
        return sum(layer.parameter_bytes * self._part(layer) for layer in stage)

    @property
    def _own_bytes(self) -> float:
        """Bytes of parameters that a worker trains, of the one that has most."""
        return max(self._parameters(stage) for stage in self.stages)

    @property
    def _is_sharded(self) -> bool:
        return self.choice.strategy == "sharded"

    # --------------------------------------------------------------------------------------- compute

    def compute_seconds(self) -> float:
        """Return the seconds of a step without messages."""
        profile, choice = self.profile, self.choice
        measured = profile.together.get(choice.num_workers)
        shared = 1 / choice.data if self._is_sharded else self._own_bytes / max(1, profile.parameter_bytes)
        if choice.data == choice.num_workers and choice.data > 1 and measured is not None:
            timing = measured.timing  # just this was measured
            return timing.data + timing.model + timing.update * (shared if self._is_sharded else 1.0)
        samples = profile.batch_size / choice.data
        timing = profile.alone_with(samples)
        computing = choice.num_workers if choice.microbatches > 1 else choice.data * choice.tensor
        slowdown = profile.contention(computing)
        at_once = profile.contention(choice.num_workers)
        return (
            timing.data * at_once + self._model_seconds(samples) * slowdown + timing.update * shared * at_once
        )

    def _model_seconds(self, samples: float) -> float:
        """Return forward and backward, alone, with the bubble."""
        profile, parts = self.profile, self.choice.microbatches
        whole = sum(layer.seconds for layer in profile.layers) or 1.0
        seconds = profile.alone_with(samples / parts).model / whole
        stages = [seconds * sum(map(self._cost, stage)) for stage in self.stages]
        return sum(stages) + (parts - 1) * max(stages)

    # -------------------------------------------------------------------------------------- messages

    def transfer_seconds(self) -> float:
        """Return the seconds of messages that nothing hides."""
        if self.choice.num_workers == 1:
            return 0.0
        return self._between_stages() + self._within_layers() + self._gradients()

    def _between_stages(self) -> float:
        """Outputs and their gradients; a micro-batch after the other, all stages at once."""
        choice = self.choice
        if choice.pipeline == 1:
            return 0.0
        link = self.profile.link(choice.num_workers).message
        parts = choice.data * choice.microbatches
        hops = [link.message(stage[-1].output_bytes / parts) for stage in self.stages[:-1]]
        return 2 * (sum(hops) + (choice.microbatches - 1) * max(hops))

    def _within_layers(self) -> float:
        """An all-reduce of outputs forward and one of input gradients backward, for each pair of split layers."""
        choice = self.choice
        if choice.tensor == 1:
            return 0.0
        link, parts = self.profile.link(choice.tensor).group, choice.data * choice.microbatches
        times = []
        for stage in self.stages:
            split = [layer for layer in stage if layer.splits]
            pairs = [(split[i], split[min(i + 1, len(split) - 1)]) for i in range(0, len(split), 2)]
            times.append(
                sum(
                    link.all_reduce(second.output_bytes / parts, choice.tensor)
                    + link.all_reduce(first.input_bytes / parts, choice.tensor)
                    for first, second in pairs
                )
            )
        return sum(times) + (choice.microbatches - 1) * max(times)

    def _gradients(self) -> float:
        choice, profile = self.choice, self.profile
        if choice.data == 1:
            return 0.0
        link, size = profile.link(choice.data).all_reduce, self._own_bytes
        if self._is_sharded:
            link = profile.link(choice.data).group
            # What is in no unit of its own stays gathered between the forward and the backward pass.
            return sum(
                (2 if unit else 1) * link.all_gather(own, choice.data) + link.reduce_scatter(own, choice.data)
                for unit, own in self._units().items()
            )
        buckets = max(1, -(-int(size) // BUCKET_BYTES))
        whole = buckets * link.all_reduce(size / buckets, choice.data)
        if profile.num_cores is not None and profile.num_cores <= choice.num_workers:
            return whole  # no core is free to sum while another computes
        hidden = profile.alone_with(profile.batch_size / choice.data).model * 2 / 3  # of it the backward pass
        last = link.all_reduce(size / buckets, choice.data)
        return max(last, whole - hidden)

    # ---------------------------------------------------------------------------------------- memory

    def memory_bytes(self) -> int:
        """Return the bytes of the worker that has most while it trains."""
        return round(max(self._training(stage) for stage in self.stages))

    def end_bytes(self) -> int:
        """Return the most bytes of a worker when the cell ends."""
        profile, state = self.profile, 2 + self.profile.optimizer_factor
        whole = profile.parameter_bytes * state
        if self._is_sharded:
            # All shards are read into the host's memory, and put together.
            return round(whole * (2 if profile.num_cores is not None else 1))
        if self.choice.tensor == 1:
            return round(whole)
        joined = sum(layer.parameter_bytes for layer in profile.layers if layer.splits) * state
        return round(self._before + self._own_bytes * state + joined)

    @property
    def _before(self) -> float:
        """What tensor parallel keeps of the time before parts were made: parameters and optimizer state."""
        return self.profile.parameter_bytes * (1 + self.profile.optimizer_factor)

    def _training(self, stage: Sequence[Layer]) -> float:
        profile, choice, factor = self.profile, self.choice, self.profile.optimizer_factor
        saved = sum(layer.saved_bytes * self._part(layer) for layer in stage) / choice.data
        whole = profile.parameter_bytes * (2 + factor)
        if self._is_sharded:
            return whole / choice.data + self._gathered_bytes() + saved
        if choice.pipeline > 1:
            shared = sum(layer.shared_bytes for layer in stage)
            return profile.parameter_bytes + (self._parameters(stage) + shared) * (1 + factor) + saved
        if choice.tensor > 1:
            first_step = whole + sum(layer.saved_bytes for layer in stage) / choice.data
            return max(first_step, self._before + self._own_bytes * (2 + factor) + saved)
        return whole + saved

    def _units(self) -> dict[str, int]:
        """Return the bytes of what sharded training gathers at once, by its name."""
        found: dict[str, int] = {}
        for layer in self.profile.layers:
            found[layer.unit] = found.get(layer.unit, 0) + layer.parameter_bytes
        return {unit: size for unit, size in found.items() if size}

    def _gathered_bytes(self) -> int:
        units = self._units()
        rest = units.get("", 0)
        return max(
            ((rest if unit else 0) + _COPIES_OF_UNIT * size for unit, size in units.items()), default=0
        )
