"""A model built without memory gets, part by part, the values that it would have been built with.

On two ranks, with FSDP: tests/cluster/test_hybrid.py.
"""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tests.conftest import Project, project_fixture

project = project_fixture("deferred", parallelism="fsdp")


@pytest.fixture
def small(project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, in which next to nothing is small enough to be made at once."""
    module = project.module("distributed.deferred")
    monkeypatch.setattr(module, "SMALL", 2)
    yield module


def held(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a model by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors have the same form and bits."""
    steps = [
        [step for step, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (ours, theirs)
    ]
    forms = [(t.shape, step, t.dtype) for t, step in zip((ours, theirs), steps, strict=True)]
    bits = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (ours, theirs)]
    return forms[0] == forms[1] and torch.equal(*bits)


def check(module: Any, make: Callable[[], nn.Module], deferred: int = 1) -> None:
    """Each tensor alone, and all together, are as if the model had been built at once."""
    torch.manual_seed(1)
    expected, state = make(), torch.get_rng_state()
    torch.manual_seed(1)
    with module.Deferred() as mode:
        model = make()
    mode.settle(model)
    assert torch.equal(torch.get_rng_state(), state), "what is drawn next differs"
    wanted, found = held(expected), held(model)
    assert wanted.keys() == found.keys()
    assert sum(isinstance(t, FakeTensor) for t in found.values()) >= deferred
    together = mode.values([*found.values()])
    for (name, tensor), values in zip(found.items(), together, strict=True):
        assert tensor.device.type == "cpu" and tensor.requires_grad == wanted[name].requires_grad
        for each in (values, *mode.values([tensor])):
            assert not isinstance(each, FakeTensor) and same(each, wanted[name]), name
    assert torch.equal(torch.get_rng_state(), state), "values are not drawn from the run's numbers"


class Sines(nn.Module):
    """Tables, as of positions and masks."""

    def __init__(self) -> None:
        super().__init__()
        places = torch.arange(0, 64).unsqueeze(1).float()
        turns = torch.exp(torch.arange(0, 16, 2).float() * (-math.log(1e4) / 16))
        table = torch.zeros(64, 16)
        table[:, 0::2], table[:, 1::2] = torch.sin(places * turns), torch.cos(places * turns)
        self.register_buffer("table", table)
        self.register_buffer("mask", torch.full((9, 9), float("-inf")).triu(1), persistent=False)
        self.register_buffer("row", table[3])
        self.register_buffer("wide", torch.rand(3, 1).expand(3, 4))


def drawn_twice() -> nn.Module:
    """The first draw is used, and then drawn over."""
    model = nn.Linear(9, 9)
    first = model.weight.clone()
    nn.init.normal_(model.weight, std=0.02)
    model.more = nn.Parameter(first.detach() + model.weight.detach(), requires_grad=False)
    return model


def truncated() -> nn.Module:
    """Draws by rejection, in which values are read; from a generator of its own, too."""
    model, own = nn.Linear(30, 30), torch.Generator().manual_seed(4)
    nn.init.trunc_normal_(model.weight, std=1.0)
    nn.init.trunc_normal_(model.bias, std=0.02, a=-0.01, b=0.01)
    model.other = nn.Parameter(torch.rand(20, 20, generator=own))
    nn.init.trunc_normal_(model.other, generator=own)
    model.last = nn.Parameter(torch.rand(5, generator=own))
    return model


def swapped() -> nn.Module:
    """Tensors whose data becomes another's."""
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
    nn.init.orthogonal_(model[0].weight)
    model[0].weight.data = model[0].weight.data.t()
    model[1].weight.data.normal_(0, 0.02)
    return model.bfloat16()


def from_numpy() -> nn.Module:
    """Values from outside of torch; small ones may be changed after they are used."""
    model, values = nn.Linear(9, 9), torch.from_numpy(np.random.default_rng(0).normal(size=(9, 9)))
    factor = torch.tensor(0.5)
    model.weight.data.copy_(values).mul_(factor)
    factor.zero_()
    return model


def in_double() -> nn.Module:
    """Made while another dtype is the default."""
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9, bias=False))
        model.register_buffer("parts", torch.arange(1, 50) / 7)
        return model
    finally:
        torch.set_default_dtype(torch.float32)


def deep() -> nn.Module:
    """A rate for each layer, read from a tensor, as vision transformers have it."""
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 6)]
    layers = [nn.Sequential(nn.Linear(9, 9), nn.Dropout(rate)) for rate in rates]
    assert layers[-1][1].p == pytest.approx(0.1)
    return nn.Sequential(*layers, copy.deepcopy(layers[0]))


def conjugated() -> nn.Module:
    """A view that is more than its place in memory."""
    model = nn.Module()
    table = torch.randn(9, 9, dtype=torch.complex64)
    model.register_buffer("table", torch.cat([table, table.conj()]))
    return model


def scaled_by_a_forward() -> nn.Module:
    """Weights that depend on what a recurrent layer gives, whose operator has unused results."""
    model = nn.LSTM(6, 6, 2)
    with torch.no_grad():
        output = model(torch.randn(4, 20, 6))[0]
    model.scale = nn.Parameter(torch.ones(9, 9) * output.std().round())
    return model


def scaled_by_gradients() -> nn.Module:
    """Weights that depend on a backward, in which some gradients are not asked for."""
    model = nn.Sequential(nn.LayerNorm(9), nn.Linear(9, 9, bias=False))
    model(torch.randn(6, 9)).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).sub_(parameter.grad.sign())
    return model.requires_grad_()


def by_lists() -> nn.Module:
    """An operator on a list of tensors, which gives nothing back."""
    model = nn.Linear(9, 9, bias=False)
    torch._foreach_mul_([model.weight.data], 2.0)
    return model


def read_again() -> nn.Module:
    """A value read before and after it changes."""
    model = nn.Linear(9, 9)
    before = model.weight[0, 0].item()
    model.weight.data.mul_(3)
    assert model.weight[0, 0].item() == pytest.approx(3 * before)
    return model


def copies_are_changed() -> nn.Module:
    """Layers copied from one, and then drawn anew."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    for layer in model.layers:
        layer.linear1.weight.data.normal_(0, 0.02)
    return model


def channels_last() -> nn.Module:
    """Convolutions in another order of memory."""
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16))
    nn.init.kaiming_normal_(model[0].weight, mode="fan_out")
    return model.to(memory_format=torch.channels_last)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tables": Sines,
    "drawn_twice": drawn_twice,
    "truncated": truncated,
    "swapped": swapped,
    "from_numpy": from_numpy,
    "in_double": in_double,
    "deep": deep,
    "channels_last": channels_last,
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
    "recurrent": lambda: nn.LSTM(6, 4, 2),
    "embedding": lambda: nn.Embedding(40, 8, padding_idx=3),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(9, 9)),
    "double": lambda: nn.Linear(9, 9).double(),
    "conjugated": conjugated,
    "wide": lambda: nn.Linear(30, 9).apply(lambda each: nn.init.orthogonal_(each.weight)),
    "scaled_by_a_forward": scaled_by_a_forward,
    "copies_are_changed": copies_are_changed,
    "scaled_by_gradients": scaled_by_gradients,
    "by_lists": by_lists,
    "read_again": read_again,
}


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_a_model_that_is_built_at_once(small: Any, name: str) -> None:
    check(small, MODELS[name])


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Bert"])
def test_models_of_transformers(project: Project, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, bos_token_id=1, eos_token_id=2, pad_token_id=3
    )
    make = lambda: transformers.AutoModel.from_config(config)  # noqa: E731
    check(project.module("distributed.deferred"), make, 10)


def test_the_projects_own_model(project: Project, small: Any) -> None:
    config = project.config()
    data, _, spec = project.module("train").build_datasets(config)
    own = project.module("model")
    check(small, lambda: own.build_model(config, spec))
    batch = data.__getitems__([0])  # `setup` counts its operations before the model is sharded
    with small.Deferred():
        model = own.build_model(config, spec)
    counted = [
        project.module("run.hardware").forward_flops(each, own.compute_loss, batch)
        for each in (own.build_model(config, spec), model)
    ]
    assert counted[0] == counted[1] > 0


STEPS: dict[str, Callable[[list[Tensor], int, int], Any]] = {
    "make": lambda held, i, j: held.append(torch.rand(4, 5)),
    "empty": lambda held, i, j: held.append(torch.empty(5, 4).normal_()),
    "copy": lambda held, i, j: held.append(held[i].clone()),
    "like": lambda held, i, j: held.append(torch.randn_like(held[i])),
    "view": lambda held, i, j: held.append(held[i].view(-1)[j:].view(1, -1)),
    "turn": lambda held, i, j: held.append(held[i].t()),
    "draw": lambda held, i, j: held[i].normal_(j, 2.0),
    "draw_half": lambda held, i, j: held[i][: len(held[i]) // 2].uniform_(-1, 1),
    "fill": lambda held, i, j: held[i].fill_(j),
    "scale": lambda held, i, j: held[i].mul_(0.5),
    "add": lambda held, i, j: held[i].add_(held[j % len(held)].sum()),
    "replace": lambda held, i, j: held[i].copy_(held[j % len(held)].mean()),
    "permute": lambda held, i, j: held.append(held[i][torch.randperm(len(held[i]))]),
    "first": lambda held, i, j: held[i].fill_(held[j % len(held)][0, 0].item()),
    "read": lambda held, i, j: held[i].mul_(1 + round(held[j % len(held)].sum().item(), 2)),
    "small": lambda held, i, j: held.append(torch.rand(1, 5)),
    "into_small": lambda held, i, j: held[i].view(-1)[:1].copy_(held[j % len(held)].sum()),
    "out": lambda held, i, j: torch.neg(held[i].clone(), out=held[i]),
    "multiply": lambda held, i, j: held.append(held[i] @ held[i].t()),
}


@given(steps=st.lists(st.tuples(st.sampled_from([*STEPS]), st.integers(0, 9), st.integers(0, 3))))
def test_values_follow_whatever_is_done(
    project: Project, steps: list[tuple[str, int, int]]
) -> None:
    module = project.module("distributed.deferred")

    def make() -> nn.Module:
        model, tensors = nn.Module(), [torch.randn(4, 5)]
        for name, i, j in steps:
            i %= len(tensors)
            if name != "view" or tensors[i].is_contiguous():
                STEPS[name](tensors, i, j)
        for place, tensor in enumerate(tensors):
            model.register_buffer(f"t{place}", tensor)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SMALL", 6)
        check(module, make)


def test_only_what_a_part_depends_on_is_done_again(project: Project) -> None:
    """And a first draw that is drawn over is not."""
    module = project.module("distributed.deferred")
    with module.Deferred() as mode:
        layers = [nn.Linear(99, 99, bias=False) for _ in range(4)]
        for layer in layers:
            nn.init.normal_(layer.weight)
    ran = list[str]()

    def run(call: Any, memory: Any, real: Any = module.Call.run) -> None:
        ran.append(call.operator.__name__)
        real(call, memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Call, "run", run)
        mode.values([layers[2].weight])
    assert ran == ["normal_.default"]


def tied_to_itself() -> nn.Module:
    """Weights copied onto themselves, as where two names are tied."""
    model = nn.Linear(99, 99)
    model.weight.data.copy_(model.weight.data)
    with torch.no_grad():
        model.weight.copy_(model.weight)
    return model


def brought_along() -> nn.Module:
    """Weights of a file, in ways that keep their memory."""
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(99, 99))).float()
    model = nn.ModuleList([nn.Embedding.from_pretrained(values), nn.Linear(99, 99)])
    model.load_state_dict({"0.weight": values, "1.weight": values + 1, "1.bias": values[0]})
    model.own = nn.Parameter(values[:9])
    return model


@pytest.mark.parametrize("make", [tied_to_itself, brought_along, from_numpy, deep, Sines])
def test_what_is_small_has_memory_beside_what_has_none(
    project: Project, make: Callable[[], nn.Module]
) -> None:
    check(project.module("distributed.deferred"), make, 0)


TABLES: list[Tensor] = []


def cached() -> nn.Module:
    """A table that is made once, and then used for each model."""
    TABLES[:] = TABLES or [torch.rand(99, 99)]
    model = nn.Linear(99, 99)
    model.register_buffer("table", TABLES[0])
    return model


def computed_from_cached() -> nn.Module:
    """The same, used while the model is built."""
    model = cached()
    model.weight.data.add_(model.table)
    del model.table
    return model


def data_set() -> nn.Module:
    """A large parameter with memory behind it."""
    model = nn.Linear(99, 99)
    model.weight.data = torch.from_numpy(np.ones((99, 99), np.float32))
    return model


def small_data_set() -> nn.Module:
    """A small one without memory behind it."""
    model = nn.Linear(9, 9)
    model.weight.data = torch.rand(99, 99)[:9, :9]
    return model


def read_into_one_buffer() -> nn.Module:
    """Layers that are filled one by one, from the same memory."""
    model, buffer = nn.ModuleList([nn.Linear(99, 99) for _ in range(2)]), np.empty((99, 99))
    for value, layer in enumerate(model):
        buffer.fill(value)
        layer.weight.data.copy_(torch.from_numpy(buffer))
    return model


def in_an_object() -> nn.Module:
    """A table that a list has."""
    model = nn.Linear(99, 99)
    model.tables = [torch.rand(99, 99)]
    return model


def changed_after_use() -> nn.Module:
    """Data with memory that torch itself changes."""
    model, values = nn.Linear(99, 99), torch.linspace(-1, 1, 99).repeat(99, 1)
    model.weight.data.copy_(values)
    values.sub_(5)
    return model


def part_changed_after_use() -> nn.Module:
    """A part of such data, by which another name is known."""
    model, values = nn.Linear(99, 99), torch.linspace(-1, 1, 99).repeat(99, 1)
    model.weight.data.copy_(values)
    values[0] = 5
    return model


def sized_by_a_forward() -> nn.Module:
    """A forward whose batch statistics stay in the model."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten())
    size = model(torch.zeros(2, 3, 40, 40)).shape[1]
    return model.append(nn.Linear(size, 10))


def caught() -> nn.Module:
    """Code that goes on in another way when something fails."""
    try:
        size = len(torch.ones(9999).multinomial(2))
    except RuntimeError:
        size = 3
    return nn.Linear(size, 1)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "cached": (cached, "of an earlier build"),
    "computed_from_cached": (computed_from_cached, "of an earlier build"),
    "data_set": (data_set, "was replaced"),
    "small_data_set": (small_data_set, "was replaced"),
    "read_into_one_buffer": (read_into_one_buffer, "uses data twice"),
    "changed_after_use": (changed_after_use, "changed after"),
    "part_changed_after_use": (part_changed_after_use, "changed after"),
    "sized_by_a_forward": (sized_by_a_forward, "batch_norm"),
    "caught": (caught, "cannot be done later"),
    "in_an_object": (in_an_object, "no parameter or buffer"),
    "shape_by_values": (lambda: nn.Linear(len(torch.ones(99, 99).nonzero()), 1), "nonzero"),
    "set": (lambda: nn.Linear(*torch.ones(99, 99).set_(torch.ones(9, 9)).shape), "set_"),
    "drawn_by_values": (lambda: nn.Linear(*torch.ones(9999).multinomial(2).shape, 1), "multinom"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_later_is_refused(project: Project, name: str) -> None:
    """So that `build` builds at once."""
    module, (make, message) = project.module("distributed.deferred"), REFUSED[name]
    TABLES.clear()
    if "cached" in name:
        with module.Deferred():  # of the model before
            cached()
    mode = module.Deferred()

    def build() -> None:
        with mode:
            model = make()
        mode.settle(model)

    with pytest.raises(Exception, match=message):
        build()
    TABLES.clear()


def rank(project: Project, number: int) -> Any:
    """One of two ranks."""
    return project.module("distributed").World(number, 2, torch.device("cpu"), True)


@pytest.mark.parametrize("registered", [True, False])
def test_a_build_keeps_nothing_of_one_that_failed(project: Project, registered: bool) -> None:
    """A cached tensor without memory would get no values, in silence."""
    parallel, errors = project.module("distributed").parallel, project.module("errors")

    def make() -> nn.Module:
        model = cached()
        if not registered:
            model.places = model.table
            del model.table
        model.shape = torch.ones(99, 99).nonzero().shape
        return model

    TABLES.clear()
    with pytest.raises(errors.UserError, match="build_model"):
        parallel.build(make, rank(project, 1))
    TABLES.clear()


def test_only_rank_0_keeps_what_values_come_from(project: Project) -> None:
    """As the weights of a file, which the others would hold, too."""
    parallel = project.module("distributed").parallel
    models = [parallel.build(brought_along, rank(project, number)) for number in (0, 1)]
    assert [len(parallel.DEFERRED[model].calls) > 0 for model in models] == [True, False]


def test_a_mistake_of_the_users_is_told_as_it_is(
    project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    parallel, errors = project.module("distributed").parallel, project.module("errors")

    def make() -> nn.Module:
        raise errors.UserError("layers must be even")

    with pytest.raises(errors.UserError, match="even"):
        parallel.build(make, rank(project, 0))
    assert "without memory" not in caplog.text


def test_the_second_build_begins_as_the_first_one(project: Project) -> None:
    """With the same random numbers of torch's, and the same default dtype."""
    parallel, drawn = project.module("distributed").parallel, list[tuple[float, Any]]()

    def make() -> nn.Module:
        drawn.append((torch.rand(1).item(), torch.get_default_dtype()))
        torch.set_default_dtype(torch.float64)
        return nn.Linear(len(torch.ones(99, 99).nonzero()), 1)

    try:
        parallel.build(make, rank(project, 1))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(drawn) == 2 and drawn[0] == drawn[1]


def test_many_values_are_read_at_once(project: Project) -> None:
    module, ran = project.module("distributed.deferred"), list[str]()

    def run(call: Any, memory: Any, real: Any = module.Call.run) -> None:
        ran.append(call.operator.__name__)
        real(call, memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Call, "run", run)
        with module.Deferred():
            order = torch.randperm(9999).tolist()
    assert sorted(order) == list(range(9999)) and len(ran) == 2  # drawn, and read
