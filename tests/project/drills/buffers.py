"""What ranks have alike: running buffers of every sort, what they load, the names of metrics.

The buffers are the same after each step, and exact after a stop.

Usage: buffers.py FOLDER PACKAGE... (by `drill`, on two ranks)
"""

import dataclasses
import importlib
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS, BAD, STOP = 9, 4, 6
SETTINGS = {
    "device": "cpu",
    "train.steps": STEPS,
    "train.global_batch_size": 12,
    "train.micro_batch_size": 3,
    "train.log_every": 1,
    "train.validate_every": 2,
    "checkpoint.every": 3,
}


class Net(nn.Module):
    """Batch statistics, a teacher's centre that is assigned anew, counts, flags, a spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(64), nn.Linear(64, 10)
        self.register_buffer("center", torch.zeros(64))
        self.register_buffer("counts", torch.zeros(64, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(64, dtype=torch.bool))
        self.register_buffer("spectrum", torch.zeros(33, dtype=torch.complex64))
        self.register_buffer("mask", torch.full((64,), -torch.inf))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits; all buffers but the mask change."""
        x = images.flatten(1).float()
        if self.training:
            self.center = 0.9 * self.center + 0.1 * x.mean(0)
            self.counts += (x > 0.5).sum(0)
            self.seen |= x[0] > 0.9
            self.spectrum = self.spectrum / 2 + torch.fft.rfft(x).mean(0)
        return self.out(self.norm(x - self.center))


class Reset(nn.Module):
    """A codebook of which some entries are set anew, but only at odd steps."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.out, self.rank, self.steps = nn.Linear(64, 10), rank, 0
        self.register_buffer("codebook", torch.zeros(4))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits; each rank has its own entries."""
        if self.training:
            if self.steps % 2:
                self.codebook[self.rank] += 1.0
            self.steps += 1
        return self.out(images.flatten(1).float())


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the buffers."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def gathered(buffers: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The buffers of both ranks."""
    each: list[Any] = [None, None]
    dist.all_gather_object(each, buffers)
    return each


class Watch:
    """Looks at the buffers before, within and after each step."""

    def __init__(self, stop: bool) -> None:
        self.stop, self.step = stop, 0

    def before_step(self, state: Any) -> None:
        """Note what there was."""
        self.step, self.before = state.step + 1, tensors(state.model)

    def after_step(self, state: Any, record: Any) -> None:
        """Compare."""
        first, second = gathered(tensors(state.model))
        for name, value in first.items():
            assert torch.equal(value, second[name]), f"{name} differs after step {state.step}"
        same = {name: torch.equal(value, self.before[name]) for name, value in first.items()}
        if state.step == BAD:
            assert all(same.values()), "a bad step changed buffers"
        else:
            of_ranks = gathered(self.within)
            for name, value in first.items():
                mine, other = (buffers[name] for buffers in of_ranks)
                if value.is_complex() or value.is_floating_point():
                    wide = torch.complex128 if value.is_complex() else torch.float64
                    mine = ((mine.to(wide) + other) / 2).to(value.dtype)
                assert torch.equal(value, mine), name
            assert same["mask"] and not any(same[name] for name in ("center", "counts", "spectrum"))
            assert not torch.equal(of_ranks[0]["counts"], of_ranks[1]["counts"])
        saved = state.checkpointer.tensors()
        self.last = {name: tensor.detach().clone() for name, tensor in saved.items()}
        if self.stop and state.step == STOP and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)


def poisoned(compute: Any, watch: Watch) -> Any:
    """The loss, of NaN in the bad step of one rank; and a note of what forward has left."""

    def loss_of(model: Any, batch: Any) -> Any:
        bad = watch.step == BAD and os.environ["RANK"] == "1" and model.training
        images = batch["images"] * (torch.nan if bad else 1.0)
        loss = compute(model, {**batch, "images": images})
        if model.training:
            watch.within = tensors(getattr(model, "module", model))
        return loss

    return loss_of


def misread(training: Any, settings: Any, world: Any) -> str:
    """What a start says when one rank has read another bit of a weight."""
    restore = training.Checkpointer.restore

    def wrongly(self: Any, *given: Any, **named: Any) -> int:
        step = restore(self, *given, **named)
        if world.rank == 1:
            weight = training.parallel.local_part(self.model.out.weight.detach())
            weight.view(torch.int32)[0, 0] ^= 1
        return step

    training.Checkpointer.restore = wrongly
    state = training.setup(settings, world)
    try:
        training.resume(state, settings.directory, training.Group(world))
    except RuntimeError as error:
        return str(error)
    finally:
        training.Checkpointer.restore = restore
    return ""


def odd_metrics(training: Any, settings: Any, world: Any) -> list[str]:
    """What a step and a validation say when the ranks have other metrics."""
    compute, state = training.compute_loss, training.setup(settings, world)
    validation: Any = sys.modules[training.validate.__module__]
    metrics = {f"of_{world.rank}": 1.0}
    said = []
    for module, call in (
        (training, lambda: training.train_step(state, state.loader.next())),
        (validation, lambda: validation.validate(state)),
    ):
        module.compute_loss = lambda *given: compute(*given)._replace(metrics=metrics)
        try:
            call()
        except ValueError as error:
            said.append(str(error))
        module.compute_loss = compute
    return said


def reset_in_between(training: Any, settings: Any, world: Any, kind: str) -> list[bool]:
    """After which steps a buffer is alike that changes only between the steps that look.

    `kind` is the device that the comparison takes this one for: on a GPU it would make the host
    wait, so only some steps look.
    """
    parallel = training.parallel
    agree = parallel.agree_on_buffers
    device = SimpleNamespace(type=kind)
    parallel.agree_on_buffers = lambda running, step, world: agree(
        running, step, dataclasses.replace(world, device=device)
    )
    buffers = sys.modules[f"{training.__package__}.distributed.buffers"]
    training.build_model = lambda config, spec: Reset(world.rank)
    config = sys.modules[f"{training.__package__}.config"]
    settings = config.override(settings, {"train.micro_batch_size": 6})
    state, every = training.setup(settings, world), buffers.LOOK_EVERY
    buffers.LOOK_EVERY, alike = 4, []
    for _ in range(8):
        training.train_step(state, state.loader.next())
        first, second = gathered(tensors(state.model))
        alike.append(torch.equal(first["codebook"], second["codebook"]))
    buffers.LOOK_EVERY = every
    parallel.agree_on_buffers = agree
    return alike


def fail_to_read(training: Any, settings: Any, world: Any) -> None:
    """If one rank cannot read what is tried before the first step, no rank tries it."""
    adds_up = sys.modules[f"{training.__package__}.adds_up"]
    read = adds_up.read_batches

    def read_or_fail(*given: Any) -> Any:
        if world.rank == 1:
            raise OSError("the file is gone")
        return read(*given)

    adds_up.read_batches = read_or_fail
    adds_up.warn_unless_sums_add_up(training.setup(settings, world))
    adds_up.read_batches = read
    # The ranks' collectives still belong together.
    assert gathered({"rank": torch.tensor(world.rank)})[1]["rank"] == 1


class Ending:
    """Ends the run after its first validation."""

    def after_validation(self, state: Any, figures: Any) -> None:
        """As early stopping does."""
        state.finish("enough")


def end_in_a_repeated_validation(training: Any, settings: Any, world: Any) -> None:
    """A validation that a stop interrupted is repeated; what ends the run there ends it there."""
    validation = sys.modules[training.validate.__module__]
    compute = validation.compute_loss

    def stop_once(model: Any, batch: Any) -> Any:
        validation.compute_loss = compute
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute(model, batch)

    validation.compute_loss = stop_once
    config = sys.modules[f"{training.__package__}.config"]
    changes = {"run_dir": settings.run_dir.with_name("owed"), "train.validate_samples": 144}
    settings = config.override(settings, changes)
    first = training._run(settings, world, [])
    assert (first.status, first.step, first.validation) == ("preempted", 2, {}), first
    second = training._run(settings, world, [Ending()])
    assert (second.status, second.step) == ("finished", 2), second
    assert second.validation


def validate_for_long(training: Any, settings: Any, world: Any) -> None:
    """A validation may take longer than the watchdog's limit, which is for one of its batches."""
    package = training.__package__
    watchdog, validation = (
        sys.modules[f"{package}.{name}"] for name in ("distributed.watchdog", "validation")
    )
    compute, limit = validation.compute_loss, watchdog.PHASE_LIMIT
    watchdog.PHASE_LIMIT = timedelta(seconds=4)

    def slowly(model: Any, batch: Any) -> Any:
        time.sleep(0.25)
        return compute(model, batch)

    validation.compute_loss = slowly
    config = sys.modules[f"{package}.config"]
    changes = {"train.steps": 2, "train.validate_samples": 144, "parallel.timeout_minutes": 0.05}
    changes["run_dir"] = settings.run_dir.with_name("long")
    started = time.monotonic()
    assert training._run(config.override(settings, changes), world, []).status == "finished"
    assert time.monotonic() - started > 5
    validation.compute_loss, watchdog.PHASE_LIMIT = compute, limit


def main(folder: Path, packages: list[str]) -> None:
    """Train undisturbed, and stopped between two saves."""
    world = None
    for name in packages:
        training = importlib.import_module(f"{name}.train")
        config = importlib.import_module(f"{name}.config")
        training.build_model, training.blocks = lambda config, spec: Net(), lambda model: []
        compute, states = training.compute_loss, []
        for run, stop in (("whole", False), ("stopped", True), ("stopped", False)):
            watch = Watch(stop)
            training.compute_loss = poisoned(compute, watch)
            where = {"run_dir": folder / name / run}
            settings = config.override(config.preset("tiny"), SETTINGS | where)
            world = world or training.join(settings.parallel, "cpu")
            result = training._run(settings, world, [watch])
            assert result.status == ("preempted" if stop else "finished"), result
            assert not stop or result.step % 3, "stopped at a save"
            states.append(watch.last)
        whole, _, stopped = states
        odd = [key for key, tensor in whole.items() if not torch.equal(tensor, stopped[key])]
        assert not odd, f"{name}: {odd}"
        if hasattr(settings.parallel, "replicate"):  # or else each rank has its own part
            settings = config.override(settings, {"parallel.replicate": 2})
        training.compute_loss = compute
        if name == packages[0]:
            end_in_a_repeated_validation(training, settings, world)
            validate_for_long(training, settings, world)
        fail_to_read(training, settings, world)
        text = misread(training, settings, world)
        assert "must be the same on all ranks" in text and "on rank 1, " in text, text
        for text in (said := odd_metrics(training, settings, world)):
            assert "must be the same on all ranks: " in text and "of_1" in text, text
        assert len(said) == 2
        alike = reset_in_between(training, settings, world, "cuda")
        assert alike == [True, False, False, False, True, True, True, True], alike
        assert all(reset_in_between(training, settings, world, "cpu"))
        if world.rank == 0:
            print(f"{name}: the ranks agree")
    training.leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
