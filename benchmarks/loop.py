"""What a step of the loop costs beside a hand-written one, Accelerate, Fabric and the Trainer.

All train the same small perceptron in one process on one thread, and take turns: a window of steps
each, in another order each round. A contender that owns its loop (ours, the Trainer) cannot be left
in the middle, so each lives on a thread of its own that sleeps between its windows.

The work of a step is the same for all: a batch by shuffled ids from memory, forward, backward,
gradients clipped to norm 1, AdamW (fused), a schedule with warm-up and cosine, the loss added up
and read every `LOG_EVERY` steps. Batches come through a DataLoader whose dataset hands out whole
batches (`__getitems__`), except ours, which has its own.
"""

import contextlib
import gc
import importlib
import itertools
import logging
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from .common import PACKAGE, benchmark, differences, installed, render, series

BATCH, LOG_EVERY, STEPS = 32, 50, 1_000_000
Tick = Callable[[], None]


class Over(BaseException):
    """Ends a contender; no `except Exception` of a framework keeps it."""


class Contender:
    """A loop on a thread of its own, which runs for a window of steps at each request."""

    def __init__(self, loop: Callable[[Tick], None], window: int) -> None:
        self.loop, self.window, self.steps = loop, window, 0
        self.go, self.paused = threading.Semaphore(0), threading.Semaphore(0)
        self.over, self.error = False, None
        self.collects = True  # whether it leaves Python's cycle collector on
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.paused.acquire()

    def run_window(self) -> float:
        """Microseconds a step of the next window."""
        (gc.enable if self.collects else gc.disable)()
        self.go.release()
        self.paused.acquire()
        self.collects = gc.isenabled()
        if self.error:
            raise self.error
        return (self.stopped - self.started) / self.window * 1e6

    def end(self) -> None:
        """Leave the loop."""
        self.over = True
        self.go.release()
        self.thread.join()

    def _run(self) -> None:
        try:
            torch.set_num_threads(1)
            self._pause()
            self.loop(self._tick)
        except Over:
            pass
        except BaseException as error:
            self.error = error
        self.paused.release()

    def _tick(self) -> None:
        self.steps += 1
        if self.steps % self.window == 0:
            self.stopped = time.perf_counter()
            self._pause()

    def _pause(self) -> None:
        self.paused.release()
        self.go.acquire()
        if self.over:
            raise Over
        self.started = time.perf_counter()


class Task:
    """The parts that the contenders put together, each in its framework's usual way."""

    def __init__(self, config: Any) -> None:
        data, model, self.optim, self.rates = (
            importlib.import_module(f"{PACKAGE}.{name}")
            for name in ("data", "model", "optim", "schedule")
        )
        self.config = config
        self.vectors = data.Vectors(config.data.samples, config.data.features, config.data.classes)
        self.model: Callable[[], nn.Module] = lambda: model.perceptron(
            config.data.features, config.data.classes, config.model.layers, config.model.width
        )

    def loader(self) -> DataLoader:
        """Shuffled batches, dropping none (they come out even)."""
        return DataLoader(self.vectors, BATCH, shuffle=True, collate_fn=lambda batch: batch)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW as the render builds it."""
        return self.optim.build_optimizer(self.config.optim, model)

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self.rates.learning_rate(self.config.optim, step, STEPS)

    def set_rate(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Set the learning rate of a step by hand."""
        rate = self.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """The same rates by PyTorch's scheduler, for frameworks that want one."""
        peak = self.config.optim.learning_rate
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.rate(step) / peak)

    @staticmethod
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross entropy."""
        features, labels = batch
        return F.cross_entropy(model(features), labels)


class LoggedLoss:
    """A sum of losses on the device, which is read every LOG_EVERY steps as for a line of a log."""

    def __init__(self) -> None:
        self.total = torch.zeros(())
        self.steps = 0

    def add(self, loss: Tensor) -> None:
        """Add the loss of a step."""
        self.total += loss.detach()
        self.steps += 1
        if self.steps % LOG_EVERY == 0:
            self.total.item()
            self.total.zero_()


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch."""
    return itertools.chain.from_iterable(itertools.repeat(loader))


def hand_written(task: Task, tick: Tick) -> None:
    """What one would write without anything to restart, to scale or to find out afterwards."""
    model = task.model().train()
    optimizer = task.optimizer(model)
    parameters = list(model.parameters())
    logged = LoggedLoss()
    for step, batch in enumerate(endless(task.loader())):
        task.set_rate(optimizer, step)
        loss = task.loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        logged.add(loss)
        tick()


def ours(task: Task, tick: Tick) -> None:
    """The rendered project's own `run`, told apart by nothing but its model and data."""
    train = importlib.import_module(f"{PACKAGE}.train")
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)
    train.run(task.config, [SimpleNamespace(after_step=lambda state, record: tick())])


def accelerate(task: Task, tick: Tick) -> None:
    """Accelerate as its guides have it: everything prepared."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = task.model().train()
    optimizer = task.optimizer(model)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, task.loader(), task.schedule(optimizer)
    )
    logged = LoggedLoss()
    for batch in endless(loader):
        loss = task.loss(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        logged.add(loss)
        tick()


def fabric(task: Task, tick: Tick) -> None:
    """Lightning Fabric; the schedule is by hand, as Fabric has none."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = task.model().train()
    model, optimizer = fabric.setup(model, task.optimizer(model))
    loader = fabric.setup_dataloaders(task.loader())
    logged = LoggedLoss()
    for step, batch in enumerate(endless(loader)):
        loss = task.loss(model, batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        task.set_rate(optimizer, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        logged.add(loss)
        tick()


def trainer(task: Task, tick: Tick) -> None:
    """Lightning's Trainer, `barebones`: no logger, checkpoints, bar, summary, or `self.log`."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model()
            self.logged = LoggedLoss()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = task.loss(self.model, batch)
            self.logged.add(loss)
            return loss

        def on_train_batch_end(self, *arguments: Any) -> None:
            tick()

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = task.optimizer(self)
            schedule = {"scheduler": task.schedule(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, gradient_clip_val=1.0, barebones=True
    ).fit(Module(), task.loader())


CONTENDERS = {
    "hand-written": (hand_written, None),
    "hand-written, again": (hand_written, None),
    "ours": (ours, None),
    "Accelerate": (accelerate, "accelerate"),
    "Lightning Fabric": (fabric, "lightning"),
    "Lightning Trainer": (trainer, "lightning"),
}


def measure(folder: Path, smoke: bool) -> dict[str, Any]:
    """Rounds of windows, one for each contender."""
    window, rounds = (20, 2) if smoke else (50, 400)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    source = render(folder, own_model=True, tracker="none")  # the peers log nowhere either
    sys.path.insert(0, str(source))
    settings = importlib.import_module(f"{PACKAGE}.config")
    config = settings.override(
        settings.Config(),
        {
            "run_dir": folder / "run",
            "device": "cpu",
            "train.steps": STEPS,
            "train.global_batch_size": BATCH,
            "train.micro_batch_size": BATCH,
            "train.log_every": LOG_EVERY,
            "train.validate_every": 0,
            "checkpoint.every": 0,
        },
    )
    task = Task(config)
    times: dict[str, list[float]] = {}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        contenders = {
            name: Contender(lambda tick, loop=loop: loop(task, tick), window)
            for name, (loop, package) in CONTENDERS.items()
            if package is None or installed(package)
        }
        shuffled = list(contenders.items())
        for round_ in range(-1, rounds):  # the first warms up
            random.Random(round_).shuffle(shuffled)
            for name, contender in shuffled:
                time_ = contender.run_window()
                if round_ >= 0:
                    times.setdefault(name, []).append(time_)
        for contender in contenders.values():
            contender.end()
        gc.enable()
    found = {name: series(times[name], "us a step") for name in contenders}
    for name in list(contenders)[1:]:
        found[f"{name}, more"] = differences(times[name], times["hand-written"], "us a step")
    return {
        "settings": {"window": window, "rounds": rounds, "batch": BATCH, "log_every": LOG_EVERY},
        "series": found,
    }


if __name__ == "__main__":
    packages = ("torch", "numpy", "accelerate", "lightning")
    benchmark("loop", measure, packages)
