"""Check torch.compile for graph breaks, recompiles, numerics and speed: the compile stage.

Each mode is measured in a new process with an empty compile cache (compile_trial.py). With
inductor, a second process then measures how long compiling takes with the cache that the first
process has filled. This module evaluates the results.
"""

import math
import re
import tempfile
from pathlib import Path

from ..config import Config, override
from ..distributed import parallel
from ..errors import RankError, UserError
from ..files import to_json, write_json
from .chain import advise, recommend
from .compile_trial import PRECISE, ROUNDED, STEPS, ModeResult, differs
from .interleaved import TOO_NOISY, Interval, speedup_of
from .processes import run_task
from .stage import Stage
from .timing import describe, spread, steps_of_run

# If the model is sharded, FSDP's hooks break the graph of the whole model: compile only blocks.
MODES = ("blocks",) if parallel.SHARDED else ("blocks", "full")
# Time limit in seconds of a process that compiles and measures one mode.
TIMEOUT = 1800.0
# Errors that do not concern the model: a C++ compiler, Triton or Python's headers are missing here.
NO_COMPILER = re.compile("InvalidCxxCompiler|TritonMissing")
NO_HEADERS = "Python.h: No such file"
# The maximum number of findings to print for a check; the stage's JSON has all of them.
SHOWN = 6

FINDINGS_ADVICE = (
    "run `train` with TORCH_LOGS=graph_breaks,recompiles to see them; if guards fail, do not "
    "change the values that they name, or try --compile.dynamic True"
)


def measure(config: Config) -> int:
    """Run the stage; return 1 if a check failed, else 0."""
    stage = Stage("compile", config)
    modes: dict[str, ModeResult] = {}
    with tempfile.TemporaryDirectory(prefix="compile-") as scratch:
        for mode in MODES:
            modes[mode] = try_mode(config, mode, Path(scratch) / mode)
    judge(stage, modes)
    return stage.close()


def try_mode(config: Config, mode: str, folder: Path) -> ModeResult:
    """Measure one mode, cold and warm; if that fails, "skipped" or "error" in the result says why.

    Raises UserError if the project refuses the settings.
    """
    print(f"     {mode}: compiling with an empty cache, and timing eager steps ...", flush=True)
    folder.mkdir()
    write_json(folder / "settings.json", to_json(override(config, {"compile.mode": mode})))
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
    }
    result: ModeResult = {}
    try:
        result = run_task("compile_trial", folder, "cold", seconds=TIMEOUT, **environment)
        # Only the result of a mode that was compiled has "graphs". Only inductor has a cache.
        if "graphs" in result and config.compile.backend == "inductor":
            warm = run_task("compile_trial", folder, "warm", seconds=TIMEOUT, **environment)
            # `warm` is {"seconds": …}, {"error": …} or {"refused": …}.
            if "seconds" in warm:
                result["compile_seconds"]["warm"] = warm["seconds"]
            else:
                result |= warm
    except RankError as error:
        # The process crashed or took too long; the first line of the error says which. The other
        # lines quote the output of the process. Checks show only the first line, so join the first
        # line of the output to it.
        result["error"] = str(error).replace("\n  ", ": ", 1)
    if "refused" in result:
        # The project itself refuses these settings, so this says nothing about the compiler.
        raise UserError(result["refused"])
    return result


def judge(stage: Stage, modes: dict[str, ModeResult]) -> None:
    """Turn the measurements into checks, results and advice."""
    compiled = {mode: result for mode, result in modes.items() if "graphs" in result}
    errors = {mode: result["error"] for mode, result in modes.items() if "error" in result}
    stage.figures |= {"modes": compiled, "errors": errors, "best": "none"}
    judge_compiling(stage, modes)
    if compiled:
        wanted = "none, or each with its location and reason"
        judge_findings(stage, compiled, "graph_breaks", wanted)
        judge_findings(stage, compiled, "recompiles", wanted)
        judge_recompile_limit(stage, compiled)
        judge_numerics(stage, compiled)
        judge_speed(stage, compiled)
    recommend_mode(stage, modes)


def judge_compiling(stage: Stage, modes: dict[str, ModeResult]) -> None:
    """Check that every mode compiles and runs, with an empty cache (cold) and a filled one (warm).

    The check is not measured if no compiler is installed.
    """
    outcomes: list[str] = []
    errors: list[str] = []
    for mode, result in modes.items():
        if "error" in result:
            errors.append(f"{mode}: {result['error']}")
        # Not `elif`: a mode that compiled cold but failed warm has both "error" and "graphs".
        if "skipped" in result:
            outcomes.append(f"{mode}: not tried, {result['skipped']}")
        elif "graphs" in result:
            seconds = result["compile_seconds"]
            outcome = f"{mode}: graphs {result['graphs']}, {seconds['cold']:.1f} s cold"
            if seconds["warm"]:
                outcome += f", {seconds['warm']:.1f} s with a warm cache"
            outcomes.append(outcome)
            if not result["graphs"]:
                errors.append(f"{mode}: no graph was compiled")
    passed: bool | None = not errors
    advice = "try --compile.backend aot_eager, then eager, to narrow down the cause"
    if any(NO_COMPILER.search(error) for error in errors):
        passed = None
        advice = "inductor needs a C++ compiler on a CPU (apt install g++) and Triton on a GPU"
    if any(NO_HEADERS in error for error in errors):
        passed = None
        advice = "inductor needs the headers of Python (apt install python3-dev)"
    if all("skipped" in result for result in modes.values()):
        passed = None
        advice = "return the repeated layers of the model in blocks (model.py)"
    first_lines = [error.partition("\n")[0] for error in errors]
    measured = "; ".join(outcomes + first_lines)
    stage.check("compiles", passed, measured=measured, wanted="every mode compiles", advice=advice)


def judge_findings(stage: Stage, compiled: dict[str, ModeResult], name: str, wanted: str) -> None:
    """Check that each finding has a location and a reason.

    `name` is both the name of the check and the key of the findings in each result. Findings that
    have both do not fail the check, however many there are.
    """
    passed = True
    for result in compiled.values():
        for finding in result[name]:
            if not finding["where"] or not finding["reason"]:
                passed = False
    measured = describe_findings(compiled, name)
    stage.check(name, passed, measured=measured, wanted=wanted, advice=FINDINGS_ADVICE)


def judge_recompile_limit(stage: Stage, compiled: dict[str, ModeResult]) -> None:
    """Check that no function reached the compiler's limit of recompiles."""
    passed = not any(result["limits_hit"] for result in compiled.values())
    measured = describe_findings(compiled, "limits_hit")
    wanted = "not reached: beyond it a function runs eagerly"
    stage.check("recompile_limit", passed, measured=measured, wanted=wanted, advice=FINDINGS_ADVICE)


def describe_findings(compiled: dict[str, ModeResult], name: str) -> str:
    """Count the findings of each mode, and list the first distinct ones."""
    counts: list[str] = []
    lines: list[str] = []
    for mode, result in compiled.items():
        findings = result[name]
        counts.append(f"{mode} {len(findings)}")
        for finding in findings:
            where = finding["where"] or "unknown location"
            line = f"{mode}: {where}: {finding['reason']}"
            if line not in lines:
                lines.append(line)
    shown = lines[:SHOWN]
    if len(lines) > SHOWN:
        shown.append(f"{len(lines) - SHOWN} more")
    return "; ".join([", ".join(counts), *shown])


def judge_numerics(stage: Stage, compiled: dict[str, ModeResult]) -> None:
    """Check that the losses and gradients of compiled steps are close to those of eager ones."""
    differing: list[str] = []
    # The limits depend only on the dtype and the device, so all modes have the same limits.
    is_precise = all(result["precise"] for result in compiled.values())
    limits = PRECISE if is_precise else ROUNDED
    texts: list[str] = []
    for mode, result in compiled.items():
        difference = result["difference"]
        loss = f"loss {difference['loss']:.1e}"
        texts.append(f"{mode}: {loss}, gradients {difference['gradients']:.1e}")
        if differs(result):
            differing.append(mode)
    measured = f"after {STEPS} steps, relative to eager: {'; '.join(texts)}"
    wanted = f"at most {limits['loss']:.0e} and {limits['gradients']:.0e}"
    advice = (
        f"do not train with {' and '.join(differing)}; try --compile.backend aot_eager to see if "
        "inductor is at fault"
    )
    passed = not differing
    stage.check("numerics", passed, measured=measured, wanted=wanted, advice=advice)


def judge_speed(stage: Stage, compiled: dict[str, ModeResult]) -> None:
    """Compare the time of compiled and eager steps, and add the comparison to the results."""
    passed = True
    texts: list[str] = []
    for mode, result in compiled.items():
        windows = result["windows"]
        speedup, verdict = speedup_of(windows["eager"], windows["compiled"])
        step_seconds = spread(windows["compiled"])
        # As a dictionary, since JSON has no named tuples.
        result["speedup"] = speedup._asdict()
        result["verdict"] = verdict
        result["eager_step_seconds"] = spread(windows["eager"])
        result["step_seconds"] = step_seconds
        result["paid_after"] = None
        if verdict == "faster":
            # An eager step takes `speedup.value` times as long as a compiled one.
            saved_per_step = step_seconds["median"] * (speedup.value - 1)
            # After this number of steps, the first compile has paid off.
            cold = result["compile_seconds"]["cold"]
            result["paid_after"] = math.ceil(cold / saved_per_step)
        if verdict == TOO_NOISY:
            passed = None
        texts.append(f"{mode}: {verdict}, {speedup} times as fast, a step {describe(step_seconds)}")
    advice = "measure again when nothing else runs on this machine"
    stage.check("speedup", passed, measured="; ".join(texts), wanted="measured", advice=advice)


def recommend_mode(stage: Stage, modes: dict[str, ModeResult]) -> None:
    """Recommend the fastest mode that is correct and whose first compile pays off in this run."""
    given = stage.config.compile.mode
    # If the model is sharded, --compile.mode full compiles blocks, too (compile_model).
    mode_used = "blocks" if given == "full" and parallel.SHARDED else given
    steps = steps_of_run(stage.config)
    problems: dict[str, str] = {}
    faster: list[str] = []
    for mode, result in modes.items():
        problem = reason_against(result, steps)
        if problem:
            problems[mode] = problem
        elif result.get("paid_after"):
            # Only a mode that is significantly faster has `paid_after`.
            faster.append(mode)
    if faster:
        best = best_of(faster, modes)
        result = modes[best]
        stage.figures["best"] = best
        speedup = Interval(**result["speedup"])
        cold = f"the {result['compile_seconds']['cold']:.0f} s of a first compile"
        pays = f"{cold} pay off after {result['paid_after']:,} steps"
        advise(stage, f"train with --compile.mode {best}: {speedup} times as fast; {pays}")
        if given == "none":
            recommend(stage, "compile.mode", best, speedup)
        elif best != mode_used:
            # Leave out the speedup, since it is relative to eager steps, not to the given mode.
            recommend(stage, "compile.mode", best)
        return
    # Do not advise against compiling if a measurement was too noisy, since that mode may be faster.
    # If no mode has a problem, "no mode is faster" is true only if the stage has passed. If all
    # modes were skipped, for example, the stage has not passed, and nothing is known.
    undecided = any(result.get("verdict") == TOO_NOISY for result in modes.values())
    if not undecided and (problems or stage.status == "pass"):
        reasons = "; ".join(f"{mode}: {problem}" for mode, problem in problems.items())
        advise(stage, f"train with --compile.mode none: {reasons or 'no mode is faster here'}")
    if mode_used in problems:
        recommend(stage, "compile.mode", "none")


def best_of(faster: list[str], modes: dict[str, ModeResult]) -> str:
    """Return the best of the modes that are faster than eager steps."""
    if len(faster) == 1:
        return faster[0]
    # Blocks take less time to compile. So choose the whole model only if its interval is above that
    # of blocks.
    if modes["full"]["speedup"]["low"] > modes["blocks"]["speedup"]["high"]:
        return "full"
    return "blocks"


def reason_against(result: ModeResult, steps: int) -> str:
    """Return why a run of `steps` steps should not use a mode; "" if nothing speaks against it."""
    if "error" in result:
        first_line, _, _ = result["error"].partition("\n")
        return first_line
    if "skipped" in result:
        return ""
    if not result["graphs"]:
        return "no graph was compiled"
    if differs(result):
        return "its losses or gradients differ from eager steps"
    if result["limits_hit"]:
        return "it recompiles up to the limit"
    if result["verdict"] == "slower":
        return "slower than eager steps"
    paid_after = result["paid_after"]
    if paid_after is not None and paid_after > steps:
        return f"a first compile pays off after {paid_after:,} steps, but the run has {steps:,}"
    return ""
