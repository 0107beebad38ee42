"""Set up and run the training loop. Read from top to bottom: `setup`, `train_step`, `run`.

`resume` and `validate` are in resume.py and validation.py.
"""

import contextlib
import logging
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

# If this file is run as a script, it has no package, and the relative imports below would fail.
if not __package__:
    raise SystemExit(f"error: start it with python -m {__file__.split('/')[-2]} train")

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from . import callbacks as callbacks_file
from . import sampling
from .adds_up import warn_unless_sums_add_up
from .checkpoint.checkpointer import Checkpointer
from .checkpoint.storage import end_in_time
from .compile import Compiling, checkpoint_activations, compile_model
from .config import Config, override, spec_to_json, with_steps
from .data import build_datasets
from .device import annotated, move, set_up_torch
from .distributed import (
    Group,
    World,
    join,
    leave,
    monitors,
    parallel,
    require_same_model,
    require_same_optimizer,
)
from .distributed.stop import Agreed, Stop
from .ema import keep_average
from .errors import UserError
from .files import to_json, write_json
from .loss import (
    Gathered,
    LossSum,
    check_blocks,
    check_counted,
    check_loss,
    check_model,
    check_optimizer,
    check_whole_batch,
    judge_step,
    loss_vector,
    require_type,
)
from .model import blocks, build_model, compute_loss
from .optim import build_optimizer
from .resume import require_same_settings, resume
from .run import hardware
from .run.bad_steps import BadSteps, RunningBuffers, step_unless, try_step
from .run.callback_runner import enter, find_methods
from .run.directory import RunDirectory, only_run
from .run.journal import Journal, log_start, metric_names, validated_at
from .run.model_state import ModelState, begin_training
from .run.tracker import TRACKERS
from .sampling import STEP, Loader, MicroBatch, fixed_subset, micro_batches, seed_random
from .schedule import set_schedule
from .validation import validate as validate
from .validation import validate_in_run

log = logging.getLogger(__name__)


def ignore_request_to_finish(reason: str) -> None:
    """Do nothing: the default of `State.finish`, for steps outside a run."""


@dataclass
class State:
    """Everything that a training step needs."""

    config: Config
    world: World
    # Facts about the data that the model needs, from build_datasets (data.py).
    spec: Any
    # The user's model.
    model: nn.Module
    # The module that a step calls: DDP's wrapper of the model, or the model itself.
    module: nn.Module
    optimizer: torch.optim.Optimizer
    # This rank's micro-batches in each global batch.
    plan: list[MicroBatch]
    loader: Loader
    validation: Any
    compute_dtype: torch.dtype
    # The device's peak FLOP/s and the FLOPs of one sample's forward, from which `mfu` is computed.
    # None if unknown.
    peak_flops: float | None
    forward_flops: int | None
    buffers: RunningBuffers
    # Completed optimizer steps.
    step: int = 0
    checkpointer: Checkpointer | None = None
    # The sum of the loss vectors (loss.py) of all ranks and all steps since the last record, on the
    # device. A record is a line of metrics.jsonl.
    sums: Tensor | float = 0.0
    # The names of the metrics in `sums`.
    metrics: tuple[str, ...] | None = None
    # The number of steps that were skipped since the last record, because their loss or gradient
    # was not finite.
    bad_steps: Tensor | int = 0
    # The norm of the last step's gradient, before clipping.
    grad_norm: Tensor | float = 0.0
    # A callback calls this to end the run. The argument is the reason, which the log shows.
    finish: Callable[[str], None] = ignore_request_to_finish


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    # "regrouping": another machine is leaving the job, so torchrun must restart this rank.
    status: Literal["finished", "preempted", "regrouping", "already finished"]
    step: int
    validation: dict[str, float] = field(default_factory=dict)
    # The time that training waited for saves.
    blocked_seconds: float = 0.0


def setup(config: Config, world: World | None = None, weights_follow: bool = False) -> State:
    """Build everything that a step needs; collective.

    Pass `world` if the process group is joined already. `weights_follow` means that the caller
    loads the weights of --init-from afterwards, so they need not be initialized here. If only one
    rank fails, for example because it lacks the data, its process ends. The others then fail or
    wait in the next collective, until they are ended, too.
    """
    world = world or join(config.parallel, config.device)
    require_same_settings(config, world)
    # Reset what an earlier run in this process may have set.
    Gathered.used = False
    Gathered.is_padding = False
    batch_size = config.train.global_batch_size
    if batch_size < world.size:
        problem = f"--train.global-batch-size {batch_size} is less than the {world.size} ranks"
        raise UserError(f"{problem}: raise it or start fewer processes")
    # Random splits of the data and random initial weights must be the same on all ranks, so all
    # ranks use the same seed here.
    sampling.seed_start(config.train.seed)
    dtype = config.train.compute_dtype(world.device)
    set_up_torch(config.train.deterministic, dtype)
    hardware.pin_to_numa_node(world.device)
    train, validation, spec = load_datasets(config)
    if config.train.epochs:
        config = with_steps(config, samples=len(train))
    if config.init_from and config.checkpoint.frozen == "no":
        # Checkpoints leave out the frozen weights, so a resume reads them from this path again. The
        # path is made absolute, since the resume may start in another working directory.
        config = override(config, {"init_from": config.init_from.absolute()})
    settings = config.train
    plan = micro_batches(batch_size, settings.micro_batch_size, world.rank, world.size)
    loader = sampling.open_loader(train, settings, plan, world)

    def make_model() -> nn.Module:
        return build_model(config, spec)

    if config.init_from and weights_follow:
        from .empty_model import build_without_values

        model = build_without_values(make_model, config.init_from, config.init_new, world)
    else:
        model = parallel.build(make_model, world)
    check_model(model)
    check_blocks(blocks(model))
    require_same_model(model, world)
    peak_flops = hardware.peak_flops(world.device)
    forward_flops = None
    if peak_flops is not None:
        # Read the first sample of step 0 as a batch, without advancing the loader.
        first_sample = MicroBatch(indices=slice(0, 1), weight=1.0)
        (batch,) = loader.read_apart(loader.source, [(0, first_sample)])
        forward_flops = hardware.forward_flops(model, compute_loss, batch)
    # The order matters. Activation checkpointing comes first, since the compiler must see what is
    # recomputed. `parallel.wrap` comes after the compiler, which would split its graph at the hooks
    # of DDP or FSDP. The optimizer comes last, since FSDP replaces the parameters.
    if settings.activation_checkpointing:
        checkpoint_activations(blocks(model))
    compile_model(model, blocks(model), config.compile)
    begin_training(model)
    module = parallel.wrap(model, blocks(model), config.parallel, world, dtype)
    optimizer = build_optimizer(config.optim, model)
    check_optimizer(optimizer, model)
    require_same_optimizer(optimizer, model, world)
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


def load_datasets(config: Config) -> tuple[Any, Any, Any]:
    """Return the training data, the validation data and their spec; UserError if one is invalid."""
    settings = config.train
    datasets = build_datasets(config)
    try:
        train, validation, spec = datasets
    except (TypeError, ValueError):
        values = "a training set, a validation set, and a spec with a fingerprint"
        raise UserError(f"build_datasets (data.py) must return three values: {values}") from None
    identity = getattr(spec, "fingerprint", None)
    require_type(identity, str, "`fingerprint` in the spec of build_datasets (data.py)")
    # Check only the validation set here. `open_loader` checks the training set, which may be a
    # stream.
    sampling.check_dataset(validation, "validation")
    if (settings.overfit or settings.epochs) and not hasattr(train, "__len__"):
        raise UserError(
            "--train.epochs and --train.overfit need a dataset with a length, which a stream does "
            "not have: use --train.steps"
        )
    if settings.overfit:
        chosen = fixed_subset(len(train), settings.overfit * settings.global_batch_size)
        train = Subset(train, chosen.tolist())  # type: ignore[arg-type]
    return train, validation, spec


def train_step(state: State, batches: list[Any]) -> None:
    """Take one optimizer step on this rank's micro-batches of the global batch; collective.

    The gradient is that of (sum of losses) / (sum of counts) over all ranks, so it does not depend
    on how the batch is split. On a GPU the host waits for the device in only three cases: in the
    first step, in `agree_on_buffers` at each 50th step, and if the optimizer has no fused step.
    If only one of several ranks raises an error, its process ends. The others then fail or hang in
    the next collective, until they are ended, too.
    """
    config, world = state.config, state.world
    # Random numbers are a function of (seed, step, rank), so generator states need not be saved.
    seed_random(config.train.seed, STEP, state.step, world.rank, device=world.device)
    # A schedule-free optimizer has the methods `train()` and `eval()`. Between steps the model
    # holds averaged weights, which are validated and saved. `train()` puts the weights to train
    # into the model, and `eval()` puts the averaged weights back.
    schedule_free: Any = None
    if hasattr(state.optimizer, "eval"):
        schedule_free = state.optimizer
        if state.checkpointer:
            # A save may still be copying the weights, so wait before `train()` changes them.
            state.checkpointer.before_optimizer_step()
        # FSDP may still hold averaged weights that it gathered for a validation, and would use
        # them in the next forward. Calling state_dict() triggers a hook of FSDP that frees them.
        state.model.state_dict()
        schedule_free.train()
    # Copy the buffers that forward may change. After a bad step, `put_back` restores them.
    state.buffers.keep()
    loss_vectors: list[Tensor] = []
    for i, (micro_batch, batch) in enumerate(zip(state.plan, batches, strict=True)):
        is_last = i == len(batches) - 1
        with parallel.accumulate(state, is_last):
            with annotated("forward"):
                loss = parallel.forward(compute_loss, state, move(batch, world.device))
                if state.metrics is None:
                    check_first_loss(state, loss)
                state.metrics = metric_names(loss, state.metrics)
            with annotated("backward"):
                total = loss.total
                sums_of_batch = loss_vector(loss)
                if micro_batch.weight != 1:
                    # A rank that has no samples left processes another sample with weight 0, since
                    # all ranks must take part in the collectives of backward.
                    total = total * micro_batch.weight
                    sums_of_batch = sums_of_batch * micro_batch.weight
                total.backward()
        loss_vectors.append(sums_of_batch)
    parallel.require_gradients(state)
    # Call this after the last forward, since each forward may change the buffers.
    parallel.agree_on_buffers(state.buffers, state.step, world)
    sums_of_rank = sum(loss_vectors[1:], start=loss_vectors[0])
    sums = parallel.all_reduce(sums_of_rank, world)
    if state.step == 0:
        check_counted(sums)

    gradients: list[Tensor] = []
    for group in state.optimizer.param_groups:
        gradients += [p.grad for p in group["params"] if p.grad is not None]
    if not gradients:
        raise UserError(
            "no parameter in the optimizer has a gradient: the loss of compute_loss (model.py) "
            "must depend on what build_optimizer (optim.py) was given"
        )
    norm = parallel.total_norm(gradients, world)
    # `scale` turns the gradients of sums into those of means, and also clips them. So the gradients
    # are multiplied only once.
    scale, norm, bad = judge_step(sums, norm, world.size, config.optim.clip)
    torch._foreach_mul_([parallel.local_part(g) for g in gradients], scale)
    set_schedule(state.optimizer, config, state.step)
    if state.checkpointer:
        # A save may still be copying the weights, so wait before the optimizer changes them.
        state.checkpointer.before_optimizer_step()
    with annotated("optimizer"):
        step_unless(bad, state.optimizer)
        if schedule_free:
            schedule_free.eval()
    state.buffers.put_back(bad)
    state.optimizer.zero_grad(set_to_none=True)

    # Replace the sums of a bad step with zeros, since they may be NaN. On a CPU `bad` is a bool. On
    # a GPU `bad` is a tensor, and `if bad` would make the host wait, so the device replaces them.
    if bad is not False:
        sums = sums.masked_fill(torch.as_tensor(bad), 0)
    state.sums = state.sums + sums
    state.bad_steps = state.bad_steps + bad
    state.grad_norm = norm
    state.step += 1


def check_first_loss(state: State, loss: LossSum) -> None:
    """Raise UserError unless compute_loss returns what a run can add up; collective."""
    check_loss(loss)
    check_whole_batch(len(state.plan), state.config.train.validate_batch_size)
    # Ranks add up their sums by position, not by name. If their metrics differed, the sum of one
    # metric would be added to that of another.
    names = {"metrics of compute_loss (model.py)": [*loss.metrics]}
    parallel.require_same(names, state.world)


def run(config: Config, callbacks: Iterable[Any] = (), world: World | None = None) -> Result:
    """Train from the newest checkpoint to step `config.train.steps`.

    `callbacks` are called after those of callbacks.py, where callbacks are documented. Pass `world`
    if the process group is joined already.
    """
    with only_run():
        world = world or join(config.parallel, config.device)
        result = _run(config, world, callbacks)
        # The process group must outlive the model, which is freed when `_run` returns.
        leave(world)
    return result


def _run(config: Config, world: World, more_callbacks: Iterable[Any]) -> Result:
    if config.fresh and config.checkpoint.in_store:
        raise UserError(
            "--fresh does not clear an object store: give another --name and --checkpoint.url"
        )
    group = Group(world)
    # Machines need not share the run directory if checkpoints are only in an object store (`far`).
    directory = RunDirectory(
        config.directory, group, fresh=config.fresh, apart=config.checkpoint.far
    )
    with contextlib.ExitStack() as stack:
        # The order matters. `Stop` comes first, since a signal may arrive during start-up. The run
        # directory is locked after `setup`, so that --fresh renames an old run only if settings and
        # data are valid. The watchdog starts before `resume`, where ranks wait for each other. The
        # run writes to its directory only after `resume`, which may refuse the directory.
        stop = stack.enter_context(Stop(group))
        # Until the run ends, a stop signal gives requests to an object store a deadline.
        end_in_time(stop)
        stack.callback(end_in_time, None)
        state = setup(config, world, weights_follow=True)
        config = state.config
        run_dir = stack.enter_context(directory)
        watching, after_journal = monitors(state, run_dir.path, group)
        first_callbacks = [hardware.GarbageCollection(), hardware.MemoryUse(), *watching]
        callbacks = enter(first_callbacks, stack)
        checkpointer = stack.enter_context(resume(state, run_dir.path, group))

        validation: dict[str, float] = {}
        # Whether an earlier start ended at this step, because a callback ended the run. This is
        # False if --train.steps has changed since then, so that the run continues.
        had_ended = False
        with group.together():
            if group.is_first:
                validation = validated_at(run_dir.path, state.step)
                had_ended = directory.ended(state.step, config.train.steps)
        validation, had_ended = group.broadcast((validation, had_ended))
        # A stop signal may have interrupted the validation of the step that the run resumes from.
        # Then neither metrics.jsonl nor the checkpoint has the result of that validation.
        validated = validation or checkpointer.restored.get("validation_loss") is not None
        was_due = state.step > 0 and is_due(state, config.train.validate_every)
        validation_owed = was_due and not validated
        if (state.step >= config.train.steps or had_ended) and not validation_owed:
            checkpointer.close()
            with group.together():
                # Other commands find checkpoints in an object store through config.json, which is
                # missing here if the run finished on another machine.
                settings = run_dir.path / "config.json"
                if group.is_first and not settings.exists():
                    write_json(settings, to_json(config))
            run_dir.record_status("finished", state.step)
            return Result("already finished", state.step, validation)

        state.finish = stop.finish
        run_dir.begin(state, stop, spec_to_json(state.spec))
        log_start(state, run_dir.path)
        stack.callback(state.loader.close)
        journal = Journal(run_dir.path, state, group)
        # Callbacks are called in this order. The user's come before the journal, so that they can
        # add to the record that it writes. `after_journal` starts the timer of straggler detection.
        # The timer starts after the journal, since only rank 0 spends time on writing records.
        user_callbacks = [*callbacks_file.callbacks(config, run_dir.path), *more_callbacks]
        # Callbacks with a `state_dict` are restored here, and saved from now on.
        checkpointer.remember(user_callbacks)
        bad_steps = BadSteps(config.train, train_step, group)
        after_users = [ModelState(state), journal, *after_journal]
        callbacks += enter([bad_steps, *user_callbacks, *after_users], stack)
        if config.track and group.is_first:
            trackers = [tracker(config, run_dir.path, state.step) for tracker in TRACKERS]
            callbacks += enter(trackers, stack)
        if config.profile.every > 0:
            # Import this module only if it is used, since the import changes Kineto's log level.
            from .profiler import Profiler

            callbacks += enter([Profiler(config.profile, run_dir.path / "traces", state)], stack)
        if config.compile.mode != "none":
            callbacks += enter([Compiling()], stack)

        warn_unless_sums_add_up(state)

        # `warm_up` may call this function before the first step. It runs forward and backward, but
        # changes neither the model nor the state.
        def try_first_micro_batch() -> None:
            try_step(train_step, state, state.step, state.plan[:1])

        parallel.warm_up(state.module, try_first_micro_batch)
        agreed, validation, last_record = _loop(
            state, checkpointer, stop, journal, callbacks, validation_owed
        )
        with group.phase("save"):
            checkpointer.finish(state.step, last_record)
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
) -> tuple[Agreed, dict[str, float], dict[str, Any] | None]:
    """Train until the last step is validated, or until a signal or a callback ends the run.

    If `validation_owed`, first repeat the validation that a stop signal interrupted. Returns why
    the loop ended, the metrics of the last validation, and the record of the last step (None if
    that step has no record).
    """
    settings, group = state.config.train, stop.group
    # The methods are looked up once, not at each step.
    before_step = find_methods("before_step", callbacks)
    after_step = find_methods("after_step", callbacks)
    validation: dict[str, float] = {}
    record: dict[str, Any] | None = None
    if validation_owed:
        if state.step < settings.steps:
            # Fork the workers before the validation opens the data's files in this process. Workers
            # that are forked later would inherit an open file and share its read position.
            state.loader.start()
        validation = validate_in_run(state, stop, callbacks)
    journal.begin(validation)
    # In the repeated validation a callback may end the run (early stopping).
    if validation and stop.agree_to_finish():
        log.info("%s: stopping at step %d", stop.reason, state.step)
        return Agreed(finish=True), validation, None
    # The last step is always validated. If `validation` is empty after that step, a stop signal has
    # interrupted the validation, and the poll below returns that signal.
    while state.step < settings.steps or not validation:
        # All ranks stop after the same step. A poll returns what the ranks sent at the previous
        # poll, so a rank waits only for ranks that are a whole step behind.
        agreed = stop.poll(checkpointer.writer.failed)
        if agreed.save_failed:
            # Raise the error of the save on all ranks, or only log it (--checkpoint.on-failure).
            checkpointer.settle()
        if agreed.ends_run:
            reason = stop.reason if agreed.finish else signal.Signals(agreed.stop_signal).name
            log.info("%s: saving step %d, then stopping", reason, state.step)
            # The caller saves this step.
            return agreed, validation, record
        batches = state.loader.next(stop)
        for call in before_step:
            call(state)
        train_step(state, batches)

        record = None
        validate_now = is_due(state, settings.validate_every)
        if validate_now or is_due(state, settings.log_every):
            # Here the host waits for the device. Elsewhere the host waits only in validations, in
            # saves, and in the cases that the docstring of `train_step` lists.
            record = journal.record(state)
            if validate_now:
                validation = validate_in_run(state, stop, callbacks)
                record |= validation
        for call in after_step:
            call(state, record)
        # If a callback ends the run after a validation (early stopping), all ranks stop at this
        # step, not at the next poll. So the last checkpoint has the weights that were validated.
        is_last = validate_now and stop.agree_to_finish()
        if is_last or is_due(state, state.config.checkpoint.every):
            # Save after `after_step` has written the record. If the run were killed between a save
            # and a later write, a resume would begin after this step, and never write its record.
            with group.phase("save"):
                checkpointer.save(state.step, record)
        if is_last:
            log.info("%s: stopping at step %d", stop.reason, state.step)
            return Agreed(finish=True), validation, record
    return Agreed(), validation, record


def is_due(state: State, every: int) -> bool:
    """Return whether this step is the last one or a multiple of `every` (0: only the last one)."""
    return state.step == state.config.train.steps or (every > 0 and state.step % every == 0)
