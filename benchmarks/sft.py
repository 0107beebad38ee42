"""The chat recipe beside TRL's SFTTrainer, in turns: the same base, data, adapter and settings.

python -m benchmarks.sft [--runs N] [--smoke]

The files of docs/guides/fine-tuning-a-chat-model.md make the base, the conversations and our
project. In each round both train once undisturbed, then once with a `kill -9` after a checkpoint
and a second start. Everything runs on one process and one thread of a CPU, in float32.
"""

import argparse
import functools
import json
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from .common import (
    PACKAGE,
    ROOT,
    benchmark,
    beside_own_packages,
    block_of,
    installed,
    render,
    series,
)
from .sft_trl import Settings

GUIDE = ROOT / "docs/guides/fine-tuning-a-chat-model.md"
# The template of the recipe with the marks that SFTTrainer asks for. Both sides use it.
TEMPLATE = (
    "{% for message in messages %}{{ message.role + '\\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
)
# Prints what the callback of SFTTrainer prints, and nothing else.
CALLBACKS = '''
"""Says when a step is done."""

import time


def callbacks(config, run_dir):
    return (Steps(),)


class Steps:
    def after_step(self, state, record):
        print(f"done {state.step} {time.process_time()}", flush=True)
'''
# A base of 11 million parameters; that it has learned little changes neither bytes nor seconds.
SIZE = ("--model.layers", "6", "--model.heads", "6", "--model.width", "384")
WARM_UP = 2
PATIENCE = 600.0
OURS, THEIRS = "ours", "SFTTrainer"


@dataclass
class Steps:
    """What a training process did."""

    first: float = 0.0
    """Seconds from the start of the process to its first step."""
    wall: list[float] = field(default_factory=list)
    """Seconds of each step after the warm-up."""
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of each of these steps."""
    seconds: float = 0.0
    """Seconds of the whole process."""
    peak: int = 0
    """Bytes of host memory at the peak."""
    output: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Contender:
    """One way to train: its command, and where its results are."""

    command: Callable[[str], list[str]]
    """The command for a run of that name."""
    checkpoint: Callable[[str, int], Path]
    """Folder of a run's checkpoint after a step."""
    state: tuple[str, ...]
    """Files of a checkpoint that hold the adapter and the state of the optimizer."""


def environment(folder: Path, project: Path) -> dict[str, str]:
    """One thread, no network, and a cache for SFTTrainer's tokenized data."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), beside_own_packages(project / "src")]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
        "TOKENIZERS_PARALLELISM": "false",
    }


def call(folder: Path, project: Path, *words: str) -> None:
    """Run a command of a project that has to succeed."""
    outcome = subprocess.run(
        [sys.executable, "-m", PACKAGE, *words],
        cwd=project,
        env=environment(folder, project),
        capture_output=True,
        text=True,
    )
    if outcome.returncode:
        sys.exit(outcome.stdout + outcome.stderr)


def watch(
    folder: Path, project: Path, command: list[str], kill: tuple[int, Path] | None = None
) -> Steps:
    """Run a training process; with `kill`, end it after that step, once that folder exists."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=project,
        env=environment(folder, project),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    arrived: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()

    def read() -> None:
        for line in process.stdout:
            arrived.put((time.perf_counter(), line))
        arrived.put((time.perf_counter(), ""))

    threading.Thread(target=read, daemon=True).start()
    result = Steps()
    killed = False
    done = 0
    last: tuple[float, float] | None = None
    while True:
        moment, line = arrived.get(timeout=PATIENCE)
        if not line:
            break
        result.output.append(line)
        if not line.startswith("done "):
            continue
        done += 1
        cpu = float(line.split()[2])
        if last is None:
            result.first = moment - began
        elif done > WARM_UP:
            result.wall.append(moment - last[0])
            result.cpu.append(cpu - last[1])
        last = (moment, cpu)
        step = int(line.split()[1])
        if kill is not None and step >= kill[0] and kill[1].exists() and not killed:
            os.killpg(process.pid, signal.SIGKILL)
            killed = True
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    result.seconds = time.perf_counter() - began
    result.peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if killed != (kill is not None) or (process.returncode != 0 and not killed):
        sys.exit("".join(result.output))
    return result


def prepare(folder: Path, smoke: bool) -> tuple[Path, Path]:
    """Make the base and the conversations by the recipe; return the project and the base."""
    for name in ("first", "second"):
        (folder / name).mkdir()
    first = render(folder / "first", text="tokenizer", parallelism="single").parent
    where = ("--text", "src", "--to", "data/tokens")
    call(folder, first, "tokens", *where, "--vocabulary", "1000")
    size = ("--preset", "tiny") if smoke else (*SIZE, "--optim.name", "adamw")
    few = ("--train.steps", "2", "--train.validate-every", "0", "--device", "cpu")
    call(folder, first, "train", "--name", "base", "--data.path", "data/tokens", *size, *few)
    call(folder, first, "export", "--name", "base", "--to", "base-hf")
    project = render(folder / "second", text="tokenizer", parallelism="fsdp").parent
    base = project / "base-hf"
    shutil.copytree(first / "base-hf", base)
    (base / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    package = project / "src" / PACKAGE
    (package / "data.py").write_text(block_of(GUIDE, "class Chats"), "utf-8")
    (package / "model.py").write_text(block_of(GUIDE, "get_peft_model"), "utf-8")
    (package / "infer.py").write_text(block_of(GUIDE, "TextStreamer"), "utf-8")
    (package / "callbacks.py").write_text(CALLBACKS, "utf-8")
    script = block_of(GUIDE, "random.Random")
    if smoke:
        script = script.replace("range(2000)", "range(100)")
    subprocess.run([sys.executable, "-c", script], cwd=project, check=True)
    lines = (project / "chats.jsonl").read_text("utf-8").splitlines(keepends=True)
    # Our data.py keeps one conversation in 20 for validation.
    training = [line for i, line in enumerate(lines) if i % 20 != 0]
    (project / "training.jsonl").write_text("".join(training), "utf-8")
    # One for our validation, and as many as a step takes.
    (project / "batch.jsonl").write_text("".join(lines[:17]), "utf-8")
    (project / "batch_training.jsonl").write_text("".join(lines[1:17]), "utf-8")
    return project, base


def ours(project: Path, settings: Settings, *words: str) -> Contender:
    """The recipe's `train`, on one process."""

    def command(name: str) -> list[str]:
        return [
            *(sys.executable, "-m", PACKAGE, "train", "--name", name, "--device", "cpu"),
            *("--init-from", "base-hf", "--checkpoint.frozen", "no"),
            *("--data.path", settings.chats, "--data.context", str(settings.context)),
            *("--train.steps", str(settings.steps), "--train.validate-every", "0"),
            *("--train.global-batch-size", str(settings.batch)),
            *("--train.micro-batch-size", str(settings.micro_batch)),
            *("--checkpoint.every", str(settings.save_every)),
            *("--model.rank", str(settings.rank), "--model.alpha", str(settings.alpha)),
            *("--optim.learning-rate", str(settings.learning_rate)),
            *("--optim.beta2", str(settings.beta2), "--optim.weight-decay", "0"),
            *("--optim.schedule", "constant", "--optim.warmup-steps", "0"),
            *words,
        ]

    def checkpoint(name: str, step: int) -> Path:
        return project / "runs" / name / "checkpoints" / f"step_{step:08}"

    return Contender(command, checkpoint, ("__0_0.distcp",))


def trl(project: Path, settings: Settings) -> Contender:
    """SFTTrainer, by sft_trl.py."""

    def command(name: str) -> list[str]:
        given = {**asdict(settings), "output": str(project / "trl" / name)}
        return [sys.executable, "-m", "benchmarks.sft_trl", json.dumps(given)]

    def checkpoint(name: str, step: int) -> Path:
        return project / "trl" / name / f"checkpoint-{step}"

    return Contender(command, checkpoint, ("adapter_model.safetensors", "optimizer.pt"))


def tensors(folder: Path) -> dict[str, Any]:
    """Read an adapter in peft's layout."""
    from safetensors.numpy import load_file

    return load_file(folder / "adapter_model.safetensors")


def differing(one: Path, two: Path, names: tuple[str, ...]) -> int:
    """Count the files of two checkpoints that are not the same, byte by byte."""
    count = 0
    for name in names:
        if (one / name).read_bytes() != (two / name).read_bytes():
            count += 1
    return count


def same_start(folder: Path, project: Path, settings: Settings) -> dict[str, Any]:
    """Train both from one adapter on the conversations of a single step, and compare.

    Each step takes all 16 conversations, so both see the same batches in any order.
    """
    five = replace(settings, chats="batch.jsonl", steps=5, save_every=5)
    # The adapter as it is before the first step: a step at a rate of next to nothing.
    begin = ours(project, replace(five, steps=1, learning_rate=1e-30))
    watch(folder, project, begin.command("begin"))
    call(folder, project, "export", "--name", "begin", "--to", "begin-hf")
    mine = ours(project, five, "--train.log-every", "1")
    watch(folder, project, mine.command("probe"))
    call(folder, project, "export", "--name", "probe", "--to", "probe-hf")
    records = (project / "runs/probe/metrics.jsonl").read_text("utf-8").splitlines()
    our_losses = [json.loads(line)["loss"] for line in records if '"loss"' in line]
    chats, adapter = str(project / "batch_training.jsonl"), str(project / "begin-hf")
    other = trl(project, replace(five, chats=chats, adapter=adapter, log_every=1))
    output = watch(folder, project, other.command("probe")).output
    their_losses = [float(line.split()[2]) for line in output if line.startswith("loss ")]
    start, one = tensors(project / "begin-hf"), tensors(project / "probe-hf")
    two = tensors(other.checkpoint("probe", 5))
    moved = sum(np.square(one[name] - start[name]).sum() for name in one) ** 0.5
    apart = sum(np.square(one[name] - two[name]).sum() for name in one) ** 0.5
    differences = np.abs(np.subtract(our_losses, their_losses))
    return {
        "ours: loss of the first step": series(our_losses[:1], "nats"),
        "SFTTrainer: loss of the first step": series(their_losses[:1], "nats"),
        "5 steps from one adapter: difference of the losses": series(
            1e6 * differences, "1e-6 nats"
        ),
        "5 steps from one adapter: difference of the weights": series(
            [100 * apart / moved], "% of their change"
        ),
    }


def count_tokens(project: Path) -> float:
    """Tokens of a conversation of the training data, on average."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(project / "base-hf")
    counts = []
    for line in (project / "training.jsonl").read_text("utf-8").splitlines():
        messages = json.loads(line)["messages"]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        counts.append(len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return statistics.mean(counts)


def count_parameters(base: Path) -> int:
    """Parameters of the base."""
    from safetensors import safe_open

    total = 0
    with safe_open(base / "model.safetensors", "numpy") as file:
        for name in file.keys():  # noqa: SIM118
            total += int(np.prod(file.get_slice(name).get_shape()))
    return total


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure(folder: Path, smoke: bool, runs: int) -> dict[str, Any]:
    """Round after round, the contenders in turns."""
    # A first save, some steps, a kill: the second start repeats the steps after the save.
    steps, save_every, kill_at = (6, 2, 3) if smoke else (12, 3, 5)
    project, base = prepare(folder, smoke)
    settings = Settings(
        base=str(base),
        chats="chats.jsonl",
        output="",
        steps=steps,
        save_every=save_every,
        batch=16,
        micro_batch=8,
        rank=16,
        alpha=32.0,
        learning_rate=2e-3,
        beta2=0.95,
        context=512,
    )
    contenders = {OURS: ours(project, settings)}
    if installed("trl"):
        chats = str(project / "training.jsonl")
        contenders[THEIRS] = trl(project, replace(settings, chats=chats))
    tokens = settings.batch * count_tokens(project)
    found: dict[tuple[str, str], list[float]] = {}

    def note(name: str, what: str, value: float, unit: str) -> None:
        print(f"{name}: {what}: {value:.5g} {unit}", file=sys.stderr, flush=True)
        found.setdefault((f"{name}: {what}", unit), []).append(value)

    probe = same_start(folder, project, settings) if THEIRS in contenders else {}
    for name, values in probe.items():
        print(name, values["values"], file=sys.stderr, flush=True)
    for round_ in range(1 if smoke else runs):
        note("the machine", "load before each round", os.getloadavg()[0], "processes")
        for name, way in contenders.items():
            whole, cut = f"whole{round_}", f"cut{round_}"
            done = watch(folder, project, way.command(whole))
            note(name, "tokens per second", tokens / statistics.median(done.wall), "tokens/s")
            cpu = tokens / statistics.median(done.cpu)
            note(name, "tokens per second of CPU time", cpu, "tokens/s")
            note(name, "the whole process", done.seconds, "s")
            note(name, "host memory", done.peak / 1e6, "MB")
            # The last one: ours removes older ones.
            saved = way.checkpoint(whole, steps)
            note(name, "a checkpoint", size_of(saved) / 1e6, "MB")
            kill = (kill_at, way.checkpoint(cut, save_every))
            watch(folder, project, way.command(cut), kill)
            again = watch(folder, project, way.command(cut))
            resumed = next(line for line in again.output if line.startswith("done "))
            if int(resumed.split()[1]) == 1:
                sys.exit(f"{name} began anew: {''.join(again.output)}")
            note(name, "from a start that resumes to its first step", again.first, "s")
            ends = [way.checkpoint(run, steps) for run in (whole, cut)]
            apart = differing(*ends, way.state)
            note(name, "files that differ after a resume", apart, "files")
    shape = {
        "parameters_of_the_base": f"{count_parameters(base):,}",
        "conversations_in_a_step": settings.batch,
        "tokens_in_a_step": round(tokens),
        "steps": steps,
        "steps_between_saves": save_every,
    }
    measured = {name: series(values, unit) for (name, unit), values in found.items()}
    return {"settings": shape, "series": measured | probe}


def main() -> None:
    """Measure, if SFTTrainer is there."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--runs", type=int, default=3)
    given, rest = parser.parse_known_args()
    if not installed("trl") and "--smoke" not in rest:
        pins = "-c constraints.txt -c benchmarks/constraints.txt"
        sys.exit(f"TRL is not installed: pip install {pins} trl peft")
    sys.argv[1:] = rest
    packages = ("torch", "transformers", "peft", "trl", "accelerate", "datasets")
    benchmark("sft", functools.partial(measure, runs=given.runs), packages)


if __name__ == "__main__":
    main()
