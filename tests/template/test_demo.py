"""`make demo`, from a copy of the repository, at the size of the tiny preset."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, copy_template


def demo(copy: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(copy / "scripts/demo.sh"), str(Path(sys.executable).parent), *options],
        capture_output=True,
        text=True,
        timeout=800,
    )


def test_the_demo_trains_samples_and_goes_on(tmp_path: Path) -> None:
    copy_template(tmp_path)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/demo.sh", tmp_path / "scripts")
    tiny = ("--preset", "tiny", "--device", "cpu")
    first = demo(tmp_path, *tiny)
    assert first.returncode == 0, first.stdout + first.stderr
    for text in ("infer --prompt", "good", "What to do next", "launch.sh"):
        assert text in first.stdout
    for text in ("finished at step 20", "validation bits per byte", "tokens/s"):
        assert text in first.stderr
    longer = demo(tmp_path, *tiny, "--train.steps", "25")
    assert "resuming from" in longer.stderr
    assert "finished at step 25" in longer.stderr


def test_make_knows_its_targets() -> None:
    """The commands of the README, as far as they can be checked without installing anew."""
    readme = (ROOT / "README.md").read_text("utf-8")
    for target in ("demo", "test"):
        assert f"make {target} " in readme
        command = ["make", "--dry-run", "--always-make", target]
        outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert outcome.returncode == 0, outcome.stderr
        assert "-c constraints.txt" in outcome.stdout
