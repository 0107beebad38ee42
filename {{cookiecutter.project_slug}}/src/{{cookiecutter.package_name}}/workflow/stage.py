"""Run a stage of the workflow: collect its checks, print them, and write them to a JSON file.

`workflow/<stage>.json` has the keys stage, status, checks, advice, figures, settings, code,
machine, versions, seconds and measured_at. A status is pass, fail or not_measured.
"""

import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ..config import Config
from ..device import pick_device
from ..files import open_to_write, to_json, write_json
from ..run.directory import lock_file, write_owner
from ..run.hardware import usable_cores, where_measured
from . import WorkflowConfig

# Each status and its printed form, from the worst status to the best.
STATUSES = {"fail": "FAIL", "not_measured": "n/a ", "pass": "ok  "}
PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class StageConfig(Config):
    """Settings of a training run, and of its measurement."""

    workflow: WorkflowConfig = field(default_factory=WorkflowConfig)


class Stage:
    """A running stage; `close` writes its JSON and returns its exit code."""

    def __init__(self, name: str, config: Any) -> None:
        self.name = name
        self.config = config
        self.started = time.perf_counter()
        # Count the cores now, since `setup` may later pin this process to the cores near its GPU.
        self.cores = usable_cores()
        # Measured values by name, for the JSON file.
        self.figures: dict[str, Any] = {}
        self.checks: list[dict[str, str]] = []
        self.advice: list[str] = []
        self.file = stage_file(config.directory, name)
        self.lock = lock_stage(config.directory, name)

    def check(
        self, name: str, passed: bool | None, *, measured: str, wanted: str, advice: str = ""
    ) -> None:
        """Add a check and print it.

        If the check is not possible, `passed` is None, and `measured` gives the reason. If the
        check passes, `advice` is dropped.
        """
        if passed is None:
            status = "not_measured"
        elif passed:
            status = "pass"
            advice = ""
        else:
            status = "fail"
        check = {
            "name": name,
            "status": status,
            "measured": measured,
            "wanted": wanted,
            "advice": advice,
        }
        self.checks.append(check)
        print(f"{STATUSES[status]} {name}: {measured} (wanted: {wanted})", flush=True)
        if advice:
            print(f"     {advice}", flush=True)

    @property
    def status(self) -> str:
        """The worst status of the checks; not_measured without checks."""
        statuses = {check["status"] for check in self.checks}
        for status in STATUSES:
            if status in statuses:
                return status
        return "not_measured"

    def close(self) -> int:
        """Write workflow/<stage>.json; return 1 if a check failed, else 0."""
        # JSON has no NaN or infinity; they become null.
        figures = json.loads(json.dumps(self.figures), parse_constant=null_of)
        facts = origin(self.config)
        # By now this process may be pinned, and then `origin` counts only some of the cores.
        facts["machine"]["cores"] = self.cores
        content = {
            "stage": self.name,
            "status": self.status,
            "checks": self.checks,
            "advice": self.advice,
            "figures": figures,
            **facts,
            "seconds": round(time.perf_counter() - self.started, 2),
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_json(self.file, content)
        self.lock.close()
        print(f"{self.name}: {self.status.replace('_', ' ')} ({self.file})", flush=True)
        return int(self.status == "fail")


def null_of(constant: str) -> None:
    """Return None, which becomes JSON's null, for "NaN", "Infinity" and "-Infinity"."""


def stage_file(run_dir: Path, name: str) -> Path:
    """Return the path of a stage's results."""
    return run_dir / "workflow" / f"{name}.json"


def lock_stage(run_dir: Path, name: str) -> TextIO:
    """Lock a stage of a run until the returned file is closed; UserError if it is locked."""
    file = stage_file(run_dir, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    # Mode "a+" does not truncate the file. If another process holds the lock, the file has its
    # name, which the error of `lock_file` shows.
    lock = open_to_write(file.with_name(f".{name}.lock"), "a+", errors="replace")
    lock_file(lock, file)
    write_owner(lock)
    return lock


def origin(config: Config) -> dict[str, Any]:
    """Return the settings, code, machine and versions that a measurement depends on."""
    package = Path(__file__).parents[1]
    files: dict[str, bytes] = {}
    for path in sorted(package.rglob("*.py")):
        files[str(path.relative_to(package))] = path.read_bytes()
    code_hash = hashlib.sha256(repr(files).encode()).hexdigest()
    machine_and_versions = where_measured(pick_device(config.device))
    return {"settings": to_json(config), "code": code_hash, **machine_and_versions}
