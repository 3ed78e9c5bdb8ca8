"""What `PipelineScheduler` refuses before anything runs, and the schedule that it draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from openclaw_nb import PipelineScheduler
from openclaw_nb.core.errors import NotStartedError, RefusedError, UnknownNameError, UsageError
from openclaw_nb.engine.scheduler import parts
from openclaw_nb.engine.scheduler.original import Original
from openclaw_nb.scheduler import _to_send


def test_the_seeds_snippet_runs() -> None:
    pipeline = PipelineScheduler(
        stages=["preprocess", "forward", "backward"], stage_devices=["GPU-0", "GPU-1", "GPU-2"]
    )
    assert pipeline.stages == ["preprocess", "forward", "backward"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stages": []}, "list of names"),
        ({"stages": ["a", "a"]}, "named twice"),
        ({"stages": ["a"], "schedule": "1b1f"}, "Did you mean '1f1b'"),
        ({"stages": ["a"], "microbatches": 0}, "at least one"),
        ({"stages": ["a"], "microbatches": True}, "whole number"),
        ({"stages": ["a", "b"], "stage_devices": ["x"]}, "1 devices for 2 stages"),
    ],
)
def test_what_cannot_be_is_said_at_once(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PipelineScheduler(**arguments)


def test_binding_tells_models_from_steps() -> None:
    pipeline = PipelineScheduler(["a", "b"])
    with pytest.raises(UsageError, match="without one: b"):
        pipeline.bind(a=print)
    with pytest.raises(UnknownNameError, match="stage 'c'"):
        pipeline.bind(a=print, c=print)
    with pytest.raises(UsageError, match="takes a model"):
        pipeline.bind(3)
    with pytest.raises(UsageError, match="bound to nothing"):
        pipeline.step(None, None, print)
    with pytest.raises(UsageError, match="run needs steps"):
        pipeline.bind(nn.Identity()).run([])
    with pytest.raises(UsageError, match="schedule and microbatches"):
        PipelineScheduler(["a"], microbatches=2).bind(a=print)
    with pytest.raises(NotStartedError):
        pipeline.bind(a=print, b=print).run([1])


def test_the_schedule_is_drawn_before_it_runs() -> None:
    devices = ["CPU-0", "CPU-1", "CPU-0", "CPU-1"]
    drawn = PipelineScheduler(list("abcd"), devices, schedule="interleaved").preview(4)
    assert len(drawn) == 2 * 4 * 4
    assert "bubble 11.1%" in repr(drawn)  # (p - 1) / (v m + p - 1)
    assert drawn._repr_html_().count("<rect") >= 32
    assert len(drawn.figure().data) == 4


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.act(self.first(x)))


def test_parts_that_are_not_the_model() -> None:
    with pytest.raises(RefusedError, match=r"share the parameter 'embed\.weight'"):
        parts.split(Tied(), [["embed", "body"], ["head"]])
    with pytest.raises(RefusedError, match=r"leave out 'second\.weight', 'second\.bias'"):
        parts.split(Skips(), [["first"]])
    with pytest.raises(RefusedError, match="named twice, or inside of another: 'first'"):
        parts.split(Skips(), [["first", "second"], ["first"]])
    with pytest.raises(UnknownNameError, match="Did you mean 'second'"):
        parts.split(Skips(), [["first"], ["secnd"]])
    model = Skips()
    with pytest.raises(RefusedError, match="Not named: 'act'"):
        parts.check_equal(model, parts.split(model, [["first"], ["second"]]), torch.randn(2, 4))
    with pytest.raises(RefusedError, match="does more than to call these parts"):
        parts.check_equal(model, parts.split(model, [["first", "act"], ["second"]]), torch.randn(2, 4))
    normal = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    parts.check_statistics(normal, 1)
    with pytest.raises(RefusedError, match="'1' \\(BatchNorm1d\\)"):
        parts.check_statistics(normal, 2)
    parts.check_statistics(normal.eval(), 2)


def test_checking_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).train()
    state, rng = {n: v.clone() for n, v in model.state_dict().items()}, torch.get_rng_state()
    parts.check_equal(
        model, parts.split(model, [["0", "1"], ["2"]]), torch.randn(3, 4, generator=torch.Generator())
    )
    assert all(module.training for module in model.modules())
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())


def test_sending_a_loader_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    loader = torch.utils.data.DataLoader(range(8), shuffle=True, generator=generator)  # type: ignore[arg-type]
    before = generator.get_state()
    assert _to_send(loader) is loader
    assert torch.equal(generator.get_state(), before)
    assert _to_send(iter([1, 2])) == [1, 2]
    assert _to_send(None) is None


def test_what_its_owner_sets_is_told_to_copies_once() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        nn.init.ones_(model[0].weight)
        return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    (model, optimizer), (copied, copied_optimizer) = build(), build()
    original = Original(model, optimizer)
    assert not original.changes()
    optimizer.param_groups[0]["lr"] = 0.25
    model.eval()
    model[0].weight.requires_grad_(False)
    model[1].running_mean.fill_(3.0)  # type: ignore[operator, union-attr]
    changes = original.changes()
    changes.apply(copied, copied_optimizer)
    assert copied_optimizer.param_groups[0]["lr"] == 0.25
    assert not any(module.training for module in copied.modules())
    assert [p.requires_grad for p in copied.parameters()] == [False, True, True, True]
    assert copied[1].running_mean.tolist() == [3.0, 3.0]  # type: ignore[index, union-attr, operator]
    original.note()
    assert not original.changes()
    original.train()
    copied_optimizer.param_groups[0]["momentum"] = 0.5  # as an optimizer may do in its steps
    optimizer.param_groups[0]["lr"] = 0.125
    original.take(copied.state_dict(), copied_optimizer.state_dict())
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.125, 0.5)
    assert original.changes().options == [{"lr": 0.125}]
    original.train()
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(UsageError, match="call collect"):
        original.changes()
