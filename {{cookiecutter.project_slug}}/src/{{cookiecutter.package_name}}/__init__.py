"""A training project. README.md describes it. Run the package (`python -m`) for its commands."""

import contextlib
import logging
from pathlib import Path
from typing import Any


def load_trained(
    run_dir: Path | str,
    device: str = "auto",
    step: Any = None,
    weights: Any = "last",
    base: Path | None = None,
) -> tuple[Any, Any, Any]:
    """Return a run's trained model in evaluation mode, the spec of its data, and its settings.

    `step` is a number or "best" (by validation); the default is the newest good checkpoint.
    `weights` is "last" or "ema". If the checkpoint left out frozen weights (--checkpoint.frozen no)
    and their file has moved since, `base` is its new path. The model is loaded in this one process,
    whose random generators are seeded as at the start of a run. Raises UserError when there is no
    such run or step.
    """
    # Import these here, so that importing the package does not import torch. The module `device` is
    # renamed, since a parameter has this name.
    from . import device as devices
    from .checkpoint.transfer import load_weights
    from .config import load, spec_from_json
    from .data import build_datasets
    from .distributed import Group
    from .errors import UserError
    from .files import read_json
    from .model import build_model
    from .sampling import seed_start

    run_dir = Path(run_dir)
    if not (run_dir / "config.json").exists():
        names = sorted(path.parent.name for path in run_dir.parent.glob("*/config.json"))
        others = f"; there are {', '.join(names)}" if names else ""
        raise UserError(f"there is no run named {run_dir.name} in {run_dir.parent}/{others}")
    config = load(run_dir / "config.json")
    spec: Any = None
    # Runs of earlier releases have no spec.json.
    with contextlib.suppress(Exception):
        saved_spec = read_json(run_dir / "spec.json")
        # If the spec is not plain data, spec.json is {}.
        if saved_spec:
            spec = spec_from_json(saved_spec)
    if spec is None:
        # Build the datasets to get their spec.
        seed_start(config.train.seed)
        _, _, spec = build_datasets(config)
    model = build_model(config, spec)
    summary = load_weights(run_dir, model, step, Group(), strict=True, weights=weights, base=base)
    logging.getLogger(__name__).info("weights: %s", summary)
    # Seed here, so that a caller who now builds the datasets gets the random split of training.
    seed_start(config.train.seed)
    return model.to(devices.pick_device(device)).eval(), spec, config
