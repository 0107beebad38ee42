"""What all benchmarks share: statistics, the machine, ports, renders, result files."""

import argparse
import contextlib
import itertools
import json
import os
import platform
import re
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
MODEL = Path(__file__).parent / "mlp"
PACKAGE = "my_training_run"  # of a default render
TASKS: tuple[str, ...] = tuple(json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))["task"])


def spread(values: Iterable[float]) -> dict[str, float]:
    """Number, median, 10th and 90th percentile, and the median's 95 % confidence interval."""
    ordered = sorted(values)
    reach = 0.98 * len(ordered) ** 0.5  # by ranks, which asks nothing of the distribution
    low, high = (round(len(ordered) / 2 + side * reach - 0.5) for side in (-1, 1))
    tenths = statistics.quantiles(ordered, n=10, method="inclusive") if ordered[1:] else ordered * 9
    return {
        "n": len(ordered),
        "median": statistics.median(ordered),
        "p10": tenths[0],
        "p90": tenths[8],
        "low": ordered[max(low, 0)],
        "high": ordered[min(high, len(ordered) - 1)],
    }


def series(values: Iterable[float], unit: str) -> dict[str, Any]:
    """Measurements as they go into a result: each of them, rounded, and their spread."""
    rounded = [float(f"{value:.5g}") for value in values]
    return {"unit": unit, "values": rounded, **spread(rounded)}


def differences(values: list[float], baseline: list[float], unit: str) -> dict[str, Any]:
    """What `values` have over `baseline`, window by window: drift of the machine cancels out."""
    return series((a - b for a, b in zip(values, baseline, strict=True)), unit)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu,
        "cores": cores,
        "memory_gb": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_before": round(os.getloadavg()[0], 2),
    }


def today() -> str:
    """The date of a result."""
    return datetime.now(UTC).date().isoformat()


PORTS = range(20_000, 32_768)  # above them the system gives ports to any process that asks
_tried = itertools.count()


def free_ports(count: int) -> list[int]:
    """Ports that nobody has, and that neither another call gets nor, soon, another process."""
    found: list[int] = []
    for _ in PORTS:
        port = PORTS[(os.getpid() * 997 + next(_tried)) % len(PORTS)]
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError("all ports are taken")


def file_system(folder: Path) -> str:
    """The kind of file system that `folder` is on, where the system tells."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    folder = folder.resolve()
    found = [(len(at), kind) for at, kind in mounts if folder.is_relative_to(at)]
    return max(found)[1]


def beside_own_packages(source: Path | str) -> str:
    """A PYTHONPATH for a render's `src`; packages that are found by it now still are."""
    return os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of the installed ones of these packages."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def installed(package: str) -> bool:
    """Whether a peer can take part."""
    return package in versions(package)


def render(folder: Path, own_model: bool = False, template: Path = ROOT, **answers: str) -> Path:
    """Render a project in `folder`, with our perceptron if asked; returns its `src`."""
    from cookiecutter.main import cookiecutter

    settings = folder / "cookiecutter.json"  # not the user's own
    kept = {name: str(folder / ".cookiecutter") for name in ("cookiecutters_dir", "replay_dir")}
    settings.write_text(json.dumps(kept), "utf-8")
    project = cookiecutter(
        str(template),
        no_input=True,
        extra_context=answers,
        output_dir=str(folder),
        config_file=str(settings),
        accept_hooks=False,
    )
    source = Path(project) / "src"
    if own_model:
        for file in MODEL.glob("*.py"):
            shutil.copy(file, source / answers.get("package_name", PACKAGE))
    return source


def block_of(page: Path, word: str) -> str:
    """Return the first block of code of a page in docs/ that has a word in it."""
    blocks = re.findall(r"```\w+\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    return next(block for block in blocks if word in block)


def benchmark(
    topic: str, measure: Callable[[Path, bool], dict[str, Any]], packages: tuple[str, ...]
) -> None:
    """The command line of a benchmark: measure in a temporary folder, write `<topic>.json`."""
    parser = argparse.ArgumentParser(f"python -m benchmarks.{topic}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    parser.add_argument("--work", type=Path, help="folder on the disk to measure (default: TMPDIR)")
    parser.add_argument(
        "--smoke", action="store_true", help="a try in seconds: figures mean nothing"
    )
    given = parser.parse_args()
    before, started = machine(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=given.work) as folder:
        result = measure(Path(folder), given.smoke)
        place = file_system(Path(folder))
    result = {
        "topic": topic,
        "command": f"python -m benchmarks.{topic}",
        "smoke": given.smoke,
        "date": today(),
        "seconds": round(time.perf_counter() - started),
        "machine": {**before, "file_system": place},
        "versions": versions(*packages),
        **result,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1)
    (given.out / f"{topic}.json").write_text(numbers_on_one_line(text) + "\n", "utf-8")
    for name, found in result["series"].items():
        print(
            f"{name:<48} {found['median']:>12.5g} {found['unit']:<12}"
            f"[{found['p10']:.5g}, {found['p90']:.5g}] n={found['n']}",
            file=sys.stderr,
        )


def numbers_on_one_line(text: str) -> str:
    """Keep lists of numbers from taking a line for each."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if inside:
            lines[-1] += line.strip() if line.strip()[0] == "]" else line.strip() + " "
            inside = line.strip()[0] != "]"
            lines[-1] = lines[-1].replace(" ]", "]")
        else:
            lines.append(line)
            inside = line.endswith("[")
    return "\n".join(lines)
