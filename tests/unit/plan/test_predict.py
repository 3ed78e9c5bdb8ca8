"""Predictions against closed forms and cases that were worked out by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from openclaw_nb.cluster.planning import choice_of, make_plan
from openclaw_nb.core.errors import UsageError
from openclaw_nb.plan.predict.cost import Link, bubble, fit_all_reduce, fit_message
from openclaw_nb.plan.predict.model import Choice, Prediction, choices, predict
from openclaw_nb.plan.predict.profile import Layer, Profile, Timing, Together, read_profile
from openclaw_nb.plan.predict.rank import order, rank
from openclaw_nb.strategies import STRATEGIES

# A link of 1 ms and 1 MB/s, on which every number below can be worked out by hand.
LINK = Link(1e-3, 1e6)
FOUR_LAYERS = tuple(
    Layer(
        name=str(number),
        seconds=0.1,
        part=str(number),
        unit=str(number),
        parameter_bytes=1000,
        input_bytes=8000,
        output_bytes=8000,
        saved_bytes=4000,
        splits=True,
    )
    for number in range(4)
)
STEP = Timing(data=0.01, model=0.4, update=0.04)


def a_profile(**fields: object) -> Profile:
    """A cell whose time is in proportion to its samples, on workers that do not disturb each other."""
    return replace(
        Profile(layers=FOUR_LAYERS, batch_size=8, alone={8: STEP}, together=perfect(2, 4)), **fields
    )


def perfect(*counts: int, link: Link = LINK) -> dict[int, Together]:
    return {n: Together(Timing(0.01 / n, 0.4 / n, 0.04), link, link, link) for n in counts}


# ------------------------------------------------------------------------------------------------- messages


def test_a_ring_all_reduce_is_its_scatter_and_its_gather() -> None:
    assert LINK.all_reduce(1e6, 4) == pytest.approx(6 * 1e-3 + 6 / 4)
    assert LINK.all_reduce(1e6, 2) == pytest.approx(2 * 1e-3 + 1.0)
    assert LINK.all_gather(1e6, 4) == pytest.approx(3 * 1e-3 + 3 / 4)
    assert LINK.all_reduce(1e6, 1) == 0


@pytest.mark.parametrize("num_workers", [2, 3, 4, 8])
def test_a_fit_finds_the_link_again(num_workers: int) -> None:
    reduces = [(size, LINK.all_reduce(size, num_workers)) for size in (256.0, 1e6)]
    found = fit_all_reduce(reduces[0], reduces[1], num_workers)
    assert (found.latency_seconds, found.bytes_per_second) == pytest.approx((1e-3, 1e6))
    found = fit_message((256.0, LINK.message(256)), (1e6, LINK.message(1e6)))
    assert (found.latency_seconds, found.bytes_per_second) == pytest.approx((1e-3, 1e6))


def test_a_long_message_that_was_faster_by_chance_gives_no_negative_times() -> None:
    found = fit_message((256.0, 2e-3), (1e6, 1e-3))
    assert found.message(1e9) >= 0
    assert found.latency_seconds >= 0


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("parts", [1, 2, 4, 16])
def test_the_bubble_is_what_a_drawn_schedule_leaves_idle(stages: int, parts: int) -> None:
    """Draw GPipe's forward pass: stage s works on micro-batch m in slot s + m."""
    busy = {(s, s + m) for s in range(stages) for m in range(parts)}
    slots = 1 + max(slot for _, slot in busy)
    assert bubble(stages, parts) == pytest.approx(1 - len(busy) / (slots * stages))


# --------------------------------------------------------------------------------------------------- a step


def test_a_single_device_is_what_was_measured() -> None:
    found = predict(a_profile(), Choice("single device"))
    assert found.step_seconds == pytest.approx(0.45)
    assert (found.efficiency, found.bubble) == (1.0, 0.0)


@pytest.mark.parametrize("small", [0.001, 0.2, 0.9])
def test_a_single_device_is_that_however_a_smaller_batch_was_measured(small: float) -> None:
    profile = a_profile(alone={8: STEP, 4: Timing(small, small, 0.04)})
    assert predict(profile, Choice("single device")).step_seconds == pytest.approx(0.45)
    assert 0 <= profile.alone_with(1).model <= 0.4
    assert profile.alone_with(2).model >= 0.4 * 2 / 8 - 1e-12


def test_data_parallel_shares_the_batch_and_sums_the_gradients() -> None:
    found = predict(a_profile(num_cores=4), Choice("data_parallel", data=4))
    assert found.compute_seconds == pytest.approx(0.41 / 4 + 0.04)
    assert found.transfer_seconds == pytest.approx(6e-3 + 1.5 * 4000 / 1e6)
    assert found.efficiency == pytest.approx(0.45 / found.step_seconds / 4)


def test_gradients_in_several_buckets_are_summed_beside_the_backward_pass() -> None:
    large = tuple(replace(layer, parameter_bytes=25 * 2**20) for layer in FOUR_LAYERS)
    link = Link(0.0, 1e12)
    profile = a_profile(layers=large, together=perfect(2, link=link))
    last = link.all_reduce(25 * 2**20, 2)
    assert predict(profile, Choice("data_parallel", data=2)).transfer_seconds == pytest.approx(last)
    busy = replace(profile, num_cores=2)
    assert predict(busy, Choice("data_parallel", data=2)).transfer_seconds == pytest.approx(4 * last)


def test_sharded_sends_half_as_much_again_and_holds_a_part() -> None:
    profile = a_profile(optimizer_factor=2.0)
    whole, shard = (predict(profile, Choice(name, data=4)) for name in ("data_parallel", "sharded"))
    assert shard.transfer_seconds == pytest.approx(4 * (9e-3 + 3 * 0.75 * 1000 / 1e6))
    assert whole.memory_bytes == 4 * 4000 + 4 * 4000 // 4
    # parameters, gradients and two moments by four; a layer gathered, with its gradients, here and as they are sent;
    # and a quarter of what layers save
    assert shard.memory_bytes == 4 * 4000 // 4 + 3 * 1000 + 4 * 4000 // 4


def test_what_is_in_no_unit_stays_gathered_and_is_gathered_once() -> None:
    layers = (replace(FOUR_LAYERS[0], unit=""), *FOUR_LAYERS[1:3], replace(FOUR_LAYERS[3], unit=""))
    found = predict(a_profile(layers=layers), Choice("sharded", data=4))
    times = [2 * LINK.all_gather(2000, 4), *[3 * LINK.all_gather(1000, 4)] * 2]
    assert found.transfer_seconds == pytest.approx(sum(times))
    assert found.memory_bytes == 2 * 4000 // 4 + 3 * 2000 + 4 * 4000 // 4


def test_tensor_parallel_sums_twice_for_each_pair_of_layers() -> None:
    found = predict(a_profile(), Choice("tensor_parallel", tensor=2))
    assert found.transfer_seconds == pytest.approx(2 * 2 * LINK.all_reduce(8000, 2))
    assert found.compute_seconds == pytest.approx(0.01 + 0.4 / 2 + 0.04 / 2)
    half = tuple(replace(layer, splits=number < 2) for number, layer in enumerate(FOUR_LAYERS))
    found = predict(a_profile(layers=half), Choice("tensor_parallel", tensor=2))
    assert found.compute_seconds == pytest.approx(0.01 + 0.2 / 2 + 0.2 + 0.04 * 0.75)


def test_model_parallel_stages_work_one_after_the_other() -> None:
    found = predict(a_profile(), Choice("model_parallel", pipeline=2))
    assert found.compute_seconds == pytest.approx(0.01 + 0.4 + 0.02)
    assert found.transfer_seconds == pytest.approx(2 * LINK.message(8000))
    assert found.bubble == 0.5
    # all parameters; the gradients of two layers, and what these save
    assert found.memory_bytes == 4000 + 2000 + 2 * 4000
    # A model of one large layer and three small ones is cut behind the large one, whatever takes longer.
    uneven = tuple(
        replace(layer, parameter_bytes=1000 if number else 9000) for number, layer in enumerate(FOUR_LAYERS)
    )
    found = predict(
        a_profile(layers=uneven, optimizer_factor=2.0), Choice("pipeline", pipeline=2, microbatches=4)
    )
    assert found.compute_seconds == pytest.approx(0.01 + (0.4 + 3 * 0.3) / 4 + 0.04 * 9 / 12)
    assert found.memory_bytes == 12_000 + 3 * 9000 + 4000
    assert found.end_bytes == 4 * 12_000


def test_tied_parameters_count_on_both_stages() -> None:
    last = replace(FOUR_LAYERS[3], parameter_bytes=0, shared_bytes=1000)
    found = predict(a_profile(layers=(*FOUR_LAYERS[:3], last)), Choice("model_parallel", pipeline=2))
    assert not found.problem
    assert found.memory_bytes == 3000 + 2000 + 2 * 4000


def test_functions_are_where_their_input_is() -> None:
    function = Layer(name="f", seconds=0.1, saved_bytes=10_000)
    layers = (function, FOUR_LAYERS[0], function, function, FOUR_LAYERS[1])
    profile = a_profile(layers=layers, alone={8: Timing(0.0, 0.5, 0.0)})
    assert [[layer.name for layer in part] for part in profile.parts] == [["f", "0", "f", "f"], ["1"]]
    found = predict(profile, Choice("pipeline", pipeline=2, microbatches=2))
    assert found.compute_seconds == pytest.approx(0.5 / 2 + 0.4 / 2)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a_pipeline_takes_as_many_slots_as_the_closed_form(parts: int) -> None:
    found = predict(a_profile(), Choice("pipeline", pipeline=2, microbatches=parts))
    assert found.compute_seconds == pytest.approx(0.01 + (parts + 1) * 0.2 / parts + 0.02)
    assert found.transfer_seconds == pytest.approx(2 * parts * LINK.message(8000 / parts))
    assert found.bubble == pytest.approx(1 / (parts + 1))


def test_a_hybrid_is_the_product_of_its_axes() -> None:
    found = predict(a_profile(), Choice("hybrid_parallel", data=2, tensor=2))
    assert found.compute_seconds == pytest.approx(0.01 / 2 + 0.4 / 4 + 0.04 / 2)
    messages = 2 * 2 * LINK.all_reduce(8000 / 2, 2)
    assert found.transfer_seconds == pytest.approx(messages + LINK.all_reduce(2000, 2))


def test_workers_that_disturb_each_other_take_longer() -> None:
    """Four workers on two cores: each takes twice as long, so that nothing is gained over two."""
    together = {
        n: Together(Timing(0.0, 0.4 / n * slow, 0.0), LINK, LINK, LINK) for n, slow in ((2, 1.0), (4, 2.0))
    }
    profile = a_profile(alone={8: Timing(0.0, 0.4, 0.0)}, together=together)
    assert (profile.contention(2), profile.contention(4)) == (1.0, 2.0)
    two, four = (predict(profile, Choice("data_parallel", data=n)).compute_seconds for n in (2, 4))
    assert two == pytest.approx(four) == pytest.approx(0.2)
    assert predict(profile, Choice("tensor_parallel", tensor=4)).compute_seconds == pytest.approx(0.2)
    # Of model-parallel stages one computes at a time.
    assert predict(profile, Choice("model_parallel", pipeline=4)).compute_seconds == pytest.approx(0.4)


def test_the_fixed_part_of_a_step_does_not_shrink_with_the_batch() -> None:
    profile = a_profile(alone={8: Timing(0.01, 0.5, 0.04), 2: Timing(0.01, 0.2, 0.04)}, together=perfect(2))
    assert profile.alone_with(4).model == pytest.approx(0.3)
    found = predict(profile, Choice("pipeline", pipeline=2, microbatches=4))
    assert found.compute_seconds == pytest.approx(0.01 + 5 * 0.2 / 2 + 0.02)


# ------------------------------------------------------------------------------------------ what cannot be


@pytest.mark.parametrize(
    ("fields", "choice", "words"),
    [
        ({"batch_size": 3, "alone": {3: STEP}}, Choice("data_parallel", data=4), "3 samples"),
        ({}, Choice("model_parallel", pipeline=8), "4 layers to cut between, fewer than 8 stages"),
        ({"layers": (Layer(name="a", seconds=1.0),)}, Choice("tensor_parallel", tensor=2), "can be split"),
        ({"num_batchnorms": 1}, Choice("pipeline", pipeline=2, microbatches=2), "BatchNorm"),
        ({}, Choice("hybrid_parallel", data=2, pipeline=2), "no stages of layers yet"),
        (
            {"memory_bytes": 1000},
            Choice("data_parallel", data=2),
            "needs 15.6 KiB a worker while it trains, and 1.0 KiB are there",
        ),
        (
            {"memory_bytes": 15_000, "optimizer_factor": 2.0, "num_cores": 8},
            Choice("sharded", data=4),
            "needs 31.2 KiB a worker when the cell ends",
        ),
        (
            {"memory_bytes": 15_000},
            Choice("model_parallel", pipeline=2),
            "",
        ),
    ],
)
def test_what_cannot_be_says_why(fields: dict[str, object], choice: Choice, words: str) -> None:
    problem = predict(a_profile(**fields), choice).problem
    assert words in problem
    assert bool(words) == bool(problem)


def test_every_factorisation_of_the_workers_is_there_once() -> None:
    found = list(choices(8, 16))
    assert len(found) == len(set(found))
    hybrids = {(c.data, c.pipeline, c.tensor) for c in found if c.strategy == "hybrid_parallel"}
    every = {
        (d, p, t)
        for d, p, t in itertools.product((1, 2, 4, 8), repeat=3)
        if d * p * t in (2, 4, 8) and sum(n > 1 for n in (d, p, t)) > 1
    }
    assert hybrids == every
    assert {c.microbatches for c in found if (c.strategy, c.pipeline) == ("pipeline", 8)} == {8, 16}


def test_a_plan_has_the_choice_of_each_strategy_as_it_is_asked_for() -> None:
    degrees = {"data_parallel_degree": 2, "tensor_parallel_degree": 2}
    for name, kind in STRATEGIES.items():
        spec = kind(**(degrees if name == "hybrid_parallel" else {})).spec()
        for batch_size in (1, 3, 6, 64):
            choice = choice_of(spec, 4, batch_size)
            assert choice in choices(4, batch_size), (name, batch_size)
            assert choice is not None
            assert (choice.strategy, choice.num_workers) == (name, 4)
    assert choice_of(STRATEGIES["pipeline"]().spec(), 4, 64) == Choice("pipeline", pipeline=4, microbatches=8)
    asked = STRATEGIES["tensor_parallel"](tensor_parallel_degree=4).spec()
    assert choice_of(asked, 4, 64) == Choice("tensor_parallel", tensor=4)
    assert choice_of(STRATEGIES["pipeline"](stages=[["a"], ["b"]]).spec(), 2, 64) is None


def test_a_plan_refuses_the_degrees_that_the_strategy_refuses() -> None:
    for choice in choices(8, 16):
        if choice.strategy != "hybrid_parallel":
            continue
        words = {"data_parallel_degree": choice.data, "pipeline_degree": choice.pipeline}
        words["tensor_parallel_degree"] = choice.tensor
        problem = predict(a_profile(), choice).problem
        if problem:
            with pytest.raises(UsageError, match=problem):
                STRATEGIES["hybrid_parallel"](**words)
        else:
            STRATEGIES["hybrid_parallel"](**words)


# -------------------------------------------------------------------------------------------------- ranking


def a_prediction(strategy: str, seconds: float, problem: str = "", num_workers: int = 2) -> Prediction:
    data = 1 if strategy == "single device" else num_workers
    return Prediction(
        choice=Choice(strategy, data=data),
        step_seconds=seconds,
        compute_seconds=seconds,
        transfer_seconds=0.0,
        memory_bytes=0,
        problem=problem,
    )


def test_data_parallel_comes_first_unless_another_is_faster_by_more_than_a_prediction_is_worth() -> None:
    one, data = a_prediction("single device", 1.0), a_prediction("data_parallel", 0.6)
    near, far = a_prediction("pipeline", 0.58), a_prediction("pipeline", 0.5)
    assert order([one, near, data])[0].prediction is data
    assert order([one, far, data])[0].prediction is far


def test_one_worker_is_taken_where_more_bring_nothing() -> None:
    one, data = a_prediction("single device", 1.0), a_prediction("data_parallel", 0.98)
    first, second = order([data, one])
    assert first.prediction is one
    assert first.reason == "no more workers make it faster"
    assert second.prediction is data


def test_a_model_that_fits_no_device_is_split() -> None:
    """4000 bytes of parameters take 16000 with gradients and moments, and 16000 are kept for the backward pass.

    Two stages have half of the gradients, of the moments and of what is kept. Whole again at the end is 16000, beside
    all shards 32000; tensor parallel has 3 times the parameters from before, 4 times half of them, 4 times joined.
    """
    profile = a_profile(optimizer_factor=2.0, memory_bytes=23_000, num_cores=8, together=perfect(2))
    ranked = rank(profile, 2)
    fits = {r.prediction.choice.strategy for r in ranked if not r.prediction.problem}
    assert fits == {"model_parallel", "pipeline"}
    ends = {r.prediction.choice.strategy: r.prediction.end_bytes for r in ranked}
    assert (ends["pipeline"], ends["sharded"], ends["tensor_parallel"]) == (16_000, 32_000, 36_000)
    assert "does not fit one device" in ranked[0].reason
    assert ranked[0].prediction.step_seconds == min(
        r.prediction.step_seconds for r in ranked if not r.prediction.problem
    )


def test_no_strategy_helps_where_the_whole_state_fits_no_worker() -> None:
    plan = make_plan(a_profile(optimizer_factor=2.0), 4, memory_bytes=15_000)
    assert all(each.prediction.problem for each in plan.ranked)
    assert plan.table.title == "Plan for batches of 8 samples: nothing can be run"
    assert "single device" in make_plan(a_profile(batch_size=1, alone={1: STEP}), 1).table.title


def test_what_cannot_be_comes_last_and_every_line_has_a_reason() -> None:
    ranked = rank(a_profile(num_batchnorms=1), 4)
    able = [not r.prediction.problem for r in ranked]
    assert able == sorted(able, reverse=True)
    assert not all(able)
    assert all(r.reason for r in ranked)
    times = [r.prediction.step_seconds for r, fine in zip(ranked, able, strict=True) if fine]
    assert times[1:] == sorted(times[1:])
    assert all(math.isfinite(seconds) for seconds in times)


def test_reports_of_workers_become_a_profile() -> None:
    alone = {
        "layers": [vars(layer) for layer in FOUR_LAYERS],
        "batch_size": 8,
        "timings": [
            {"num_samples": 8, "data": 0.01, "model": 0.4, "update": 0.04},
            {"num_samples": 2, "data": 0.01, "model": 0.1, "update": 0.04},
        ],
        "optimizer_factor": 1.0,
        "memory_bytes": 5000,
        "num_cores": 2,
        "num_batchnorms": 0,
    }
    slower = Link(2e-3, 1e5)
    pair = {
        "num_workers": 2,
        "memory_bytes": 4000,
        "timings": [{"num_samples": 4, "data": 0.01, "model": 0.3, "update": 0.04}],
        "all_reduces": [[256.0, LINK.all_reduce(256, 2)], [1e6, LINK.all_reduce(1e6, 2)]],
        "group_sums": [[256.0, slower.all_reduce(256, 2)], [1e6, slower.all_reduce(1e6, 2)]],
        "messages": [[256.0, LINK.message(256)], [1e6, LINK.message(1e6)]],
    }
    profile = read_profile(alone, [pair])
    assert profile.memory_bytes == 4000
    assert profile.contention(2) == pytest.approx(0.3 / 0.2)
    assert profile.link(2).all_reduce.bytes_per_second == pytest.approx(1e6)
    assert profile.link(2).group.bytes_per_second == pytest.approx(1e5)
    # Split layers and shards go by the group, data parallel's gradients by what is fastest.
    taken = {
        name: predict(profile, Choice(name, **{axis: 2})).transfer_seconds
        for name, axis in (("data_parallel", "data"), ("sharded", "data"), ("tensor_parallel", "tensor"))
    }
    assert taken["data_parallel"] == pytest.approx(LINK.all_reduce(4000, 2))
    assert taken["sharded"] == pytest.approx(4 * 3 * slower.all_gather(1000, 2))
    assert taken["tensor_parallel"] == pytest.approx(2 * 2 * slower.all_reduce(8000, 2))
