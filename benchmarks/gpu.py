"""A GPU's figures in one command: the tests marked `gpu`, then what each part costs there.

python -m benchmarks.gpu [--nanogpt FOLDER] [--only PIECE] [--again]
python -m benchmarks.gpu --smoke         tries all of it on a CPU: figures mean nothing

It uses the Python that runs it, with whatever torch that has, and says first which packages that
lacks. Each piece is written down as it ends, so the same command continues where it was cut off; a
piece is measured anew when the code, torch or the device is another one, or with `--again`.
nanoGPT's figures need a clone of github.com/karpathy/nanoGPT.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import gpt2, ranks, save
from .common import (
    PACKAGE,
    RESULTS,
    ROOT,
    beside_own_packages,
    machine,
    numbers_on_one_line,
    render,
    series,
    today,
    versions,
)

Series = dict[str, dict[str, Any]]
NEEDED = ("cookiecutter", "hypothesis", "numpy", "psutil", "pytest", "safetensors", "tyro", "xdist")
RESTARTS = 3
LARGE = {"model.layers": 13}  # with AdamW's moments above 1.5 GB


def vocabulary(smoke: bool) -> int:
    """GPT-2's, made divisible by 64 as nanoGPT has it."""
    return 256 if smoke else gpt2.VOCABULARY


@dataclass(frozen=True)
class Bench:
    """What the pieces need."""

    work: Path
    """An empty folder on the disk to save to."""
    source: Path
    """`src` of a default render."""
    data: Path
    """A folder of random tokens."""
    device: str
    smoke: bool
    nanogpt: Path | None

    @property
    def preset(self) -> list[str]:
        """The settings of what is trained."""
        words = ["--preset", "tiny" if self.smoke else "gpt2_124m", "--device", self.device]
        words += ["--data.path", str(self.data)]
        return [*words, "--data.vocabulary", str(vocabulary(self.smoke))]

    def command(self, *words: str) -> tuple[list[str], dict[str, str]]:
        """A command of the render with these settings, and its environment."""
        environment = {**os.environ, "PYTHONPATH": beside_own_packages(self.source)}
        return [sys.executable, "-u", "-m", PACKAGE, *words, *self.preset], environment


def tests(bench: Bench) -> Series:
    """The tests marked `gpu`, on this device; one that fails ends it."""
    words = ["-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "tests/gpu"]
    outcome = subprocess.run(
        [sys.executable, *words, "--basetemp", str(bench.work / "tests")],
        cwd=ROOT,
        env={**os.environ, "TEST_DEVICE": bench.device},
        capture_output=True,
        text=True,
    )
    passed = re.search(r"(\d+) passed", outcome.stdout)
    if outcome.returncode or not passed:
        raise RuntimeError(f"tests fail:\n{outcome.stdout[-4000:]}{outcome.stderr[-2000:]}")
    return {"tests that pass": series([float(passed[1])], "tests")}


def saves(bench: Bench) -> Series:
    """Seconds that saves of more than 1.5 GB hold training up, ours by each answer, in turns."""
    for answer in ranks.ANSWERS:
        where = bench.work / "renders" / answer
        where.mkdir(parents=True)
        render(where, package_name=f"saving_by_{answer}", checkpoint=answer)
    command = [sys.executable, "-m", "benchmarks.gpu", *(["--smoke"] if bench.smoke else [])]
    command += ["--saves-in", str(bench.work), str(bench.data)]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if outcome.returncode:
        raise RuntimeError(f"{outcome.stdout[-1000:]}{outcome.stderr[-3000:]}")
    return json.loads((bench.work / "saves.json").read_text("utf-8"))


def time_saves(folder: Path, device: str, data: Path, smoke: bool) -> None:
    """In a process of its own: `save.work` on a language model of this device."""
    preset = "tiny" if smoke else "gpt2_124m"
    settings = {"device": device, "data.path": data, "train.micro_batch_size": 8}
    settings |= {"train.global_batch_size": 8, "data.vocabulary": vocabulary(smoke)}
    bench = ranks.Bench(folder, settings | ({} if smoke else LARGE), preset)
    found = save.work(bench, smoke)["series"]
    found["size of the state"] = series([bench.bytes / 1e9], "GB")
    (folder / "saves.json").write_text(json.dumps(found), "utf-8")
    sys.stdout.flush()
    os._exit(0)


def restart(bench: Bench) -> Series:
    """Seconds from `kill -9` to the next step that is logged, compiled, with a warm cache."""
    run_dir = bench.work / "restarted"
    mode = "none" if bench.smoke else "full"
    options = ["--run-dir", str(run_dir), "--train.log-every", "1", "--checkpoint.every", "5"]
    options += ["--train.steps", "1000000", "--compile.mode", mode, "--train.validate-every", "0"]
    command, environment = bench.command("train", *options)
    seconds = []
    for attempt in range(2 if bench.smoke else RESTARTS + 1):
        started = time.perf_counter()
        first = 0.0
        with subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            lines = []
            for line in process.stdout or ():
                lines.append(line)
                if re.match(r"step \d+/", line):
                    first = first or time.perf_counter() - started
                    if list(run_dir.glob("checkpoints/step_*")):
                        break
            os.killpg(process.pid, signal.SIGKILL)
        if not first:
            raise RuntimeError("".join(lines[-20:]))
        seconds += [first] if attempt else []  # the first start compiles with nothing cached
    shutil.rmtree(run_dir)
    return {"from the start to the first step, resumed": series(seconds, "s")}


PIECES: dict[str, Callable[[Bench], Series]] = {
    "tests": tests,
    # A round each, so that a piece stays short.
    "gpt2, round 1": lambda bench: gpt2.measure(bench),
    "gpt2, round 2": lambda bench: gpt2.measure(bench),
    "saves": saves,
    "restart": restart,
}


def origin(device: str, smoke: bool) -> dict[str, Any]:
    """On what, and of what code, figures are."""
    template = [ROOT / "{{cookiecutter.project_slug}}", ROOT / "templates", ROOT / "benchmarks"]
    template.append(ROOT / "tests/gpu")
    files = sorted(file for part in template for file in part.rglob("*.py"))
    code = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]
    driver = None
    if device == "cuda" and (tool := shutil.which("nvidia-smi")):
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "driver": driver,
        "versions": versions("torch", "triton", "numpy"),
        "cuda": torch.version.cuda,
        "code": code,
        "smoke": smoke,
    }


def main() -> int:
    """Measure what is not yet measured; write results/gpu.json piece by piece."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--nanogpt", type=Path, help="a clone of nanoGPT to measure beside us")
    parser.add_argument("--only", choices=PIECES, action="append", help="this piece, or several")
    parser.add_argument("--again", action="store_true", help="measure anew what is measured")
    parser.add_argument("--smoke", action="store_true", help="on a CPU: figures mean nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    parser.add_argument("--work", type=Path, help="folder on the disk to measure (default: TMPDIR)")
    parser.add_argument("--saves-in", nargs=2, type=Path, help=argparse.SUPPRESS)  # see `saves`
    given = parser.parse_args()
    if lacking := [name for name in NEEDED if not importlib.util.find_spec(name)]:
        sys.exit(f"not installed here: {', '.join(lacking)} (xdist is pytest-xdist)")
    if not given.smoke and not torch.cuda.is_available():
        sys.exit("there is no GPU here: --smoke tries all of it on the CPU")
    device = "cpu" if given.smoke else "cuda"
    if given.saves_in:
        time_saves(given.saves_in[0], device, given.saves_in[1], given.smoke)
    here, path = origin(device, given.smoke), given.out / "gpu.json"
    result: dict[str, Any] = {"pieces": {}}
    if path.exists():
        before = json.loads(path.read_text("utf-8"))
        result = before if before["origin"] == here else result
    for name in (given.only or PIECES) if given.again else ():
        result["pieces"].pop(name, None)
    result |= {"topic": "gpu", "command": "make gpu", "date": today()}
    result |= {"origin": here, "machine": machine()}
    failed = []
    for name, piece in PIECES.items():
        if name in result["pieces"] or name not in (given.only or PIECES):
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="benchmark-", dir=given.work) as folder:
            work = Path(folder)
            (work / "render").mkdir()
            source = render(work / "render")
            data = gpt2.random_tokens(work / "tokens", vocabulary(given.smoke))
            bench = Bench(work, source, data, device, given.smoke, given.nanogpt)
            try:
                found = piece(bench)
            except (RuntimeError, OSError, KeyError, ValueError) as error:
                print(f"{name}: not measured: {error}", file=sys.stderr, flush=True)
                failed.append(name)
                continue
        seconds = round(time.perf_counter() - started)
        result["pieces"][name] = {"seconds": seconds, "series": found}
        given.out.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(".part")
        whole.write_text(numbers_on_one_line(json.dumps(result, indent=1)) + "\n", "utf-8")
        whole.replace(path)
        for what, of in found.items():
            text = f"{what:<48} {of['median']:>12.5g} {of['unit']:<10} n={of['n']}"
            print(text, file=sys.stderr, flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
