"""How many processes a stage can start on this machine, and why no more."""

import torch

from ..distributed.parallel import check_ranks
from ..errors import UserError
from .stage import StageConfig


def most_ranks(config: StageConfig, device: torch.device) -> tuple[int, str]:
    """The most processes that can share the work here; with 1, why. UserError for too many."""
    asked, batch = config.workflow.ranks, config.train.global_batch_size
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    most = asked or min(batch, {"cuda": gpus, "cpu": 2}.get(device.type, 1))
    if asked == 1:
        return 1, "one process was asked for"
    if batch == 1:
        return 1, "--train.global-batch-size 1 cannot be divided"
    if most == 1:
        return 1, "there is one device here; --device cpu shows everything except its speed"
    if device.type not in ("cpu", "cuda") or config.device == f"cuda:{device.index}":
        return 1, f"--device {config.device} is one device; give cpu, or cuda for all GPUs"
    if most > gpus > 0:
        raise UserError(f"--workflow.ranks {most}: there are {gpus} GPUs here")
    if most > batch:
        problem = f"is more than --train.global-batch-size {batch}, which they share"
        raise UserError(f"--workflow.ranks {most} {problem}: lower it, or raise the batch")
    reason = refusal(config, most)
    return (1, reason) if reason else (most, "")


def refusal(config: StageConfig, ranks: int) -> str:
    """Why so many processes cannot share the work; empty if they can."""
    try:
        check_ranks(config.parallel, ranks)
    except UserError as error:
        return str(error)
    return ""


def named(count: int, what: str) -> str:
    """As in 1 process, 2 processes."""
    plural = "es" if what.endswith("s") else "s"
    return f"{count} {what}" + ("" if count == 1 else plural)
