"""One process, one device."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..device import pick_device
from ..errors import UserError
from .buffers import agree_on_buffers as agree_on_buffers
from .world import World, launched_ranks


@dataclass(frozen=True)
class ParallelConfig:
    """How the work is spread: not at all."""


def check_ranks(config: ParallelConfig, ranks: int) -> None:
    """UserError when the work cannot be spread over so many processes."""
    if ranks > 1:
        raise UserError(
            f"{ranks} processes cannot share the work, as this project was rendered for one "
            "(parallelism=single): start it with `python -m`, or render it with ddp or fsdp"
        )


def setup(config: ParallelConfig, device: str) -> World:
    """Take the one device; UserError when torchrun started several processes."""
    check_ranks(config, launched_ranks())
    return World(0, 1, pick_device(device))


def place(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    config: ParallelConfig,
    world: World,
    compute_dtype: torch.dtype,
) -> nn.Module:
    """Move the model to its device; returns the module to call."""
    return model.to(world.device)


def autocast(world: World, compute_dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Context of forward: matrix products in `compute_dtype`, weights and sums in float32."""
    if compute_dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(world.device.type, compute_dtype)


def accumulate(module: nn.Module, last: bool) -> contextlib.AbstractContextManager:
    """Context of one micro-batch's forward and backward; `last` of its step or not."""
    return contextlib.nullcontext()


def local(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of the tensors that this process holds."""
    return tensors


def total_norm(gradients: list[torch.Tensor], world: World) -> torch.Tensor:
    """2-norm of all gradients together, a scalar on the device."""
    # As torch.nn.utils.get_total_norm, which first sorts by device and dtype for twice the cost.
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def all_reduce(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """Sum over the ranks, in place."""
    return tensor


def teardown(world: World) -> None:
    """Nothing to leave."""


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor


def copies(tensor: torch.Tensor, rank: int, size: int) -> tuple[int, int]:
    """How many ranks hold the same part of a tensor as this one, and its place among them."""
    return size, rank
