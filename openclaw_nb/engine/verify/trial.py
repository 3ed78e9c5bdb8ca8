"""The first steps of a cell, once on a single device and once under its strategy, and what differs.

    state taken ─> rank 0 alone: the plain cell ─> state put back ─> again in float64 ─> state put back
                ─> all ranks: the cell under its strategy ─> certificate ─> state put back

The cell runs up to the K-th optimizer step. What it shows is dropped, what it changes is put back; files that it
writes stay written. Dropout layers are switched off in all runs, as ranks drop other units than a single device does;
a model that draws random numbers by itself is refused.

Knows strategies, records and snapshots; does not know how a certificate is drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.cell import Outcome
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.loss.record import map_tensors
from openclaw_nb.engine.objects.find import Objects, find_objects
from openclaw_nb.engine.objects.names import cell_names
from openclaw_nb.engine.precision.plain import single_device
from openclaw_nb.engine.steps import batchnorm
from openclaw_nb.engine.steps.common import make_common
from openclaw_nb.engine.steps.loaders import MergedBatches, twin
from openclaw_nb.engine.verify.compare import certificate
from openclaw_nb.engine.verify.draws import Draws
from openclaw_nb.engine.verify.records import DIGEST_BYTES, Step, StepRecorder, StepsDone
from openclaw_nb.engine.verify.snapshot import Snapshot
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.strategies.precision import Precision

Run = Callable[[contextlib.AbstractContextManager[None]], Awaitable[Outcome]]
"""Runs the cell with the context entered last, just around the cell's own code."""


@dataclass(frozen=True)
class Trial:
    """What is tried: the cell, its strategy, and for how many steps."""

    source: str
    spec: StrategySpec
    num_steps: int


class Verifier:
    """Runs a cell both ways.

    Parameters
    ----------
    trial : Trial
        What is tried.
    ranks : Ranks
        The ranks.
    namespace : mutable mapping
        The worker's variables.
    run : callable
        Runs the cell as it stands.
    run_parallel : callable
        Runs it under its strategy.
    """

    def __init__(
        self, trial: Trial, ranks: Ranks, namespace: MutableMapping[str, Any], run: Run, run_parallel: Run
    ) -> None:
        self._trial, self._ranks, self._namespace = trial, ranks, namespace
        self._run, self._run_parallel = run, run_parallel
        spec = trial.spec
        self._objects: Objects = find_objects(
            trial.source, namespace, model=spec.model, optimizer=spec.optimizer, loader=spec.loader
        )
        found = self._objects
        self._held: dict[str, Any] = {**found.models, **found.optimizers, **found.loaders}
        self._held |= {**found.schedulers, **found.scalers}
        self._batches_per_step = _batches_per_step(spec, self._objects)
        self._roots = _roots(namespace, self._objects)
        self._without_exact = ""
        self._unknown: list[str] = []
        self._coarsest = torch.float64
        self._drops = any(True for _ in _dropouts(self._roots))

    async def verify(self) -> tuple[Outcome, dict[str, Any]]:
        """Run the cell both ways and put everything back.

        Returns
        -------
        outcome : Outcome
            Without an error when both have made steps.
        report : dict
            ``certificate``, on rank 0; see `compare.certificate`.
        """
        names = set(cell_names(self._trial.source).loads)
        with _without_dropout(self._roots):
            snapshot = Snapshot(
                self._namespace,
                names,
                self._held,
                extra_bytes=self._bytes_of_steps() if self._ranks.rank == 0 else 0,
                num_sharing=self._ranks.size,
            )
            self._unknown = snapshot.unknown
            try:
                make_common(self._ranks, self._objects)
                return await self._both(snapshot)
            finally:
                snapshot.restore()

    def _bytes_of_steps(self) -> int:
        """Return what rank 0 needs for three records, and for parameters, gradients and their averages in float64."""
        tensors = [
            t for model in self._objects.models.values() for t in (*model.parameters(), *model.buffers())
        ]
        values = sum(t.numel() for t in tensors)
        record = (
            2 * self._trial.num_steps * sum(2 * t.numel() * t.element_size() + 8 * t.numel() for t in tensors)
        )
        return record + 8 * 4 * values

    async def _both(self, start: Snapshot) -> tuple[Outcome, dict[str, Any]]:
        single: list[Step] = []
        exact: list[Step] | None = None
        problem = ""
        if self._ranks.rank == 0:
            draws = Draws(self._objects.models)
            with draws.watching():
                outcome, single = await self._record_in_precision()
            start.restore()
            problem = _problem(outcome, single)
            if not problem and draws.layers:
                problem = _DRAWS.format(
                    layers=", ".join(draws.layers), calls=await self._name_draws(start, "inside")
                )
            if not problem:
                with _in_double(self._roots, self._objects):
                    outcome, exact = await self._record(self._run, merged=True)
                start.restore()
                self._without_exact = _problem(outcome, exact) or _other_number(exact, single)
                exact = None if self._without_exact else exact
        problem = self._ranks.broadcast(problem)
        if problem:
            raise RefusedError(f"The cell cannot be verified: {problem}")
        outcome, parallel = await self._record(self._run_parallel, merged=False)
        if outcome.error is not None and not isinstance(outcome.error, StepsDone):
            return outcome, {}
        digests = b"".join(step.digest for step in parallel[: self._trial.num_steps])
        rows = self._ranks.gather_bytes(digests.ljust(DIGEST_BYTES * self._trial.num_steps, b"\0"))
        if self._ranks.rank:
            return Outcome(None, []), {}
        report = self._certificate(parallel, single, exact, rows)
        await self._check_draws(start, parallel, single, report["certificate"]["parted"])
        return Outcome(None, []), report

    async def _name_draws(self, start: Snapshot, where: str) -> str:
        """Run the cell once more on a single device, to see which calls draw random numbers; say which."""
        draws = Draws(self._objects.models)
        with draws.watching(calls=True):
            await self._record(self._run, merged=True)
        start.restore()
        calls: list[str] = getattr(draws, where)
        return f" ({', '.join(calls[:3])})" if calls else ""

    async def _check_draws(
        self, start: Snapshot, parallel: list[Step], single: list[Step], parted: dict[str, Any] | None
    ) -> None:
        """Refuse to call a cell wrong that draws as many random numbers as it has samples: ranks draw others then."""
        steps = zip(parallel, single, strict=False)
        for number, (mine, theirs) in enumerate(steps, start=1):
            if parted is None or number > parted["step"] or parted["kind"] == "ranks":
                return
            apart = [name for name, position in theirs.random.items() if mine.random[name] != position]
            if apart:
                start.restore()
                calls = await self._name_draws(start, "outside") if "torch" in apart else ""
                raise RefusedError(
                    f"The cell cannot be verified: up to step {number} it draws other random numbers from "
                    f"{' and '.join(apart)} under the strategy than on a single device{calls}, as it draws by the "
                    "number of samples that a rank has. Switch that off for the trial, or use --split model."
                )

    async def _record_in_precision(self) -> tuple[Outcome, list[Step]]:
        """Run the cell on a single device that computes as the strategy's ranks do."""
        found, precision = self._objects, Precision.told(self._trial.spec.options)
        has_scaler = any(scaler.is_enabled() for scaler in found.scalers.values())
        with single_device(
            precision, found.models, found.optimizers, is_trial=True, has_scaler=has_scaler
        ) as applied:
            self._coarsest = max(self._coarsest, applied.dtype, key=lambda dtype: torch.finfo(dtype).eps)
            return await self._record(self._run, merged=True)

    async def _record(self, run: Run, *, merged: bool) -> tuple[Outcome, list[Step]]:
        recorder = StepRecorder(self._objects.models, self._trial.num_steps, values=self._ranks.rank == 0)
        with _merged_loaders(self._batches_per_step if merged else 1):
            outcome = await run(recorder.recording())
        self._coarsest = max(self._coarsest, recorder.coarsest, key=lambda dtype: torch.finfo(dtype).eps)
        return outcome, recorder.steps

    def _certificate(
        self, parallel: list[Step], single: list[Step], exact: list[Step] | None, rows: list[bytes]
    ) -> dict[str, Any]:
        count = min(len(parallel), len(single))
        if not count:
            raise RefusedError(
                "The cell makes no optimizer step under the strategy: there is nothing to verify."
            )
        loader = next(iter(self._objects.loaders.values()), None)
        found = certificate(
            parallel[:count],
            single[:count],
            None if exact is None else exact[:count],
            dtype=self._coarsest,
            num_samples=self._batches_per_step * ((loader.batch_size if loader is not None else None) or 1),
            with_loss=self._batches_per_step == 1,
        )
        found["strategy"] = self._trial.spec.name
        found["num_ranks"] = self._ranks.size
        found["parted"] = _first(found["parted"], _apart(rows, count))
        self._without_exact = self._without_exact or found.pop("no_exact")
        blurred = found.pop("blurred")
        if not found["rows"]:
            raise RefusedError(f"The cell cannot be verified: {blurred}.")
        found["notes"] = [*self._notes(len(parallel), len(single)), *([blurred] if blurred else [])]
        return {"certificate": found}

    def _notes(self, num_parallel: int, num_single: int) -> list[str]:
        notes = []
        if self._drops:
            notes.append("dropout was switched off")
        if self._unknown:
            listed = ", ".join(self._unknown[:5]) + (", ..." if len(self._unknown) > 5 else "")
            notes.append(
                f"what the cell has changed in these stays changed, as they cannot be looked into: {listed}"
            )
        if self._without_exact:
            notes.append(f"there is no float64 run to take the tolerance from: {self._without_exact}")
        if self._batches_per_step > 1:
            notes.append(
                f"compared with single-device steps of {self._batches_per_step} batches at once; the loss after each "
                "batch has no counterpart there"
            )
        if num_parallel != num_single:
            notes.append(f"{num_single} steps on a single device, {num_parallel} under the strategy")
        if min(num_parallel, num_single) < self._trial.num_steps:
            notes.append("the cell has no more steps")
        return notes


def _batches_per_step(spec: StrategySpec, objects: Objects) -> int:
    if spec.options.get("mode") == "parameter":
        raise RefusedError(
            "Local steps (--mode parameter) are another method than single-device training: there is nothing to equal."
        )
    count = int(spec.options.get("sync_frequency", 1)) * int(spec.options.get("accumulate", 1))
    if count > 1 and any(batchnorm.count_batchnorms(model) for model in objects.models.values()):
        raise RefusedError(
            "With several batches a step, BatchNorm layers normalise each batch by itself, and no single-device batch "
            "of that size does. Verify with --sync-frequency 1."
        )
    return count


_DRAWS = (
    "{layers} draws random numbers while it runs{calls}, and each rank draws others. Switch that off for the trial, or "
    "make it a layer such as nn.Dropout, which is switched off here."
)


def _problem(outcome: Outcome, steps: list[Step]) -> str:
    """Say why a single-device run is nothing to compare with; "" when it is."""
    if outcome.error is not None and not isinstance(outcome.error, StepsDone):
        return f"on a single device it raised {type(outcome.error).__name__}: {outcome.error}"
    if not steps:
        return "on a single device it made no optimizer step."
    return ""


def _other_number(exact: Sequence[Step], single: Sequence[Step]) -> str:
    return "" if len(exact) == len(single) else f"it made {len(exact)} steps instead of {len(single)}"


def _apart(rows: list[bytes], count: int) -> dict[str, Any] | None:
    """Return the first step after which a rank has another state than rank 0."""
    for step in range(count):
        parts = [row[DIGEST_BYTES * step :][:DIGEST_BYTES] for row in rows]
        different = [rank for rank, part in enumerate(parts) if part != parts[0]]
        if different:
            return {
                "step": step + 1,
                "kind": "ranks",
                "name": f"rank {different[0]}",
                "difference": None,
                "limit": 0.0,
            }
    return None


def _first(one: dict[str, Any] | None, other: dict[str, Any] | None) -> dict[str, Any] | None:
    both = [each for each in (one, other) if each is not None]
    return min(both, key=lambda each: int(each["step"])) if both else None


# ------------------------------------------------------------------------------------- how the cell is run


@contextlib.contextmanager
def _without_dropout(roots: Sequence[nn.Module]) -> Iterator[None]:
    found = list(_dropouts(roots))
    for module, name, _ in found:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, probability in found:
            setattr(module, name, probability)


def _roots(namespace: Mapping[str, Any], objects: Objects) -> list[nn.Module]:
    """Return the modules that have a name, and the cell's models, which may be parts of other objects."""
    named = (value for value in namespace.values() if isinstance(value, nn.Module))
    return list({id(module): module for module in (*named, *objects.models.values())}.values())


def _dropouts(roots: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, float]]:
    for root in roots:
        for module in root.modules():
            for name in ("p", "dropout"):
                value = getattr(module, name, None)
                known = isinstance(module, nn.modules.dropout._DropoutNd | nn.MultiheadAttention | nn.RNNBase)
                if known and isinstance(value, float) and value > 0.0:
                    yield module, name, value


@contextlib.contextmanager
def _in_double(roots: Sequence[nn.Module], objects: Objects) -> Iterator[None]:
    """Let the models compute in float64; their own tensors are put aside for the time of the block."""
    aside: list[tuple[Tensor, Tensor]] = []
    for module in roots:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point() and tensor.dtype != torch.float64:
                aside.append((tensor, tensor.data))
                tensor.grad = None
                tensor.data = tensor.data.double()
    for optimizer in objects.optimizers.values():
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
                    state[name] = value.double()
    hooks = [
        model.register_forward_pre_hook(_cast, with_kwargs=True, prepend=True)
        for model in objects.models.values()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for tensor, data in aside:
            tensor.grad = None
            tensor.data = data


def _cast(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    def double(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    return map_tensors(double, args), map_tensors(double, kwargs)


@contextlib.contextmanager
def _merged_loaders(count: int) -> Iterator[None]:
    """Let each loader give ``count`` of its batches at once."""
    if count == 1:
        yield
        return
    plain = DataLoader.__iter__
    inside = False

    def iterate(loader: DataLoader[Any]) -> Any:
        nonlocal inside
        if inside or loader.batch_sampler is None or not torch.is_grad_enabled():
            return plain(loader)
        inside = True
        try:
            return plain(twin(loader, MergedBatches(loader.batch_sampler, count), pinning=True))
        finally:
            inside = False

    DataLoader.__iter__ = iterate  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataLoader.__iter__ = plain  # type: ignore[method-assign]
