"""A run's metrics: computed at log steps, written to metrics.jsonl and to the log."""

import contextlib
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..distributed import Group
from ..errors import UserError
from ..files import naming, open_to_write, replace_file, sync_directory
from ..loss import LossSum, means
from .hardware import device_name

log = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
# Names in a line of metrics.jsonl that are the run's own.
FIGURES = re.compile(
    "step|samples|loss|lr|mfu|grad_norm|skipped_steps|time|(step|data|checkpoint_blocked)_seconds|"
    "(samples|tokens)_per_second|(host|staging|device_peak|device_reserved)_bytes|slowest_rank|"
    "(slowest|median)_rank_seconds|(validation|ema|samples_of)_.*"
)


class Journal:
    """A callback: writes metrics.jsonl, one object per line, and logs its lines, on rank 0."""

    def __init__(self, run_dir: Path, state: Any, group: Group) -> None:
        self.path, self.group, self.first_step = run_dir / METRICS, group, state.step
        self.total, self.samples = state.config.train.steps, state.config.train.global_batch_size
        self.tokens = getattr(state.spec, "tokens_per_sample", None)
        self.mark = [state.step, time.perf_counter(), 0.0, 0.0]
        self.waiting = b""  # lines that could not be written

    def begin(self, figures: dict[str, float]) -> None:
        """Cut the file back to the step that the run resumes from; RankError.

        A validation's figures, if any, are added to the line of that step.
        """
        with self.group.together():
            if self.group.is_first:
                self._cut(figures)
        self.mark[1] = time.perf_counter()

    def record(self, state: Any) -> dict[str, Any]:
        """The metrics since the last record, the same on all ranks; waits for the device."""
        scalars = (torch.as_tensor(value) for value in (state.bad_steps, state.grad_norm))
        scalars = (each.to(state.sums).view(1) for each in scalars)
        *sums, bad, norm = torch.cat([state.sums, *scalars]).tolist()  # one read of the device
        figures = means(sums, state.metrics)
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
            "skipped_steps": int(bad),
            "time": time.time(),
        }
        drawn = state.loader.source.order.drawn(state.step)
        record |= {f"samples_of_{name}": count for name, count in drawn.items()}
        if self.tokens:
            record["tokens_per_second"] = rate * self.tokens
        if state.peak_flops and state.forward_flops:
            # Backward takes twice what forward does.
            record["mfu"] = 3 * rate * state.forward_flops / (state.peak_flops * self.group.size)
        return record

    def after_step(self, state: Any, record: dict[str, Any] | None) -> None:
        """Write and show the record of a step, if it has one."""
        if record is None:
            return
        self.mark[1] = time.perf_counter()  # a validation is no part of the next step's time
        if self.group.rank:
            return
        self._write(record)
        self._show_validation(record)
        figures = [f"{n.replace('_', ' ')} {record[n]:.3f}" for n in ("loss", *state.metrics[:1])]
        unit = "tokens" if self.tokens else "samples"
        left = (self.total - record["step"]) * record["step_seconds"]
        figures += [f"{record[f'{unit}_per_second']:,.0f} {unit}/s", f"{left:.0f} s left"]
        log.info("step %d/%d  %s", record["step"], self.total, "  ".join(figures))

    def _cut(self, figures: dict[str, float]) -> None:
        kept: list[bytes] = []
        if self.path.is_file():
            with naming(self.path), open(self.path, "rb") as file:
                kept = [line.rstrip() for line in file if parsed(line, self.first_step)]
        if figures and kept and (last := json.loads(kept[-1]))["step"] == self.first_step:
            kept[-1] = as_line(last | figures)
        replace_file(self.path, b"".join(line + b"\n" for line in kept))
        sync_directory(self.path.parent)
        self._show_validation({"step": self.first_step, **figures})

    def _write(self, record: dict[str, Any]) -> None:
        """Append a line and those that wait; if the system refuses, all of them wait."""
        behind = bool(self.waiting)
        self.waiting += as_line(record) + b"\n"
        try:
            with open_to_write(self.path, "ab", buffering=0) as file:
                while self.waiting:  # a full disk may take a part of a line, and the rest later
                    self.waiting = self.waiting[file.write(self.waiting) :]
        except OSError as error:
            if not behind:
                log.warning("metrics.jsonl cannot be written, its lines wait for room: %s", error)

    def _show_validation(self, record: dict[str, Any]) -> None:
        shown = [f"{n[11:].replace('_', ' ')} {v:.4f}" for n, v in validation_of(record).items()]
        if shown:
            log.info("validation at step %d: %s", record["step"], ", ".join(shown))


def validation_figures(figures: dict[str, Any]) -> dict[str, float]:
    """Figures of a validation as they are recorded: floats, by names that begin "validation_".

    Callbacks may have added some. UserError, by name, for one that is no number.
    """
    recorded: dict[str, float] = {}
    for name, value in figures.items():
        try:
            if not hasattr(value, "__float__"):  # a text may have digits, and is no number
                raise TypeError
            number = float(value)
        except Exception:  # such as of a tensor with several elements
            problem = f"the validation figure {name!a} is {value!r:.60}, which is no number"
            raise UserError(f"{problem}: correct the callback that sets it") from None
        # Training may have a figure of the same name.
        recorded[f"validation_{name.removeprefix('validation_')}"] = number
    return recorded


def as_line(record: dict[str, Any]) -> bytes:
    """A record as JSON, which has no word for NaN and infinity: they become null."""
    odd = [n for n, v in record.items() if hasattr(v, "__float__") and not math.isfinite(v)]
    return json.dumps(record | dict.fromkeys(odd), default=float).encode()


def read_records(run_dir: Path, last_step: int = sys.maxsize) -> Iterator[dict[str, Any]]:
    """The records of metrics.jsonl up to a step, without unreadable lines."""
    path = run_dir / METRICS
    with contextlib.suppress(OSError), open(path if path.is_file() else os.devnull, "rb") as file:
        yield from filter(None, (parsed(line, last_step) for line in file))


def validated_at(run_dir: Path, step: int) -> dict[str, float]:
    """The validation's figures in the line of a step, {} if it has none."""
    records = (record for record in read_records(run_dir, step) if record["step"] == step)
    return next(filter(None, map(validation_of, records)), {})


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
        return record if type(step := record["step"]) is int and 0 <= step <= last_step else None
    return None


def metric_names(loss: LossSum, before: tuple[str, ...] | None) -> tuple[str, ...]:
    """The names of a loss's metrics; UserError unless they are free, and as before."""
    names, what = tuple(loss.metrics), "the metrics of compute_loss (model.py)"
    if before not in (None, names):
        raise UserError(f"{what} must be the same in each batch: {names} follow on {before}")
    if before is None and (clash := [*filter(FIGURES.fullmatch, names)]):
        raise UserError(f"{what}: {clash[0]!r} is a figure of the run, choose another name")
    return names


def introduce(state: Any, run_dir: Path) -> None:
    """Log the model, the data, the batch and the run directory."""
    config, world, samples = state.config.train, state.world, state.loader.size
    device, dtype = device_name(world.device), str(state.compute_dtype).removeprefix("torch.")
    size = sum(parameter.numel() for parameter in state.model.parameters())
    trained = sum(p.numel() for p in state.model.parameters() if p.requires_grad)
    part = f" ({trained:,} trained)" if trained < size else ""
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
        f"model  {size:,} parameters{part}, {dtype} on {device}, ranks: {world.size}",
        f"data   {data}, {len(state.validation):,} for validation",
        f"batch  {config.global_batch_size:,} samples{mix and f' ({mix})'}; {steps}",
        f"run    {run_dir}, {f'resumed at step {state.step}' if state.step else 'new'}",
    ):
        log.info("%s", line)
