"""Random streams: what is common to the ranks and what is a rank's own."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from openclaw_nb.engine.steps import randomness
from openclaw_nb.engine.steps.randomness import ModelStream

DATA = TensorDataset(torch.arange(10))


@pytest.fixture(autouse=True)
def own_streams() -> Iterator[None]:
    """Start each test from one state and leave the others' streams as they were."""
    before = randomness.capture([])
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    yield
    randomness.restore(before, [])


def draw(*generators: torch.Generator) -> list[float]:
    values = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    return values + [torch.rand(1, generator=generator).item() for generator in generators]


def test_restored_streams_draw_the_same_again() -> None:
    own = [torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)]
    draw(*own)
    state = randomness.capture(own)
    first = draw(*own)
    draw(*own)
    randomness.restore(state, own)
    assert draw(*own) == first


def test_another_ranks_streams_follow_what_was_captured_here() -> None:
    ours, theirs = torch.Generator().manual_seed(1), torch.Generator().manual_seed(99)
    state = randomness.capture([ours])
    expected = draw(ours)
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)
    randomness.restore(state, [theirs])
    assert draw(theirs) == expected


def test_another_number_of_generators_is_an_error() -> None:
    state = randomness.capture([torch.Generator()])
    with pytest.raises(ValueError, match="zip"):
        randomness.restore(state, [])


def test_a_loaders_generators_are_found_once_each() -> None:
    own, samplers = torch.Generator(), torch.Generator()
    plain = DataLoader(DATA, batch_size=2)
    shuffled = DataLoader(DATA, batch_size=2, shuffle=True, generator=own)
    inner = BatchSampler(RandomSampler(DATA, generator=samplers), 2, drop_last=False)
    custom = DataLoader(DATA, batch_sampler=inner, generator=own)
    assert randomness.generators_of(plain) == []
    assert [id(g) for g in randomness.generators_of(shuffled)] == [id(own)]
    assert {id(g) for g in randomness.generators_of(custom)} == {id(own), id(samplers)}


# ------------------------------------------------------------------------------------- in the model


def in_model(stream: ModelStream) -> float:
    stream.enter()
    value = torch.rand(1).item()
    stream.leave()
    return value


def test_the_model_draws_nothing_from_the_common_stream() -> None:
    expected = [torch.rand(1).item() for _ in range(3)]
    torch.manual_seed(11)
    stream = ModelStream(rank=1)
    seen = []
    for _ in range(3):
        in_model(stream)
        seen.append(torch.rand(1).item())
    assert seen == expected


def test_ranks_draw_different_values_from_one_common_state() -> None:
    values = [in_model(ModelStream(rank)) for rank in range(8)]
    assert len(set(values)) == 8


def test_a_rank_draws_the_same_values_again_from_the_same_common_state() -> None:
    first, second = ModelStream(3), ModelStream(3)
    assert [in_model(first) for _ in range(4)] == [in_model(second) for _ in range(4)]


def test_another_common_state_is_another_stream() -> None:
    first = ModelStream(0)
    torch.manual_seed(12)
    assert in_model(first) != in_model(ModelStream(0))


def test_the_ranks_stream_goes_on_from_call_to_call() -> None:
    stream = ModelStream(0)
    calls = [in_model(stream) for _ in range(5)]
    assert len(set(calls)) == 5
    whole = ModelStream(0)  # the common state is as it was
    whole.enter()
    at_once = torch.rand(5).tolist()
    whole.leave()
    assert at_once == calls


def test_leaving_without_having_entered_changes_nothing() -> None:
    stream = ModelStream(0)
    before = torch.get_rng_state()
    stream.leave()
    assert torch.equal(torch.get_rng_state(), before)
