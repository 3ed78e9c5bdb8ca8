"""`PipelineScheduler`: a pipeline of model parts, or of the steps of a process, on the workers.

    in a script or notebook: pushed to the workers ──> a cell on each ──> results and times come back
    in a cell on workers:    every rank calls the same methods; each does its part

The work is done by `engine.scheduler`, the schedules are `plan.schedule`'s. Imports torch on workers only.
"""

from __future__ import annotations

import copy
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openclaw_nb.core.errors import RefusedError, RemoteCellError, UsageError, unknown_name
from openclaw_nb.plan import lanes
from openclaw_nb.plan.schedule import (
    SCHEDULES,
    Costs,
    Kind,
    Timed,
    bubble_of,
    build,
    check,
    closed_form_bubble,
    simulate,
)
from openclaw_nb.plan.steps import ideal_times, idle_share

if TYPE_CHECKING:
    from openclaw_nb.cluster.master import MasterNode
    from openclaw_nb.engine.scheduler.original import Changes, Original
    from openclaw_nb.engine.scheduler.steps import StepPipeline
    from openclaw_nb.engine.scheduler.training import TrainingPipeline
    from openclaw_nb.notebook.timeline import Timeline
    from openclaw_nb.session import OpenClawCluster

# By lane: an action, or the number of a step (-1 for a gradient that was asked for) and the item, with start and end.
Times = list[list[tuple[Any, ...]]]

_NAME = "_openclaw_pipeline"
_PUSHED = ("batch", "loss", "changes", "items", "states", "value", "model", "optimizer")
_EQUAL = Costs()
_gone: set[str] = set()  # names of pipelines that are no more, and whose copies the workers may still have


@dataclass(frozen=True)
class Bubble:
    """The share of the devices' time in which they compute nothing, from the first start to the last end.

    Attributes
    ----------
    measured : float
        In the newest step.
    theoretical : float
        By the schedule's formula (`plan.schedule.closed_form_bubble`), for stages of equal cost and free messages.
    """

    measured: float
    theoretical: float

    def __repr__(self) -> str:
        return f"Bubble(measured={self.measured:.3f}, theoretical={self.theoretical:.3f})"


class PipelineScheduler:
    """A pipeline over devices, of model parts or of the steps of a process; `bind` says which.

    Parameters
    ----------
    stages : sequence of str
        Names of consecutive parts of a model (``model.get_submodule`` finds them), or of steps.
    stage_devices : sequence of str, optional
        The device of each stage. Neighbours on one device make one stage; devices that come again in the same order
        make an interleaved pipeline. By default stages are spread over the workers.
    microbatches : int, optional
        Into how many equal pieces a batch is cut; by default the largest divisor of the batch up to four a device.
    schedule : {"1f1b", "gpipe", "interleaved", "zero-bubble"}
        In which order micro-batches go forward and back.
    cluster : MasterNode or OpenClawCluster, optional
        Whose workers; those of this process's cluster by default. In a cell on workers it is not used.

    Raises
    ------
    UsageError
        For names, devices or numbers that cannot be.

    Examples
    --------
    >>> PipelineScheduler(["embed", "blocks", "head"], microbatches=8)
    PipelineScheduler(stages=['embed', 'blocks', 'head'], schedule='1f1b', not bound)
    """

    def __init__(
        self,
        stages: Sequence[str],
        stage_devices: Sequence[str] | None = None,
        microbatches: int | None = None,
        schedule: str = "1f1b",
        *,
        cluster: MasterNode | OpenClawCluster | None = None,
    ) -> None:
        self.stages = _names(stages)
        self.stage_devices = None if stage_devices is None else [str(device) for device in stage_devices]
        if schedule not in SCHEDULES:
            raise unknown_name("schedule", schedule, SCHEDULES)
        if microbatches is not None and (isinstance(microbatches, bool) or not isinstance(microbatches, int)):
            raise UsageError(f"microbatches is a whole number of at least 1, or None, not {microbatches!r}.")
        if self.stage_devices is not None and len(self.stage_devices) != len(self.stages):
            lanes.on_devices(self.stages, self.stage_devices)  # raises
        if microbatches is not None:
            check("gpipe", 1, microbatches)
        self.microbatches = microbatches
        self.schedule = schedule
        self._cluster = cluster
        self._functions: dict[str, Callable[..., Any]] = {}
        self._synchronous = self._ran_synchronous = True
        self._channel_size = 2
        self._steps: StepPipeline | None = None
        self._waits_for: list[int] = []
        self._model: Any = None
        self._optimizer: Any = None
        self._max_norm: float | None = None
        self._lanes: lanes.Lanes | None = None
        self._ranks: list[int] = []
        self._body: TrainingPipeline | None = None
        self._remote: _Remote | None = None
        self._times: Times | None = None
        self._original: Original | None = None
        self._lanes_only = False
        self._name = f"{_NAME}_{secrets.token_hex(4)}"  # on the workers; another pipeline's copy is another's
        weakref.finalize(self, _gone.add, self._name)

    def __repr__(self) -> str:
        model = "steps" if self._functions else type(self._model).__name__
        bound = f"bound to {model}" if self._functions or self._model is not None else "not bound"
        return f"PipelineScheduler(stages={self.stages!r}, schedule={self.schedule!r}, {bound})"

    def __getstate__(self) -> dict[str, Any]:
        """What goes to the workers: what was asked, the bound objects, and where stages are."""
        return {
            **self.__dict__,
            "_cluster": None,
            "_remote": None,
            "_original": None,
            "_body": None,
            "_steps": None,
            "_times": None,
        }

    # ------------------------------------------------------------------------------------------- binding

    def bind(
        self,
        model: Any = None,
        optimizer: Any = None,
        /,
        *,
        max_norm: float | None = None,
        synchronous: bool = True,
        **functions: Any,
    ) -> PipelineScheduler:
        """Let the stages be parts of a model, ``bind(model, optimizer)``, or steps, ``bind(preprocess=f, forward=g)``.

        Parameters
        ----------
        model : torch.nn.Module
            Calls the parts one after the other, each with one tensor, and does nothing else. This is checked.
        optimizer : torch.optim.Optimizer, optional
            Of the model's parameters; `step` then makes an update, each device of its own stages.
        max_norm : float, optional
            With an optimizer: clip the gradients of all stages by their common norm.
        synchronous : bool
            Of steps: one that shares a model with later ones waits until those are done with the item before, so that
            the result is the plain loop's. Otherwise it goes on with weights that may be some items old.
        **functions : callable
            A function for each stage. The first is called with an item, each other with what the one before returned.

        Returns
        -------
        PipelineScheduler
            Itself.
        """
        if functions and not {"model", "optimizer"} & set(self.stages):
            model, optimizer = functions.pop("model", model), functions.pop("optimizer", optimizer)
        self._forget()
        if functions or model is None:
            self._bind_steps(functions, synchronous)
            if model is not None:
                raise UsageError("bind takes a model, or a function for each stage, not both.")
            return self
        if not hasattr(model, "named_parameters"):
            raise UsageError(f"bind takes a model, not {type(model).__name__}.")
        if max_norm is not None and optimizer is None:
            raise UsageError("max_norm needs the optimizer: bind(model, optimizer, max_norm=...).")
        self._model, self._optimizer, self._max_norm = model, optimizer, max_norm
        return self

    def _bind_steps(self, functions: Mapping[str, Any], synchronous: bool) -> None:
        for name in functions:
            if name not in self.stages:
                raise unknown_name("stage", name, self.stages)
        missing = [name for name in self.stages if not callable(functions.get(name))]
        if missing:
            raise UsageError(
                f"Each stage needs a function, or bind gets a model; without one: {', '.join(missing)}."
            )
        if self.schedule != "1f1b" or self.microbatches is not None:
            raise UsageError(
                "Steps work on one item after the other: schedule and microbatches are for model parts."
            )
        self._functions = {name: functions[name] for name in self.stages}
        self._synchronous = synchronous

    def _forget(self) -> None:
        self._model, self._optimizer, self._functions, self._steps = None, None, {}, None
        self._lanes, self._ranks, self._body, self._remote, self._times = None, [], None, None, None
        self._original = None

    # ---------------------------------------------------------------------------------------------- steps

    def run(
        self, items: Iterable[Any] | None, *, synchronous: bool | None = None, channel_size: int = 2
    ) -> list[Any]:
        """Let items pass through the bound steps, all of which work at the same time; return the last one's results.

        The functions' models and optimizers are trained afterwards, here as well. In a cell on workers every rank calls
        it, also those without a stage, and the first stage's items count.

        Parameters
        ----------
        items : iterable
            What the first step is called with, such as a DataLoader.
        synchronous : bool, optional
            As `bind` has it by default.
        channel_size : int
            How many items a step may be ahead of the next.

        Returns
        -------
        list
            On every rank.
        """
        if not self._functions:
            raise UsageError(
                "run needs steps: bind(preprocess=f, …). A bound model is trained by step(x, y, loss_fn)."
            )
        if isinstance(channel_size, bool) or not isinstance(channel_size, int) or channel_size < 1:
            raise UsageError(f"channel_size is a whole number of at least 1, not {channel_size!r}.")
        self._times, self._channel_size = None, channel_size
        self._ran_synchronous = self._synchronous if synchronous is None else synchronous
        if _on_a_worker():
            return self._steps_here().run(items, synchronous=self._ran_synchronous, depth=channel_size)
        from openclaw_nb.engine.scheduler.shared import Shared

        shared, remote = Shared(self._functions), self._reach()
        remote.push({"items": _to_send(items), "states": shared.states()}, [self._ranks[0]])
        name = self._name
        options = f"synchronous={self._ran_synchronous}, channel_size={channel_size}"
        source = f"if {name}_states is not None: {name}._steps_here().shared.load({name}_states)"
        results: list[Any] = remote.call(f"run({name}_items, {options})", before=source)
        remote.run(f"{name}_states = {name}._steps_here().shared.states()")
        shared.load(remote.pull(["states"])[0])
        remote.push({"items": None, "states": None})
        return results

    def _steps_here(self) -> StepPipeline:
        from openclaw_nb.engine.scheduler.mail import current_group, devices_of_ranks
        from openclaw_nb.engine.scheduler.steps import StepPipeline

        group = current_group()
        if self._steps is None or self._steps.group is not group:
            if self._lanes is None:
                self._place(devices_of_ranks(group))
            assert self._lanes is not None
            times = self._steps.times if self._steps is not None else []
            self._steps = StepPipeline(
                self._functions, self._lanes.stages, self._ranks, group, lanes_only=self._lanes_only
            )
            self._steps.times = times
        return self._steps

    # ----------------------------------------------------------------------------------------- model parts

    def step(self, x: Any, y: Any, loss_fn: Callable[[Any, Any], Any]) -> float:
        """Run one batch forward and back through the stages; return the loss of the whole batch.

        In a cell on workers every rank calls it, also those without a stage. The first stage's batch counts, and the
        last one's loss_fn. Without a bound optimizer the gradients are in the model's parameters then, on each rank
        those of its own stages. From a script, what was set on the bound objects since the last step holds on the
        workers, too: the optimizer's options, such as a learning rate that a scheduler sets, train() and eval(),
        requires_grad, and, after `collect`, values.

        Parameters
        ----------
        x, y : torch.Tensor
            The batch; its samples lie along the first dimension.
        loss_fn : callable
            ``loss_fn(output, y)`` returns a mean or a sum over the samples.

        Returns
        -------
        float
            On every rank.

        Raises
        ------
        RefusedError
            When the result would differ from that of a single device. No parameter has changed then.
        UsageError
            From a script, when values of the model were set here while the workers have trained on from older ones.
        """
        self._times = None
        if not _on_a_worker():
            if self._model is not None and self._optimizer is None:
                raise UsageError(
                    "From a script or a notebook the workers make the update: bind(model, optimizer). In a cell that "
                    "runs on the workers, step leaves gradients to optimizer.step()."
                )
            return self._step_from_here(x, y, loss_fn)
        body = self._here()
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        found = body.step(x, y, loss_fn)
        if self._optimizer is not None:
            if self._max_norm is not None:
                body.clip_grad_norm(self._max_norm)
            self._optimizer.step()
        return found

    def _step_from_here(self, x: Any, y: Any, loss_fn: Callable[[Any, Any], Any]) -> float:
        remote, name = self._reach(), self._name
        original = self._original
        assert original is not None
        changes = original.changes()
        remote.push({"batch": (x, y)}, [self._ranks[0]])
        # Each time: what it reads may be other than before.
        remote.push({"loss": loss_fn}, [self._ranks[-1]])
        if changes:
            remote.push({"changes": changes})
        before = f"{name}._take_over({name}_changes)" if changes else ""
        try:
            loss: float = remote.call(f"step(*{name}_batch, {name}_loss)", before=before)
        except RefusedError:
            raise  # nothing was trained
        except BaseException:
            original.train()
            raise
        if changes:
            original.note()
        original.train()
        return loss

    def _take_over(self, changes: Changes) -> None:
        """Set on a worker's copy what was set on the original."""
        changes.apply(self._model, self._optimizer)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """In a cell on workers: clip the gradients of all stages by their common norm; return it.

        `torch.nn.utils.clip_grad_norm_` would take the norm of this rank's stages.
        """
        if not _on_a_worker():
            raise UsageError("From a script: bind(model, optimizer, max_norm=...).")
        return self._here().clip_grad_norm(max_norm)

    def collect(self) -> Any:
        """Bring the trained stages together in the model, and the optimizer's state; return the model.

        In a cell on workers every rank calls it, also those without a stage, and has the whole model then. From a
        script, options of the optimizer that were set since the last step stay as they were set.
        """
        if _on_a_worker():
            self._here().collect(self._optimizer)
            return self._model
        remote = self._reach()
        remote.call("collect()", keep=False)
        name = self._name
        remote.run(
            f"{name}_model = {name}._model.state_dict()\n"
            f"{name}_optimizer = {name}._optimizer.state_dict() if {name}._optimizer is not None else None"
        )
        assert self._original is not None
        self._original.take(*remote.pull(["model", "optimizer"]))
        remote.push({"model": None, "optimizer": None})
        return self._model

    # ------------------------------------------------------------------------------------------ what is seen

    def preview(self, microbatches: int | None = None, costs: Costs = _EQUAL) -> Timeline:
        """Draw the schedule as it will run, with equal stages.

        Parameters
        ----------
        microbatches : int, optional
            Those of the scheduler by default, or two a device.
        costs : Costs
            How long a micro-batch's forward pass, input gradient and weight gradient take.
        """
        placed = self._placed_for_preview()
        num_ranks = len(placed.devices)
        number = microbatches or self.microbatches or 2 * num_ranks
        timed = simulate(build(self.schedule, num_ranks, number, placed.num_chunks), costs)
        share = bubble_of(timed)
        words = f"{self.schedule}, {number} micro-batches: bubble {share:.1%} when all stages take as long"
        return _timeline([words], [("as planned", timed)], placed, "units")

    def timeline(self) -> Timeline:
        """Return what the newest step has run on each device, beside the ideal. In a cell every rank calls it."""
        if self._functions:
            return self._timeline_of_steps()
        timed, costs, placed, number = self._measured()
        ideal = simulate(build(self.schedule, len(placed.devices), number, placed.num_chunks), costs)
        bubble = self.bubble
        words = (
            f"{self.schedule}, {number} micro-batches: bubble {bubble.measured:.1%} measured, "
            f"{bubble.theoretical:.1%} by theory"
        )
        pictures = [("as it ran", timed), ("ideal, with the mean of these times", ideal)]
        return _timeline([words], pictures, placed, "seconds")

    @property
    def bubble(self) -> Bubble:
        """The bubble of the newest step, measured and by theory. In a cell every rank asks for it."""
        if self._functions:
            return self._bubble_of_steps()
        timed, costs, placed, number = self._measured()
        theory = closed_form_bubble(self.schedule, len(placed.devices), number, placed.num_chunks, costs)
        return Bubble(bubble_of(timed), theory)

    def _measured(self) -> tuple[list[Timed], Costs, lanes.Lanes, int]:
        timed = [
            Timed(lane, action, start, end)
            for lane, actions in enumerate(self._known_times())
            for action, start, end in actions
        ]
        assert self._lanes is not None
        number = 1 + max(each.action.microbatch for each in timed)
        return timed, _mean_costs(timed), self._lanes, number

    def _known_times(self) -> Times:
        if self._times is None:
            self._times = self._fetch_times()
        if not any(self._times):
            call = "run(items)" if self._functions else "step(x, y, loss_fn)"
            raise UsageError(f"Nothing has run: call {call} first.")
        return self._times

    def _timeline_of_steps(self) -> Timeline:
        from openclaw_nb.notebook.timeline import Box, Lanes, Timeline

        assert self._lanes is not None
        boxes = [
            Box(device, self.stages[step] if step >= 0 else "its gradient", item, start, end)
            for device, lane in zip(self._lanes.devices, self._known_times(), strict=True)
            for step, item, start, end in lane
        ]
        ideal = [
            Box(device, " + ".join(names), item, start, end)
            for device, names, lane in zip(
                self._lanes.devices, self._lanes.stages, self._ideal_steps(), strict=True
            )
            for item, (start, end) in enumerate(lane)
        ]
        bubble = self._bubble_of_steps()
        how = "synchronous" if self._ran_synchronous else "not synchronous"
        words = f"{how}: idle {bubble.measured:.1%} measured, {bubble.theoretical:.1%} by theory"
        pictures = [Lanes("as it ran", boxes), Lanes("ideal, with the mean of these times", ideal)]
        return Timeline([words], pictures)

    def _ideal_steps(self) -> list[list[tuple[float, float]]]:
        """Return when each lane would ideally work on each item, with the mean of the measured times."""
        assert self._lanes is not None
        lanes_ = self._known_times()
        number = 1 + max(item for lane in lanes_ for _, item, _, _ in lane)
        costs = [sum(end - start for step, _, start, end in lane if step >= 0) / number for lane in lanes_]
        return ideal_times(costs, number, self._channel_size, self._waits_for)

    def _bubble_of_steps(self) -> Bubble:
        """Of a lane's time, what it computes; a gradient that another lane asked for counts where it is made."""
        measured = [[(start, end) for _, _, start, end in lane] for lane in self._known_times()]
        return Bubble(idle_share(measured), idle_share(self._ideal_steps()))

    def _fetch_times(self) -> Times:
        if self._functions:
            return self._fetch_times_of_steps()
        if _on_a_worker():
            return self._here().all_times() if self._body is not None else []
        times: Times = self._reach().call("_fetch_times()") if self._remote is not None else []
        return times

    def _fetch_times_of_steps(self) -> Times:
        if not _on_a_worker():
            if self._remote is None:
                return []
            times, self._waits_for = self._remote.call("_times_and_waits()")
            return list(times)
        times, self._waits_for = self._times_and_waits()
        return times

    def _times_and_waits(self) -> tuple[Times, list[int]]:
        body = self._steps_here()
        waits = body.waits_for if self._ran_synchronous else list(range(len(body.waits_for)))
        return list(body.all_times()), waits

    # ------------------------------------------------------------------------------------------------- where

    def _place(self, devices: Sequence[str]) -> None:
        """Decide which rank has which stages, where rank r is on ``devices[r]``."""
        if self.stage_devices is None:
            labels = [f"rank {rank}" for rank in range(len(devices))]
            self._lanes = lanes.in_turn(self.stages, labels, self.schedule)
            self._ranks = list(range(len(self._lanes.devices)))
        else:
            for device in self.stage_devices:
                if device not in devices:
                    raise unknown_name("device of the cluster", device, devices)
            self._lanes = lanes.on_devices(self.stages, self.stage_devices)
            self._ranks = [list(devices).index(device) for device in self._lanes.devices]
        check(self.schedule, len(self._ranks), self.microbatches or len(self._ranks), self._lanes.num_chunks)

    def _placed_for_preview(self) -> lanes.Lanes:
        if self._lanes is not None:
            return self._lanes
        if self.stage_devices is not None:
            return lanes.on_devices(self.stages, self.stage_devices)
        count = len(self.stages) // 2 if self.schedule == "interleaved" else len(self.stages)
        return lanes.in_turn(self.stages, [f"rank {rank}" for rank in range(max(1, count))], self.schedule)

    def _here(self) -> TrainingPipeline:
        """Return this rank's part of the training, in a cell."""
        from openclaw_nb.engine.scheduler.mail import current_group, devices_of_ranks
        from openclaw_nb.engine.scheduler.training import Plan, TrainingPipeline

        if self._model is None:
            raise UsageError(
                "step, clip_grad_norm_ and collect are for a bound model: bind(model, optimizer)."
            )
        group = current_group()
        if self._body is not None:
            self._body.move(group)
        else:
            if self._lanes is None:
                self._place(devices_of_ranks(group))
            assert self._lanes is not None
            plan = Plan(self._lanes.stages, self._ranks, self.schedule, self.microbatches)
            self._body = TrainingPipeline(self._model, plan, group, lanes_only=self._lanes_only)
        return self._body

    def _require_bound(self) -> None:
        if self._model is None and not self._functions:
            raise UsageError("The stages are bound to nothing yet: call bind(model, optimizer) first.")

    def _reach(self) -> _Remote:
        """Return the workers, with this pipeline on them."""
        self._require_bound()
        if self._remote is None:
            master = _master_of(self._cluster)
            if self._lanes is None:
                self._place([worker.device.id for worker in master.workers if not worker.spare])
            remote = _Remote(master, self._ranks, self._name)
            remote.put(self._copy())
            if self._model is not None:
                from openclaw_nb.engine.scheduler.original import Original

                self._original = Original(self._model, self._optimizer)
            self._remote = remote
        return self._remote

    def _copy(self) -> PipelineScheduler:
        """Return what goes to the workers; only those that have a stage get it."""
        made = copy.copy(self)
        made._lanes_only = True
        return made


class _Remote:
    """The workers that have a copy of a pipeline; what else they are given has names that begin with its name."""

    def __init__(self, master: MasterNode, ranks: Sequence[int], name: str) -> None:
        self._master, self._ranks, self._name = master, list(ranks), name

    def put(self, pipeline: PipelineScheduler) -> None:
        """Let the workers have the copy, and forget those of pipelines that are no more."""
        if old := [each for name in _gone for each in (name, *(f"{name}_{part}" for part in _PUSHED))]:
            self._master.push(dict.fromkeys(old))
            _gone.clear()
        empty = dict.fromkeys(f"{self._name}_{part}" for part in _PUSHED)
        self._master.push({**empty, self._name: pipeline, f"{self._name}_batch": (None, None)}, self._ranks)

    def push(self, values: Mapping[str, Any], ranks: Sequence[int] | None = None) -> None:
        """Copy values to the workers."""
        named = {f"{self._name}_{part}": value for part, value in values.items()}
        self._master.push(named, self._ranks if ranks is None else ranks)

    def pull(self, parts: Sequence[str]) -> list[Any]:
        """Return values of the first worker."""
        names = [f"{self._name}_{part}" for part in parts]
        found = self._master.pull(names, self._ranks[0])
        return [found[name] for name in names]

    def call(self, call: str, *, keep: bool = True, before: str = "") -> Any:
        """Call a method of the copies on every rank, after some source; return the first one's value."""
        name = self._name
        self.run(f"{before}\n{name}_value = {name}.{call}" if keep else f"{name}.{call};")
        return self.pull(["value"])[0] if keep else None

    def run(self, source: str) -> None:
        """Run source on the ranks that have a stage.

        Raises
        ------
        RefusedError
            As it was raised there.
        RemoteCellError
            For any other error, with its traceback.
        """
        result = self._master.run_cell(source, targets=self._ranks).wait()
        assert result is not None
        if result.ok:
            return
        if result.first is None:
            raise RemoteCellError(f"The pipeline did not end as it should: {result.cause or 'interrupted'}.")
        failure = result.failures[result.first]
        if failure.error_type in (RefusedError.__name__, UsageError.__name__):
            raise RefusedError(failure.message)
        lines = "\n".join(failure.traceback)
        raise RemoteCellError(f"rank {result.first} raised {failure.error_type}: {failure.message}\n{lines}")


def _names(stages: Iterable[str]) -> list[str]:
    names = [stages] if isinstance(stages, str) else list(stages)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"stages is a list of names, such as ['embed', 'blocks', 'head'], not {stages!r}.")
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise UsageError(f"Each stage has a name of its own; named twice: {', '.join(map(repr, double))}.")
    return names


def _to_send(items: Iterable[Any] | None) -> Any:
    """Return the items as they travel: what can be gone through again as it is, so that a loader loads there.

    It is not asked for an iterator: that of a loader draws from a generator, and may start processes.
    """
    if items is None or (hasattr(items, "__len__") and not isinstance(items, Iterator)):
        return items
    return list(items)


def _on_a_worker() -> bool:
    return "openclaw_nb.engine.agent" in sys.modules and "OPENCLAW_DEVICE" in os.environ


def _master_of(cluster: MasterNode | OpenClawCluster | None) -> MasterNode:
    from openclaw_nb.session import OpenClawCluster, current_session

    if cluster is None:
        return current_session().master
    return cluster.master if isinstance(cluster, OpenClawCluster) else cluster


def _mean_costs(timed: Sequence[Timed]) -> Costs:
    """Return what an action of each kind took on average; of a whole backward, half for each gradient."""

    def mean(kind: Kind) -> float:
        seconds = [each.end - each.start for each in timed if each.action.kind is kind]
        return sum(seconds) / len(seconds) if seconds else 0.0

    half = mean(Kind.BACKWARD) / 2
    return Costs(mean(Kind.FORWARD), mean(Kind.INPUT) or half, mean(Kind.WEIGHT) or half)


def _timeline(
    words: Sequence[str], pictures: Sequence[tuple[str, Sequence[Timed]]], placed: lanes.Lanes, unit: str
) -> Timeline:
    from openclaw_nb.notebook.timeline import Box, Lanes, Timeline

    def box(each: Timed) -> Box:
        chunk = each.action.stage // len(placed.devices)
        again = f", stage {chunk + 1} of {placed.num_chunks}" if placed.num_chunks > 1 else ""
        part = f"{each.action.kind.words}{again}"
        return Box(placed.devices[each.rank], part, each.action.microbatch, each.start, each.end)

    return Timeline(words, [Lanes(title, [box(each) for each in timed]) for title, timed in pictures], unit)
