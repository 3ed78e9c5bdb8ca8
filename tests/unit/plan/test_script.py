"""A script is cut where it trains, and what the pieces do together is what the script does."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from openclaw_nb.core.errors import UsageError
from openclaw_nb.plan.script.hoist import EXIT_NAME
from openclaw_nb.plan.script.segments import cut_script

# Stands for torch: what is cut is seen from the source alone, and run here to see that nothing else was changed.
TOOLS = """
log = []
class Model:
    def parameters(self): return [1]
    def train(self): log.append("mode")
class Loss:
    def __init__(self, at): self.at = at
    def backward(self): log.append(self.at)
class SGD:
    def __init__(self, parameters, lr): self.lr = lr
    def step(self): log.append(self.lr)
"""
FLAT = """
from tools import *
model = Model()
optimizer = SGD(model.parameters(), 0.5)
for step in range(2):
    Loss(step).backward()
    optimizer.step()
log.append("end")
"""
MAIN = """
import sys
from tools import *
RATE = 0.5

def one(model, optimizer, *, at):
    '''Trains
  a step.'''
    model.train()
    Loss(at).backward(); optimizer.step()

def main(rate=RATE, steps=3, *names, **others):
    model = Model(); optimizer = SGD(model.parameters(), rate)
    for step in range(steps):
        one(model,
    optimizer, at=step)
    if names:
        return names
    log.append(sorted(others))
    return 4

if __name__ == "__main__":
    sys.exit(main(0.25, colour=3))
"""
EARLY = """
from tools import *
def main():
    model = Model()
    optimizer = SGD(model.parameters(), 1)
    Loss(0).backward()
    if log:
        return 7
    log.append("never")
main()
"""


PUT_IN = ("lambda", "SystemExit", EXIT_NAME)  # in the place of parameters and of `return`


def run(sources: list[str]) -> tuple[list[Any], Any]:
    """Run pieces one after the other, in one namespace; return what was logged, and the exit code."""
    tools = types.ModuleType("tools")
    exec(TOOLS, tools.__dict__)
    namespace: dict[str, Any] = {"__name__": "__main__", EXIT_NAME: None}
    before = sys.modules.get("tools")
    sys.modules["tools"] = tools
    try:
        for source in sources:
            exec(compile(source, "script.py", "exec"), namespace)
    except SystemExit as end:
        return tools.log, end.code
    finally:
        del sys.modules["tools"]
        if before is not None:
            sys.modules["tools"] = before
    return tools.log, namespace[EXIT_NAME]


@pytest.mark.parametrize("source", [FLAT, MAIN, EARLY], ids=["flat", "main", "early"])
def test_the_pieces_do_what_the_script_does(source: str) -> None:
    segments = cut_script(source, "script.py")
    assert [each.trains for each in segments].count(True) == 1
    assert not any("SGD(" in each.source for each in segments if each.trains), "built in a piece above it"
    expected = run([source])
    log, code = run([each.source for each in segments])
    assert log == expected[0]
    assert code == expected[1]


def test_lines_keep_their_numbers() -> None:
    for source in (FLAT, MAIN):
        lines = source.split("\n")
        for segment in cut_script(source, "script.py"):
            for number, line in enumerate(segment.source.split("\n"), 1):
                if line.strip() and line != "#" and not any(word in line for word in PUT_IN):
                    assert line.strip() in lines[number - 1]


@pytest.mark.parametrize("source", ["print(1)\n", "import torch\nloss = torch.ones(1).backward\n"])
def test_what_trains_not_is_one_piece(source: str) -> None:
    assert [each.trains for each in cut_script(source, "script.py")] == [False]


BUILDS = "    model = Model()\n    optimizer = SGD(model.parameters(), 1)\n    Loss(0).backward()\n"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            f"@cache\ndef main():\n{BUILDS}main()\n",
            r"line 6: main\(\) builds .*main\(\) has a decorator \(line 1\)",
        ),
        (f"def main():\n{BUILDS}    yield 1\nmain()\n", r"generator or a coroutine \(line 5\)"),
        (
            f"def main():\n    if log:\n        return 1\n{BUILDS}main()\nprint(2)\n",
            r"returns early \(line 3\), and there is more",
        ),
        (
            f"model = 1\ndef other():\n    return model\ndef main():\n{BUILDS}main()\n",
            r"`model` is a variable of main\(\) and means something else outside",
        ),
        (
            "for _ in range(2):\n    model = Model()\n    SGD(model.parameters(), 1)\n    Loss(0).backward()\n",
            r"line 1: this statement builds the optimizer and trains with it",
        ),
    ],
)
def test_what_cannot_be_taken_apart_is_told_with_its_line(source: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cut_script(source, "script.py")


def test_what_is_no_python_says_so() -> None:
    with pytest.raises(SyntaxError):
        cut_script("x = (\n", "script.py")


def test_modules_beside_it_are_looked_into_and_others_are_not() -> None:
    beside = {"mine": "def fit(model):\n    Loss(0).backward()\n"}
    source = "import mine, theirs\nmine.fit(1)\n"
    assert [each.trains for each in cut_script(source, "script.py", beside)] == [False, True]
    assert [each.trains for each in cut_script(source.replace("mine.", "theirs."), "script.py", beside)] == [
        False
    ]
