"""A render's own tests hold for what an owner does to model and data, or say why one does not."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import bake, drill

STREAM = '''

class Endless:
    """Samples one by one."""

    def __init__(self, dataset):
        self.dataset, self.place = dataset, 0

    def __iter__(self):
        while self.place < len(self.dataset):
            self.place += 1
            batch = self.dataset.__getitems__(np.array([self.place - 1]))
            yield {name: values[0] for name, values in batch.items()}
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


by_number = build_datasets


def build_datasets(config):
    """A stream to train on, the same one on each rank."""
    train, validation, spec = by_number(config)
    return Endless(train), validation, spec
'''
FROZEN = '''
    def train(self, mode: bool = True):
        """The frozen layer stays in evaluation."""
        super().train(mode)
        self.frozen.eval()
        return self


def build_model('''
ADDED = '        batch = {**batch, "key": torch.from_numpy(keys.astype(np.int64))}\n'
USED = '    assert not model.training or len(batch["key"]) == len(batch["labels"])\n'
# By name: the answers; what takes the place of what, in which file; how many tests are left out.
Edit = tuple[dict[str, Any], dict[str, list[tuple[str, str]]], int]
EDITS: dict[str, Edit] = {
    "noise_in_the_loss": (
        {},
        {
            "model.py": [
                (
                    '    unit = "byte"',
                    '    total = total * (1 + 0.01 * torch.randn(()))\n    unit = "byte"',
                )
            ]
        },
        1,
    ),
    "a_key_that_augment_adds": (
        {"task": "image_classifier"},
        {
            "data.py": [
                ("        if not self.max_shift:", ADDED + "        if not self.max_shift:")
            ],
            "model.py": [("    labels = batch", USED + "    labels = batch")],
        },
        0,
    ),
    "a_stream": ({"samples": "stream"}, {"data.py": [("", STREAM)]}, 2),
    "a_frozen_batch_norm": (
        {"task": "image_classifier"},
        {
            "model.py": [
                (
                    "        self.head = nn.Linear",
                    "        self.frozen = nn.BatchNorm2d(config.width).requires_grad_(False)\n"
                    "        self.head = nn.Linear",
                ),
                ("self.norm(x)", "self.norm(self.frozen(x))"),
                ("def build_model(", FROZEN.lstrip("\n")),
            ]
        },
        0,
    ),
}
TESTS = ("plain_one", "goes_on_exactly", "changes_no_name", "two_ranks_do", "matrices_decay")


@pytest.mark.parametrize("name", EDITS)
def test_own_tests_hold_after(tmp_path: Path, name: str) -> None:
    answers, edits, left_out = EDITS[name]
    project = bake(tmp_path, package_name=name, tracker="none", **answers)
    for file, changes in edits.items():
        path = project / "src" / name / file
        text = path.read_text("utf-8")
        for old, new in changes:
            assert old in text, f"{file} has changed: state the edit anew"
            text = text.replace(old, new, 1) if old else text + new
        path.write_text(text, "utf-8")
    words = (0, str(project), 0, "tests", "-k", " or ".join(TESTS))
    output = drill("own_tests.py", words, sources={name: project / "src"})
    assert f"{10 - left_out} passed" in output
    assert (f"{left_out} skipped" in output) == (left_out > 0)
