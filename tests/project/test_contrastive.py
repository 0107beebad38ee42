"""Losses that compare all samples of a batch: the recipe of docs/guides/model.md."""

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT, bake, drill, recipe

OWN = ROOT / "tests/project/own/contrastive"


def test_the_same_losses_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Under DDP and FSDP, on ranks with different numbers of samples; exact after a resume."""
    sources: dict[str, Path] = {}
    for parallelism in ("ddp", "fsdp"):
        name = f"contrastive_{parallelism}"
        package = bake(tmp_path / name, parallelism=parallelism, package_name=name) / "src" / name
        shutil.copytree(OWN, package, dirs_exist_ok=True)
        with open(package / "model.py", "a") as file:
            file.write(f"\n\n{recipe('python', 'gather_with_gradients')}")
        shutil.copy(ROOT / "templates/task/language_model/optim.py", package)
        for other in ("infer.py", "callbacks.py"):
            (package / other).write_text("def callbacks(config, run_dir):\n    return ()\n")
        sources[name] = package.parent
    jobs = [(ranks, str(tmp_path), *sources) for ranks in (0, 2, 4)]
    drill("contrastive.py", *jobs, sources=sources)
    one, two, four = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (1, 2, 4))
    for name in sources:
        assert one[name]["loss"][-1] < one[name]["loss"][0]
        for many in (two, four):
            for figure in ("loss", "validation"):
                assert len(many[name][figure]) == {"loss": 6, "validation": 2}[figure]
                assert many[name][figure] == pytest.approx(one[name][figure], rel=1e-6)
