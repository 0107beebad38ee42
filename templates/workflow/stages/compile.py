"""The compile stage: graph breaks, recompiles, numerics and speed of torch.compile.

Each mode is measured in two processes that compiled nothing before: first with an empty compile
cache, then with the cache that the first one left. `python -m` this module FOLDER TASK, where the
task is `cold` or `warm`, reads FOLDER/settings.json and writes FOLDER/TASK.json.
"""

import gc
import math
import re
import sys
import tempfile
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
from ..distributed import join, parallel
from ..errors import RankError, UserError
from ..files import to_json, write_json
from ..model import blocks
from ..train import State, setup
from .chain import advise, recommend
from .interleaved import TOO_NOISY, Interval, speedup_of, time_interleaved, without_loader
from .processes import run_task
from .stage import Stage, StageConfig
from .timing import describe, record_steps, spread

# The hooks of a sharded model break the graph of the whole.
MODES = ("blocks",) if parallel.SHARDED else ("blocks", "full")
# Seconds for one process.
TIMEOUT = 1800.0
# Compiled steps that are compared with eager steps.
STEPS = 5
# Largest relative differences of a loss, and of all gradients as one vector.
# Float32 throughout:
PRECISE = {"loss": 1e-4, "gradients": 1e-2}
# With bf16 or TF32, since fused code rounds less often:
ROUNDED = {"loss": 1e-2, "gradients": 1e-1}
NO_COMPILER = re.compile("InvalidCxxCompiler|TritonMissing|Python.h: No such file")
# Findings of one check that are printed; the stage's file holds all.
SHOWN = 6

FINDINGS_ADVICE = (
    "TORCH_LOGS=graph_breaks,recompiles with `train` shows them; where guards fail, "
    "keep what they name from changing, or try --compile.dynamic True"
)

# What was measured of one mode, as the processes write it in JSON.
Figures = dict[str, Any]


class Finding(TypedDict):
    """Something that the compiler could not do."""

    where: str
    reason: str


@dataclass(frozen=True)
class FirstSteps:
    """The first steps of a run: their losses, and the last gradients, in host memory."""

    losses: np.ndarray
    gradients: list[torch.Tensor]


def measure(config: Config) -> int:
    """Measure and judge; return 0 if the gate is passed, else 1."""
    stage = Stage("compile", config)
    modes: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="compile-") as scratch:
        for mode in MODES:
            modes[mode] = try_mode(config, mode, Path(scratch) / mode)
    judge(stage, modes)
    return stage.close()


def try_mode(config: Config, mode: str, folder: Path) -> Figures:
    """Measure one mode, cold and warm; "skipped" or "error" say why it could not be."""
    print(f"     {mode}: compiling with an empty cache, and timing eager steps ...", flush=True)
    folder.mkdir()
    write_json(folder / "settings.json", to_json(override(config, {"compile.mode": mode})))
    cache = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cpp", "TRITON_CACHE_DIR": f"{folder}/gpu"}
    figures: Figures = {}
    try:
        figures = run_task("compile", folder, "cold", seconds=TIMEOUT, **cache)
        # The other backends have no cache.
        if "graphs" in figures and config.compile.backend == "inductor":
            warm = run_task("compile", folder, "warm", seconds=TIMEOUT, **cache)
            figures["compile_seconds"]["warm"] = warm.pop("seconds", None)
            figures |= warm
    except RankError as error:
        # The compiler has killed its process.
        figures["error"] = str(error)
    if "refused" in figures:
        # The project itself refuses these settings: that is no finding about the compiler.
        raise UserError(figures["refused"])
    return figures


def judge(stage: Stage, modes: dict[str, Figures]) -> None:
    """Turn what was measured into checks, figures and advice."""
    compiled = {mode: figures for mode, figures in modes.items() if "graphs" in figures}
    stage.figures |= {"modes": compiled, "best": "none"}
    judge_compiling(stage, modes)
    if compiled:
        explained = "none, or each with its place and reason"
        judge_findings(stage, compiled, "graph_breaks", wanted=explained)
        judge_findings(stage, compiled, "recompiles", wanted=explained)
        judge_recompile_limit(stage, compiled)
        judge_numerics(stage, compiled)
        judge_speed(stage, compiled)
    recommend_mode(stage, modes)


def judge_compiling(stage: Stage, modes: dict[str, Figures]) -> None:
    """Pass if every mode compiles and runs, cold and warm; not measured without a compiler."""
    outcomes: list[str] = []
    errors: list[str] = []
    for mode, figures in modes.items():
        # A mode may have compiled cold and failed warm: then it is in both lists.
        if "error" in figures:
            errors.append(f"{mode}: {figures['error']}")
        if "skipped" in figures:
            outcomes.append(f"{mode}: not tried, {figures['skipped']}")
        elif "graphs" in figures:
            seconds = figures["compile_seconds"]
            outcome = f"{mode}: graphs {figures['graphs']}, {seconds['cold']:.1f} s cold"
            if seconds["warm"]:
                outcome += f", {seconds['warm']:.1f} s with a warm cache"
            outcomes.append(outcome)
            if not figures["graphs"]:
                errors.append(f"{mode}: no graph was compiled")
    passed = not errors
    advice = "--compile.backend aot_eager (then eager) narrows the cause down"
    if any(NO_COMPILER.search(error) for error in errors):
        passed = None
        advice = "inductor needs a C++ compiler on a CPU (apt install g++) and Triton on a GPU"
    first_lines = [error.partition("\n")[0] for error in errors]
    measured = "; ".join(outcomes + first_lines)
    stage.check("compiles", passed, measured=measured, wanted="every mode compiles", advice=advice)


def judge_findings(stage: Stage, compiled: dict[str, Figures], name: str, wanted: str) -> None:
    """Pass if each finding, in the figure that is called as the check, has its place and reason."""
    passed = True
    for figures in compiled.values():
        for each in figures[name]:
            if not each["where"] or not each["reason"]:
                passed = False
    measured = describe_findings(compiled, name)
    stage.check(name, passed, measured=measured, wanted=wanted, advice=FINDINGS_ADVICE)


def judge_recompile_limit(stage: Stage, compiled: dict[str, Figures]) -> None:
    """Pass if no function was compiled as often as the compiler allows."""
    passed = not any(figures["limits_hit"] for figures in compiled.values())
    measured = describe_findings(compiled, "limits_hit")
    wanted = "not hit: beyond it a function runs eagerly"
    stage.check("recompile_limit", passed, measured=measured, wanted=wanted, advice=FINDINGS_ADVICE)


def describe_findings(compiled: dict[str, Figures], figure: str) -> str:
    """Count the findings of each mode and list the first of them, each once."""
    counts: list[str] = []
    lines: list[str] = []
    for mode, figures in compiled.items():
        findings = figures[figure]
        counts.append(f"{mode} {len(findings)}")
        for each in findings:
            lines.append(f"{mode}: {each['where'] or 'place unknown'}: {each['reason']}")
    lines = list(dict.fromkeys(lines))
    shown = lines[:SHOWN]
    if len(lines) > SHOWN:
        shown.append(f"{len(lines) - SHOWN} more")
    return "; ".join([", ".join(counts), *shown])


def judge_numerics(stage: Stage, compiled: dict[str, Figures]) -> None:
    """Compare compiled steps with eager ones: same weights, batches and random numbers."""
    passed = True
    limit = PRECISE
    parts: list[str] = []
    for mode, figures in compiled.items():
        apart = figures["difference"]
        parts.append(f"{mode}: loss {apart['loss']:.1e}, gradients {apart['gradients']:.1e}")
        if differs(figures):
            passed = False
        if not figures["precise"]:
            limit = ROUNDED
    measured = f"after {STEPS} steps, relative to eager: {'; '.join(parts)}"
    wanted = f"at most {limit['loss']:.0e} and {limit['gradients']:.0e}"
    advice = "do not train with it; --compile.backend aot_eager shows if inductor is at fault"
    stage.check("numerics", passed, measured=measured, wanted=wanted, advice=advice)


def judge_speed(stage: Stage, compiled: dict[str, Figures]) -> None:
    """Compare the time of compiled and eager steps, and add the results to the figures."""
    passed = True
    parts: list[str] = []
    for mode, figures in compiled.items():
        windows = figures["windows"]
        speedup, verdict = speedup_of(windows["eager"], windows["compiled"])
        seconds = spread(windows["compiled"])
        figures["speedup"] = speedup._asdict()
        figures["verdict"] = verdict
        figures["eager_step_seconds"] = spread(windows["eager"])
        figures["step_seconds"] = seconds
        # Steps after which the time of the first compile is saved.
        figures["paid_after"] = None
        if verdict == "faster":
            saved = seconds["median"] * (speedup.value - 1)
            figures["paid_after"] = math.ceil(figures["compile_seconds"]["cold"] / saved)
        if verdict == TOO_NOISY:
            passed = None
        parts.append(f"{mode}: {verdict}, {speedup} times as fast, a step {describe(seconds)}")
    advice = "measure again when nothing else runs on this machine"
    stage.check("speedup", passed, measured="; ".join(parts), wanted="measured", advice=advice)


def recommend_mode(stage: Stage, modes: dict[str, Figures]) -> None:
    """Advise the fastest mode that is right and earns its first compile back; hand it on."""
    given = stage.config.compile.mode
    problems: dict[str, str] = {}
    faster: list[str] = []
    for mode, figures in modes.items():
        problem = problem_of(figures, stage.config.train.steps)
        if problem:
            problems[mode] = problem
        elif figures.get("paid_after"):
            faster.append(mode)
    if faster:
        best = best_of(faster, modes)
        figures = modes[best]
        stage.figures["best"] = best
        speedup = Interval(**figures["speedup"])
        cold = f"the {figures['compile_seconds']['cold']:.0f} s of a first compile"
        pays = f"{cold} pay off after {figures['paid_after']:,} steps"
        advise(stage, f"train with --compile.mode {best}: {speedup} times as fast; {pays}")
        if best != given:
            # The speedup is relative to eager steps, so it holds only for a run without compiling.
            recommend(stage, "compile.mode", best, speedup if given == "none" else None)
        return
    if problems or stage.status == "pass":
        reasons = "; ".join(f"{mode}: {problem}" for mode, problem in problems.items())
        advise(stage, f"train with --compile.mode none: {reasons or 'no mode is faster here'}")
    if given in problems:
        recommend(stage, "compile.mode", "none")


def best_of(faster: list[str], modes: dict[str, Figures]) -> str:
    """Return the mode to train with, of those that are faster than eager steps."""
    if len(faster) == 1:
        return faster[0]
    # Blocks compile sooner: the whole model must be faster beyond the noise.
    if modes["full"]["speedup"]["low"] > modes["blocks"]["speedup"]["high"]:
        return "full"
    return "blocks"


def problem_of(figures: Figures, steps: int) -> str:
    """Say why not to train so many steps with a mode; empty if nothing is against it."""
    if "error" in figures or "skipped" in figures:
        return figures.get("error", "").partition("\n")[0]
    if not figures["graphs"]:
        return "no graph was compiled"
    if differs(figures):
        return "its losses or gradients are not those of eager steps"
    if figures["limits_hit"]:
        return "it compiles again and again, up to the limit"
    if figures["verdict"] == "slower":
        return "slower than eager steps"
    paid_after = figures["paid_after"]
    if paid_after is not None and paid_after > steps:
        return f"a first compile pays off after {paid_after:,} steps, and the run has {steps:,}"
    return ""


def attempt(task: str, config: Config) -> Figures:
    """Measure in this process; an error of the compiler, or of the model under it, is a result."""
    try:
        if task == "cold":
            return cold(config)
        # The same start again, with the cache that `cold` has left.
        first_steps(setup(config))
        return {"seconds": compile_seconds()}
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
    eager = first_steps(state)
    # Both models need not fit into memory together. Recomputed blocks refer to themselves, so only
    # the garbage collector frees them.
    del state
    gc.collect()
    state = setup(config, world)
    compiled = first_steps(state)
    figures: Figures = {
        # Read now: what runs after it compiles, too.
        "compile_seconds": {"cold": compile_seconds(), "warm": None},
        "graphs": graphs(),
        **findings(),
        "windows": time_windows(state),
        "precise": state.compute_dtype == torch.float32 and world.device.type == "cpu",
    }
    del state
    figures["difference"] = difference(eager, compiled)
    if differs(figures) and config.compile.backend == "inductor":
        torch.compiler.reset()
        # Inductor may draw its own random numbers: let dropout have the same masks as in eager.
        with fresh_cache(), inductor.patch(fallback_random=True):
            figures["difference"] = difference(eager, first_steps(setup(config, world)))
    return figures


def first_steps(state: State) -> FirstSteps:
    """Take the first steps of a run."""
    losses = record_steps(state, STEPS - 1).losses
    # A step ends by clearing the gradients: the last one must keep them.
    with patch.object(state.optimizer, "zero_grad"):
        last_loss = record_steps(state, 1).losses
    gradients = [p.grad.cpu() for p in state.model.parameters() if p.grad is not None]
    state.optimizer.zero_grad()
    state.loader.close()
    return FirstSteps(losses=np.append(losses, last_loss), gradients=gradients)


def difference(eager: FirstSteps, compiled: FirstSteps) -> dict[str, float]:
    """Return relative differences: the largest of a loss, and of all gradients as one vector."""
    ratios = np.divide(compiled.losses, eager.losses)
    apart: list[torch.Tensor] = []
    for expected, actual in zip(eager.gradients, compiled.gradients, strict=True):
        apart.append(expected.double() - actual.double())
    distance = torch.nn.utils.get_total_norm(apart)
    norm = torch.nn.utils.get_total_norm(eager.gradients)
    return {"loss": float(np.abs(ratios - 1).max()), "gradients": float(distance / norm)}


def differs(figures: Figures) -> bool:
    """Return whether compiled steps are further from eager ones than rounding explains."""
    limits = ROUNDED
    if figures["precise"]:
        limits = PRECISE
    # Not `>`: a NaN is never within the limit.
    return any(not figures["difference"][name] <= limit for name, limit in limits.items())


def time_windows(state: State) -> dict[str, list[float]]:
    """Return the seconds per step in interleaved windows of eager and compiled steps."""
    compiled = without_loader(state)
    # A wrapper stays around each compiled call, which slows a short eager step down by some 2 %.
    eager = torch.compiler.set_stance("force_eager")(compiled)
    return time_interleaved({"eager": eager, "compiled": compiled})


def findings() -> dict[str, list[Finding]]:
    """List what the compiler could not do: each place of a graph break once, all recompiles."""
    breaks = graph_breaks()
    recompiles: list[Finding] = []
    limits_hit: list[Finding] = []
    for entry in dynamo.get_compilation_metrics():
        failure = entry.fail_reason or ""
        if entry.fail_type and "recompile limit exceeded" not in failure:
            # A whole function is not compiled, as for a break in a loop: torch counts no break.
            line = entry.fail_user_frame_lineno or entry.co_firstlineno
            path = entry.fail_user_frame_filename or entry.co_filename
            breaks.append(finding(path, line, failure))
        elif failure:
            limits_hit.append(failed_guard(entry))
        elif entry.recompile_reason:
            recompiles.append(failed_guard(entry))
    by_place: dict[str, Finding] = {}
    for each in breaks:
        by_place[each["where"] or each["reason"]] = each
    return {
        "graph_breaks": list(by_place.values()),
        "recompiles": recompiles,
        "limits_hit": limits_hit,
    }


def graph_breaks() -> list[Finding]:
    """List the graph breaks that torch counted, each at the innermost line of code not torch's."""
    breaks: list[Finding] = []
    for entry in dynamo.graph_break_reasons:
        # torch's name for a break that it can resume after says little.
        reason = entry.reason.replace("generic_jump", "Data-dependent branching:")
        frames = list(entry.user_stack)
        outside = [each for each in frames if not each.filename.startswith(torch.__path__[0])]
        # A break within torch alone is shown where it is.
        frames = outside or frames
        if frames:
            breaks.append(finding(frames[-1].filename, frames[-1].lineno, reason))
        else:
            breaks.append(finding("", 0, reason))
    return breaks


def failed_guard(entry: dynamo.CompilationMetrics) -> Finding:
    """Find the guard that made a function compile again, and the line that it guards."""
    path = entry.co_filename
    line = entry.co_firstlineno
    # "0/1: GUARD    # line of code # file:line", then the stack of the user's code.
    text = entry.recompile_reason or ""
    stack = re.findall(r'File "(.+?)", line (\d+)', text)
    if stack:
        path, line = stack[-1]
    guard = text.partition(": ")[2].partition("  # ")[0]
    return finding(path, line, guard)


def finding(path: str | None, line: int | str | None, reason: str) -> Finding:
    """Build a finding: a place, relative to this folder if below it, and a reason's first line."""
    where = ""
    if path:
        where = f"{path.removeprefix(f'{Path.cwd()}/')}:{line}"
    return {"where": where, "reason": reason.strip().partition("\n")[0]}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    task = sys.argv[2]
    config = load(folder / "settings.json", StageConfig)
    write_json(folder / f"{task}.json", attempt(task, config))
