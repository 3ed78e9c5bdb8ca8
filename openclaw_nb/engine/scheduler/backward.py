"""The way back through one stage for one micro-batch: whole, or input gradient first and weight gradients later.

The cut is torch's own, that of its zero-bubble schedules: the input pass keeps the gradients where the graph of the
weights branches off, and the weight pass goes on from there, so that nothing is computed twice. These two functions are
not public; a contract test holds what is used of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward


class Pass:
    """A micro-batch that has gone forward through a stage.

    Parameters
    ----------
    value, output : Tensor
        What went in and came out; the output is the loss in the last stage.
    parameters : sequence of Parameter
        The stage's.
    """

    def __init__(self, value: Tensor, output: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        self._value, self._output = value, output
        self._parameters = [p for p in parameters if p.requires_grad]
        self._gradient: Tensor | None = None
        self._branches: list[dict[str, Any]] | None = None

    def whole(self, gradient: Tensor | None) -> Tensor | None:
        """Add to the weights' gradients and return the input's."""
        if self._output.requires_grad:
            torch.autograd.backward(self._output, gradient)
        return self._input_gradient()

    def inputs(self, gradient: Tensor | None) -> Tensor | None:
        """Return the input's gradient; the weights' come later."""
        if not self._value.requires_grad or not self._output.requires_grad:
            self._gradient = gradient
            return self._input_gradient()
        if not self._parameters:
            return self.whole(gradient)
        # What it does last is to detach the output in place, which a view does not allow.
        output = self._output.clone() if self._output._is_view() else self._output
        given = None if gradient is None else [gradient]
        _, self._branches = _backward.stage_backward_input(
            [output], given, [self._value], iter(self._parameters)
        )
        return self._input_gradient()

    def weights(self) -> None:
        """Add to the weights' gradients, after `inputs`."""
        if self._branches is not None:
            # Weights that branch off from each other share a piece of the graph, which its first user would free.
            _backward.stage_backward_weight(iter(self._parameters), self._branches, retain_graph=True)
        elif self._parameters and self._output.requires_grad:
            torch.autograd.backward(self._output, self._gradient, inputs=self._parameters)

    def _input_gradient(self) -> Tensor | None:
        if self._value.grad is None and self._value.requires_grad:
            return torch.zeros_like(self._value)
        return self._value.grad
