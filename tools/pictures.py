"""Takes the pictures of the documentation: a notebook in JupyterLab while a cell trains, light and dark."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from lab import Lab, wait_until

_IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
_CELLS = [
    "%load_ext openclaw_nb\n%openclaw start -n 2 --name digits",
    "%openclaw panel",
    """%%openclaw_parallel
import torch, torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
data = TensorDataset(images, torch.tensor(digits.target))
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(),
                      nn.Flatten(), nn.Linear(64 * 36, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(data, batch_size=64, shuffle=True)""",
    """%%openclaw_parallel --strategy data_parallel
for epoch in range(100):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")""",
    "%openclaw stop",
]


def take(name: str, *, dark: bool) -> None:
    """Write ``docs/images/<name>.png``."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(Path(folder), dark=dark) as lab,
        lab.page(width=1100, height=1500) as page,
    ):
        notebook = lab.open(page, _CELLS, "digits.ipynb")
        page.keyboard.press("Control+b")  # no file browser
        for cell in range(3):
            notebook.run(cell)
        notebook.start(3)
        wait_until(lambda: "epoch 8" in notebook.text(3), 120)
        time.sleep(1)
        page.locator(".jp-Notebook").screenshot(path=_IMAGES / f"{name}.png")
        notebook.output(1).get_by_role("button", name="Interrupt the cell").click()
        notebook.wait(3)
        notebook.run(4)


if __name__ == "__main__":
    take("notebook", dark=False)
    take("notebook-dark", dark=True)
