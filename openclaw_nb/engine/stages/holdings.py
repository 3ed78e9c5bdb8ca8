"""Parameters, gradients and buffers of a model whose layers are on different ranks, as the cell sees them.

Between model call, backward and optimizer step every such tensor is of a class of ours, on all ranks:

    p.shape, p.grad, p.requires_grad    said here
    p.mul_(2), p.grad.zero_()           done where the tensor is, and nowhere else
    p.grad.norm(), clip_grad_norm_      each rank's own norms, gathered once for all gradients
    p.sum(), p.pow(2), print(p)         the value comes from its owner to all ranks: all of them run the same code
    optimizer.step()                    sees this rank's own gradients alone

So whatever the cell reads is what a single device has. While the model runs, a rank's own tensors are plain ones, and
those of others are absent (`absent`).

Knows tensors, owners and ranks; does not know layers or messages of the forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d as dist
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.loss.ops import mutates, name_of
from openclaw_nb.engine.stages.absent import Absent, absent
from openclaw_nb.engine.stages.layout import Home

_untouched = torch._C.DisableTorchFunctionSubclass
_ALIASES = frozenset({"data", "detach"})
_NORMS = frozenset({"norm", "linalg_vector_norm", "vector_norm"})
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
# What a tensor says of itself without its values being looked at.
_ABOUT = frozenset(
    (  # noqa: SIM905 - a line for each would be a page
        "shape dtype device layout ndim grad grad_fn requires_grad is_leaf is_cpu is_cuda is_meta is_sparse is_nested "
        "is_quantized is_mkldnn is_mps is_xpu itemsize nbytes names output_nr retains_grad name _version _grad _base "
        "_backward_hooks _post_accumulate_grad_hooks size dim numel nelement ndimension stride storage_offset "
        "element_size is_floating_point is_complex is_signed is_contiguous is_same_size is_inference is_conj is_neg "
        "is_shared is_pinned requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook get_device "
        "has_names data_ptr untyped_storage _is_view __len__ __hash__ __set__ __delete__"
    ).split()
)


@dataclass(frozen=True, eq=False)
class _Place:
    """Whose tensor it is. ``parameter`` is set for a gradient: the parameter that it is of."""

    holdings: Holdings
    home: Home
    parameter: Tensor | None = None

    @property
    def is_own(self) -> bool:
        return self.holdings.rank in self.home.owners


class _Staged:
    """What the class of a staged tensor adds to the class that it has."""

    _place: _Place

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in _ABOUT:
            with _untouched():
                return func(*args, **kwargs)
        leaves = tree_flatten((args, kwargs))[0]
        first = next(leaf for leaf in leaves if isinstance(leaf, _Staged))
        return first._place.holdings.call(func, name, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        value: Any = self._copy()
        return value.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = self._copy()
        return memo[id(self)]

    def _copy(self) -> Tensor:
        value = self._place.holdings.read(self).detach().clone()  # type: ignore[arg-type]
        with _untouched():
            needs = self.requires_grad  # type: ignore[attr-defined]
        return nn.Parameter(value, needs) if isinstance(self, nn.Parameter) else value


def _any(value: Any) -> Any:
    return value  # whose class is exchanged, which is no business of the type checker's


@functools.lru_cache(maxsize=64)
def _staged_class(kind: type) -> Any:
    return type(f"Staged{kind.__name__}", (_Staged, kind), {"__module__": kind.__module__})


class Holdings:
    """The tensors of one model, and who has them.

    Parameters
    ----------
    model : Module
        The model.
    homes : mapping of int to Home
        Where each tensor is, by its identity.
    optimizers : sequence of Optimizer
        What trains it.
    ranks : Ranks
        The ranks.
    """

    def __init__(
        self, model: nn.Module, homes: Mapping[int, Home], optimizers: Sequence[Optimizer], ranks: Ranks
    ) -> None:
        self.rank, self.num_ranks, self._ranks = ranks.rank, ranks.size, ranks
        self.optimizers = list(optimizers)
        self._model = model
        self.parameters: list[nn.Parameter] = [p for p in model.parameters() if id(p) in homes]
        self.tensors: list[Tensor] = [*self.parameters, *(b for b in model.buffers() if id(b) in homes)]
        self.homes = [homes[id(t)] for t in self.tensors]
        self._kinds = [type(t) for t in self.tensors]
        self._places = [_Place(self, home) for home in self.homes]
        self._of_gradients = [_Place(self, h, p) for h, p in zip(self.homes, self.parameters, strict=False)]
        self._is_plain = 0
        self._is_running = False
        self._norms: dict[str, Tensor] = {}

    # ------------------------------------------------------------------------------- taking on and off

    def enter(self) -> None:
        """Stage the tensors; what optimizers keep for those of other ranks goes."""
        for at, parameter in enumerate(self.parameters):
            if not self._places[at].is_own:
                for optimizer in self.optimizers:
                    optimizer.state.pop(parameter, None)
        flags = [p.grad is not None for p in self.parameters]
        for at, place in enumerate(self._places):
            if not place.is_own:
                self._stage(at)
        self._stage_own()
        self.stage_gradients(flags)

    def leave(self) -> None:
        """Leave every tensor plain; gradients of other ranks' parameters go."""
        self.unstage_gradients()
        for tensor, kind in zip(self.tensors, self._kinds, strict=True):
            tensor.__class__ = kind
            tensor.__dict__.pop("_place", None)
        self._is_plain = 0

    def _stage(self, at: int) -> None:
        tensor: Any = self.tensors[at]
        tensor.__class__ = _staged_class(self._kinds[at])
        tensor._place = self._places[at]

    def _stage_own(self) -> None:
        for at, place in enumerate(self._places):
            if place.is_own:
                self._stage(at)

    @contextmanager
    def plain(self, *, is_running: bool = False) -> Iterator[None]:
        """Let this rank's own tensors be plain while the body runs; those of others are refused if the model runs."""
        before = self._is_running
        self._is_plain += 1
        self._is_running = is_running
        if self._is_plain == 1:
            for at, place in enumerate(self._places):
                if place.is_own:
                    self.tensors[at].__class__ = self._kinds[at]
        try:
            yield
        finally:
            self._is_plain -= 1
            self._is_running = before
            if not self._is_plain:
                self._stage_own()

    def unstage_gradients(self) -> list[bool]:
        """Leave this rank's own gradients plain and the others None; return which parameters had one."""
        self._norms.clear()
        flags = []
        with _untouched():
            for parameter, place in zip(self.parameters, self._places, strict=False):
                gradient = parameter.grad
                flags.append(gradient is not None)
                if self.is_staged(gradient):
                    if place.is_own:
                        _any(gradient).__class__ = Tensor
                        gradient.__dict__.pop("_place", None)
                    else:
                        parameter.grad = None
        return flags

    def stage_gradients(self, flags: Sequence[bool]) -> None:
        """Let the parameters that are said to have a gradient show one: this rank's own, or one that is elsewhere."""
        self._norms.clear()
        with _untouched():
            for parameter, place, has in zip(self.parameters, self._of_gradients, flags, strict=True):
                gradient = _any(parameter.grad)
                if not has:
                    parameter.grad = None
                    continue
                if not place.is_own:
                    gradient = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(
                        parameter.shape
                    )
                elif gradient is None:
                    continue
                gradient.__class__ = _staged_class(Tensor)
                gradient._place = place
                parameter.grad = gradient

    @property
    def is_stepping(self) -> bool:
        """Whether this rank's own tensors are plain now, as in an optimizer's step."""
        return self._is_plain > 0

    @staticmethod
    def is_staged(value: Any) -> bool:
        """Whether a tensor is one of these."""
        return isinstance(value, _Staged)

    def value(self, at: int) -> Tensor:
        """Return what is at a place now: a layer may have put another tensor in the place of a buffer."""
        if at < len(self.parameters):
            return self.parameters[at]
        return dict(self._model.named_buffers()).get(self.homes[at].name, self.tensors[at])

    def own_flags(self) -> list[float]:
        """Return 1 for each parameter that counts as this rank's and has a gradient, else 0."""
        return [
            float(home.owners[0] == self.rank and p.grad is not None)
            for p, home in zip(self.parameters, self.homes, strict=False)
        ]

    def drop_gradients(self) -> None:
        """Leave no gradient."""
        self.stage_gradients([False] * len(self.parameters))

    # ------------------------------------------------------------------------------------ what is called

    def call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Do what the cell asks of a staged tensor."""
        if self._is_running:
            return self._call_in_model(func, args, kwargs)
        if name in _ALIASES:
            return self._alias(func, args[0])
        if isinstance(kwargs.get("out"), _Staged):
            raise RefusedError(
                f"{name}(out=...) into a parameter or gradient is not supported: assign in place."
            )
        if mutates(func):
            self._norms.clear()
            return self._write(func, name, args, kwargs)
        if name in _NORMS and len(args) <= 2 and not any(v is not None for v in kwargs.values()):
            place = getattr(args[0], "_place", None)
            if place is not None and place.parameter is not None:
                return self._norm(func, place, args[1:], kwargs)
        args, kwargs = tree_map(self._read_leaf, (args, kwargs))
        with _untouched():
            return func(*args, **kwargs)

    def _call_in_model(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Go on with the shape of another rank's tensor: what needs its value is refused where it enters a layer."""

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, _Staged):
                return leaf
            with _untouched():
                tensor: Any = leaf
                return absent(tensor.shape, tensor.dtype, tensor.device, leaf._place.home.name)

        args, kwargs = tree_map(stand_in, (args, kwargs))
        return Absent.__torch_function__(func, (), args, kwargs)

    def _alias(self, func: Any, tensor: Any) -> Any:
        with _untouched():
            result: Any = func(tensor)
        if isinstance(tensor, _Staged):
            result = result.as_subclass(Tensor) if type(result) is not Tensor else result
            setattr(result, "__class__", _staged_class(Tensor))  # noqa: B010 - the type checker takes it for its own
            result._place = tensor._place
        return result

    def _read_leaf(self, leaf: Any) -> Any:
        return self.read(leaf) if self.is_staged(leaf) else leaf

    def read(self, tensor: Tensor) -> Tensor:
        """Return a staged tensor's value as a plain one; on its first owner it is part of the autograd graph.

        Every rank calls this, as all run the same code. On one alone, so that what the cell adds to its loss for a
        parameter that several ranks have enters the sum of their gradients once.
        """
        place = tensor._place  # type: ignore[attr-defined]
        source = place.home.owners[0]
        with _untouched():
            plain = tensor.as_subclass(Tensor)
            if self._ranks.size > 1:
                own = plain.detach()
                buffer = (
                    own.cpu().contiguous() if source == self.rank else torch.empty(own.shape, dtype=own.dtype)
                )
                options = dist.BroadcastOptions()
                options.rootRank = source
                self._ranks.group.broadcast([buffer], options).wait()
        return plain if source == self.rank else buffer.to(plain.device)

    def _write(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        target = args[0]
        if isinstance(target, list | tuple):
            return self._write_each(func, name, args, kwargs)
        rest, named = tree_map(self._read_leaf, (args[1:], kwargs))
        if isinstance(target, _Staged) and not target._place.is_own:
            return target
        with _untouched():
            func(target, *rest, **named)
        return target

    def _write_each(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        targets = args[0]
        kept = [at for at, t in enumerate(targets) if not isinstance(t, _Staged) or t._place.is_own]

        def of_kept(part: Any) -> Any:
            if isinstance(part, list | tuple) and len(part) == len(targets):
                return [part[at] for at in kept]
            return part

        rest = tree_map(self._read_leaf, args[1:]) if name != _UNSCALE else args[1:]
        if kept:
            with _untouched():
                func(of_kept(targets), *(of_kept(part) for part in rest), **kwargs)
        if name == _UNSCALE and self._ranks.size > 1:  # what overflows on one rank is skipped on all
            found = args[1]
            found.copy_(self._ranks.gather(found.detach().cpu().view(-1)).max())
        return None

    def _norm(self, func: Callable[..., Tensor], place: _Place, rest: Any, kwargs: Any) -> Tensor:
        key = f"{name_of(func)} {rest!r} {kwargs!r}"
        if key not in self._norms:
            own = torch.zeros(len(self.parameters), dtype=torch.float64)
            with _untouched():
                for at, parameter in enumerate(self.parameters):
                    if self.homes[at].owners[0] == self.rank and parameter.grad is not None:
                        own[at] = func(parameter.grad.as_subclass(Tensor), *rest, **kwargs)
            self._norms[key] = self._ranks.gather(own)
        at = next(at for at, parameter in enumerate(self.parameters) if parameter is place.parameter)
        assert place.parameter is not None
        with _untouched():
            value = self._norms[key][place.home.owners[0], at]
            return value.to(place.parameter.dtype).to(place.parameter.device)
