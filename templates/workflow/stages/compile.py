"""The compile stage: does torch.compile take the model whole, is it right, is it worth it?

Each mode is measured in processes of its own, whose compilers have seen nothing else: first with an
empty compile cache, then with what the first one left there. `python -m` this module FOLDER TASK,
where the task is `cold` or `warm`, reads FOLDER/settings.json and writes FOLDER/TASK.json.
"""

import contextlib
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch._dynamo import utils as dynamo
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache

from ..compile import compile_seconds, graphs
from ..config import Config, from_json, override
from ..distributed import join
from ..errors import RankError, UserError
from ..files import to_json, write_json
from ..model import blocks
from ..run.hardware import in_units, peak_memory
from ..train import State, setup
from .chain import recommend
from .interleaved import TOO_NOISY, Interval, speedup_of, time_interleaved, without_loader
from .processes import run_task
from .stage import Stage, StageConfig
from .timing import describe, has_drawn, record_steps, spread

MODES = ("blocks", "full")
TIMEOUT = 1800.0  # seconds for one process
STEPS = 5  # compared with eager steps
# Largest relative differences: of a loss, and of all gradients as one vector.
PRECISE = {"loss": 1e-4, "gradients": 1e-2}  # float32 throughout
ROUNDED = {"loss": 1e-2, "gradients": 1e-1}  # bf16 or TF32: fused code rounds less often
NO_COMPILER = re.compile("InvalidCxxCompiler|TritonMissing|Python.h: No such file")
OVER_LIMIT = "recompile limit exceeded"  # in torch's reason for not compiling
SHOWN = 6  # graph breaks or recompiles; the figures hold all

Figures = dict[str, Any]
Finding = dict[str, str]  # where (file:line) the compiler could not do as hoped, and the reason
FirstSteps = tuple[np.ndarray, list[torch.Tensor]]  # losses, and the last gradients, on the host


def measure(config: Config) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not."""
    stage = Stage("compile", config)
    with tempfile.TemporaryDirectory(prefix="compile-") as scratch:
        judge(stage, {mode: try_mode(config, mode, Path(scratch) / mode) for mode in MODES})
    return stage.close()


def try_mode(config: Config, mode: str, folder: Path) -> Figures:
    """Measure one mode, cold and warm; the only figure may be "skipped" or "error", with why."""
    # With fullgraph the compiler would stop at the first graph break: the stage lists all.
    config = override(config, {"compile.mode": mode, "compile.fullgraph": False})
    print(f"     {mode}: compiling with an empty cache, and timing eager steps ...", flush=True)
    figures = run_apart("cold", config, folder)
    cached = any(path.is_file() for path in (folder / "cache").rglob("*"))  # not by every backend
    if "graphs" in figures and cached:
        print(f"     {mode}: starting again with the compile cache ...", flush=True)
        figures["restart"] = run_apart("warm", config, folder)
        figures["compile_seconds"]["warm"] = figures["restart"].get("seconds")
    return figures


def run_apart(task: str, config: Config, folder: Path) -> Figures:
    """What a process measured with a compile cache in `folder`."""
    folder.mkdir(exist_ok=True)
    write_json(folder / "settings.json", to_json(config))
    cache = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache", "TRITON_CACHE_DIR": f"{folder}/triton"}
    try:
        figures = run_task("compile", folder, task, seconds=TIMEOUT, **dict[str, Any](cache))
    except RankError as error:  # the compiler has killed its process
        return {"error": str(error)}
    if "refused" in figures:  # by the project itself, not by the compiler
        raise UserError(figures["refused"])
    return figures


def judge(stage: Stage, modes: dict[str, Figures]) -> None:
    """Turn what was measured into checks, figures and advice."""
    judge_compiling(stage, modes)
    compiled = {mode: figures for mode, figures in modes.items() if "graphs" in figures}
    stage.figures |= {"modes": compiled, "best": "none"}
    if not compiled:
        for name in ("graph_breaks", "recompiles", "recompile_limit", "numerics", "speedup"):
            stage.check(name, None, measured="nothing was compiled", wanted="measured")
        return
    for name in ("graph_breaks", "recompiles"):
        judge_findings(stage, compiled, name)
    hit = in_words(compiled, "limits_hit")
    stage.check(
        "recompile_limit",
        not hit,
        measured="; ".join(hit) or "not hit",
        wanted="not hit: beyond it a function runs eagerly",
        advice="keep what the guards name from changing, or try --compile.dynamic True",
    )
    judge_numerics(stage, compiled)
    judge_speed(stage, compiled)


def judge_compiling(stage: Stage, modes: dict[str, Figures]) -> None:
    """Every mode compiles and runs, cold and warm; not measured without a C++ compiler."""
    parts, errors = [], []
    for mode, figures in modes.items():
        restart = figures.get("restart", {})
        errors += [each["error"] for each in (figures, restart) if "error" in each]
        if "graphs" not in figures:
            reason = figures.get("error") or f"not tried, {figures['skipped']}"
            parts.append(f"{mode}: {first_line(reason)}")
            continue
        errors += [] if figures["graphs"] else ["no graph was compiled"]
        text = f"{mode}: {figures['compile_seconds']['cold']:.1f} s cold"
        if restart:
            warm = first_line(restart.get("error") or f"{restart['seconds']:.1f} s")
            text += f", {warm} with the project's compile cache"
        memory = in_units(figures["peak_memory_bytes"])
        parts.append(f"{text}, graphs {figures['graphs']}, peak memory {memory}")
    passed, advice = not errors, "--compile.backend aot_eager (then eager) narrows the cause down"
    if any(map(NO_COMPILER.search, errors)):
        passed = None
        advice = "inductor needs a C++ compiler on a CPU (apt install g++) and Triton on a GPU"
    measured, wanted = "; ".join(parts), "every mode compiles and runs"
    stage.check("compiles", passed, measured=measured, wanted=wanted, advice=advice)


def judge_findings(stage: Stage, compiled: dict[str, Figures], name: str) -> None:
    """Graph breaks or recompiles pass if each has its place and reason."""
    findings = [finding for figures in compiled.values() for finding in figures[name]]
    passed = all(finding["where"] and finding["reason"] for finding in findings)
    advice = f"TORCH_LOGS={name} with `train` shows what they are"
    if findings and name == "graph_breaks" and stage.config.compile.fullgraph:
        passed, advice = False, "--compile.fullgraph makes each of them an error"
    lines = in_words(compiled, name)
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"{len(lines) - SHOWN} more"]
    counts = ", ".join(f"{mode} {len(figures[name])}" for mode, figures in compiled.items())
    wanted = f"no {name.replace('_', ' ')}, or each with its place and reason"
    measured = "; ".join([counts, *lines])
    stage.check(name, passed, measured=measured, wanted=wanted, advice=advice)


def in_words(compiled: dict[str, Figures], name: str) -> list[str]:
    """The findings of that name, each once, as in full: model.py:7: a print."""
    findings = [(mode, each) for mode, figures in compiled.items() for each in figures[name]]
    lines = [f"{mode}: {f['where'] or 'place unknown'}: {f['reason']}" for mode, f in findings]
    return list(dict.fromkeys(lines))


def judge_numerics(stage: Stage, compiled: dict[str, Figures]) -> None:
    """Compare compiled steps with eager ones: same weights, batches and random numbers."""
    apart = {mode: figures["difference"] for mode, figures in compiled.items()}
    any_mode = next(iter(compiled.values()))  # all have one precision, and draw the same
    limit = PRECISE if any_mode["precise"] else ROUNDED
    parts = [f"{m}: loss {d['loss']:.1e}, gradients {d['gradients']:.1e}" for m, d in apart.items()]
    if any_mode["random"]:
        parts[-1] += " (with eager's random numbers: inductor's fallback_random)"
    stage.check(
        "numerics",
        all(d[name] <= limit[name] for d in apart.values() for name in limit),  # false for NaN
        measured=f"after {STEPS} steps, relative to eager: {'; '.join(parts)}",
        wanted=f"at most {limit['loss']:.0e} and {limit['gradients']:.0e}",
        advice="do not train with a mode that differs; --compile.backend aot_eager shows whether "
        "inductor's kernels are at fault",
    )


def judge_speed(stage: Stage, compiled: dict[str, Figures]) -> None:
    """Say how fast each mode is, advise the best and hand it on to the stages after this one."""
    speedups: dict[str, Interval] = {}
    parts, given, noisy = [], stage.config.compile.mode, False
    for mode, figures in compiled.items():
        windows = figures["windows"]
        speedup, verdict = speedup_of(windows["eager"], windows["compiled"])
        figures |= {"speedup": speedup._asdict(), "verdict": verdict}
        speedups[mode], noisy = speedup, noisy or verdict == TOO_NOISY
        parts.append(
            f"{mode}: {verdict}, {speedup} times as fast as eager, {len(windows['eager'])} pairs "
            f"of windows, a step {describe(figures['step_seconds'])}"
        )
    measured, wanted = "; ".join(parts), "measured, whatever it is"
    advice = "measure again when nothing else runs on this machine"
    stage.check("speedup", None if noisy else True, measured=measured, wanted=wanted, advice=advice)
    faster = [mode for mode in compiled if compiled[mode]["verdict"] == "faster"]
    best = next(iter(faster), "none")
    if len(faster) > 1 and speedups["full"].low > speedups["blocks"].high:
        best = "full"  # else blocks, which compile sooner
    stage.figures["best"] = best
    if best != "none":
        stage.advise(f"train with --compile.mode {best}: {worth(compiled[best], speedups[best])}")
    elif not noisy:
        stage.advise("train with --compile.mode none: no mode is faster here")
    if breaks := in_words(compiled, "graph_breaks"):
        stage.advise(f"fewer graph breaks make it faster; begin with {breaks[0]}")
    if best == "none" and compiled.get(given, {}).get("verdict") == "slower":
        recommend(stage, "compile.mode", "none")
    for mode, speedup in speedups.items():
        if mode == best != given:
            recommend(stage, "compile.mode", mode, speedup if given == "none" else None)


def worth(figures: Figures, speedup: Interval) -> str:
    """What a mode brings, and after how many steps the first compile has paid off."""
    gain = figures["eager_step_seconds"]["median"] - figures["step_seconds"]["median"]
    seconds = figures["compile_seconds"]["cold"]
    steps = f" after {seconds / gain:,.0f} steps" if gain > 0 else ""
    return f"{speedup} times as fast; the {seconds:.0f} s of a first compile pay off{steps}"


def first_line(text: str) -> str:
    """The first line of a text."""
    return text.strip().partition("\n")[0]


def attempt(task: str, config: Config) -> Figures:
    """What a process measures; an error of the compiler, or of the model under it, is a result."""
    try:
        return {"cold": cold, "warm": warm}[task](config)
    except UserError as error:
        return {"refused": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).strip()}"}


def cold(config: Config) -> Figures:
    """Compile with nothing cached; compare with eager steps, in numbers and in time."""
    world = join(config.parallel, config.device)
    state = setup(override(config, {"compile.mode": "none"}), world)
    if config.compile.mode == "blocks" and not list(blocks(state.model)):
        return {"skipped": "blocks(model) names no block"}
    eager, random = first_steps(state), has_drawn(state)
    del state
    state = setup(config, world)
    compiled, seconds = first_steps(state), compile_seconds()
    again, limits_hit = recompiles()
    figures = time_windows(state) | {
        "compile_seconds": {"cold": seconds, "warm": None},
        "graphs": graphs(),
        "graph_breaks": graph_breaks(),
        "recompiles": again,
        "limits_hit": limits_hit,
        "random": random,
        "precise": state.compute_dtype == torch.float32 and world.device.type == "cpu",
    }
    del state
    if random and config.compile.backend == "inductor":
        torch.compiler.reset()
        # Else inductor draws its own random numbers, and dropout's masks differ from eager's.
        with fresh_cache(), inductor.patch(fallback_random=True):
            compiled = first_steps(setup(config, world))
    return figures | {"difference": difference(eager, compiled)}


def warm(config: Config) -> Figures:
    """The same start again, with the compile cache that the cold one left."""
    first_steps(setup(config))
    counters = dynamo.counters
    hits, misses = (
        counters["inductor"][f"fxgraph_cache_{end}"]
        + counters["aot_autograd"][f"autograd_cache_{end}"]
        for end in ("hit", "miss")
    )
    return {"seconds": compile_seconds(), "hits": hits, "misses": misses}


def first_steps(state: State) -> FirstSteps:
    """Take the first steps of a run."""
    gradients: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        gradients[:] = [p.grad.detach().cpu().clone() for p in parameters if p.grad is not None]

    hook = state.optimizer.register_step_pre_hook(keep)
    losses = record_steps(state, STEPS).losses
    hook.remove()
    state.loader.close()
    return losses, gradients


def difference(eager: FirstSteps, compiled: FirstSteps) -> dict[str, float]:
    """Relative differences: the largest of a loss, and of the last gradients as one vector."""
    loss = float(np.abs(np.divide(compiled[0], eager[0]) - 1).max())
    if len(eager[1]) != len(compiled[1]) or not eager[1]:
        return {"loss": loss, "gradients": math.inf}
    apart = [a.double() - b.double() for a, b in zip(eager[1], compiled[1], strict=True)]
    norms = nn.utils.get_total_norm(apart), nn.utils.get_total_norm(eager[1])
    return {"loss": loss, "gradients": float(norms[0] / norms[1])}


def time_windows(state: State) -> Figures:
    """Time interleaved windows of eager and compiled steps."""
    device, compiled = state.world.device, without_loader(state)

    def eager(steps: int) -> float:
        with eagerly(state.model):
            return compiled(steps)

    windows = time_interleaved({"eager": eager, "compiled": compiled})
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    compiled(1)
    state.loader.close()
    return {
        "windows": windows,
        "eager_step_seconds": spread(windows["eager"]),
        "step_seconds": spread(windows["compiled"]),
        "peak_memory_bytes": peak_memory(device),
    }


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


def graph_breaks() -> list[Finding]:
    """Where a graph had to end early, each place once."""
    found, torch_itself = [], str(Path(torch.__file__).parent)
    for entry in dynamo.graph_break_reasons:
        places = [(frame.filename, frame.lineno) for frame in entry.user_stack]
        own = [place for place in places if not place[0].startswith(torch_itself)]
        reason = entry.reason
        if reason.startswith("generic_jump"):  # torch's name for a break that it can resume after
            reason = "Data-dependent branching"
        found.append(finding(*(own or places or [("", 0)])[-1], reason))
    for entry in dynamo.get_compilation_metrics():
        if entry.fail_type and OVER_LIMIT not in (entry.fail_reason or ""):
            # A whole function is not compiled, as for a break in a loop.
            path = entry.fail_user_frame_filename or entry.co_filename
            line = entry.fail_user_frame_lineno or entry.co_firstlineno
            found.append(finding(path, line, entry.fail_reason or ""))
    return list({entry["where"] or entry["reason"]: entry for entry in found}.values())


def recompiles() -> tuple[list[Finding], list[Finding]]:
    """What was compiled again, each time, and what runs eagerly since it was compiled too often.

    The reason is the guard that failed, the place the line that it comes from.
    """
    again, limits_hit = [], []
    for entry in dynamo.get_compilation_metrics():
        text, over_limit = entry.recompile_reason or "", OVER_LIMIT in (entry.fail_reason or "")
        if text or over_limit:
            # "0/1: GUARD    # line of code # file:line", then the stack of the user's code.
            guard = re.sub(r"^\d+/\d+: ", "", text.partition("\n")[0]).split("  # ")[0]
            stack = re.findall(r'File "(.+?)", line (\d+)', text)
            path, line = stack[-1] if stack else (entry.co_filename, entry.co_firstlineno)
            (limits_hit if over_limit else again).append(finding(path, line, guard))
    return again, limits_hit


def finding(path: str | None, line: Any, reason: str) -> Finding:
    """The reason with torch's first hint and its link; below this folder the path is relative."""
    near = os.path.relpath(path) if path else ""
    where = f"{path if near.startswith('..') else near}:{line}" if path else ""
    hint, link = (re.findall(each, reason)[:1] for each in (r"Hint: (.+)", r"https://\S+"))
    return {"where": where, "reason": " ".join([first_line(reason), *hint, *link])}


if __name__ == "__main__":
    folder, task = Path(sys.argv[1]), sys.argv[2]
    config = from_json(StageConfig(), folder / "settings.json")
    write_json(folder / f"{task}.json", attempt(task, config))
