"""A few combinations of answers, as `make matrix` tries all of them."""

import json
import math
import subprocess
import sys
from pathlib import Path

from scripts import matrix
from tests.conftest import ROOT, copy_template

QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))


def run_matrix(out: Path, *options: str) -> tuple[int, dict]:
    command = [sys.executable, "-m", "scripts.matrix", "--bounded", "--out", str(out), *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert (out / "matrix.json").exists(), ended.stdout + ended.stderr
    return ended.returncode, json.loads((out / "matrix.json").read_text("utf-8"))


def test_each_answer_occurs_in_the_bounded_matrix() -> None:
    few = matrix.combinations(ROOT, True, {})
    for question in matrix.QUESTIONS:
        assert {answers[question] for answers in few} == set(QUESTIONS[question])
    choices = {key: value for key, value in QUESTIONS.items() if isinstance(value, list)}
    assert set(choices) - set(matrix.QUESTIONS) == {
        "license",
        "cluster",
        "_extensions",
    }
    every = matrix.combinations(ROOT, False, {})
    assert len(every) == math.prod(len(QUESTIONS[question]) for question in matrix.QUESTIONS)


def test_a_few_combinations_import_and_train(tmp_path: Path) -> None:
    code, result = run_matrix(tmp_path)
    assert (code, result["failures"]) == (0, [])
    assert result["combinations"] == 6


def test_a_combination_that_breaks_is_named(tmp_path: Path) -> None:
    template = copy_template(tmp_path / "template")
    breaks = {
        "language_model": 'raise RuntimeError("breaks the import")',
        "image_classifier": 'def compute_loss(model, batch): raise RuntimeError("breaks the step")',
    }
    for task, code in breaks.items():
        with (template / f"templates/task/{task}/model.py").open("a", encoding="utf-8") as file:
            file.write(f"\n\n{code}\n")
    options = ("--template", str(template), "--answers", "parallelism=single")
    code, result = run_matrix(tmp_path, *options)
    assert code == 1
    problems = {words["answers"].split()[0]: words["problem"] for words in result["failures"]}
    assert "breaks the import" in problems["task=language_model"]
    assert "breaks the step" in problems["task=image_classifier"]
