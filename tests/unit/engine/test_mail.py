"""Keyed messages between the ranks of a pipeline, over real gloo."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from openclaw_nb.core.errors import MismatchError, ReleasedError
from openclaw_nb.engine.group.collectives import ReleasableGroup
from openclaw_nb.engine.scheduler.mail import Mail

from .conftest import OnRanks, disband, form, on_threads

VALUES: list[Any] = [
    torch.arange(6.0).reshape(2, 3).t(),
    torch.ones((1,) * 9),
    torch.empty(0, 4),
    torch.tensor(3.5).to(torch.float8_e4m3fn),
    {"a": [torch.ones(2), "b" * 9000]},
    None,
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.float(), other.float())
    return repr(one) == repr(other)


def test_messages_are_taken_by_key_in_any_order(on_ranks: OnRanks) -> None:
    def body(group: ReleasableGroup) -> bool:
        peer = 1 - group.rank()
        with Mail(group, [0, 1], "a step") as mail:
            for number, value in enumerate(VALUES):
                mail.send(peer, (0, number, 0), value)
            numbers = range(len(VALUES) - 1, -1, -1)
            return all(same(mail.take(peer, (0, number, 0)), VALUES[number]) for number in numbers)

    assert on_ranks(body) == [True, True]


def test_what_some_ranks_give_is_on_all(on_ranks: OnRanks) -> None:
    def body(group: ReleasableGroup) -> list[Any]:
        with Mail(group, [0, 1, 2], "times") as mail:
            return mail.gather([2, 0], (1, 0, 0), f"of {group.rank()}")

    assert on_ranks(body, 3) == [["of 2", "of 0"]] * 3


@pytest.mark.parametrize(
    ("calls", "names"),
    [
        ({0: ("a step", [0, 1]), 1: ("a norm", [0, 1])}, ("a step (exchange 1", "a norm (exchange 1")),
        ({0: ("a step", [0, 1]), 1: ("a step", [0, 1, 2])}, ("on ranks 0, 1)", "on ranks 0, 1, 2)")),
    ],
    ids=["another call", "another pipeline"],
)
def test_a_message_of_another_exchange_is_not_taken(
    calls: dict[int, tuple[str, list[int]]], names: tuple[str, str]
) -> None:
    groups, _ = form(3)

    def body(group: ReleasableGroup) -> str:
        if group.rank() not in calls:
            return ""
        purpose, peers = calls[group.rank()]
        mail = Mail(group, peers, purpose)
        mail.__enter__()
        mail.send(1 - group.rank(), (0, 0, 0), "mine")
        try:
            mail.take(1 - group.rank(), (0, 0, 0))
        except MismatchError as error:
            return str(error)
        finally:
            mail._sent.put(None)
        return "taken"

    try:
        told = on_threads([lambda group=group: body(group) for group in groups])  # type: ignore[misc]
        for rank, other in ((0, 1), (1, 0)):
            assert f"rank {other} is in" in told[rank]
            assert all(name in told[rank] for name in names)
    finally:
        disband(groups)


def test_ranks_in_different_exchanges_do_not_seem_to_wait_together() -> None:
    """Rank 0 is one exchange ahead: by what they wait in, `plan.release` sees that they wait in vain."""
    groups, _ = form(2)

    def one(group: ReleasableGroup) -> None:
        with Mail(group, [0, 1], "a step"):
            pass

    def ahead(group: ReleasableGroup) -> None:
        with pytest.raises(ReleasedError):
            Mail(group, [0, 1], "a step").__enter__().take(1 - group.rank(), (0, 0, 0))

    def seen() -> list[str]:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            waits = [group.board.current for group in groups]
            if None not in waits:
                break
            time.sleep(0.01)
        calls = [group.board.current.call for group in groups if group.board.current is not None]
        for group in groups:
            group.release("seen")
        return calls

    try:
        on_threads([lambda group=group: one(group) for group in groups])  # type: ignore[misc]
        Mail(groups[0], [0, 1], "a step")  # an exchange that rank 1 does not come to
        *_, calls = on_threads([lambda group=group: ahead(group) for group in groups] + [seen])  # type: ignore[misc]
        assert [call.split(" of the")[0] for call in calls] == ["a step (exchange 3", "a step (exchange 2"]
    finally:
        disband(groups)
