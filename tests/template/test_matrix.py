"""A few combinations of answers, as `make matrix` tries all of them."""

import itertools
import json
import math
import sys
from typing import Any

import pytest

from scripts import matrix
from tests.conftest import ROOT, copy_template, run

QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))


BREAKS = {
    "breaks the import": 'raise RuntimeError("breaks the import")',
    "breaks the step": 'def compute_loss(model, batch): raise RuntimeError("breaks the step")',
}
TASKS = dict(zip(QUESTIONS["task"], itertools.cycle(BREAKS), strict=False))
TWICE = """
import json, sys
from scripts import matrix
print([matrix.main(arguments) for arguments in json.loads(sys.argv[1])])
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of the bounded matrix, and of a part of it with a template that breaks every task.

    One process tries both, since it takes long to import what all answers need.
    """
    folder = tmp_path_factory.mktemp("matrix")
    template = copy_template(folder / "template")
    for task, problem in TASKS.items():
        with (template / f"templates/task/{task}/model.py").open("a", encoding="utf-8") as file:
            file.write(f"\n\n{BREAKS[problem]}\n")
    broken = ["--template", str(template), "--answers", "parallelism=single"]
    outs = [folder / "sound", folder / "broken"]
    each = [
        ["--bounded", "--out", str(out), *more]
        for out, more in zip(outs, ([], broken), strict=True)
    ]
    output = run([sys.executable, "-c", TWICE, json.dumps(each)], timeout=1500)
    assert output.splitlines()[-1] == "[0, 1]", output
    return [json.loads((out / "matrix.json").read_text("utf-8")) for out in outs]


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


def test_a_few_combinations_import_and_train(results: list[dict[str, Any]]) -> None:
    assert results[0]["failures"] == [] and results[0]["combinations"] == 6


def test_a_combination_that_breaks_is_named(results: list[dict[str, Any]]) -> None:
    failures = results[1]["failures"]
    problems = {words["answers"].split()[0]: words["problem"] for words in failures}
    for task, problem in TASKS.items():
        assert problem in problems[f"task={task}"]
