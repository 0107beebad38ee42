"""What torch.compile does to this model's steps: is it whole, is it right, is it worth it.

Each mode is tried in processes of its own (compile_trial.py): first with nothing cached, then with
nothing but what a run carries in its run directory.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from ..config import Config, override, to_json
from ..errors import RankError, UserError
from ..files import write_json
from ..run.hardware import in_units
from .compile_trial import STEPS
from .findings import Finding
from .gates import PACKAGE, Stage
from .measuring import TOO_NOISY, Interval, describe, verdict
from .processes import finish, started

MODES = ("blocks", "full")
# Largest relative differences: of a loss, and of all gradients as one vector after some steps.
PRECISE = {"loss": 1e-4, "gradients": 1e-2}  # float32 throughout
ROUNDED = {"loss": 1e-2, "gradients": 1e-1}  # bf16 or TF32: fusing keeps what eager rounds off
LACKING = ("InvalidCxxCompiler", "TritonMissing", "Python.h: No such file")  # no compiler here
PATIENCE = 1800.0  # seconds for one process
TOO_SLOW = 7.0  # seconds of a compile, from which on shapes are varied with a faster backend
SHOWN = 6  # graph breaks or recompiles; the figures hold all
HINT = re.compile(r"\[__perf_hints\] (.+)")


def measure(config: Config) -> int:
    """Measure and judge; 0 when the gate is passed, 1 when it is not."""
    stage = Stage("compile", config)
    modes, dynamic = {}, None
    with tempfile.TemporaryDirectory(prefix="compile-") as scratch:
        for mode in MODES:
            modes[mode] = try_mode(config, mode, Path(scratch) / mode)
        if tried := [mode for mode in MODES if worked(modes[mode])]:
            settings = {"compile.mode": tried[0], "compile.fullgraph": False}
            figures = modes[tried[0]]
            each = figures["compile_seconds"]["cold"] / max(1, figures["graphs"])
            if each > TOO_SLOW:
                settings["compile.backend"] = "aot_eager"
            print(f"     {tried[0]}: shapes that vary, with each --compile.dynamic ...", flush=True)
            dynamic, _ = trial("vary", override(config, settings), Path(scratch) / "vary")
            dynamic["backend"] = settings.get("compile.backend", config.compile.backend)
            if dynamic["backend"] != config.compile.backend and "error" not in dynamic:
                for it in (dynamic[name] for name in ("none", "true", "false")):
                    it["seconds"] = each * it["graphs"]
    judge(stage, modes, dynamic)
    return stage.close()


def try_mode(config: Config, mode: str, folder: Path) -> dict[str, Any]:
    """Everything about one mode."""
    # With fullgraph the first graph break would end it: all are wanted.
    config = override(config, {"compile.mode": mode, "compile.fullgraph": False})
    print(f"     {mode}: compiling with nothing cached, beside eager steps ...", flush=True)
    figures, output = trial("cold", config, folder)
    if not worked(figures):
        return figures
    figures["hints"] = sorted({hint for hint in HINT.findall(output) if "on CPU" not in hint})
    if figures["cache_bytes"]:
        print(f"     {mode}: starting again with the carried cache ...", flush=True)
        again, _ = trial("warm", config, folder)
        figures["compile_seconds"]["warm"] = again.get("seconds")
        figures["restart"] = again
    return figures


def trial(kind: str, config: Config, folder: Path) -> tuple[dict[str, Any], str]:
    """What a process found that has nothing cached but by the run itself; and its output."""
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", to_json(config))
    local = folder / f"{kind}_local"
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(local),
        "TRITON_CACHE_DIR": str(local / "triton"),
        "TORCH_LOGS": "perf_hints",
    }
    module = f"{PACKAGE}.workflow.compile_trial"
    what = f"compiling ({config.compile.mode}, {kind})"
    try:
        with started(0, kind, str(folder), module=module, **environment) as process:
            output = finish(process, what, PATIENCE)
    except RankError as error:  # the compiler took the process with it
        return {"error": str(error).splitlines()[0], "whole": str(error)}, ""
    found = json.loads((folder / f"{kind}.json").read_text("utf-8"))
    if "refused" in found:  # by the project itself, not by the compiler
        raise UserError(found["refused"])
    return found, output


def worked(figures: dict[str, Any]) -> bool:
    """Whether a mode could be tried, and ran."""
    return "error" not in figures and "skipped" not in figures


def judge(stage: Stage, modes: dict[str, dict[str, Any]], dynamic: dict[str, Any] | None) -> None:
    """Turn what was tried into checks, figures and advice."""
    good = {mode: figures for mode, figures in modes.items() if worked(figures)}
    judge_compiling(stage, modes, good)
    verdicts = {mode: verdict(**figures["windows"]) for mode, figures in good.items()}
    if good:
        for name, plural in (("graph_breaks", "graph breaks"), ("recompiles", "recompiles")):
            judge_findings(stage, name, plural, good)
        judge_limit(stage, good)
        judge_numerics(stage, good)
        told = "; ".join(f"{m}: {in_words(*verdicts[m], good[m])}" for m in good)
        stage.check(
            "speedup",
            None if is_noise(verdicts) else True,
            measured=told,
            wanted="measured, whatever it is",
            advice="measure again when nothing else runs on this machine",
        )
    else:
        for name in ("graph_breaks", "recompiles", "recompile_limit", "numerics", "speedup"):
            stage.check(name, None, measured="nothing was compiled", wanted="measured")
    best = best_mode(verdicts)
    advise(stage, good, verdicts, best)
    for mode, (speedup, word) in verdicts.items():
        good[mode] |= {"speedup": speedup._asdict(), "verdict": word}
    if dynamic and "error" not in dynamic:
        advise_on_shapes(stage, dynamic)
    elif dynamic:
        print(f"     shapes that vary: not measured, {dynamic['error']}")
    carried = good.get(best) or next(iter(good.values()), {})
    stage.figures |= {
        "modes": good,
        "not_tried": {mode: f for mode, f in modes.items() if not worked(f)},
        "dynamic": dynamic,
        "best": best,
        "cache": {
            "bytes": carried.get("cache_bytes"),
            "seconds_saved": carried.get("restart", {}).get("saved"),
        },
    }


def judge_compiling(
    stage: Stage, modes: dict[str, dict[str, Any]], good: dict[str, dict[str, Any]]
) -> None:
    """Whether every mode compiled and ran, cold and warm, and how long that took."""
    parts, errors = [], []
    for mode, figures in modes.items():
        if problem := figures.get("whole", figures.get("error")):
            errors.append(problem)
        if mode in good:
            cold, warm = (figures["compile_seconds"][key] for key in ("cold", "warm"))
            text = f"{cold:.1f} s cold"
            if not figures["graphs"]:
                errors.append(f"{mode}: no graph was compiled")
            if warm is not None:
                text += f", {warm:.1f} s with the carried cache"
            elif problem := figures.get("restart", {}).get("error"):
                errors.append(problem)
            memory = in_units(figures["peak_memory_bytes"])
            text += f", graphs {figures['graphs']}, peak memory {memory}"
        else:
            text = figures.get("error") or f"not tried, {figures['skipped']}"
        parts.append(f"{mode}: {text}")
    lacking = any(word in problem for problem in errors for word in LACKING)
    stage.check(
        "compiles",
        None if lacking or not (good or errors) else not errors,
        measured="; ".join(parts),
        wanted="every mode compiles and runs",
        advice="inductor needs a C++ compiler on a CPU (apt install g++) and Triton on a GPU"
        if lacking
        else "--compile.backend aot_eager (then eager) tells which part of it is at fault",
    )


def judge_findings(stage: Stage, name: str, plural: str, good: dict[str, dict[str, Any]]) -> None:
    """Graph breaks or recompiles: fine if there are none, or if each one can be looked up."""
    found = [(mode, Finding(**it)) for mode, f in good.items() for it in f[name]]
    lost = [it for _, it in found if not (it.where and it.reason)]
    stopped = name == "graph_breaks" and stage.config.compile.fullgraph and found
    counts = ", ".join(f"{mode} {len(f[name])}" for mode, f in good.items())
    each = [f"; {mode}: {it}" for mode, it in dict.fromkeys(found)]
    listed = "".join(each[:SHOWN]) + (f"; {len(each) - SHOWN} more" if each[SHOWN:] else "")
    stage.check(
        name,
        not (lost or stopped),
        measured=f"{counts}{listed}",
        wanted=f"no {plural}, or each with its place and reason",
        advice="--compile.fullgraph makes each of them an error"
        if stopped
        else f"TORCH_LOGS={name} with `train` shows what they are",
    )


def judge_limit(stage: Stage, good: dict[str, dict[str, Any]]) -> None:
    """Whether something was given up since it was compiled too often."""
    hit = [f"{mode}: {Finding(**it)}" for mode, f in good.items() for it in f["limits_hit"]]
    stage.check(
        "recompile_limit",
        not hit,
        measured="; ".join(hit) or "not hit",
        wanted="not hit: what reaches it runs eagerly from then on",
        advice="keep what the guards name from changing, or try --compile.dynamic True",
    )


def judge_numerics(stage: Stage, good: dict[str, dict[str, Any]]) -> None:
    """Compiled steps against eager ones: same weights, same batches, same random numbers."""
    passed, parts, wanted, random = True, [], PRECISE, False
    for mode, figures in good.items():
        wanted = PRECISE if figures["precise"] else ROUNDED
        apart = figures["difference"]
        passed &= all(apart[key] <= wanted[key] for key in wanted)  # what is not a number is not
        random |= figures["random"]
        parts.append(f"{mode}: loss {apart['loss']:.1e}, gradients {apart['gradients']:.1e}")
    of = " (with eager's random numbers: inductor's fallback_random)" if random else ""
    stage.check(
        "numerics",
        passed,
        measured=f"after {STEPS} steps, relative to eager: {'; '.join(parts)}{of}",
        wanted=f"at most {wanted['loss']:.0e} and {wanted['gradients']:.0e}",
        advice="--compile.backend aot_eager tells whether inductor's kernels are at fault; do not "
        "train with a mode that differs",
    )


def is_noise(verdicts: dict[str, tuple[Interval, str]]) -> bool:
    """Whether nothing can be said of some mode."""
    return TOO_NOISY in (word for _, word in verdicts.values())


def in_words(speedup: Interval, word: str, figures: dict[str, Any]) -> str:
    """A verdict with its numbers."""
    return (
        f"{word}, {speedup} times as fast as eager, "
        f"{len(figures['windows']['eager'])} pairs of windows, a step "
        f"{describe(figures['step_seconds'], 1e3, ' ms')}"
    )


def best_mode(verdicts: dict[str, tuple[Interval, str]]) -> str:
    """The fastest mode; blocks, which compile sooner, unless full is surely faster than they."""
    faster = {mode: it for mode, (it, word) in verdicts.items() if word == "faster"}
    if set(faster) == set(MODES):
        return "full" if faster["full"].low > faster["blocks"].high else "blocks"
    return next(iter(faster), "none")


def advise(
    stage: Stage,
    good: dict[str, dict[str, Any]],
    verdicts: dict[str, tuple[Interval, str]],
    best: str,
) -> None:
    """Which mode to train with; what else could be done about it."""
    if best != "none":
        figures = good[best]
        gain = figures["eager_step_seconds"]["median"] - figures["step_seconds"]["median"]
        cold = figures["compile_seconds"]["cold"]
        steps = f" after {cold / gain:,.0f} steps" if gain > 0 else ""
        stage.advise(
            f"train with --compile.mode {best}: {verdicts[best][0]} times as fast; the "
            f"{cold:.0f} s of a first compile are earned back{steps}"
        )
    elif good and not is_noise(verdicts):
        stage.advise("train with --compile.mode none: no mode is faster here")
    for mode, figures in good.items():
        if figures["graph_breaks"]:
            first = Finding(**figures["graph_breaks"][0])
            stage.advise(f"{mode}: fewer graph breaks make it faster; begin with {first}")
    hints = sorted({hint for figures in good.values() for hint in figures.get("hints", ())})
    if hints and best == "none" and not is_noise(verdicts):
        stage.advise(f"inductor's hints on why it is not faster: {'; '.join(hints[:5])}")


def advise_on_shapes(stage: Stage, dynamic: dict[str, Any]) -> None:
    """What each `compile.dynamic` would do if shapes varied."""
    flags = {"none": "None", "true": "True", "false": "False"}
    parts = [
        f"{flags[name]} graphs {it['graphs']}, recompiles {it['recompiles']}, {it['seconds']:.1f} s"
        for name in flags
        if (it := dynamic[name])
    ]
    shapes = dynamic["shapes"]
    print(f"     {shapes} shapes ({dynamic['varied']}): --compile.dynamic {'; '.join(parts)}")
    if dynamic["backend"] != stage.config.compile.backend:
        print(f"     (counted by {dynamic['backend']}; seconds reckoned from a graph of the mode)")
    least = min(flags, key=lambda name: (dynamic[name]["graphs"], dynamic[name]["seconds"]))
    if dynamic["none"]["graphs"] <= dynamic[least]["graphs"]:
        least = "none"
    what = "leave --compile.dynamic at" if least == "none" else "--compile.dynamic"
    count = f"{dynamic[least]['graphs']} graphs for {shapes} shapes"
    stage.advise(f"if shapes vary: {what} {flags[least]}, {count}; else leave it")
