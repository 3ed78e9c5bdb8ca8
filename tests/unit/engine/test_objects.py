"""Which objects a strategy cell uses: each case is a notebook (cells that ran) and the cell to look at."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from openclaw_nb.core.errors import RefusedError, UnknownNameError
from openclaw_nb.engine.objects.find import find_objects
from openclaw_nb.engine.objects.names import Build

SETUP = """
import copy, functools, types
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
    def forward(self, x):
        return self.head(self.body(x))
data = TensorDataset(torch.zeros(8, 3), torch.zeros(8))
"""
PLAIN = """
model = Net()
optimizer = SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=4)
criterion = nn.CrossEntropyLoss()
"""
LOOP = """
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
"""
GAN = """
gen, disc = Net(), nn.Linear(2, 1)
opt_g, opt_d = SGD(gen.parameters()), SGD(disc.parameters())
"""
GAN_LOOP = "disc(gen(x)).sum().backward(); opt_g.step(); opt_d.step()"


def notebook(*cells):
    namespace = {"__name__": "__main__"}
    exec(SETUP, namespace)
    for cell in cells:
        exec(cell, namespace)
    return namespace


def chosen(objects):
    kinds = (objects.models, objects.optimizers, objects.loaders, objects.schedulers, objects.scalers)
    return [sorted(kind) for kind in kinds]


def refusal(cell, namespace, **names):
    with pytest.raises(RefusedError) as caught:
        find_objects(cell, namespace, **names)
    return str(caught.value)


# ------------------------------------------------------------------------------------- found by type


def test_a_plain_loop():
    namespace = notebook(PLAIN)
    objects = find_objects(LOOP, namespace)
    assert chosen(objects) == [["model"], ["optimizer"], ["loader"], [], []]
    assert objects.model is namespace["model"]
    assert objects.optimizers["optimizer"] is namespace["optimizer"]
    assert objects.loaders["loader"] is namespace["loader"]
    assert (objects.ignored, objects.aliases, objects.built) == ((), {}, ())


def test_what_the_cell_does_not_use_is_not_found():
    other = "other = Net()\nother_opt = SGD(other.parameters())\nother_loader = DataLoader(data)"
    assert chosen(find_objects(LOOP, notebook(PLAIN, other))) == [
        ["model"],
        ["optimizer"],
        ["loader"],
        [],
        [],
    ]


def test_schedulers_and_scalers():
    more = (
        "step = StepLR(optimizer, 1)\nplateau = ReduceLROnPlateau(optimizer)\n"
        "scaler = torch.amp.GradScaler('cpu')\n"
    )
    cell = LOOP + "    scaler.update()\nstep.step()\nplateau.step(loss)"
    objects = find_objects(cell, notebook(PLAIN, more))
    assert chosen(objects)[3:] == [["plateau", "step"], ["scaler"]]


def test_training_and_validation_loaders():
    cell = LOOP + "for x, y in val_loader:\n    model(x)"
    objects = find_objects(cell, notebook(PLAIN, "val_loader = DataLoader(data)"))
    assert list(objects.loaders) == ["loader", "val_loader"]


def test_an_evaluation_cell_needs_no_optimizer():
    assert chosen(find_objects("model(x)", notebook(PLAIN))) == [["model"], [], [], [], []]


def test_two_optimizers_of_one_model():
    namespace = notebook("model = Net()\na = SGD(model.body.parameters())\nb = SGD(model.head.parameters())")
    assert chosen(find_objects("model(x); a.step(); b.step()", namespace))[:2] == [["model"], ["a", "b"]]


@pytest.mark.parametrize(
    ("cells", "cell", "model", "optimizer"),
    [
        (
            "def train():\n    for x, y in loader:\n        model(x); optimizer.step()",
            "train()",
            "model",
            "optimizer",
        ),
        ("def g():\n    model(1); optimizer.step()\ndef train(): g()", "train()", "model", "optimizer"),
        ("train = lambda: (model(1), optimizer.step())", "train()", "model", "optimizer"),
        (
            "@torch.compile(backend='eager')\ndef train():\n    model(1); optimizer.step()",
            "train()",
            "model",
            "optimizer",
        ),
        (
            "@torch.enable_grad()\ndef train():\n    model(1); optimizer.step()",
            "train()",
            "model",
            "optimizer",
        ),
        (
            "class Trainer:\n    def __init__(self, m, o): self.model, self.opt = m, o\n"
            "trainer = Trainer(model, optimizer)",
            "trainer.fit(loader)",
            "trainer.model",
            "trainer.opt",
        ),
        (
            "class Trainer:\n    def fit(self): self.model\ntrainer = Trainer()\n"
            "trainer.model, trainer.opt = model, optimizer\ntrain = trainer.fit",
            "train(loader)",
            "trainer.model",
            "trainer.opt",
        ),
        (
            "class Trainer:\n    def fit(self): model(1); optimizer.step()\ntrainer = Trainer()",
            "trainer.fit()",
            "model",
            "optimizer",
        ),
        (
            "def fit(m, o): pass\ntrain = functools.partial(fit, model, o=optimizer)",
            "train()",
            "train.args.0",
            "train.keywords.o",
        ),
        (
            "def make(net, opt):\n    def train(): net(1); opt.step()\n    return train\n"
            "train = make(model, optimizer)",
            "train()",
            "train.net",
            "train.opt",
        ),
        ("state = dict(net=model, opt=optimizer)", "state['net'](x)", "state.net", "state.opt"),
        ("state = types.SimpleNamespace(net=model, opt=optimizer)", "state.net(x)", "state.net", "state.opt"),
        ("model.optimizer = optimizer", "model.optimizer.step()", "model", "model.optimizer"),
    ],
)
def test_reached_through_code_and_containers(cells, cell, model, optimizer):
    namespace = notebook(PLAIN, cells)
    objects = find_objects(cell, namespace)
    assert objects.models == {model: namespace["model"]}
    assert objects.optimizers == {optimizer: namespace["optimizer"]}


# ----------------------------------------------------------------------------- which of several models


def test_the_whole_wins_over_its_parts():
    namespace = notebook(PLAIN, "head = model.head\nwhole = nn.Sequential(model)")
    assert list(find_objects("model(x); head(x)", namespace).models) == ["model"]
    assert list(find_objects("whole(x); model(x); head(x)", namespace).models) == ["whole"]


def test_one_object_under_two_names_is_one_model():
    objects = find_objects("model(x); net(x)", notebook(PLAIN, "net = model"))
    assert list(objects.models) == ["model"]
    assert objects.aliases == {"net": "model"}


def test_a_compiled_model_is_the_module_inside():
    namespace = notebook(PLAIN, "fast = torch.compile(model, backend='eager')")
    alone = find_objects("fast(x); optimizer.step()", namespace)
    assert alone.models == {"fast": namespace["model"]}
    both = find_objects("fast(x); model.train(); optimizer.step()", namespace)
    assert both.model is namespace["model"]
    assert set(both.models) | set(both.aliases) == {"fast", "model"}


def test_a_frozen_teacher_and_an_average_are_not_trained():
    more = "teacher = Net().requires_grad_(False)\nema = copy.deepcopy(model)"
    assert list(find_objects(LOOP + "    teacher(x); ema(x)", notebook(PLAIN, more)).models) == ["model"]


def test_without_an_optimizer_every_model_counts():
    message = refusal("model(x); teacher(x)", notebook(PLAIN, "teacher = Net()"))
    assert "`model` (Net, 26 parameters)" in message
    assert "`teacher` (Net, 26 parameters)" in message


def test_two_trained_models_are_a_question():
    message = refusal(GAN_LOOP, notebook(GAN))
    assert "`gen` (Net, 26 parameters)" in message
    assert "`disc` (Linear, 3 parameters)" in message
    assert "--model disc," in message
    assert "--model disc,gen" in message


def test_parts_of_a_module_list_are_models_of_their_own():
    namespace = notebook(
        "nets = nn.ModuleDict(dict(gen=Net(), disc=nn.Linear(2, 1)))\nopt = SGD(nets.parameters())"
    )
    message = refusal("nets['gen'](x); opt.step()", namespace)
    assert "`nets.gen`" in message
    assert "`nets.disc`" in message
    assert list(find_objects("opt.step(); nets", namespace, model="nets.gen,nets.disc").models) == [
        "nets.gen",
        "nets.disc",
    ]


# --------------------------------------------------------------------------------------- found by name


def test_several_named_models_keep_their_order_and_their_optimizers():
    namespace = notebook(GAN)
    objects = find_objects(GAN_LOOP, namespace, model="gen, disc")
    assert list(objects.models) == ["gen", "disc"]
    assert sorted(objects.optimizers) == ["opt_d", "opt_g"]
    with pytest.raises(RefusedError, match=r"one model.*`gen` .*`disc` .*--model NAME"):
        _ = objects.model


def test_the_optimizer_of_a_model_not_named_is_ignored_and_said():
    objects = find_objects(GAN_LOOP, notebook(GAN), model="gen")
    assert chosen(objects)[:2] == [["gen"], ["opt_g"]]
    assert objects.ignored == ("optimizer `opt_d` holds no parameters of `gen`",)


def test_the_named_optimizer_decides_which_model_is_trained():
    assert chosen(find_objects(GAN_LOOP, notebook(GAN), optimizer="opt_d"))[:2] == [["disc"], ["opt_d"]]


def test_a_dotted_name():
    namespace = notebook(PLAIN, "class T: pass\ntrainer = T()\ntrainer.model = model")
    objects = find_objects("trainer.fit(); optimizer.step()", namespace, model="trainer.model")
    assert objects.models == {"trainer.model": namespace["model"]}


def test_a_named_loader_is_the_only_one():
    cell = LOOP + "for x, y in val_loader:\n    model(x)"
    namespace = notebook(PLAIN, "val_loader = DataLoader(data)")
    assert list(find_objects(cell, namespace, loader="loader").loaders) == ["loader"]


def test_two_names_of_one_model_are_one():
    objects = find_objects("model(x); net(x)", notebook(PLAIN, "net = model"), model="net,model")
    assert list(objects.models) == ["net"]
    assert objects.aliases == {"model": "net"}


@pytest.mark.parametrize(
    ("names", "near", "candidates"),
    [
        ({"model": "modle"}, "'model'", "model"),
        ({"model": "model.tail"}, "", "model"),
        ({"optimizer": "optimiser"}, "'optimizer'", "optimizer"),
        ({"loader": "laoder"}, "'loader'", "loader"),
    ],
)
def test_a_name_that_does_not_exist(names, near, candidates):
    with pytest.raises(UnknownNameError) as caught:
        find_objects(LOOP, notebook(PLAIN), **names)
    assert repr(next(iter(names.values()))) in str(caught.value)
    assert near in str(caught.value)
    assert str(caught.value).split("Allowed:")[1] == f" {candidates}."


@pytest.mark.parametrize(
    ("names", "is_", "expected", "candidates"),
    [
        ({"model": "loader"}, "`loader` is a DataLoader", "a model (nn.Module)", "model"),
        ({"optimizer": "model"}, "`model` is a Net", "an Optimizer", "optimizer"),
        ({"loader": "data"}, "`data` is a TensorDataset", "a DataLoader", "loader"),
    ],
)
def test_a_name_of_something_else(names, is_, expected, candidates):
    message = refusal(LOOP, notebook(PLAIN), **names)
    assert is_ in message
    assert expected in message
    assert candidates in message.split("Candidates:")[1]


def test_a_named_optimizer_of_another_model():
    message = refusal(GAN_LOOP, notebook(GAN), model="gen", optimizer="opt_d")
    assert "`opt_d` holds no parameters of `gen`" in message
    assert "name the optimizer that does" in message


def test_a_model_and_its_part_cannot_both_be_named():
    message = refusal(LOOP, notebook(PLAIN), model="model,model.head")
    assert "`model.head` is part of another model" in message


def test_a_loss_cannot_be_named_as_model():
    assert "`criterion` (CrossEntropyLoss) has no parameters" in refusal(
        LOOP, notebook(PLAIN), model="criterion"
    )


# -------------------------------------------------------------------------------------------- no model


def test_no_model_says_what_was_read_and_what_to_do():
    message = refusal(LOOP, notebook("loader = DataLoader(data)"))
    assert "no nn.Module with parameters" in message
    assert "`loader`" in message
    assert "`criterion`, `model`, `optimizer`, not defined on this worker" in message
    assert "%%openclaw_parallel" in message
    assert "%openclaw push" in message


def test_a_model_of_which_the_optimizer_holds_nothing():
    message = refusal(LOOP, notebook(PLAIN, "model = Net()"))
    assert "`model` (Net, 26 parameters)" in message
    assert "`optimizer` holds none" in message
    assert "run the cell that builds the optimizer again" in message
    assert "--model model" in message


@pytest.mark.parametrize(
    ("cell", "call"),
    [
        ("model = Net().to('cpu')\nmodel(x)", "`model = Net(...)`"),
        ("import torch.nn as tnn\nnet = tnn.Linear(3, 2)\nnet(x)", "`net = tnn.Linear(...)`"),
        ("class Own(nn.Module): pass\nmodel = Own()\nmodel(x)", "`model = Own(...)`"),
        ("class A(Net): pass\nclass B(A): pass\nmodel = B()\nmodel(x)", "`model = B(...)`"),
        ("optim = torch.optim.SGD(net.parameters())", "`optim = torch.optim.SGD(...)`"),
    ],
)
def test_a_cell_that_builds_its_own_model(cell, call):
    message = refusal(cell, notebook())
    assert call in message
    assert "move that to its own cell" in message


def test_a_loss_built_in_the_cell_is_no_model():
    message = refusal("criterion = nn.CrossEntropyLoss()\nmodel(x)", notebook())
    assert "CrossEntropyLoss" not in message
    assert "Build the model in a cell that runs on the workers first" in message


# ----------------------------------------------------------------------------- what the cell binds anew


@pytest.mark.parametrize(
    "cell",
    [
        "model = Net()\noptimizer = SGD(model.parameters())" + LOOP,
        "def rebuild():\n    global model\n    model = Net()\nrebuild()" + LOOP,
        "for model in make_models():\n    model(x); optimizer.step()",
    ],
)
def test_a_model_that_the_cell_redefines(cell):
    message = refusal(cell, notebook(PLAIN))
    assert "redefines `model`" in message
    assert "build it in a cell of its own" in message


def test_an_optimizer_that_the_cell_redefines():
    message = refusal("optimizer = make(model)" + LOOP, notebook(PLAIN))
    assert "redefines `optimizer`" in message


def test_an_optimizer_that_the_cell_builds():
    message = refusal("opt = SGD(model.parameters())\nmodel(x)\nopt.step()", notebook(PLAIN))
    assert "`opt = SGD(...)`" in message
    assert "build it in a cell of its own" in message


def test_a_redefined_name_that_was_given():
    assert "redefines `loader`" in refusal("loader = make()" + LOOP, notebook(PLAIN), loader="loader")


@pytest.mark.parametrize("move", ["model = model.to('cpu')", "model = model.train()"])
def test_moving_a_model_is_not_redefining_it(move):
    assert list(find_objects(move + LOOP, notebook(PLAIN)).models) == ["model"]


def test_a_loop_variable_is_another_name_of_a_model_that_stays():
    cell = "for each in [model]:\n    each(x)\noptimizer.step()"
    objects = find_objects(cell, notebook(PLAIN, "each = model"))
    assert list(objects.models) == ["model"]


def test_running_a_cell_again_finds_the_same_objects():
    cell = "avg = copy.deepcopy(model)\nsplits = [loader]\nfor part in splits:\n    avg(x)"
    namespace = notebook(PLAIN)
    first = find_objects(cell, namespace)
    exec("avg, splits, part = copy.deepcopy(model), [loader], loader", namespace)
    assert chosen(find_objects(cell, namespace)) == chosen(first)
    assert list(first.loaders) == ["loader"]


def test_a_loader_and_a_scheduler_built_in_the_cell_are_reported():
    cell = "sched = StepLR(optimizer, 1)\nfor x, y in DataLoader(data):\n    model(x); optimizer.step()"
    objects = find_objects(cell, notebook(PLAIN, "sched = StepLR(optimizer, 1)"))
    assert objects.built == (Build("sched", "StepLR"), Build("", "DataLoader"))
    assert chosen(objects)[2:4] == [[], []]


def test_a_function_that_the_cell_defines_anew_is_read_as_it_will_be():
    namespace = notebook(
        PLAIN, "old = Net()\nold_opt = SGD(old.parameters())\ndef train():\n    old(1); old_opt.step()"
    )
    cell = "def train():\n    model(1); optimizer.step()\ntrain()"
    assert chosen(find_objects(cell, namespace))[:2] == [["model"], ["optimizer"]]


# ---------------------------------------------------------------------- models and optimizers refused


def test_an_optimizer_shared_with_another_model():
    more = "arc = nn.Linear(2, 5)\noptimizer = SGD([*model.parameters(), *arc.parameters()])"
    namespace = notebook(PLAIN, more)
    message = refusal(LOOP, namespace)
    assert "parameters of `model` and of `arc` (Linear, 15 parameters)" in message
    assert "--model model,arc" in message
    assert list(find_objects(LOOP, namespace, model="model,arc").models) == ["model", "arc"]


def test_an_optimizer_of_the_whole_for_a_named_part():
    message = refusal(LOOP, notebook(PLAIN), model="model.head")
    assert "parameters of `model.head` and of `model` (Net, 26 parameters)" in message
    assert "use --model model," in message


@pytest.mark.parametrize(
    ("more", "said"),
    [("temperature = nn.Parameter(torch.ones(1))", "`temperature`"), ("", "a tensor of shape (1,)")],
)
def test_an_optimizer_of_a_loose_parameter(more, said):
    loose = "temperature" if more else "nn.Parameter(torch.ones(1))"
    message = refusal(LOOP, notebook(PLAIN, f"{more}\noptimizer = SGD([*model.parameters(), {loose}])"))
    assert said in message
    assert "attribute of the model" in message


def test_lbfgs():
    message = refusal(LOOP, notebook(PLAIN, "optimizer = torch.optim.LBFGS(model.parameters())"))
    assert "`optimizer` is LBFGS" in message
    assert "another optimizer" in message


def test_a_scheduler_of_another_optimizer_is_ignored_and_said():
    namespace = notebook(PLAIN, "other = StepLR(SGD([torch.ones(1)]), 1)")
    objects = find_objects(LOOP + "other.step()", namespace)
    assert objects.schedulers == {}
    assert objects.ignored == ("scheduler `other` drives none of the cell's optimizers",)


@pytest.mark.parametrize(
    ("build", "said", "change"),
    [
        ("nn.Sequential(nn.LazyLinear(2))", "`model.0.weight` has no shape yet", "run one forward first"),
        (
            "nn.Sequential(nn.Embedding(5, 2, sparse=True))",
            "`model.0` is Embedding(sparse=True)",
            "sparse=False",
        ),
        ("nn.EmbeddingBag(5, 2, sparse=True)", "`model` is EmbeddingBag(sparse=True)", "sparse=False"),
        ("nn.DataParallel(Net())", "(DataParallel)", "pass the plain model (`model.module`)"),
        (
            "nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device='meta'))",
            "several devices (cpu, meta)",
            "`model.to(device)`",
        ),
    ],
)
def test_models_that_cannot_be_trained_in_parallel_as_they_are(build, said, change):
    message = refusal("model(x)", notebook(f"model = {build}"))
    assert said in message
    assert change in message


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_model_that_is_distributed_already():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_module

    mesh = init_device_mesh("cpu", (1,))
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    message = refusal("model(x)", {"model": wrapped})
    assert "DistributedDataParallel" in message
    assert "`model.module`" in message
    sharded = fully_shard(nn.Linear(2, 2), mesh=mesh)
    assert "(FSDPModule): pass the plain model;" in refusal("model(x)", {"model": sharded})
    spread = distribute_module(nn.Sequential(nn.Linear(2, 2)), mesh)
    assert "`model.0.weight` is sharded already (DTensor)" in refusal("model(x)", {"model": spread})


def test_finding_changes_nothing():
    namespace = notebook(PLAIN)
    before = {name: id(value) for name, value in namespace.items()}
    state = torch.random.get_rng_state()
    find_objects(LOOP, namespace)
    assert {name: id(value) for name, value in namespace.items()} == before
    assert torch.equal(torch.random.get_rng_state(), state)
