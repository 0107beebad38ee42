"""A gate: what a stage has checked, what it measured, and whether that is good enough."""

import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..engine.rundir import write_json


@dataclass
class Stage:
    """A stage of the workflow under way; `close` writes its JSON and gives its exit code."""

    name: str
    run_dir: Path
    figures: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, str]] = field(default_factory=list)

    def check(
        self, name: str, passed: bool | None, *, measured: str, wanted: str, advice: str
    ) -> None:
        """Add a check and print it; `passed` is None for what cannot be measured here."""
        status = {True: "pass", False: "fail", None: "not_measured"}[passed]
        check = {"name": name, "status": status, "measured": measured, "wanted": wanted}
        self.checks.append({**check, "advice": "" if passed else advice})
        mark = {"pass": "ok  ", "fail": "FAIL", "not_measured": "n/a "}[status]
        print(f"{mark} {name}: {measured} (wanted: {wanted})")
        if not passed and advice:
            print(f"     {advice}")

    @property
    def status(self) -> str:
        """The worst of its checks: fail, then not_measured, then pass."""
        found = {check["status"] for check in self.checks}
        return next((s for s in ("fail", "not_measured") if s in found), "pass")

    def close(self) -> int:
        """Write workflow/<stage>.json; 0 unless a check failed."""
        path = self.run_dir / "workflow" / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "stage": self.name,
            "status": self.status,
            "checks": self.checks,
            "figures": self.figures,
            "machine": {"platform": platform.platform(), "torch": torch.__version__},
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_json(path, content)
        print(f"{self.name}: {self.status} ({path})")
        return int(self.status == "fail")
