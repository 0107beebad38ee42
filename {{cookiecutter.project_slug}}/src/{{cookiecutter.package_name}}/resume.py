"""Resume a run from its newest checkpoint, after checking that this run has saved it."""

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
    """Load the run's newest good checkpoint, or start a new run; return the run's checkpointer.

    Collective. Sets `state.step` and `state.checkpointer`. Raises UserError, on every rank, if the
    checkpoint is from another run, or if the ranks differ in data, model or settings.
    """
    config = state.config
    settings = to_json(config)
    identity = identity_of_run(state)
    # The ranks also divide the validation data, so its size must be the same on all of them. The
    # size is not a part of the identity, since a resume may use other validation data.
    require_same_identity({**identity, "validation_samples": len(state.validation)}, group)
    # Only rank 0 needs the code's version, since only rank 0 writes manifests.
    source = code_version() if group.is_first else {}
    facts = {
        "identity": identity,
        "source": source,
        "schedule": {**settings["optim"], "steps": config.train.steps},
        # A resume on a machine without the run's config.json takes the settings from a manifest.
        "config": settings,
    }
    checkpointer = Checkpointer(
        run_dir,
        config.checkpoint,
        state.world,
        state.model,
        state.optimizer,
        facts,
        facts_now=state.loader.position,
    )
    state.checkpointer = checkpointer
    # Frozen weights that checkpoints leave out (--checkpoint.frozen no) are read from --init-from.
    state.step = checkpointer.restore(config.reset_optimizer, base=config.init_from)
    is_new = state.step == 0
    if is_new and config.init_from:
        summary = load_first_weights(state, group)
        log.info("weights: %s", summary)
    if config.checkpoint.frozen == "no":
        leave_out_base(state, checkpointer)
    # Ranks that hold the same tensors must have read the same bits.
    if not is_new or config.init_from:
        parallel.compare_loaded(checkpointer.tensors().values(), state.world)
    state.loader.resume(state.step, checkpointer.restored, group)
    return checkpointer


def load_first_weights(state: "State", group: Group) -> str:
    """Load the weights of --init-from, with which a run begins; return a summary; collective."""
    from .checkpoint.transfer import load_weights

    config = state.config
    assert config.init_from, "the caller has looked"
    return load_weights(
        config.init_from,
        state.model,
        # If the path is a run, take its newest checkpoint.
        step=None,
        group=group,
        strict=config.init_strict,
        new=config.init_new,
    )


def leave_out_base(state: "State", checkpointer: Checkpointer) -> None:
    """Let checkpoints leave out the frozen weights that --init-from has (--checkpoint.frozen no).

    Raises UserError, on every rank, if weights could be lost.
    """
    from .checkpoint.base import open_base

    config, group = state.config, checkpointer.group
    if checkpointer.restored and "base" not in checkpointer.restored:
        raise UserError(
            "--checkpoint.frozen no: this run has saved its frozen weights so far, and they may "
            "differ from those in --init-from. Leave the setting out, or start a new run: "
            "--name NEW"
        )
    # A new run may leave out any frozen parameter. A resumed run may leave out only those that its
    # checkpoint left out: a parameter that was trained before, and is frozen now, differs from
    # --init-from, so it must be saved.
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
    parameters = state.model.named_parameters()
    left_out_bytes = sum(p.nbytes for name, p in parameters if name in base.names)
    log.info(
        "checkpoints leave out %d frozen parameters (%.1f MB), which are in %s",
        len(base.names),
        left_out_bytes / 1e6,
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
    """Raise UserError, on every rank, if the ranks differ in a setting they must share; collective.

    `setup` calls this function first, since settings decide which collectives a rank calls.
    """
    values: dict[str, Any] = {}
    # Settings that may differ between ranks: the path of the data on each machine, and those that a
    # resume does not take from the saved run, such as the device.
    may_differ = OF_ONE_START | {"data.path"}
    for name, value in flatten(to_json(config)):
        if name not in may_differ:
            values[f"the setting {name}"] = value
    # The loop skipped the following settings, since `may_differ` has them. But only the path in
    # --init-from may differ: the contents of its files are compared when they are read.
    values["whether --init-from is given"] = config.init_from is not None
    values["--init-new"] = [*config.init_new]
    values["--init-strict"] = config.init_strict
    values["--reset-optimizer"] = config.reset_optimizer
    parallel.require_same(values, world)
