"""What a run says of its steps: metrics.jsonl and the progress bar."""

import contextlib
import gc
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..distributed import Group
from ..errors import UserError
from ..files import naming
from ..loss import means
from .logs import note

log = logging.getLogger(__name__)


class Journal:
    """metrics.jsonl and the progress bar, on rank 0: one object per line, only whole lines.

    On a terminal there is a bar; where output is recorded, a line per log step instead.
    """

    def __init__(self, run_dir: Path, state: Any, group: Group) -> None:
        self.state, self.path, self.group = state, run_dir / "metrics.jsonl", group
        self.total, self.samples = state.config.train.steps, state.config.train.global_batch_size
        self.tokens = getattr(state.spec, "tokens_per_sample", None)
        self.first = state.world.rank == 0
        self.lines = self.first and not sys.stderr.isatty()
        self.bad_in_a_row = 0
        self.mark = (state.step, time.perf_counter(), 0.0, 0.0)

    def __enter__(self) -> "Journal":
        """Open the log, after cutting off what a restored run will write again; RankError."""
        self.group.from_first(self._open)
        self.bar = tqdm(
            total=self.total,
            initial=self.state.step,
            unit="step",
            dynamic_ncols=True,
            disable=not self.first or self.lines,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Close the log; the bar stays as it is."""
        self.bar.close()
        if self.first:
            try:
                self.file.close()
            except OSError as error:
                log.warning("the last lines of metrics.jsonl are lost: %s", error)
                with contextlib.suppress(OSError):
                    os.truncate(self.path, self.written)  # no half a line

    def line(self, state: Any) -> dict[str, Any]:
        """Figures since the line before, collectively agreed ones; waits for the device.

        UserError after `train.max_bad_steps` steps in a row that were not finite.
        """
        figures = means(state.sums, state.metrics)
        bad, norm = int(state.bad_steps), float(state.grad_norm)
        state.sums, state.bad_steps = 0.0, 0
        gc.collect(1)
        since, started, data, blocked = self.mark
        self.mark = (
            state.step,
            time.perf_counter(),
            state.loader.seconds,
            state.checkpointer.blocked_seconds if state.checkpointer else 0.0,
        )
        steps, elapsed = state.step - since, self.mark[1] - started
        rate = steps * self.samples / elapsed
        self._judge(state, steps, bad)
        record = {
            "step": state.step,
            "samples": state.step * self.samples,
            **figures,
            "step_seconds": elapsed / steps,
            "samples_per_second": rate,
            "data_seconds": (self.mark[2] - data) / steps,
            "checkpoint_blocked_seconds": self.mark[3] - blocked,
            "lr": state.optimizer.param_groups[0]["lr"],
            "grad_norm": norm,
            "skipped_steps": bad,
            "time": time.time(),
        }
        if self.tokens:
            record["tokens_per_second"] = rate * self.tokens
        if state.peak_flops and state.forward_flops:
            flops = 3 * rate * state.forward_flops  # backward takes twice what forward does
            record["mfu"] = flops / (state.peak_flops * state.world.size)
        return record

    def step(self, record: dict[str, Any] | None) -> None:
        """Count one step; write and show its record if it has one."""
        self.bar.update()
        if record is None or not self.first:
            return
        finite = {key: None if _is_odd(value) else value for key, value in record.items()}
        self._write(json.dumps(finite) + "\n")
        shown = {
            "loss": f"{record['loss']:.3f}",
            "samples/s": f"{record['samples_per_second']:,.0f}",
        }
        if self.tokens:
            shown["tokens/s"] = f"{record['tokens_per_second']:,.0f}"
        self.bar.set_postfix(shown)
        judged = {k: v for k, v in record.items() if k.startswith("validation_")}
        if judged:
            text = ", ".join(f"{k[11:].replace('_', ' ')} {v:.4f}" for k, v in judged.items())
            log.info("validation at step %d: %s", record["step"], text)
        shown["left"] = f"{(self.total - record['step']) * record['step_seconds']:.0f} s"
        text = "  ".join(f"{name} {value}" for name, value in shown.items())
        text = f"step {record['step']}/{self.total}  {text}"
        note(text)
        if self.lines:
            print(text, file=sys.stderr, flush=True)

    def _open(self) -> None:
        with naming(self.path):
            if self.path.exists():
                lines = self.path.read_text("utf-8").splitlines()
                kept = [line + "\n" for line in lines if _upto(line, self.state.step)]
                temporary = self.path.with_name(f".{self.path.name}")
                temporary.write_text("".join(kept), "utf-8")
                os.replace(temporary, self.path)
            self.file = open(self.path, "a", 1 << 20, "utf-8")  # noqa: SIM115 - kept open
        self.written, self.behind = self.file.tell(), False

    def _write(self, line: str) -> None:
        """Append a line, now or, where the system refuses, with those after it."""
        try:
            self.file.write(line)
            self.file.flush()  # what it cannot write it keeps, and begins there next time
            self.written, self.behind = self.file.tell(), False
        except OSError as error:
            if not self.behind:
                log.warning("metrics.jsonl cannot be written, its lines wait: %s", error)
            self.behind = True

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count what happens meanwhile (validation) as training."""
        started = time.perf_counter()
        with self.group.patience():
            yield
        self.mark = (self.mark[0], self.mark[1] + time.perf_counter() - started, *self.mark[2:])

    def _judge(self, state: Any, steps: int, bad: int) -> None:
        self.bad_in_a_row = self.bad_in_a_row + bad if bad == steps else 0
        if bad and self.first:
            log.warning("%d steps up to %d were not finite: skipped", bad, state.step)
        if 0 < state.config.train.max_bad_steps <= self.bad_in_a_row:
            raise UserError(
                f"the last {self.bad_in_a_row} steps had a loss or gradient that was not finite; "
                "they were skipped. Look at the data, or lower --optim.learning-rate"
            )


def _upto(line: str, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False  # the half-written last line of a run that was killed


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
