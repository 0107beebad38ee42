"""A gate: what a stage has checked, what it measured, and whether that is good enough.

`workflow/<stage>.json` holds it all: {stage, status, checks, advice, figures, settings, code,
machine, versions, seconds, measured_at}. A status is pass, fail or not_measured.
"""

import functools
import hashlib
import json
import math
import os
import platform
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..config import Config, to_json
from ..errors import UserError
from ..files import write_json
from ..run.hardware import cpu_name, device_name, usable_cores

STATUSES = ("fail", "not_measured", "pass")  # the worst first
CHECK = {"name", "status", "measured", "wanted", "advice"}
PROGRAM = f"python -m {__package__.split('.')[0]}"
PACKAGE = __package__.split(".")[0]


@dataclass
class Stage:
    """A stage of the workflow under way; `close` writes its JSON and gives its exit code."""

    name: str
    config: Config
    figures: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, str]] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        """Make sure of a place for its JSON before anything is measured; UserError if not."""
        folder = stage_file(self.config.directory, self.name).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UserError(f"{folder} cannot be written to: {error}") from None

    def check(
        self, name: str, passed: bool | None, *, measured: str, wanted: str, advice: str = ""
    ) -> None:
        """Add a check and print it; `passed` is None for what cannot be measured here, and why.

        `advice` says what to do, unless it passed.
        """
        status = {True: "pass", False: "fail", None: "not_measured"}[passed]
        check = {"name": name, "status": status, "measured": measured, "wanted": wanted}
        self.checks.append({**check, "advice": "" if passed else advice})
        mark = {"pass": "ok  ", "fail": "FAIL", "not_measured": "n/a "}[status]
        print(f"{mark} {name}: {measured} (wanted: {wanted})", flush=True)
        if not passed and advice:
            print(f"     {advice}", flush=True)

    def advise(self, text: str) -> None:
        """Add something worth trying, whatever passed, and print it."""
        self.advice.append(text)
        print(f"  -> {text}", flush=True)

    @property
    def status(self) -> str:
        """The worst of its checks."""
        found = {check["status"] for check in self.checks}
        return next((status for status in STATUSES if status in found), "not_measured")

    def close(self) -> int:
        """Write workflow/<stage>.json; 0 unless a check failed."""
        path = stage_file(self.config.directory, self.name)
        content = {
            "stage": self.name,
            "status": self.status,
            "checks": self.checks,
            "advice": self.advice,
            "figures": finite(self.figures),
            "settings": to_json(self.config),
            "code": code_digest(),
            "machine": machine(self.config.device) | {"load": round(os.getloadavg()[0], 1)},
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
            "seconds": round(time.perf_counter() - self.started, 2),
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_json(path, content)
        print(f"{self.name}: {self.status.replace('_', ' ')} ({path})", flush=True)
        return int(self.status == "fail")


def finite(value: Any) -> Any:
    """The same for JSON, which has no word for what is not finite: null."""
    if isinstance(value, dict):
        return {key: finite(it) for key, it in value.items()}
    if isinstance(value, list | tuple):
        return [finite(it) for it in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def stage_file(run_dir: Path, name: str) -> Path:
    """Where a stage writes what it measured."""
    return run_dir / "workflow" / f"{name}.json"


def read_stage(run_dir: Path, name: str) -> dict[str, Any] | None:
    """What a stage measured, None if it has not; UserError for a file that is not of a stage."""
    path = stage_file(run_dir, name)
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text("utf-8"))
        problem = _problem(content, name)
    except (OSError, ValueError) as error:
        problem = str(error)
    if problem:
        raise UserError(
            f"{path} is damaged ({problem}): measure again with `{command(name, run_dir)}`"
        )
    return content


def need_stage(run_dir: Path, name: str, what_for: str) -> dict[str, Any]:
    """What an earlier stage measured; UserError, with the command to run, if it has not."""
    if content := read_stage(run_dir, name):
        return content
    raise UserError(f"{what_for} needs what {name} measures: run `{command(name, run_dir)}` first")


def is_current(content: dict[str, Any], config: Config) -> bool:
    """Whether it was measured with these settings, this code and this torch, on such a machine."""
    here = machine(config.device)
    return (
        content["code"] == code_digest()
        and all(content["machine"].get(key) == here[key] for key in ("device", "gpus", "cpu"))
        and content["versions"]["torch"] == str(torch.__version__)
        and _that_matter(content["settings"]) == _that_matter(to_json(config))
    )


def command(name: str, run_dir: Path) -> str:
    """What to type to run a stage, or another command, for this run directory."""
    plain = Path("runs") / run_dir.name == run_dir
    where = f"--name {run_dir.name}" if plain else f"--run-dir {run_dir}"
    return f"{PROGRAM} {name}" + ("" if where == "--name default" else f" {where}")


@functools.cache
def code_digest() -> str:
    """sha256 over the Python files of this package: another model is another measurement."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def machine(device: str) -> dict[str, Any]:
    """What it was measured on."""
    return {
        "device": device_name(device),
        "gpus": torch.cuda.device_count(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "platform": platform.platform(),
    }


def _that_matter(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without those that change no measurement."""
    left_out = {"name", "run_dir", "fresh", "init_from", "init_strict", "track", "tracker"}
    kept = {name: value for name, value in settings.items() if name not in left_out}
    of_workflow = {k: v for k, v in kept["workflow"].items() if k not in ("go_on", "again")}
    return {**kept, "workflow": of_workflow}


def _problem(content: Any, name: str) -> str | None:
    """What keeps it from being what a stage of this name wrote."""
    kinds = {"checks": list, "advice": list, "figures": dict, "settings": dict, "code": str}
    kinds |= {"machine": dict, "versions": dict, "seconds": (int, float), "measured_at": str}
    if not isinstance(content, dict) or content.get("stage") != name:
        return f"it is not of the stage {name}"
    if odd := [key for key, kind in kinds.items() if not isinstance(content.get(key), kind)]:
        return f"{odd[0]} is missing or of another kind"
    if not isinstance(content["settings"].get("workflow"), dict):
        return "its settings are not whole"
    if "torch" not in content["versions"]:
        return "its versions are not whole"
    for check in content["checks"]:
        if not isinstance(check, dict) or not set(check) >= CHECK:
            return "a check is not whole"
        if check["status"] not in STATUSES:
            return f"a check has the status {check['status']!r}"
    found = {check["status"] for check in content["checks"]}
    worst = next((status for status in STATUSES if status in found), "not_measured")
    if content.get("status") != worst:
        return f"its status is {content.get('status')!r}, its checks say {worst}"
    return None
