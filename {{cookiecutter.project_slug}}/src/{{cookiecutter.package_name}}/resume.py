"""Resume a run from its newest checkpoint, after checking that the checkpoint belongs to it."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint.checkpointer import Checkpointer
from .checkpoint.tensors import require_same_identity, shapes_and_dtypes
from .config import Config
from .distributed import Group, World, parallel
from .errors import UserError
from .files import flatten, to_json
from .run.directory import OF_ONE_START
from .run.source_code import code_version

if TYPE_CHECKING:
    from .train import State

log = logging.getLogger(__name__)


def resume(state: "State", run_dir: Path, group: Group) -> Checkpointer:
    """Load the run's newest good checkpoint, or start a new run; sets `state.step`; collective.

    Raises UserError when the checkpoints are from another run, or ranks differ in data or settings.
    """
    config = state.config
    settings = to_json(config)
    identity = identity_of_run(state)
    # Ranks divide the validation data, too. Its size is not a part of the identity, since a resume
    # may change it.
    require_same_identity({**identity, "validation_samples": len(state.validation)}, group)
    # Only rank 0 writes a manifest.
    source = code_version() if group.is_first else {}
    facts = {
        "identity": identity,
        "source": source,
        "schedule": {**settings["optim"], "steps": config.train.steps},
        # Machines that share only an object store read the settings from there.
        "config": settings,
    }
    checkpointer = Checkpointer(
        run_dir,
        config.checkpoint,
        state.world,
        state.model,
        state.optimizer,
        facts,
        state.loader.position,
    )
    state.checkpointer = checkpointer
    state.step = checkpointer.restore(config.reset_optimizer, config.init_from)
    is_new = state.step == 0
    if is_new and config.init_from:
        log.info("weights: %s", load_first_weights(state, group))
    if config.checkpoint.frozen == "no":
        leave_out_base(state, checkpointer)
    if not is_new or config.init_from:
        parallel.compare_loaded(checkpointer.tensors().values(), state.world)
    state.loader.resume(state.step, checkpointer.restored, group)
    return checkpointer


def load_first_weights(state: "State", group: Group) -> str:
    """Load the weights of --init-from, with which a run begins; return a summary; collective."""
    from .checkpoint.transfer import load_weights

    config = state.config
    assert config.init_from, "the caller has looked"
    strict, new = config.init_strict, config.init_new
    return load_weights(config.init_from, state.model, None, group, strict, new=new)


def leave_out_base(state: "State", checkpointer: Checkpointer) -> None:
    """Leave frozen weights that are in --init-from out of checkpoints (--checkpoint.frozen no).

    Raises UserError, on every rank, if that could lose weights.
    """
    from .checkpoint.base import open_base

    config, group = state.config, checkpointer.group
    if checkpointer.restored and "base" not in checkpointer.restored:
        raise UserError(
            "--checkpoint.frozen no: this run has saved its frozen weights so far, and they may "
            "differ from those in --init-from. Leave the setting out, or start a new run: "
            "--name NEW"
        )
    # A parameter that was trained and then frozen stays in checkpoints.
    may_leave_out = checkpointer.was_left_out if checkpointer.restored else None
    base = open_base(
        config.init_from,
        state.model,
        config.init_new,
        checkpointer.run_dir,
        group,
        may_leave_out,
    )
    checkpointer.leave_out(base)
    left_out = sum(p.nbytes for name, p in state.model.named_parameters() if name in base.names)
    log.info(
        "checkpoints leave out %d frozen parameters (%.1f MB), which are in %s",
        len(base.names),
        left_out / 1e6,
        config.init_from,
    )


def identity_of_run(state: "State") -> dict[str, Any]:
    """Return the facts that a checkpoint must match for this run to resume from it."""
    return {
        "seed": state.config.train.seed,
        "global_batch_size": state.config.train.global_batch_size,
        "training_samples": state.loader.size,
        "data": state.spec.fingerprint,
        "parameters": shapes_and_dtypes(state.model),
    }


def require_same_settings(config: Config, world: World) -> None:
    """Raise UserError, on every rank, if a setting differs that all must share; collective.

    `setup` calls it first, since settings decide which collectives a rank calls.
    """
    values: dict[str, Any] = {}
    # Each machine may have the data in another folder.
    of_one_rank = OF_ONE_START | {"data.path"}
    for name, value in flatten(to_json(config)):
        if name not in of_one_rank:
            values[f"the setting {name}"] = value
    # The weights themselves may be in another folder, too: their contents are compared later.
    values["whether --init-from is given"] = config.init_from is not None
    values["--init-new"] = [*config.init_new]
    values["--init-strict"] = config.init_strict
    parallel.require_same(values, world)
