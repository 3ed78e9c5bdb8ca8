"""Blocks of a model whose inside is computed again in the backward pass, in place of being kept until then.

Of each block its input is kept (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016); torch's
checkpointing restores random numbers and autocast for the second time, so that the result is the same. Knows modules;
does not know how much memory there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.precision.layers import choose_layers
from openclaw_nb.engine.wrapping import wrap_forward


class Recompute:
    """Lets blocks be computed twice while it is installed.

    Parameters
    ----------
    models : mapping of str to nn.Module
        The models.
    blocks : bool or sequence of str
        Which: ``True`` for the elements of their lists of blocks, words for others, ``False`` for none.

    Attributes
    ----------
    blocks : dict of str to nn.Module
        The blocks by name.

    Raises
    ------
    RefusedError
        When there are no such blocks, or BatchNorm layers in them.
    """

    def __init__(self, models: Mapping[str, nn.Module], blocks: bool | Sequence[str]) -> None:
        self.blocks = _chosen(models, blocks)
        _check(self.blocks)
        self._undo: list[Callable[[], None]] = []

    @property
    def names(self) -> list[str]:
        """Names of the blocks."""
        return list(self.blocks)

    def install(self) -> None:
        """Begin, until `remove`."""
        self._undo += [wrap_forward(block, _twice) for block in self.blocks.values()]

    def remove(self) -> None:
        """Leave the blocks as they were."""
        while self._undo:
            self._undo.pop()()


def _twice(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    return checkpoint(inner, *args, use_reentrant=False, **kwargs)


def _chosen(models: Mapping[str, nn.Module], blocks: bool | Sequence[str]) -> dict[str, nn.Module]:
    if blocks is False:
        return {}
    if blocks is not True:
        found, _ = choose_layers(models, [blocks] if isinstance(blocks, str) else blocks)
        return _outermost(found)
    found = dict(find_blocks(models))
    if not found:
        parts = [name for model in models.values() for name, _ in model.named_children()]
        raise RefusedError(
            "The model has no list of blocks (modules with parts of their own in an nn.ModuleList or nn.Sequential). "
            "Say which of its parts are computed again: --activation-checkpointing NAME. It has "
            f"{', '.join(parts) or 'none'}."
        )
    return found


def find_blocks(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the elements, with parts of their own, of the outermost lists of modules."""
    found: dict[str, nn.Module] = {}
    for key, model in models.items():
        for name, module in model.named_modules():
            if isinstance(module, nn.ModuleList | nn.Sequential):
                for place, child in module.named_children():
                    if _is_block(child):
                        path = f"{name}.{place}" if name else place
                        found[f"{key}.{path}" if len(models) > 1 else path] = child
    yield from _outermost(found).items()


def _is_block(module: nn.Module) -> bool:
    has_parts = any(True for _ in module.children()) and not isinstance(module, nn.ModuleList)
    return has_parts and any(True for _ in module.parameters())


def _outermost(found: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    inside = {id(part) for module in found.values() for part in module.modules() if part is not module}
    return {name: module for name, module in found.items() if id(module) not in inside}


def _check(blocks: Mapping[str, nn.Module]) -> None:
    for name, block in blocks.items():
        for path, module in block.named_modules():
            if isinstance(module, _BatchNorm):
                raise RefusedError(
                    f"{name}{'.' * bool(path)}{path} is a BatchNorm layer in a block that would be computed twice, "
                    "which moves its running statistics twice. Name others: --activation-checkpointing NAME."
                )
