"""Tensors that are parts here and behave as the whole: `Split` for what is computed, `SplitParameter` for parameters.

    F.linear(x, weight)      weight is a SplitParameter: the product of this rank's part, as a Split
    F.gelu(split)            `rules` knows that it can be done part by part: a Split
    F.layer_norm(split)      no rule: the parts are joined, and the function gets the whole

So code that knows nothing of parts gives what it gives on one device, whatever it does; what there is no rule for costs
a message between the ranks. Shapes are those of the whole. All ranks of the axis must run the same code.

Where `TensorAxis.is_open`, a SplitParameter is the part that it is: optimizers and the step engine work on parts.

Knows torch's way to give a function other arguments; does not know which functions there are rules for (`rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.loss.ops import Function, flatten, mutates, name_of
from openclaw_nb.engine.tensor.axis import TensorAxis
from openclaw_nb.engine.tensor.layout import Layout

_untouched = torch._C.DisableTorchFunctionSubclass
# What is the same for part and whole, or kept by the part.
_OF_PART = frozenset(
    {
        *("requires_grad", "grad_fn", "is_leaf", "_version", "retains_grad", "requires_grad_", "retain_grad"),
        *("detach_", "register_hook", "register_post_accumulate_grad_hook", "_backward_hooks", "output_nr"),
        *("_post_accumulate_grad_hooks", "is_inference", "_cdata", "name"),
    }
)
# What the wrapper, which has the whole's shape and no values, can tell.
_OF_WHOLE = frozenset(
    {
        *(
            "shape",
            "size",
            "dim",
            "ndim",
            "numel",
            "nelement",
            "dtype",
            "device",
            "layout",
            "is_floating_point",
        ),
        *("is_complex", "is_cuda", "is_cpu", "is_sparse", "is_nested", "is_quantized", "is_meta", "is_mps"),
        *(
            "element_size",
            "itemsize",
            "nbytes",
            "get_device",
            "__len__",
            "is_signed",
            "is_contiguous",
            "stride",
        ),
        *("is_mkldnn", "is_xla", "is_conj", "is_neg", "is_same_size", "dense_dim", "sparse_dim", "is_shared"),
    }
)


class Split(Tensor):
    """A tensor of which each rank has a part; behaves as the whole.

    Made by `make`. ``sources`` are the parameters that it comes from in a trial (`find`).
    """

    _part: Tensor
    _layout: Layout
    _axis: TensorAxis
    _sources: frozenset[str]

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with _untouched():
            return _call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func)).partition(".")[0]
        raise RefusedError(
            f"{name} was given a tensor that is shared out over the ranks, past torch's functions (a custom "
            "autograd.Function or extension?). Leave the layer before it out of the plan, so that its output is whole."
        )

    def full_tensor(self) -> Tensor:
        """Return the whole. All ranks of the axis call this."""
        with _untouched():
            return whole(self)  # type: ignore[no-any-return]

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return str(self.full_tensor())

    def __format__(self, spec: str) -> str:
        return format(self.full_tensor(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_tensor().detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = self.full_tensor().detach().clone()
        return memo[id(self)]  # type: ignore[no-any-return]


class SplitParameter(nn.Parameter):
    """A parameter of which each rank has a part: a plain one whose class is exchanged for the time of a cell."""

    _tensor_layout: Layout
    _tensor_axis: TensorAxis
    _tensor_name: str

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with _untouched():
            given = kwargs or {}
            if _is_open(args, given):
                return func(*args, **given)
            return _call(func, args, given)

    def full_tensor(self) -> Tensor:
        """Return the whole. All ranks of the axis call this."""
        with _untouched():
            return whole(view_of(self))  # type: ignore[no-any-return]

    def full_gradient(self) -> Tensor | None:
        """Return the whole gradient, also where torch's functions take this for a part. All ranks call this."""
        with _untouched():
            return whole(_of_parameter("grad", self))  # type: ignore[no-any-return]

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"Parameter containing:\n{self.full_tensor()}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.full_tensor().detach(), self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = nn.Parameter(self.full_tensor().detach().clone(), self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]


def make(part: Tensor, layout: Layout, axis: TensorAxis, sources: frozenset[str] = frozenset()) -> Split:
    """Return the tensor of which ``part`` is what this rank has."""
    shape = list(part.shape)
    shape[layout.dim] = layout.size
    made: Split = Tensor._make_wrapper_subclass(Split, shape, dtype=part.dtype, device=part.device)
    made._part, made._layout, made._axis, made._sources = part, layout, axis, sources
    return made


def become_split(parameter: nn.Parameter, layout: Layout, axis: TensorAxis, name: str) -> None:
    """Let a plain parameter be what this rank has of a split one."""
    given: Any = parameter
    given._tensor_layout, given._tensor_axis, given._tensor_name = layout, axis, name
    parameter.__class__ = SplitParameter


def become_plain(parameter: nn.Parameter) -> None:
    """Let a split parameter be a plain one."""
    parameter.__class__ = nn.Parameter
    for name in ("_tensor_layout", "_tensor_axis", "_tensor_name"):
        parameter.__dict__.pop(name, None)


def like(split: Split, part: Tensor, layout: Layout | None = None) -> Split:
    """Return another tensor that is shared out as ``split``, or as ``layout`` says."""
    return make(part, split._layout if layout is None else layout, split._axis, split._sources)


def view_of(parameter: SplitParameter) -> Split:
    """Return a parameter as a split tensor, with the parameter as its part."""
    source = frozenset({parameter._tensor_name})
    return make(parameter, parameter._tensor_layout, parameter._tensor_axis, source)


def whole(value: Any) -> Any:
    """Return the whole of a split tensor; any other value as it is."""
    if isinstance(value, Split):
        note_joined(value)
        return value._axis.gather(value._part, value._layout)
    return value


def joined(tensor: Tensor) -> Tensor:
    """Return the whole of any tensor, where torch's functions may be on."""
    return tensor.full_tensor() if isinstance(tensor, Split | SplitParameter) else tensor


def note_joined(split: Split) -> None:
    """Let a trial know that a tensor was joined."""
    note = getattr(split._axis, "note_joined", None)
    if note is not None:
        note(split._sources)


def map_splits(change: Callable[[Split], Any], tree: Any) -> Any:
    """Apply a function to every split tensor in nested arguments."""
    if isinstance(tree, Split):
        return change(tree)
    kind = type(tree)
    if kind is dict:
        return {key: map_splits(change, part) for key, part in tree.items()}
    if kind is tuple or kind is list:
        return kind(map_splits(change, part) for part in tree)
    if isinstance(tree, tuple):  # a torch.return_types or a named tuple
        return tree
    return tree


def _tensors(args: Any, kwargs: Any) -> Iterator[Any]:
    yield from flatten(args)
    yield from flatten(kwargs)


def _is_open(args: Any, kwargs: Any) -> bool:
    """Whether parameters are parts for this call."""
    axis = None
    for each in _tensors(args, kwargs):
        if isinstance(each, Split):
            return False
        if isinstance(each, SplitParameter):
            axis = each._tensor_axis
    return axis is not None and axis.is_open


def _as_splits(tree: Any) -> Any:
    kind = type(tree)
    if kind is SplitParameter:
        return view_of(tree)
    if kind is dict:
        return {key: _as_splits(part) for key, part in tree.items()}
    if kind is tuple or kind is list:
        return kind(_as_splits(part) for part in tree)
    return tree


def _call(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out a torch function some of whose arguments are split."""
    from openclaw_nb.engine.tensor.rules import Call
    from openclaw_nb.engine.tensor.table import RULES

    name = name_of(func)
    if name == "__set__":
        return _set(func, args)
    if args and isinstance(args[0], SplitParameter) and name in ("grad", "data", "detach"):
        return _of_parameter(name, args[0])
    given, named = _as_splits(args), _as_splits(kwargs)
    if name in _OF_WHOLE:
        return func(*given, **named)
    if name in _OF_PART:
        found = func(given[0]._part, *given[1:], **named)
        return args[0] if found is given[0]._part else found
    axis = next(each._axis for each in _tensors(given, named) if isinstance(each, Split))
    rule = RULES.get(name)
    if rule is not None:
        result = rule(Call(func, given, named, axis))
        if result is not NotImplemented:
            return args[0] if args and given and result is given[0] else result
    return _call_on_whole(func, args, given, named)


def _call_on_whole(func: Function, args: Any, given: Any, named: Any) -> Any:
    """Join the parts, call the function, and put back what it has written to."""
    wholes = map_splits(whole, given)
    result = func(*wholes, **map_splits(whole, named))
    if mutates(func):
        pairs = zip(flatten(given[0]), flatten(wholes[0]), strict=True)
        for split, changed in pairs:
            if isinstance(split, Split):
                put_whole(split, changed)
        return args[0] if result is wholes[0] else result
    return result


def put_whole(split: Split, value: Tensor) -> None:
    """Give a split tensor the values of a whole, in place."""
    part = split._part
    if torch.is_grad_enabled() and (value.requires_grad or part.requires_grad):
        split._part = split._axis.scatter(value, split._layout)
    else:
        part.copy_(split._axis.part_of(value, split._layout))


def _of_parameter(name: str, parameter: SplitParameter) -> Any:
    layout, axis = parameter._tensor_layout, parameter._tensor_axis
    if name == "detach":  # what `state_dict` takes: the plain whole
        return whole(make(parameter.detach(), layout, axis))
    part = parameter.grad if name == "grad" else parameter.data
    return None if part is None else make(part, layout, axis)


def _set(func: Function, args: tuple[Any, ...]) -> None:
    """Set ``.grad`` or ``.data`` of a split tensor, to a whole or a split one."""
    target, value = args
    split = _as_splits(target)
    if isinstance(split, Split):
        target = split._part
        if isinstance(value, Split):
            value = value._part
        elif isinstance(value, Tensor):
            value = split._axis.part_of(value, split._layout).contiguous()
    elif isinstance(value, Split | SplitParameter):
        value = whole(_as_splits(value))
    func(target, value)
