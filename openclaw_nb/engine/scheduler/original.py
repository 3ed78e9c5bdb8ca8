"""A model and its optimizer in two places: what their owner sets, and the copies have not yet.

    original: options such as lr, train() and eval(), requires_grad, values, optimizer state
        ──changes──> copies: apply ──> they train ──> state ──take──> original; options that the owner has set stay his

Knows modules and optimizers; does not know who carries changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from openclaw_nb.core.errors import UsageError

Options = list[dict[str, Any]]
State = dict[str, tuple[Any, int]]  # values with their versions


@dataclass
class Changes:
    """What the owner has set since the copies were like the original.

    Attributes
    ----------
    options : list of dict
        By group of the optimizer, those that are others now, such as the learning rate.
    modes : list of bool or None
        Which modules train, when that is not as before.
    trained : list of bool or None
        Which parameters have gradients, when that is not as before.
    values : dict of int to Tensor
        Parameters and buffers, by number.
    state : dict of int to dict
        What the optimizer keeps, by the parameter's number.
    """

    options: Options = field(default_factory=list)
    modes: list[bool] | None = None
    trained: list[bool] | None = None
    values: dict[int, Tensor] = field(default_factory=dict)
    state: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        settings = self.modes is not None or self.trained is not None
        return any(self.options) or settings or bool(self.values) or bool(self.state)

    def apply(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Set the same on a copy."""
        for module, mode in zip(model.modules(), self.modes or (), strict=False):
            module.training = mode
        for parameter, trained in zip(model.parameters(), self.trained or (), strict=False):
            parameter.requires_grad_(trained)
        tensors = _tensors(model)
        with torch.no_grad():
            for number, value in self.values.items():
                tensors[number].copy_(value)
        if optimizer is None:
            return
        for group, options in zip(optimizer.param_groups, self.options, strict=False):
            group.update(options)
        parameters = _parameters(optimizer)
        for number, state in self.state.items():
            optimizer.state[parameters[number]] = state


class Original:
    """The owner's model and optimizer, with what the copies know of them.

    Parameters
    ----------
    model : Module
        The model.
    optimizer : Optimizer, optional
        What trains it.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        self._is_behind = False
        self.note()

    def note(self) -> None:
        """Take note that the copies are as the original is now."""
        model, optimizer = self._model, self._optimizer
        self._options = _options(optimizer)
        self._modes = [module.training for module in model.modules()]
        self._trained = [parameter.requires_grad for parameter in model.parameters()]
        self._values = [_Mark(tensor) for tensor in _tensors(model)]
        self._state = [_marked(state) for state in _states(optimizer)]

    def changes(self) -> Changes:
        """Return what was set since the last note.

        Raises
        ------
        UsageError
            When values were set while the copies have trained others, or the optimizer has other parameters than then.
        """
        options = _options(self._optimizer)
        if [len(each["params"]) for each in options] != [len(each["params"]) for each in self._options]:
            raise UsageError("The optimizer has other parameters now: bind(model, optimizer) again.")
        tensors, modes = _tensors(self._model), [module.training for module in self._model.modules()]
        if len(tensors) != len(self._values) or len(modes) != len(self._modes):
            raise UsageError("The model has other modules or parameters now: bind(model, optimizer) again.")
        trained = [parameter.requires_grad for parameter in self._model.parameters()]
        states = _states(self._optimizer)
        found = Changes(
            [_others(now, before) for now, before in zip(options, self._options, strict=True)],
            modes if modes != self._modes else None,
            trained if trained != self._trained else None,
            {n: t.detach() for n, t in enumerate(tensors) if not self._values[n].is_of(t)},
            {n: state for n, state in enumerate(states) if not _same_state(_marked(state), self._state[n])},
        )
        if self._is_behind and (found.values or found.state):
            raise UsageError(
                "The model or the optimizer's state was changed here, while the workers have trained on from older "
                "values: call collect() before you change them, or bind(model, optimizer) to begin with them."
            )
        return found

    def train(self) -> None:
        """Take note that the copies are trained from here on."""
        self._is_behind = True
        if self._optimizer is not None:  # else torch's schedulers warn that no step was made before theirs
            self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def take(self, values: Mapping[str, Any], state: Mapping[str, Any] | None) -> None:
        """Have what the copies have trained.

        Parameters
        ----------
        values : mapping
            Their model's ``state_dict()``.
        state : mapping, optional
            Their optimizer's. An option counts unless it was set here since they were told.
        """
        self._model.load_state_dict(values)
        theirs: Options = state["param_groups"] if state is not None else []
        if self._optimizer is not None and state is not None:
            pairs = zip(_options(self._optimizer), self._options, theirs, strict=True)
            groups = [{**their, **_others(now, before)} for now, before, their in pairs]
            self._optimizer.load_state_dict({**state, "param_groups": groups})
        self.note()
        for known, their in zip(self._options, theirs, strict=False):
            known.update(_without_parameters(their))  # what was set here is still to be told
        self._is_behind = False


class _Mark:
    """How a tensor was: its memory, which is kept, and version; a buffer's values, as BatchNorm's have no version."""

    def __init__(self, tensor: Tensor) -> None:
        self._alias, self._version = tensor.detach(), tensor._version
        is_buffer = not isinstance(tensor, nn.Parameter)
        self._copy = tensor.detach().clone() if is_buffer else None

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the tensor is as it was."""
        place = (self._alias.data_ptr(), self._alias.shape, self._version)
        if place != (tensor.data_ptr(), tensor.shape, tensor._version):
            return False
        return self._copy is None or torch.equal(self._copy, tensor)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _parameters(optimizer: Optimizer | None) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []


def _options(optimizer: Optimizer | None) -> Options:
    """Return what is set by group; a rate that is a tensor may be written to later."""
    groups = optimizer.param_groups if optimizer is not None else []
    return [
        {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
        for group in groups
    ]


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _others(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    own = _without_parameters(now)
    return {
        name: value for name, value in own.items() if name not in before or not _same(value, before[name])
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.shape == other.shape and torch.equal(one, other)
    return bool(one == other)


def _states(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """Return what an optimizer keeps, by parameter; nothing is made where it keeps nothing."""
    if optimizer is None:
        return []
    return [dict(optimizer.state.get(parameter, {})) for parameter in _parameters(optimizer)]


def _marked(state: Mapping[str, Any]) -> State:
    return {
        name: (value, value._version if isinstance(value, Tensor) else 0) for name, value in state.items()
    }


def _same_state(now: State, before: State) -> bool:
    return now.keys() == before.keys() and all(_same_mark(now[name], before[name]) for name in now)


def _same_mark(now: tuple[Any, int], before: tuple[Any, int]) -> bool:
    if now[1] != before[1]:
        return False
    if isinstance(now[0], Tensor) or isinstance(before[0], Tensor):
        return now[0] is before[0]
    return bool(now[0] == before[0])
