"""What is said after an out-of-memory error: what held the memory, and what would fit.

    error ──> is_out_of_memory? ──> take_usage ──> lines below the traceback ──> the frames let go of what they hold

Knows sizes and words; does not know how a cell is run.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import inspect
import sys
import traceback
from collections.abc import Iterable
from types import FrameType

from openclaw_nb.core.text import aligned, size_text
from openclaw_nb.plan.memory import Usage, Way, ways_out


def report_lines(usage: Usage, strategies: Iterable[str], who: str) -> list[str]:
    """Return the report, a line each.

    Parameters
    ----------
    usage : Usage
        What there was.
    strategies : iterable of str
        Which strategies there are.
    who : str
        Whose memory it is: ``"rank 0 (CPU-0)"``.
    """
    asked = "" if usage.requested is None else f"; {size_text(usage.requested)} more were asked for"
    lines = [f"Out of memory on {who}: {size_text(usage.used)} in use, {size_text(usage.free)} free{asked}."]
    if usage.layers_done:
        lines.append(
            f"The forward pass was at layer {usage.layers_done} of {usage.num_layers}: the step would have taken about "
            f"{size_text(usage.needed)}."
        )
    return [
        *lines,
        *_table(usage).splitlines(),
        *_advice(usage, ways_out(usage, list(strategies))),
    ]


def _table(usage: Usage) -> str:
    rows = [
        ("parameters", usage.parameters),
        ("gradients", usage.gradients),
        ("optimizer state", usage.optimizer),
        ("activations and temporary values (estimate)", usage.activations),
        ("other tensors and arrays, such as data", usage.tensors),
        ("Python, torch and the rest", usage.rest),
    ]
    return aligned([(what, size_text(size)) for what, size in rows], indent="  ")


def _advice(usage: Usage, ways: list[Way]) -> list[str]:
    """Say what would fit; each number is what the worker would hold then, as far as divisions tell."""
    fitting = [way for way in ways if way.fits]
    other = [way for way in ways if not way.fits]
    lines = []
    if fitting:
        lines.append(f"What would fit into {size_text(usage.limit)}, by estimate:")
        lines += aligned([(way.what, f"about {size_text(way.needed)}") for way in fitting], "  ").splitlines()
    else:
        lines.append(
            f"No single setting would fit into {size_text(usage.limit)}, by estimate; together they may, or a smaller "
            "batch or model, or more workers under sharded, model_parallel or pipeline:"
        )
    if other:
        told = ", ".join(f"{way.what} (about {size_text(way.needed)})" for way in other)
        lines.append(f"{'Not enough: ' if fitting else '  '}{told}")
    return [*lines, f"In the configuration: {', '.join(dict.fromkeys(way.key for way in fitting or other))}."]


def let_go(error: BaseException) -> None:
    """Free what the frames of an error hold, so that the next cell has the memory."""
    each: BaseException | None = error
    while each is not None:
        for frame, _ in traceback.walk_tb(each.__traceback__):
            _clear(frame)
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    for name in ("last_exc", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()
    with contextlib.suppress(
        OSError, AttributeError
    ):  # what the C library keeps for itself; glibc alone has this
        ctypes.CDLL(None).malloc_trim(0)


def _clear(frame: FrameType) -> None:
    """Drop a function's variables, and the copy of them that whoever drew the traceback has looked at."""
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # the cell itself: its variables stay
        return
    seen = frame.f_locals
    with contextlib.suppress(RuntimeError):  # it still runs
        frame.clear()
        if type(seen) is dict:  # before Python 3.13
            seen.clear()
