"""Steps of a model whose parameters are sharded: FSDP averages the gradients, the step engine does the rest.

    model(x) ──> FSDP gathers each layer ──> out (weighed, followed, as in data parallel)
    loss.backward() ──> the ranks agree what the loss is; FSDP gathers, and averages gradients into shards

Knows the step engine; does not know how parameters become shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.loss import votes
from openclaw_nb.engine.steps.engine import StepEngine
from openclaw_nb.engine.steps.reducer import GradientReducer


class ShardedReducer(GradientReducer):
    """Sums the ranks' messages; gradients are averaged by FSDP, into shards, while backward runs.

    Parameters
    ----------
    parameters : sequence of Parameter
        Shards; those that need no gradient are left out.
    ranks : Ranks
        The ranks.
    message_size : int
        How many values `begin` is given to sum.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Ranks, *, message_size: int) -> None:
        super().__init__([], ranks, message_size=message_size)
        self.parameters = [p for p in parameters if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._on_ready) for p in self.parameters]
        self._scale = 1.0

    @property
    def num_bytes(self) -> int:
        """Bytes that each rank gives into the reduction of one pass."""
        return 0 if self._ranks.size == 1 else sum(p.numel() * p.element_size() for p in self.parameters)

    def begin(self, factor: float, message: Tensor) -> None:
        """Expect a backward pass; see `GradientReducer.begin`. FSDP divides by the number of ranks itself."""
        self._scale = factor * self._ranks.size
        super().begin(factor, message)

    def _on_ready(self, parameter: Tensor) -> None:
        self.strayed |= not self._enabled

    def set_gradients(self) -> None:
        """Scale the gradients, which are where they belong."""
        if abs(self._scale - 1.0) < 1e-12:
            return
        for parameter in self.parameters:
            if isinstance(parameter.grad, DTensor):
                parameter.grad.to_local().mul_(self._scale)

    def remove(self) -> None:
        """Take the hooks off."""
        self.parameters = []
        super().remove()


class ShardedSteps(StepEngine):
    """A step engine for models that FSDP has sharded. Its arguments are those of `StepEngine`."""

    def _new_reducer(self) -> GradientReducer:
        found = {id(p): p for model in self._objects.models.values() for p in model.parameters()}
        self._parameters = list(found.values())
        return ShardedReducer(
            self._parameters, self._ranks, message_size=votes.message_size(self._ranks.size)
        )

    def _after_call(self, module: nn.Module, args: Any, output: Any) -> Any:
        result = super()._after_call(module, args, output)
        if self._depth == 0 and not torch.is_grad_enabled() and isinstance(module, FSDPModule):
            # Else the layers that stay gathered for a backward pass would be those of the next evaluation too.
            module.reset_iter_state()
        return result

    def _check_backward(self, tensors: Any, create_graph: bool, inputs: Any) -> Tensor:
        root = super()._check_backward(tensors, create_graph, inputs)
        if isinstance(root, DTensor):
            raise RefusedError(
                "The loss has a term of the model's parameters themselves, of which this rank has shards only (a "
                "penalty on the weights?). Use the optimizer's weight_decay, or data_parallel."
            )
        return root

    def _note_older_gradients(self) -> None:
        """Leave out what is for batches that are repeated: these are not."""
