"""The tests that a render carries notice faults, and take no model or data of one's own for one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, bake, drill

OWN = ROOT / "tests/project/own"
FEW = (
    "tests/test_step.py",
    "tests/test_data.py",
    "tests/test_model.py",
    "tests/test_validation.py",
)
# By folder: the task of the render that they are put into.
MODELS = {
    "encoder": "language_model",
    "hugging_face": "language_model",
    "nanogpt": "language_model",
    "recommender": "image_classifier",
    "torchvision": "image_classifier",
}
# By name: the task, the file, the line, and what an owner may make of it.
FAULTS = {
    "validation_in_training_mode": (
        "language_model",
        "validation.py",
        "with evaluation_mode(state.module):",
        "if True:",
    ),
    "validation_without_its_last_batch": (
        "language_model",
        "validation.py",
        "range(0, len(chosen), ",
        "range(0, len(chosen) - 4, ",
    ),
    "validation_of_means": (
        "language_model",
        "validation.py",
        "loss_vector(loss) * micro_batch.weight",
        "loss_vector(loss) / loss.count",
    ),
    "a_decay_the_wrong_way": ("language_model", "ema.py", "1 - group[", "group["),
    "averages_that_stay": (
        "language_model",
        "ema.py",
        "                averaged = weight.clone()\n                weight.copy_(average)\n",
        "                averaged = weight.clone()\n",
    ),
    "gradients_that_stay": (
        "image_classifier",
        "train.py",
        "state.optimizer.zero_grad(set_to_none=True)",
        "",
    ),
    "a_mask_shifted_by_one": (
        "language_model",
        "model.py",
        "is_causal=True",
        "attn_mask=torch.ones(2 * [q.shape[2]], dtype=torch.bool).tril(1)",
    ),
    "a_residual_lost": ("image_classifier", "model.py", "return x + self", "return self"),
    "training_data_validated": (
        "image_classifier",
        "data.py",
        "Images(images[~held_out], labels[~held_out])",
        "Images(images, labels)",
    ),
    "labels_of_other_images": (
        "image_classifier",
        "data.py",
        '"labels": self.labels[ids]',
        '"labels": self.labels.roll(1)[ids]',
    ),
}
ORDINARY = '''

import torch


class Part(nn.Module):
    """Attention, as a block has it."""

    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(3, 3)


class OfOnesOwn(nn.Module):
    """What most models have: a buffer, and blocks with parts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("class_weights", torch.ones(3))
        self.blocks = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x):
        x = self.blocks[0].attention(x) * self.class_weights[:3]
        for block in self.blocks:
            x = x + block.attention(x) @ self.class_weights
        return x


def own_loss(model: nn.Module, x: Tensor) -> Tensor:
    x = model.encode(x) * model.scale + model.blocks[0].attention(x)
    for block in model.blocks:
        x = block(x)
    return F.cross_entropy(x, x, weight=model.class_weights)
'''


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_ones_own_raises_no_alarm(tmp_path: Path, name: str) -> None:
    """Its own tests pass, or are skipped with a reason."""
    project = bake(tmp_path, task=MODELS[name], package_name=f"alarm_{name}", tracker="none")
    shutil.copytree(OWN / name, project / f"src/alarm_{name}", dirs_exist_ok=True)
    output = drill(
        "own_tests.py",
        (0, str(project), 0, "tests", "--deselect", "tests/test_sampling.py"),
        sources={name: project / "src"},
    )
    assert " failed" not in output and " passed" in output


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(tmp_path: Path, name: str) -> None:
    task, file, right, wrong = FAULTS[name]
    project = bake(tmp_path, task=task, package_name="faulty", tracker="none")
    path = project / "src/faulty" / file
    text = path.read_text("utf-8")
    assert text.count(right) == 1, f"{file} has changed: state the fault anew"
    path.write_text(text.replace(right, wrong), "utf-8")
    words = (0, str(project), 1, "-x", *FEW)
    output = drill("own_tests.py", words, sources={name: path.parents[1]})
    assert "\n1 failed" in output


@pytest.mark.parametrize("task", ["language_model", "image_classifier"])
def test_each_gate_of_its_ci_passes(tmp_path: Path, task: str) -> None:
    """In its own folder, with ordinary PyTorch in model.py; test_life has the last one, pytest."""
    project = bake(tmp_path, task=task, package_name="gated")
    with open(project / "src/gated/model.py", "a", encoding="utf-8") as file:
        file.write(ORDINARY)
    steps = yaml.safe_load((project / ".github/workflows/ci.yml").read_text("utf-8"))
    commands = [step["run"] for step in steps["jobs"]["test"]["steps"] if "run" in step]
    gates = [command for command in commands if not command.startswith("pip ")]
    assert gates == ["ruff check .", "ruff format --check .", "basedpyright", "pytest"]
    for gate in gates[:-1]:
        words = [sys.executable, "-m", *gate.split()]
        if gate == "basedpyright":
            words += ["--pythonpath", sys.executable]
        ended = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0, ended.stdout + ended.stderr
