"""The strategies that there are, by name.

Knows names, not what the strategies do.
"""

from __future__ import annotations

from openclaw_nb.core.errors import unknown_name

STRATEGIES = ("data_parallel",)
ALIASES = {"data": "data_parallel"}


def canonical_strategy(name: str) -> str:
    """Return the strategy's own name for a name or an alias of it.

    Raises
    ------
    UnknownNameError
        With the strategies that there are.
    """
    found = ALIASES.get(name, name)
    if found not in STRATEGIES:
        raise unknown_name("strategy", name, [*STRATEGIES, *ALIASES])
    return found
