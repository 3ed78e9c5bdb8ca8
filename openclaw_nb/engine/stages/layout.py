"""Which rank has which layer of a model, and with it which parameters and buffers.

Knows modules and ranks; names and balance are decided by `plan.stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.plan import stages

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class Part:
    """One layer, and the rank that has it."""

    name: str
    module: nn.Module
    owner: int


@dataclass(frozen=True)
class Home:
    """Where a parameter or buffer is: the ranks that have it, first the one whose value counts."""

    name: str
    owners: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A model's layers in the order in which they are called, and where its tensors are.

    Attributes
    ----------
    parts : tuple of Part
        The layers.
    homes : dict of int to Home
        By the tensors' identities; buffers that belong to no layer are on every rank and not in it.
    """

    parts: tuple[Part, ...]
    homes: Mapping[int, Home]

    @property
    def owners(self) -> list[int]:
        """The owner of each layer."""
        return [part.owner for part in self.parts]

    def owner_of(self, module: nn.Module) -> int | None:
        """Return the rank that has the part in which a module is; None when it is in none."""
        return next((p.owner for p in self.parts if any(m is module for m in p.module.modules())), None)

    def describe(self, rank: int) -> str:
        """Return the layers of a rank and their size, in words."""
        own = [part for part in self.parts if part.owner == rank]
        size = sum(p.numel() for p in {p for part in own for p in part.module.parameters()})
        names = [part.name for part in own]
        shown = ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]}"
        return f"rank {rank} has {shown} ({size:,} parameters)"


def lay_out(
    model: nn.Module,
    num_ranks: int,
    *,
    layers: Sequence[str] | None = None,
    groups: Sequence[Sequence[str]] | None = None,
    ranks_of: Mapping[str, int] | None = None,
    undivided: Sequence[nn.Module] = (),
) -> Layout:
    """Decide which rank has which layer.

    Parameters
    ----------
    model : Module
        The model; it is not changed.
    num_ranks : int
        How many ranks there are; each gets a layer at least.
    layers : sequence of str, optional
        Names, or regular expressions, of the layers in the order in which they are called; found when not given.
    groups : sequence of sequence of str, optional
        The layers of each rank, in place of ``layers``.
    ranks_of : mapping of str to int, optional
        The rank of each name in ``layers``; balanced by parameters when not given.
    undivided : sequence of Module
        What stays one layer where layers are found.

    Raises
    ------
    RefusedError
        When some layer is unknown, missing or doubled, there are fewer layers than ranks, or a rank gets none.
    """
    modules = {name: m for name, m in model.named_modules() if name}
    names = [name for name, m in modules.items() if not isinstance(m, _CONTAINERS)]
    single = [name for name, _ in model.named_parameters()]
    containers = {
        name: [f"{name}.{child}" for child, _ in m.named_children()]
        for name, m in modules.items()
        if isinstance(m, nn.ModuleList | nn.ModuleDict)
    }
    if groups is not None:
        layers = [word for group in groups for word in group]
    if layers is None:
        chosen = list(layer_names(model, undivided=undivided))
    else:
        chosen = stages.resolve(layers, names, containers, single)
        stages.check_all_used(chosen, _state_names(model))
    called = [name for name in chosen if name in modules]
    if not called:
        raise RefusedError("The model has no layers that could be on different workers: it is one module.")

    def resolved(word: str) -> list[str]:
        return stages.resolve([word], names, containers, single)

    owners = _owners(chosen, modules, num_ranks, groups, ranks_of, resolved)
    idle = [rank for rank in range(num_ranks) if rank not in owners.values()]
    if idle:
        raise RefusedError(
            f"No layer is on rank {', '.join(map(str, idle))}: run the cell on the workers that have one (--targets)."
        )
    parts = tuple(Part(name, modules[name], owners[name]) for name in called)
    return Layout(parts, _homes(model, parts, owners))


def _owners(
    chosen: Sequence[str],
    modules: Mapping[str, nn.Module],
    num_ranks: int,
    groups: Sequence[Sequence[str]] | None,
    ranks_of: Mapping[str, int] | None,
    resolved: Callable[[str], list[str]],
) -> dict[str, int]:
    if groups is not None:
        if len(groups) != num_ranks:
            raise RefusedError(
                f"{len(groups)} stages were named, and {num_ranks} workers run the cell: name one for each, "
                "or choose as "
                "many workers (--targets)."
            )
        return {name: rank for rank, group in enumerate(groups) for word in group for name in resolved(word)}
    if ranks_of is not None:
        owners = {name: rank for word, rank in ranks_of.items() for name in resolved(word)}
        homeless = [name for name in chosen if name not in owners]
        if homeless:
            raise RefusedError(f"device_mapping names no device for {', '.join(homeless)}.")
        stray = [name for name in owners if name not in chosen]
        if stray:
            raise RefusedError(f"device_mapping names {', '.join(stray)}, which is not in model_layers.")
        return owners
    called = [name for name in chosen if name in modules]
    sizes = [sum(p.numel() for p in modules[name].parameters()) for name in called]
    owners = dict(zip(called, stages.cut(sizes, num_ranks), strict=True))
    # A parameter by itself goes with the layer that was named before it.
    last = owners[called[0]]
    for name in chosen:
        last = owners.setdefault(name, last)
    return owners


def check_undivided(layout: Layout, blocks: Mapping[str, nn.Module]) -> None:
    """Refuse layers that are parts of a block which is computed as a whole, a second time.

    Raises
    ------
    RefusedError
        With the block and its layers.
    """
    for name, block in blocks.items():
        inside = {id(module) for module in block.modules() if module is not block}
        parts = [part for part in layout.parts if id(part.module) in inside]
        if parts:
            listed = ", ".join(f"{part.name} (rank {part.owner})" for part in parts)
            raise RefusedError(
                f"{name} would be computed a second time as a whole, and its layers are named by themselves: {listed}. "
                f"Put it onto one worker as {name} (--stages), or name what is inside: "
                f"--activation-checkpointing {','.join(part.name for part in parts)}."
            )


def layer_names(module: nn.Module, prefix: str = "", undivided: Sequence[nn.Module] = ()) -> Iterator[str]:
    """Find the layers of a model: its children, and those of what only holds or mostly is a list of layers."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if not _has_state(child):
            continue  # it runs where its input is
        is_divided = _is_list(child) or any(
            _is_list_of_blocks(inner) and _is_most_of(inner, child) for inner in child.children()
        )
        if is_divided and not any(child is each for each in undivided):
            yield from layer_names(child, f"{path}.", undivided)
        else:
            yield path


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module) is nn.Sequential


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Return whether it lists modules that have modules: not the inside of a block, as an MLP beside attention is."""
    blocks = [each for each in module.children() if next(each.children(), None) is not None]
    return _is_list(module) and bool(blocks)


def _is_most_of(inner: nn.Module, outer: nn.Module) -> bool:
    sizes = [sum(p.numel() for p in module.parameters()) for module in (inner, outer)]
    return 2 * sizes[0] > sizes[1]


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or bool(_trained_buffers(module))


def _state_names(model: nn.Module) -> list[str]:
    return [*(name for name, _ in model.named_parameters()), *_trained_buffers(model)]


def _trained_buffers(model: nn.Module) -> list[str]:
    """Name the buffers that a training pass changes: the running statistics."""
    return [
        f"{name}.{buffer}".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, _NormBase)
        for buffer, _ in module.named_buffers(recurse=False)
    ]


def _homes(model: nn.Module, parts: Sequence[Part], owners: Mapping[str, int]) -> dict[int, Home]:
    ranks: dict[int, list[int]] = {}
    for part in parts:
        for tensor in (*part.module.parameters(), *part.module.buffers()):
            own = ranks.setdefault(id(tensor), [])
            own += [part.owner] if part.owner not in own else []
    for name, parameter in model.named_parameters():
        if id(parameter) not in ranks:
            ranks[id(parameter)] = [owners[name] if name in owners else _owner_before(name, parts)]
    named = [*model.named_parameters(), *model.named_buffers()]
    return {id(t): Home(name, tuple(ranks[id(t)])) for name, t in named if id(t) in ranks}


def _owner_before(name: str, parts: Sequence[Part]) -> int:
    """Return the owner of the layer before the module that has a parameter by itself: it is used after that layer."""
    prefix = name.rpartition(".")[0]
    first = next(
        (at for at, part in enumerate(parts) if part.name.startswith(f"{prefix}." if prefix else "")), 0
    )
    return parts[max(0, first - 1)].owner


def count_batchnorms(model: nn.Module) -> int:
    """Count the layers that take their statistics from the batch now."""
    return sum(
        isinstance(m, _NormBase)
        and not isinstance(m, nn.modules.instancenorm._InstanceNorm)
        and (m.training or m.running_mean is None)
        for m in model.modules()
    )
