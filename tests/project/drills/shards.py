"""Under FSDP only rank 0 builds the whole model; all have the values that one process draws.

Usage: shards.py PACKAGE (by `drill`, on two ranks)
"""

import importlib
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

MB = 2**20
LAYERS, ROWS, COLUMNS = 24, 8192, 1024  # of 32 MiB each


class Odd(nn.Module):
    """Whatever a model may hold: ties, buffers of all kinds, what is frozen."""

    def __init__(self, extra: Callable[[], Any] = int, width: int = 8) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 8, padding_idx=3), nn.Linear(8, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList([nn.Linear(8, width) for _ in range(3)])
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        turns = torch.polar(torch.ones(4, 2), torch.rand(4, 2))
        self.register_buffer("turns", turns, persistent=False)
        self.register_buffer("mask", torch.rand(5, 5) > 0.5, persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("wide", torch.rand(3, 1).expand(3, 4))
        self.recurrent = nn.LSTM(3, 4)
        self.register_buffer("row", self.wide[0])
        for block in self.blocks:
            block.register_buffer("table", self.count)
            nn.init.trunc_normal_(block.weight)
        self.extra = extra()


class Large(nn.Module):
    """768 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(LAYERS)])


def main(package: str) -> None:
    """Build models in each way, and compare them with what one process builds."""
    parallel: Any = importlib.import_module(f"{package}.distributed.parallel")
    distributed = importlib.import_module(f"{package}.distributed")
    world = distributed.join(parallel.ParallelConfig(), "cpu")
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(package).addHandler(handler)

    def sharded(make: Callable[[], Any], seed: int = world.rank) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = parallel.build(make, world)
        built_whole = not model.blocks[0].weight.is_meta
        parallel.wrap(model, model.blocks, parallel.ParallelConfig(), world, torch.float32)
        return model, built_whole

    for extra, complaint in (
        (int, None),
        (lambda: torch.ones(99, dtype=torch.int64).sum().item(), "item"),
        (lambda: torch.ones(99).nonzero(), "torch.nonzero()"),
        (
            lambda: {"each": [torch.ones(99)]},
            r"a tensor of shape [99] is not a parameter or buffer",
        ),
        (
            lambda: SimpleNamespace(table=torch.ones(98)),
            r"a tensor of shape [98] is not a parameter or buffer",
        ),
    ):
        warnings.clear()
        model, built_whole = sharded(lambda extra=extra: Odd(extra), 0)
        assert built_whole == (bool(complaint) or world.rank == 0)
        if world.rank == 0 and complaint:
            assert len(warnings) == 1 and complaint in warnings[0], warnings
        else:
            assert not warnings
        torch.manual_seed(0)  # as on rank 0
        expected = Odd(extra)
        for kind in ("named_parameters", "named_buffers"):
            wanted, held = (dict(getattr(each, kind)()) for each in (expected, model))
            assert wanted.keys() == held.keys()
            for name, tensor in wanted.items():
                full = parallel.full_tensor(held[name])
                assert full.dtype == tensor.dtype and torch.equal(full, tensor), name
                assert held[name].requires_grad == tensor.requires_grad, name
        assert model.head.weight is model.embedding.weight
        assert all(block.table is model.count for block in model.blocks)
        assert type(model.blocks[0].weight) is not nn.Parameter, "it is sharded"
        if isinstance(model.extra, torch.Tensor):  # no broadcast reaches it: it is drawn alike
            assert torch.equal(model.extra, expected.extra)

    model, _ = sharded(Odd, world.rank)  # where the ranks draw otherwise, rank 0's values count
    torch.manual_seed(0)
    assert torch.equal(parallel.full_tensor(model.frozen), Odd().frozen)

    torch.manual_seed(0)  # as where train.py puts the model into another one
    inner = parallel.build(Odd, world)
    outer = nn.Sequential(inner)
    parallel.wrap(outer, inner.blocks, parallel.ParallelConfig(), world, torch.float32)
    torch.manual_seed(0)
    assert torch.equal(parallel.full_tensor(inner.frozen), Odd().frozen)

    try:  # as after an edit on one machine only
        importlib.import_module(f"{package}.distributed").require_same_model(
            Odd(width=8 + world.rank), world
        )
        raise AssertionError("ranks with other models were not told")
    except importlib.import_module(f"{package}.errors").UserError as error:
        assert "the ranks have built different models" in str(error)

    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak from here on
    before = int(re.findall(r"VmHWM:\s+(\d+)", status.read_text())[0])
    large, _ = sharded(Large)
    grown = (int(re.findall(r"VmHWM:\s+(\d+)", status.read_text())[0]) - before) * 1024
    whole = sum(p.nbytes for p in large.parameters())
    unit = whole // LAYERS
    # Its half and some blocks; rank 0 has the whole model once, and its shards as they are made.
    expected = whole // 2 + 4 * unit + (whole if world.rank == 0 else 0)
    assert grown < expected, f"{grown / MB:.0f} MiB for half of {whole / MB:.0f}"
    if world.rank == 0:
        print("2 ranks have what one process builds")
    distributed.leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
