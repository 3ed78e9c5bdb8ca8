"""What several ranks have of a model's stages: gradients of tied parameters, and all values at the end of a cell.

When a cell ends early its group is gone, and each rank has trained its own layers only. Values are then given to all as
soon as ranks of the cell are in a group again (`group.unfinished`), those of ranks that are not there excepted.

Knows holdings and ranks; does not know the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from openclaw_nb.engine.group.exchange import Exchange
from openclaw_nb.engine.group.ranks import Ranks
from openclaw_nb.engine.stages.holdings import Holdings
from openclaw_nb.engine.stages.route import Waiting

_PIECE_BYTES = 32 << 20


# ------------------------------------------------------------------------------------- tied parameters


def set_aside(holdings: Holdings) -> dict[int, Tensor | None]:
    """Take the gradients that tied parameters have from earlier passes away, and return them by place."""
    kept: dict[int, Tensor | None] = {}
    for at in _tied(holdings):
        parameter = holdings.parameters[at]
        kept[at], parameter.grad = parameter.grad, None
    return kept


def add_up(
    holdings: Holdings, exchange: Exchange | None, waiting: Waiting, kept: dict[int, Tensor | None]
) -> None:
    """Let all owners of a tied parameter have the sum of their gradients, on top of what was set aside."""
    rank = holdings.rank
    tied = _tied(holdings)
    peers = sorted({owner for at in tied for owner in holdings.homes[at].owners} - {rank})
    with_peer = {p: [at for at in tied if p in holdings.homes[at].owners] for p in peers}
    given: dict[int, dict[int, Tensor | None]] = {rank: {at: holdings.parameters[at].grad for at in tied}}
    if exchange is not None:
        for peer, places in with_peer.items():
            own = [given[rank][at] for at in places]
            exchange.send(peer, ("tied", [g is not None for g in own]), [g for g in own if g is not None])
        for peer, places in with_peer.items():
            with waiting():
                message = exchange.receive(peer)
            tensors = iter(message.tensors)
            flags = message.header[1]
            given[peer] = {at: next(tensors) if has else None for at, has in zip(places, flags, strict=True)}
        exchange.flush()  # what was sent is written to now
    for at in tied:
        parameter = holdings.parameters[at]
        # From the last owner on, as backward goes on one device, and alike on every owner.
        parts = [given[owner].get(at) for owner in reversed(holdings.homes[at].owners)]
        total = kept[at]
        for part in parts:
            if part is not None:
                part = part.to(parameter.device)
                total = part if total is None else total + part
        parameter.grad = total


def _tied(holdings: Holdings) -> list[int]:
    homes = enumerate(holdings.homes[: len(holdings.parameters)])
    return [at for at, home in homes if len(home.owners) > 1 and holdings.rank in home.owners]


# ----------------------------------------------------------------------------------- all values, for all


def share(holdings: Holdings, ranks: Ranks, owners: Sequence[int]) -> None:
    """Give every rank the values that these have: parameters, buffers, gradients, and what optimizers keep.

    Parameters
    ----------
    holdings : Holdings
        The model's tensors.
    ranks : Ranks
        All of them call this.
    owners : sequence of int
        By rank, the number under which it has its layers. What only others have stays as it is.
    """
    for source in range(ranks.size):
        pieces = _pieces(holdings, owners) if source == ranks.rank else iter(())
        while (piece := ranks.broadcast(next(pieces, None), source)) is not None:
            if source != ranks.rank:
                _take(holdings, piece)


def _pieces(holdings: Holdings, owners: Sequence[int]) -> Iterator[list[tuple[str, int, Any]]]:
    """Give what is this rank's to give, in pieces of limited size."""
    piece: list[tuple[str, int, Any]] = []
    size = 0
    for kind, at, value in _entries(holdings, owners):
        piece.append((kind, at, value))
        size += value.nbytes if isinstance(value, Tensor) else 0
        if size > _PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _entries(holdings: Holdings, owners: Sequence[int]) -> Iterator[tuple[str, int, Any]]:
    for at, tensor in enumerate(holdings.tensors):
        giver = next((owner for owner in holdings.homes[at].owners if owner in owners), None)
        if giver != holdings.rank:
            continue
        yield "value", at, holdings.value(at).detach().cpu()
        if at < len(holdings.parameters):
            gradient = holdings.parameters[at].grad
            yield "gradient", at, None if gradient is None else gradient.detach().cpu()
            for number, optimizer in enumerate(holdings.optimizers):
                if tensor in optimizer.state:
                    yield f"state {number}", at, _map_state(optimizer.state[tensor], torch.device("cpu"))


def _take(holdings: Holdings, piece: list[tuple[str, int, Any]]) -> None:
    for kind, at, value in piece:
        tensor, is_own = holdings.tensors[at], holdings.rank in holdings.homes[at].owners
        if is_own:
            continue  # tied: it is the same here
        if kind == "value":
            with torch.no_grad():
                tensor.copy_(value)
        elif kind == "gradient":
            tensor.grad = None if value is None else value.to(tensor.device)
        else:
            optimizer = holdings.optimizers[int(kind.split()[1])]
            optimizer.state[tensor] = _map_state(value, tensor.device)


def _map_state(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Move an optimizer's state; its step counts stay where the optimizer keeps them."""
    return {
        name: value.to(device) if isinstance(value, Tensor) and value.dim() else value
        for name, value in state.items()
    }


def gather_states(
    holdings: Holdings, optimizer: Optimizer, ranks: Ranks, own: dict[Any, Any]
) -> dict[Any, Any]:
    """Return what an optimizer keeps on all ranks, by its numbers of parameters; every rank calls this."""
    numbers = {id(p): n for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    mine = {
        numbers[id(p)]
        for p, home in zip(holdings.parameters, holdings.homes, strict=False)
        if home.owners[0] == ranks.rank and id(p) in numbers
    }
    states: dict[Any, Any] = {}
    for source in range(ranks.size):
        given = {number: state for number, state in own.items() if number in mine}
        states |= ranks.broadcast(given if source == ranks.rank else None, source)
    return {number: own.get(number, states[number]) for number in sorted(states)}
