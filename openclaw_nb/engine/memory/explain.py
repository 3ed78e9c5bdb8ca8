"""The end of a cell that ran out of memory: its error, with a report below the traceback.

Knows how a cell ends and where its worker is; what was in the memory is found by `usage`.
"""

from __future__ import annotations

import os

from openclaw_nb.engine.cell import Outcome
from openclaw_nb.engine.memory.report import let_go, report_lines
from openclaw_nb.engine.memory.usage import Baseline, is_out_of_memory, take_usage
from openclaw_nb.protocol.messages import StrategySpec
from openclaw_nb.strategies import STRATEGIES

_SETTINGS = ("precision", "activation_checkpointing")


def explained(
    outcome: Outcome, spec: StrategySpec | None, baseline: Baseline, rank: int, world_size: int
) -> Outcome:
    """Return how a cell ended, with a report when the memory had run out.

    Parameters
    ----------
    outcome : Outcome
        How it ended.
    spec : StrategySpec or None
        Its strategy.
    baseline : Baseline
        What the process held before.
    rank, world_size : int
        This worker's place.
    """
    error = outcome.error
    if error is None or not is_out_of_memory(error):
        return outcome
    import torch

    in_use = [] if spec is None else [spec.name, *(name for name in _SETTINGS if name in spec.options)]
    device = os.environ.get("OPENCLAW_DEVICE", "")
    on_gpu = isinstance(error, torch.OutOfMemoryError)
    usage = take_usage(error, baseline, num_workers=world_size, in_use=in_use, on_gpu=on_gpu)
    let_go(error)
    if on_gpu:
        torch.cuda.empty_cache()
    who = f"rank {rank}" + f" ({device})" * bool(device)
    return Outcome(error, [*outcome.traceback, *report_lines(usage, STRATEGIES, who)])
