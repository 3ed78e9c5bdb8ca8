"""Which torch functions can be done part by part, and how.

A rule takes a `Call` and returns its result, or NotImplemented when these arguments need the whole. Rules run where
split parameters and tensors are plain ones, so that what they call is done on parts.

Random numbers: what a single device would draw for the whole tensor is drawn on every rank, and each takes its part.
So dropout drops what it drops on one device, and all ranks stay at the same place of their common stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.loss.ops import Function, flatten, mutates
from openclaw_nb.engine.tensor.axis import TensorAxis
from openclaw_nb.engine.tensor.layout import Layout, view
from openclaw_nb.engine.tensor.split import Split, like, make, map_splits, whole

_NAMES = """
    relu relu_ relu6 gelu silu silu_ elu elu_ selu selu_ celu leaky_relu leaky_relu_ mish mish_ softplus softsign
    sigmoid sigmoid_ tanh tanh_ hardtanh hardtanh_ hardswish hardsigmoid logsigmoid log_sigmoid hardshrink softshrink
    tanhshrink threshold rrelu_with_noise exp exp_ log log_ log1p log2 log10 expm1 sqrt sqrt_ rsqrt square abs abs_ neg
    neg_ negative sign sin cos tan atan sinh cosh erf reciprocal reciprocal_ floor ceil round trunc clamp clamp_ clip
    clip_ clamp_min clamp_min_ clamp_max clamp_max_ pow pow_ add add_ sub sub_ subtract mul mul_ multiply div div_
    divide true_divide rsub maximum minimum where masked_fill masked_fill_ lerp lerp_ addcmul addcmul_ addcdiv addcdiv_
    eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not nan_to_num nan_to_num_ zero_ fill_ copy_
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__
    __itruediv__ __div__ __rdiv__ __idiv__ __pow__ __rpow__ __ipow__ __neg__ __pos__ __abs__ __eq__ __ne__ __lt__
    __le__ __gt__ __ge__ zeros_like ones_like full_like detach clone contiguous to float half bfloat16 double type
    type_as cpu cuda
"""
_POINTWISE = tuple(_NAMES.split())


# Queries, keys and values, or keys and values, that one layer makes.
GUESSED_BLOCKS = (2, 3)


@dataclass(frozen=True)
class Call:
    """A call of a torch function, with split arguments."""

    func: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    axis: TensorAxis

    def bind(self, *names: str, **defaults: Any) -> list[Any]:
        """Return the arguments of these names, in this order."""
        given = {**defaults, **dict(zip(names, self.args, strict=False)), **self.kwargs}
        return [given[name] for name in names]


Rule = Callable[[Call], Any]


def _same(splits: Sequence[Split]) -> bool:
    first = splits[0]
    return all(each._layout == first._layout and each.shape == first.shape for each in splits[1:])


def _sources(splits: Sequence[Split]) -> frozenset[str]:
    return frozenset().union(*(each._sources for each in splits))


def _from_right(split: Split) -> int:
    return split.dim() - split._layout.dim


# ---------------------------------------------------------------------------------------------- element by element


def pointwise(call: Call) -> Any:
    """Elements depend on elements at the same place alone, broadcast from the right."""
    splits = [each for each in flatten((call.args, call.kwargs)) if isinstance(each, Split)]
    first = splits[0]
    place = _from_right(first)
    if not all(each._layout.shares(first._layout) and _from_right(each) == place for each in splits[1:]):
        return NotImplemented
    if mutates(call.func) and not isinstance(call.args[0], Split):
        return NotImplemented

    def local(each: Any) -> Any:
        if isinstance(each, Split):
            return each._part
        return _local(each, place, first._layout, call.axis) if isinstance(each, Tensor) else each

    args = [local(each) for each in call.args]
    result = call.func(*args, **{name: local(each) for name, each in call.kwargs.items()})
    if mutates(call.func) and isinstance(result, Tensor):
        target: Split = call.args[0]
        target._part = result
        return target
    return make(result, first._layout.moved(result.dim() - place), call.axis, _sources(splits))


def _local(plain: Tensor, place: int, layout: Layout, axis: TensorAxis) -> Tensor:
    """Return of a whole tensor what goes with a part that is split ``place`` dims from the right."""
    if plain.dim() >= place and plain.shape[-place] == layout.size and layout.size > 1:
        return axis.scatter(plain, layout.moved(plain.dim() - place))
    return axis.fan(plain)


def dropout(call: Call) -> Any:
    """Drop what a single device drops."""
    x, p, training, inplace = call.bind(
        "input", "p", "training", "inplace", p=0.5, training=True, inplace=False
    )
    if not isinstance(x, Split) or inplace:
        return NotImplemented
    if not training or not 0.0 < p < 1.0:
        return like(x, F.dropout(x._part, p, training))
    return like(x, x._part * _kept(x.shape, x._layout, x, p))


def _kept(shape: Sequence[int], layout: Layout, beside: Split, p: float) -> Tensor:
    """Return this rank's part of what dropout multiplies a tensor of this shape with."""
    ones = torch.ones(tuple(shape), dtype=beside.dtype, device=beside.device)
    return beside._axis.part_of(F.dropout(ones, p, True), layout)


def softmax(call: Call) -> Any:
    """Along another dim than the one that is shared out."""
    x = call.args[0] if call.args else None
    dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    if not isinstance(x, Split) or not isinstance(dim, int) or dim % x.dim() == x._layout.dim:
        return NotImplemented
    return like(x, call.func(x._part, *call.args[1:], **call.kwargs))


# ------------------------------------------------------------------------------------------------------ shapes


def reshape(call: Call) -> Any:
    """View, reshape, flatten, unflatten: as `layout.view` says."""
    x = call.args[0]
    if not isinstance(x, Split):
        return NotImplemented
    old = tuple(x.shape)
    new = _new_shape(call, old)
    if new is None:
        return NotImplemented
    note = getattr(call.axis, "note_view", None)
    layout = view(x._layout, old, new, () if note is None else GUESSED_BLOCKS)
    if layout is None:
        return NotImplemented
    if note is not None:
        note(x._sources, x._layout, layout)
    shape = list(new)
    shape[layout.dim] = layout.extent(call.axis.rank)
    return like(x, x._part.reshape(shape), layout)


def _new_shape(call: Call, old: tuple[int, ...]) -> tuple[int, ...] | None:
    name = call.func.__name__
    if name in ("view", "reshape"):
        given = call.kwargs.get("shape", call.args[1:])
        sizes = given[0] if len(given) == 1 and isinstance(given[0], tuple | list | torch.Size) else given
        if not all(isinstance(size, int) for size in sizes):
            return None
        rest = math.prod(size for size in sizes if size != -1)
        return tuple(math.prod(old) // rest if size == -1 else size for size in sizes)
    if name == "flatten":
        _, start, end = call.bind("input", "start_dim", "end_dim", start_dim=0, end_dim=-1)
        start, end = start % len(old), end % len(old)
        return (*old[:start], math.prod(old[start : end + 1]), *old[end + 1 :])
    _, dim, sizes = call.bind("input", "dim", "sizes")
    if -1 in sizes or not isinstance(dim, int):
        return None
    dim %= len(old)
    return (*old[:dim], *sizes, *old[dim + 1 :])


def transpose(call: Call) -> Any:
    """Exchange two dims."""
    x, one, other = call.bind("input", "dim0", "dim1")
    one, other = one % x.dim(), other % x.dim()
    dim = {one: other, other: one}.get(x._layout.dim, x._layout.dim)
    return like(x, x._part.transpose(one, other), x._layout.moved(dim))


def transpose_matrices(call: Call) -> Any:
    """Exchange the last two dims."""
    return transpose(Call(torch.transpose, (call.args[0], -2, -1), {}, call.axis))


def permute(call: Call) -> Any:
    """Reorder dims."""
    x, *given = call.args
    dims = call.kwargs.get("dims", given[0] if given and isinstance(given[0], tuple | list) else given)
    dims = [dim % x.dim() for dim in dims]
    return like(x, x._part.permute(*dims), x._layout.moved(dims.index(x._layout.dim)))


def unsqueeze(call: Call) -> Any:
    """Add a dim."""
    x, dim = call.bind("input", "dim")
    dim %= x.dim() + 1
    return like(x, x._part.unsqueeze(dim), x._layout.moved(x._layout.dim + (dim <= x._layout.dim)))


def in_pieces(call: Call) -> Any:
    """Split and chunk: along another dim, or a dim of as many blocks as there are pieces."""
    x = call.args[0]
    second = "chunks" if call.func.__name__ == "chunk" else "split_size"
    given = {
        ("split_size" if name == "split_size_or_sections" else name): v for name, v in call.kwargs.items()
    }
    pieces = given.get(second, call.args[1] if len(call.args) > 1 else None)
    dim = given.get("dim", call.args[2] if len(call.args) > 2 else 0)
    if not isinstance(x, Split):
        return NotImplemented
    dim %= x.dim()
    if dim != x._layout.dim:
        return tuple(like(x, part) for part in getattr(x._part, call.func.__name__)(pieces, dim))
    count = _num_pieces(pieces, x.shape[dim], second)
    note = getattr(call.axis, "note_blocks", None)
    if note is not None and count > 1:
        note(x._sources, count)
    elif count != x._layout.blocks or count == 1:
        return NotImplemented
    block = x._layout.block if note is None else x.shape[dim] // count
    bounds = x._layout.bounds if note is None else ((0, block),)
    layout = Layout(dim, bounds, 1, x._layout.scale)
    return tuple(like(x, part, layout) for part in x._part.chunk(count, dim))


def _num_pieces(pieces: Any, size: int, kind: str) -> int:
    """Return how many equal pieces a dim is cut into; 0 for unequal ones."""
    if isinstance(pieces, int):
        count = pieces if kind == "chunks" else -(-size // pieces)
        return count if size % count == 0 and (kind == "chunks" or size == count * pieces) else 0
    return len(pieces) if len(set(pieces)) == 1 else 0


def unbind(call: Call) -> Any:
    """Along another dim than the one that is shared out."""
    x, dim = call.bind("input", "dim", dim=0)
    dim %= x.dim()
    if dim == x._layout.dim:
        return NotImplemented
    layout = x._layout.moved(x._layout.dim - (dim < x._layout.dim))
    return tuple(like(x, part, layout) for part in x._part.unbind(dim))


def index(call: Call) -> Any:
    """Numbers, slices, None and an ellipsis that leave the dim that is shared out as it is."""
    x, key = call.args
    keys = list(key) if isinstance(key, tuple) else [key]
    if not isinstance(x, Split) or not all(
        each is None or each is Ellipsis or type(each) in (int, slice) for each in keys
    ):
        return NotImplemented
    num_taken = sum(each is not None and each is not Ellipsis for each in keys)
    filled: list[Any] = []
    for each in [*keys, *([] if Ellipsis in keys else [Ellipsis])]:
        filled += [slice(None)] * (x.dim() - num_taken) if each is Ellipsis else [each]
    old, new = 0, 0
    for each in filled:
        if old == x._layout.dim and each is not None:
            if each != slice(None):
                return NotImplemented
            break
        old += each is not None
        new += type(each) is not int
    return like(x, x._part[tuple(filled)], x._layout.moved(new))


def cat(call: Call) -> Any:
    """Along another dim than the one that is shared out, if all are shared out alike."""
    tensors, dim = call.bind("tensors", "dim", dim=0)
    if not all(isinstance(each, Split) and each._layout == tensors[0]._layout for each in tensors):
        return NotImplemented
    first: Split = tensors[0]
    if dim % first.dim() == first._layout.dim:
        return NotImplemented
    part = torch.cat([each._part for each in tensors], dim)
    return make(part, first._layout, call.axis, _sources(tensors))


# ------------------------------------------------------------------------------------------------ linear algebra


def linear(call: Call) -> Any:
    """A weight with rows here: features of the output are shared out; with columns here: those of the input are."""
    x, weight, bias = call.bind("input", "weight", "bias", bias=None)
    if not isinstance(weight, Split):
        return NotImplemented
    trial = getattr(call.axis, "linear", None)
    if trial is not None:
        return trial(x, weight, bias)
    if weight._layout.dim == 0:
        return column_linear(x, weight, bias)
    return row_linear(x, weight, bias)


def column_linear(x: Any, weight: Split, bias: Any) -> Split:
    """Return this rank's output features of a linear layer."""
    axis, layout = weight._axis, weight._layout
    own = _of_layout(bias, layout, axis) if bias is not None else None
    part = F.linear(axis.fan(whole(x)), weight._part, own)
    return make(part, layout.moved(part.dim() - 1), axis, weight._sources)


def row_linear(x: Any, weight: Split, bias: Any) -> Tensor:
    """Return the whole output of a linear layer, from this rank's input features."""
    axis = weight._axis
    own = _of_layout(x, weight._layout.moved(x.dim() - 1), axis)
    result = axis.reduce(F.linear(own, weight._part))
    return result if bias is None else result + whole(bias).to(result.dtype)  # 16 bits, under autocast


def _of_layout(value: Tensor, layout: Layout, axis: TensorAxis) -> Tensor:
    """Return this rank's part of a tensor."""
    if isinstance(value, Split):
        if value._layout.dim == layout.dim and value._layout.shares(layout):
            return value._part
        value = whole(value)
    return axis.scatter(value, layout)


def matmul(call: Call) -> Any:
    """Products of matrices whose batch dim is shared out."""
    one, other = call.args[:2]
    if not (isinstance(one, Split) and isinstance(other, Split)) or len(call.args) > 2 or call.kwargs:
        return NotImplemented
    same = one.dim() == other.dim() and one._layout.dim == other._layout.dim < one.dim() - 2
    if not same or not one._layout.shares(other._layout):
        return NotImplemented
    return make(call.func(one._part, other._part), one._layout, call.axis, _sources([one, other]))


def embedding(call: Call) -> Any:
    """A table with rows here: other ranks look up the others; with columns here: features are shared out."""
    tokens, weight, padding, max_norm, _, by_frequency, sparse = call.bind(
        *("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
        padding_idx=None,
        max_norm=None,
        norm_type=2.0,
        scale_grad_by_freq=False,
        sparse=False,
    )
    if not isinstance(weight, Split) or isinstance(tokens, Split):
        return NotImplemented
    if max_norm is not None or sparse:
        raise RefusedError("An embedding with max_norm or sparse=True cannot be shared out.")
    axis, layout = weight._axis, weight._layout
    if layout.dim == 1:
        part = F.embedding(tokens, weight._part, padding, scale_grad_by_freq=by_frequency)
        return make(part, layout.moved(part.dim() - 1), axis, weight._sources)
    low, high = layout.bounds[axis.rank]
    is_here = (tokens >= low) & (tokens < high)
    own_padding = (
        None if padding is None or not low <= padding % layout.size < high else padding % layout.size - low
    )
    rows = F.embedding(
        torch.where(is_here, tokens - low, 0), weight._part, own_padding, scale_grad_by_freq=by_frequency
    )
    return axis.reduce(rows.masked_fill(~is_here.unsqueeze(-1), 0.0))


# -------------------------------------------------------------------------------------------- numbers of the whole


def total(call: Call) -> Any:
    """The sum of all elements."""
    x = call.args[0]
    if not isinstance(x, Split) or len(call.args) > 1 or call.kwargs:
        return NotImplemented
    return call.axis.reduce(x._part.sum())


def norm(call: Call) -> Any:
    """The p-norm of all elements."""
    x = call.args[0]
    order = call.kwargs.get("ord", call.kwargs.get("p", call.args[1] if len(call.args) > 1 else 2.0))
    order = 2.0 if order in ("fro", None) else order
    rest = [v for name, v in call.kwargs.items() if name not in ("ord", "p") and v not in (None, False)]
    is_of_all = isinstance(order, int | float) and order > 0 and len(call.args) <= 2 and not rest
    if not isinstance(x, Split) or not is_of_all or x._part.requires_grad:
        return NotImplemented
    own = torch.linalg.vector_norm(x._part, order)
    rows = call.axis.rows(own.reshape(1))
    return torch.linalg.vector_norm(rows, order)


def foreach_in_place(call: Call) -> Any:
    """Lists of tensors that are changed element by element."""
    lists = [each for each in call.args if isinstance(each, list | tuple)]
    alike = all(
        isinstance(first, Split) == isinstance(other, Split)
        and (not isinstance(first, Split) or other._layout == first._layout)
        for each in lists[1:]
        for first, other in zip(lists[0], each, strict=True)
    )
    if not alike:
        return NotImplemented
    call.func(*map_splits(lambda each: each._part, call.args), **call.kwargs)
    return call.args[0]


def unscale(call: Call) -> None:
    """A loss scaler's: what is not finite on one rank counts on all."""
    gradients, found, inverse = call.args
    call.func(map_splits(lambda each: each._part, gradients), found, inverse)
    found.copy_(call.axis.rows(found.reshape(1)).amax(0).reshape(found.shape))


RULES: dict[str, Rule] = dict.fromkeys(_POINTWISE, pointwise)
RULES |= dict.fromkeys(("softmax", "log_softmax"), softmax)
RULES |= dict.fromkeys(("view", "reshape", "flatten", "unflatten"), reshape)
RULES |= dict.fromkeys(("transpose", "swapaxes", "swapdims"), transpose)
RULES |= dict.fromkeys(("chunk", "split"), in_pieces)
RULES |= dict.fromkeys(("matmul", "__matmul__", "bmm"), matmul)
RULES |= dict.fromkeys(("linalg_vector_norm", "norm"), norm)
RULES |= dict.fromkeys(
    (
        *(
            "_foreach_zero_",
            "_foreach_mul_",
            "_foreach_div_",
            "_foreach_add_",
            "_foreach_sub_",
            "_foreach_neg_",
        ),
        *("_foreach_clamp_min_", "_foreach_clamp_max_", "_foreach_lerp_", "_foreach_copy_"),
    ),
    foreach_in_place,
)
RULES |= {
    "dropout": dropout,
    "mT": transpose_matrices,
    "permute": permute,
    "unsqueeze": unsqueeze,
    "unbind": unbind,
    "__getitem__": index,
    "cat": cat,
    "linear": linear,
    "embedding": embedding,
    "sum": total,
    "_amp_foreach_non_finite_check_and_unscale_": unscale,
}
