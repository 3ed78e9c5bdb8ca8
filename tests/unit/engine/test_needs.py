"""The names that a program must be given are those it reads before it has surely bound them."""

from __future__ import annotations

import ast

import pytest

from openclaw_nb.engine.reentry.needs import names_needed

PROGRAMS = {
    "a = b\nc = a": {"b"},
    "a += 1": {"a"},
    "a: int = b\nd: int": {"b"},
    "if p:\n    a = 1\nelse:\n    a = 2\nprint(a)": {"p"},
    "if p:\n    a = 1\nprint(a)": {"p", "a"},
    "for x in data:\n    y = x\nprint(y)": {"data", "y"},
    "for x in data:\n    bar = make(x)\n    for b in bar:\n        use(b)": {"data", "make", "use"},
    "while (n := f()):\n    m = n\nm, n": {"f", "m"},
    "try:\n    a = f()\nexcept E as e:\n    g(e)\nfinally:\n    h()\na": {"f", "E", "g", "h", "a"},
    "with open(p) as f:\n    f.read()": {"p"},
    "def f(x, y=d):\n    z = x\n    return z + y + w\nf(1)": {"d", "w"},
    "@wraps\nclass A(Base):\n    n = k\n    def m(self):\n        return q\nA()": {"wraps", "Base", "k", "q"},
    "[x + k for x in data if (last := x)]\nlast": {"data", "k"},
    "def f():\n    global n\n    n += 1\n    m = 0\n    m += 1": {"n"},
    "g = lambda x: x + k": {"k"},
    "import os.path as p, sys\nfrom a import b\np, sys, b": set(),
    "del a\na": {"a"},
    "match v:\n    case {'k': k, **rest}:\n        use(k, rest)\n    case [first, *others]:\n        first, others": {
        "v",
        "use",
    },
    "len(print)": set(),
    "print(id)\nid = 3": {"id"},
}


@pytest.mark.parametrize("source", PROGRAMS)
def test_names_needed(source: str) -> None:
    assert names_needed(ast.parse(source)) == PROGRAMS[source]
