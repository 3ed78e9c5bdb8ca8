"""By which layers a model is sharded: each is gathered when it runs, and dropped again.

Named ones, else the repeated blocks that most models are built of. What is in none of them is gathered with the whole
model. Knows modules; does not know ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from openclaw_nb.core.errors import RefusedError, unknown_name

_CONTAINERS = (nn.ModuleList, nn.Sequential)
_NO_FORWARD = (nn.ModuleList, nn.ModuleDict)
# A single layer is worth a message of its own from this size on.
_LARGE_BYTES = 1024 * 1024


def choose_layers(model: nn.Module, names: Sequence[str] = ()) -> list[str]:
    """Return the names of the layers to shard by, inner ones first.

    Parameters
    ----------
    model : Module
        The whole model.
    names : sequence of str
        Given by the person: names of modules (a list of blocks stands for all of them) or of classes.

    Raises
    ------
    UnknownNameError
        When the model has no such module.
    RefusedError
        When a layer shares parameters with something outside of it.
    """
    found = _named(model, names) if names else list(_repeated("", model))
    modules = dict(model.named_modules())
    outside = {name: _shared_outside(model, modules[name]) for name in found}
    for name, others in outside.items():
        if others and names:
            raise RefusedError(
                f"{name} cannot be a layer to shard by, as it shares parameters with {', '.join(others[:3])}. Name a "
                "module that holds both, or let the layers be found (without --shard-layers)."
            )
    chosen = [name for name, others in outside.items() if not others]
    return sorted(chosen, key=lambda name: (-name.count("."), name))


def _named(model: nn.Module, names: Sequence[str]) -> list[str]:
    modules = dict(model.named_modules())
    classes = {type(module).__name__ for module in modules.values()}
    found: list[str] = []
    for asked in names:
        if asked in modules and asked:
            module = modules[asked]
            inner = [f"{asked}.{name}" for name, _ in module.named_children()]
            found += inner if isinstance(module, _NO_FORWARD) else [asked]
        elif asked in classes:
            found += [name for name, m in modules.items() if type(m).__name__ == asked and name]
        else:
            raise unknown_name("layer", asked, [*filter(None, modules), *sorted(classes)])
    with_parameters = [
        name for name in dict.fromkeys(found) if next(modules[name].parameters(), None) is not None
    ]
    return [name for name in with_parameters if not isinstance(modules[name], _NO_FORWARD)]


def _repeated(prefix: str, module: nn.Module) -> Iterator[str]:
    """Yield the outermost repeated blocks."""
    blocks: set[str] = set()
    if isinstance(module, _CONTAINERS):
        counts = Counter(type(child) for child in module.children() if _is_block(child))
        blocks = {
            name for name, child in module.named_children() if counts[type(child)] > 1 and _is_block(child)
        }
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if name in blocks:
            yield path
        else:
            yield from _repeated(path, child)


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, _NO_FORWARD):
        return False
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    has_parts = next(module.children(), None) is not None
    return size > 0 and (has_parts or size >= _LARGE_BYTES)


def _shared_outside(model: nn.Module, layer: nn.Module) -> list[str]:
    """Return the names of this layer's parameters under which modules outside of it have them too."""
    inside = {id(module) for module in layer.modules()}
    own = {id(p) for p in layer.parameters()}
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        if id(module) not in inside
        for name, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in own
    ]
