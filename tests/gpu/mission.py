"""The way that the template is made for, on one GPU, in one command of less than ten minutes.

python -m tests.gpu.mission [--smoke] [--only fsdp|ddp] [--out FILE]

By `launch.sh`, with one rank of NCCL, for a project with FSDP2 and one with DDP, both with
`dcp_async`: compiled training is killed (-9) while a save is in flight, resumed, and has the losses
of a run without a kill; then `--compile.mode full`; then Muon, EMA, separate documents by
FlexAttention and traced steps together, and the stage `profile`. Each check is a line, and is
written to FILE as it ends. `--smoke` tries all of it on a CPU, with gloo and the tiny preset.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import torch

from benchmarks.common import beside_own_packages, render

# Seconds, after which what is left is not begun; and of one command.
BUDGET, LIMIT = 540, 150
STEPS, EVERY = 30, 10
READ_TRACE = """
import sys
from pathlib import Path
from {package}.workflow.trace import read_trace
print(len(read_trace(Path(sys.argv[1]))), "events")
"""


class Failed(Exception):
    """A check that failed, and why."""


@dataclass
class Mission:
    """A project of one parallelism, and what is found with it."""

    parallelism: str
    project: Path
    data: Path
    smoke: bool
    output: str = field(default="", init=False)

    @property
    def package(self) -> str:
        """The name of the project's package."""
        return f"by_{self.parallelism}"

    def command(self, command: str, name: str, *words: str) -> list[str]:
        """A command by launch.sh; runs of one name share a run directory."""
        preset = ["--preset", "tiny", "--device", "cpu"]
        if not self.smoke:
            preset = ["--preset", "gpt2_124m", "--device", "cuda"]
            preset += ["--train.global-batch-size", "8", "--train.micro-batch-size", "8"]
        vocabulary = "320" if self.smoke else "50304"
        preset += ["--data.path", str(self.data), "--data.vocabulary", vocabulary]
        preset += ["--train.steps", str(STEPS), "--train.log-every", "1"]
        preset += ["--train.validate-every", "0", "--train.validate-samples", "8"]
        preset += ["--checkpoint.every", str(EVERY), "--name", name]
        if self.smoke:
            # Compiling for a CPU takes a minute; this goes the same way without that.
            preset += ["--compile.backend", "eager"]
        return ["bash", "launch.sh", "-n", "1", command, *preset, *words]

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """Start a command, whose output goes to a file in the project."""
        environment = {"PYTHONPATH": beside_own_packages("src"), "PYTHON": sys.executable}
        with open(self.project / "output.txt", "w") as log:
            return subprocess.Popen(
                command,
                cwd=self.project,
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def run(self, command: list[str]) -> str:
        """Run a command that has to succeed, and return its output."""
        process = self.start(command)
        try:
            # A smoke test may share a few cores with other work.
            code = process.wait(4 * LIMIT if self.smoke else LIMIT)
        except subprocess.TimeoutExpired:
            kill(process)
            code = -1
        output = (self.project / "output.txt").read_text("utf-8", "replace")
        if code:
            raise Failed(f"exit code {code}: {output[-1500:]}")
        return output

    def losses(self, name: str) -> dict[int, float]:
        """The losses of a run, by step."""
        lines = (self.project / "runs" / name / "metrics.jsonl").read_text("utf-8").splitlines()
        return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and all that it has started, at once and without notice."""
    processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in processes:
        with contextlib.suppress(psutil.Error):
            each.send_signal(signal.SIGKILL)
    process.wait()


def trained(mission: Mission) -> str:
    """Compiled block by block, with deterministic kernels: a run without a kill."""
    words = ("--train.deterministic", "--compile.mode", "blocks")
    output = mission.run(mission.command("train", "whole", *words))
    if "finished at step" not in output:
        raise Failed(output[-500:])
    return f"{len(mission.losses('whole'))} losses"


def killed_in_a_save(mission: Mission) -> str:
    """Killed while a save is in flight, and resumed by the same command."""
    words = ("--train.deterministic", "--compile.mode", "blocks")
    command = mission.command("train", "killed", *words)
    folder = mission.project / "runs" / "killed" / "checkpoints"
    process = mission.start(command)
    deadline = time.monotonic() + (4 * LIMIT if mission.smoke else LIMIT)
    while process.poll() is None and time.monotonic() < deadline:
        names = os.listdir(folder) if folder.exists() else []
        whole = [name for name in names if re.fullmatch(r"step_\d{8}", name)]
        # A save that is in flight has a folder of another name, once one has been published.
        if whole and len(names) > len(whole):
            break
        time.sleep(0.001)
    else:
        kill(process)
        raise Failed("no save was seen in flight")
    kill(process)
    left = sorted(set(os.listdir(folder)) - set(whole))
    output = mission.run(command)
    resumed = re.search(r"resumed at step (\d+)", output)
    if not resumed:
        raise Failed(f"not resumed: {output[-1000:]}")
    one, other = mission.losses("whole"), mission.losses("killed")
    if len(one) != STEPS or one != other:
        different = [step for step in one if one[step] != other.get(step)]
        raise Failed(f"losses differ at steps {different}")
    return f"killed with {', '.join(left)}; resumed at step {resumed[1]}; {len(one)} equal losses"


def compiled_whole(mission: Mission) -> str:
    """`--compile.mode full`, which means blocks under FSDP."""
    mission.run(mission.command("train", "full", "--compile.mode", "full"))
    losses = mission.losses("full")
    return f"loss {losses[1]:.3f} to {losses[STEPS]:.3f}"


def everything(mission: Mission) -> str:
    """Muon, EMA, separate documents and traced steps, in one compiled run."""
    words = ["--compile.mode", "blocks", "--optim.name", "muon", "--optim.ema", "0.9"]
    words += ["--data.documents", "separate", "--data.end-of-text", "0"]
    output = mission.run(mission.command("train", "all", *words, "--profile.every", "10"))
    if "flex_attention called without" in output:
        raise Failed("FlexAttention was not compiled")
    traces = sorted((mission.project / "runs" / "all" / "traces").glob("*.json.gz"))
    if not traces:
        raise Failed("no trace was written")
    script = READ_TRACE.format(package=mission.package)
    events = mission.run([sys.executable, "-c", script, str(traces[-1])]).split("\n")[-2]
    return f"{len(traces)} traces, the last has {events}"


def profiled(mission: Mission) -> str:
    """The stage `profile`, which reads its trace."""
    output = mission.run(mission.command("profile", "profiled", "--compile.mode", "blocks"))
    return output.strip().split("\n")[-1]


CHECKS: dict[str, Callable[[Mission], str]] = {
    "blocks, deterministic": trained,
    "kill -9 in a save, resumed": killed_in_a_save,
    "full": compiled_whole,
    "Muon, EMA, FlexAttention, traces": everything,
    "profile": profiled,
}


def random_documents(folder: Path) -> None:
    """Write files of random tokens, in which token 0 ends a document."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for part, size in (("train", 2_000_000), ("val", 100_000)):
        generator.integers(0, 300, size, dtype=np.uint16).tofile(folder / f"{part}.bin")


def main() -> int:
    """Run all checks; 1 if one of them failed or was not begun."""
    parser = argparse.ArgumentParser("python -m tests.gpu.mission", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="on a CPU, with gloo")
    parser.add_argument("--out", type=Path, help="a file for the results")
    parser.add_argument("--only", choices=("fsdp", "ddp"), help="one of the two projects")
    given = parser.parse_args()
    if not given.smoke and not torch.cuda.is_available():
        sys.exit("there is no GPU here: --smoke tries all of it on the CPU")
    started = time.monotonic()
    results: list[dict[str, str | float]] = []
    with tempfile.TemporaryDirectory(prefix="mission-") as work:
        random_documents(Path(work, "tokens"))
        for parallelism in (given.only,) if given.only else ("fsdp", "ddp"):
            answers = {"parallelism": parallelism, "package_name": f"by_{parallelism}"}
            answers |= {"checkpoint": "dcp_async", "text": "tokenizer", "tracker": "none"}
            folder = Path(work, parallelism)
            folder.mkdir()
            project = render(folder, **answers).parent
            mission = Mission(parallelism, project, Path(work, "tokens"), given.smoke)
            for name, check in CHECKS.items():
                begun = time.monotonic()
                status = "ok"
                if begun - started > BUDGET and not given.smoke:
                    status, text = "not begun", "the time is up"
                else:
                    try:
                        text = check(mission)
                    except (Failed, OSError, KeyError) as error:
                        status, text = "FAILED", str(error)
                seconds = round(time.monotonic() - begun, 1)
                print(f"{status:9} {parallelism}: {name} ({seconds} s): {text}", flush=True)
                results.append(
                    {
                        "parallelism": parallelism,
                        "check": name,
                        "status": status,
                        "seconds": seconds,
                        "text": text,
                    }
                )
                if given.out:
                    device = torch.cuda.get_device_name() if not given.smoke else "cpu"
                    content = {"device": device, "torch": torch.__version__, "results": results}
                    given.out.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    return int(any(result["status"] != "ok" for result in results))


if __name__ == "__main__":
    sys.exit(main())
