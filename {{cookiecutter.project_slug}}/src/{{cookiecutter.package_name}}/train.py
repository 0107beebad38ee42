"""The training loop, to be read from top to bottom: `setup`, `train_step`, `validate`, `run`."""

import contextlib
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .checkpoint.checkpointer import Checkpointer, agree_on_identity, identity_of
from .checkpoint.transfer import load_weights
from .compile import checkpoint_activations, compile_model
from .config import Config
from .data import build_datasets
from .device import move, set_up_torch
from .distributed import Group, World, join, leave, parallel, watchdog
from .distributed.buffers import RunningBuffers
from .distributed.stop import Stop
from .errors import UserError
from .loss import checked, judge_step, loss_vector, means
from .model import blocks, build_model, compute_loss
from .optim import build_optimizer, set_learning_rate
from .run.bad_steps import step_unless
from .run.companions import companions, garbage_collected_by_hand
from .run.directory import RunDirectory
from .run.hardware import check_memory, expected_memory, forward_flops, peak_flops
from .run.journal import Journal
from .run.logs import say
from .sampling import GlobalBatches, Loader, Share, fetch, fixed_subset, seed_step, shares
from .settings import to_json

log = logging.getLogger(__name__)


@dataclass
class State:
    """Everything that a step touches. `module` is what is called: `model`, wrapped or sharded."""

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
    peak_flops: float | None  # of the device, where it is known: then MFU can be told
    forward_flops: int | None  # of one sample
    buffers: RunningBuffers
    step: int = 0  # completed optimizer steps
    checkpointer: Checkpointer | None = None
    sums: Tensor | float = 0.0
    """Since the last log line, over all ranks: loss, count, metrics (float32, on the device)."""
    metrics: tuple[str, ...] = ()  # their names
    bad_steps: Tensor | int = 0
    """Since the last log line: steps skipped for a loss or gradient that was not finite."""
    grad_norm: Tensor | float = 0.0


Observer = Callable[[State, dict[str, Any] | None], None]


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    status: Literal["finished", "preempted", "regrouping", "already finished"]
    step: int
    validation: dict[str, float] = field(default_factory=dict)


def setup(config: Config, world: World | None = None) -> State:
    """Build everything a step needs; `world` only if the caller has set it up already."""
    world = world or join(config.parallel, config.device)
    settings, batch_size = config.train, config.train.global_batch_size
    world.check_batch(batch_size)
    set_up_torch(settings.seed, settings.deterministic)
    train, validation, spec = build_datasets(config)
    if not len(train) or not len(validation):
        raise UserError("the training or the validation data is empty")
    order = GlobalBatches(len(train), batch_size, settings.seed)
    plan = shares(batch_size, settings.micro_batch_size, world.rank, world.size)
    loader = Loader(train, order, plan, settings.loader_workers, pin=world.device.type == "cuda")

    model = build_model(config, spec)
    peak = peak_flops(world.device)
    flops = forward_flops(model, compute_loss, fetch(train, order.ids(0)[:1])) if peak else None
    if settings.activation_checkpointing:
        checkpoint_activations(blocks(model))
    compile_model(model, blocks(model), config.compile)
    dtype = settings.compute_dtype(world.device)
    module = parallel.place(model, blocks(model), config.parallel, world, dtype).train()
    optimizer = build_optimizer(config.optim, model)
    parts = config, world, spec, model, module, optimizer, plan, loader, validation, dtype
    return State(*parts, peak, flops, RunningBuffers(model))


def train_step(state: State, batches: list[Any]) -> None:
    """One optimizer step on this rank's micro-batches of the global batch.

    The gradient is that of (sum of losses) / (sum of counts) over all ranks, whatever their shares.
    Nothing here waits for the device.
    """
    config, world = state.config, state.world
    seed_step(config.train.seed, state.step, world.rank, world.device)
    state.buffers.keep()
    sums = None
    for i, (share, batch) in enumerate(zip(state.plan, batches, strict=True)):
        with parallel.accumulate(state.module, last=i == len(batches) - 1):
            with parallel.autocast(world, state.compute_dtype):
                loss = checked(compute_loss(state.module, move(batch, world.device)))
            (loss.total if share.weight == 1 else loss.total * share.weight).backward()
        part = loss_vector(loss) if share.weight == 1 else loss_vector(loss) * share.weight
        sums = part if sums is None else sums + part
    parallel.all_reduce(sums, world)

    parameters = (p for group in state.optimizer.param_groups for p in group["params"])
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = parallel.total_norm(gradients, world)
    scale, norm, bad = judge_step(sums, norm, world.size, config.optim.clip)
    torch._foreach_mul_(parallel.local(gradients), scale)
    set_learning_rate(state.optimizer, config, state.step)
    if state.checkpointer:
        state.checkpointer.before_optimizer_step()
    step_unless(bad, state.optimizer)
    state.buffers.put_back(bad)
    state.optimizer.zero_grad(set_to_none=True)

    state.metrics = tuple(loss.metrics)
    state.sums = state.sums + (sums if bad is False else sums.masked_fill(torch.as_tensor(bad), 0))
    state.bad_steps = state.bad_steps + bad
    state.grad_norm = norm
    state.step += 1


@torch.no_grad()
def validate(state: State, stopped: Callable[[], object] = bool) -> dict[str, float]:
    """Mean loss and metrics over the validation data, shared out among the ranks.

    Left half way with none, as the training is, once `stopped()` says so, to all ranks alike.
    """
    config, world = state.config.train, state.world
    chosen = fixed_subset(len(state.validation), config.validate_samples)
    parallel.agree_on_buffers(state.model, world)
    state.module.eval()
    sums, loss = 0.0, None
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


def run(config: Config, observer: Observer | None = None) -> Result:
    """Train from wherever the run directory stands to `config.train.steps`.

    `observer(state, record)` is called after every step, with the log line if there was one.
    """
    world = join(config.parallel, config.device)
    result = _run(config, world, observer or (lambda state, record: None))
    leave(world)  # only now that the frame which held model and optimizer is gone
    return result


def _run(config: Config, world: World, observer: Observer) -> Result:
    group, kept = Group(world), config.checkpoint
    with contextlib.ExitStack() as stack:
        stopping = stack.enter_context(Stop(group))  # the first: a stop may come early
        state, settings = setup(config, world), config.train
        run_dir = stack.enter_context(RunDirectory(config.directory, group, config.fresh, kept.far))
        watchers = list(watchdog(run_dir.path, world, group, state.module, say))
        for watcher in watchers:
            stack.enter_context(watcher)
        checkpointer = stack.enter_context(start(state, run_dir, group))
        if state.step >= settings.steps:
            checkpointer.close()
            return Result("already finished", state.step)
        run_dir.begin(to_json(config), state.step)
        stack.callback(state.loader.close)
        journal = stack.enter_context(Journal(run_dir.path, state, group))
        stack.enter_context(garbage_collected_by_hand())
        others = companions(state, run_dir.path, train_step, group)
        others = [stack.enter_context(it) for it in others]
        validation, stop = {}, 0
        while state.step < settings.steps:
            stop, save_failed = stopping.poll(checkpointer.failed)
            if save_failed:
                with group.patience():
                    checkpointer.settle()
            if stop:
                break
            batches = state.loader.next()
            for watcher in watchers:
                if hasattr(watcher, "before_step"):
                    watcher.before_step(state)
            train_step(state, batches)

            log_now, validate_now, save_now = (
                state.step == settings.steps or (every > 0 and state.step % every == 0)
                for every in (settings.log_every, settings.validate_every, kept.every)
            )
            record = journal.line(state) if log_now or validate_now else None
            if validate_now:
                with journal.pause():
                    validation = validate(state, lambda: stopping.poll(checkpointer.failed)[0])
                record.update(validation)
            for watcher in watchers:
                watcher.after_step(state, record)
            journal.step(record)
            for other in others:
                other(state, record)
            if save_now:
                with group.patience():
                    checkpointer.save(state.step, (record or {}).get("validation_loss"))
            observer(state, record)
        if stop:
            log.info("%s: saving step %d, then stopping", signal.Signals(stop).name, state.step)
        with group.patience():
            checkpointer.finish(state.step)
        status = stopping.outcome(stop)
        blocked = checkpointer.blocked_seconds
        run_dir.record_status(status, step=state.step, checkpoint_blocked_seconds=blocked)
        return Result(status, state.step, validation)


def start(state: State, run_dir: RunDirectory, group: Group) -> Checkpointer:
    """Resume from the newest good checkpoint, or begin; UserError when the run is another one."""
    config = state.config
    identity = identity_of(
        state.model,
        seed=config.train.seed,
        global_batch_size=config.train.global_batch_size,
        training_samples=len(state.loader.source.dataset),
        data=state.spec.fingerprint,
    )
    agree_on_identity(identity, group)
    schedule = to_json(config.optim) | {"steps": config.train.steps}
    facts = {"identity": identity, "schedule": schedule}
    checkpointer = state.checkpointer = Checkpointer(
        run_dir.path, config.checkpoint, state.world, state.model, state.optimizer, facts
    )
    needed = expected_memory(state.model, state.optimizer, checkpointer.staged_by)
    group.agree(lambda: check_memory(needed, state.world.device))
    state.step = checkpointer.restore()
    if state.step == 0 and (origin := config.init_from):
        log.info("weights: %s", load_weights(origin, state.model, None, group, config.init_strict))
    state.loader.seek(state.step)
    return checkpointer
