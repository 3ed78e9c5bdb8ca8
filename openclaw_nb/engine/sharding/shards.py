"""Makes models' parameters and their optimizers' state shards by FSDP2 (``fully_shard``), and whole again.

    apply    fully_shard makes a sharded parameter of each; optimizers get these, with the shards of their state
    release  what was whole is freed; the parameters' own objects stand in for their shards
    (the cell runs)
    undo     what `payload` has returned on every rank is put together; the same parameters are plain again

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020 (stage 3); Zhao et
al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023. A parameter is cut along dim 0, into
parts as `torch.chunk` makes them.

Knows FSDP2 and optimizers; does not know where payloads travel, or when a cell begins and ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from openclaw_nb.engine.objects.find import Objects
from openclaw_nb.engine.sharding.stand_in import fill, retire, stand_in

Payload = dict[str, Any]
"""One rank's shards: parameters, gradients, and each optimizer's state by parameter."""

_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_FSDP = "torch.distributed.fsdp"


@dataclass(frozen=True)
class _Slot:
    """Where a module has a parameter."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


@dataclass(frozen=True)
class _Plain:
    """What a module was before."""

    module: nn.Module
    kind: type
    attributes: frozenset[str]


class Sharding:
    """The shards of one cell's objects.

    Parameters
    ----------
    objects : Objects
        Whose parameters and optimizer state are sharded.
    layers : mapping of str to sequence of str
        By model: the layers that are gathered each by itself, inner ones first.
    reshard_after_forward : bool
        Drop a layer's parameters after its forward pass and gather them again for its backward pass.
    group : ProcessGroup
        The ranks.
    """

    def __init__(
        self,
        objects: Objects,
        layers: Mapping[str, Sequence[str]],
        *,
        reshard_after_forward: bool,
        group: Any,
    ) -> None:
        self._objects, self._layers, self._reshards = objects, layers, reshard_after_forward
        self._group: dist.ProcessGroup = group
        self._modules: list[_Plain] = []
        self._slots: list[_Slot] = []
        self._whole_states: list[dict[Tensor, Any]] = []
        self._handles: list[Any] = []
        self.parameters: list[nn.Parameter] = []
        self.shards: list[nn.Parameter] = []
        self._requires_grad: list[bool] = []
        self.is_released = False

    # ------------------------------------------------------------------------------------------ apply

    def apply(self) -> None:
        """Shard everything; what was whole is still there."""
        self._note_plain()
        device = self.parameters[0].device.type
        mesh = DeviceMesh.from_group(self._group, device)
        for name, model in self._objects.models.items():
            inner = dict(model.named_modules())
            for layer in [inner[path] for path in self._layers[name]]:
                self._shard(layer, mesh, self._reshards)
            self._shard(model, mesh, None if self._reshards else False)
        found = {slot.parameter: slot.module._parameters[slot.name] for slot in self._slots}
        self.shards = [shard for p in self.parameters if (shard := found[p]) is not None]
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            if parameter.grad is not None:
                shard.grad = _sharded(parameter.grad, shard)
        self._point_optimizers()

    def communicate_by(self, all_gather: Any, reduce_scatter: Any) -> None:
        """Let FSDP make its collectives by these."""
        for model in self._objects.models.values():
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_all_gather(all_gather)
                    module.set_custom_reduce_scatter(reduce_scatter)

    def _note_plain(self) -> None:
        found: dict[nn.Parameter, None] = {}
        for model in self._objects.models.values():
            for module in model.modules():
                self._modules.append(_Plain(module, type(module), frozenset(module.__dict__)))
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        self._slots.append(_Slot(module, name, parameter))
                        found[parameter] = None
        self.parameters = list(found)
        self._requires_grad = [p.requires_grad for p in self.parameters]

    def _shard(self, module: nn.Module, mesh: DeviceMesh, reshards: bool | None) -> None:
        # Before FSDP's own hook, which a view that is written to in place would lose.
        self._handles.append(module.register_forward_hook(_own_memory))
        fully_shard(module, mesh=mesh, reshard_after_forward=reshards)

    def _point_optimizers(self) -> None:
        """Let optimizers step the shards, with shards of their state."""
        shard_of: dict[Tensor, nn.Parameter] = dict(zip(self.parameters, self.shards, strict=True))
        for optimizer in self._objects.optimizers.values():
            for group in optimizer.param_groups:
                group["params"][:] = [shard_of[p] for p in group["params"]]
            whole: dict[Tensor, Any] = {
                p: optimizer.state.pop(p) for p in self.parameters if p in optimizer.state
            }
            self._whole_states.append(whole)
            for parameter, state in whole.items():
                shard = shard_of[parameter]
                optimizer.state[shard] = {key: shard_like(value, shard) for key, value in state.items()}

    def release(self) -> None:
        """Free what is whole."""
        self._whole_states = [{} for _ in self._objects.optimizers]
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            stand_in(parameter, shard)
        self.is_released = True

    # ---------------------------------------------------------------------------------------- payloads

    def payload(self) -> Payload:
        """Return this rank's shards as plain tensors, not copied."""
        return {
            "parameters": [_local(shard) for shard in self.shards],
            "gradients": [None if s.grad is None else _local(s.grad) for s in self.shards],
            "optimizers": [
                [
                    {k: _local(v) for k, v in optimizer.state.get(s, {}).items() if isinstance(v, DTensor)}
                    for s in self.shards
                ]
                for optimizer in self._objects.optimizers.values()
            ],
        }

    # -------------------------------------------------------------------------------------------- undo

    def undo(
        self, payloads: Sequence[Payload] | None, others: Sequence[dict[int, Any]] | None = None
    ) -> None:
        """Make everything plain and whole again.

        Parameters
        ----------
        payloads : sequence of Payload or None
            Those of all ranks, by rank. With None everything is as it was before `apply`, which needs that it was not
            released.
        others : sequence of dict, optional
            By optimizer and number of the parameter: what of its state is no shard (`unsharded_states`). The present
            one when not given.
        """
        others = others if others is not None else self.unsharded_states()
        self._strip_modules()
        for slot in self._slots:
            setattr(slot.module, slot.name, slot.parameter)
        parameter_of = dict(zip(self.shards, self.parameters, strict=True)) if self.shards else {}
        optimizers = list(self._objects.optimizers.values())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [parameter_of.get(p, p) for p in group["params"]]
            for shard in self.shards:
                optimizer.state.pop(shard, None)
        if payloads is None:
            for optimizer, whole in zip(optimizers, self._whole_states, strict=False):
                optimizer.state.update(whole)
            return
        for i, (parameter, shard) in enumerate(zip(self.parameters, self.shards, strict=True)):
            gradient = _put_together([each["gradients"][i] for each in payloads], shard)
            value = _put_together([each["parameters"][i] for each in payloads], shard)
            assert value is not None
            fill(parameter, value, gradient, requires_grad=shard.requires_grad)
            for number, optimizer in enumerate(optimizers):
                parts = [each["optimizers"][number][i] for each in payloads]
                state = {key: _put_together([part[key] for part in parts], shard) for key in parts[0]}
                state = {**others[number].get(i, {}), **state}
                if state:
                    optimizer.state[parameter] = state
            retire(shard, parameter)

    def unsharded_states(self) -> list[dict[int, Any]]:
        """Return what of optimizers' state is no shard, such as counts of steps, by optimizer and parameter."""
        return [
            {
                i: {k: v for k, v in optimizer.state[s].items() if not isinstance(v, DTensor)}
                for i, s in enumerate(self.shards)
                if s in optimizer.state
            }
            for optimizer in self._objects.optimizers.values()
        ]

    def _strip_modules(self) -> None:
        """Take off what FSDP has put on the modules."""
        for handle in self._handles:
            handle.remove()
        for plain in self._modules:
            module = plain.module
            module.__class__ = plain.kind
            _composable_state._module_state_mapping.pop(module, None)
            for name in set(module.__dict__) - plain.attributes:
                if _is_fsdps(name, module.__dict__[name]):
                    del module.__dict__[name]
            for hooks in (getattr(module, name) for name in _HOOKS):
                for key in [key for key, hook in hooks.items() if _comes_from_fsdp(hook)]:
                    del hooks[key]


def _is_fsdps(name: str, value: Any) -> bool:
    if name.startswith("_is_fsdp") or name.startswith("_fsdp"):
        return True
    return isinstance(value, dict) and any(_comes_from_fsdp(key) or key == "fully_shard" for key in value)


def _comes_from_fsdp(hook: Any) -> bool:
    inner = getattr(hook, "hook", hook)
    return str(getattr(inner, "__module__", "")).startswith(_FSDP)


def _own_memory(module: nn.Module, args: Any, output: Any) -> Any:
    """Let what a layer returns be no view: FSDP's hook on it would be lost when it is written to in place."""
    if isinstance(output, Tensor) and output.requires_grad and output._is_view():
        return output.clone()
    return None


# ---------------------------------------------------------------------------------------------------- shards


def bounds(length: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Return the half-open range of dim 0 that a rank has, as `torch.chunk` cuts it.

    Examples
    --------
    >>> [bounds(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    step = -(-length // num_ranks)
    return min(rank * step, length), min((rank + 1) * step, length)


def shard_like(value: Any, shard: Tensor) -> Any:
    """Return this rank's shard of a tensor that has the whole parameter's shape; all else as it is."""
    is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim() > 0
    return _sharded(value, shard) if is_whole and value.shape == shard.shape else value


def _sharded(whole: Tensor, shard: Tensor) -> DTensor:
    assert isinstance(shard, DTensor)
    mesh = shard.device_mesh
    low, high = bounds(whole.shape[0], mesh.size(), mesh.get_local_rank())
    return DTensor.from_local(
        whole.detach()[low:high].clone(),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.contiguous().stride(),
    )


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.to_local().detach()


def _put_together(parts: Sequence[Tensor | None], shard: nn.Parameter) -> Tensor | None:
    if any(part is None for part in parts):
        return None
    given = [part for part in parts if part is not None]
    whole = torch.empty(shard.shape, dtype=given[0].dtype, device=shard.device)
    for rank, part in enumerate(given):
        low, high = bounds(shard.shape[0], len(given), rank)
        whole[low:high].copy_(part)
    return whole
