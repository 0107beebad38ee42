"""How training samples are loaded: by their numbers."""

from functools import partial
from typing import Any

from .config import TrainConfig
from .distributed import Group, World
from .sampling import GlobalBatches, Loader, Share, check_dataset


def open_loader(dataset: Any, train: TrainConfig, plan: list[Share], world: World) -> Loader:
    """The loader of a training set; UserError unless its samples are counted and have numbers."""
    check_dataset(dataset, "training")
    own_order = getattr(dataset, "order", None)  # if it brings one
    order = (own_order or partial(GlobalBatches, len(dataset)))(train.global_batch_size, train.seed)
    return Loader(dataset, order, plan, train.loader_workers, pin=world.device.type == "cuda")


def place_of(loader: Loader, group: Group) -> dict[str, Any]:
    """What a manifest has to say of the loader: nothing, as it finds any step by its number."""
    return {}


def go_on(loader: Loader, step: int, manifest: dict[str, Any], group: Group) -> None:
    """Continue with global batch `step`."""
    loader.seek(step)
