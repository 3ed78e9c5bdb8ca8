"""Collectives over real gloo backends: their values, how waits end, and what is said when ranks disagree.

Closed forms: with 2 ranks whose tensors hold rank + 1, sums are 3.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from openclaw_nb.core.errors import MismatchError, ReleasedError
from openclaw_nb.engine.group import gloo
from openclaw_nb.engine.group.collectives import PendingWork, ReleasableGroup, WaitBoard, signature

from .conftest import OnRanks, disband, form, on_threads

FREE_SECONDS = 1.0


def own(group: ReleasableGroup, length: int = 3) -> torch.Tensor:
    return torch.full((length,), float(group.rank() + 1))


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


# ------------------------------------------------------------------------------------------- values


def all_reduce(group: ReleasableGroup) -> list[float]:
    tensor = own(group)
    group.allreduce([tensor]).wait()
    return tensor.tolist()


def maximum(group: ReleasableGroup) -> list[float]:
    tensor, options = own(group), c10d.AllreduceOptions()
    options.reduceOp = c10d.ReduceOp.MAX
    group.allreduce([tensor], options).wait()
    return tensor.tolist()


def broadcast(group: ReleasableGroup) -> list[float]:
    tensor, options = own(group), c10d.BroadcastOptions()
    options.rootRank = 1
    group.broadcast([tensor], options).wait()
    return tensor.tolist()


def all_gather(group: ReleasableGroup) -> list[list[float]]:
    rows = [torch.zeros(2) for _ in range(group.size())]
    group.allgather([rows], [own(group, 2)]).wait()
    return [row.tolist() for row in rows]


def all_gather_into_tensor(group: ReleasableGroup) -> list[float]:
    output = torch.zeros(2 * group.size())
    group.all_gather_single(output, own(group, 2)).wait()
    return output.tolist()


def all_reduce_coalesced(group: ReleasableGroup) -> list[float]:
    tensors = [own(group, 1), own(group, 2) * 10]
    group.allreduce_coalesced(tensors, c10d.AllreduceCoalescedOptions()).wait()
    return torch.cat(tensors).tolist()


def reduce(group: ReleasableGroup) -> float:
    tensor, options = own(group, 1), c10d.ReduceOptions()
    options.rootRank = 1
    group.reduce([tensor], options).wait()
    return tensor.item() if group.rank() == 1 else 0.0


def gather(group: ReleasableGroup) -> list[float]:
    rows = [[torch.zeros(1) for _ in range(group.size())]] if group.rank() == 0 else []
    group.gather(rows, [own(group, 1)], c10d.GatherOptions()).wait()
    return [row.item() for row in rows[0]] if rows else []


def scatter(group: ReleasableGroup) -> float:
    output = torch.zeros(1)
    parts = [[torch.full((1,), 7.0 + i) for i in range(group.size())]] if group.rank() == 0 else []
    group.scatter([output], parts, c10d.ScatterOptions()).wait()
    return output.item()


def all_to_all(group: ReleasableGroup) -> list[float]:
    outputs = [torch.zeros(1) for _ in range(group.size())]
    inputs = [own(group, 1) * 10 + i for i in range(group.size())]
    group.alltoall(outputs, inputs, c10d.AllToAllOptions()).wait()
    return [output.item() for output in outputs]


def all_to_all_single(group: ReleasableGroup) -> list[float]:
    output, source = torch.zeros(2), own(group, 2) * 10 + torch.arange(2)
    group.all_to_all_single(output, source, [], [], c10d.AllToAllOptions()).wait()
    return output.tolist()


def ring(group: ReleasableGroup) -> list[float]:
    got = torch.zeros(3)
    following, before = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    sent = group.send([own(group)], following, 0)
    received = group.recv([got], before, 0)
    sent.wait()
    received.wait()
    return got.tolist()


VALUES = {
    all_reduce: [[3.0] * 3] * 2,
    maximum: [[2.0] * 3] * 2,
    broadcast: [[2.0] * 3] * 2,
    all_gather: [[[1.0, 1.0], [2.0, 2.0]]] * 2,
    all_gather_into_tensor: [[1.0, 1.0, 2.0, 2.0]] * 2,
    all_reduce_coalesced: [[3.0, 30.0, 30.0]] * 2,
    reduce: [0.0, 3.0],
    gather: [[1.0, 2.0], []],
    scatter: [7.0, 8.0],
    all_to_all: [[10.0, 20.0], [11.0, 21.0]],
    all_to_all_single: [[10.0, 20.0], [11.0, 21.0]],
    ring: [[2.0] * 3, [1.0] * 3],
}


@pytest.mark.parametrize("compare", [False, True], ids=["plain", "compared"])
@pytest.mark.parametrize("call", VALUES, ids=lambda call: call.__name__)
def test_values(on_ranks: OnRanks, call: Callable[[ReleasableGroup], Any], compare: bool) -> None:
    assert on_ranks(call, compare=compare) == VALUES[call]


def test_a_group_of_one(on_ranks: OnRanks) -> None:
    assert on_ranks(all_reduce, 1, compare=True) == [[1.0] * 3]


def test_calls_under_way_at_once_keep_their_order_and_may_be_waited_for_in_any(on_ranks: OnRanks) -> None:
    def body(group: ReleasableGroup) -> list[float]:
        tensors = [torch.full((2,), float(i)) for i in range(20)]
        works = [group.allreduce([tensor]) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        return [tensor[0].item() for tensor in tensors]

    assert on_ranks(body, 3, compare=True) == [[3.0 * i for i in range(20)]] * 3


def test_receiving_from_any_source_tells_the_source(on_ranks: OnRanks) -> None:
    def body(group: ReleasableGroup) -> tuple[int, float] | None:
        if group.rank() == 1:
            group.send([own(group)], 0, 0).wait()
            return None
        got = torch.zeros(3)
        work = group.recv_anysource([got], 0)
        work.wait()
        return work._source_rank(), got[0].item()

    assert on_ranks(body, compare=True)[0] == (1, 2.0)


# ------------------------------------------------------------------------------------------ release


@pytest.mark.parametrize("compare", [False, True], ids=["plain", "compared"])
@pytest.mark.parametrize(
    "call",
    [
        all_reduce,
        broadcast,
        all_gather,
        lambda group: group.barrier().wait(),
        lambda group: group.recv([torch.zeros(1)], 1, 0).wait(),
        lambda group: group.allreduce([own(group)]).get_future().wait(),
    ],
    ids=["all_reduce", "broadcast", "all_gather", "barrier", "recv", "future"],
)
def test_release_frees_whoever_waits_and_a_cut_silences_the_backend(
    call: Callable[[ReleasableGroup], Any], compare: bool
) -> None:
    groups, address = form(2, compare=compare)
    at: list[float] = []

    def release() -> None:
        assert wait_until(lambda: bool(groups[0]._pending))
        time.sleep(0.05)
        at.append(time.monotonic())
        groups[0].release("rank 1 died")

    def stay() -> tuple[str, float]:
        try:
            call(groups[0])
        except (ReleasedError, RuntimeError) as error:
            return str(error), time.monotonic()
        raise AssertionError("it came back")

    scissors = gloo.Scissors(address)
    (text, free), _ = on_threads([stay, release])
    assert "rank 1 died" in text
    assert free - at[0] < FREE_SECONDS
    assert wait_until(lambda: scissors.cut() == 0 and not groups[0].busy)
    disband(groups)
    scissors.close()


def test_a_released_group_refuses_every_later_call(on_ranks: OnRanks) -> None:
    def body(group: ReleasableGroup) -> None:
        all_reduce(group)
        assert not group.released
        group.release("the stop button")
        assert group.released
        for call in (all_reduce, broadcast, ring):
            with pytest.raises(ReleasedError, match=r"^the stop button$"):
                call(group)

    on_ranks(body, compare=True)


def test_a_release_does_not_undo_what_is_done(on_ranks: OnRanks) -> None:
    def body(group: ReleasableGroup) -> None:
        tensor = own(group)
        work = group.allreduce([tensor])
        work.wait()
        group.release("too late")
        assert work.wait()
        assert work.is_success()
        assert tensor.tolist() == [3.0] * 3

    on_ranks(body)


def test_the_first_outcome_counts() -> None:
    forgotten: list[PendingWork] = []
    work = PendingWork("barrier()", [], WaitBoard("test"), forgotten.append)
    work.finish(ReleasedError("first"))
    work.finish(None)
    work.finish(ValueError("third"))
    with pytest.raises(ReleasedError, match=r"^first$"):
        work.wait()
    assert forgotten == [work]


@pytest.mark.parametrize("text", ["Connection closed by peer [127.0.0.1]:1", "Broken pipe"])
def test_a_lost_peer_is_a_release(text: str) -> None:
    work = PendingWork("barrier()", [], WaitBoard("test"), lambda work: None)
    work.finish(RuntimeError(f"gloo: {text}"))
    with pytest.raises(ReleasedError, match="connection to another rank is gone"):
        work.wait()


# ------------------------------------------------------------------------------------------ futures


def test_a_future_gives_the_tensors_before_and_after_the_end(on_ranks: OnRanks) -> None:
    def body(group: ReleasableGroup) -> tuple[float, float, bool]:
        tensor = own(group)
        work = group.allreduce([tensor])
        early = work.get_future()
        doubled = early.then(lambda future: future.value()[0] * 2)
        first = early.wait()[0][0].item()
        work.wait()
        return first, doubled.wait()[0].item(), work.get_future() is early

    assert on_ranks(body, compare=True) == [(3.0, 6.0, True)] * 2


def test_a_future_asked_for_after_the_end_has_the_value() -> None:
    work = PendingWork("all_reduce", [torch.ones(2)], WaitBoard("test"), lambda work: None)
    assert not work.is_completed()
    work.finish(None)
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.get_future().wait()[0].tolist() == [1.0, 1.0]
    assert work.result()[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("early", [True, False])
def test_a_future_of_a_released_call_raises(early: bool) -> None:
    work = PendingWork("all_reduce", [], WaitBoard("test"), lambda work: None)
    future = work.get_future() if early else None
    work.finish(ReleasedError("rank 1 died"))
    with pytest.raises(RuntimeError, match="rank 1 died"):
        (future or work.get_future()).wait()
    assert not work.is_success()
    assert isinstance(work.exception(), ReleasedError)


# ---------------------------------------------------------------------------------------- mismatches


def disagreement(group: ReleasableGroup, mine: Callable[[ReleasableGroup], Any]) -> str:
    with pytest.raises(MismatchError) as caught:
        mine(group)
    return str(caught.value)


MISMATCHES = {
    "shape": (
        lambda g: g.allreduce([torch.ones(3)]).wait(),
        lambda g: g.allreduce([torch.ones(2, 2)]).wait(),
        ("rank 0 calls all_reduce(float32[3], sum)", "rank 1 calls all_reduce(float32[2, 2], sum)"),
    ),
    "type": (
        lambda g: g.allreduce([torch.ones(3)]).wait(),
        lambda g: g.allreduce([torch.ones(3, dtype=torch.int64)]).wait(),
        ("rank 0 calls all_reduce(float32[3], sum)", "rank 1 calls all_reduce(int64[3], sum)"),
    ),
    "call": (
        lambda g: g.barrier().wait(),
        lambda g: g.broadcast([torch.ones(3)]).wait(),
        ("rank 0 calls barrier()", "rank 1 calls broadcast(float32[3], src=0)"),
    ),
    "operation": (all_reduce, maximum, ("rank 0 calls all_reduce(float32[3], sum)", "(float32[3], max)")),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_both_ranks_are_told_both_calls_and_the_group_goes_on(on_ranks: OnRanks, case: str) -> None:
    first, second, expected = MISMATCHES[case]

    def body(group: ReleasableGroup) -> tuple[str, list[float]]:
        return disagreement(group, (first, second)[group.rank()]), all_reduce(group)

    for text, after in on_ranks(body, compare=True):
        assert all(part in text for part in expected)
        assert after == [3.0] * 3


def test_a_message_of_another_size_is_told_and_not_received(on_ranks: OnRanks) -> None:
    def body(group: ReleasableGroup) -> str:
        if group.rank() == 0:
            group.send([torch.ones(4)], 1, 0)
            return ""
        return disagreement(group, lambda g: g.recv([torch.zeros(3)], 0, 0).wait())

    groups, address = form(2, compare=True)
    _, text = on_threads([lambda: body(groups[0]), lambda: body(groups[1])])
    assert "send(float32[4], dst=1)" in text
    assert "recv(float32[3], src=0)" in text
    scissors = gloo.Scissors(address)
    assert wait_until(lambda: scissors.cut() == 0 and not any(group.busy for group in groups))
    disband(groups)
    scissors.close()


def test_signatures() -> None:
    assert signature("barrier", []) == "barrier()"
    assert signature("all_reduce", [torch.zeros(2, 3)], "sum") == "all_reduce(float32[2, 3], sum)"
    many = [torch.zeros(2)] * 6
    assert signature("x", many).endswith("6 tensors, 12 elements)")


# -------------------------------------------------------------------------------------- who waits where


def test_the_board_shows_the_call_while_it_is_waited_for(on_ranks: OnRanks) -> None:
    gate = threading.Event()

    def body(group: ReleasableGroup) -> tuple[str, str] | None:
        if group.rank() == 1:
            gate.wait(5)
            group.barrier().wait()
            return None
        seen: list[Any] = []

        def look() -> None:
            wait_until(lambda: group.board.current is not None)
            seen.append(group.board.current)
            gate.set()

        threading.Thread(target=look).start()
        group.barrier().wait()
        assert group.board.current is None
        assert seen[0].since <= time.monotonic()
        return seen[0].call, seen[0].group

    assert on_ranks(body, compare=True)[0] == ("barrier()", "test")


# ------------------------------------------------------------------------------------------ addresses


def test_each_group_of_a_cluster_has_a_loopback_address_of_its_own() -> None:
    for tag in ("00000000", "ffffffff", "8f3a12c4"):
        addresses = [gloo.private_address(tag, serial) for serial in range(4096)]
        assert len(set(addresses)) == len(addresses)
        assert all(address.startswith("127.") for address in addresses)
        assert all(0 < int(part) < 255 for address in addresses for part in address.split("."))


def test_two_clusters_talk_over_other_addresses() -> None:
    first = {gloo.private_address("8f3a12c4", serial) for serial in range(256)}
    second = {gloo.private_address("8f3a12c5", serial) for serial in range(256)}
    assert not first & second
