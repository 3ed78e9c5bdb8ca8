"""What a cell reads, binds and builds, from its source."""

from __future__ import annotations

import pytest

from openclaw_nb.engine.objects.names import Build, cell_builds, cell_names


@pytest.mark.parametrize(
    ("source", "loads", "stores"),
    [
        ("y = model(x)", {"model", "x"}, {"y"}),
        ("for x, y in loader:\n    opt.step()", {"loader", "opt"}, {"x", "y"}),
        ("n += 1", {"n"}, {"n"}),
        ("trainer.model.weight = 3", {"trainer"}, set()),
        ("[model(x) for x in xs]", {"model", "xs"}, set()),
        ("with scope() as s:\n    s.run()", {"scope", "s"}, {"s"}),
        ("import torch.nn as nn", set(), {"nn"}),
        ("(m := build())", {"build"}, {"m"}),
        ("await client.fetch(model)", {"client", "model"}, set()),
        ("async for x in stream:\n    pass", {"stream"}, {"x"}),
    ],
)
def test_names_at_cell_level(source, loads, stores):
    names = cell_names(source)
    assert names.loads == loads
    assert names.stores == stores


def test_nested_functions_give_their_globals_and_not_their_locals():
    names = cell_names(
        "def train(data, lr=rate):\n"
        "    out = model(data)\n"
        "    def inner():\n"
        "        return out + bias\n"
        "    return inner\n"
        "step = lambda x: opt.step(x)\n"
    )
    assert names.loads == {"model", "bias", "rate", "opt"}
    assert names.stores == {"train", "step"}


def test_a_global_statement_binds_at_cell_level():
    names = cell_names("def rebuild():\n    global model\n    model = Net()\n")
    assert names.stores == {"rebuild", "model"}
    assert names.loads == {"Net"}


def test_class_bodies_read_but_what_they_bind_is_the_classes():
    names = cell_names(
        "class Net(Base):\n    width = default\n    def forward(self, x):\n        return scale * x\n"
    )
    assert names.stores == {"Net"}
    assert {"Base", "default", "scale"} <= names.loads


@pytest.mark.parametrize("method", ["to(device)", "cuda()", "train()", "requires_grad_(False)"])
def test_a_module_that_returns_itself_is_not_rebound(method):
    names = cell_names(f"model = model.{method}\nmodel(x)")
    assert "model" in names.loads
    assert names.stores == set()


@pytest.mark.parametrize(
    "source", ["model = other.to(device)", "model = model.clone()", "model = wrap(model)"]
)
def test_other_assignments_rebind(source):
    assert cell_names(source).stores == {"model"}


@pytest.mark.parametrize(
    ("source", "loads"),
    [
        ("%%time\nmodel(x)", {"model", "x"}),
        ("%%capture out\nmodel(x)", {"model", "x"}),
        ("%timeit -n 3 -r 2 model(x)", {"model", "x"}),
        ("result = %time model(x)", {"model", "x"}),
        ("%%time\n%time model(x)", {"model", "x"}),
        ("%%writefile train.py\nmodel(x)", set()),
        ("%%bash\nls", set()),
        ("!ls\nmodel(x)", {"model", "x"}),
        ("model?", set()),
    ],
)
def test_code_inside_magics_counts_and_text_does_not(source, loads):
    assert cell_names(source).loads - {"get_ipython"} == loads


def test_transformed_source_gives_the_same_names():
    assert cell_names("get_ipython().run_cell_magic('time', '', 'y = model(x)\\n')\n") == cell_names(
        "%%time\ny = model(x)\n"
    )


def test_a_magic_with_broken_code_is_left_to_the_magic():
    assert cell_names("%%time\nmodel(\n").loads == {"get_ipython"}


def test_a_cell_that_is_no_python_is_a_syntax_error():
    with pytest.raises(SyntaxError):
        cell_names("for x in:\n")


def test_builds_are_calls_with_their_target_outside_functions():
    builds = cell_builds(
        "model = Net(3).to(device)\n"
        "opt: object = torch.optim.SGD(model.parameters())\n"
        "for x in DataLoader(data):\n"
        "    out = nn.Softmax(dim=1)(x)\n"
        "def later():\n"
        "    hidden = Net()\n"
    )
    assert Build("model", "Net") in builds.calls
    assert Build("opt", "torch.optim.SGD") in builds.calls
    assert Build("", "DataLoader") in builds.calls
    assert Build("", "nn.Softmax") in builds.calls
    assert all(build.target != "hidden" for build in builds.calls)


def test_builds_know_imports_and_classes_of_the_cell():
    builds = cell_builds(
        "import torch.nn as nn\nimport torch.optim\nfrom torch.optim import SGD as Sgd\n"
        "class Net(nn.Module):\n    pass\n"
    )
    assert builds.imports == {"nn": "torch.nn", "torch": "torch", "Sgd": "torch.optim.SGD"}
    assert builds.bases == {"Net": ["nn.Module"]}
