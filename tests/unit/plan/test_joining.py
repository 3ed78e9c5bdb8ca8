"""Who may join, and how long who finds no master waits."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from openclaw_nb.plan.joining import Applicant, Software, Terms, pauses, why_not

SOFTWARE = Software(version="1.0", protocol="8", python="3.11", torch="2.13.0")
WORKER = Applicant(host="here", device_id="CPU-1", has_device=True, software=SOFTWARE)
TERMS = Terms(software=SOFTWARE, host="here", taken={"CPU-0": "worker-0"})


def test_one_that_fits_may_join() -> None:
    assert why_not(WORKER, TERMS) == ""
    assert why_not(replace(WORKER, device_id="CPU-0"), replace(TERMS, oversubscribe=True)) == ""


@pytest.mark.parametrize(
    ("worker", "terms", "reason"),
    [
        (replace(WORKER, device_id="CPU-0"), TERMS, "CPU-0 is in use by worker-0. Give"),
        (replace(WORKER, has_device=False), TERMS, "The host here has no device CPU-1"),
        (replace(WORKER, host="there"), TERMS, "on the host there, the master on here"),
        (WORKER, replace(TERMS, closed="The set has ended."), "The set has ended."),
        (
            replace(WORKER, software=replace(SOFTWARE, version="0.9")),
            TERMS,
            "openclaw_nb 0.9 and 1.0. Install",
        ),
        (replace(WORKER, software=replace(SOFTWARE, torch="")), TERMS, "torch missing and 2.13.0"),
        (
            replace(WORKER, software=replace(SOFTWARE, python="3.12", protocol="7")),
            TERMS,
            "protocol 7 and 8, Python 3.12 and 3.11",
        ),
    ],
)
def test_one_that_does_not_fit_hears_why(worker: Applicant, terms: Terms, reason: str) -> None:
    assert reason in why_not(worker, terms)


def test_pauses_grow_up_to_a_limit() -> None:
    assert list(islice(pauses(), 8)) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
