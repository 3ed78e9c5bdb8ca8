"""Verifies a strategy cell: runs the trial on the workers and returns its certificate.

Knows requests and runs; what is tried and compared is the workers' business.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace

from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.notebook.cellrun import CellRequest, run_cell
from openclaw_nb.notebook.certificate import Certificate
from openclaw_nb.notebook.live import TextSink


def verify(
    master: MasterNode, request: CellRequest, num_steps: int, notebook: Mapping[str, object]
) -> Certificate:
    """Try a cell both ways; what it shows is dropped.

    Parameters
    ----------
    master : MasterNode
        The cluster.
    request : CellRequest
        A strategy cell.
    num_steps : int
        How many steps are compared.
    notebook : mapping
        Variables of the notebook, for advice in errors.

    Raises
    ------
    OpenClawError
        When the cell cannot be tried, or fails.
    """
    trial = replace(request, verify_steps=num_steps)
    result = run_cell(master, trial, TextSink(io.StringIO()), tell=lambda text: None, notebook=notebook)
    return Certificate(result.values[0]["certificate"])
