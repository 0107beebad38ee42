"""Compile the run's model and compare it with eager steps: the tasks of the compile stage.

The arguments are FOLDER and TASK. A task reads FOLDER/settings.json and writes FOLDER/TASK.json.
The task `cold` compiles with an empty compile cache, the task `warm` with the cache that `cold` has
filled. Each task runs in a new process.
"""

import gc
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict
from unittest.mock import patch

import numpy as np
import torch
from torch._dynamo import utils as dynamo
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache

from ..compile import compile_seconds, graphs
from ..config import Config, load, override
from ..distributed import join
from ..errors import UserError
from ..files import write_json
from ..model import blocks
from ..train import State, setup
from .interleaved import time_interleaved, without_loader
from .stage import StageConfig
from .timing import record_steps

# The number of compiled steps that are compared with eager steps.
STEPS = 5
# Allowed relative differences between compiled and eager steps in pure float32: of a loss, and of
# all gradients as one vector.
PRECISE = {"loss": 1e-4, "gradients": 1e-2}
# With bf16 or TF32, more is allowed, since eager code rounds intermediate values more often than
# fused code.
ROUNDED = {"loss": 1e-2, "gradients": 1e-1}

# The measurements of one mode, as the tasks write them to JSON.
ModeResult = dict[str, Any]


class Finding(TypedDict):
    """A graph break, recompile or recompile limit: its location in the code, and the reason."""

    where: str
    reason: str


@dataclass(frozen=True)
class FirstSteps:
    """The losses of a run's first steps, and the gradients of the last one, in host memory."""

    losses: np.ndarray
    gradients: list[torch.Tensor]


def main() -> None:
    """Run a task and write its result."""
    folder = Path(sys.argv[1])
    task = sys.argv[2]
    config = load(folder / "settings.json", StageConfig)
    write_json(folder / f"{task}.json", attempt(task, config))


def attempt(task: str, config: Config) -> ModeResult:
    """Run a task and return its result; an error of the compiler or the model is a result, too."""
    try:
        if task == "cold":
            return cold(config)
        # Take the same first steps again, with the cache that `cold` has left.
        first_steps(setup(config))
        return {"seconds": compile_seconds()}
    except UserError as error:
        return {"refused": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).strip()}"}


def cold(config: Config) -> ModeResult:
    """Take eager and compiled steps, with an empty cache; compare their numerics and speed."""
    world = join(config.parallel, config.device)
    state = setup(override(config, {"compile.mode": "none"}), world)
    if config.compile.mode == "blocks" and not list(blocks(state.model)):
        return {"skipped": "blocks(model) returns no blocks"}
    eager = first_steps(state)
    # Free the first model, since two may not fit into memory. With activation checkpointing, blocks
    # are in reference cycles, so only the garbage collector frees them.
    del state
    gc.collect()
    state = setup(config, world)
    compiled = first_steps(state)
    # Read the compiler's records now, since the timing below may compile again.
    result: ModeResult = {
        "compile_seconds": {"cold": compile_seconds(), "warm": None},
        "graphs": graphs(),
        **findings(),
    }
    result["windows"] = time_windows(state)
    # On a GPU, products of float32 may be computed in TF32, which is less precise.
    result["precise"] = state.compute_dtype == torch.float32 and world.device.type == "cpu"
    del state
    result["difference"] = difference(eager, compiled)
    if differs(result) and config.compile.backend == "inductor":
        # Inductor may draw other random numbers than eager mode, so that dropout has other masks.
        # With `fallback_random` it draws the same ones, so compile and compare again.
        torch.compiler.reset()
        with fresh_cache(), inductor.patch(fallback_random=True):
            compiled = first_steps(setup(config, world))
        result["difference"] = difference(eager, compiled)
    return result


def first_steps(state: State) -> FirstSteps:
    """Take the first steps of a run."""
    losses = record_steps(state, STEPS - 1).losses
    # A step clears the gradients at its end. Disable this for the last step, to read them.
    with patch.object(state.optimizer, "zero_grad"):
        last_loss = record_steps(state, 1).losses
    gradients = [p.grad.cpu() for p in state.model.parameters() if p.grad is not None]
    state.optimizer.zero_grad()
    state.loader.close()
    return FirstSteps(losses=np.append(losses, last_loss), gradients=gradients)


def difference(eager: FirstSteps, compiled: FirstSteps) -> dict[str, float]:
    """Return the largest relative difference of a loss, and that of all gradients as one vector."""
    # A loss may be exactly 0 in both. The lower bound avoids 0 / 0.
    magnitude = np.maximum(np.abs(eager.losses), 1e-12)
    loss_difference = (np.abs(compiled.losses - eager.losses) / magnitude).max()
    gradient_differences: list[torch.Tensor] = []
    for expected, actual in zip(eager.gradients, compiled.gradients, strict=True):
        gradient_differences.append(expected.double() - actual.double())
    distance = torch.nn.utils.get_total_norm(gradient_differences)
    norm = torch.nn.utils.get_total_norm(eager.gradients)
    return {"loss": float(loss_difference), "gradients": float(distance / norm)}


def differs(result: ModeResult) -> bool:
    """Return whether compiled steps differ from eager ones by more than rounding."""
    limits = ROUNDED
    if result["precise"]:
        limits = PRECISE
    for name, limit in limits.items():
        # A NaN is never within the limit.
        within_limit = result["difference"][name] <= limit
        if not within_limit:
            return True
    return False


def time_windows(state: State) -> dict[str, list[float]]:
    """Return the seconds per step in interleaved windows of eager and compiled steps."""
    compiled = without_loader(state)
    # With the stance "force_eager", torch.compile's wrapper runs the model's eager code. The
    # wrapper remains, and makes a short eager step about 2 % slower than it would be without.
    eager = torch.compiler.set_stance("force_eager")(compiled)
    return time_interleaved({"eager": eager, "compiled": compiled})


def findings() -> dict[str, list[Finding]]:
    """Return three lists: graph breaks, recompiles, and recompile limits that were reached.

    A location has at most one graph break in the list, even if it broke several graphs.
    """
    breaks = graph_breaks()
    recompiles: list[Finding] = []
    limits_hit: list[Finding] = []
    for entry in dynamo.get_compilation_metrics():
        failure = entry.fail_reason or ""
        if entry.fail_type and "recompile limit exceeded" not in failure:
            # The compiler gives up on a whole function, for example at a graph break in a loop.
            # torch does not count this as a graph break.
            line = entry.fail_user_frame_lineno or entry.co_firstlineno
            path = entry.fail_user_frame_filename or entry.co_filename
            breaks.append(finding(path, line, failure))
        elif failure:
            # The function has reached the limit of recompiles.
            limits_hit.append(failed_guard(entry))
        elif entry.recompile_reason:
            recompiles.append(failed_guard(entry))
    # A graph break without a location counts once per reason.
    by_location: dict[str, Finding] = {}
    for graph_break in breaks:
        by_location[graph_break["where"] or graph_break["reason"]] = graph_break
    return {
        "graph_breaks": list(by_location.values()),
        "recompiles": recompiles,
        "limits_hit": limits_hit,
    }


def graph_breaks() -> list[Finding]:
    """List the graph breaks that torch counted, each at the innermost line outside of torch."""
    breaks: list[Finding] = []
    for entry in dynamo.graph_break_reasons:
        # torch calls a branch on the value of a tensor "generic_jump".
        reason = entry.reason.replace("generic_jump", "Data-dependent branching:")
        frames = list(entry.user_stack)
        outside = [frame for frame in frames if not frame.filename.startswith(torch.__path__[0])]
        # If all frames are inside torch, the location is the innermost of them.
        if outside:
            frames = outside
        if frames:
            innermost = frames[-1]
            breaks.append(finding(innermost.filename, innermost.lineno, reason))
        else:
            breaks.append(finding("", 0, reason))
    return breaks


def failed_guard(entry: dynamo.CompilationMetrics) -> Finding:
    """Return the guard whose failure caused a recompile, at the line of code that it guards."""
    path = entry.co_filename
    line = entry.co_firstlineno
    # The text is "ID: GUARD    # line of code # file:line", then the stack of the user's code.
    # ID is torch's number of the earlier compilation, such as 0/1.
    text = entry.recompile_reason or ""
    stack = re.findall(r'File "(.+?)", line (\d+)', text)
    if stack:
        path, line = stack[-1]
    _, _, from_guard = text.partition(": ")
    guard, _, _ = from_guard.partition("  # ")
    return finding(path, line, guard)


def finding(path: str | None, line: int | str | None, reason: str) -> Finding:
    """Build a finding with a location, relative to the working directory, and a one-line reason."""
    where = ""
    if path:
        here = f"{Path.cwd()}/"
        where = f"{path.removeprefix(here)}:{line}"
    return {"where": where, "reason": reason.strip().partition("\n")[0]}


if __name__ == "__main__":
    main()
