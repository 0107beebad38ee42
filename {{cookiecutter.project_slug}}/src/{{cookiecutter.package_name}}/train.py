"""The training loop, to be read from top to bottom: `setup`, `train_step`, `validate`, `run`."""

import contextlib
import logging
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import callbacks as own
from .checkpoint.checkpointer import Checkpointer, agree_on_identity, identity_of
from .checkpoint.transfer import load_weights
from .compile import Compiling, checkpoint_activations, compile_model
from .config import Config
from .data import build_datasets
from .device import move, set_up_torch
from .distributed import Group, World, join, leave, monitors, parallel
from .distributed.stop import Stop
from .ema import averaged_weights, keep_average
from .errors import RankError, UserError
from .files import to_json
from .loss import checked, judge_step, loss_vector, means
from .model import blocks, build_model, compute_loss
from .optim import build_optimizer
from .profiler import Profiler, annotated
from .run import hardware
from .run.bad_steps import RunningBuffers, SkippedSteps, StopAtBadStep, step_unless, try_step
from .run.callback_runner import GarbageCollection, enter, methods
from .run.directory import RunDirectory
from .run.journal import Journal, introduce, validated_at
from .run.tracker import tracking
from .sampling import (
    Loader,
    Share,
    check_dataset,
    fetch,
    fixed_subset,
    open_loader,
    seed_step,
    shares,
)
from .schedule import set_schedule

log = logging.getLogger(__name__)


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
    metrics: tuple[str, ...] = ()  # their names
    bad_steps: Tensor | int = 0  # skipped for a non-finite loss or gradient
    grad_norm: Tensor | float = 0.0  # of the last step


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    status: Literal["finished", "preempted", "regrouping", "already finished"]
    step: int
    validation: dict[str, float] = field(default_factory=dict)


def setup(config: Config, world: World | None = None) -> State:
    """Build everything a step needs; `world` if the caller has joined it already."""
    world = world or join(config.parallel, config.device)
    settings, batch_size = config.train, config.train.global_batch_size
    world.check_batch(batch_size)
    set_up_torch(settings.seed, settings.deterministic)
    train, validation, spec = build_datasets(config)
    if not isinstance(getattr(spec, "fingerprint", None), str):
        raise UserError(
            "the spec of build_datasets (data.py) needs a `fingerprint`: a text that "
            "another data set does not have, as `fingerprint` in files.py makes it"
        )
    check_dataset(validation, "validation")
    plan = shares(batch_size, settings.micro_batch_size, world.rank, world.size)
    loader = open_loader(train, settings, plan, world)

    model = build_model(config, spec)
    peak = hardware.peak_flops(world.device)
    one = fetch(loader.source.dataset, loader.source.order.ids(0)[:1]) if peak else None
    flops = hardware.forward_flops(model, compute_loss, one) if peak else None
    # The order matters: the compiler must see what is recomputed, and DDP and FSDP must wrap what
    # is compiled, since their hooks would break the graph.
    if settings.activation_checkpointing:
        checkpoint_activations(blocks(model))
    compile_model(model, blocks(model), config.compile)
    dtype = settings.compute_dtype(world.device)
    module = parallel.place(model, blocks(model), config.parallel, world, dtype).train()
    optimizer = build_optimizer(config.optim, model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise UserError(f"build_optimizer (optim.py) returned a {kind}: wanted one Optimizer")
    if config.optim.ema:
        keep_average(optimizer)
    parts = config, world, spec, model, module, optimizer, plan, loader, validation, dtype
    return State(*parts, peak, flops, RunningBuffers(model))


def train_step(state: State, batches: list[Any]) -> None:
    """One optimizer step on this rank's micro-batches of the global batch.

    The gradient is of (sum of losses) / (sum of counts) over all ranks, whatever their shares.
    Nothing here waits for the device.
    """
    config, world = state.config, state.world
    # Random numbers are a function of (seed, step, rank), so no generator's state is saved.
    seed_step(config.train.seed, state.step, world.rank, world.device)
    state.buffers.keep()
    sums: Any = None
    for i, (share, batch) in enumerate(zip(state.plan, batches, strict=True)):
        with parallel.accumulate(state.module, last=i == len(batches) - 1):
            with annotated("forward"), parallel.autocast(world, state.compute_dtype):
                loss = checked(compute_loss(state.module, move(batch, world.device)))
            with annotated("backward"):
                # A rank without samples left has one at weight 0: ranks must take part alike.
                (loss.total if share.weight == 1 else loss.total * share.weight).backward()
        part = loss_vector(loss) if share.weight == 1 else loss_vector(loss) * share.weight
        sums = part if sums is None else sums + part
    parallel.all_reduce(sums, world)

    parameters = (p for group in state.optimizer.param_groups for p in group["params"])
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = parallel.total_norm(gradients, world)
    # One factor turns sums into means and clips: gradients are multiplied once.
    scale, norm, bad = judge_step(sums, norm, world.size, config.optim.clip)
    torch._foreach_mul_(parallel.local(gradients), scale)
    set_schedule(state.optimizer, config, state.step)
    if state.checkpointer:
        # A save may still be copying these weights: the optimizer must not change them under it.
        state.checkpointer.before_optimizer_step()
    with annotated("optimizer"):
        step_unless(bad, state.optimizer)
    state.buffers.put_back(bad)
    state.optimizer.zero_grad(set_to_none=True)

    # Accumulated on the device and read at log steps only. `bad` is a tensor on a GPU.
    state.metrics = tuple(loss.metrics)
    state.sums = state.sums + (sums if bad is False else sums.masked_fill(torch.as_tensor(bad), 0))
    state.bad_steps = state.bad_steps + bad
    state.grad_norm = norm
    state.step += 1


@torch.no_grad()
def validate(state: State, stopped: Callable[[], object] = bool) -> dict[str, float]:
    """Mean loss and metrics over the validation data, divided among the ranks.

    {} if `stopped()`, which must answer the same on all ranks, becomes true half way.
    """
    config, world = state.config.train, state.world
    chosen = fixed_subset(len(state.validation), config.validate_samples)
    parallel.agree_on_buffers(state.model, world)  # batch statistics differ between ranks
    state.module.eval()
    sums: Any = 0.0
    loss: Any = None
    for start in range(0, len(chosen), config.global_batch_size):
        if stopped():
            return {}
        ids = chosen[start : start + config.global_batch_size]
        for share in shares(len(ids), config.micro_batch_size, world.rank, world.size):
            batch = move(fetch(state.validation, ids[share.places]), world.device)
            with parallel.autocast(world, state.compute_dtype):
                loss = compute_loss(state.module, batch)
            sums = sums + loss_vector(loss) * share.weight
    state.module.train()
    figures = means(parallel.all_reduce(sums, world), loss.metrics)
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
    """Train from the newest checkpoint in the run directory to `config.train.steps`.

    `callbacks` are called after the ones in callbacks.py, which describes them; `world` as in
    `setup`.
    """
    world = world or join(config.parallel, config.device)
    result = _run(config, world, callbacks)
    leave(world)  # only here, as the frame that held the model and the optimizer is gone
    return result


def _run(config: Config, world: World, more: Iterable[Any] = ()) -> Result:
    group, settings = Group(world), config.train
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(Stop(group))  # first, since a stop signal may come early
        state = setup(config, world)
        far = config.checkpoint.far
        run_dir = stack.enter_context(RunDirectory(config.directory, group, config.fresh, far))
        stack.push(lambda kind, error, trace: record_stop(error, stop, run_dir, state))
        # The watchdog also watches the restore, which waits for the other ranks.
        watching, after_journal = monitors(run_dir.path, world, group, state.module)
        callbacks = [*enter([hardware.MemoryUse(), *watching], stack)]
        checkpointer = stack.enter_context(start(state, run_dir.path, group))
        owed = owes_validation(state, checkpointer, run_dir.path, group)
        if state.step >= settings.steps and not owed:
            checkpointer.close()
            run_dir.record_again(to_json(config), "finished", state.step)
            return Result("already finished", state.step, validated_at(run_dir.path, state.step))
        run_dir.begin(to_json(config), state.step, world.device)
        introduce(state, run_dir.path)
        stack.callback(state.loader.close)
        journal = Journal(run_dir.path, state, group)
        writing = (journal, *after_journal)  # only rank 0 writes: no part of a step for stragglers
        callbacks += enter([*callbacks_of(state, run_dir.path, group, writing), *more], stack)
        before_step, after_step, after_validation = methods(callbacks)

        with journal.paused():
            first = state.plan[:1]
            parallel.warm_up(state.module, lambda: try_step(train_step, state, state.step, first))

        def validated(record: dict[str, Any]) -> dict[str, float]:
            """Validate, and add the figures to the record; {} if a stop cuts it short."""
            with group.phase("validation"), journal.paused():
                figures = validate_averaged(state, lambda: stop.poll(checkpointer.failed)[0])
                for call in after_validation if figures else ():
                    call(state, figures)
            record.update(figures)
            return figures

        validation, stop_signal = {}, 0
        if owed and (validation := validated(record := journal.last)):
            journal.rewrite_last(record)
        cut_short = owed and not validation
        while cut_short or state.step < settings.steps:
            # Flags that any rank raised, as of the step before: all ranks act at the same step
            # and none waits for another.
            stop_signal, save_failed = stop.poll(checkpointer.failed)
            if save_failed:
                checkpointer.settle()  # raises on all ranks, or warns (--checkpoint.on-failure)
            if stop_signal:
                break
            batches = state.loader.next()
            for call in before_step:
                call(state)
            train_step(state, batches)

            log_now, validate_now = (
                state.step == settings.steps or (every > 0 and state.step % every == 0)
                for every in (settings.log_every, settings.validate_every)
            )
            # Only here the host waits for the device.
            record = journal.record(state) if log_now or validate_now else None
            if validate_now and record:
                validation = validated(record)
                cut_short = not validation  # then the poll above ends the run, at the last step too
            for call in after_step:
                call(state, record)
            if state.step == settings.steps or checkpointer.due(state.step):
                # After the record is written: a resume cuts metrics.jsonl back to the checkpoint.
                with group.phase("save"):
                    journal.sync()
                    checkpointer.save(state.step, (record or {}).get("validation_loss"))
        if stop_signal:
            text = "%s: saving step %d, then stopping"
            log.info(text, signal.Signals(stop_signal).name, state.step)
        with group.phase("save"):
            journal.sync()
            checkpointer.finish(state.step)
        status = stop.outcome(stop_signal)
        blocked = checkpointer.blocked_seconds
        run_dir.record_status(status, step=state.step, checkpoint_blocked_seconds=blocked)
        return Result(status, state.step, validation)


def record_stop(
    error: BaseException | None, stop: Stop, run_dir: RunDirectory, state: State
) -> None:
    """Record a stop whose last step is not saved: by a second Ctrl-C, or by a store that hangs.

    To be called once the checkpointer has ended.
    """
    if isinstance(error, KeyboardInterrupt):
        reason = f"stopped at once in step {state.step + 1}"
    elif isinstance(error, RankError) and stop.signal is not None:
        reason = f"preempted at step {state.step}, which was not saved: {error}"
    else:
        return
    if run_dir.begun:
        saved = state.checkpointer and state.checkpointer.last_good
        run_dir.record_status("preempted", step=state.step, saved_step=saved, reason=reason)
        if run_dir.group.rank == 0:
            what = "no step is saved" if saved is None else f"step {saved} is saved"
            log.warning("%s; %s. To resume: the same command again", reason, what)


def start(state: State, run_dir: Path, group: Group) -> Checkpointer:
    """Resume from the newest good checkpoint, or begin; UserError when the run is another one."""
    config = state.config
    identity = identity_of(
        state.model,
        seed=config.train.seed,
        global_batch_size=config.train.global_batch_size,
        training_samples=state.loader.size,
        data=state.spec.fingerprint,
    )
    agree_on_identity(identity, group)
    schedule = to_json(config.optim) | {"steps": config.train.steps}
    facts = {"identity": identity, "schedule": schedule}
    checkpointer = state.checkpointer = Checkpointer(
        *(run_dir, config.checkpoint, state.world, state.model, state.optimizer, facts),
        partial(state.loader.position, group),
    )
    needed = hardware.expected_memory(state.model, state.optimizer, checkpointer.staged_by)
    group.agree(lambda: hardware.check_memory(needed, state.world.device))
    state.step = checkpointer.restore()
    if state.step == 0 and not config.checkpoint.far:
        kept = config.checkpoint.most_at_once(config.train.steps)
        group.from_first(lambda: hardware.check_disk(needed, kept, run_dir))
    if state.step == 0 and (origin := config.init_from):
        log.info("weights: %s", load_weights(origin, state.model, None, group, config.init_strict))
    state.loader.resume(state.step, checkpointer.restored, group)
    return checkpointer


def owes_validation(state: State, checkpointer: Checkpointer, run_dir: Path, group: Group) -> bool:
    """Whether a stop cut the validation of the step short from which the run goes on."""
    every, step = state.config.train.validate_every, state.step
    due = step == state.config.train.steps or (every > 0 and step % every == 0)
    if step == 0 or not due or checkpointer.restored.get("validation_loss") is not None:
        return False
    return group.from_first(lambda: not validated_at(run_dir, step))


def callbacks_of(state: State, run_dir: Path, group: Group, writing: tuple) -> Iterator[Any]:
    """The callbacks of a run after the watchdog's, in the order in which they are called."""
    config = state.config
    if config.train.on_bad_step == "stop":
        yield StopAtBadStep(train_step, group)
    yield SkippedSteps(config.train.max_bad_steps, group)
    yield from writing  # the record, to which the callbacks before may have added figures
    yield GarbageCollection()
    if config.track and state.world.rank == 0:
        yield from tracking(config, run_dir, state.step)
    if config.profile.every:
        yield Profiler(config.profile, run_dir / "traces", state)
    if config.compile.mode != "none":
        yield Compiling()
    yield from own.callbacks(config, run_dir)
