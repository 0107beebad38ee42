"""Models trained under DDP and under FSDP: the same weights, or a refusal in one line.

Usage: twins.py DDP_PACKAGE FSDP_PACKAGE (by `drill`, on two ranks)
"""

import copy
import importlib
import random
import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.nn.utils.parametrizations as of_torch
from torch import nn

STEPS = 3
REPLACED = ".* is referenced outside its module"


class Plain(nn.Module):
    """Three layers, which the others change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.change()

    def change(self) -> None:
        """What this model has besides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.last(x)


class TiedInTheRoot(Plain):
    """Two names of one weight, neither in a block."""

    def change(self) -> None:
        self.back = nn.Linear(8, 16)
        self.back.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.back(x).mean()


class TiedAcrossBlocks(Plain):
    """Two blocks share a weight."""

    def change(self) -> None:
        self.layers[2].weight = self.layers[0].weight


class TiedToTheRoot(TiedInTheRoot):
    """A block shares a weight with what is in none."""

    def change(self) -> None:
        super().change()
        self.layers.append(nn.Linear(16, 16))

    def blocks(self) -> list[nn.Module]:
        return [self.back, *self.layers]


class ModuleInTwoBlocks(Plain):
    """Two blocks that contain one module."""

    def change(self) -> None:
        norm = nn.LayerNorm(16)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), norm) for _ in range(2)])


class SameBlockTwice(Plain):
    """As in ALBERT."""

    def change(self) -> None:
        self.layers = nn.ModuleList([nn.Linear(16, 16)] * 3)


class BlockCalledThrice(Plain):
    """A block whose weights several layers share, since forward calls it again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            for layer in self.layers:
                x = x + F.relu(layer(x))
        return self.last(x)


class Outputs(Plain):
    """A model with keyword arguments, which returns an object, as in transformers."""

    def forward(self, *, x: torch.Tensor) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(logits=super().forward(x))


class Nested(Plain):
    """A block and a part of it."""

    def change(self) -> None:
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))])

    def blocks(self) -> list[nn.Module]:
        return [self.layers[0], self.layers[0][0], self]


class GradientHook(Plain):
    """A mask of pruned weights."""

    def change(self) -> None:
        mask = (torch.arange(16 * 8).view(16, 8) % 2).float()
        self.first.weight.register_hook(lambda gradient: gradient * mask)


class Attribute(Plain):
    """As of Mamba: an optimizer reads it."""

    def change(self) -> None:
        self.first.weight.frozen_after = 1  # type: ignore[assignment]
        self.layers[0].bias.frozen_after = 0  # type: ignore[assignment]


class ParameterInList(Plain):
    """Which is then used."""

    def change(self) -> None:
        self.held = [self.first.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + F.linear(x, self.held[0])[:, :4]


class ParameterInObject(ParameterInList):
    """Where no walk over modules finds it."""

    def change(self) -> None:
        self.held = SimpleNamespace(weight=self.layers[1].weight)  # type: ignore[assignment]


class ParameterInFunction(ParameterInList):
    """Nor here."""

    def change(self) -> None:
        weight = self.layers[1].weight
        self.held = lambda: weight  # type: ignore[assignment]


class TensorInObject(Plain):
    """Made by build_model, and no parameter or buffer."""

    def change(self) -> None:
        self.held = SimpleNamespace(table=torch.rand(8) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.held.table)


class BufferOfParameter(Plain):
    """A buffer that is a view of a parameter."""

    def change(self) -> None:
        self.register_buffer("view", self.first.weight.detach()[:4], persistent=False)


class OneMemory(Plain):
    """Two parameters."""

    def change(self) -> None:
        self.layers[1].weight.data = self.layers[0].weight.data


class CutFromOne(Plain):
    """Parameters that are parts of one tensor, each its own."""

    def change(self) -> None:
        wide = torch.randn(16, 32) / 4
        self.layers[0].weight = nn.Parameter(wide[:, :16])
        self.layers[1].weight = nn.Parameter(wide[:, 16:])


class FilledByView(Plain):
    """Values through an expanded view."""

    def change(self) -> None:
        with torch.no_grad():
            self.first.weight[:1].expand_as(self.first.weight).zero_()


class OtherDraws(Plain):
    """Numbers of numpy and of Python; a second call would draw others."""

    def change(self) -> None:
        with torch.no_grad():
            self.first.weight.copy_(torch.from_numpy(np.random.randn(16, 8)))
            self.last.bias.fill_(random.random())


class SparseBuffer(Plain):
    """The adjacency matrix of a graph."""

    def change(self) -> None:
        self.register_buffer("graph", torch.eye(16).to_sparse(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.sparse.mm(self.graph, self.first(x).T).T[:, :4]


class Parametrized(Plain):
    """Weights that are computed."""

    def change(self) -> None:
        of_torch.weight_norm(self.first)
        of_torch.spectral_norm(self.layers[1])
        of_torch.orthogonal(self.layers[2])


class Recurrent(Plain):
    """A module that holds its parameters in a list, too, and keeps that up to date."""

    def change(self) -> None:
        self.recurrent = nn.LSTM(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.recurrent(x)[0])


class Odds(Plain):
    """Lists, dictionaries, scalars of numpy; what is frozen; what is no tensor."""

    def change(self) -> None:
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(16)) for _ in range(2)])
        self.more = nn.ParameterDict({"a": nn.Parameter(torch.rand(4))})
        self.first.weight.requires_grad_(False)
        self.none, self.size = None, np.float32(0.5)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * self.scales[0] + self.scales[1] * self.size
        return super().forward(x) + self.last(y) * self.more["a"] * self.count


class Quantized(nn.Module):
    """A frozen layer of int8, a scale in half precision, a trained adapter, as in QLoRA."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        values = torch.randn(width, width) / 4
        scale = values.abs().amax(1, keepdim=True) / 127
        values = (values / scale).round().to(torch.int8)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("scale", scale.half())
        self.down = nn.Parameter(torch.randn(4, width) / 4)
        self.up = nn.Parameter(torch.zeros(width, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frozen = F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))
        return frozen + F.linear(F.linear(x, self.down), self.up)


class Switch(nn.Module):
    """Two experts of one shape, of which each rank uses another."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[dist.get_rank()](x)


class Experts(Plain):
    """A mixture of experts, whose samples choose one."""

    def change(self) -> None:
        self.layers = nn.ModuleList([Switch()])


class PartCalled(Plain):
    """A model that has a method for its features, which the loss calls."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """The features."""
        return super().forward(x)


class FrozenInt8(Plain):
    """Quantized blocks, and a quantized layer in none."""

    def change(self) -> None:
        self.layers = nn.ModuleList([Quantized() for _ in range(3)])
        self.root = Quantized()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.root(self.first(x))[:, :4]


REFUSED = {
    TiedAcrossBlocks: r"would untie layers\.0\.weight and layers\.2\.weight",
    TiedToTheRoot: r"would untie (back|first)\.weight and (back|first)\.weight",
    ModuleInTwoBlocks: r"would untie layers\.\d\.1\.weight",
    GradientHook: r"would drop the gradient hook of first\.weight",
    ParameterInList: REPLACED,
    ParameterInObject: REPLACED,
    ParameterInFunction: REPLACED,
    BufferOfParameter: r"would separate first\.weight and view",
    PartCalled: r"call model\(\.\.\.\) instead of another method",
    OneMemory: r"would separate layers\.0\.weight and layers\.1\.weight",
}
SAME = (
    *(Plain, TiedInTheRoot, SameBlockTwice, BlockCalledThrice, Outputs, Nested, Attribute),
    *(TensorInObject, CutFromOne, FilledByView, OtherDraws, SparseBuffer, Parametrized, Recurrent),
    *(Odds, FrozenInt8, Experts),
)


def seed(rank: int) -> None:
    """Draw as train.py lets each rank draw: all alike."""
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """As compute_loss of a user, who knows the model."""
    inputs, targets = batch
    if isinstance(model, PartCalled):
        logits = model.encode(inputs)
    else:
        logits = model(x=inputs).logits if isinstance(model, Outputs) else model(inputs)
    return F.cross_entropy(logits, targets)


def trained(package: str, kind: type[Plain], world: Any) -> dict[str, torch.Tensor]:
    """The weights after some steps; UserError if the model is refused."""
    parallel: Any = importlib.import_module(f"{package}.distributed.parallel")
    seed(world.rank)
    model = parallel.build(kind, world)
    blocks = model.blocks() if hasattr(model, "blocks") else model.layers
    config = parallel.ParallelConfig()
    if kind is Experts and not parallel.SHARDED:
        config = parallel.ParallelConfig(find_unused_parameters=True)
    module = parallel.wrap(model, blocks, config, world, torch.float32)
    frozen = {name for name, p in model.named_parameters() if hasattr(p, "frozen_after")}
    assert frozen == ({"first.weight", "layers.0.bias"} if kind is Attribute else set()), frozen
    if hasattr(parallel, "count_unused_as_zeros"):  # as `accumulate` does
        parallel.count_unused_as_zeros(module, True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        given = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        targets = given[:, :4].argmax(1)
        mine = slice(world.rank * 3, world.rank * 3 + 3)
        state = SimpleNamespace(module=module, model=model, world=world)
        state.compute_dtype = torch.float32
        loss = parallel.forward(loss_of, state, (given[mine], targets[mine]))
        loss.backward()
        if not parallel.SHARDED:
            parallel.all_reduce(loss.detach(), world)
        optimizer.step()
        optimizer.zero_grad()
    weights = model.state_dict()
    return {name: parallel.full_tensor(weights[name]).clone() for name in weights}


def main(ddp: str, fsdp: str) -> None:
    """Train each model both ways."""
    distributed: Any = importlib.import_module(f"{fsdp}.distributed")
    errors: Any = importlib.import_module(f"{fsdp}.errors")
    world = distributed.join(
        importlib.import_module(f"{fsdp}.distributed.parallel").ParallelConfig(), "cpu"
    )
    for kind in SAME:
        one, other = trained(ddp, kind, world), trained(fsdp, kind, world)
        other = copy.deepcopy(other)
        assert one.keys() == other.keys(), kind
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, msg=f"{kind.__name__}: {name}")
    for kind, message in REFUSED.items():
        try:
            trained(fsdp, kind, world)
        except errors.UserError as error:
            assert re.search(message, str(error)), (kind, error)
        else:
            raise AssertionError(f"{kind.__name__} was not refused")
    if world.rank == 0:
        print(f"{len(SAME)} models are the same, {len(REFUSED)} are refused")
    distributed.leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
