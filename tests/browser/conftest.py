"""JupyterLab with a notebook that trains on two workers for as long as it is let."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from lab import CHROMIUM, Lab, Notebook

CELLS = [
    "%load_ext openclaw_nb\n%openclaw start -n 2",
    "%openclaw panel",
    """%%openclaw_parallel
import time, torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(640, 16), torch.randint(4, (640,))), batch_size=16)
print("built")""",
    """%%openclaw_parallel -s data_parallel
for epoch in range(100):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
    print("epoch", epoch)""",
    "%%openclaw_parallel\nprint('steps kept', model.weight.isfinite().all().item())",
    "%openclaw stop",
]

Open = Callable[..., Notebook]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder; without a browser it is skipped, and says so."""
    missing = pytest.mark.skipif(
        not CHROMIUM.exists(), reason=f"Chromium is not at {CHROMIUM} (Debian: apt install chromium)"
    )
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for mark in (pytest.mark.cluster, pytest.mark.browser, pytest.mark.timeout(240), missing):
                item.add_marker(mark)


@pytest.fixture
def open_lab(tmp_path: Path) -> Iterator[Open]:
    """Open the notebook, with more cells, in JupyterLab; takes what `Lab` takes."""
    with ExitStack() as stack:

        def open_notebook(more: Sequence[str] = (), **options: Any) -> Notebook:
            lab = stack.enter_context(Lab(tmp_path, **options))
            return lab.open(stack.enter_context(lab.page()), [*CELLS, *more])

        yield open_notebook
