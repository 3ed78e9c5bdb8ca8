"""Messages of any shape between ranks, over real gloo."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from openclaw_nb.core.errors import ReleasedError
from openclaw_nb.engine.group.collectives import ReleasableGroup
from openclaw_nb.engine.group.exchange import Exchange

from .conftest import OnRanks, disband, form, on_threads

TENSORS = [
    torch.arange(6.0).reshape(2, 3).t(),
    torch.tensor(True),
    torch.empty(0, 4),
    torch.randn(300_000).to(torch.bfloat16),
    torch.tensor([1 + 2j]),
]


def test_messages_arrive_as_they_were_and_in_order(on_ranks: OnRanks) -> None:
    """Each rank sends to both others before it receives: a send waits for nobody."""
    headers: list[Any] = [("short", 1), "long " * 5000, None]

    def body(group: ReleasableGroup) -> None:
        exchange = Exchange(group)
        others = [rank for rank in range(3) if rank != group.rank()]
        for header in headers:
            for peer in others:
                exchange.send(peer, (header, group.rank()), TENSORS)
        for peer in others:
            expected = [exchange.expect(peer) for _ in headers]
            for header, each in zip(headers, expected, strict=True):
                message = each.wait()
                assert message.header == (header, peer)
                for given, tensor in zip(message.tensors, TENSORS, strict=True):
                    assert given.dtype == tensor.dtype
                    assert torch.equal(given, tensor)
        exchange.flush()

    on_ranks(body, 3)


def test_a_wait_ends_with_the_group() -> None:
    groups, _ = form(2)
    try:
        threading.Timer(0.1, lambda: groups[0].release("told to")).start()
        begun = time.monotonic()
        with pytest.raises(ReleasedError, match="told to"):
            Exchange(groups[0]).receive(1)
        assert time.monotonic() - begun < 2.0
        on_threads([lambda: groups[1].release("the test is over")])
    finally:
        disband(groups)
