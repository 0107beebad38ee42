"""A trained model as a program that runs without the project: `export --to model.pt2`."""

import importlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrizations as of_torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.conftest import ROOT, Project, project_fixture, recipe
from tests.project.drills.twins import Quantized

OWN = ROOT / "tests/project/own"
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


def use(folder: Path, inputs: list[Any]) -> list[Tensor]:
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
    # What the model can take: images of any size, and as many tokens as its table has rows.
    sizes = "any, 1, any, any" if task == "image" else f"any, up to {config.data.context}"
    name = "images" if task == "image" else "tokens"
    assert capsys.readouterr().out.endswith(
        f"{to}: the model as a program; its inputs: {name} [{sizes}]\n"
    )
    assert "exists and is not overwritten" in project.refuses(*words)
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
    run, load = tmp_path / "run", importlib.import_module(text.name).load_trained
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


def with_norms(model: Any) -> None:
    """Let weights be computed from others."""
    of_torch.weight_norm(model.blocks[0].up)
    of_torch.spectral_norm(model.blocks[1].down)


def with_int8(model: Any) -> None:
    """Add a layer of frozen int8 weights with a trained adapter."""
    model.norm = nn.Sequential(model.norm, Quantized(32))


@pytest.mark.parametrize("change", [with_norms, with_int8])
def test_computed_and_quantized_weights_resume_and_are_exported(
    text: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    """To the same bits; with the dtypes of the model, and as a program of equal outputs."""
    build_model = text.module("model").build_model

    def build_changed(*given: Any) -> nn.Module:
        model = build_model(*given)
        change(model)
        return model

    for module in ("model", "train"):
        monkeypatch.setattr(text.module(module), "build_model", build_changed)
    # A constant rate, since the schedule of half a run is another one.
    constant = {"optim__warmup_steps": 0, "optim__final_fraction": 1.0}
    for run, steps in (("whole", 4), ("halves", 2), ("halves", 4)):
        config = text.config(run_dir=tmp_path / run, train__steps=steps, **constant)
        text.module("train").run(config)
    whole, halves = (text.tensors(tmp_path / run) for run in ("whole", "halves"))
    assert whole.keys() == halves.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, halves[name]), name

    for file in ("model.safetensors", "model.pt2"):
        text("export", "--run-dir", str(tmp_path / "whole"), "--to", str(tmp_path / file))
    model, _, _ = sys.modules[text.name].load_trained(tmp_path / "whole", "cpu")
    weights, exported = model.state_dict(), load_file(tmp_path / "model.safetensors")
    assert exported.keys() == weights.keys()
    for name, tensor in exported.items():
        assert tensor.dtype == weights[name].dtype and torch.equal(tensor, weights[name]), name
    if change is with_int8:
        assert exported["norm.1.weight"].dtype == torch.int8
        assert exported["norm.1.scale"].dtype == torch.float16
    else:
        assert any("parametrizations" in name for name in exported)
    inputs = torch.randint(256, (3, 9))
    program = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        torch.testing.assert_close(program(inputs), model(inputs), atol=1e-5, rtol=1e-5)


class Branches(nn.Module):
    """Looks at a value."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return x if x.sum() > 0 else -x


class Pairs(nn.Module):
    """Takes two samples, and no others."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(2, -1)


class ManySamples(nn.Module):
    """Computes something else for more than four samples."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if x.size(0) > 4 else x


@dataclass
class Fields:
    """An output with names."""

    logits: Tensor
    cache: object = None


class LikeTransformers(nn.Module):
    """Every argument has a default, and the output is a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool = True,
    ) -> Fields:
        assert input_ids is not None and attention_mask is not None and not use_cache
        assert labels is None or labels.shape == (2,)
        return Fields(self.head(input_ids) * attention_mask[:, None])


class Wrapper(nn.Module):
    """Passes on whatever it is given, as peft's wrapper of any model does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class OfAList(nn.Module):
    """Takes a list of tensors."""

    def forward(self, xs: list[Tensor]) -> Tensor:
        return torch.stack(xs, 1).sum(1)


class MaskedAfterTargets(nn.Module):
    """An optional target stands between the inputs, as in some models of transformers."""

    def forward(
        self, x: Tensor, labels: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Use the mask."""
        assert mask is not None and labels is None
        return x * mask


def test_what_follows_a_target_is_passed_by_name(text: Project) -> None:
    sort_arguments = text.module("program").sort_arguments
    x, labels, mask = torch.randn(2), torch.ones(2), torch.zeros(2)
    call = sort_arguments(MaskedAfterTargets(), (x, labels, mask), {})
    assert len(call.arguments) == 1 and list(call.by_name) == ["mask"]
    torch.testing.assert_close(MaskedAfterTargets()(*call.arguments, **call.by_name), x * mask)


class OfArguments(nn.Module):
    """Like peft's wrappers, it names no argument."""

    def forward(self, *args: Any, scale: int = 1, **kwargs: Any) -> Tensor:
        """Use what it was given."""
        bias, x, other = args
        assert bias is None and scale == 2 and not kwargs
        return scale * (x - other)


class MaskFirst(nn.Module):
    """Takes a mask that all samples share."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Use the mask."""
        return x * mask


def test_arguments_without_a_name_keep_their_positions(text: Project) -> None:
    program = text.module("program")
    model, x = OfArguments(), torch.randn(2, 3)
    call = program.find_call(model, lambda: model(None, x, x + 1, scale=2))
    assert len(call.arguments) == 3 and call.by_name == {} and call.fixed == {"scale": 2}
    made = program.make_program(Path("model.pt2"), model, call).module()
    torch.testing.assert_close(made(None, x[:1], x[:1]), torch.zeros(1, 3))


def test_a_first_dimension_of_one_is_no_batch(text: Project) -> None:
    """As of a mask that all samples share."""
    program = text.module("program")
    model, x, mask = MaskFirst(), torch.randn(2, 4, 4), torch.ones(1, 4, 4)
    call = program.find_call(model, lambda: model(x, mask))
    made = program.make_program(Path("model.pt2"), model, call).module()
    several = torch.randn(5, 4, 4)
    torch.testing.assert_close(made(several, mask), several)


def test_a_program_takes_what_the_loss_gives_the_model(text: Project) -> None:
    """By name and by position, in lists; without the targets, with its settings fixed."""
    program = text.module("program")
    x, mask = torch.randn(2, 3), torch.ones(2)
    by_name = {"input_ids": x, "attention_mask": mask, "labels": mask, "use_cache": False}
    like, of_a_list = LikeTransformers(), OfAList()
    wrapper = Wrapper(like)
    one_sample = {"input_ids": x[:1], "attention_mask": mask[:1]}
    for model, use, more, output in (
        (like, lambda: like(**by_name), one_sample, None),
        (wrapper, lambda: wrapper(**by_name), one_sample, None),
        (of_a_list, lambda: of_a_list([x, x]), ([x[:1], x[:1]],), 2 * x[:1]),
    ):
        call = program.find_call(model, use)
        made = program.make_program(Path("model.pt2"), model, call).module()
        if isinstance(more, dict):
            found = made(**more)
            assert list(found) == ["logits"]
            torch.testing.assert_close(found["logits"], like.head(x[:1]))
        else:
            torch.testing.assert_close(made(*more), output)


def test_what_has_no_program_says_why(text: Project, tmp_path: Path) -> None:
    """In one line, with torch's reason."""
    program = text.module("program")
    x, target = torch.ones(2, 3), tmp_path / "model.pt2"
    branches, pairs = Branches(), Pairs()
    for model, use, reason in (
        (branches, lambda: branches(x, x), "data-dependent"),
        (pairs, lambda: pairs(x), "cannot make a program"),
        (branches, lambda: None, "does not call the model"),
    ):
        with pytest.raises(text.module("errors").UserError, match=reason) as refused:
            program.make_program(target, model, program.find_call(model, use))
        assert "\n" not in str(refused.value)
    many = ManySamples()
    call = program.find_call(many, lambda: many(x))
    made = program.make_program(target, many, call)
    five = program.find_call(many, lambda: many(torch.ones(5, 3)))
    with pytest.raises(text.module("errors").UserError, match="wrong for 5") as refused:
        program.check_program(target, made, many, five, "wrong for 5")
    assert "\n" not in str(refused.value)


BRANCHES = {
    # On a value: torch cannot export it, and the line is named.
    "value": ("tokens.sum() > 10", ("(model.py, line ", "if tokens.sum() > 10:")),
    # On the size of the batch: exported for two samples, wrong for the four of the training.
    "size": ("tokens.size(0) > 3", ("the program was made with 2 samples and is wrong for 4",)),
}


@pytest.mark.parametrize("kind", BRANCHES)
def test_a_branch_in_ones_own_model_is_refused(kind: str, tmp_path: Path) -> None:
    """By the command, in one line; nothing is written."""
    condition, said = BRANCHES[kind]
    with Project.imported(tmp_path, f"branch_on_{kind}", **ANSWERS) as project:
        model = project.folder / "src" / project.name / "model.py"
        code = model.read_text()
        forward = "        x = self.embedding(tokens)\n"
        assert code.count(forward) == 1
        branch = f"        if {condition}:\n            x = x * 2\n"
        model.write_text(code.replace(forward, forward + branch))
        config = project.config(run_dir=tmp_path / "run", train__steps=2)
        assert config.train.micro_batch_size == 4
        project.module("train").run(config)
        to = tmp_path / "model.pt2"
        line = project.refuses("export", "--run-dir", str(tmp_path / "run"), "--to", str(to))
        assert all(words in line for words in said), line
        assert "\n" not in line and not to.exists()


def test_a_model_of_a_list_of_images_has_a_program_for_one_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program's number of inputs is fixed: it takes one image, of any size."""
    with Project.imported(tmp_path, "list_program", **ANSWERS) as project:
        package = project.folder / "src" / project.name
        shutil.copytree(OWN / "detection", package, dirs_exist_ok=True)
        words = ("--preset", "tiny", "--device", "cpu", "--train.steps", "3")
        project("train", *words, "--run-dir", str(tmp_path / "run"))
        to = tmp_path / "model.pt2"
        project("export", "--run-dir", str(tmp_path / "run"), "--to", str(to))
        said = "images_0 [1, any, any] (one sample in each call)"
        assert capsys.readouterr().out.endswith(f"its inputs: {said}\n")
        model, _, _ = sys.modules["list_program"].load_trained(tmp_path / "run", "cpu")
    given = [[torch.rand(1, 5, 9)], [torch.rand(1, 31, 7)], [torch.rand(1, 12, 12)]]
    for images, output in zip(given, use(tmp_path, given), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(output, model(images), atol=1e-5, rtol=1e-5)


def test_a_program_for_one_image_that_is_wrong_for_another_is_refused(tmp_path: Path) -> None:
    """A branch on the height of an image, in one line; nothing is written."""
    with Project.imported(tmp_path, "list_branch", **ANSWERS) as project:
        package = project.folder / "src" / project.name
        shutil.copytree(OWN / "detection", package, dirs_exist_ok=True)
        model = package / "model.py"
        code = model.read_text()
        line = "        features = torch.stack("
        assert code.count(line) == 1
        branch = (
            "        images = [image[:, :8] if image.shape[1] > 8 else image for image in images]\n"
        )
        model.write_text(code.replace(line, branch + line))
        words = ("--preset", "tiny", "--device", "cpu", "--train.steps", "3")
        project("train", *words, "--run-dir", str(tmp_path / "run"))
        to = tmp_path / "model.pt2"
        refusal = project.refuses("export", "--run-dir", str(tmp_path / "run"), "--to", str(to))
        assert "made with sample 0 and is wrong for sample" in refusal
        assert "\n" not in refusal and not to.exists()
