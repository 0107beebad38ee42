"""The compile stage: does torch.compile take the model whole, is it right, is it worth it?

Each mode is measured in child processes (compile_worker.py): first with an empty compile cache,
then with what the first one left there.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Config, override
from ..errors import RankError, UserError
from ..files import to_json, write_json
from ..run.hardware import in_units
from .compile_worker import DYNAMIC, STEPS, Finding
from .processes import finish, started
from .stage import PACKAGE, Stage
from .timing import Interval, describe, median_interval

MODES = ("blocks", "full")
TIMEOUT = 1800.0  # seconds for one child process
# Largest relative differences: of a loss, and of all gradients as one vector.
PRECISE = {"loss": 1e-4, "gradients": 1e-2}  # float32 throughout
ROUNDED = {"loss": 1e-2, "gradients": 1e-1}  # bf16 or TF32: fused code rounds less often
NO_COMPILER = ("InvalidCxxCompiler", "TritonMissing", "Python.h: No such file")
NOISE = 1.2  # an interval whose ends are this far apart cannot tell what is faster
TOO_NOISY = "too noisy to tell"
SHOWN = 6  # graph breaks or recompiles; the figures hold all

Figures = dict[str, Any]


def measure(config: Config) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not."""
    stage = Stage("compile", config)
    with tempfile.TemporaryDirectory(prefix="compile-") as scratch:
        modes = {mode: try_mode(config, mode, Path(scratch) / mode) for mode in MODES}
        shapes = None
        if ran := next((mode for mode in MODES if has_run(modes[mode])), None):
            print(f"     {ran}: shapes that vary, with each --compile.dynamic ...", flush=True)
            # Graphs and recompiles do not depend on the backend; this one compiles fast.
            fast = {"compile.backend": "aot_eager", "compile.fullgraph": False}
            config = override(config, fast | {"compile.mode": ran})
            shapes, _ = run_child("vary", config, Path(scratch) / "vary")
    judge(stage, modes, shapes)
    return stage.close()


def try_mode(config: Config, mode: str, folder: Path) -> Figures:
    """Measure one mode, cold and warm."""
    # With fullgraph the first graph break would end it: all are wanted.
    config = override(config, {"compile.mode": mode, "compile.fullgraph": False})
    print(f"     {mode}: compiling with an empty cache, and timing eager steps ...", flush=True)
    figures, output = run_child("cold", config, folder)
    if not has_run(figures):
        return figures
    hints = re.findall(r"\[__perf_hints\] (.+)", output)
    figures["hints"] = sorted({hint for hint in hints if "on CPU" not in hint})
    cached = (path for path in (folder / "cache").rglob("*") if path.is_file())
    figures["cache_bytes"] = sum(path.stat().st_size for path in cached)
    if figures["cache_bytes"]:
        print(f"     {mode}: starting again with the compile cache ...", flush=True)
        restart, _ = run_child("warm", config, folder)
        seconds = figures["compile_seconds"]
        seconds["warm"] = restart.get("seconds")
        saved = max(0.0, seconds["cold"] - seconds["warm"]) if restart.get("hits") else None
        figures["restart"] = restart | {"saved": saved}
    return figures


def run_child(kind: str, config: Config, folder: Path) -> tuple[Figures, str]:
    """What a child process measured, with a compile cache in `folder`; and its output."""
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", to_json(config))
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TRITON_CACHE_DIR": str(folder / "cache/triton"),
        "TORCH_LOGS": "perf_hints",
    }
    module = f"{PACKAGE}.workflow.compile_worker"
    try:
        with started(0, kind, str(folder), module=module, **environment) as process:
            output = finish(process, f"compiling ({config.compile.mode}, {kind})", TIMEOUT)
    except RankError as error:  # the compiler has killed its process
        return {"error": str(error).partition("\n")[0], "whole": str(error)}, ""
    figures = json.loads((folder / f"{kind}.json").read_text("utf-8"))
    if "refused" in figures:  # by the project itself, not by the compiler
        raise UserError(figures["refused"])
    return figures, output


def has_run(figures: Figures) -> bool:
    """Whether a mode compiled and ran."""
    return "error" not in figures and "skipped" not in figures


def judge(stage: Stage, modes: dict[str, Figures], shapes: Figures | None) -> None:
    """Turn what was measured into checks, figures and advice."""
    compiled = {mode: figures for mode, figures in modes.items() if has_run(figures)}
    for figures in compiled.values():
        speedup, word = speedup_of(**figures["windows"])
        figures |= {"speedup": speedup._asdict(), "verdict": word}
    best = best_mode(compiled)
    judge_compiling(stage, modes)
    if compiled:
        judge_findings(stage, compiled)
        judge_numerics(stage, compiled)
        judge_speedup(stage, compiled, best)
    else:
        for name in ("graph_breaks", "recompiles", "recompile_limit", "numerics", "speedup"):
            stage.check(name, None, measured="nothing was compiled", wanted="measured")
    if shapes and "error" in shapes:
        print(f"     shapes that vary: not measured, {shapes['error']}")
    elif shapes:
        advise_on_shapes(stage, shapes, next(iter(compiled.values())))
    shown = compiled.get(best) or next(iter(compiled.values()), {})
    saved = shown.get("restart", {}).get("saved")
    stage.figures |= {
        "modes": compiled,
        "not_tried": {mode: f for mode, f in modes.items() if not has_run(f)},
        "dynamic": shapes,
        "best": best,
        "cache": {"bytes": shown.get("cache_bytes"), "seconds_saved": saved},
    }


def judge_compiling(stage: Stage, modes: dict[str, Figures]) -> None:
    """Check that every mode compiled and ran, cold and warm; say how long that took."""
    parts, errors = [], []
    for mode, figures in modes.items():
        failed = [f for f in (figures, figures.get("restart", {})) if "error" in f]
        errors += [found.get("whole", found["error"]) for found in failed]
        if not has_run(figures):
            parts.append(f"{mode}: {figures.get('error') or 'not tried, ' + figures['skipped']}")
            continue
        if not figures["graphs"]:
            errors.append(f"{mode}: no graph was compiled")
        seconds, memory = figures["compile_seconds"], in_units(figures["peak_memory_bytes"])
        text = f"{mode}: {seconds['cold']:.1f} s cold"
        if seconds["warm"] is not None:
            text += f", {seconds['warm']:.1f} s with the project's compile cache"
        parts.append(f"{text}, graphs {figures['graphs']}, peak memory {memory}")
    lacking = any(word in error for error in errors for word in NO_COMPILER)
    tried = not all("skipped" in figures for figures in modes.values())
    if lacking:
        advice = "inductor needs a C++ compiler on a CPU (apt install g++) and Triton on a GPU"
    else:
        advice = "--compile.backend aot_eager (then eager) tells which part of it is at fault"
    passed = None if lacking or not tried else not errors
    wanted = "every mode compiles and runs"
    stage.check("compiles", passed, measured="; ".join(parts), wanted=wanted, advice=advice)


def judge_findings(stage: Stage, compiled: dict[str, Figures]) -> None:
    """Graph breaks and recompiles pass if each has its place and reason; their limit must hold."""
    for name in ("graph_breaks", "recompiles"):
        entries = [entry for figures in compiled.values() for entry in figures[name]]
        fatal = name == "graph_breaks" and stage.config.compile.fullgraph and entries
        counts = ", ".join(f"{mode} {len(figures[name])}" for mode, figures in compiled.items())
        lines = listed(compiled, name)
        more = [f"{len(lines) - SHOWN} more"] if lines[SHOWN:] else []
        passed = all(entry["where"] and entry["reason"] for entry in entries) and not fatal
        measured = "; ".join([counts, *lines[:SHOWN], *more])
        wanted = f"no {name.replace('_', ' ')}, or each with its place and reason"
        advice = f"TORCH_LOGS={name} with `train` shows what they are"
        if fatal:
            advice = "--compile.fullgraph makes each of them an error"
        stage.check(name, passed, measured=measured, wanted=wanted, advice=advice)
    hit = listed(compiled, "limits_hit")
    measured, wanted = "; ".join(hit) or "not hit", "not hit: what reaches it runs eagerly after"
    advice = "keep what the guards name from changing, or try --compile.dynamic True"
    stage.check("recompile_limit", not hit, measured=measured, wanted=wanted, advice=advice)


def listed(compiled: dict[str, Figures], name: str) -> list[str]:
    """The findings of that name in words, each once."""
    found = [(mode, Finding(**entry)) for mode, f in compiled.items() for entry in f[name]]
    return [f"{mode}: {finding}" for mode, finding in dict.fromkeys(found)]


def judge_numerics(stage: Stage, compiled: dict[str, Figures]) -> None:
    """Compare compiled steps with eager ones: same weights, batches and random numbers."""
    passed, parts, random = True, [], False
    for mode, figures in compiled.items():
        tolerance = PRECISE if figures["precise"] else ROUNDED
        apart = figures["difference"]
        passed &= all(apart[name] <= tolerance[name] for name in tolerance)  # false for NaN
        random |= figures["random"]
        parts.append(f"{mode}: loss {apart['loss']:.1e}, gradients {apart['gradients']:.1e}")
    note = " (with eager's random numbers: inductor's fallback_random)" if random else ""
    stage.check(
        "numerics",
        passed,
        measured=f"after {STEPS} steps, relative to eager: {'; '.join(parts)}{note}",
        wanted=f"at most {tolerance['loss']:.0e} and {tolerance['gradients']:.0e}",
        advice="do not train with a mode that differs; --compile.backend aot_eager tells whether "
        "inductor's kernels are at fault",
    )


def speedup_of(eager: list[float], compiled: list[float]) -> tuple[Interval, str]:
    """How many times as fast compiled steps are, from pairs of windows, and a word for it."""
    speedup = median_interval(np.array(eager) / np.array(compiled))
    if speedup.low > 1 or speedup.high < 1:
        return speedup, "faster" if speedup.low > 1 else "slower"
    return speedup, "within noise" if speedup.high < NOISE * speedup.low else TOO_NOISY


def best_mode(compiled: dict[str, Figures]) -> str:
    """The fastest mode; blocks, which compile sooner, unless full is surely faster."""
    faster = {m: f["speedup"] for m, f in compiled.items() if f["verdict"] == "faster"}
    if set(faster) == set(MODES):
        return "full" if faster["full"]["low"] > faster["blocks"]["high"] else "blocks"
    return next(iter(faster), "none")


def judge_speedup(stage: Stage, compiled: dict[str, Figures], best: str) -> None:
    """Say how fast each mode is, and advise one; every speedup passes that is not lost in noise."""
    noisy = any(figures["verdict"] == TOO_NOISY for figures in compiled.values())
    speedups = {mode: Interval(**figures["speedup"]) for mode, figures in compiled.items()}
    parts = [
        f"{mode}: {figures['verdict']}, {speedups[mode]} times as fast as eager, "
        f"{len(figures['windows']['eager'])} pairs of windows, a step "
        f"{describe(figures['step_seconds'], 1e3, ' ms')}"
        for mode, figures in compiled.items()
    ]
    measured, wanted = "; ".join(parts), "measured, whatever it is"
    advice = "measure again when nothing else runs on this machine"
    stage.check("speedup", None if noisy else True, measured=measured, wanted=wanted, advice=advice)
    if best != "none":
        figures = compiled[best]
        gain = figures["eager_step_seconds"]["median"] - figures["step_seconds"]["median"]
        seconds = figures["compile_seconds"]["cold"]
        steps = f" after {seconds / gain:,.0f} steps" if gain > 0 else ""
        stage.advise(
            f"train with --compile.mode {best}: {speedups[best]} times as fast; the "
            f"{seconds:.0f} s of a first compile are earned back{steps}"
        )
    elif not noisy:
        stage.advise("train with --compile.mode none: no mode is faster here")
    if breaks := listed(compiled, "graph_breaks"):
        stage.advise(f"fewer graph breaks make it faster; begin with {breaks[0]}")
    hints = sorted({hint for figures in compiled.values() for hint in figures.get("hints", ())})
    if hints and best == "none" and not noisy:
        stage.advise(f"inductor's hints on why it is not faster: {'; '.join(hints[:5])}")


def advise_on_shapes(stage: Stage, shapes: Figures, figures: Figures) -> None:
    """Say what each `compile.dynamic` would do if shapes varied."""
    per_graph = figures["compile_seconds"]["cold"] / max(1, figures["graphs"])
    counts = []
    for name, dynamic in DYNAMIC.items():
        found = shapes[name]
        found["seconds"] = per_graph * found["graphs"]
        numbers = f"graphs {found['graphs']}, recompiles {found['recompiles']}"
        counts.append(f"{dynamic} {numbers}, about {found['seconds']:.1f} s")
    number = shapes["shapes"]
    print(f"     {number} shapes ({shapes['varied']}): --compile.dynamic {'; '.join(counts)}")
    best = min(DYNAMIC, key=lambda name: shapes[name]["graphs"])  # the default, if they are equal
    text = "leave --compile.dynamic at" if best == "none" else "--compile.dynamic"
    count = f"{shapes[best]['graphs']} graphs for {number} shapes"
    stage.advise(f"if shapes vary: {text} {DYNAMIC[best]}, {count}; else leave it")
