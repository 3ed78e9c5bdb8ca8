"""What the steps of a process share: models and optimizers that their functions use, and how changes travel.

    functions ──reach──> modules, optimizers, parameters ──> tensors by number, the same on every rank
    before a step: remember ──> after it: what has changed, values and gradients ──> the other ranks apply it

Knows functions, modules and tensors; does not know ranks or messages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from openclaw_nb.engine.objects.reach import reachable

Values = dict[int, Tensor]
Gradients = dict[int, Tensor | None]


class Shared:
    """The tensors that training can change, of all that some functions use.

    Parameters
    ----------
    functions : mapping of str to callable
        The steps.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.reached: list[set[int]] = []
        self.objects: list[Any] = []
        self.tensors: list[Tensor] = []
        self.zeroed: set[int] = set()
        numbers: dict[int, int] = {}
        for function in functions.values():
            found = _objects_of(function)
            self.objects += [each for each in found if not any(each is known for known in self.objects)]
            own = [tensor for each in found for tensor in _tensors_of(each)]
            for tensor in own:
                if id(tensor) not in numbers:
                    numbers[id(tensor)] = len(self.tensors)
                    self.tensors.append(tensor)
            self.reached.append({numbers[id(tensor)] for tensor in own})
        self._numbers = numbers

    @property
    def parameters(self) -> list[Tensor]:
        """Those that have gradients, in order."""
        return [tensor for tensor in self.tensors if tensor.requires_grad and tensor.is_leaf]

    def remember(self, numbers: Iterable[int]) -> dict[int, tuple[Any, ...]]:
        """Return a mark of the state of some tensors.

        Buffers are copied: BatchNorm's change without a new version.
        """
        self.zeroed.clear()
        return {number: _mark(self.tensors[number]) for number in numbers}

    def changes(self, before: Mapping[int, tuple[Any, ...]]) -> tuple[Values, Gradients]:
        """Return what of it has changed since then, by number."""
        values: Values = {}
        gradients: Gradients = {number: None for number in self.zeroed if number in before}
        for number, (version, place, copy, *gradient) in before.items():
            tensor = self.tensors[number]
            same = (tensor._version, tensor.data_ptr()) == (version, place)
            if not same or (copy is not None and not torch.equal(copy, tensor)):
                values[number] = tensor.detach()
            if tensor.is_leaf and (_has_new_gradient(tensor, *gradient) or number in gradients):
                gradients[number] = tensor.grad
        return values, gradients

    def apply(self, values: Values, gradients: Gradients) -> None:
        """Take changes over. Storage is replaced, not written to: a graph may still need what was there."""
        for number, value in values.items():
            tensor = self.tensors[number]
            tensor.data = value.to(tensor.device)
        for number, gradient in gradients.items():
            tensor = self.tensors[number]
            tensor.grad = None if gradient is None else gradient.to(tensor.device)

    def watch_zeroing(self) -> Callable[[], None]:
        """Note when gradients are zeroed, also where there are none; return what ends it."""
        watched = [each for each in self.objects if hasattr(each, "zero_grad")]
        own = {id(each): each.__dict__["zero_grad"] for each in watched if "zero_grad" in each.__dict__}
        for each in watched:
            each.__dict__["zero_grad"] = functools.partial(self._zero, each, each.zero_grad)

        def end() -> None:
            for each in watched:
                del each.__dict__["zero_grad"]
                if id(each) in own:
                    each.__dict__["zero_grad"] = own[id(each)]

        return end

    def _zero(self, owner: Any, zero_grad: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        zero_grad(*args, **kwargs)
        self.zeroed.update(self._numbers[id(t)] for t in _tensors_of(owner) if t.grad is None)

    def states(self) -> list[Any]:
        """Return the state of each object, to be loaded into like objects elsewhere."""
        return [_state_of(each) for each in self.objects]

    def load(self, states: Sequence[Any]) -> None:
        """Load what `states` returned; None leaves an object as it is."""
        for each, state in zip(self.objects, states, strict=True):
            if state is not None:
                _load_state(each, state)


def _state_of(found: Any) -> Any:
    """Return values and settings: which modules train, and which parameters."""
    if isinstance(found, Tensor):
        return found.detach(), found.requires_grad
    if isinstance(found, nn.Module):
        modes = [module.training for module in found.modules()]
        return found.state_dict(), modes, [parameter.requires_grad for parameter in found.parameters()]
    return found.state_dict()


def _load_state(found: Any, state: Any) -> None:
    if isinstance(found, Tensor):
        with torch.no_grad():
            found.copy_(state[0])
        found.requires_grad_(state[1])
    elif isinstance(found, nn.Module):
        values, modes, trained = state
        found.load_state_dict(values)
        for module, mode in zip(found.modules(), modes, strict=True):
            module.training = mode
        for parameter, needs in zip(found.parameters(), trained, strict=True):
            parameter.requires_grad_(needs)
    else:
        found.load_state_dict(state)


def _mark(tensor: Tensor) -> tuple[Any, ...]:
    copy = None if tensor.requires_grad else tensor.detach().clone()
    gradient = tensor.grad if tensor.is_leaf else None
    return tensor._version, tensor.data_ptr(), copy, gradient, None if gradient is None else gradient._version


def _has_new_gradient(tensor: Tensor, before: Tensor | None, version: int | None) -> bool:
    gradient = tensor.grad
    return gradient is not before or (gradient is not None and gradient._version != version)


def _objects_of(function: Callable[..., Any]) -> list[Any]:
    """Return the modules, optimizers and parameters that a function can reach, in a fixed order."""
    kinds = nn.Module | torch.optim.Optimizer | nn.Parameter
    found = [value for value in reachable(["step"], {"step": function}).values() if isinstance(value, kinds)]
    return [
        value for number, value in enumerate(found) if not any(value is other for other in found[:number])
    ]


def _tensors_of(found: Any) -> list[Tensor]:
    if isinstance(found, nn.Module):
        return [*found.parameters(), *found.buffers()]
    if isinstance(found, torch.optim.Optimizer):
        return [parameter for group in found.param_groups for parameter in group["params"]]
    return [found]
