from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell

from openclaw_nb.notebook.source import CellSyntaxError, at_its_lines, checked, trains


@pytest.fixture(scope="module")
def shell() -> InteractiveShell:
    return InteractiveShell()


def test_lines_keep_their_numbers_through_ipython(shell: InteractiveShell) -> None:
    source = checked(shell, "-s data", "x = 1\n\n%time y = 2\nz = 3\n")
    assert source.split("\n")[3] == "%time y = 2"
    assert shell.transform_cell(source).split("\n")[4] == "z = 3"


def test_lines_of_magics_above_ours_count_too() -> None:
    assert at_its_lines("x = 1", "", 2).split("\n") == ["#", "# %%openclaw_parallel", "x = 1"]


def test_an_indented_cell_may_still_be_indented(shell: InteractiveShell) -> None:
    assert shell.transform_cell(checked(shell, "", "  x = 1\n  y = 2\n")).split("\n")[1:3] == [
        "x = 1",
        "y = 2",
    ]


def test_a_cell_magic_in_the_cell_stays_first(shell: InteractiveShell) -> None:
    assert checked(shell, "", "%%time\n1 + 1\n") == "%%time\n1 + 1\n"


@pytest.mark.parametrize("code", ["await f()", "async with a: pass", "!ls", "%matplotlib inline", "x?"])
def test_what_ipython_can_run(shell: InteractiveShell, code: str) -> None:
    assert code in checked(shell, "", code)


@pytest.mark.parametrize(
    "code", ["x = 1\ndef f(:\n  pass", "x = 1\nreturn 3", "x = 1\n   y = 2", "x = 1\n'a"]
)
def test_a_syntax_error_is_shown_at_its_line(shell: InteractiveShell, code: str) -> None:
    with pytest.raises(CellSyntaxError, match=r"\(line 3\)\. Nothing ran") as caught:
        checked(shell, "", code)
    text = "\n".join(vars(caught.value)["_render_traceback_"]())
    assert code.split("\n")[1].strip() in text


@pytest.mark.parametrize(
    ("cell", "is_one"),
    [
        ("for x in loader:\n    model(x).sum().backward()", True),
        ("%time loss.backward()\nif True:\n    scaler.scale(loss).backward()", True),
        ("def train():\n    loss.backward()", False),
        ("class Trainer:\n    def fit(self):\n        self.loss.backward()", False),
        ("backward = 1\nmodel.backward", False),
        ("for x in", False),
    ],
)
def test_which_cells_train(shell: InteractiveShell, cell: str, is_one: bool) -> None:
    assert trains(shell, cell) is is_one
