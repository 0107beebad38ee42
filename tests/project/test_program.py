"""A trained model as a program that runs without the project: `export --to model.pt2`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Project, project_fixture, recipe

ANSWERS = {"parallelism": "single", "checkpoint": "torch_save", "tracker": "none"}
text = project_fixture("text_program", **ANSWERS)
image = project_fixture("image_program", **ANSWERS, task="image_classifier")
tokens = project_fixture("token_program", **ANSWERS, text="tokenizer")

USE = """
import sys
import torch

{load}
assert not sys.modules.keys() & {{"text_program", "image_program", "token_program"}}
for number, inputs in enumerate(torch.load("inputs.pt")):
    torch.save(program(inputs), f"output_{{number}}.pt")
"""


def use(folder: Path, inputs: list[Tensor]) -> list[Tensor]:
    """The outputs of model.pt2 in a folder, in a process of its own, as the recipe loads it."""
    torch.save(inputs, folder / "inputs.pt")
    load = recipe("python", "torch.export.load").replace("outputs = program(inputs)", "")
    command = [sys.executable, "-c", USE.format(load=load)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"output_{number}.pt") for number in range(len(inputs))]


@pytest.mark.parametrize("task", ["text", "image", "tokens"])
def test_a_program_runs_without_the_package(
    task: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """At one sample and several, and at each kind of length from 1 to the context."""
    project: Project = request.getfixturevalue(task)
    changes: dict[str, Any] = {"data__path": None} if task == "image" else {}
    config = project.config(run_dir=tmp_path / "run", train__steps=5, **changes)
    project.module("train").run(config)
    to = tmp_path / "model.pt2"
    words = ("export", "--run-dir", str(tmp_path / "run"), "--to", str(to))
    project(*words)
    example = "images [2, 1, 8, 8]" if task == "image" else f"tokens [2, {config.data.context}]"
    assert capsys.readouterr().out.endswith(
        f"{to}: the model as a program; its input, by example: {example}\n"
    )
    assert "nothing is overwritten" in project.refuses(*words)
    if task == "image":
        given = [torch.rand(count, 1, 8, 8) for count in (1, 2, 5)]
    else:
        context = config.data.context
        sizes = [(1, 1), (3, 7), (2, context - 1), (1, context), (4, context)]
        given = [torch.randint(256, size) for size in sizes]
    model, _, _ = sys.modules[project.name].load_trained(tmp_path / "run", "cpu")
    for inputs, output in zip(given, use(tmp_path, given), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(output, model(inputs), atol=1e-5, rtol=1e-5)


def test_the_program_of_the_average_and_of_an_earlier_step(text: Project, tmp_path: Path) -> None:
    run, load = tmp_path / "run", sys.modules[text.name].load_trained
    changes = {"optim__ema": 0.9, "checkpoint__every": 2, "train__steps": 4}
    text.module("train").run(text.config(run_dir=run, **changes))
    inputs = torch.randint(256, (2, 9))
    outputs = []
    for step, weights in ((2, "last"), (2, "ema"), (4, "ema")):
        (tmp_path / "model.pt2").unlink(missing_ok=True)
        words = ("--to", str(tmp_path / "model.pt2"), "--weights", weights, "--step", str(step))
        text("export", "--run-dir", str(run), *words)
        outputs += use(tmp_path, [inputs])
        with torch.no_grad():
            wanted = load(run, "cpu", step, weights)[0](inputs)
        torch.testing.assert_close(outputs[-1], wanted, atol=1e-5, rtol=1e-5)
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])


def test_what_has_no_program_says_why(text: Project, tmp_path: Path) -> None:
    """In one line, with torch's reason; nothing is left of the file."""
    program = text.module("checkpoint.transfer").export_program

    class Branches(nn.Module):
        """Looks at a value."""

        def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
            return x if x.sum() > 0 else -x

    class Dictionary(nn.Module):
        """Takes no tensor."""

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return batch["x"]

    class Pairs(nn.Module):
        """Takes two samples, and no others."""

        def forward(self, x: Tensor) -> Tensor:
            return x.view(2, -1)

    x = torch.ones(2, 3)
    branches, dictionary, pairs = Branches(), Dictionary(), Pairs()
    for model, call, reason in (
        (branches, lambda: branches(x, x), "data-dependent"),
        (dictionary, lambda: dictionary({"x": x}), "cannot make a program"),
        (pairs, lambda: pairs(x), "cannot make a program"),
        (branches, lambda: None, "does not call the model"),
    ):
        with pytest.raises(text.module("errors").UserError, match=reason) as refused:
            program(tmp_path / "model.pt2", model, call)
        assert "\n" not in str(refused.value)
    linear = nn.Linear(3, 3)
    with pytest.raises(text.module("errors").UserError, match="cannot be written"):
        program(tmp_path / "no/model.pt2", linear, lambda: linear(x))
    assert not [*tmp_path.iterdir()]
