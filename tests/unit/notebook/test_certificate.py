"""A certificate as a person reads it."""

from __future__ import annotations

from typing import Any

import pytest

from openclaw_nb.notebook.certificate import Certificate


def report(num_steps: int = 2, parted: dict[str, Any] | None = None) -> dict[str, Any]:
    limits = {"loss": 1e-5, "gradient": 1e-5, "state": 1e-5}
    row = {"loss": 1e-7, "gradient": 2e-6, "state": 3e-8, "loss_name": "loss", "gradient_name": "head.weight"}
    rows = [{"step": n + 1, "limits": limits, "state_name": "head.bias", **row} for n in range(num_steps)]
    return {
        "strategy": "data_parallel",
        "num_ranks": 2,
        "rows": rows,
        "parted": parted,
        "reason": "as rounding is",
        "notes": ["dropout was switched off"],
    }


def test_what_passed() -> None:
    certificate = Certificate(report())
    assert certificate.passed
    assert repr(certificate).splitlines() == [
        "PASSED: 2 steps of data_parallel on 2 workers equal single-device training up to rounding.",
        "  step  loss differ by  gradients differ by  parameters and buffers differ by  allowed  most in",
        "  1     1.0e-07         2.0e-06              3.0e-08                           1.0e-05  head.weight",
        "  2     1.0e-07         2.0e-06              3.0e-08                           1.0e-05  head.weight",
        "Tolerance: as rounding is.",
        "Note: dropout was switched off.",
    ]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gradient", "at step 1 the gradient of head.weight differs by 0.5, relative to its size"),
        ("loss", "at step 1 the loss differs by 0.5"),
        ("ranks", "after step 1 rank 1 has other parameters or buffers than rank 0"),
    ],
)
def test_what_failed_says_where(kind: str, said: str) -> None:
    name = "rank 1" if kind == "ranks" else "head.weight"
    parted = {"step": 1, "kind": kind, "name": name, "difference": 0.5, "limit": 1e-5}
    certificate = Certificate(report(parted=parted))
    assert not certificate.passed
    assert said in certificate.verdict
    assert "Have all ranks the same data?" in repr(certificate)


def test_many_steps_show_the_first_and_the_last() -> None:
    drawn = Certificate(report(100))._repr_html_()
    assert drawn.count("<tr>") == 11
    assert ">1</td>" in drawn
    assert ">100</td>" in drawn


def test_names_are_escaped() -> None:
    evil = report()
    evil["rows"][0]["gradient_name"] = evil["notes"][0] = "<script>"
    assert "<script>" not in Certificate(evil)._repr_html_()
