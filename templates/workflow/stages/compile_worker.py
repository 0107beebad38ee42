"""The child processes of the compile stage, whose compilers have seen nothing else.

`python -m PACKAGE.workflow.compile_worker KIND FOLDER` reads its settings from FOLDER/config.json
and writes what it measured to FOLDER/KIND.json. Kinds are `cold`, with an empty compile cache,
`warm`, with what the cold one left there, and `vary`, with batches of several shapes.
"""

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch._dynamo import utils as dynamo
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache
from torch.utils import _pytree as pytree

from ..compile import compile_seconds, graphs
from ..config import Config, from_json, override
from ..device import synchronize
from ..distributed import join
from ..errors import UserError
from ..files import write_json
from ..model import blocks
from ..run.hardware import peak_memory
from ..sampling import Share, fetch
from ..train import State, setup, train_step
from .stage import StageConfig
from .timing import has_drawn, record_steps, spread

STEPS = 5  # compared with eager steps
WINDOW, SECONDS = 0.2, 6.0  # of a window of steps, and of all windows together
PAIRS = (6, 15)  # of windows: at least (for a 95 % interval), and at most
DYNAMIC = {"none": None, "true": True, "false": False}  # values of --compile.dynamic

Figures = dict[str, Any]


class Finding(NamedTuple):
    """Something the compiler could not do as hoped: at which file:line, and why."""

    where: str
    reason: str

    def __str__(self) -> str:
        """As in model.py:7: a print."""
        return f"{self.where or 'place unknown'}: {self.reason}"


class FirstSteps(NamedTuple):
    """The first steps of a run, as far as they are compared."""

    losses: Sequence[float]
    gradients: list[torch.Tensor]  # of the last step, on the host
    random: bool
    """Whether the steps drew random numbers."""


def cold(config: Config) -> Figures:
    """Compile with nothing cached; compare with eager steps, in numbers and in time."""
    world = join(config.parallel, config.device)
    state = setup(override(config, {"compile.mode": "none"}), world)
    if config.compile.mode == "blocks" and not list(blocks(state.model)):
        return {"skipped": "blocks(model) names no block"}
    eager = first_steps(state)
    del state

    state = setup(config, world)
    compiled = first_steps(state)
    seconds = compile_seconds()
    figures = time_windows(state) | {
        "compile_seconds": {"cold": seconds, "warm": None},
        "graphs": graphs(),
        "graph_breaks": [finding._asdict() for finding in graph_breaks()],
        "recompiles": [finding._asdict() for finding in recompiles()],
        "limits_hit": [finding._asdict() for finding in limits_hit()],
        "random": eager.random,
        "precise": state.compute_dtype == torch.float32 and world.device.type == "cpu",
    }
    del state
    if eager.random and config.compile.backend == "inductor":
        forget_compiling()
        # Else inductor draws its own random numbers, and dropout's masks differ from eager's.
        with fresh_cache(), inductor.patch(fallback_random=True):
            compiled = first_steps(setup(config, world))
    return figures | {"difference": difference(eager, compiled)}


def warm(config: Config) -> Figures:
    """The same start again, with the compile cache that the cold one left."""
    first_steps(setup(config))
    caches = (("inductor", "fxgraph_cache"), ("aot_autograd", "autograd_cache"))
    hits, misses = (
        sum(dynamo.counters[part][f"{cache}_{end}"] for part, cache in caches)
        for end in ("hit", "miss")
    )
    return {"seconds": compile_seconds(), "hits": hits, "misses": misses}


def vary(config: Config) -> Figures:
    """Graphs and recompiles for batches that vary in shape, with each `compile.dynamic`."""
    world = join(config.parallel, config.device)
    batches, varied = batches_that_vary(setup(override(config, {"compile.mode": "none"}), world))
    backend = config.compile.backend
    figures: Figures = {"varied": varied, "shapes": len(batches), "backend": backend}
    for name, dynamic in DYNAMIC.items():
        forget_compiling()
        state = setup(override(config, {"compile.dynamic": dynamic}), world)
        for batch in batches:
            one_step(state, batch)
        figures[name] = {"graphs": graphs(), "recompiles": len(recompiles())}
    return figures


def measure_kind(kind: str, config: Config) -> Figures:
    """What a child measured; an error of the compiler, or of the model under it, is a result."""
    try:
        return {"cold": cold, "warm": warm, "vary": vary}[kind](config)
    except UserError as error:
        return {"refused": str(error)}
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        return {"error": f"{type(error).__name__}: {first_line}", "whole": str(error)}


def first_steps(state: State) -> FirstSteps:
    """Take the first steps of a run."""
    gradients: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        gradients[:] = [p.grad.detach().cpu().clone() for p in parameters if p.grad is not None]

    steps = record_steps(state, STEPS - 1)
    hook = state.optimizer.register_step_pre_hook(keep)
    steps += record_steps(state, 1)
    hook.remove()
    state.loader.close()
    return FirstSteps(steps.losses, gradients, has_drawn(state))


def difference(eager: FirstSteps, compiled: FirstSteps) -> dict[str, float]:
    """Relative differences: the largest of a loss, and that of the last gradients as one vector."""
    loss = float(np.abs(np.divide(compiled.losses, eager.losses) - 1).max())
    if len(eager.gradients) != len(compiled.gradients) or not eager.gradients:
        return {"loss": loss, "gradients": math.inf}
    pairs = zip(eager.gradients, compiled.gradients, strict=True)
    apart = nn.utils.get_total_norm([a.double() - b.double() for a, b in pairs])
    return {"loss": loss, "gradients": float(apart / nn.utils.get_total_norm(eager.gradients))}


def time_windows(state: State) -> Figures:
    """Time windows of eager and compiled steps in turns, so that other load meets both alike."""
    device = state.world.device
    windows: dict[str, list[float]] = {"eager": [], "compiled": []}

    def window(name: str, steps: int) -> float:
        with eagerly(state.model) if name == "eager" else contextlib.nullcontext():
            synchronize(device)
            started = time.perf_counter()
            for _ in range(steps):
                train_step(state, state.loader.next())
            synchronize(device)
        return (time.perf_counter() - started) / steps

    slowest = max(max(window(name, 1) for _ in range(2)) for name in windows)
    steps = int(np.clip(round(WINDOW / slowest), 1, 100))
    pairs = int(np.clip(round(SECONDS / (2 * steps * slowest)), *PAIRS))
    for pair in range(pairs):
        for name in sorted(windows, reverse=pair % 2 == 0):
            windows[name].append(window(name, steps))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    window("compiled", 1)
    state.loader.close()
    return {
        "windows": windows,
        "window_steps": steps,
        "eager_step_seconds": spread(windows["eager"]),
        "step_seconds": spread(windows["compiled"]),
        "peak_memory_bytes": peak_memory(device),
    }


def batches_that_vary(state: State) -> tuple[list[Any], str]:
    """Three batches of different shapes, and in words how they differ."""
    dataset, order = state.loader.source.dataset, state.loader.source.order
    size = max(4, state.plan[0].places.stop - state.plan[0].places.start)  # 1 is a case of its own
    ids = np.resize(order.ids(0), size)
    full, fewer, fewest = (fetch(dataset, ids[: size - less]) for less in range(3))
    problem = "its tensors share no length that could be cut"
    if (shorter := shortened(fewer)) is not None:
        try:
            one_step(state, shorter)
            return [full, fewer, shorter], "batch size and length"
        except Exception as error:
            problem = f"the model refuses a shorter batch, {type(error).__name__}"
    return [full, fewer, fewest], f"batch size ({problem})"


def shortened(batch: Any) -> Any | None:
    """A batch of sequences [batch, length, …] cut by an eighth; None if they share no length."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    wide = [tensor for tensor in tensors if tensor.ndim > 1]
    length = max((tensor.shape[1] for tensor in wide), default=0)
    # The second axis of floating-point tensors (images, features) may mean anything.
    unlike = any(tensor.shape[1] != length or tensor.is_floating_point() for tensor in wide)
    if unlike or length < 4:
        return None
    kept = length - max(1, length // 8)
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t[:, :kept].contiguous() if t.ndim > 1 else t, batch
    )


def one_step(state: State, batch: Any) -> None:
    """Take a step on one micro-batch, whatever its shape."""
    state.plan = [Share(slice(0, 1), 1.0)]
    train_step(state, [batch])
    synchronize(state.world.device)


def graph_breaks() -> list[Finding]:
    """Where a graph had to end early, each place once."""
    found, torch_itself = [], str(Path(torch.__file__).parent)
    for entry in dynamo.graph_break_reasons:
        places = [(frame.filename, frame.lineno) for frame in entry.user_stack]
        own = [place for place in places if not place[0].startswith(torch_itself)]
        reason = entry.reason
        if reason.startswith("generic_jump"):  # torch's name for a break that it can resume after
            reason = "Data-dependent branching"
        found.append(_finding((own or places or [("", 0)])[-1], reason))
    for entry in dynamo.get_compilation_metrics():
        if entry.fail_type and not _limited(entry):  # a whole function, as for a break in a loop
            path = entry.fail_user_frame_filename or entry.co_filename
            line = entry.fail_user_frame_lineno or entry.co_firstlineno
            found.append(_finding((path, line), entry.fail_reason or ""))
    unique: dict[str, Finding] = {}
    for finding in found:
        unique.setdefault(finding.where or finding.reason, finding)
    return list(unique.values())


def recompiles() -> list[Finding]:
    """What was compiled again, and the guard that failed; one for each time."""
    entries = dynamo.get_compilation_metrics()
    return [_recompile(e) for e in entries if e.recompile_reason and not _limited(e)]


def limits_hit() -> list[Finding]:
    """What runs eagerly since it was compiled too often, with the last guard that failed."""
    return [_recompile(e) for e in dynamo.get_compilation_metrics() if _limited(e)]


def forget_compiling() -> None:
    """Throw away all that was compiled in this process, and the records of it."""
    torch.compiler.reset()
    dynamo.counters.clear()
    dynamo.clear_compilation_metrics()


@contextlib.contextmanager
def eagerly(model: nn.Module) -> Iterator[None]:
    """Call a model that was compiled in place as if it had not been.

    `torch.compiler.set_stance("force_eager")` would leave wrappers around each compiled call, which
    slow a short eager step down by some 2 %.
    """
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if module._compiled_call_impl is not None:
                stack.enter_context(patch.object(module, "_compiled_call_impl", None))
            if eager := getattr(module.forward, "_torchdynamo_orig_callable", None):
                stack.enter_context(patch.object(module, "forward", eager))
        yield


def _limited(entry: dynamo.CompilationMetrics) -> bool:
    return "recompile limit exceeded" in (entry.fail_reason or "")


def _recompile(entry: dynamo.CompilationMetrics) -> Finding:
    # "0/1: GUARD    # line of code # file:line", then the stack of the user's code, newest last.
    text = entry.recompile_reason or ""
    guard = re.sub(r"^\d+/\d+: ", "", text.partition("\n")[0]).split("  # ")[0]
    stack = re.findall(r'File "(.+?)", line (\d+)', text)
    place = stack[-1] if stack else (entry.co_filename, entry.co_firstlineno)
    return _finding(place, guard)


def _finding(place: tuple[str | None, Any], reason: str) -> Finding:
    path, line = place
    near = os.path.relpath(path) if path else ""
    where = f"{path if near.startswith('..') else near}:{line}" if path else ""
    return Finding(where, reason.strip().partition("\n")[0])


if __name__ == "__main__":
    kind, folder = sys.argv[1], Path(sys.argv[2])
    config = from_json(StageConfig(), folder / "config.json")
    write_json(folder / f"{kind}.json", measure_kind(kind, config))
