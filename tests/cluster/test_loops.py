"""A worker dies at each statement of loops as people write them: the result is right, or the refusal says why.

Each loop is a cell's source with the functions that it uses. A call ``here(k)`` is put before each of its statements
that are inside of a loop or a function; in one run a worker dies at one of them. A spare takes its place where it can.
The right values are those of the loop as it is written, on one device.
"""

from __future__ import annotations

import ast
import contextlib
import random
import re
from collections.abc import Iterator

import pytest

from openclaw_nb.cluster.master import MasterNode
from openclaw_nb.cluster.run import RunResult
from openclaw_nb.core.errors import UnknownNameError
from openclaw_nb.protocol.messages import StrategySpec

from .conftest import HANG_SECONDS, Lab, cpu_devices
from .test_data_parallel import SETUP, STATE
from .test_elastic import LOOPS as ELASTIC
from .test_elastic import MORE, await_spare, check, pace

pytestmark = pytest.mark.cluster

HERE = """
import os, signal, time
from collections import Counter
me, visits = globals().get("rank", 0), Counter()
def pace():
    pass
def here(place):
    if globals().get("dist") is None:
        return
    visits[place] += 1
    if place == {where} and visits[place] == {visit} and me == {victim}:
        os.kill(os.getpid(), signal.SIGKILL)
    if place == {where} and visits[place] >= {visit} and world_size != 2:
        time.sleep(0.05)  # so that who is to come in has the time for it
"""
FUNCTIONS = MORE[MORE.index("class Trainer") :]
OBJECTS = MORE[: MORE.index("class Trainer")]

LOOPS = {
    **ELASTIC,
    "a trainer, in one call": """
trainer = Trainer(model, optimizer)
trainer.fit(8)
""",
    "a main function": """
def main():
    for epoch in range(8):
        for x, y in loader:
            step(x, y)
        scheduler.step()
main()
""",
    "iter and next": """
for epoch in range(8):
    batches = iter(loader)
    for k in range(len(loader)):
        x, y = next(batches)
        step(x, y)
""",
    "closures": """
def trainer_of(model, optimizer):
    def train(x, y):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    return train
train = trainer_of(model, optimizer)
for epoch in range(8):
    for x, y in loader:
        train(x, y)
""",
    "running mean": """
history = []
for epoch in range(8):
    total, count = 0.0, 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
        count += len(x)
    history.append(total / max(count, 1))
""",
    "clipped gradients": """
for epoch in range(8):
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
""",
    "a count down": """
left = 8
while left:
    for x, y in loader:
        step(x, y)
    left -= 1
""",
    "some batches skipped": """
for epoch in range(8):
    for i, (x, y) in enumerate(loader):
        if i == 2:
            continue
        step(x, y)
""",
    "a pass cut short": """
for epoch in range(8):
    for i, (x, y) in enumerate(loader):
        step(x, y)
        if i == 3:
            break
""",
    "try in the batch": """
for epoch in range(8):
    for x, y in loader:
        try:
            step(x, y)
        except ValueError:
            raise
        finally:
            seen = len(x)
""",
    "patience": """
best, bad = float("inf"), 0
for epoch in range(12):
    for x, y in loader:
        step(x, y)
    value = round(evaluate(), 2)
    if value < best:
        best, bad = value, 0
    else:
        bad += 1
    if bad > 4:
        break
""",
    "a scaler that does nothing": """
scaler = torch.amp.GradScaler("cpu", enabled=False)
for epoch in range(8):
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    "enumerate of tqdm": """
for epoch in tqdm(range(8), disable=True):
    bar = tqdm(loader, disable=True)
    for i, (x, y) in enumerate(bar):
        bar.set_postfix(loss=step(x, y))
""",
    "a generator": """
def batches():
    for x, y in loader:
        yield x * 1.0, y
for epoch in range(8):
    for x, y in batches():
        step(x, y)
""",
    "a rate a batch": """
warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 10))
for epoch in range(8):
    for x, y in loader:
        step(x, y)
        warm.step()
""",
    "a penalty": """
for epoch in range(8):
    for x, y in loader:
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        loss = loss_fn(model(x), y) + 1e-3 * penalty
        loss.backward()
        optimizer.step()
""",
    "a batch as a pair": """
for epoch in range(8):
    for batch in loader:
        x, *rest = batch
        (y,) = rest
        step(x, y)
""",
    "gradients added up by the cell": """
for epoch in range(8):
    for i, (x, y) in enumerate(loader):
        (loss_fn(model(x), y) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
""",
}
# What a refusal may say, by loop; all other loops end with the right result wherever the worker dies.
REFUSED = {
    "gradients added up by the cell": "use --accumulate instead",
    "a pass cut short": "the loop was left before the batch could be repeated",
    "iter and next": "the loop was left before",
}


# Their training loops are in functions that the cell calls once: who is to come in waits for the cell's end.
WITHOUT_A_HEAD = ("a trainer, in one call", "a main function")


class Marks(ast.NodeTransformer):
    """Puts ``here(k)`` before each statement inside of loops and functions."""

    def __init__(self) -> None:
        self.count = 0

    def _marked(self, body: list[ast.stmt]) -> list[ast.stmt]:
        marked: list[ast.stmt] = []
        for statement in body:
            marked += [ast.parse(f"here({self.count})").body[0]]
            self.count += 1
            marked += [self.visit(statement)]
        return marked

    def _mark(self, node: ast.For | ast.While | ast.With | ast.FunctionDef) -> ast.AST:
        node.body = self._marked(node.body)
        return node

    visit_For = visit_While = visit_With = visit_FunctionDef = _mark

    def visit_Try(self, node: ast.Try) -> ast.AST:
        node.body, node.finalbody = self._marked(node.body), self._marked(node.finalbody)
        for handler in node.handlers:
            handler.body = self._marked(handler.body)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        node.body, node.orelse = self._marked(node.body), self._marked(node.orelse)
        return node


def marked(name: str) -> tuple[str, int]:
    """Return the loop with the functions that it uses, marked, and how many places it has."""
    loop, functions = LOOPS[name], ast.parse(FUNCTIONS).body
    used, text = [], loop
    for function in reversed(functions):  # a function is used by those that follow it
        assert isinstance(function, ast.FunctionDef | ast.ClassDef)
        if re.search(rf"(?<![.\w]){function.name}\(", text):
            used.insert(0, function)
            text += ast.unparse(function)
    marks = Marks()
    tree = ast.Module([*used, *ast.parse(loop).body], [])
    tree = ast.fix_missing_locations(ast.Module([marks.visit(node) for node in tree.body], []))
    return ast.unparse(tree), marks.count


@pytest.fixture(scope="module")
def spared() -> Iterator[Lab]:
    """Two workers and a spare."""
    master = MasterNode()
    master.start()
    master.start_workers(cpu_devices(2), spares=cpu_devices(3)[2:])
    master.enable_auto_recovery(max_retries=3)
    yield Lab(master)
    master.stop()


def strike(lab: Lab, name: str, place: int, chance: random.Random) -> RunResult:
    source, _ = marked(name)
    # A place outside of the batches is passed once an epoch, at least eight times; one in a branch perhaps less.
    strike = HERE.format(where=place, visit=chance.randint(2, 6), victim=chance.randint(0, 1))
    lab.good(SETUP + pace() + MORE, targets=[0, 1])
    run = lab.master.run_cell(strike + source + "\n" + STATE, strategy=StrategySpec(name="data_parallel"))
    result = run.wait(HANG_SECONDS)
    assert result is not None, f"{name}, at {place}: the cell hangs: {run.who_waits_where()}"
    return result


def trained(lab: Lab) -> list[int]:
    """Return the ranks that have taken part until the end; a new process that came too late has no variables."""
    found = []
    for rank in lab.master._members.all_ranks():
        with contextlib.suppress(UnknownNameError):
            lab.pull("state", rank)
            found.append(rank)
    assert found
    return found


@pytest.mark.soak
@pytest.mark.parametrize("name", LOOPS)
def test_a_worker_dies_at_each_statement(spared: Lab, name: str) -> None:
    chance = random.Random(name)
    num_refused = num_joined = num_deaths = 0
    num_places = marked(name)[1]
    for place in range(num_places):
        await_spare(spared)
        result = strike(spared, name, place, chance)
        num_deaths += bool(result.deaths or result.died)
        causes = [f for f in result.failures.values() if not f.consequence]
        if causes:
            assert name in REFUSED, (place, [f"{f.error_type}: {f.message}" for f in causes])
            assert all(f.error_type == "RefusedError" and REFUSED[name] in f.message for f in causes)
            num_refused += 1
            continue
        assert result.ok, (place, result.cause, result.notes)
        check(spared, LOOPS[name], ranks=trained(spared))
        num_joined += len(result.joined)
    # Some places are passed rarely, as in a branch or a handler, and a few never so often.
    assert num_deaths >= 0.7 * num_places
    assert num_joined or num_refused or name in WITHOUT_A_HEAD


def test_there_are_thirty_loops_and_they_are_marked() -> None:
    assert len(LOOPS) == 30
    source, count = marked("plain")
    assert count == source.count("here(") > 5
    assert "zero_grad" in source
