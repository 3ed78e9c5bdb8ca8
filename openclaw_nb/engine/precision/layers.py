"""Which layers of a model some words mean: names of submodules, types, regular expressions.

    "encoder.0"  the submodule of this name          "conv"  all layers of this type
    "fc[12]"     submodules whose name fits          a word that means nothing is refused, with what there is

Knows models and words; does not know what is done with the layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from torch.nn.modules.conv import _ConvNd

from openclaw_nb.core.errors import RefusedError, UsageError

_TYPES: dict[str, tuple[type[nn.Module], ...]] = {
    "attention": (nn.MultiheadAttention,),
    "conv": (_ConvNd,),
    "embedding": (nn.Embedding, nn.EmbeddingBag),
    "linear": (nn.Linear, nn.Bilinear),
    "recurrent": (nn.RNNBase, nn.RNNCellBase),
}


def choose_layers(
    models: Mapping[str, nn.Module], words: Sequence[str]
) -> tuple[dict[str, nn.Module], list[str]]:
    """Find the layers that words mean.

    Parameters
    ----------
    models : mapping of str to nn.Module
        Where they are looked for.
    words : sequence of str
        Names, words for types, or regular expressions.

    Returns
    -------
    layers : dict of str to nn.Module
        By name, each once, in the models' order; with several models names begin with the model's.
    missing : list of str
        Words for types of which the models have no layer.

    Raises
    ------
    RefusedError
        For words that mean nothing, or when no word means a layer.
    UsageError
        For a regular expression that is none.
    """
    named = dict(_named(models))
    found: set[str] = set()
    missing: list[str] = []
    unknown: list[str] = []
    for word in words:
        names = _meant(word, named)
        found.update(names)
        if not names:
            (missing if word in _TYPES else unknown).append(word)
    if unknown or not found:
        raise RefusedError(_nothing([*unknown, *(missing if not found else [])], named))
    return {name: module for name, module in named.items() if name in found}, missing


def _named(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each submodule with its name; a tied one once."""
    seen: set[int] = set()
    for key, model in models.items():
        for name, module in model.named_modules():
            if id(module) not in seen and name:
                seen.add(id(module))
                yield f"{key}.{name}" if len(models) > 1 else name, module


def _meant(word: str, named: Mapping[str, nn.Module]) -> list[str]:
    if word in named:
        return [word]
    of_type = [name for name, module in named.items() if _is_of_type(word, module)]
    return of_type or _fitting(word, named)


def _is_of_type(word: str, module: nn.Module) -> bool:
    if isinstance(module, _TYPES.get(word.lower(), ())):
        return True
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)  # which compute nothing
    return word.isalnum() and word.lower() in type(module).__name__.lower() and not is_container


def _fitting(word: str, named: Mapping[str, nn.Module]) -> list[str]:
    try:
        pattern = re.compile(word)
    except re.error as error:
        raise UsageError(f"{word!r} is no name of a layer, and no regular expression: {error}.") from None
    return [name for name in named if pattern.fullmatch(name)]


def _nothing(words: Sequence[str], named: Mapping[str, nn.Module]) -> str:
    shown = [f"{name} ({type(module).__name__})" for name, module in list(named.items())[:12]]
    more = f" and {len(named) - 12} more" * (len(named) > 12)
    return (
        f"No layer is meant by {', '.join(map(repr, words))}. The model has {', '.join(shown) or 'no layers'}{more}; "
        f"words for types are {', '.join(_TYPES)}, or a part of a class's name."
    )
