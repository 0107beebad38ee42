"""The compile stage: does torch.compile take the model whole, is it right, is it worth it?

Each mode is measured in processes of its own, whose compilers have seen nothing else: first with an
empty compile cache, then with what the first one left there. `python -m` this module FOLDER TASK,
where the task is `cold` or `warm`, reads FOLDER/settings.json and writes FOLDER/TASK.json.
"""

import gc
import math
import re
import sys
import tempfile
from pathlib import Path
from typing import Any
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

MODES = ("blocks",) if parallel.SHARDED else ("blocks", "full")
TIMEOUT = 1800.0  # seconds for one process
STEPS = 5  # compared with eager steps
# Largest relative differences: of a loss, and of all gradients as one vector.
PRECISE = {"loss": 1e-4, "gradients": 1e-2}  # float32 throughout
ROUNDED = {"loss": 1e-2, "gradients": 1e-1}  # bf16 or TF32: fused code rounds less often
NO_COMPILER = re.compile("InvalidCxxCompiler|TritonMissing|Python.h: No such file")
FINDINGS = {  # check: its figure, and what is wanted
    "graph_breaks": ("graph_breaks", "none, or each with its place and reason"),
    "recompiles": ("recompiles", "none, or each with its place and reason"),
    "recompile_limit": ("limits_hit", "not hit: beyond it a function runs eagerly"),
}
SHOWN = 6  # findings of a kind; the figures hold all

Figures = dict[str, Any]
FirstSteps = tuple[np.ndarray, list[torch.Tensor]]  # losses, and the last gradients, on the host


def measure(config: Config) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not."""
    stage = Stage("compile", config)
    with tempfile.TemporaryDirectory(prefix="compile-") as scratch:
        judge(stage, {mode: try_mode(config, mode, Path(scratch) / mode) for mode in MODES})
    return stage.close()


def try_mode(config: Config, mode: str, folder: Path) -> Figures:
    """Measure one mode, cold and warm; "skipped" or "error" say why it could not be."""
    print(f"     {mode}: compiling with an empty cache, and timing eager steps ...", flush=True)
    folder.mkdir()
    write_json(folder / "settings.json", to_json(override(config, {"compile.mode": mode})))
    cache: Any = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cpp", "TRITON_CACHE_DIR": f"{folder}/gpu"}
    figures: Figures = {}
    try:
        figures = run_task("compile", folder, "cold", seconds=TIMEOUT, **cache)
        if "graphs" in figures and config.compile.backend == "inductor":  # others have no cache
            warm = run_task("compile", folder, "warm", seconds=TIMEOUT, **cache)
            figures["compile_seconds"]["warm"] = warm.pop("seconds", None)
            figures |= warm
    except RankError as error:  # the compiler has killed its process
        figures["error"] = str(error)
    if "refused" in figures:  # by the project itself, not by the compiler
        raise UserError(figures["refused"])
    return figures


def judge(stage: Stage, modes: dict[str, Figures]) -> None:
    """Turn what was measured into checks, figures and advice."""
    compiled = {mode: figures for mode, figures in modes.items() if "graphs" in figures}
    stage.figures |= {"modes": compiled, "best": "none"}
    judge_compiling(stage, modes)
    if compiled:
        for name in FINDINGS:
            judge_findings(stage, compiled, name)
        judge_numerics(stage, compiled)
        judge_speed(stage, compiled)
    recommend_mode(stage, modes)


def judge_compiling(stage: Stage, modes: dict[str, Figures]) -> None:
    """Every mode compiles and runs, cold and warm; not measured without a C++ compiler."""
    parts, errors = [], []
    for mode, figures in modes.items():
        errors += [f"{mode}: {figures['error']}"] if "error" in figures else []
        if "skipped" in figures:
            parts.append(f"{mode}: not tried, {figures['skipped']}")
        elif "graphs" in figures:
            cold, warm = (figures["compile_seconds"][start] for start in ("cold", "warm"))
            text = f", {warm:.1f} s with a warm cache" if warm else ""
            parts.append(f"{mode}: graphs {figures['graphs']}, {cold:.1f} s cold{text}")
            errors += [] if figures["graphs"] else [f"{mode}: no graph was compiled"]
    passed, advice = not errors, "--compile.backend aot_eager (then eager) narrows the cause down"
    if any(map(NO_COMPILER.search, errors)):
        passed = None
        advice = "inductor needs a C++ compiler on a CPU (apt install g++) and Triton on a GPU"
    measured = "; ".join([*parts, *(error.partition("\n")[0] for error in errors)])
    stage.check("compiles", passed, measured=measured, wanted="every mode compiles", advice=advice)


def judge_findings(stage: Stage, compiled: dict[str, Figures], name: str) -> None:
    """Pass if each finding has its place and reason; the recompile limit must not be hit at all."""
    figure, wanted = FINDINGS[name]
    findings = [(mode, each) for mode, figures in compiled.items() for each in figures[figure]]
    lines = [f"{mode}: {f['where'] or 'place unknown'}: {f['reason']}" for mode, f in findings]
    lines = list(dict.fromkeys(lines))  # each once
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"{len(lines) - SHOWN} more"]
    counts = ", ".join(f"{mode} {len(figures[figure])}" for mode, figures in compiled.items())
    known = all(finding["where"] and finding["reason"] for _, finding in findings)
    passed = known and not (name == "recompile_limit" and findings)
    measured = "; ".join([counts, *lines])
    advice = "TORCH_LOGS=graph_breaks,recompiles with `train` shows them; where guards fail, keep "
    advice += "what they name from changing, or try --compile.dynamic True"
    stage.check(name, passed, measured=measured, wanted=wanted, advice=advice)


def judge_numerics(stage: Stage, compiled: dict[str, Figures]) -> None:
    """Compare compiled steps with eager ones: same weights, batches and random numbers."""
    apart = {mode: figures["difference"] for mode, figures in compiled.items()}
    limit = PRECISE if all(f["precise"] for f in compiled.values()) else ROUNDED
    parts = [f"{m}: loss {d['loss']:.1e}, gradients {d['gradients']:.1e}" for m, d in apart.items()]
    passed = not any(map(differs, compiled.values()))
    measured = f"after {STEPS} steps, relative to eager: {'; '.join(parts)}"
    wanted = f"at most {limit['loss']:.0e} and {limit['gradients']:.0e}"
    advice = "do not train with it; --compile.backend aot_eager shows if inductor is at fault"
    stage.check("numerics", passed, measured=measured, wanted=wanted, advice=advice)


def judge_speed(stage: Stage, compiled: dict[str, Figures]) -> None:
    """Say how fast each mode is."""
    parts = []
    for mode, figures in compiled.items():
        eager, fast = (figures["windows"][way] for way in ("eager", "compiled"))
        speedup, verdict = speedup_of(eager, fast)
        figures |= {"speedup": speedup._asdict(), "verdict": verdict}
        figures |= {"eager_step_seconds": spread(eager), "step_seconds": spread(fast)}
        saved = spread(fast)["median"] * (speedup.value - 1)
        paid_after = math.ceil(figures["compile_seconds"]["cold"] / saved) if saved > 0 else None
        figures["paid_after"] = paid_after if verdict == "faster" else None  # steps
        parts.append(f"{mode}: {verdict}, {speedup} times as fast, a step {describe(spread(fast))}")
    passed = None if any(f["verdict"] == TOO_NOISY for f in compiled.values()) else True
    advice = "measure again when nothing else runs on this machine"
    stage.check("speedup", passed, measured="; ".join(parts), wanted="measured", advice=advice)


def recommend_mode(stage: Stage, modes: dict[str, Figures]) -> None:
    """Advise the fastest mode that is right and earns its first compile back; hand it on."""
    given, steps = stage.config.compile.mode, stage.config.train.steps
    against = {mode: why for mode, each in modes.items() if (why := problem_of(each, steps))}
    chosen = [m for m, each in modes.items() if m not in against and each.get("paid_after")]
    if len(chosen) > 1 and modes["full"]["speedup"]["low"] > modes["blocks"]["speedup"]["high"]:
        chosen.remove("blocks")  # else they are the best, since they compile sooner
    if chosen:
        stage.figures["best"], best = chosen[0], modes[chosen[0]]
        speedup, seconds = Interval(**best["speedup"]), best["compile_seconds"]["cold"]
        first = f"the {seconds:.0f} s of a first compile pay off after {best['paid_after']:,} steps"
        advise(stage, f"train with --compile.mode {chosen[0]}: {speedup} times as fast; {first}")
        if chosen[0] != given:
            recommend(stage, "compile.mode", chosen[0], speedup if given == "none" else None)
        return
    if against or stage.status == "pass":
        reasons = "; ".join(f"{mode}: {why}" for mode, why in against.items())
        advise(stage, f"train with --compile.mode none: {reasons or 'no mode is faster here'}")
    if given in against:
        recommend(stage, "compile.mode", "none")


def problem_of(figures: Figures, steps: int) -> str:
    """Why not to train with a mode for so many steps; empty if nothing is against it."""
    if "error" in figures or "skipped" in figures:
        return figures.get("error", "").partition("\n")[0]
    paid_after = figures["paid_after"] or 0
    too_late = f"a first compile pays off after {paid_after:,} steps, and the run has {steps:,}"
    problems = {
        "no graph was compiled": not figures["graphs"],
        "its losses or gradients are not those of eager steps": differs(figures),
        "it compiles again and again, up to the limit": figures["limits_hit"],
        "slower than eager steps": figures["verdict"] == "slower",
        too_late: paid_after > steps,
    }
    return next((text for text, applies in problems.items() if applies), "")


def attempt(task: str, config: Config) -> Figures:
    """What a process measures; an error of the compiler, or of the model under it, is a result."""
    try:
        if task == "cold":
            return cold(config)
        first_steps(setup(config))  # the same start again, with the cache that `cold` has left
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
    del state
    gc.collect()  # recomputed blocks refer to themselves
    state = setup(config, world)
    compiled, seconds = first_steps(state), compile_seconds()
    figures = {
        "compile_seconds": {"cold": seconds, "warm": None},
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
    with patch.object(state.optimizer, "zero_grad"):  # keep the last gradients
        losses = np.append(losses, record_steps(state, 1).losses)
    gradients = [p.grad.cpu() for p in state.model.parameters() if p.grad is not None]
    state.optimizer.zero_grad()
    state.loader.close()
    return losses, gradients


def difference(eager: FirstSteps, compiled: FirstSteps) -> dict[str, float]:
    """Relative differences: the largest of a loss, and of the last gradients as one vector."""
    loss = float(np.abs(np.divide(compiled[0], eager[0]) - 1).max())
    apart = [a.double() - b.double() for a, b in zip(eager[1], compiled[1], strict=True)]
    norms = torch.nn.utils.get_total_norm(apart), torch.nn.utils.get_total_norm(eager[1])
    return {"loss": loss, "gradients": float(norms[0] / norms[1])}


def differs(figures: Figures) -> bool:
    """Whether compiled steps are further from eager ones than rounding explains."""
    apart, limit = figures["difference"], PRECISE if figures["precise"] else ROUNDED
    return any(not apart[name] <= limit[name] for name in limit)  # as NaN is


def time_windows(state: State) -> dict[str, list[float]]:
    """Seconds per step in interleaved windows of eager and compiled steps."""
    compiled = without_loader(state)
    # A wrapper stays around each compiled call, which slows a short eager step down by some 2 %.
    eager = torch.compiler.set_stance("force_eager")(compiled)
    return time_interleaved({"eager": eager, "compiled": compiled})


def findings() -> dict[str, list[dict[str, str]]]:
    """What the compiler could not do as hoped: of graph breaks each place once, else each time."""
    breaks, recompiles, limits_hit = [], [], []
    for entry in dynamo.graph_break_reasons:
        places = [(frame.filename, frame.lineno) for frame in entry.user_stack]
        own = [place for place in places if not place[0].startswith(torch.__path__[0])]
        # torch's name for a break that it can resume after says little.
        reason = entry.reason.replace("generic_jump", "Data-dependent branching:")
        breaks.append(finding(*(own or places or [("", 0)])[-1], reason))
    for entry in dynamo.get_compilation_metrics():
        failed, guard = entry.fail_reason or "", entry.recompile_reason or ""
        if entry.fail_type and "recompile limit exceeded" not in failed:
            # A whole function is not compiled, as for a break in a loop: torch counts no break.
            line = entry.fail_user_frame_lineno or entry.co_firstlineno
            path = entry.fail_user_frame_filename or entry.co_filename
            breaks.append(finding(path, line, failed))
        elif guard or failed:
            # "0/1: GUARD    # line of code # file:line", then the stack of the user's code.
            stack = re.findall(r'File "(.+?)", line (\d+)', guard)
            path, line = stack[-1] if stack else (entry.co_filename, entry.co_firstlineno)
            reason = guard.partition(": ")[2].partition("  # ")[0]
            (limits_hit if failed else recompiles).append(finding(path, line, reason))
    breaks = list({each["where"] or each["reason"]: each for each in breaks}.values())
    return {"graph_breaks": breaks, "recompiles": recompiles, "limits_hit": limits_hit}


def finding(path: str | None, line: Any, reason: str) -> dict[str, str]:
    """A place, relative to this folder if it is below it, and the reason's first line."""
    where = f"{path.removeprefix(f'{Path.cwd()}/')}:{line}" if path else ""
    return {"where": where, "reason": reason.strip().partition("\n")[0]}


if __name__ == "__main__":
    folder, task = Path(sys.argv[1]), sys.argv[2]
    config = load(folder / "settings.json", StageConfig)
    write_json(folder / f"{task}.json", attempt(task, config))
