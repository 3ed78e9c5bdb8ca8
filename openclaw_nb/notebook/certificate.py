"""The certificate that a strategy gives the parameters of a single device, as a table.

    report of rank 0 ──> Certificate (passed or not, rows, where it parts) ──> text, HTML

Pure. Does not know how it was measured.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from openclaw_nb.core.text import aligned

_KINDS = {"loss": "loss", "gradient": "gradients", "state": "parameters and buffers"}
_SHOWN_ROWS = 10
_SAME_DATA = (
    "Have all ranks the same data? What is drawn at random needs a seed (torch.manual_seed) on each of them."
)


class Certificate:
    """How far a cell under a strategy is from the same cell on a single device.

    Attributes
    ----------
    passed : bool
        Whether all differences are within what rounding explains.
    rows : list of dict
        One a step: ``step``, and for ``loss``, ``gradient`` and ``state`` the largest relative difference, with
        ``gradient_name`` and ``state_name`` saying whose it is, and ``limits``.
    parted : dict or None
        Where they part first: ``step``, ``kind``, ``name``, ``difference``, ``limit``.
    """

    def __init__(self, report: Mapping[str, Any]) -> None:
        self.strategy: str = report["strategy"]
        self.num_ranks: int = report["num_ranks"]
        self.rows: list[dict[str, Any]] = list(report["rows"])
        self.parted: dict[str, Any] | None = report["parted"]
        self.reason: str = report["reason"]
        self.notes: list[str] = list(report["notes"])

    @property
    def passed(self) -> bool:
        """Whether all differences are within what rounding explains."""
        return self.parted is None

    @property
    def verdict(self) -> str:
        """What it comes to, in one sentence."""
        steps = f"{len(self.rows)} step" + ("s" if len(self.rows) != 1 else "")
        where = f"{self.strategy} on {self.num_ranks} workers"
        if self.parted is None:
            return f"PASSED: {steps} of {where} equal single-device training up to rounding."
        return f"FAILED: {where} is not single-device training: {_where(self.parted)}."

    @property
    def lines(self) -> list[str]:
        """What has to be said beside the table."""
        return [
            *([_SAME_DATA] if self.parted is not None and self.parted["step"] == 1 else []),
            f"Tolerance: {self.reason}.",
            *(f"Note: {note}." for note in self.notes),
        ]

    def _table(self) -> list[Sequence[str]]:
        shown = self.rows
        if len(shown) > _SHOWN_ROWS:
            shown = [*shown[: _SHOWN_ROWS // 2], *shown[-_SHOWN_ROWS // 2 :]]
        return [
            ("step", *(f"{words} differ by" for words in _KINDS.values()), "allowed", "most in"),
            *(_row(row) for row in shown),
        ]

    def __repr__(self) -> str:
        return "\n".join([self.verdict, aligned(self._table(), indent="  "), *self.lines])

    def _repr_html_(self) -> str:
        head, *rows = self._table()
        titles = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in head)
        body = "".join(
            "<tr>"
            + "".join(f'<td style="text-align: left">{html.escape(cell)}</td>' for cell in row)
            + "</tr>"
            for row in rows
        )
        mark = "✔" if self.passed else "✘"
        lines = "".join(f"<div>{html.escape(line)}</div>" for line in self.lines)
        return (
            f"<div><strong>{mark} {html.escape(self.verdict)}</strong></div>"
            f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>{lines}"
        )


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = [f"{row[kind]:.1e}" for kind in _KINDS]
    return (
        str(row["step"]),
        *sizes,
        f"{row['limits']['gradient']:.1e}",
        row["gradient_name"] or row["state_name"],
    )


def _where(parted: Mapping[str, Any]) -> str:
    if parted["kind"] == "ranks":
        return f"after step {parted['step']} {parted['name']} has other parameters or buffers than rank 0"
    what = {"loss": "the loss", "gradient": f"the gradient of {parted['name']}", "state": parted["name"]}
    return (
        f"at step {parted['step']} {what[parted['kind']]} differs by {parted['difference']:.2g}, relative to its size, "
        f"where {parted['limit']:.1e} is what rounding explains"
    )
