"""One try of torch.compile, in a process of its own: a compiler that has seen nothing else.

`python -m … KIND FOLDER` reads the settings from FOLDER/config.json, writes what it measured to
FOLDER/KIND.json, and carries the compile cache in FOLDER/compile_cache. A cache directory of
inductor that is empty (TORCHINDUCTOR_CACHE_DIR) is what makes a start cold.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..config import Config, from_json, override
from ..distributed import World, parallel
from ..errors import UserError
from ..files import write_json
from ..loss import means
from ..model import blocks
from ..run.hardware import peak_memory
from ..sampling import Share, fetch
from ..train import State, setup, train_step
from . import findings as compilation
from .findings import CompileCache, lookups
from .measuring import has_drawn, spread, synchronize

STEPS = 5  # that are compared with eager
WINDOW, SECONDS = 0.2, 6.0  # of a window of steps, and of all windows
PAIRS = (6, 15)  # windows of each kind, at least (for a 95 % interval) and at most


class Course(NamedTuple):
    """The first steps of a run, as far as they are compared."""

    losses: list[float]
    gradients: list[torch.Tensor]  # of the last step, on the host
    random: bool
    """Whether the steps drew random numbers."""


def cold(config: Config, folder: Path) -> dict[str, Any]:
    """Compile with nothing cached; compare with eager steps, in numbers and in time."""
    world = parallel.setup(config.parallel, config.device)
    state = setup(override(config, {"compile.mode": "none"}), world)
    if config.compile.mode == "blocks" and not list(blocks(state.model)):
        return {"skipped": "blocks(model) names no block"}
    eager = follow(state)
    state.loader.close()
    del state

    state = setup(config, world)
    with CompileCache(folder / "compile_cache", config.compile, world) as cache:
        compiled = follow(state)
        cache()
    seconds = compilation.compile_seconds()
    figures = alternate(state) | {
        "compile_seconds": {"cold": seconds, "warm": None},
        "graphs": compilation.graphs(),
        "graph_breaks": [it._asdict() for it in compilation.graph_breaks()],
        "recompiles": [it._asdict() for it in compilation.recompiles()],
        "limits_hit": [it._asdict() for it in compilation.limits_hit()],
        "random": eager.random,
        "precise": state.compute_dtype == torch.float32 and world.device.type == "cpu",
        "cache_bytes": sum(path.stat().st_size for path in folder.glob("compile_cache/*.zip")),
    }
    state.loader.close()
    del state
    if eager.random and config.compile.backend == "inductor":
        compiled = with_eager_random_numbers(config, world)
    return figures | {"difference": difference(eager, compiled)}


def warm(config: Config, folder: Path) -> dict[str, Any]:
    """The same start again, with nothing but what the run carries."""
    world = parallel.setup(config.parallel, config.device)
    state = setup(config, world)
    with CompileCache(folder / "compile_cache", config.compile, world) as cache:
        follow(state)
        saved = cache.seconds_saved()
    hits, misses = lookups()
    state.loader.close()
    seconds = compilation.compile_seconds()
    return {"seconds": seconds, "saved": saved, "hits": hits, "misses": misses}


def vary(config: Config, folder: Path) -> dict[str, Any]:
    """Steps whose batches vary in size, and in length if they can, for each `compile.dynamic`."""
    world = parallel.setup(config.parallel, config.device)
    state = setup(override(config, {"compile.mode": "none"}), world)
    batches, varied = batches_that_vary(state)
    del state
    torch.compile(torch.square, backend=config.compile.backend)(torch.ones(8))  # start it up
    result: dict[str, Any] = {"varied": varied, "shapes": len(batches)}
    for name, dynamic in (("none", None), ("true", True), ("false", False)):
        compilation.forget_compiling()
        with nothing_cached(config.compile.backend):
            state = setup(override(config, {"compile.dynamic": dynamic}), world)
            for batch in batches:
                one_step(state, batch)
            result[name] = {
                "graphs": compilation.graphs(),
                "recompiles": len(compilation.recompiles()),
                "seconds": compilation.compile_seconds(),
            }
        del state
    return result


def follow(state: State, steps: int = STEPS) -> Course:
    """Take the first steps of a run."""
    losses, gradients, random = [], [], False

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        gradients[:] = [p.grad.detach().cpu().clone() for p in parameters if p.grad is not None]

    for step in range(steps):
        batches = state.loader.next()
        if step == steps - 1:
            hook = state.optimizer.register_step_pre_hook(keep)
        train_step(state, batches)
        random |= has_drawn(state)
        losses.append(means(state.sums, state.metrics)["loss"])
        state.sums = 0.0
    hook.remove()
    return Course(losses, gradients, random)


def with_eager_random_numbers(config: Config, world: World) -> Course:
    """The compiled steps once more, with dropout's masks as eager steps draw them.

    Inductor has random numbers of its own unless it is told to fall back on eager's.
    """
    from torch._inductor import config as inductor

    compilation.forget_compiling()
    with inductor.patch(fallback_random=True):
        state = setup(config, world)
        course = follow(state)
    state.loader.close()
    return course


def difference(eager: Course, compiled: Course) -> dict[str, float]:
    """Relative differences: the largest of a loss, and that of the last gradients as one vector."""
    losses = np.array(eager.losses), np.array(compiled.losses)
    loss = float(np.max(np.abs(losses[0] - losses[1]) / np.abs(losses[0])))
    if len(eager.gradients) != len(compiled.gradients) or not eager.gradients:
        return {"loss": loss, "gradients": float("inf")}
    pairs = list(zip(eager.gradients, compiled.gradients, strict=True))
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    length = sum(float(a.double().square().sum()) for a, _ in pairs)
    return {"loss": loss, "gradients": (apart / length) ** 0.5 if length else float("inf")}


def alternate(state: State) -> dict[str, Any]:
    """Windows of steps, eager and compiled in turns, so that both see the same weather."""
    device = state.world.device
    contexts = {
        "eager": lambda: compilation.eagerly(state.model),
        "compiled": contextlib.nullcontext,
    }
    each: dict[str, list[float]] = {name: [] for name in contexts}
    peak = 0

    def window(name: str, steps: int) -> float:
        with contexts[name]():
            synchronize(device)
            started = time.perf_counter()
            for _ in range(steps):
                train_step(state, state.loader.next())
            synchronize(device)
        return (time.perf_counter() - started) / steps

    slowest = max(max(window(name, 1) for _ in range(2)) for name in contexts)
    steps = max(1, min(100, round(WINDOW / slowest)))
    pairs = max(PAIRS[0], min(PAIRS[1], round(SECONDS / (2 * steps * slowest))))
    for pair in range(pairs):
        for name in sorted(contexts, reverse=pair % 2 == 0):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            each[name].append(window(name, steps))
            if name == "compiled" or device.type != "cuda":
                peak = max(peak, peak_memory(device))
    return {
        "windows": each,
        "window_steps": steps,
        "eager_step_seconds": spread(each["eager"]),
        "step_seconds": spread(each["compiled"]),
        "peak_memory_bytes": peak,
    }


def batches_that_vary(state: State) -> tuple[list[Any], str]:
    """Three batches of different shapes, and in words how they differ."""
    dataset, order = state.loader.source.dataset, state.loader.source.order
    size = max(4, state.plan[0].places.stop - state.plan[0].places.start)  # 1 is a case of its own
    ids = np.resize(order.ids(0), size)
    full, fewer, fewest = (fetch(dataset, ids[: size - less]) for less in range(3))
    length = common_length(full)
    if length is None:
        why = "length not tried: its tensors share no axis of time that could be cut"
        return [full, fewer, fewest], f"batch size ({why})"
    shorter = cut(fewer, length - max(1, length // 8))
    try:
        one_step(state, shorter)
    except Exception as error:
        why = f"length not tried: the model refuses a shorter batch, {type(error).__name__}"
        return [full, fewer, fewest], f"batch size ({why})"
    return [full, fewer, shorter], "batch size and length"


def common_length(batch: Any) -> int | None:
    """The length of sequences [batch, length, …], if that is what all wider tensors are.

    Tensors of floating-point numbers (images, features) may mean anything by their second axis.
    """
    wide = [tensor for tensor in leaves(batch) if tensor.ndim > 1]
    lengths = {tensor.shape[1] for tensor in wide}
    if len(lengths) != 1 or any(tensor.is_floating_point() for tensor in wide):
        return None
    (length,) = lengths
    return length if length >= 4 else None


def leaves(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict | list | tuple):
        for value in batch.values() if isinstance(batch, dict) else batch:
            yield from leaves(value)


def cut(batch: Any, length: int) -> Any:
    """A batch of sequences, cut to a length."""
    if isinstance(batch, torch.Tensor):
        return batch[:, :length].contiguous() if batch.ndim > 1 else batch
    if isinstance(batch, dict):
        return {key: cut(value, length) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [cut(value, length) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def one_step(state: State, batch: Any) -> None:
    """A step of one micro-batch, whatever its shape."""
    state.plan = [Share(slice(0, 1), 1.0)]
    train_step(state, [batch])
    synchronize(state.world.device)


def nothing_cached(backend: str) -> contextlib.AbstractContextManager:
    """Context in which inductor finds nothing that it compiled before."""
    if backend != "inductor":
        return contextlib.nullcontext()
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


TRIALS: dict[str, Callable[[Config, Path], dict[str, Any]]] = {
    trial.__name__: trial for trial in (cold, warm, vary)
}


def attempt(kind: str, config: Config, folder: Path) -> dict[str, Any]:
    """What a trial found; an error of the compiler, or of the model under it, is a finding too."""
    try:
        return TRIALS[kind](config, folder)
    except UserError as error:
        return {"refused": str(error)}
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[0]}", "whole": str(error)}


def main(kind: str, folder: Path) -> None:
    """Run one trial as a command."""
    config = from_json(Config(), folder / "config.json")
    write_json(folder / f"{kind}.json", attempt(kind, config, folder))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
