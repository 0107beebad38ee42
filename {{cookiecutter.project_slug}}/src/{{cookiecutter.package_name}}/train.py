"""The training loop, from top to bottom: `setup`, `resume`, `train_step`, `validate`, `run`."""

import contextlib
import logging
import math
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

if not __package__:
    raise SystemExit(f"error: start it as python -m {__file__.split('/')[-2]} train")

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from . import callbacks as own
from . import sampling
from .checkpoint.checkpointer import Checkpointer
from .checkpoint.tensors import require_same_identity, shapes_and_dtypes
from .compile import Compiling, checkpoint_activations, compile_model
from .config import Config, override, spec_to_json
from .data import build_datasets
from .device import annotated, move, set_up_torch
from .distributed import Group, World, join, leave, monitors, parallel
from .distributed.stop import Agreed, Stop
from .ema import averaged_weights, keep_average
from .errors import UserError
from .files import flatten, to_json, write_json
from .loss import LossSum, check_model, judge_step, loss_vector, means, require_type
from .model import blocks, build_model, compute_loss
from .optim import build_optimizer
from .run import hardware
from .run.bad_steps import BadSteps, RunningBuffers, step_unless, try_step
from .run.callback_runner import enter, methods_named
from .run.directory import OF_ONE_START, RunDirectory
from .run.journal import Journal, introduce, metric_names, validated_at, validation_figures
from .run.tracker import TRACKERS
from .sampling import STEP, Loader, Share, fetch, fixed_subset, seed_random, shares
from .schedule import set_schedule

log = logging.getLogger(__name__)
# The purpose of random numbers that validation data draws; sampling.py has the others.
VALIDATION_DRAWS = 6


def no_run_to_end(reason: str) -> None:
    """What `state.finish` does where steps are only measured."""


@dataclass
class State:
    """What a step needs. `module` is the callable: `model` itself, wrapped, or sharded."""

    config: Config
    world: World
    spec: Any
    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    plan: list[Share]
    loader: Loader
    validation: Any
    compute_dtype: torch.dtype
    peak_flops: float | None  # of the device, where it is known: for MFU
    forward_flops: int | None  # of one sample
    buffers: RunningBuffers
    step: int = 0  # completed optimizer steps
    checkpointer: Checkpointer | None = None
    # Since the last record, over all ranks, on the device:
    sums: Any = 0.0  # a tensor of loss, count, metrics (float32)
    metrics: tuple[str, ...] | None = None  # their names
    bad_steps: Tensor | int = 0  # skipped for a non-finite loss or gradient
    grad_norm: Tensor | float = 0.0  # of the last step
    finish: Callable[[str], None] = no_run_to_end  # for the reason that a callback gives


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    status: Literal["finished", "preempted", "regrouping", "already finished"]
    step: int
    validation: dict[str, float] = field(default_factory=dict)
    blocked_seconds: float = 0.0  # that training waited for saves


def setup(config: Config, world: World | None = None) -> State:
    """Build everything a step needs; `world` if the caller has joined it already."""
    world = world or join(config.parallel, config.device)
    settings, batch_size = config.train, config.train.global_batch_size
    if batch_size < world.size:
        problem = f"--train.global-batch-size {batch_size} is below the {world.size} ranks"
        raise UserError(f"{problem}: raise it or start fewer processes")
    sampling.seed_random(settings.seed)  # a split that is drawn is the same on all ranks
    dtype = settings.compute_dtype(world.device)
    set_up_torch(settings.seed, settings.deterministic, dtype)
    hardware.pin_to_numa_node(world.device)
    train, validation, spec = build_datasets(config)
    identity = getattr(spec, "fingerprint", None)
    require_type(identity, str, "`fingerprint` in the spec of build_datasets (data.py)")
    sampling.check_dataset(validation, "validation")
    if (settings.overfit or settings.epochs) and not hasattr(train, "__len__"):
        raise UserError("--train.epochs, --train.overfit: a stream has no number of samples")
    if settings.overfit:
        chosen = fixed_subset(len(train), settings.overfit * batch_size)
        train = Subset(train, chosen.tolist())  # type: ignore[arg-type]
    if settings.epochs:
        steps = math.ceil(settings.epochs * len(train) / batch_size)
        config = override(config, {"train.steps": steps, "train.epochs": 0.0})
    plan = shares(batch_size, settings.micro_batch_size, world.rank, world.size)
    loader = sampling.open_loader(train, settings, plan, world)

    model = check_model(parallel.build(lambda: build_model(config, spec), world))
    peak_flops = hardware.peak_flops(world.device)
    forward_flops = None
    if peak_flops is not None:
        one_sample = loader.source[0, Share(slice(0, 1), 1.0)]
        forward_flops = hardware.forward_flops(model, compute_loss, one_sample)
    # The order matters: the compiler must see what is recomputed, and DDP and FSDP must wrap what
    # is compiled, since their hooks would break the graph.
    if settings.activation_checkpointing:
        checkpoint_activations(blocks(model))
    compile_model(model, blocks(model), config.compile)
    module = parallel.wrap(model, blocks(model), config.parallel, world, dtype).train()
    optimizer = build_optimizer(config.optim, model)
    require_type(optimizer, torch.optim.Optimizer, "what build_optimizer (optim.py) returns")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError("LBFGS computes a loss several times a step: use another one (optim.py)")
    if config.optim.ema:
        keep_average(optimizer)
    return State(
        config=config,
        world=world,
        spec=spec,
        model=model,
        module=module,
        optimizer=optimizer,
        plan=plan,
        loader=loader,
        validation=validation,
        compute_dtype=dtype,
        peak_flops=peak_flops,
        forward_flops=forward_flops,
        buffers=RunningBuffers(model),
    )


def resume(state: State, run_dir: Path, group: Group) -> Checkpointer:
    """Continue from the run's newest good checkpoint, or begin; `state` gets its step.

    UserError when the checkpoints are of another run, or the ranks are not of the same one.
    """
    config = state.config
    identity = {  # what must be equal for a resume
        "seed": config.train.seed,
        "global_batch_size": config.train.global_batch_size,
        "training_samples": state.loader.size,
        "data": state.spec.fingerprint,
        "parameters": shapes_and_dtypes(state.model),
    }
    settings = to_json(config)
    of_one_rank = OF_ONE_START | {"data.path"}
    shared = {name: value for name, value in flatten(settings) if name not in of_one_rank}
    require_same_identity({**identity, "settings": shared}, group)

    facts = {
        "identity": identity,
        "schedule": {**settings["optim"], "steps": config.train.steps},
        "config": settings,  # for machines that have nothing in common but an object store
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
    state.step = checkpointer.restore(config.reset_optimizer)
    if state.step == 0 and config.init_from:
        from .checkpoint.transfer import load_weights

        report = load_weights(config.init_from, state.model, None, group, config.init_strict)
        log.info("weights: %s", report)
    if state.step > 0 or config.init_from:
        parallel.compare_loaded(checkpointer.tensors().values(), state.world)
    state.loader.resume(state.step, checkpointer.restored, group)
    return checkpointer


def train_step(state: State, batches: list[Any]) -> None:
    """One optimizer step on this rank's micro-batches of the global batch.

    The gradient is of (sum of losses) / (sum of counts) over all ranks, whatever their shares.
    Nothing here waits for the device, but what `agree_on_buffers` does at each 50th step.
    """
    config, world = state.config, state.world
    # Random numbers are a function of (seed, step, rank), so no generator's state is saved.
    seed_random(config.train.seed, STEP, state.step, world.rank, device=world.device)
    # Between steps a schedule-free optimizer leaves the average in the model, which is what is
    # validated and saved; what it trains follows from that average and its state.
    schedule_free: Any = state.optimizer if hasattr(state.optimizer, "eval") else None
    if schedule_free:
        if state.checkpointer:
            state.checkpointer.before_optimizer_step()
        state.model.state_dict()  # lets go what FSDP has gathered, the average
        schedule_free.train()
    state.buffers.keep()
    sums: Any = None
    for i, (share, batch) in enumerate(zip(state.plan, batches, strict=True)):
        with parallel.accumulate(state, last=i == len(batches) - 1):
            with annotated("forward"):
                loss = parallel.forward(compute_loss, state, move(batch, world.device))
                require_type(loss, LossSum, "what compute_loss (model.py) returns")
                if state.metrics is None:
                    names = {"metrics of compute_loss (model.py)": [*loss.metrics]}
                    parallel.require_same(names, world)
                state.metrics = metric_names(loss, state.metrics)
            with annotated("backward"):
                total = loss.total
                sums_of_batch = loss_vector(loss)
                if share.weight != 1:
                    # A rank without samples left takes one at weight 0, since all ranks must take
                    # part in the collectives of backward.
                    total = total * share.weight
                    sums_of_batch = sums_of_batch * share.weight
                total.backward()
        sums = sums_of_batch if sums is None else sums + sums_of_batch
    parallel.agree_on_buffers(state.buffers, state.step, world)
    parallel.all_reduce(sums, world)

    parameters = (p for group in state.optimizer.param_groups for p in group["params"])
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = parallel.total_norm(gradients, world)
    # One factor turns sums into means and clips: gradients are multiplied once.
    scale, norm, bad = judge_step(sums, norm, world.size, config.optim.clip)
    torch._foreach_mul_([parallel.local_part(g) for g in gradients], scale)
    set_schedule(state.optimizer, config, state.step)
    if state.checkpointer:
        # A save may still be copying these weights: the optimizer must not change them under it.
        state.checkpointer.before_optimizer_step()
    with annotated("optimizer"):
        step_unless(bad, state.optimizer)
        if schedule_free:
            schedule_free.eval()
    state.buffers.put_back(bad)
    state.optimizer.zero_grad(set_to_none=True)

    # Accumulated on the device and read at log steps only. `bad` is a tensor on a GPU.
    if bad is not False:
        sums = sums.masked_fill(torch.as_tensor(bad), 0)
    state.sums = state.sums + sums
    state.bad_steps = state.bad_steps + bad
    state.grad_norm = norm
    state.step += 1


def never() -> bool:
    """What `validate` asks where nothing can stop it."""
    return False


@torch.no_grad()
def validate(state: State, stopped: Callable[[], object] = never) -> dict[str, float]:
    """Mean loss and metrics over the validation data, divided among the ranks.

    {} if `stopped()`, which must answer the same on all ranks, becomes true half way.
    """
    config, world = state.config.train, state.world
    chosen = fixed_subset(len(state.validation), config.validate_samples)
    key = sampling.stream_key(config.seed, VALIDATION_DRAWS)
    state.module.eval()
    sums: Any = 0.0
    names: Any = None
    for first in range(0, len(chosen), config.global_batch_size):
        if stopped():
            return {}
        ids = chosen[first : first + config.global_batch_size]
        for share in shares(len(ids), config.micro_batch_size, world.rank, world.size):
            draws = key, first + share.places.start
            batch = fetch(state.validation, ids[share.places], None, draws)
            loss = parallel.forward(compute_loss, state, move(batch, world.device))
            names = metric_names(loss, names)
            sums = sums + loss_vector(loss) * share.weight
    state.module.train()
    figures = means(parallel.all_reduce(sums, world).tolist(), names)
    return {f"validation_{name}": value for name, value in figures.items()}


def validate_averaged(state: State, stopped: Callable[[], object]) -> dict[str, float]:
    """`validate`, and the same with the averages of the weights where there are some."""
    figures = validate(state, stopped)
    if not figures or not state.config.optim.ema:
        return figures
    with averaged_weights(state.model, state.optimizer):
        averaged = validate(state, stopped)
    renamed = {n.replace("_", "_ema_", 1): value for n, value in averaged.items()}
    return figures | renamed if averaged else {}


def run(config: Config, callbacks: Iterable[Any] = (), world: World | None = None) -> Result:
    """Train from the newest checkpoint to `config.train.steps`; `world` as in `setup`."""
    # `callbacks` are called after those of callbacks.py, which says what they are.
    world = world or join(config.parallel, config.device)
    result = _run(config, world, callbacks)
    leave(world)  # only here, as the frame that held the model and the optimizer is gone
    return result


def _run(config: Config, world: World, own_callbacks: Iterable[Any]) -> Result:
    group = Group(world)
    directory = RunDirectory(config.directory, group, config.fresh, config.checkpoint.far)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop(group))  # first, since a stop signal may come early
        state = setup(config, world)
        config = state.config
        run_dir = stack.enter_context(directory)
        # The watchdog also watches the restore, which waits for the other ranks.
        watching, after_journal = monitors(state, run_dir.path, group)
        first = [hardware.GarbageCollection(), hardware.MemoryUse(), *watching]
        callbacks = enter(first, stack)
        checkpointer = stack.enter_context(resume(state, run_dir.path, group))

        validation: dict[str, float] = {}
        had_ended = False
        with group.together():
            if group.is_first:
                validation = validated_at(run_dir.path, state.step)
                had_ended = directory.ended(state.step, config.train.steps)
        validation, had_ended = group.broadcast((validation, had_ended))
        # Did a stop signal interrupt the validation of the step that the run resumes from?
        done = validation or checkpointer.restored.get("validation_loss") is not None
        validation_owed = state.step > 0 and not done and is_due(state, config.train.validate_every)
        if (state.step >= config.train.steps or had_ended) and not validation_owed:
            checkpointer.close()
            with group.together():
                # It names the store of the run's checkpoints, if they are in one.
                settings = run_dir.path / "config.json"
                if group.is_first and not settings.exists():
                    write_json(settings, to_json(config))
            run_dir.record_status("finished", state.step)
            return Result("already finished", state.step, validation)

        state.finish = stop.finish
        run_dir.begin(state, stop, spec_to_json(state.spec))
        introduce(state, run_dir.path)
        stack.callback(state.loader.close)
        journal = Journal(run_dir.path, state, group)
        # Callbacks are called in this order. Yours come before the record is written, so that they
        # can add to it. Only rank 0 writes, which is no part of a step for stragglers.
        yours = [*own.callbacks(config, run_dir.path), *own_callbacks]
        checkpointer.remember(yours)  # their state, which is saved and restored
        bad_steps = BadSteps(config.train, train_step, group)
        callbacks += enter([bad_steps, *yours, journal, *after_journal], stack)
        if config.track and group.is_first:
            trackers = [tracker(config, run_dir.path, state.step) for tracker in TRACKERS]
            callbacks += enter(trackers, stack)
        if config.profile.every > 0:
            from .profiler import Profiler  # only here, since it changes what kineto prints

            callbacks += enter([Profiler(config.profile, run_dir.path / "traces", state)], stack)
        if config.compile.mode != "none":
            callbacks += enter([Compiling()], stack)

        first_micro_batch = state.plan[:1]
        parallel.warm_up(
            state.module, lambda: try_step(train_step, state, state.step, first_micro_batch)
        )
        agreed, validation = _loop(state, checkpointer, stop, journal, callbacks, validation_owed)
        with group.phase("save"):
            checkpointer.finish(state.step)
        status = stop.outcome(agreed)
        blocked = checkpointer.blocked_seconds
        details = {"steps": config.train.steps, "checkpoint_blocked_seconds": blocked}
        if agreed.finish:
            details["reason"] = stop.reason
        run_dir.record_status(status, state.step, **details)
        return Result(status, state.step, validation, blocked)


def _loop(
    state: State,
    checkpointer: Checkpointer,
    stop: Stop,
    journal: Journal,
    callbacks: list[Any],
    validation_owed: bool,
) -> tuple[Agreed, dict[str, float]]:
    """Train until the last step is validated, or until something ends the run.

    Returns what ended it and the metrics of the last validation. `validation_owed`: a stop signal
    interrupted the validation of the step that the run resumes from.
    """
    settings, group = state.config.train, stop.group
    before_step = methods_named("before_step", callbacks)
    after_step = methods_named("after_step", callbacks)
    validation: dict[str, float] = {}
    if validation_owed:
        validation = _evaluate(state, checkpointer, stop, callbacks)
    journal.begin(validation)
    # A stop signal during the last validation leaves it empty: the poll below then sees the signal.
    while state.step < settings.steps or not validation:
        # Flags that any rank raised, as of the step before: all ranks act at the same step and
        # none waits for another.
        agreed = stop.poll(checkpointer.writer.failed)
        if agreed.save_failed:
            checkpointer.settle()  # raises on all ranks, or warns (--checkpoint.on-failure)
        if agreed.ends_run:
            reason = stop.reason if agreed.finish else signal.Signals(agreed.stop_signal).name
            log.info("%s: saving step %d, then stopping", reason, state.step)
            return agreed, validation
        batches = state.loader.next()
        for call in before_step:
            call(state)
        train_step(state, batches)

        record = None
        validate_now = is_due(state, settings.validate_every)
        if validate_now or is_due(state, settings.log_every):
            record = journal.record(state)  # only here the host waits for the device
        if validate_now and record:
            validation = _evaluate(state, checkpointer, stop, callbacks)
            record |= validation
        for call in after_step:
            call(state, record)
        if is_due(state, state.config.checkpoint.every):
            # After the record is written: a resume cuts metrics.jsonl back to the checkpoint.
            with group.phase("save"):
                checkpointer.save(state.step, record)
    return Agreed(), validation


def _evaluate(
    state: State, checkpointer: Checkpointer, stop: Stop, callbacks: list[Any]
) -> dict[str, float]:
    """Validate, and call the callbacks; {} if a stop signal cuts it short."""

    def stopped() -> bool:
        # A callback that ends the run does not interrupt a validation.
        agreed = stop.poll(checkpointer.writer.failed)
        return agreed.stop_signal > 0 and not agreed.finish

    with stop.group.phase("validation"):
        metrics = validate_averaged(state, stopped)
        if metrics:
            for call in methods_named("after_validation", callbacks):
                call(state, metrics)
    return validation_figures(metrics)


def is_due(state: State, every: int) -> bool:
    """Whether to do after this step what is done at the last step and at multiples of `every`."""
    return state.step == state.config.train.steps or (every > 0 and state.step % every == 0)
