"""Whether a cell can go on when its workers go or come, decided from how it is run.

Pure: a strategy's description in, a reason out.
"""

from __future__ import annotations

import math

from openclaw_nb.core.errors import UsageError
from openclaw_nb.plan.checkpoints import seconds_word
from openclaw_nb.protocol.messages import StrategySpec


def why_not_elastic(strategy: StrategySpec | None) -> str:
    """Return why a cell needs the ranks that it began with; "" when it does not.

    In data parallel each rank has all that the others need to go on: parameters, and the same batches.
    """
    if strategy is None:
        return "without a strategy nothing tells which of its work is lost with a worker"
    if strategy.name != "data_parallel":
        return f"under {strategy.name} a worker has parts of the model that no other has"
    if strategy.split != "loader":
        return f"with --split {strategy.split} every rank draws the whole batch by itself, and cannot draw it again"
    if (mode := strategy.options.get("mode", "gradient")) != "gradient":
        return f"with --mode {mode} the workers' parameters differ between two averages"
    return ""


def check_interval(checkpoint_interval: object) -> str:
    """Return how often checkpoints are taken, as ``--checkpoint-every`` has it.

    Raises
    ------
    UsageError
        For what is no number of seconds above 0.
    """
    is_number = isinstance(checkpoint_interval, int | float) and not isinstance(checkpoint_interval, bool)
    if not is_number or not 0 < checkpoint_interval < math.inf:  # type: ignore[operator]
        raise UsageError(
            f"checkpoint_interval={checkpoint_interval!r}: give a number of seconds above 0, such as 300."
        )
    return seconds_word(checkpoint_interval)  # type: ignore[arg-type]
