"""Which layers of a model are shared out, and how: from a trial of its forward pass, or as given.

In the trial all of the model runs on this rank. Each ``nn.Linear`` gives a `Split` of one part, which tells where it
goes: through which functions, into which other layer, cut into heads of which size. Two layers are a pair when what
the first one gives reaches the second without being joined: the first is shared out by columns, as Megatron-LM calls
its output features, the second by rows, its input features, and between them nothing is sent.

    column   output features are shared out     row    input features, or rows of a table, are shared out
    heads    an ``nn.MultiheadAttention``: its projections by columns, its output by rows

Knows modules and what a trial has seen; does not change the model.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openclaw_nb.core.errors import RefusedError, UsageError, unknown_name
from openclaw_nb.engine.tensor.axis import TensorAxis
from openclaw_nb.engine.tensor.layout import Layout, share_out
from openclaw_nb.engine.tensor.split import Split, become_plain, become_split, make, whole

ROLES = ("column", "row", "heads")
# A layer that is no part of a pair is shared out from so many values on: what it sends must be worth it.
FEW_VALUES = 65_536
_MOST_LISTED = 8


@dataclass(frozen=True)
class Entry:
    """How one module is shared out: its role, in units of how many features, and how many blocks it makes at once."""

    role: str
    unit: int = 1
    blocks: int = 1


Plan = dict[str, Entry]


class Trial(TensorAxis):
    """A tensor axis of one rank, which notes what becomes of each layer's output.

    Attributes
    ----------
    order : list of str
        Layers, as they are called first.
    inputs : dict of str to frozenset of str
        Which layers' outputs each layer got, if they were not joined before.
    units, blocks : dict of str to int
        Features that belong together, and how many things, such as queries, keys and values, a layer makes at once.
    """

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.is_open = False
        self._fanned = None
        self.order: list[str] = []
        self.inputs: dict[str, frozenset[str]] = {}
        self.units: dict[str, int] = {}
        self.blocks: dict[str, int] = {}

    def linear(self, x: Any, weight: Split, bias: Any) -> Tensor:
        """Compute a linear layer, and note where its input comes from."""
        (name,) = weight._sources
        if name not in self.inputs:
            self.order.append(name)
        found: frozenset[str] = frozenset()
        if isinstance(x, Split) and x._layout.dim == x.dim() - 1:
            found, x = x._sources, x._part
        before = self.inputs.setdefault(name, found)
        self.inputs[name] = before & found
        part = F.linear(whole(x), weight._part, whole(bias))
        layout = Layout(part.dim() - 1, ((0, part.shape[-1]),))
        return make(part, layout, self, frozenset({name}))

    def note_joined(self, sources: frozenset[str]) -> None:
        """Take note that a tensor was joined."""

    def note_view(self, sources: frozenset[str], before: Layout, after: Layout) -> None:
        """Take note that features were put together, such as to heads."""
        num_blocks = before.size * before.scale // (after.size * after.scale)
        if num_blocks > 1:
            self.note_blocks(sources, num_blocks)
        for name in sources:
            self.units[name] = math.lcm(self.units.get(name, 1), after.scale)

    def note_blocks(self, sources: frozenset[str], count: int) -> None:
        """Take note that an output was cut into so many things."""
        for name in sources:
            self.blocks[name] = count if self.blocks.get(name, count) == count else 1


@contextlib.contextmanager
def watched(model: nn.Module, trial: Trial) -> Iterator[None]:
    """Let a trial follow the outputs of the model's linear layers in the ``with`` block."""
    followed: dict[int, nn.Parameter] = {}
    for name, layer in linears(model):
        weight = layer.weight
        if type(weight) is nn.Parameter and id(weight) not in followed:
            followed[id(weight)] = weight
            become_split(weight, Layout(0, ((0, weight.shape[0]),)), trial, name)
    try:
        yield
    finally:
        for weight in followed.values():
            become_plain(weight)


def linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return the linear layers that are called as such."""
    inside = {id(each.out_proj) for each in model.modules() if isinstance(each, nn.MultiheadAttention)}
    return [
        (name, each)
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear) and id(each) not in inside
    ]


def find_plan(model: nn.Module, trial: Trial, num_ranks: int, given: Mapping[str, str] | None = None) -> Plan:
    """Return how the model is shared out.

    Parameters
    ----------
    model : nn.Module
        The model, plain.
    trial : Trial
        What was seen in its forward pass.
    num_ranks : int
        Among how many.
    given : mapping of str to str, optional
        Names of modules, or regular expressions for them, to roles; nothing else is shared out then.

    Raises
    ------
    RefusedError
        When there is nothing to share out, with what was looked at.
    UsageError
        When a given role does not fit its module, or a name is none.
    """
    finder = _Finder(model, trial, num_ranks)
    plan = finder.of_given(given) if given else finder.of_model()
    if not plan:
        raise RefusedError(why_no_plan(model, num_ranks, finder.left))
    return plan


def why_no_plan(model: nn.Module, num_ranks: int, left: Mapping[str, str]) -> str:
    """Say that no plan is known for a model, what was looked at, and how one is given."""
    lines = [f"{name}: {why}" for name, why in left.items()]
    more = [f"and {len(lines) - _MOST_LISTED} more"] if len(lines) > _MOST_LISTED else []
    looked = "; ".join([*lines[:_MOST_LISTED], *more])
    kinds = sorted({type(each).__name__ for each in model.modules() if next(each.children(), None) is None})
    return (
        f"No tensor-parallel plan is known for this model on {num_ranks} workers. Its layers are of the types "
        f"{', '.join(kinds)}; what can be shared out are pairs of nn.Linear with only functions of single features or "
        f"heads between them, nn.MultiheadAttention, and large nn.Linear and nn.Embedding. Looked at: "
        f"{looked or 'nothing that could be'}. No parameter was changed. Give a plan, such as "
        "TensorParallelStrategy(plan={'net.0': 'column', 'net.2': 'row'}) or --tp-plan net.0=column,net.2=row, or use "
        "data_parallel."
    )


class _Finder:
    """Chooses roles; ``left`` tells why a module has none."""

    def __init__(self, model: nn.Module, trial: Trial, num_ranks: int) -> None:
        self._trial, self._num_ranks = trial, num_ranks
        self._modules = dict(model.named_modules())
        self._linears = dict(linears(model))
        self.left: dict[str, str] = {}

    def of_model(self) -> Plan:
        """Return the plan that the trial shows."""
        plan: Plan = {}
        for name, module in self._modules.items():
            if isinstance(module, nn.MultiheadAttention):
                self._try(plan, {name: Entry("heads", module.head_dim, 3)})
        for name in self._trial.order:
            self._try_pair(plan, name)
        for name, layer in self._linears.items():
            if name not in plan:
                self._try_alone(plan, name, layer, self._column(name))
        for name, module in self._modules.items():
            if isinstance(module, nn.Embedding):
                self._try_alone(plan, name, module, Entry("row"))
        self._drop_contradictions(plan)
        return plan

    def _column(self, name: str) -> Entry:
        return Entry("column", self._trial.units.get(name, 1), self._trial.blocks.get(name, 1))

    def _try_pair(self, plan: Plan, name: str) -> None:
        """Make a layer the second one of a pair, if what it gets can come in parts."""
        sources = self._trial.inputs.get(name, frozenset())
        if not sources or name in sources or name in plan:
            return
        if any(plan.get(source, self._column(source)).role != "column" for source in sources):
            return
        columns = {source: self._column(source) for source in sources}
        unit = math.lcm(*(each.unit for each in columns.values()))
        pair = {source: Entry("column", unit, each.blocks) for source, each in columns.items()}
        self._try(plan, {**pair, name: Entry("row", unit)})

    def _try_alone(self, plan: Plan, name: str, module: nn.Linear | nn.Embedding, entry: Entry) -> None:
        tied = any(
            other != name and getattr(self._modules[other], "weight", None) is module.weight for other in plan
        )
        if module.weight.numel() >= FEW_VALUES or tied:
            self._try(plan, {name: entry})
        else:
            self.left.setdefault(
                name, f"{type(module).__name__} alone, of {module.weight.numel():,} values: too small"
            )

    def _try(self, plan: Plan, entries: Plan) -> None:
        """Add modules to a plan, all or none."""
        reasons = {
            name: why_not(self._modules[name], each, self._num_ranks) for name, each in entries.items()
        }
        self.left.update({name: why for name, why in reasons.items() if why})
        if not any(reasons.values()):
            plan.update(entries)

    def _drop_contradictions(self, plan: Plan) -> None:
        """Leave whole what is used in two ways: a weight that modules share."""
        for name, why in contradictions(self._modules, plan, self._num_ranks).items():
            plan.pop(name)
            self.left[name] = why

    def of_given(self, given: Mapping[str, str]) -> Plan:
        """Return the plan that a person has given."""
        plan: Plan = {}
        for pattern, role in given.items():
            if role not in ROLES:
                raise unknown_name(f"role for {pattern}", role, ROLES)
            for name in self._matching(pattern):
                plan[name] = self._entry(name, role)
        for name, entry in plan.items():
            why = why_not(self._modules[name], entry, self._num_ranks)
            if why:
                raise UsageError(f"The plan makes {name} {entry.role}: {why}.")
        for name, why in contradictions(self._modules, plan, self._num_ranks).items():
            raise UsageError(f"The plan makes {name} {plan[name].role}: {why}.")
        return plan

    def _matching(self, pattern: str) -> list[str]:
        names = [
            name
            for name, module in self._modules.items()
            if name in self._linears or isinstance(module, nn.Embedding | nn.MultiheadAttention)
        ]
        if pattern in self._modules:
            return [pattern]
        try:
            found = [name for name in names if re.fullmatch(pattern, name)]
        except re.error as error:
            raise UsageError(
                f"The plan's {pattern!r} is no name and no regular expression: {error}."
            ) from None
        if not found:
            raise unknown_name("layer to share out", pattern, names)
        return found

    def _entry(self, name: str, role: str) -> Entry:
        module = self._modules[name]
        if isinstance(module, nn.MultiheadAttention):
            return Entry(role, module.head_dim, 3)
        if role == "column" and isinstance(module, nn.Linear):
            return self._column(name)
        if role == "row":
            sources = self._trial.inputs.get(name, frozenset())
            return Entry(role, math.lcm(1, *(self._trial.units.get(source, 1) for source in sources)))
        return Entry(role)


def parts_of(
    module: nn.Module, entry: Entry
) -> Iterator[tuple[str, nn.Parameter, Callable[[int], Layout | None]]]:
    """Walk the parameters of a module that are shared out: name, parameter, and how among so many ranks."""

    def along(dim: int, parameter: nn.Parameter, blocks: int = 1) -> Callable[[int], Layout | None]:
        size = parameter.shape[dim]
        return lambda num_ranks: share_out(dim, size, num_ranks, entry.unit, blocks)

    if isinstance(module, nn.MultiheadAttention):
        for name in ("in_proj_weight", "in_proj_bias"):
            packed: nn.Parameter | None = getattr(module, name)
            if packed is not None:
                yield name, packed, along(0, packed, 3)
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            single: nn.Parameter | None = getattr(module, name)
            if single is not None:
                yield name, single, along(0, single)
        out: Any = module.out_proj.weight
        yield "out_proj.weight", out, along(1, out)
        return
    assert isinstance(module, nn.Linear | nn.Embedding)
    weight: Any = module.weight
    is_table = isinstance(module, nn.Embedding)
    along_rows = (entry.role == "row") == is_table
    yield "weight", weight, along(0 if along_rows else 1, weight, entry.blocks if along_rows else 1)
    bias = getattr(module, "bias", None)
    if along_rows and bias is not None:
        yield "bias", bias, along(0, bias, entry.blocks)


def why_not(module: nn.Module, entry: Entry, num_ranks: int) -> str:
    """Say why a module cannot be shared out so; "" when it can."""
    kind = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        if entry.role != "heads":
            return f"{kind} is shared out by 'heads'"
        if module.bias_k is not None or module.add_zero_attn:
            return f"{kind} with add_bias_kv or add_zero_attn"
    elif not isinstance(module, nn.Linear | nn.Embedding):
        return f"{kind} is no nn.Linear, nn.Embedding or nn.MultiheadAttention"
    elif entry.role == "heads":
        return f"{kind} is shared out by 'column' or 'row'"
    elif isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return f"{kind} with max_norm or sparse=True"
    for name, parameter, layout in parts_of(module, entry):
        if type(parameter) is not nn.Parameter:
            return f"its {name} is a {type(parameter).__name__}"
        if layout(num_ranks) is None:
            per = f" in units of {entry.unit}" if entry.unit > 1 else ""
            return f"its {name} of shape {list(parameter.shape)} cannot be shared out{per} among {num_ranks} workers"
    return ""


def contradictions(modules: Mapping[str, nn.Module], plan: Plan, num_ranks: int) -> dict[str, str]:
    """Return the modules of a plan with a parameter that another module has and does not share out alike."""
    asked: dict[int, dict[str, Layout | None]] = {}
    for name, entry in plan.items():
        for _, parameter, layout in parts_of(modules[name], entry):
            asked.setdefault(id(parameter), {})[name] = layout(num_ranks)
    found: dict[str, str] = {}
    for layouts in asked.values():
        if len(set(layouts.values())) > 1:
            names = " and ".join(layouts)
            found |= dict.fromkeys(layouts, f"a parameter of {names} would be shared out in two ways")
    return found


@torch.no_grad()
def try_out(model: nn.Module, args: Any, kwargs: Any) -> Trial:
    """Run the model once, plain, and return what was seen."""
    trial = Trial()
    with watched(model, trial):
        model.forward(*args, **kwargs)
    return trial
