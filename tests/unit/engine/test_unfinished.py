"""Who finishes what a cell has left, and the layers that ranks give each other then."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from openclaw_nb.engine.group.collectives import ReleasableGroup
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.group.unfinished import Unfinished
from openclaw_nb.engine.stages.holdings import Holdings
from openclaw_nb.engine.stages.layout import lay_out
from openclaw_nb.engine.stages.shared import share

from .conftest import OnRanks


def left(place: int, *, needs_all: bool = True, epoch: int = 3) -> Unfinished:
    return Unfinished("parts", place, 3, lambda *_: None, needs_all).of_epoch(epoch)


def words(*shares: Unfinished | None) -> list[str]:
    return [share.word() if share is not None else "" for share in shares]


def test_what_needs_all_is_finished_by_all_who_have_it() -> None:
    assert left(1).holders(words(None, left(1), left(2), left(0))) == {0: 3, 1: 1, 2: 2}
    assert left(1).holders(words(left(1), None, left(0))) is None
    assert not left(1).waits(words(left(1)))


def test_what_can_be_given_is_finished_by_those_who_are_there() -> None:
    """A rank that is alone keeps it: the others may still come."""
    one, other = left(2, needs_all=False), left(0, needs_all=False)
    assert one.holders(words(one, None, other)) == {0: 2, 2: 0}
    assert one.holders(words(one, None)) is None
    assert not one.waits(words(one, None))
    assert one.waits(words(one))


def test_what_another_cell_has_left_is_not_taken_for_it() -> None:
    """Ranks 0 and 1 of one cell, and rank 2 of a later one that numbered its ranks alike."""
    earlier, later = left(1, needs_all=False, epoch=3), left(0, needs_all=False, epoch=4)
    assert earlier.holders(words(earlier, later)) is None
    assert later.holders(words(earlier, later)) is None


class Model(nn.Module):
    """Two layers a rank; the last shares its weight with the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(6)))
        self.layers[5].weight = self.layers[0].weight


def test_layers_are_given_by_those_who_are_there(on_ranks: OnRanks) -> None:
    """Ranks 2 and 0 of a cell of three meet again, as ranks 0 and 1 of a group."""
    formers = [2, 0]

    def body(group: ReleasableGroup) -> list[tuple[float, float, float]]:
        former, model = formers[group.rank()], Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        layers = [f"layers.{at}" for at in range(6)]
        layout = lay_out(model, 3, ranks_of={name: at // 2 for at, name in enumerate(layers)}, layers=layers)
        cell = _Numbered(group, former)
        holdings = Holdings(model, layout.homes, [optimizer], cell)
        for parameter in model.parameters():  # what each rank has trained, and the gradients that it has
            parameter.data.fill_(former)
            parameter.grad = torch.full_like(parameter, 10.0 * former)
        optimizer.step()
        share(holdings, Ranks(group), formers)
        return [
            (p[0, 0].item(), p.grad[0, 0].item(), optimizer.state[p]["momentum_buffer"][0, 0].item())
            for p in model.parameters()
            if p.grad is not None
        ]

    given = on_ranks(body)
    from_0, from_2 = (0.0, 0.0, 0.0), (2.0, 20.0, 20.0)
    for former, values in zip(formers, given, strict=True):
        own = from_0 if former == 0 else from_2
        # The tied weight (first) is each one's own; the layers of rank 1, which is not there, stay.
        assert values == [own, from_0, own, own, from_2]


class _Numbered(Ranks):
    """The ranks of the cell, as one of them saw it."""

    def __init__(self, group: ReleasableGroup, rank: int) -> None:
        super().__init__(group)
        self.rank, self.size = rank, 3


def test_a_tied_layer_is_given_by_the_next_who_has_it(on_ranks: OnRanks) -> None:
    """Its first owner is not there."""
    formers: Sequence[int] = [1, 2]

    def body(group: ReleasableGroup) -> float:
        former, model = formers[group.rank()], Model()
        layers = [f"layers.{at}" for at in range(6)]
        layout = lay_out(model, 3, ranks_of=dict(zip(layers, [0, 1, 1, 1, 2, 2], strict=True)), layers=layers)
        holdings = Holdings(model, layout.homes, [], _Numbered(group, former))
        model.layers[0].weight.data.fill_(former)
        share(holdings, Ranks(group), formers)
        return model.layers[0].weight[0, 0].item()

    assert on_ranks(body) == [2.0, 2.0]
