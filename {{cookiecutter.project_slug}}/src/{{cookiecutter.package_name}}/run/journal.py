"""A run's metrics: computed at log steps, written to metrics.jsonl, shown on the console."""

import contextlib
import json
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..distributed import Group
from ..files import naming, open_to_write, replace_file, sync_directory
from ..loss import means
from .hardware import device_name
from .logs import ONLY_IN_FILES

log = logging.getLogger(__name__)
METRICS = "metrics.jsonl"


class Journal:
    """A callback: writes metrics.jsonl and shows progress, on rank 0.

    The file has one object per line, and only whole lines. It is synced before each save: a power
    loss costs only lines after the newest checkpoint, whose steps are done again. Progress is a
    bar on a terminal, elsewhere a line per log step.
    """

    def __init__(self, run_dir: Path, state: Any, group: Group) -> None:
        self.path, self.group, self.first_step = run_dir / METRICS, group, state.step
        self.total, self.samples = state.config.train.steps, state.config.train.global_batch_size
        self.tokens = getattr(state.spec, "tokens_per_sample", None)
        self.first, self.on_terminal = group.rank == 0, sys.stderr.isatty()
        self.behind = False  # lines wait that could not be written

    def __enter__(self) -> "Journal":
        """Open the file, without the lines of steps that will be done again; RankError."""
        self.group.from_first(self._open)
        # With room for the figures in 80 columns.
        form = "{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
        steps = {"total": self.total, "initial": self.first_step, "bar_format": form}
        self.bar = tqdm(**steps, dynamic_ncols=True, disable=not (self.first and self.on_terminal))
        self.mark = [self.first_step, time.perf_counter(), 0.0, 0.0]
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()
        if self.first:
            try:
                self.file.close()
            except OSError as error:
                log.warning("the last lines of metrics.jsonl are lost: %s", error)

    def record(self, state: Any) -> dict[str, Any]:
        """The metrics since the last record, the same on all ranks; waits for the device."""
        figures = means(state.sums, state.metrics)
        bad, norm = int(state.bad_steps), float(state.grad_norm)
        state.sums, state.bad_steps = 0.0, 0
        waited = state.loader.seconds, state.checkpointer.blocked_seconds
        before, self.mark = self.mark, [state.step, time.perf_counter(), *waited]
        steps, elapsed, data, blocked = (b - a for a, b in zip(before, self.mark, strict=True))
        rate = steps * self.samples / elapsed
        record = {
            "step": state.step,
            "samples": state.step * self.samples,
            **figures,
            "step_seconds": elapsed / steps,
            "samples_per_second": rate,
            "data_seconds": data / steps,
            "checkpoint_blocked_seconds": blocked,
            "lr": state.optimizer.param_groups[0]["lr"],
            "grad_norm": norm,
            "skipped_steps": bad,
            "time": time.time(),
        }
        drawn = state.loader.source.order.drawn(state.step)
        record |= {f"samples_of_{name}": count for name, count in drawn.items()}
        if self.tokens:
            record["tokens_per_second"] = rate * self.tokens
        if state.peak_flops and state.forward_flops:
            flops = 3 * rate * state.forward_flops  # backward takes twice what forward does
            record["mfu"] = flops / (state.peak_flops * self.group.size)
        return record

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block (a validation) out of the step time."""
        started = time.perf_counter()
        yield
        self.mark[1] += time.perf_counter() - started

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """Count the step; write and show its record if it has one."""
        self.bar.update()
        if record is not None and self.first:
            self._write(record)
            self._show(record, state.metrics[:1])

    def amend(self, figures: dict[str, float]) -> None:
        """Add figures, if any, to the record of the step that the run resumed from."""
        if figures:
            self.group.from_first(lambda: self._open(figures))
            if self.first:
                self._show_validation({"step": self.first_step, **figures})

    def sync(self) -> None:
        """Make the lines so far durable."""
        if self.first:
            with contextlib.suppress(OSError):  # what cannot be written is warned of
                os.fsync(self.file.fileno())

    def _open(self, figures: dict[str, float] | None = None) -> None:
        if self.path.is_file():  # what is there otherwise, `open_to_write` refuses
            with naming(self.path), open(self.path, "rb") as file:
                kept = [line.rstrip() for line in file if parsed(line, self.first_step)]
            if figures:
                self.file.close()
                if (last := json.loads(kept[-1]))["step"] == self.first_step:
                    kept[-1] = json.dumps(last | figures).encode()
            replace_file(self.path, b"".join(line + b"\n" for line in kept))
        with naming(self.path):
            self.file = open_to_write(self.path, "a", buffering=1 << 20)
        sync_directory(self.path.parent)

    def _write(self, record: dict[str, Any]) -> None:
        """Append a line now, or with the lines after it if the system refuses."""
        odd = [name for name, v in record.items() if isinstance(v, float) and not math.isfinite(v)]
        try:
            self.file.write(json.dumps(record | dict.fromkeys(odd)) + "\n")
            self.file.flush()  # what it cannot write it keeps, and continues there next time
            self.behind = False
        except OSError as error:
            if not self.behind:
                log.warning("metrics.jsonl cannot be written, its lines wait: %s", error)
            self.behind = True

    def _show_validation(self, record: dict[str, Any]) -> None:
        shown = [f"{n[11:].replace('_', ' ')} {v:.4f}" for n, v in validation_of(record).items()]
        if shown:
            log.info("validation at step %d: %s", record["step"], ", ".join(shown))

    def _show(self, record: dict[str, Any], metrics: tuple[str, ...]) -> None:
        self._show_validation(record)
        figures = [f"{name.replace('_', ' ')} {record[name]:.3f}" for name in ("loss", *metrics)]
        unit = "tokens" if self.tokens else "samples"
        text = "  ".join([*figures, f"{record[f'{unit}_per_second']:,.0f} {unit}/s"])
        self.bar.set_postfix_str(text)
        left = (self.total - record["step"]) * record["step_seconds"]
        text = f"step {record['step']}/{self.total}  {text}  {left:.0f} s left"
        log.info(text, extra=ONLY_IN_FILES if self.on_terminal else None)


def read_records(run_dir: Path, last_step: int = sys.maxsize) -> Iterator[dict[str, Any]]:
    """The records of metrics.jsonl up to a step, without unreadable lines."""
    path = run_dir / METRICS
    with contextlib.suppress(OSError), open(path if path.is_file() else os.devnull, "rb") as file:
        yield from filter(None, (parsed(line, last_step) for line in file))


def validated_at(run_dir: Path, step: int) -> dict[str, float]:
    """The validation's figures in the line of a step, {} if it has none."""
    records = (record for record in read_records(run_dir, step) if record["step"] == step)
    return next(filter(None, map(validation_of, records)), {})


def summary(run_dir: Path, last_step: int) -> list[str]:
    """The lines that sum a run up: median throughput and last validation, up to a step."""
    forms, record = {"samples_per_second": ",.0f", "tokens_per_second": ",.0f", "mfu": ".1%"}, {}
    rates: dict[str, list[float]] = {name: [] for name in forms}
    for record in read_records(run_dir, last_step):
        for name, values in rates.items():
            values.extend(finite(record.get(name)))
    lines = [f"{n}: {statistics.median(v):{forms[n]}} (median)" for n, v in rates.items() if v]
    lines += [f"{name}: {value:.4f}" for name, value in validation_of(record).items()]
    return [line.replace("_", " ") for line in lines]


def finite(value: Any) -> tuple[float, ...]:
    """A value of a record as a float in a tuple, () if it is no finite number."""
    with contextlib.suppress(TypeError, OverflowError):
        return (float(value),) if math.isfinite(value) else ()
    return ()


def validation_of(record: dict[str, Any]) -> dict[str, float]:
    """The finite validation figures of a record."""
    named = {name: value for name, value in record.items() if name.startswith("validation_")}
    return {name: v for name, value in named.items() for v in finite(value)}


def parsed(line: str | bytes, last_step: int = sys.maxsize) -> dict[str, Any] | None:
    """A line as a record; None if it cannot be read or is of a later step."""
    # A killed run can leave half a line, a bad disk anything.
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        record = json.loads(line)
        return record if type(record["step"]) is int and record["step"] <= last_step else None
    return None


def introduce(state: Any, run_dir: Path) -> None:
    """Log the model, the data, the batch and the run directory."""
    config, world, samples = state.config.train, state.world, state.loader.size
    device, dtype = device_name(world.device), str(state.compute_dtype).removeprefix("torch.")
    size = sum(parameter.numel() for parameter in state.model.parameters())
    data, steps = "a stream", f"{config.steps} steps"
    in_all = config.steps * config.global_batch_size
    if samples:  # of a stream nobody knows how many there are
        data, epochs = f"{samples:,} samples", in_all / samples
        steps += f" ({epochs:,.2f} epochs)" if epochs > 1 else " (less than one epoch)"
    if tokens := getattr(state.spec, "tokens_per_sample", None):
        data += f" of {tokens:,} tokens"
    drawn = state.loader.source.order.drawn(config.steps).items()
    mix = ", ".join(f"{count / in_all:.1%} {name}" for name, count in drawn)
    for line in (
        f"model  {size:,} parameters, {dtype} on {device}, ranks: {world.size}",
        f"data   {data}, {len(state.validation):,} for validation",
        f"batch  {config.global_batch_size:,} samples{mix and f' ({mix})'}; {steps}",
        f"run    {run_dir}, {f'resumed at step {state.step}' if state.step else 'new'}",
    ):
        log.info("%s", line)
