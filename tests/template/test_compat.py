"""What a render relies on besides public names of torch, and besides Linux."""

import ast
import ctypes
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import compat
from tests.conftest import ROOT, Project, bake
from tests.template.test_render import FULLEST, PACKAGE

NOT_TORCHS = {"_asdict", "_current_frames", "_exit", "_fields"}  # documented ones of Python
NOT_TORCHS |= {"_get_session", "_retry_connection"}  # of aiobotocore, for an object store
HOLDERS = {"_MultiProcessingDataLoaderIter"}  # not named in a render, as what has the name


def private_names(package: Path) -> set[str]:
    """Private names that a package uses and does not define itself."""
    used, defined = set(), set()
    for path in package.rglob("*.py"):
        tree, torchs = ast.parse(path.read_text("utf-8")), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = {alias.name for alias in node.names}
                torchs |= names if str(node.module).startswith("torch") else set()
                used |= {*str(node.module).split("."), *names}
            elif isinstance(node, ast.Import):
                used |= {word for alias in node.names for word in alias.name.split(".")}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                defined.add(node.name)
            elif isinstance(node, ast.Attribute):
                own = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
                (defined if own else used).add(node.attr)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                used |= {a.value for a in node.args[1:2] if isinstance(a, ast.Constant)}
        for node in ast.walk(tree):  # what is overridden in a class of torch's
            if isinstance(node, ast.ClassDef) and torchs & {ast.unparse(b) for b in node.bases}:
                inside = list(ast.walk(node))
                theirs = {item.name for item in inside if isinstance(item, ast.FunctionDef)}
                theirs |= {item.attr for item in inside if isinstance(item, ast.Attribute)}
                used |= theirs
                defined -= theirs
    return {n for n in used if n[0] == "_" and n[:2] != "__" and n not in defined | NOT_TORCHS}


def test_each_private_name_that_a_render_uses_is_in_the_list(tmp_path: Path) -> None:
    """`make compat` looks them up in other releases."""
    used = set()
    for number, answers in enumerate(({}, FULLEST, {"checkpoint": "torch_save"})):
        used |= private_names(bake(tmp_path / str(number), **answers) / PACKAGE)
    listed = {word for name in compat.PRIVATE for word in name.replace("|", ".").split(".")}
    assert used == {word for word in listed if word[0] == "_"} - HOLDERS


def test_a_name_that_is_gone_is_found() -> None:
    assert compat.missing() == []
    gone = ("torch._gone", "torch.nn.Module._gone", "torch._gone.utils|torch.gone", "nothing.a")
    assert compat.missing((*gone, "torch.nn.Module._gone|torch._foreach_norm")) == list(gone)


def test_the_table_holds_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the interpreter that runs this test, with pip and pytest replaced."""
    told: list[list[str]] = []

    def run(command: list[str], *rest: Any, **options: Any) -> str:
        told.append(command)
        if "torch.__version__" in command[-1]:
            return "2.13.0+cpu\n"
        quoted = "RankError: 8c71d695 failed\n"  # by a warning
        return "[]\n" if command[-1] == "--names" else f"{quoted}3 passed, 1 skipped\n"

    monkeypatch.setattr(compat, "run", run)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    out = tmp_path / "compat.json"
    options = ["--python", version, "--torch", "2.13.0", "--out", str(out)]
    assert compat.main([*options, "--build", str(tmp_path)]) == 0
    assert any("torch==2.13.0" in command for command in told)
    (found,) = json.loads(out.read_text("utf-8")).values()
    assert found["summary"] == "ddp, dcp_async: 3 passed; fsdp, dcp: 3 passed"
    assert compat.summary({"ddp": {"passed": 1, "failed": 2}}, ["torch._gone"]) == (
        "ddp: 1 passed, 2 failed; lacks torch._gone"
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with Project.imported(tmp_path_factory.mktemp("compat"), "elsewhere") as project:
        yield project


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what only Linux has: /proc, /sys, its system calls, directories that can be synced."""
    opened, fsync = io.open, os.fsync

    def without_proc(file: Any, *rest: Any, **options: Any) -> Any:
        # psutil has another implementation where there is no /proc: here it may read it.
        caller = sys._getframe(1).f_globals["__name__"]
        if str(file).startswith(("/proc", "/sys")) and not caller.startswith("psutil"):
            raise FileNotFoundError(errno.ENOENT, "hidden", str(file))
        return opened(file, *rest, **options)

    def fsync_files(descriptor: int) -> None:
        if os.path.isdir(f"/dev/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(io, "open", without_proc)
    monkeypatch.setattr("builtins.open", without_proc)
    monkeypatch.setattr(os, "fsync", fsync_files)
    monkeypatch.delattr(os, "O_DIRECTORY")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("a system call of Linux"))


def test_without_proc_and_cgroups_training_goes_on(project: Project, hidden: None) -> None:
    hardware = project.module("run.hardware")
    assert project.module("workflow.processes").free_host_memory() > 0
    assert hardware.usable_cores() == os.cpu_count()
    options = ("--train.steps", "6", "--checkpoint.every", "3", "--name", "hidden")
    project("train", *project.settings, *options)
    project("verify", "--name", "hidden")
    found = hardware.where_measured(torch.device("cpu"))["machine"]
    assert found["cores"] == os.cpu_count() and found["cpu"]
    project.module("workflow.processes").run_module("this", seconds=60)


def test_without_proc_a_launcher_is_known_by_its_number(
    project: Project, hidden: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    launcher = project.module("distributed").launcher()
    assert launcher.startswith(f"started by {os.getppid()} ()")


ORPHAN = """
import os, sys, time
from pathlib import Path
from elsewhere.distributed import Group
from elsewhere.distributed.watchdog import Watchdog
from elsewhere.distributed.world import die_with_the_launcher
sys.platform = "darwin"
if os.fork():
    while not Path("watching").exists():
        time.sleep(0.05)
    os._exit(0)  # as a launcher that is killed
die_with_the_launcher()
with Watchdog(Path("run"), Group()):
    Path("watching").write_text(str(os.getpid()))
    time.sleep(600)
"""


def test_without_prctl_a_rank_ends_when_its_launcher_is_killed(
    project: Project, tmp_path: Path
) -> None:
    """The watchdog looks once a second."""
    environment = {**os.environ, "PYTHONPATH": str(project.folder / "src")}
    command = [sys.executable, "-c", ORPHAN]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)
    rank = int((tmp_path / "watching").read_text())
    deadline = time.monotonic() + 60
    while runs(rank) and time.monotonic() < deadline:
        time.sleep(0.1)
    alive = runs(rank)
    if alive:
        os.kill(rank, signal.SIGKILL)
    assert not alive


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except FileNotFoundError:
        return False


def test_its_readme_has_the_table_of_versions() -> None:
    results = json.loads(compat.RESULT.read_text("utf-8"))
    assert all(result["passed"] for result in results.values())
    readme = (ROOT / "docs/evidence/platforms.md").read_text("utf-8")
    for key, result in results.items():
        version, torch = key.split()
        assert f"Python {version}" in readme and f"\n| {torch} |" in readme
        assert result["summary"] in readme
