"""The parts that this rank has of a model's parameters and of what optimizers keep for them, and the way back.

    take     parameter.data is exchanged for this rank's part, and so are gradients and the optimizers' state
    (the cell trains the parts)
    join     every rank's parts, gathered: nothing is changed yet
    put      the values go into the tensors that the parameters had before
    put_back the state is what it was when parts were taken

Parameters are the same objects all the time. Their former tensors are kept: what was there before is there again if a
part is lost with its rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.tensor.axis import TensorAxis
from openclaw_nb.engine.tensor.find import Plan, parts_of
from openclaw_nb.engine.tensor.layout import Layout
from openclaw_nb.engine.tensor.split import become_plain, become_split

_untouched = torch._C.DisableTorchFunctionSubclass
# These update each element by what they keep for it alone.
_ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"),
)


def check_optimizer(name: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer that may need a whole parameter to update a part of it.

    Raises
    ------
    RefusedError
        With those that can be shared out.
    """
    kinds = [kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim")]
    kind = type(optimizer)
    if kind not in kinds or kind.__name__ not in _ELEMENTWISE:
        raise RefusedError(
            f"`{name}` is {kind.__name__}, which is not known to update each element by itself: it cannot be shared "
            f"out over the ranks. Use one of {', '.join(_ELEMENTWISE)}, or data_parallel."
        )


@dataclass
class _Shared:
    """One parameter that is shared out: how, and the tensor that it was."""

    name: str
    parameter: nn.Parameter
    layout: Layout
    before: Tensor
    gradient: Tensor | None
    states: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass
class _Whole:
    """A tensor that every rank has whole, and its values when parts were taken."""

    tensor: Tensor
    before: Tensor


@dataclass
class Joined:
    """The whole values of everything that is shared out."""

    values: list[Tensor]
    gradients: list[Tensor | None]
    states: list[dict[int, dict[str, Any]]]


@dataclass
class _Part:
    """What this rank has of one parameter, and of what optimizers keep for it."""

    parameter: nn.Parameter
    layout: Layout
    data: Tensor
    states: dict[int, dict[str, Any]]


@dataclass
class Aside:
    """What this rank has trained, apart from the objects."""

    optimizers: list[Optimizer]
    parts: list[_Part]
    wholes: list[_Whole]
    states: list[tuple[Optimizer, nn.Parameter, dict[str, Any] | None]]

    @torch.no_grad()
    def put(self, axis: TensorAxis) -> None:
        """Join the parts and put everything into the objects. All ranks of the axis call this."""
        values = [axis.join(part.data, part.layout) for part in self.parts]
        joined = [
            {
                place: {
                    key: axis.join(value, part.layout) if _is_like(value, part.data.shape) else value
                    for key, value in state.items()
                }
                for place, state in part.states.items()
            }
            for part in self.parts
        ]
        for part, value, states in zip(self.parts, values, joined, strict=True):
            part.parameter.data.copy_(value)
            for place, state in states.items():
                self.optimizers[place].state[part.parameter] = state
        for whole in self.wholes:
            whole.tensor.detach().copy_(whole.before)
        for optimizer, parameter, kept in self.states:
            _set_state(optimizer, parameter, kept)


class Shards:
    """What this rank has of one cell's models.

    Parameters
    ----------
    axis : TensorAxis
        The ranks that share.
    optimizers : mapping of str to Optimizer
        Whose state goes with the parameters.
    is_trial : bool
        Whether parts are taken without a backward pass: graphs that hold the whole parameters stay valid.
    """

    def __init__(
        self, axis: TensorAxis, optimizers: Mapping[str, Optimizer], *, is_trial: bool = False
    ) -> None:
        self._axis, self._optimizers, self._is_trial = axis, list(optimizers.values()), is_trial
        self._shared: list[_Shared] = []
        self._wholes: list[_Whole] = []
        self._kept_states: list[tuple[Optimizer, nn.Parameter, dict[str, Any] | None]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing is shared out."""
        return not self._shared

    @torch.no_grad()
    def take(self, model: nn.Module, plan: Plan) -> None:
        """Let the parameters that a plan names be parts from here on."""
        found = list(_layouts(model, plan, self._axis.size))
        ids = {id(parameter) for _, parameter, _ in found}
        own = {id(parameter) for parameter in model.parameters()} - ids
        tensors = [*model.parameters(), *model.buffers()]
        self._wholes += [_Whole(each, each.detach().clone()) for each in tensors if id(each) not in ids]
        self._kept_states += [
            (optimizer, parameter, _copy_state(optimizer, parameter))
            for optimizer in self._optimizers
            for parameter in _parameters(optimizer)
            if id(parameter) in own
        ]
        for name, parameter, layout in found:
            self._shared.append(self._take_one(name, parameter, layout))

    def _take_one(self, name: str, parameter: nn.Parameter, layout: Layout) -> _Shared:
        shared = _Shared(name, parameter, layout, parameter.data, parameter.grad if self._is_trial else None)
        for place, optimizer in enumerate(self._optimizers):
            state = optimizer.state.get(parameter)
            if state:
                shared.states[place] = dict(state)
                for key, value in state.items():
                    if _is_like(value, shared.before.shape):
                        state[key] = self._part(value, layout)
        gradient, parameter.grad = parameter.grad, None
        self._exchange(parameter, self._part(shared.before, layout))
        parameter.grad = None if gradient is None else self._part(gradient, layout)
        become_split(parameter, layout, self._axis, name)
        return shared

    def _part(self, whole: Tensor, layout: Layout) -> Tensor:
        return self._axis.part_of(whole, layout).clone(memory_format=torch.contiguous_format)

    # -------------------------------------------------------------------------------------- the way back

    @torch.no_grad()
    def join(self, axis: TensorAxis) -> Joined:
        """Return the whole values; nothing is changed. All ranks of the axis call this.

        Parameters
        ----------
        axis : TensorAxis
            The same ranks, in a group that stands.
        """
        joined = Joined([], [], [])
        with _untouched():
            for shared in self._shared:
                parameter, layout = shared.parameter, shared.layout
                joined.values.append(axis.join(parameter.data, layout))
                joined.gradients.append(None if parameter.grad is None else axis.join(parameter.grad, layout))
                joined.states.append(self._join_states(shared, axis))
        return joined

    def _join_states(self, shared: _Shared, axis: TensorAxis) -> dict[int, dict[str, Any]]:
        part_shape = shared.parameter.data.shape
        found = {}
        for place, optimizer in enumerate(self._optimizers):
            state = optimizer.state.get(shared.parameter)
            if state:
                found[place] = {
                    key: axis.join(value, shared.layout) if _is_like(value, part_shape) else value
                    for key, value in state.items()
                }
        return found

    def put(self, joined: Joined) -> None:
        """Let every parameter be plain and have its whole value, in the tensor that it had."""
        for shared, value, gradient, states in zip(
            self._shared, joined.values, joined.gradients, joined.states, strict=True
        ):
            shared.before.copy_(value)
            for place, state in states.items():
                kept = shared.states.get(place, {})
                own = self._optimizers[place].state[shared.parameter]
                for key, whole in state.items():
                    own[key] = _into(kept.get(key), whole)
            self._be_plain(shared, gradient)
        self._forget()

    @torch.no_grad()
    def put_back(self) -> None:
        """Let every parameter be plain, and all values be what they were when parts were taken."""
        for shared in self._shared:
            for place, optimizer in enumerate(self._optimizers):
                before = shared.states.get(place)
                if before is not None:
                    optimizer.state[shared.parameter] = dict(before)
                else:
                    optimizer.state.pop(shared.parameter, None)
            self._be_plain(shared, shared.gradient)
        for whole in self._wholes:
            if not torch.equal(whole.tensor, whole.before):  # else a graph that holds it stays valid
                whole.tensor.detach().copy_(whole.before)
        for optimizer, parameter, kept in self._kept_states:
            _set_state(optimizer, parameter, kept)
        self._forget()

    @torch.no_grad()
    def set_aside(self) -> Aside:
        """Keep what was trained, and let everything be what it was when parts were taken."""
        with _untouched():
            parts = [
                _Part(
                    shared.parameter,
                    shared.layout,
                    shared.parameter.data,
                    {
                        place: dict(optimizer.state[shared.parameter])
                        for place, optimizer in enumerate(self._optimizers)
                        if optimizer.state.get(shared.parameter)
                    },
                )
                for shared in self._shared
            ]
        wholes = [_Whole(whole.tensor, whole.tensor.detach().clone()) for whole in self._wholes]
        states = [(optimizer, p, _copy_state(optimizer, p)) for optimizer, p, _ in self._kept_states]
        self.put_back()
        return Aside(self._optimizers, parts, wholes, states)

    def _be_plain(self, shared: _Shared, gradient: Tensor | None) -> None:
        become_plain(shared.parameter)
        shared.parameter.grad = None
        self._exchange(shared.parameter, shared.before)
        shared.parameter.grad = gradient

    def _exchange(self, parameter: nn.Parameter, data: Tensor) -> None:
        if self._is_trial:
            parameter.data = data
        else:
            exchange(parameter, data)

    def _forget(self) -> None:
        self._shared, self._wholes, self._kept_states = [], [], []

    # ------------------------------------------------------------------------------- in the cell

    def whole_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's ``state_dict()`` with whole tensors. All ranks of the axis call this."""
        places = {id(shared.parameter): shared for shared in self._shared}
        entries = dict(state["state"])
        with _untouched():
            for number, parameter in enumerate(_parameters(optimizer)):
                shared = places.get(id(parameter))
                if shared is not None and number in entries:
                    shape = parameter.data.shape
                    entries[number] = {
                        key: self._axis.join(value, shared.layout) if _is_like(value, shape) else value
                        for key, value in entries[number].items()
                    }
        return {**state, "state": entries}

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of the parameters here, and of the whole, of what is shared out."""
        with _untouched():
            own = sum(shared.parameter.data.nbytes for shared in self._shared)
        return own, sum(shared.before.nbytes for shared in self._shared)


def exchange(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter another tensor, of another shape.

    A graph that the cell still holds, by a loss of an earlier loop, has a node that gathers gradients of the former
    shape. torch makes a new one when the type changes.
    """
    other = torch.float64 if data.dtype != torch.float64 else torch.float32
    parameter.data = torch.empty(0, dtype=other, device=data.device)
    parameter.data = data


def _layouts(model: nn.Module, plan: Plan, num_ranks: int) -> Iterator[tuple[str, nn.Parameter, Layout]]:
    """Walk the parameters that a plan shares out, each once."""
    modules, seen = dict(model.named_modules()), set()
    for name, entry in plan.items():
        for inner, parameter, layout in parts_of(modules[name], entry):
            found = layout(num_ranks)
            assert found is not None
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{name}.{inner}", parameter, found


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_like(value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == torch.Size(shape)


def _copy_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any] | None:
    state = optimizer.state.get(parameter)
    if state is None:
        return None
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def _set_state(optimizer: Optimizer, parameter: nn.Parameter, state: dict[str, Any] | None) -> None:
    if state is None:
        optimizer.state.pop(parameter, None)
    else:
        optimizer.state[parameter] = state


def _into(kept: Any, value: Any) -> Any:
    """Put a value into the tensor that was there before, if there was one like it."""
    if (
        isinstance(kept, Tensor)
        and isinstance(value, Tensor)
        and kept.shape == value.shape
        and kept is not value
    ):
        return kept.copy_(value)
    return value
