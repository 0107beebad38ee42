"""Models and data of one's own go in by editing model.py and data.py alone."""

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT, bake, drill, recipe

OWN = ROOT / "tests/project/own"
MODELS = {
    "torchvision": "image_classifier",
    "hugging_face": "language_model",
    "nanogpt": "language_model",
}


def test_they_train_compile_and_resume_in_every_parallelism(tmp_path: Path) -> None:
    """On one process and on two: names unchanged, resumed to the bit, the same losses."""
    sources: dict[str, Path] = {}
    for model, task in MODELS.items():
        for parallelism in ("single", "ddp", "fsdp"):
            name = f"{model}_{parallelism}"
            answers = {"task": task, "parallelism": parallelism, "package_name": name}
            answers["checkpoint"] = "torch_save" if parallelism == "single" else "dcp_async"
            project = bake(tmp_path / name, **answers)
            shutil.copytree(OWN / model, project / "src" / name, dirs_exist_ok=True)
            if model == "nanogpt":  # with two optimizers
                with open(project / "src" / name / "optim.py", "a") as file:
                    file.write(f"\n\n{recipe('python', 'class Several')}")
            sources[name] = project / "src"
    alone = [name for name in sources if name.endswith("_single")]
    many = [name for name in sources if not name.endswith("_single")]
    jobs = ((0, str(tmp_path), *alone), (2, str(tmp_path), *many))
    output = drill("own_models.py", *jobs, sources=sources)
    for ranks, packages in ((1, alone), (2, many)):
        assert f"{len(packages)} models trained on {ranks} ranks" in output
    one, two = (json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in (1, 2))
    for name, losses in two.items():
        if name.startswith("hugging_face"):  # no batch statistics and no dropout: they are equal
            assert losses == pytest.approx(one["hugging_face_single"], rel=1e-4)
    assert len(two) == 6
