"""What may be asked of model parallel and pipeline, and what workers are then told."""

from __future__ import annotations

from typing import Any

import pytest

from openclaw_nb.core.errors import UsageError
from openclaw_nb.strategies import ModelParallelStrategy, PipelineStrategy, canonical_strategy


def test_workers_are_told_what_was_asked() -> None:
    mapping = {"embed": "CPU-1", "head": "CPU-0"}
    strategy = ModelParallelStrategy(model_layers=("embed", "head"), device_mapping=mapping)
    assert strategy.devices == ["CPU-1", "CPU-0"]
    spec = strategy.spec(model="net")
    assert (spec.name, spec.model) == ("model_parallel", "net")
    assert spec.options == {"model_layers": ["embed", "head"], "device_mapping": mapping}
    piped = PipelineStrategy(stages=[("a",), ("b", "c")], microbatches=4).spec()
    assert piped.options == {"schedule": "gpipe", "microbatches": 4, "stages": [["a"], ["b", "c"]]}
    assert canonical_strategy("model") == "model_parallel"


@pytest.mark.parametrize(
    ("strategy", "given", "said"),
    [
        (ModelParallelStrategy, {"model_layers": "embed"}, "model_layers is a list of names of layers"),
        (ModelParallelStrategy, {"model_layers": []}, "model_layers is a list of names of layers"),
        (ModelParallelStrategy, {"device_mapping": ["CPU-0"]}, "device_mapping is a dictionary"),
        (ModelParallelStrategy, {"stages": [["a"]], "model_layers": ["a"]}, "leave model_layers"),
        (PipelineStrategy, {"stages": [["a"], []]}, "each of stages is a list"),
        (PipelineStrategy, {"stages": [["a"]], "model_layers": ["a"]}, "leave model_layers out"),
        (PipelineStrategy, {"microbatches": 0}, "microbatches is a whole number of at least 1, not 0"),
        (PipelineStrategy, {"microbatches": True}, "not True"),
        (PipelineStrategy, {"schedule": "gpip"}, "Did you mean 'gpipe'"),
    ],
)
def test_what_cannot_be_is_refused(strategy: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        strategy(**given)
