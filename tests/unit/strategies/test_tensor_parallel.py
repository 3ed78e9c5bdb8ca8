"""What may be asked of tensor parallel and hybrid, and what workers are then told."""

from __future__ import annotations

from typing import Any

import pytest

from openclaw_nb.core.errors import UsageError
from openclaw_nb.notebook.options import parse_cell
from openclaw_nb.strategies import HybridParallelStrategy, TensorParallelStrategy


def test_workers_are_told_what_is_asked() -> None:
    plan = {r"blocks\.\d+\.up": "column", r"blocks\.\d+\.down": "row"}
    spec = TensorParallelStrategy(tensor_parallel_degree=2, plan=plan, accumulate=3).spec(model="net")
    assert (spec.name, spec.model) == ("tensor_parallel", "net")
    assert spec.options == {
        "tensor_parallel_degree": 2,
        "plan": plan,
        "accumulate": 3,
        "sync_frequency": 1,
        "memory_pinning": True,
    }
    assert "plan" not in TensorParallelStrategy().spec().options


def test_a_line_says_the_same_as_a_description() -> None:
    given = parse_cell(["-s", "tensor_parallel", "--tp", "2", "--tp-plan", "net.0=column,net.2=row"]).strategy
    assert given is not None
    asked = TensorParallelStrategy(tensor_parallel_degree=2, plan={"net.0": "column", "net.2": "row"})
    assert given.options == asked.spec().options
    given = parse_cell(["-s", "hybrid", "--dp", "2", "--tp", "2", "--accumulate", "2"]).strategy
    assert given is not None
    assert (given.name, given.options) == (
        "hybrid_parallel",
        HybridParallelStrategy(2, 1, 1, 2, accumulate=2).spec().options,
    )


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (TensorParallelStrategy, {"tensor_parallel_degree": 0}, "a whole number of at least 1, not 0"),
        (TensorParallelStrategy, {"plan": {"net": "colum"}}, "Did you mean 'column'"),
        (TensorParallelStrategy, {"plan": ["net"]}, "plan maps names of layers to column, row, heads"),
        (HybridParallelStrategy, {"data_parallel_degree": 1.5}, "data_parallel_degree is a whole number"),
        (HybridParallelStrategy, {"pipeline_degree": 2}, "pipeline_degree=2: hybrid_parallel has no stages"),
        (
            HybridParallelStrategy,
            {"model_parallel_degree": 2},
            "model_parallel_degree=2: hybrid_parallel has no",
        ),
    ],
)
def test_what_cannot_be_is_refused(kind: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        kind(**given)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "-s data_parallel --tp 2",
            "--tp is no option of data_parallel, but of tensor_parallel, hybrid_parallel",
        ),
        ("-s tensor_parallel --dp 2", "--dp is no option of tensor_parallel, but of hybrid_parallel"),
        ("-s tensor_parallel --checkpoint runs", "--checkpoint is no option of tensor_parallel"),
        ("-s tensor_parallel --tp-plan net.0", "--tp-plan is written as net.0=column,net.2=row"),
        ("--tp 2", "--tp needs a strategy"),
    ],
)
def test_lines_that_cannot_be(line: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_cell(line.split())
