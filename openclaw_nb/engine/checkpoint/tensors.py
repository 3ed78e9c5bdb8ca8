"""Tensors in one piece of memory of our own, laid out as a safetensors file has them; read back by name.

    tensors ──> Layout (each storage once, other names of it as aliases) ──> HostBuffer.fill: the copy that training
                                                                             waits for ──> header, buffer ──> file

The file is written from that memory as it lies there: `safetensors.serialize_file` takes bytes objects, which would
copy everything once more, and holds the interpreter while it writes. It is read with the package. Format:
https://github.com/huggingface/safetensors#format. Knows tensors and names; does not know what they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openclaw_nb.core.errors import CheckpointError
from openclaw_nb.core.host import available_memory_bytes
from openclaw_nb.core.text import size_text

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def check_tensor(name: str, tensor: Tensor) -> None:
    """Check that a tensor can be in a checkpoint.

    Raises
    ------
    CheckpointError
        Naming it and what it is.
    """
    what = ""
    if tensor.layout is not torch.strided:
        what = f"a tensor of layout {tensor.layout}"
    elif tensor.is_meta:
        what = "a tensor without data (on the meta device)"
    elif tensor.dtype not in _DTYPES:
        what = f"of dtype {tensor.dtype}"
    if what:
        raise CheckpointError(
            f"{name} is {what}, which a checkpoint cannot hold. Train without --checkpoint."
        )


class Layout:
    """Where tensors lie in one piece of memory.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        By name. Those that are the same memory, seen alike, lie there once.

    Attributes
    ----------
    aliases : dict of str to str
        Names of tensors that are there under another name, to that name.
    num_bytes : int
        How much memory that is.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.aliases: dict[str, str] = {}
        first: dict[Any, str] = {}
        for name, tensor in tensors.items():
            check_tensor(name, tensor)
            kept = first.setdefault(_memory(tensor), name) if tensor.numel() else name
            if kept != name:
                self.aliases[name] = kept
        # Wide types first: then each tensor is aligned, and the file has no holes, which the format forbids.
        kept_ones = (item for item in tensors.items() if item[0] not in self.aliases)
        self._entries: dict[str, tuple[torch.dtype, torch.Size, int]] = {}
        self.num_bytes = 0
        for name, tensor in sorted(kept_ones, key=lambda item: -item[1].element_size()):
            self._entries[name] = tensor.dtype, tensor.shape, self.num_bytes
            self.num_bytes += tensor.numel() * tensor.element_size()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]

    @property
    def names(self) -> list[str]:
        """The tensors that lie in the memory, in its order."""
        return list(self._entries)

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return each tensor's place in a piece of memory, in the order of `names`."""
        return [
            memory[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for dtype, shape, start in self._entries.values()
        ]

    def header(self) -> bytes:
        """Return what a safetensors file begins with; the memory follows."""
        content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, (dtype, shape, start) in self._entries.items():
            ends = [start, start + shape.numel() * dtype.itemsize]
            content[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": ends}
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


class HostBuffer:
    """Memory of the host that is filled again and again; its pages are there before they are needed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: Layout | None = None
        self._views: list[Tensor] = []

    def fill(self, tensors: Mapping[str, Tensor]) -> Layout:
        """Copy tensors into the memory.

        Raises
        ------
        CheckpointError
            When the host has no memory for it, or a tensor is of a kind that cannot be kept.
        """
        layout = Layout(tensors)
        if layout != self._layout:
            self._layout = None
            self._reserve(layout.num_bytes)
            self._views = layout.views(self._memory)
            self._layout = layout
        sources = [tensors[name] for name in layout.names]
        with torch.no_grad():
            for view, source in zip(self._views, sources, strict=True):
                view.copy_(source, non_blocking=True)
        if any(source.is_cuda for source in sources):
            torch.cuda.synchronize()
        return layout

    def data(self) -> memoryview:
        """Return what was filled last."""
        assert self._layout is not None
        memory: Any = self._memory.numpy()
        return memoryview(memory)[: self._layout.num_bytes]

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes <= self._memory.numel():
            return
        self._views, self._memory = [], torch.empty(0, dtype=torch.uint8)
        free = available_memory_bytes()
        if num_bytes > free:
            raise CheckpointError(
                f"the host has no memory for a copy of the state: {size_text(num_bytes)} needed, {size_text(free)} free"
            )
        # Zeros are written, so that the first copy does not wait for the pages.
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self._memory = memory.zero_()


def read_tensors(path: Path, aliases: Mapping[str, str]) -> dict[str, Tensor]:
    """Return a file's tensors by name, and by their other names."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    return tensors | {name: tensors[kept] for name, kept in aliases.items()}


def _memory(tensor: Tensor) -> Any:
    """Return what is equal for tensors that are the same memory, seen alike."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
