"""Compute a run's metrics at log steps, and write them to metrics.jsonl and to the log."""

import contextlib
import json
import logging
import math
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..distributed import Group
from ..errors import UserError
from ..files import naming, open_to_write, replace_file, sync_directory
from ..loss import LossSum, means
from .hardware import device_name

if TYPE_CHECKING:
    from ..train import State

log = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
# Fields that the run itself writes to metrics.jsonl. Metrics of compute_loss must not have these
# names. Nor may their names begin with ema_, since validation_ema_x is the validation metric x with
# averaged weights.
FIGURES = re.compile(
    "step|samples|loss|lr|mfu|grad_norm|skipped_steps|time"
    "|(step|data|checkpoint_blocked|checkpoint_buffers)_seconds"
    "|(samples|tokens)_per_second"
    "|(host|staging|device_peak|device_reserved)_bytes"
    "|slowest_rank|(slowest|median)_rank_seconds"
    "|(validation|ema|samples_of)_.*"
)


@dataclass
class Mark:
    """Totals at the last record. The next record reports how much they have grown since."""

    step: int
    # A value of time.perf_counter(). It is set again when training continues after other work, such
    # as a validation.
    clock: float
    # The time that training has waited for data.
    data_seconds: float
    # The time that training has waited for saves.
    blocked_seconds: float
    # The time to allocate host buffers for saves.
    buffers_seconds: float


class Journal:
    """Callback that, on rank 0, logs progress and writes metrics.jsonl (one object per line)."""

    def __init__(self, run_dir: Path, state: "State", group: Group) -> None:
        self.path = run_dir / METRICS
        self.group = group
        self.first_step = state.step
        self.last_step = state.config.train.steps
        self.batch_size = state.config.train.global_batch_size
        # The data's spec has this attribute only if a sample is a sequence of tokens.
        self.tokens_per_sample = getattr(state.spec, "tokens_per_sample", None)
        self.mark = Mark(
            step=state.step,
            clock=time.perf_counter(),
            data_seconds=0.0,
            blocked_seconds=0.0,
            buffers_seconds=0.0,
        )
        # Names of the validation metrics for which a warning has reported a value that is not
        # finite.
        self.undefined: set[str] = set()
        # Lines that could not be written yet.
        self.unwritten = b""

    def begin(self, validation: dict[str, float]) -> None:
        """Remove the lines of metrics.jsonl after the step from which the run starts; collective.

        Metrics in `validation` are added to the line of that step. If rank 0 cannot rewrite the
        file, all ranks raise RankError.
        """
        with self.group.together():
            if self.group.is_first:
                self._cut(validation)
        # Training starts here, so the start-up since `__init__` does not count as its time.
        self.mark.clock = time.perf_counter()

    def record(self, state: "State") -> dict[str, Any]:
        """Return the metrics since the last record; waits for the device.

        Losses and counts are over all ranks. Times are those of this rank.
        """
        # Steps only queue work on the device, and reading a value waits until that work is done. So
        # all values are joined into one tensor, which is read once per record.
        all_sums = torch.as_tensor(state.sums)
        bad_steps = torch.as_tensor(state.bad_steps).to(all_sums).view(1)
        grad_norm = torch.as_tensor(state.grad_norm).to(all_sums).view(1)
        *sums, skipped, norm = torch.cat([all_sums, bad_steps, grad_norm]).tolist()
        loss_and_metrics = means(sums, state.metrics or ())
        # The next record starts from zero.
        state.sums = 0.0
        state.bad_steps = 0

        before = self.mark
        now = Mark(
            step=state.step,
            clock=time.perf_counter(),
            data_seconds=state.loader.seconds,
            blocked_seconds=state.checkpointer.blocked_seconds if state.checkpointer else 0.0,
            buffers_seconds=state.checkpointer.buffers_seconds if state.checkpointer else 0.0,
        )
        self.mark = now
        steps = now.step - before.step
        seconds = now.clock - before.clock
        samples_per_second = steps * self.batch_size / seconds
        record = {
            "step": state.step,
            "samples": state.step * self.batch_size,
            **loss_and_metrics,
            "step_seconds": seconds / steps,
            "samples_per_second": samples_per_second,
            # Per step, like step_seconds.
            "data_seconds": (now.data_seconds - before.data_seconds) / steps,
            # In total since the last record.
            "checkpoint_blocked_seconds": now.blocked_seconds - before.blocked_seconds,
            "checkpoint_buffers_seconds": now.buffers_seconds - before.buffers_seconds,
            "lr": state.optimizer.param_groups[0]["lr"],
            "grad_norm": norm,
            "skipped_steps": int(skipped),
            "time": time.time(),
        }
        # `drawn` counts the samples from each dataset of a mixture. Other data gives {}.
        for dataset, count in state.loader.source.order.drawn(state.step).items():
            record[f"samples_of_{dataset}"] = count
        if self.tokens_per_sample:
            record["tokens_per_second"] = samples_per_second * self.tokens_per_sample
        if state.peak_flops and state.forward_flops:
            # A backward pass takes twice the FLOPs of a forward pass.
            flops_per_second = 3 * samples_per_second * state.forward_flops
            record["mfu"] = flops_per_second / (state.peak_flops * self.group.size)
        return record

    def after_step(self, state: "State", record: dict[str, Any] | None) -> None:
        """Write and log the record of a step, if it has one."""
        if record is None:
            return
        # Restart the clock, so that a validation since `record` does not count as training time.
        self.mark.clock = time.perf_counter()
        if not self.group.is_first:
            return
        self._write(record)
        self._show_validation(record)
        self._show_progress(record, state.metrics or ())

    def _cut(self, validation: dict[str, float]) -> None:
        """Remove lines after `first_step`, and add a validation to the line of that step."""
        # A killed run may have written lines after its last checkpoint. A resume repeats those
        # steps, so the file would have their lines twice. Unreadable lines are removed, too.
        kept: list[bytes] = []
        if self.path.is_file():
            with naming(self.path), open(self.path, "rb") as file:
                kept = [line.rstrip() for line in file if parsed(line, self.first_step)]
        if validation and kept:
            last = json.loads(kept[-1])
            if last["step"] == self.first_step:
                kept[-1] = as_line(last | validation)
        replace_file(self.path, b"".join(line + b"\n" for line in kept))
        sync_directory(self.path.parent)
        self._show_validation({"step": self.first_step, **validation})

    def _write(self, record: dict[str, Any]) -> None:
        """Append a record's line, after earlier lines whose write failed.

        If a write fails, the next call writes what is left.
        """
        # Lines are left over only from a failed write, which has logged the warning below.
        has_warned = bool(self.unwritten)
        self.unwritten += as_line(record) + b"\n"
        try:
            with open_to_write(self.path, "ab", buffering=0) as file:
                # A full disk may accept only the start of a line. The rest remains in `unwritten`.
                while self.unwritten:
                    written = file.write(self.unwritten)
                    self.unwritten = self.unwritten[written:]
        except OSError as error:
            if not has_warned:
                log.warning("metrics.jsonl cannot be written: %s; retrying at each log step", error)

    def _show_validation(self, record: dict[str, Any]) -> None:
        """Log a record's validation metrics; warn once of each metric that is not finite."""
        shown = []
        for name, value in record.items():
            if not name.startswith("validation_") or not isinstance(value, float):
                continue
            label = name.removeprefix("validation_").replace("_", " ")
            shown.append(f"{label} {value:.4f}")
            if not math.isfinite(value) and name not in self.undefined:
                self.undefined.add(name)
                log.warning(
                    "validation %s is %s at step %d: a checkpoint with such a value is never the "
                    "best. If a batch may not define a metric, give it its own count, 0 in such a "
                    "batch",
                    label,
                    value,
                    record["step"],
                )
        if shown:
            log.info("validation at step %d: %s", record["step"], ", ".join(shown))

    def _show_progress(self, record: dict[str, Any], metrics: tuple[str, ...]) -> None:
        shown = [f"loss {record['loss']:.3f}"]
        # Only the first metric is shown, to keep the line short.
        if metrics:
            first = metrics[0]
            shown.append(f"{first.replace('_', ' ')} {record[first]:.3f}")
        if self.tokens_per_sample:
            shown.append(f"{record['tokens_per_second']:,.0f} tokens/s")
        else:
            shown.append(f"{record['samples_per_second']:,.0f} samples/s")
        seconds_left = (self.last_step - record["step"]) * record["step_seconds"]
        shown.append(f"{seconds_left:.0f} s left")
        log.info("step %d/%d  %s", record["step"], self.last_step, "  ".join(shown))


def validation_figures(figures: dict[str, Any]) -> dict[str, float]:
    """Convert the metrics of a validation to floats named "validation_...".

    Callbacks may have added some of them. Raises UserError for a metric that is not a number.
    """
    recorded: dict[str, float] = {}
    for name, value in figures.items():
        try:
            # float() would also accept a string of digits, so let the `except` below report it.
            if not hasattr(value, "__float__"):
                raise TypeError
            number = float(value)
        except Exception:
            # float() may raise a library's own error, as torch does for a tensor of several
            # elements.
            problem = f"the validation metric {name!a} is {value!r:.60}, which is not a number"
            raise UserError(f"{problem}: correct the callback that sets it") from None
        # Without the prefix, a metric that a callback added could replace a training metric.
        recorded[f"validation_{name.removeprefix('validation_')}"] = number
    return recorded


def as_line(record: dict[str, Any]) -> bytes:
    """Encode a record as JSON; NaN and infinity, which JSON cannot express, become null."""
    encodable = dict(record)
    for name, value in record.items():
        if not hasattr(value, "__float__"):
            continue
        try:
            is_finite = math.isfinite(value)
        except OverflowError:
            # The value is an integer too large for a float. JSON can express it.
            is_finite = True
        except (TypeError, ValueError, RuntimeError):
            raise UserError(
                f"{name} is not one number but {value!r:.80}: a callback may add numbers, text and "
                "lists to a record"
            ) from None
        if not is_finite:
            encodable[name] = None
    # json calls `default` for values whose type it does not know: tensors and NumPy's numbers.
    return json.dumps(encodable, default=float).encode()


def read_records(run_dir: Path, last_step: int = sys.maxsize) -> Iterator[dict[str, Any]]:
    """Yield the readable records of metrics.jsonl up to `last_step`, if the file is readable."""
    path = run_dir / METRICS
    with contextlib.suppress(OSError):
        # If `path` were a pipe, opening it would wait for a writer.
        if not path.is_file():
            return
        with open(path, "rb") as file:
            for line in file:
                record = parsed(line, last_step)
                if record is not None:
                    yield record


def validated_at(run_dir: Path, step: int) -> dict[str, float]:
    """Return the validation metrics in the line of a step; {} if there are none."""
    for record in read_records(run_dir, step):
        if record["step"] == step:
            validation = validation_of(record)
            if validation:
                return validation
    return {}


def finite(value: Any) -> bool:
    """Return whether a value of a record is a finite number."""
    try:
        # isfinite raises TypeError for a value that is not a number, and OverflowError for a huge
        # integer.
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def validation_of(record: dict[str, Any]) -> dict[str, float]:
    """Return the finite validation metrics of a record."""
    validation: dict[str, float] = {}
    for name, value in record.items():
        if name.startswith("validation_") and finite(value):
            validation[name] = float(value)
    return validation


def parsed(line: str | bytes, last_step: int = sys.maxsize) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl; None if it is unreadable or from a later step."""
    # A killed run can leave half a line, and a bad disk can return arbitrary bytes.
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        record = json.loads(line)
        step = record["step"]
        # isinstance would accept JSON's `true`, since bool is a subclass of int.
        if type(step) is int and 0 <= step <= last_step:
            return record
    return None


def metric_names(loss: LossSum, before: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the names of a loss's metrics.

    `before` has the names in the previous batch; it is None in the first batch. Raises UserError if
    the names have changed since, or if the run itself records a field of the same name (FIGURES).
    """
    names = tuple(loss.metrics)
    what = "the metrics of compute_loss (model.py)"
    if before is not None:
        if names != before:
            raise UserError(f"{what} must be the same in each batch: now {names}, before {before}")
        return names
    for name in names:
        if FIGURES.fullmatch(name):
            raise UserError(f"{what}: the run itself records {name!r}; choose another name")
    return names


def log_start(state: "State", run_dir: Path) -> None:
    """Log the model, the data, the batch and the run directory."""
    begin = f"resumed at step {state.step}" if state.step else "new"
    log.info("model  %s", _model(state))
    log.info("data   %s", _data(state))
    log.info("batch  %s", _batch(state))
    log.info("run    %s, %s", run_dir, begin)


def _model(state: "State") -> str:
    parameters = list(state.model.parameters())
    size = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    text = f"{size:,} parameters"
    if trained < size:
        text += f" ({trained:,} trained)"
    dtype = str(state.compute_dtype).removeprefix("torch.")
    text += f", {dtype} on {device_name(state.world.device)}, ranks: {state.world.size}"
    # Compiling pays off on a GPU, so show its mode there.
    if state.world.device.type == "cuda":
        text += f", --compile.mode {state.config.compile.mode}"
    return text


def _data(state: "State") -> str:
    samples = state.loader.size
    text = f"{samples:,} samples" if samples else "a stream"
    tokens = getattr(state.spec, "tokens_per_sample", None)
    if tokens:
        text += f" of {tokens:,} tokens"
    return f"{text}, {len(state.validation):,} for validation"


def _batch(state: "State") -> str:
    settings = state.config.train
    drawn_in_all = settings.steps * settings.global_batch_size
    batch = f"{settings.global_batch_size:,} samples"
    # `drawn` counts the samples from each dataset of a mixture. Other data gives {}.
    drawn = state.loader.source.order.drawn(settings.steps)
    if drawn:
        fractions = [f"{count / drawn_in_all:.1%} {name}" for name, count in drawn.items()]
        batch += f" ({', '.join(fractions)})"
    steps = f"{settings.steps} steps"
    # The number of samples in a stream is unknown, and so is the length of an epoch.
    samples = state.loader.size
    if samples:
        epochs = drawn_in_all / samples
        steps += f" ({epochs:,.2f} epochs)" if epochs >= 1 else " (less than one epoch)"
    return f"{batch}; {steps}"
