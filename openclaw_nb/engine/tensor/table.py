"""All rules, by the torch function's name."""

from __future__ import annotations

from openclaw_nb.engine.tensor import attention, rules

RULES = {**rules.RULES, **attention.RULES}
