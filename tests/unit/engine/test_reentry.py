"""A cell entered at every head of every loop of it must end as the cell that ran from its beginning.

The namespace of the moment stands for what a newcomer is given; the program that goes on is run on a copy of it.
"""

from __future__ import annotations

import ast
import copy
import types
from typing import Any

import pytest

from openclaw_nb.core.errors import RefusedError
from openclaw_nb.engine.reentry.loops import LoopPlace, Loops, Pass
from openclaw_nb.engine.reentry.program import KEEPER, enter, loops_of, passes_on, path_to, watch

CELLS = {
    "two loops": """
log = []
for epoch in range(3):
    total = 0
    for x in data:
        total += x
        log.append((epoch, x))
    log.append(total)
done = len(log)
""",
    "enumerate": """
log = []
for i, x in enumerate(data, start=1):
    log.append(i * x)
""",
    "unpacking into a list": """
best = [0, 0]
for epoch in range(2):
    for best[0], (best[1], *rest) in [(1, (2, 3)), (4, (5,))]:
        best.append(rest)
""",
    "break": """
log = []
for epoch in range(4):
    for x in data:
        if x == 3:
            break
        log.append(x)
    else:
        log.append("never")
    if epoch == 2:
        break
    log.append("end of epoch")
else:
    log.append("never")
""",
    "continue and else": """
log = []
for epoch in range(3):
    for x in data:
        if x % 2:
            continue
        log.append(x)
    else:
        log.append("else")
    if epoch == 0:
        continue
    log.append("tail")
else:
    log.append("over")
""",
    "while around": """
log, step = [], 0
while step < 7:
    for x in data:
        step += 1
        log.append((step, x))
        if step >= 7:
            break
    log.append("pass")
else:
    log.append("while is over")
""",
    "while alone": """
step, log = 0, []
while True:
    step += 1
    if step == 3:
        continue
    if step > 5:
        break
    log.append(step)
""",
    "with around": """
log = []
with Context(log) as bar:
    for epoch in range(2):
        with Context(log):
            for x in data:
                log.append(x)
        log.append(epoch)
log.append("out")
""",
    "try around": """
log = []
try:
    for x in data:
        log.append(x)
        if x == 3:
            raise ValueError("planted")
except ValueError as error:
    log.append(str(error))
else:
    log.append("no")
finally:
    log.append("finally")
""",
    "in the else of a try": """
log = []
try:
    log.append("try")
except ValueError:
    pass
else:
    for x in data:
        log.append(x)
finally:
    for x in data:
        log.append(-x)
""",
    "if around": """
log, train = [], True
if train:
    log.append("train")
    for x in data:
        log.append(x)
    log.append("trained")
elif log:
    log.append("no")
else:
    for x in data:
        log.append("no")
log.append("end")
""",
    "match around": """
log, mode = [], "train"
match mode:
    case "train":
        for x in data:
            log.append(x)
    case _:
        log.append("no")
""",
    "functions": """
log = []
def one_epoch(epoch):
    for x in data:
        log.append((epoch, x))
    return len(log)
for epoch in range(3):
    seen = one_epoch(epoch)
""",
    "a class": """
class Trainer:
    def __init__(self):
        self.log = []
    def fit(self):
        for x in data:
            self.log.append(x)
trainer = Trainer()
for epoch in range(2):
    trainer.fit()
log = trainer.log
""",
    "loop in an else": """
log = []
for x in data:
    log.append(x)
else:
    for y in data:
        log.append(-y)
log.append("end")
""",
    "zip, islice, reversed": """
from itertools import islice
log = []
for a, b in zip(data, reversed(data)):
    for c in islice(data, 2):
        log.append(a * b + c)
""",
    "a loop that is empty at times": """
log = []
for epoch in range(3):
    for x in data[:epoch]:
        log.append(x)
    log.append(epoch)
""",
    "nested three deep with validation": """
log, best = [], 0
for fold in range(2):
    for epoch in range(2):
        for x in data:
            log.append((fold, epoch, x))
        score = 0
        for v in data:
            score += v
        best = max(best, score)
    log.append(best)
""",
    "walrus and comprehension": """
log = []
while (n := len(log)) < 6:
    log += [y for y in data if y > n][:1] or [0]
""",
    "names that are deleted": """
log = []
for x in data:
    y = x
    log.append(y)
    del y
del x
""",
}


class Context:
    """Leaves a trace of being left; entered once more by a newcomer, as documented."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *about: object) -> None:
        self.log.append("left")


class _Stop(BaseException):
    """The moment at which the newcomer is let in."""


def names() -> dict[str, Any]:
    return {"data": [1, 2, 3, 4, 5], "Context": Context}


def end_of(namespace: dict[str, Any]) -> dict[str, Any]:
    hidden = {"data", "Context", "__builtins__", KEEPER, "__openclaw_item__"}
    return {
        k: v
        for k, v in namespace.items()
        if k not in hidden and not callable(v) and k not in ("trainer", "bar")
    }


def run(tree: ast.Module, namespace: dict[str, Any], keeper: Loops) -> None:
    namespace[KEEPER] = keeper
    exec(compile(tree, "<cell>", "exec"), namespace)


def copied(namespace: dict[str, Any]) -> dict[str, Any]:
    """Copy values with their aliases; functions and classes of the cell find the copies."""
    plain = {k: v for k, v in namespace.items() if k not in (KEEPER, "__builtins__")}
    twins: dict[str, Any] = {}
    memo: dict[int, Any] = {}
    for value in plain.values():
        if isinstance(value, types.FunctionType):
            memo[id(value)] = types.FunctionType(value.__code__, twins, value.__name__)
        elif isinstance(value, type) and value.__name__ == "Trainer":
            methods = {n: m for n, m in vars(value).items() if n not in ("__dict__", "__weakref__")}
            memo[id(value)] = type(
                value.__name__, value.__bases__, {n: bound(m, twins) for n, m in methods.items()}
            )
    twins.update(copy.deepcopy(plain, memo))
    for twin in twins.values():
        if type(twin).__name__ == "Trainer" and type(twin) is not type:
            twin.__class__ = twins["Trainer"]
    return twins


def bound(value: Any, names: dict[str, Any]) -> Any:
    if isinstance(value, types.FunctionType):
        return types.FunctionType(value.__code__, names, value.__name__)
    return value


def stop_at(tree: ast.Module, head: int) -> tuple[dict[str, Any], int, dict[int, LoopPlace]] | None:
    """Run a cell until it is at a loop's head for the n-th time; return what a newcomer needs, None if it ended."""
    seen = 0

    def at_head(number: int, worked: bool) -> None:
        nonlocal seen
        seen += 1
        if seen == head + 1:
            found.append((number, copy.deepcopy(keeper.places(path_to(tree, number)))))
            found.append(copied(namespace))
            raise _Stop

    found: list[Any] = []
    keeper, namespace = Loops(at_head), names()
    try:
        run(watch(tree), namespace, keeper)
    except _Stop:
        (number, places), namespace = found
        return namespace, number, places
    return None


def enter_at(tree: ast.Module, namespace: dict[str, Any], number: int, places: dict[int, LoopPlace]) -> int:
    """Run the rest of a cell as a newcomer; return how many times it was told that it is in."""
    entered: list[int] = []
    keeper = Loops(lambda number, worked: None, lambda: entered.append(1))
    keeper.resume(places, number)
    run(enter(tree, number), namespace, keeper)
    return len(entered)


@pytest.mark.parametrize("source", CELLS.values(), ids=list(CELLS))
def test_entered_at_any_head_a_cell_ends_as_it_would_have(source: str) -> None:
    tree = ast.parse(source)
    expected, watched = names(), names()
    exec(compile(source, "<cell>", "exec"), expected)
    run(watch(tree), watched, Loops(lambda number, worked: None))
    assert end_of(watched) == end_of(expected)
    head = 0
    while (stopped := stop_at(tree, head)) is not None:
        namespace, number, places = stopped
        assert enter_at(tree, namespace, number, places) == 1, "it was told once that it is in"
        assert end_of(namespace) == end_of(expected), f"entered at head {head} of loop {number}"
        head += 1
    assert head >= len(loops_of(tree))


def test_a_loop_in_an_except_block_cannot_be_entered() -> None:
    tree = ast.parse("try:\n    1 / 0\nexcept ZeroDivisionError:\n    for x in data:\n        pass\n")
    with pytest.raises(RefusedError, match="except block"):
        enter(tree, 0)


def test_the_cells_own_tree_is_left_alone() -> None:
    tree = ast.parse(CELLS["while around"])
    before = ast.dump(tree)
    watch(tree)
    enter(tree, 1)
    assert ast.dump(tree) == before


def test_errors_keep_their_line() -> None:
    source = "for epoch in range(2):\n    for x in data:\n        y = x\n    z = missing\n"
    tree = ast.parse(source)
    for program, resumed in (
        (watch(tree), None),
        (enter(tree, 1), {0: LoopPlace(1, []), 1: LoopPlace(2, [])}),
    ):
        keeper = Loops(lambda number, worked: None)
        if resumed:
            keeper.resume(resumed, 1)
        with pytest.raises(NameError) as caught:
            run(program, names() | {"epoch": 0}, keeper)
        assert caught.traceback[-1].lineno == 3  # counted from 0


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("for x in loader", True),
        ("for i, x in enumerate(tqdm(loader))", True),
        ("for x in zip(loader, other.loader)", True),
        ("for x in itertools.islice(loader, 3)", True),
        ("for x in map(f, loader)", False),
        ("for x in (f(y) for y in loader)", False),
        ("for x in batches(loader)", False),
        ("for name, x in {**named.items()}.items()", True),
        ("for x in list(loader)", False),
        ("while loader", True),
    ],
)
def test_only_heads_that_pass_items_on_are_evaluated_once_more(head: str, expected: bool) -> None:
    (loop,) = loops_of(ast.parse(f"{head}:\n    pass"))
    assert passes_on(loop) is expected


def test_passes_belong_to_the_loop_whose_head_begins_them() -> None:
    keeper = Loops(lambda number, worked: None)

    def loader() -> Any:
        begun = Pass(b"state")
        keeper.begin_pass(begun)
        for item in range(3):
            begun.given += 1
            yield item

    seen = []
    for item in keeper.over(0, loader()):
        for _ in loader():  # in the body, by no loop that is watched
            pass
        seen.append((item, keeper.places([0])[0].passes[0].given, len(keeper.places([0])[0].passes)))
    assert seen == [(0, 1, 1), (1, 2, 1), (2, 3, 1)]


def test_a_newcomers_loaders_take_their_passes_up_in_order() -> None:
    keeper = Loops(lambda number, worked: None)
    taken = []

    def loader(name: str) -> Any:
        found = keeper.resumed_pass()
        taken.append((name, found.start if found else None))
        yield from range(5)

    from openclaw_nb.engine.reentry.loops import Pass

    keeper.resume({0: LoopPlace(2, [Pass(b"a", 2), Pass(b"b", 2)])}, 0)
    items = list(keeper.over(0, zip(loader("one"), loader("two"), strict=True)))
    assert items == [(2, 2), (3, 3), (4, 4)]
    assert taken == [("one", b"a"), ("two", b"b")]
    assert list(keeper.over(0, loader("next pass"))) == [0, 1, 2, 3, 4]
    assert taken[-1] == ("next pass", None)


def test_a_head_tells_whether_its_last_iteration_has_worked() -> None:
    """Ranks may come to a loop's first head, and to those of loops that do no work, without the others."""
    source = """
for epoch in range(2):
    for x in range(2):
        work()
    for line in report:
        print(line, end="")
    while (left := left - 1) % 2:
        pass
"""
    for report in ([], ["a", "b"]):
        told: list[int] = []
        done = [0]

        def work(done: list[int] = done) -> None:
            done[0] += 1

        def at_head(number: int, worked: bool, told: list[int] = told) -> None:
            if worked:
                told.append(number)

        keeper = Loops(at_head, work=lambda done=done: done[0])
        run(watch(ast.parse(source)), {"work": work, "report": report, "left": 4}, keeper)
        assert told == [1, 1, 0, 1, 1, 0], "after each batch, and after each epoch"
