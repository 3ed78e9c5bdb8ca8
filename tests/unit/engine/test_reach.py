"""What code can reach in a namespace: every case runs real definitions in a dictionary like a notebook's."""

from __future__ import annotations

import functools
import sys
import types

import pytest

from openclaw_nb.engine.objects import reach
from openclaw_nb.engine.objects.reach import look_up, reachable


def notebook(source="", **names):
    """A namespace in which a cell with this source ran."""
    namespace = {"__name__": "__main__", **names}
    exec(source, namespace)
    return namespace


def paths_to(target, loads, namespace):
    return [path for path, value in reachable(loads, namespace).items() if value is target]


@pytest.fixture
def goal():
    return object()


def test_a_name_and_its_alias_are_both_known(goal):
    assert paths_to(goal, {"b", "a", "missing"}, notebook(a=goal, b=goal)) == ["a", "b"]


def test_plain_data_is_left_out():
    namespace = notebook(n=1, text="a", nothing=None, flag=True, xs=[1, 2])
    assert list(reachable(namespace.keys() - {"__name__", "__builtins__"}, namespace)) == ["xs"]


@pytest.mark.parametrize(
    "source",
    [
        "def f(): return goal",
        "def f():\n    def inner(): return goal\n    return inner",
        "def g(): return goal\ndef f(): return g()",
        "f = lambda: goal",
        "class F:\n    def __call__(self): return goal\nf = F()",
        "class F:\n    @property\n    def now(self): return goal\nf = F()",
        "class F:\n    @staticmethod\n    def now(): return goal\nf = F()",
        "class F:\n    @classmethod\n    def now(cls): return goal\nf = F",
        "class Base:\n    def fit(self): return goal\nclass F(Base): pass\nf = F()",
        "class F:\n    def __init__(self): goal\nf = F",
        "import functools\n@functools.lru_cache\ndef f(): return goal",
        "import contextlib\n@contextlib.contextmanager\ndef f(): yield goal",
        "import functools\ndef g(a): return goal\nf = functools.partial(g, 1)",
        "import functools\nclass F:\n    @functools.cached_property\n    def now(self): return goal\nf = F()",
        "def f(): return f() + goal",
    ],
)
def test_code_is_followed_to_the_globals_it_reads(goal, source):
    assert paths_to(goal, {"f"}, notebook(source, goal=goal)) == ["goal"]


@pytest.mark.parametrize(
    "source",
    [
        "def f(holder): return holder.goal",
        "def f():\n    goal = 1\n    return goal",
        "class F:\n    def __init__(self): goal\nf = F()",
        "def g(): return goal\ndef f(): return 1",
    ],
)
def test_attributes_locals_and_code_that_cannot_run_are_not_globals(goal, source):
    assert paths_to(goal, {"f"}, notebook(source, goal=goal)) == []


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("def make(model):\n    def train(): return model\n    return train\nf = make(goal)", "f.model"),
        ("def f(x, model=goal): return x", "f.model"),
        ("def f(x, *, model=goal): return x", "f.model"),
        ("def f(): pass\nf.model = goal", "f.model"),
        ("import functools\nf = functools.partial(print, goal)", "f.args.0"),
        ("import functools\nf = functools.partial(print, end=goal)", "f.keywords.end"),
        ("class F: pass\nf = F()\nf.model = goal", "f.model"),
        ("class F:\n    model = goal\nf = F()", "f.model"),
        ("class F:\n    __slots__ = ('model', 'empty')\nf = F()\nf.model = goal", "f.model"),
        ("class F: pass\nf = F()\nf._model = goal", "f._model"),
        ("import types\nf = types.SimpleNamespace(model=goal)", "f.model"),
        ("import argparse\nf = argparse.Namespace(model=goal)", "f.model"),
        ("import collections\nf = collections.namedtuple('F', 'model')(goal)", "f.model"),
        ("f = {'gen': goal}", "f.gen"),
        ("f = [1, (goal,)]", "f.1.0"),
    ],
)
def test_what_an_object_holds_has_a_path_that_can_be_looked_up(goal, source, path):
    namespace = notebook(source, goal=goal)
    assert paths_to(goal, {"f"}, namespace) == [path]
    assert look_up(path, reachable({"f"}, namespace), namespace) is goal


def test_a_bound_method_leads_to_its_object_by_the_name_it_has(goal):
    source = "class T:\n    def fit(self): return self.model\nt = T()\nt.model = goal\nf = t.fit"
    assert paths_to(goal, {"f"}, notebook(source, goal=goal)) == ["t.model"]
    nameless = notebook(source + "\ndel t", goal=goal)
    assert paths_to(goal, {"f"}, nameless) == ["f.__self__.model"]


def test_a_decorator_of_a_library_leads_to_the_users_function_and_not_to_library_globals(goal):
    source = "def g(): return goal\nf = decorate(g)"
    namespace = notebook(source, goal=goal, decorate=functools.singledispatch)
    found = reachable({"f"}, namespace)
    assert found["goal"] is goal
    # `functools.singledispatch` itself is a Python function that reads this global of its module.
    assert functools.update_wrapper not in reachable({"decorate"}, namespace).values()


def test_library_objects_and_modules_are_not_opened(goal):
    class Thing:
        pass

    Thing.__module__ = "json"
    thing = Thing()
    thing.model = goal
    assert paths_to(goal, {"thing", "json"}, notebook("import json", thing=thing)) == []


def test_a_users_own_file_is_opened(goal, tmp_path, monkeypatch):
    (tmp_path / "own_training.py").write_text(
        "model = None\nclass Trainer:\n    pass\ndef train():\n    return model\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    namespace = notebook("import own_training\nfrom own_training import train, Trainer\nt = Trainer()")
    sys.modules["own_training"].model = goal
    namespace["t"].held = goal
    assert paths_to(goal, {"train"}, namespace) == ["train.model"]
    assert paths_to(goal, {"t"}, namespace) == ["t.held"]
    assert "own_training.model" in paths_to(goal, {"own_training"}, namespace)
    monkeypatch.delitem(sys.modules, "own_training")


def test_depth_is_three_attributes(goal):
    source = (
        "class N: pass\n"
        "def chain(n):\n    top = N()\n    top.next = chain(n - 1) if n else goal\n    return top\n"
    )
    namespace = notebook(source, goal=goal)
    namespace["three"], namespace["four"] = namespace["chain"](2), namespace["chain"](3)
    assert paths_to(goal, {"three"}, namespace) == ["three.next.next.next"]
    assert paths_to(goal, {"four"}, namespace) == []


def test_an_object_met_far_away_first_is_still_followed_from_near(goal):
    class Node:
        def __init__(self, **held):
            vars(self).update(held)

    Node.__module__ = "__main__"
    near = Node(a=Node(b=Node(c=goal)))
    far = Node(x=Node(y=Node(z=near)), p=Node(q=Node()))
    namespace = notebook("def use(): return near", near=near, far=far)
    # `near` is met as `far.x.y.z`, too far to go on, and only then by the function that reads its name.
    far.p.q.use = namespace["use"]
    assert "near.a.b.c" in paths_to(goal, {"far"}, namespace)


def test_containers_longer_than_64_are_data(goal):
    fits, data = [goal] * 64, [goal] * 65
    namespace = notebook(fits=fits, data=data)
    assert len(paths_to(goal, {"fits"}, namespace)) == 64
    assert paths_to(goal, {"data"}, namespace) == []


def test_cycles_end(goal):
    source = "class N: pass\na = N()\nb = N()\na.b = b\nb.a = a\nb.goal = goal\nxs = []\nxs.append(xs)"
    namespace = notebook(source, goal=goal)
    assert paths_to(goal, {"a", "xs"}, namespace) == ["a.b.goal"]


def test_the_walk_is_bounded():
    wide = {f"k{i}": {f"j{j}": {f"i{n}": object() for n in range(20)} for j in range(20)} for i in range(20)}
    assert len(reachable({"wide"}, notebook(wide=wide))) == reach.MAX_OBJECTS


def test_nothing_of_the_users_runs():
    source = (
        "class Touchy:\n"
        "    def __getattr__(self, name): raise SystemExit(name)\n"
        "    @property\n"
        "    def model(self): raise SystemExit('property')\n"
        "    @property\n"
        "    def __class__(self): raise SystemExit('class')\n"
        "t = Touchy()"
    )
    namespace = notebook(source)
    assert reachable({"t"}, namespace)["t"] is namespace["t"]


def test_the_order_is_that_of_the_names():
    namespace = notebook(**{name: object() for name in "dbca"})
    assert list(reachable(["d", "b", "c", "a"], namespace)) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("path", ["nothing", "box.nothing", "xs.7", "box.model.nothing"])
def test_looking_up_what_is_not_there_is_a_lookup_error(path):
    namespace = notebook(box=types.SimpleNamespace(model=object()), xs=[1])
    with pytest.raises(LookupError):
        look_up(path, {}, namespace)
