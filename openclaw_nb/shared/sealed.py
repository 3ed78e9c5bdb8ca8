"""Tensors of torch that refuse to be written, for what is sealed in shared memory.

PyTorch has no such tensors, and a write to memory that is mapped for reading ends the process. So a sealed tensor's
memory is this process's own as soon as it is written (`openclaw_nb.shared.memory`), and its class refuses what would
write it. What gets past the class, such as a write through ``data_ptr()`` or a collective into it, changes this
process's own copy of a page and nobody else's.

The only part of shared memory that needs torch to be loaded; it is loaded when a tensor is asked for. Knows tensors;
does not know where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openclaw_nb.core.errors import UsageError

_WRITING_OPERATORS = frozenset(
    f"__{name}__"
    for name in (
        *("setitem", "iadd", "isub", "imul", "idiv", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
        *("iand", "ior", "ixor", "ilshift", "irshift"),
    )
)
_NOT_WRITING = frozenset({"requires_grad_"})


def seal(tensor: Tensor, name: str) -> SealedTensor:
    """Return the same memory as a tensor that refuses to be written; errors call it by this name."""
    sealed: SealedTensor = tensor.as_subclass(SealedTensor)
    sealed.shared_name = name
    return sealed


class SealedTensor(Tensor):
    """A tensor whose memory others use, too, and that cannot be written.

    Views of it are sealed as well; everything else that is computed from it is an ordinary tensor, and so are copies.

    Attributes
    ----------
    shared_name : str
        Its name in shared memory.
    """

    shared_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carry out an operation of torch, unless it writes into a sealed tensor."""
        named = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            for written in _written(func, args, named):
                raise UsageError(_refusal(_name_of(written)))
            result = func(*args, **named)
            return _sealed_like(result, list(_flat([*args, *named.values()])))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return an ordinary tensor of its own."""
        copy = self.clone()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values, as an ordinary tensor."""
        return self.clone().__reduce_ex__(protocol)


def _written(
    func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> Iterator[SealedTensor]:
    """Yield the sealed tensors that an operation would write."""
    if named.get("out") is not None:
        yield from _flat([named["out"]])
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.startswith("__") and name not in _NOT_WRITING
    if in_place or name in _WRITING_OPERATORS or named.get("inplace") is True:
        yield from _flat([*args, *named.values()][:1])


def _flat(values: Sequence[Any]) -> Iterator[SealedTensor]:
    """Yield the sealed tensors among values and lists of values."""
    for value in values:
        if isinstance(value, SealedTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _flat(value)


def _sealed_like(result: Any, sources: Sequence[SealedTensor]) -> Any:
    """Seal what looks at the memory of sealed tensors."""
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
        return result
    if type(result) in (list, tuple):
        return type(result)(_sealed_like(each, sources) for each in result)
    if type(result) is not Tensor or result.layout is not torch.strided:
        return result
    for source in sources:
        if result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
            return seal(result, _name_of(source))
    return result


def _refusal(name: str) -> str:
    return (
        f"The shared tensor {name!r} is sealed: it can be read, not written. Change a copy (.clone()), or let it be "
        "put with writable=True."
    )


def _name_of(tensor: SealedTensor) -> str:
    return getattr(tensor, "shared_name", "")
