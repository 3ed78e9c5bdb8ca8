"""Copies of tensors and arrays, taken all at once when it is known how large they are, and put back in place.

    add ──> tensors by storage, so that views share one copy ──> sizes ──> take ──> restore

Knows tensors and arrays; does not know how they were found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from openclaw_nb.core.errors import RefusedError

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class Copies:
    """Copies of tensors and arrays, on the CPU."""

    def __init__(self) -> None:
        self._waiting: dict[Any, tuple[str, int, Callable[[], Callable[[], None]]]] = {}
        self._shapes: list[Callable[[], None]] = []
        self._undo: list[Callable[[], None]] = []

    def add(self, name: str, value: Tensor | np.ndarray[Any, Any]) -> None:
        """Note a tensor or an array; nothing is copied yet.

        Parameters
        ----------
        name : str
            What it is called where it was found.
        value : Tensor or ndarray
            What may be changed.
        """
        if isinstance(value, np.ndarray):
            self._waiting[id(value)] = name, value.nbytes, lambda: _copy_array(value)
        elif (
            type(value) in _PLAIN
            and value.layout is torch.strided
            and not value.is_quantized
            and not value.is_meta
        ):
            storage = value.untyped_storage()
            key = value.device, storage.data_ptr() or id(value)
            self._waiting.setdefault(key, (name, storage.nbytes(), lambda: _copy_storage(storage)))
            self._shapes.append(_keep_shape(value))
        else:
            size = value.numel() * value.element_size()
            self._waiting[id(value)] = name, size, lambda: _copy_tensor(value)

    def sizes(self) -> Iterator[tuple[int, str]]:
        """Yield the bytes that each copy takes, and the name of what is copied."""
        for name, size, _ in self._waiting.values():
            yield size, name

    def take(self) -> None:
        """Copy everything.

        Raises
        ------
        RefusedError
            When something cannot be copied.
        """
        for name, size, copy in self._waiting.values():
            try:
                self._undo.append(copy())
            except (RuntimeError, TypeError, NotImplementedError, MemoryError) as error:
                raise RefusedError(
                    f"{name} ({size:,} bytes) cannot be copied, so that it could not be put back after the cell was "
                    f"tried out: {str(error).splitlines()[0]}"
                ) from error
        self._waiting.clear()

    def restore(self) -> Iterator[Callable[[], None]]:
        """Yield what is to be called to put everything back; shapes come last, onto the storages that they had."""
        yield from self._undo
        yield from reversed(self._shapes)  # a gradient is noted after its tensor, and has to fit it


def _copy_storage(storage: torch.UntypedStorage) -> Callable[[], None]:
    def bytes_of() -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    saved = bytes_of().to("cpu", copy=True)

    def undo() -> None:
        if storage.nbytes() != saved.numel():
            storage.resize_(saved.numel())
        now = bytes_of()
        if now.is_cuda or not torch.equal(
            now, saved
        ):  # what is mapped for reading alone must not be written to
            now.copy_(saved)

    return undo


def _keep_shape(tensor: Tensor) -> Callable[[], None]:
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    dtype, shape, stride = tensor.dtype, tensor.shape, tensor.stride()
    was_leaf = tensor.is_leaf
    grad, needed = (tensor.grad, tensor.requires_grad) if was_leaf else (None, False)

    def is_same() -> bool:
        return (
            tensor.untyped_storage().data_ptr() == storage.data_ptr()
            and (tensor.dtype, tensor.shape, tensor.stride()) == (dtype, shape, stride)
            and tensor.storage_offset() == offset
        )

    def undo() -> None:
        if not is_same():
            empty = torch.empty(0, dtype=dtype, device=storage.device)
            tensor.data = empty.set_(storage, offset, shape, stride)
        if was_leaf and not tensor.is_leaf and not tensor._is_view():
            tensor.detach_()
        if was_leaf and tensor.is_leaf:
            tensor.grad = None  # one of another shape or dtype would be in the way
            tensor.requires_grad_(needed)
            tensor.grad = grad

    return undo


def _copy_tensor(tensor: Tensor) -> Callable[[], None]:
    """Copy one whose memory is not a plain piece, such as a sparse one."""
    value, grad, needed = tensor.detach().clone(), tensor.grad, tensor.requires_grad

    def undo() -> None:
        tensor.data = value.clone()
        if tensor.is_leaf:
            tensor.requires_grad_(needed)
            tensor.grad = grad

    return undo


def _copy_array(array: np.ndarray[Any, Any]) -> Callable[[], None]:
    before = array.copy()

    def undo() -> None:
        if array.shape != before.shape:
            array.resize(before.shape, refcheck=False)
        np.copyto(array, before)

    return undo
